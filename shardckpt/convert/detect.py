"""Detecting the format of a file or directory.

1. Every format is asked (`looks_like`), and says what it saw, or nothing.
2. Where several saw something, one may contain the other, or be what everybody reads first where both lie side by side: `_BEFORE`.
3. None, or two of which nothing says which counts, is an error that says what was looked for and what is there.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Protocol

from shardckpt.commit.publish import RECORD
from shardckpt.errors import FormatError, NotFoundError, OptionError
from shardckpt.excerpt import excerpt, few
from shardckpt.io.file_version import file_at
from shardckpt.io.store import Store

if TYPE_CHECKING:
    from shardckpt.convert.foreign import Foreign
    from shardckpt.io.url import Location

__all__ = ["AUTO", "FORMATS", "Detected", "FormatModule", "detect", "module_of"]

AUTO = "auto"
"""In place of a format: the one that is found."""
FORMATS = {
    "safetensors": "a *.safetensors file, or split files with an index",
    "orbax": "an Orbax checkpoint",
    "dcp": "a directory of torch.distributed.checkpoint",
    "megatron": "a checkpoint of Megatron-Core's torch_dist",
    "torch_xla": "a directory of torch_xla's CheckpointManager",
    "xser": "a directory of torch_xla's xser.save",
    "torch": "a file of torch.save or xm.save",
}
"""Names as `--from` takes them; what is looked for, in words. Each is read by the module `from_<name>`."""
_BEFORE = {
    "safetensors": ("torch",),
    "orbax": ("dcp",),
    "xser": ("torch",),
    "dcp": ("torch", "safetensors"),
    "megatron": ("torch",),
    "torch_xla": ("torch",),
}
"""Format → those that it goes before: their files may lie beside it, or be parts of it."""
_NAMED = 12
"""Names in a directory that a message has."""


class FormatModule(Protocol):
    """What each module `from_…` has."""

    def looks_like(self, location: Location) -> str | None:
        """What was seen of the format at a place, in words; None: nothing."""
        ...

    def open_foreign(self, location: Location, *, trust_pickle: bool = False) -> Foreign:
        """Open a checkpoint of the format."""
        ...


@dataclass(frozen=True, slots=True)
class Detected:
    """What a place was taken for."""

    format: str
    seen: str
    """What it was taken for that by, in words."""
    others: tuple[str, ...] = ()
    """What else was seen there, and is not read."""


def module_of(name: str) -> FormatModule:
    """The module that reads a format.

    Raises:
        OptionError: there is no such format.
    """
    if name not in FORMATS:
        raise OptionError(f"from_={excerpt(name)}: use {', '.join(repr(one) for one in (AUTO, *FORMATS))}.")
    found: FormatModule = import_module(f"shardckpt.convert.formats.{name}.source")
    return found


def detect(location: Location) -> Detected:
    """Which format a place holds.

    Raises:
        NotFoundError: there is nothing.
        FormatError: it is none that is known; says what was looked for, and what is there.
        OptionError: it is a checkpoint of shardckpt's own; or two formats are there.
        StorageError: the storage failed or refused.
    """
    file = file_at(location)
    names = [] if file is not None else Store.open(location).list_children()
    if file is None and not names:
        raise NotFoundError(f"{location}: there is no file, and nothing in a directory of that name.")
    if RECORD in names:
        raise OptionError(f"{location} is a checkpoint of shardckpt's own; it can be read as it is, and reshard lays it out anew.")
    seen = {name: what for name in FORMATS if (what := module_of(name).looks_like(location)) is not None}
    first = [name for name in seen if all(other in (name, *_BEFORE.get(name, ())) for other in seen)]
    if len(first) == 1:
        return Detected(first[0], seen[first[0]], tuple(f"{name}: {what}" for name, what in seen.items() if name != first[0]))
    if seen:
        found = "; ".join(f"{name}: {what}" for name, what in seen.items())
        raise OptionError(f"{location} could be several formats ({found}); say which with from_=.")
    there = "a file that begins like none of these" if file is not None else few(names, _NAMED)
    looked_for = "; ".join(FORMATS.values())
    raise FormatError(f"{location} holds no checkpoint that is known. Looked for: {looked_for}. Found: {there}.")
