"""Detecting the format of a file or directory.

1. Every format's `looks_like` reports the signs of the format that it sees, or None.
2. If several formats report signs, `_BEFORE` decides: one format may contain the other, or be the
   one that readers prefer where both lie side by side.
3. No format, or two without an order between them, is an error; it lists the known formats and the
   names that are there.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Protocol

from shardckpt.commit.publish import RECORD
from shardckpt.convert.files.file_version import Candidate, file_at
from shardckpt.convert.formats.megatron.source import refuse_without_newest
from shardckpt.convert.formats.torch.deepspeed import refuse_directory
from shardckpt.convert.hub_cache import hub_snapshot
from shardckpt.errors import FormatError, NotFoundError, OptionError, ShardckptError
from shardckpt.io.failures import reading_takes_threads
from shardckpt.io.store import Store
from shardckpt.io.threads import map_on_threads
from shardckpt.state.names import natural_key
from shardckpt.text import Message, few, named

if TYPE_CHECKING:
    from collections.abc import Collection

    from shardckpt.convert.placed import Foreign
    from shardckpt.io.url import Location

AUTO = "auto"
"""In place of a format's name: detect the format."""
FORMATS = {
    "safetensors": "a *.safetensors file, or split files with an index",
    "orbax": "an Orbax checkpoint",
    "dcp": "a directory of torch.distributed.checkpoint",
    "megatron": "a checkpoint of Megatron-Core's torch_dist",
    "torch_xla": "a directory of torch_xla's CheckpointManager",
    "xser": "a directory of torch_xla's xser.save",
    "torch": "a file of torch.save or xm.save",
    "zarr": "a group of zarr arrays",
}
"""Format name, as `--from` expects it → its description. The module `formats/<name>/source.py`
reads it."""
_BEFORE = {
    "safetensors": ("torch",),
    "orbax": ("dcp", "zarr"),
    "xser": ("torch",),
    "dcp": ("torch", "safetensors"),
    "megatron": ("torch",),
    "torch_xla": ("torch",),
}
"""Format → formats that it precedes: their files may lie beside its own, or be parts of it."""
_NAMED = 12
"""Most names of a directory in a message."""
_FILES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")
"""Ends of the names of files that `detect_below` looks into."""
_LOOSE = ("safetensors", "torch")
_STEPS = "steps of "
"""Beginning of the signs of a directory of several checkpoints, in `looks_like` of each format."""
_MOST_BELOW = 128
"""Most files and directories that it looks into."""


class FormatModule(Protocol):
    """The interface of each module `formats/<name>/source.py`."""

    def looks_like(self, candidate: Candidate) -> str | None:
        """The signs of the format at a location, in words; None: there are none."""
        ...

    def open_foreign(self, location: Location, *, trust_pickle: bool = False) -> Foreign:
        """Open a checkpoint of the format."""
        ...


@dataclass(frozen=True, slots=True)
class Detected:
    """A detected format."""

    format: str
    seen: str
    """The signs by which the format was detected, in words."""
    others: tuple[str, ...] = ()
    """Signs of other formats at the same place, which are not read."""


def module_of(name: str) -> FormatModule:
    """The module that reads a format.

    Raises:
        OptionError: there is no such format.
    """
    if not isinstance(name, str) or name not in FORMATS:
        raise OptionError(
            Message(
                named("from_", name), f": use {', '.join(repr(one) for one in (AUTO, *FORMATS))}."
            )
        )
    module: FormatModule = import_module(f"shardckpt.convert.formats.{name}.source")
    return module


def detect(location: Location) -> Detected:
    """Detect the format of a file or directory.

    Raises:
        FormatError: no known format; the message lists the known formats and the names that are
            there.
        FormatError, NotFoundError, OptionError, StorageError: as in `detect_known`.
    """
    detected = detect_known(location)
    if detected is not None:
        return detected
    there = (
        few(Store.open(location).list_children(), _NAMED)
        if file_at(location) is None
        else "a file that begins like none of these"
    )
    looked_for = "; ".join(FORMATS.values())
    raise FormatError(
        f"{location} holds no checkpoint of a known format. Looked for: {looked_for}. Found: "
        f"{there}."
    )


