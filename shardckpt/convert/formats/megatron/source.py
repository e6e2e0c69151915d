"""Reader of checkpoints in Megatron-Core's `torch_dist` format.

    metadata.json        identifies the format: {"sharded_backend": "torch_dist", …}
    .metadata, *.distcp  a directory of torch.distributed.checkpoint: `ShardedTensor`s and
                         `ShardedObject`s by their keys
    common.pt            a file of torch.save: everything else, which is the same in every process

(megatron/core/dist_checkpointing, 0.16.) Megatron's training script writes each checkpoint into
`<base>/iter_0000010/` and the number of the newest into `<base>/latest_checkpointed_iteration.txt`,
from which it loads.

The resulting state is flat, like Megatron's keys: a tensor has the name of its key, with the layers
as its first dimension if Megatron prepends such axes. An object `key/shard_0_2` becomes `shard_0_2`
in a dict `key`, and the contents of common.pt become a dict `common`. Optimizer states that
Megatron-Core up to 0.13 flattened are imported as they are stored.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from shardckpt.convert.files.file_version import FileVersion, identity_of
from shardckpt.convert.formats.dcp.source import METADATA, children, read_state
from shardckpt.convert.formats.torch.file import open_torch_file
from shardckpt.convert.nested import nested
from shardckpt.convert.placed import place_tensors
from shardckpt.convert.plain_values import LEFT, plain
from shardckpt.convert.span import LoadedFile, Span
from shardckpt.errors import FormatError
from shardckpt.io.store import Store
from shardckpt.state.names import shown
from shardckpt.text import shorten

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardckpt.convert.files.file_version import Candidate
    from shardckpt.convert.formats.dcp.source import DcpState
    from shardckpt.convert.placed import Foreign
    from shardckpt.io.url import Location

CONFIG = "metadata.json"
COMMON = "common.pt"
NEWEST = "latest_checkpointed_iteration.txt"
LARGEST_COMMON = 1 << 28
"""Most bytes of common.pt: Megatron puts no parameters there."""
LONGEST_CONFIG = 1 << 16
"""Most bytes of metadata.json: it has one line."""


def looks_like(candidate: Candidate) -> str | None:
    """The signs of such a directory, in words; None: it is not one."""
    if CONFIG in candidate.names:
        backend = _backend(Store.open(candidate.location))
        return (
            None
            if backend is None
            else f"a checkpoint of Megatron-Core, format {backend}: {CONFIG}"
        )
    if NEWEST in candidate.names:
        try:
            newest = _newest(candidate.location)
        except FormatError:  # what lies beside it may be a checkpoint of another format
            return None
        return (
            f"steps of Megatron's training, of which {NEWEST} says that {newest.name} is the newest"
        )
    return None


def refuse_without_newest(location: Location, names: Sequence[str]) -> None:
    """Raise FormatError if a directory of these names has no readable iteration in `NEWEST`."""
    if NEWEST in names:
        _newest(location)


def open_foreign(location: Location, *, trust_pickle: bool = False) -> Foreign:
    """Open a checkpoint.

    Args:
        location: its directory, or the directory of all checkpoints of Megatron's training: then
            the newest is opened.
        trust_pickle: whether `.metadata`, a pickle, may be read.

    Raises:
        OptionError: `trust_pickle` is needed.
        FormatError: it is not such a checkpoint, or has another backend than `torch_dist`.
        MissingDataError, CorruptionError: a file is missing, or too short.
    """
    notes = []
    names = children(location)
    if CONFIG not in names and NEWEST in names:
        location = _newest(location)
        notes.append(f"{NEWEST} says that {location.name} is the newest.")
    store = Store.open(location)
    backend = _backend(store)
    if backend is None:
        raise FormatError(
            f"{location}: there is no {CONFIG} that says which format of Megatron-Core it is; "
            "give the directory of a step."
        )
    if backend != "torch_dist":
        raise FormatError(
            f"{store.path_of(CONFIG)}: its backend is {shorten(backend)}; only torch_dist is "
            "read. Convert it with Megatron-Core."
        )
    state = read_state(store, trust_pickle=trust_pickle)
    notes.extend(state.notes)
    notes.extend(
        f"{shown(name)} of shape {shape} was flattened by Megatron's distributed optimizer, and "
        "is taken as it is stored."
        for name, shape in state.metadata.flattened.items()
    )
    whole, left = _whole(state, store)
    return place_tensors(
        whole, "megatron", location, identity_of(location, state.files), [*notes, *left]
    )


def _whole(state: DcpState, store: Store) -> tuple[Any, list[str]]:
    """Merge sharded and common state.

    Also notes about the parts of the common state that are left behind.
    """
    objects = {
        name: _path(name)
        for name in state.metadata.bytes
        if _path(name)[0] not in state.metadata.tensors
    }
    # A process has one object of a key; Megatron stores a list of the process's objects.
    leaves = {
        name: leaf[0]
        if name in state.metadata.bytes and type(leaf) is list and len(leaf) == 1
        else leaf
        for name, leaf in state.leaves.items()
    }
    left: list[str] = []
    if store.exists(COMMON):
        version = FileVersion(store, COMMON)
        state.files.append(version)
        file = LoadedFile(str(version), version.read_whole(LARGEST_COMMON))
        common, left = plain(open_torch_file(Span(file, 0, len(file.data))), "common")
        if "common" in leaves:
            raise FormatError(
                f"{store.path_of(METADATA)}: a tensor has the name 'common', which means the "
                f"contents of {COMMON}; rename it in Megatron."
            )
        if common is not LEFT:
            leaves["common"] = common
    return nested(leaves, objects, (), store.path_of(METADATA)), left


def _path(name: str) -> tuple[str, ...]:
    """The path of a `ShardedObject` in the state."""
    key, slash, shard = name.rpartition("/")
    return (key, shard) if slash and shard.startswith("shard_") else (name,)


def _backend(store: Store) -> str | None:
    """The backend in `metadata.json`; None: the file is not Megatron's."""
    if not store.exists(CONFIG) or store.is_longer(CONFIG, LONGEST_CONFIG):
        return None
    try:
        document = json.loads(store.read(CONFIG))
    except (ValueError, RecursionError):
        return None
    backend = document.get("sharded_backend") if isinstance(document, dict) else None
    return backend if isinstance(backend, str) else None


def _newest(location: Location) -> Location:
    """The checkpoint that Megatron's training would load."""
    store = Store.open(location)
    text = (
        "" if store.is_longer(NEWEST, 100) else store.read(NEWEST).decode(errors="replace").strip()
    )
    if text.isdecimal() and text.isascii():
        return location.join(f"iter_{int(text):07d}")
    if text == "release":
        return location.join(text)
    raise FormatError(
        f"{store.path_of(NEWEST)}: {shorten(text)} is not an iteration; give the checkpoint's own "
        "directory."
    )
