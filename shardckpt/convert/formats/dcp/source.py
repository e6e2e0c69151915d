"""Reader of a directory of torch.distributed.checkpoint, without torch.

1. `.metadata` lists the contents (`dcp.metadata`). It is a pickle, so an import needs
   `trust_pickle=True`.
2. Every file that it names must exist and reach the last byte that is needed.
3. Values that are not tensors are small files of `torch.save`, and are read. Parts of them that
   cannot be stored are left behind, with a note (`plain_values`).
4. For each tensor one item is opened, to find the order of its elements, which determines the
   chunks. Each item is a file of `torch.save` inside the file: rows are read from it by offset.
5. The planner's paths rebuild the nested state, with text keys: DCP turns the integer keys of
   optimizers into text, and drops empty containers.

Files that `HuggingFaceStorageWriter` wrote for each process are read by `dcp.shard_files`; they
need no trust.

DCP has no checksums. The checksums in torch's files are checked where an item is read in one go.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from shardckpt.convert.files.file_version import FileVersion, identity_of
from shardckpt.convert.foreign import ROWS_BYTES, ForeignPart
from shardckpt.convert.formats.dcp.metadata import parse_metadata
from shardckpt.convert.formats.dcp.shard_files import open_shards, shard_files
from shardckpt.convert.formats.torch.file import open_torch_file
from shardckpt.convert.formats.torch.objects import PickledTensor
from shardckpt.convert.nested import nested
from shardckpt.convert.placed import PlacedTensor, naming, place_array, place_tensors
from shardckpt.convert.plain_values import LEFT, plain
from shardckpt.convert.span import Span
from shardckpt.convert.strided import read_box, run_of, strided_chunks
from shardckpt.errors import CorruptionError, FormatError, OptionError
from shardckpt.io.files import LARGEST_WHOLE
from shardckpt.io.store import Store
from shardckpt.io.threads import map_on_threads
from shardckpt.layout.dtypes import by_name
from shardckpt.state.names import shown
from shardckpt.text import Message, few, named, shorten

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from numpy.typing import NDArray

    from shardckpt.convert.files.file_version import Candidate
    from shardckpt.convert.formats.dcp.metadata import DcpItem, DcpMetadata, DcpTensor
    from shardckpt.convert.formats.torch.file import TorchFile
    from shardckpt.convert.placed import Foreign
    from shardckpt.convert.span import StoredRun
    from shardckpt.io.url import Location
    from shardckpt.layout.box import Box
    from shardckpt.layout.dtypes import DType

METADATA = ".metadata"
_OF_OTHERS = ({"common.pt", "metadata.json"}, {".manager_metadata"})
"""Files beside `.metadata` in directories that Megatron-Core and torch_xla derive from DCP's, which
have their own readers."""
REMEMBERED = 4096
"""Most items whose parsed description is cached: about 1 KiB each."""
REQUEST_BYTES = 8 << 20
"""Bytes to which rows are joined for one read from an object store."""
SHOWN = 50
"""Most names in a note."""


def looks_like(candidate: Candidate) -> str | None:
    """The signs of such a directory, in words; None: it is not one."""
    names = candidate.names
    if any(marks <= set(names) for marks in _OF_OTHERS):
        return None
    files = sum(name.endswith(".distcp") for name in names)
    shards = shard_files(names)
    if shards:
        return (
            f"safetensors files of torch.distributed.checkpoint, process by process: {few(shards)}"
        )
    if METADATA in names:
        return f"a torch.distributed.checkpoint directory: {METADATA} and {files} .distcp files"
    if files and any(name.startswith("__") and name.endswith(METADATA) for name in names):
        return (
            "a torch.distributed.checkpoint directory that was saved without collectives: "
            f"{files} .distcp files, and no common {METADATA}"
        )
    return None


def open_foreign(location: Location, *, trust_pickle: bool = False) -> Foreign:
    """Open a directory of `torch.distributed.checkpoint.save`.

    Args:
        location: the directory.
        trust_pickle: whether its `.metadata`, a pickle, may be read.

    Raises:
        OptionError: `trust_pickle` is needed.
        FormatError: it is not such a directory, or of an unsupported kind.
        MissingDataError, CorruptionError: a file is missing, or too short.
    """
    shards = shard_files(children(location))
    if shards:
        return open_shards(location, shards)
    state = read_state(Store.open(location), trust_pickle=trust_pickle)
    return place_tensors(
        state.nested(), "dcp", location, identity_of(location, state.files), state.notes
    )


def children(location: Location) -> list[str]:
    """The names in a directory; an empty list if there is no directory."""
    store = Store.open(location)
    return store.list_children() if store.has_directory() else []


@dataclass(frozen=True, slots=True)
class DcpState:
    """The contents of a directory, open."""

    leaves: dict[str, Any]
    """Name → `PlacedTensor` or plain value."""
    metadata: DcpMetadata
    absent: tuple[str, ...]
    """Names in the writer's state for which nothing was stored."""
    files: list[FileVersion]
    """All files that are read."""
    notes: tuple[str, ...]
    where: str
    """Path of the metadata file, for messages."""

    def nested(self) -> Any:
        """The nested state."""
        left = [name for name in self.metadata.bytes if name not in self.leaves]
        return nested(self.leaves, self.metadata.paths, [*left, *self.absent], self.where)