def detect_known(location: Location) -> Detected | None:
    """The format of a file or directory; None: it is not a known one.

    Raises:
        NotFoundError: there is nothing at the location.
        FormatError: it is a checkpoint of DeepSpeed, and the message says how to convert it; or it
            has Megatron's file of the newest iteration, which names none.
        OptionError: the location is a checkpoint of shardckpt, or could be of two formats.
        StorageError: the storage failed or refused.
    """
    candidate = Candidate.at(location)
    file, names = candidate.file, candidate.names
    if file is None and not Store.open(location).lists:
        return _detected_unlisted(candidate)
    if file is None and not names:
        raise NotFoundError(
            f"{location}: there is no such file, and no directory of that name with files in it; "
            "check the path."
        )
    if RECORD in names:
        raise OptionError(
            f"{location} is a shardckpt checkpoint already; open it directly, or change its "
            "layout with reshard."
        )
    seen = {
        name: what
        for name in FORMATS
        if (what := module_of(name).looks_like(candidate)) is not None
    }
    first = [
        name for name in seen if all(other in (name, *_BEFORE.get(name, ())) for other in seen)
    ]
    if len(first) == 1:
        return Detected(
            first[0],
            seen[first[0]],
            tuple(f"{name}: {what}" for name, what in seen.items() if name != first[0]),
        )
    if seen:
        readings = "; ".join(f"{name}: {what}" for name, what in seen.items())
        raise OptionError(
            Message(
                f"{location} could have several formats ({readings}); choose one with ",
                named("from_"),
                ".",
            )
        )
    if file is None:
        refuse_directory(Store.open(location), names)
        refuse_without_newest(location, names)
    return None


def _detected_unlisted(candidate: Candidate) -> Detected:
    """Detect the format of a directory that its storage does not list.

    Only zarr has a file that is always there.

    Raises:
        NotFoundError: nothing is known to be there.
    """
    signs = module_of("zarr").looks_like(candidate)
    if signs is None:
        raise NotFoundError(
            f"{candidate.location}: no checkpoint there; a web server lists no directory: give the "
            "url of a file, as model.safetensors."
        )
    return Detected("zarr", signs)


def detect_below(location: Location, known: Collection[str] = ()) -> dict[str, Detected]:
    """The checkpoints of other formats that are a directory ("."), or lie directly below it.

    Names below a checkpoint are parts of it, unless it consists of loose files, as safetensors and
    torch's; then those of its own format are. Below a directory of steps are its steps.

    Args:
        location: a directory, or a file.
        known: names below it that are something else.

    Returns:
        Name → its format, in natural order; of the first files and directories only, if there are
        very many.

    Raises:
        StorageError: the storage failed or refused.
    """
    itself = _try_detect(location)
    here = {} if itself is None else {".": itself}
    if file_at(location) is not None or not (
        itself is None or itself.format in _LOOSE or itself.seen.startswith(_STEPS)
    ):
        return here
    store = Store.open(location)
    names = [
        name
        for name in store.list_children()
        if name.endswith(("/", *_FILES)) and not name.startswith(".")
    ]
    names = sorted(
        (name for name in names if name.removesuffix("/") not in known), key=natural_key
    )[:_MOST_BELOW]
    with reading_takes_threads(store):
        below = map_on_threads(
            lambda name: _try_detect(location.join(name.removesuffix("/"))), names
        )
    seen = {
        name: detected for name, detected in zip(names, below, strict=True) if detected is not None
    }
    parts = {
        name
        for name, detected in seen.items()
        if itself is not None and detected.format == itself.format and not name.endswith("/")
    }
    return here | {
        name.removesuffix("/"): detected for name, detected in seen.items() if name not in parts
    }


def _try_detect(location: Location) -> Detected | None:
    """The format at a location; None if there is none, or it is not certain."""
    try:
        return detect_known(hub_snapshot(location) or location)
    except ShardckptError:
        return None
