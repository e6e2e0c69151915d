"""Places below the roots that a job may write a checkpoint or an export to."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardckpt.commit.attempts import attempts as find_attempts
from shardckpt.commit.attempts import is_attempt_name
from shardckpt.commit.markers import protection
from shardckpt.commit.publish import RECORD
from shardckpt.errors import OptionError
from shardckpt.io.status import is_file
from shardckpt.io.store import Store
from shardckpt.runs import ended
from shardckpt.serve.roots import DEPTH
from shardckpt.text import shorten

if TYPE_CHECKING:
    from shardckpt.io.url import Location
    from shardckpt.serve.roots import Roots


def destination(roots: Roots, ident: str, *, checkpoint: bool = True) -> Location:
    """The place of an id that may be written, by a checkpoint or by an export.

    Raises:
        NotFoundError: it lies in no root.
        OptionError: it is a root, lies inside a checkpoint or in a run that has ended, or holds a
            pinned or tagged checkpoint; a new checkpoint would lie above others, or an export in a
            checkpoint.
    """
    ident = ident.strip("/")
    place = roots.locate(ident)
    parts = ident.split("/")
    if any(map(is_attempt_name, parts[1:])):
        raise OptionError(
            f"to={shorten(ident)}: a name in it is like a save's own directory, which is never "
            "listed; choose another."
        )
    if checkpoint and len(parts) > DEPTH:
        raise OptionError(
            f"to={shorten(ident)}: checkpoints below {DEPTH} names are never listed; choose a "
            "shorter place."
        )
    if len(parts) < 2:
        raise OptionError(
            f"to={shorten(ident)}: give a place below a root, as in {shorten(ident)}/NAME."
        )
    for n in range(1, len(parts)):
        above = "/".join(parts[:n])
        parent = roots.locate(above)
        if is_file(parent.local_path):
            raise OptionError(
                f"to={shorten(ident)}: {above} is a file; give a place outside of it."
            )
        if Store.open(parent).exists(RECORD):
            raise OptionError(
                f"to={shorten(ident)}: it lies in the checkpoint {above}; give a place outside of "
                "it."
            )
    if Store.open(roots.locate("/".join(parts[:-1]))).exists(ended.ENDED):
        raise OptionError(
            f"to={shorten(ident)}: its run is marked as ended; `reopen` the run, or choose "
            "another place."
        )
    _check_free(place, ident, checkpoint=checkpoint)
    return place


def _check_free(place: Location, ident: str, *, checkpoint: bool) -> None:
    """Check that what is at a place may be there; raises OptionError."""
    if is_file(place.local_path):
        if checkpoint:
            raise OptionError(f"to={shorten(ident)}: a file is there; choose another place.")
        return
    store = Store.open(place)
    children = store.list_children()
    if RECORD in children and not checkpoint:
        raise OptionError(
            f"to={shorten(ident)}: a checkpoint is there; an export needs another place."
        )
    attempts = {f"{name}/" for name in find_attempts(store, children)}
    if (
        checkpoint
        and RECORD not in children
        and any(name.endswith("/") and name not in attempts for name in children)
    ):
        raise OptionError(
            f"to={shorten(ident)}: it has other directories in it, as a run has; give a place "
            "below it, or another place."
        )
    protected = protection(store, None)
    if protected:
        raise OptionError(
            f"to={shorten(ident)}: the checkpoint there is {protected}, and is not replaced; "
            "choose another place."
        )