def read_state(store: Store, *, trust_pickle: bool) -> DcpState:
    """Read everything except the elements of tensors; raises the errors of `open_foreign`."""
    where = store.path_of(METADATA)
    if not store.exists(METADATA):
        raise FormatError(
            f"{store}: there is no {METADATA}, the index of such a checkpoint. It was saved "
            f"without collectives (each process has a {METADATA} of its own), or never completed. "
            "Load it with DCP on as many processes, and save it again with collectives."
        )
    if not trust_pickle:
        reason = (
            f"{where} is a pickle, like every metadata file of torch.distributed.checkpoint. "
            "shardckpt interprets it, and calls nothing that it names; other classes than DCP's "
            "are refused. But no checksum covers its contents, and the checksums of an import "
            "vouch for whatever was read. Confirm that you know where the file is from: "
        )
        raise OptionError(Message(reason, named("trust_pickle", True), "."))
    version = FileVersion(store, METADATA)
    metadata = parse_metadata(version.read_whole(LARGEST_WHOLE), where)
    items = [
        *metadata.bytes.items(),
        *(
            (name, chunk.item)
            for name, tensor in metadata.tensors.items()
            for chunk in tensor.chunks
        ),
    ]
    _refuse_transformed(items, store)
    files = _files((item for _, item in items), store)
    notes = [f"{where} is a pickle; it was interpreted, and nothing in it was run."]
    opened = lru_cache(REMEMBERED)(
        lambda item: open_torch_file(Span(files[item.file], item.offset, item.offset + item.length))
    )
    nbytes = ROWS_BYTES if store.near else REQUEST_BYTES
    tensors = map_on_threads(lambda named: _place(*named, opened, nbytes), metadata.tensors.items())
    values = map_on_threads(lambda named: _value(*named, opened), metadata.bytes.items())
    leaves: dict[str, Any] = dict(zip(metadata.tensors, tensors, strict=True))
    for name, (value, left) in zip(metadata.bytes, values, strict=True):
        notes.extend(left)
        if value is not LEFT:
            leaves[name] = value
    absent = [
        name
        for name in metadata.paths or ()
        if name not in metadata.tensors and name not in metadata.bytes
    ]
    if absent:
        notes.append(f"the state had names without stored data: {few(absent, SHOWN)}.")
    return DcpState(
        leaves, metadata, tuple(absent), [version, *files.values()], tuple(notes), where
    )


def _refuse_transformed(items: Sequence[tuple[str, DcpItem]], store: Store) -> None:
    for name, item in items:
        if item.transforms:
            raise FormatError(
                f"{store.path_of(item.file)}: {shown(name)} was written with the extensions "
                f"{shorten(list(item.transforms))}, which cannot be read here. Load it with DCP "
                "and save it again without extensions."
            )


def _files(items: Iterable[DcpItem], store: Store) -> dict[str, FileVersion]:
    """The files of items, by name.

    Raises MissingDataError or CorruptionError for a file that is missing or too short.
    """
    ends: dict[str, int] = {}
    for item in items:
        ends[item.file] = max(ends.get(item.file, 0), item.offset + item.length)

    def look(named: tuple[str, int]) -> FileVersion:
        name, end = named
        version = FileVersion(store, name)
        if end and not store.is_longer(name, end - 1):
            raise CorruptionError(
                f"{version} is shorter than the {end} bytes that the metadata refer to; replace "
                "it with a backup."
            )
        return version

    return dict(zip(ends, map_on_threads(look, ends.items()), strict=True))


def _value(
    name: str, item: DcpItem, opened: Callable[[DcpItem], TorchFile]
) -> tuple[Any, list[str]]:
    """The value of an item that is not a tensor."""
    with naming(name):
        return plain(opened(item), name)


def _place(
    name: str, tensor: DcpTensor, opened: Callable[[DcpItem], TorchFile], nbytes: int
) -> PlacedTensor:
    """A tensor with the places of its elements."""
    with naming(name):
        dtype = by_name(tensor.dtype)
        places = [_Item(chunk.item, chunk.shape, opened) for chunk in tensor.chunks]
        strides = places[0].tensor(dtype)[1].strides if places else ()
    if not places and 0 in tensor.shape:
        return place_array(np.empty(tensor.shape, dtype.numpy))
    parts = tuple(
        ForeignPart(
            chunk.start, chunk.shape, strided_chunks(chunk.shape, strides, dtype.itemsize, nbytes)
        )
        for chunk in tensor.chunks
    )
    return PlacedTensor(tensor.shape, dtype, parts, places=tuple(places))


def _stored_as(dtype: DType) -> tuple[str, ...]:
    """The dtypes of an item that can hold the bits of a dtype.

    The tensor library torch_xla saves shards of unsigned integers as signed ones.
    """
    return (dtype.name, dtype.name.removeprefix("u"))


@dataclass(frozen=True, slots=True, eq=False)
class _Item:
    """An item of one tensor."""

    item: DcpItem
    shape: tuple[int, ...]
    """Shape of the item in the metadata."""
    opened: Callable[[DcpItem], TorchFile]
    """Opens the item; cached."""

    def tensor(self, dtype: DType) -> tuple[TorchFile, PickledTensor]:
        file = self.opened(self.item)
        tensor = file.state
        if (
            not isinstance(tensor, PickledTensor)
            or tensor.shape != self.shape
            or tensor.dtype.name not in _stored_as(dtype)
        ):
            actual = (
                f"{tensor.dtype} of shape {tensor.shape}"
                if isinstance(tensor, PickledTensor)
                else f"a {type(tensor).__name__}"
            )
            raise FormatError(
                f"{file.span}: the metadata say {dtype} of shape {self.shape}, but the file has "
                f"{actual}; the two do not belong together. Restore both from one copy."
            )
        return file, tensor

    def run(self, dtype: DType) -> StoredRun | None:
        file, tensor = self.tensor(dtype)
        return run_of(file.storage(tensor.storage), tensor, dtype.itemsize)

    def read(self, box: Box, dtype: DType) -> NDArray[Any]:
        file, tensor = self.tensor(dtype)
        return read_box(file.storage(tensor.storage), tensor, dtype.storage, box)
