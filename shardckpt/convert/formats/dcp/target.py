"""Writer of a directory that torch.distributed.checkpoint loads.

Such a directory has a file of items, each the `torch.save` output of one block of a tensor or of
one other value, and `.metadata`: the blocks of each tensor, the place of each item, and for each
name the keys that lead to it in the state.

1. DCP's own function flattens the state: dicts by their keys as text, and lists that contain a
   tensor or a dict.
2. Blocks are written as they arrive; they are shards of the recorded layout if these have a good
   size (`block_shape`). Tied tensors are written once, and listed in `.metadata` under each of
   their names.
3. DCP's own writer writes `.metadata` when everything is durable. Then the directory takes its
   name.

DCP does not look into tuples: tuples that contain tensors become lists. DCP stores nothing for an
empty dict, and neither does this writer: with an item for an empty dict, `dcp.load` would mistake
the directory for one from before torch 2.4. A list that contains an empty dict is refused: DCP
would store it in a form that `dcp_to_torch_save` cannot read.
"""

from __future__ import annotations

import io
import re
from contextlib import suppress
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any

import crc32c

from shardckpt.convert.files.draft import Draft
from shardckpt.convert.files.read_back import WrittenBlock
from shardckpt.convert.files.replacement import sync_file
from shardckpt.convert.formats.dcp.source import open_foreign
from shardckpt.convert.formats.torch.target import torch_dtypes, torch_save
from shardckpt.convert.small_leaves import check_text_keys, describe_losses, find_unsupported
from shardckpt.convert.state_writer import StateWriter
from shardckpt.convert.tree_back import check_tree
from shardckpt.errors import MissingDataError, NamesMismatchError, StructureMismatchError
from shardckpt.io.failures import storage_errors
from shardckpt.io.files import sync_directory
from shardckpt.io.url import parse as parse_url
from shardckpt.plan.grids import SMALLEST, block_shape, one_grid
from shardckpt.state import unflatten
from shardckpt.state.document import Branch, Tensor, Tied, leaves_of
from shardckpt.state.names import shown
from shardckpt.text import Message, few, named, shorten

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from shardckpt.format.structure import Structure, TensorRecord
    from shardckpt.io.url import Location
    from shardckpt.layout.box import Box
    from shardckpt.plan.pieces import Piece
    from shardckpt.reading.naming.outputs import OutputTensor
    from shardckpt.state.document import Node

METADATA = ".metadata"
_FILE = "__0_0.distcp"
"""DCP's name of the first file of the first rank."""
_FILES = re.compile(r"__\d+_\d+\.distcp")
"""Matches DCP's names of files."""
_ITEM_BYTES = 2 << 10
"""Approximate bytes that torch.save adds to a block."""


class DcpDirectory(StateWriter):
    """A directory that is being written."""

    def __init__(
        self, structure: Structure, location: Location, *, overwrite: bool = False
    ) -> None:
        """Begin a directory.

        Args:
            structure: the state; its tensors have the dtypes in which they are written.
            location: the directory.
            overwrite: whether to replace an existing checkpoint of DCP when the new one is
                complete.

        Raises:
            DtypeError: torch lacks the dtype of a tensor; the message names the tensor.
            StructureMismatchError, NamesMismatchError: DCP has no names for parts of the state.
            MissingExtraError: torch is not installed.
            AlreadyExistsError, OptionError, StorageError: the directory cannot be written at
                `location`.
        """
        self._dtypes = torch_dtypes(structure)
        self._tensors = structure.tensors
        self._where = str(location)
        tree = structure.nodes
        left = find_unsupported(tree, lambda _value: None)
        self.notes: list[str] = describe_losses(tree, left)
        """Parts of the state that are left out or changed, a line each."""
        without = _without_tuples(tree, self.notes)
        check_text_keys(without, self._where, "DCP", tuples=False)
        self._flatten(without, left)
        nbytes = sum(
            tensor.nbytes + _ITEM_BYTES * (1 + tensor.nbytes // SMALLEST)
            for tensor in self._tensors.values()
        )
        self._items: dict[str, dict[tuple[int, ...], tuple[tuple[int, ...], Any]]] = {
            name: {} for name in self._tensors
        }
        """Tensor → its written blocks: index of the first element → shape and place."""
        self._parts: list[WrittenBlock] = []
        self._draft = Draft(
            location,
            overwrite=overwrite,
            nbytes=nbytes,
            marks={METADATA},
            foreign_name=lambda _directory, names: next(
                (name for name in names if name != METADATA and not _FILES.fullmatch(name)), None
            ),
        )
        try:
            with storage_errors("create", self._where):
                self._file = (self._draft.path / _FILE).open("xb")
        except BaseException:
            self._draft.abandon()
            raise

    def blocks(self, output: OutputTensor, _stored: Sequence[Piece], room: int) -> Sequence[Piece]:
        """A grid of blocks: each is a shard, several shards, or a part of one."""
        tensor = self._tensors[output.name]
        return one_grid(
            output.name,
            output.shape,
            block_shape(tensor.shape, tensor.layout, tensor.dtype.itemsize, room),
        )

    def put(self, output: OutputTensor, box: Box, array: NDArray[Any]) -> None:
        """Write one block."""
        from shardckpt.frameworks.torch import tensor_of

        self._items[output.name][box.start] = (
            box.shape,
            self._append(output.name, tensor_of(array, output.dtype)),
        )

    def complete(self) -> list[WrittenBlock]:
        """Write the values that are not tensors, and DCP's own metadata."""
        for name, tensor in self._tensors.items():
            if 0 in tensor.shape:
                self._add_empty(name, tensor)
            if sum(prod(shape) for shape, _ in self._items[name].values()) != prod(tensor.shape):
                raise MissingDataError(
                    f"{self._where}: not all of {shown(name)} was written; nothing was published. "
                    "Export again."
                )
        values = {
            name: self._append(name, value)
            for name, value in self._flat.items()
            if not _is_tensor(value)
        }
        with storage_errors("write", self._where):
            self._file.close()
            sync_file(self._draft.path / _FILE)
            self._write_metadata(values)
            # DCP's writer syncs it before its bytes leave Python's buffer.
            sync_file(self._draft.path / METADATA)
            sync_directory(self._draft.path)
        return self._parts

    def check_tree(self) -> None:
        """Compare the tree with the one that shardckpt's reader of DCP finds."""
        leaves = [
            (
                self._paths[name],
                self._tensors[self._stored[id(value)]] if _is_tensor(value) else None,
            )
            for name, value in self._flat.items()
        ]
        check_tree(
            leaves,
            open_foreign(parse_url(self._draft.path), trust_pickle=True).structure,
            self._where,
        )

    def abort(self) -> None:
        """Remove the written files."""
        # The last bytes may not fit on the disk, which may be why the export failed.
        with suppress(OSError):
            self._file.close()
        super().abort()

    def _flatten(self, tree: Node, left: dict[str, str]) -> None:
        """Flatten the state to DCP's names; the tensors in it have no memory."""
        import torch
        from torch.distributed.checkpoint._nested_dict import flatten_state_dict

        tensors = {
            name: torch.empty(t.shape, dtype=self._dtypes[name], device="meta")
            for name, t in self._tensors.items()
        }
        self._stored = {id(tensor): name for name, tensor in tensors.items()}
        state = unflatten(tree, tensors, lambda name: name not in left)
        if not isinstance(state, dict):
            raise StructureMismatchError(
                f"{self._where}: the state is a {type(state).__name__}, but DCP stores only "
                "dicts; export it to another format."
            )
        try:
            self._flat, self._paths = flatten_state_dict(state)
        except ValueError as e:
            reason = (
                f"{self._where}: two names become the same in DCP, which joins keys with dots "
                f"({e}); leave one out with "
            )
            raise NamesMismatchError(Message(reason, named("exclude"), ".")) from e
        entered = {path[:n] for path in self._paths.values() for n in range(len(path))}
        stored = entered.union(self._paths.values())
        empty = [path for path in _empty_dicts(state, ()) if path]
        for path in empty:
            items = [path[:n] for n, key in enumerate(path, 1) if type(key) is int]
            lost = next((item for item in items if item not in stored), None)
            if lost is not None:
                reason = (
                    f"{self._where}: {shorten('.'.join(map(str, lost)))} is an empty dict in a "
                    "list: DCP does not store it, and then cannot read the list. Leave the list "
                    "out with "
                )
                raise StructureMismatchError(Message(reason, named("exclude"), "."))
        if empty:
            names = few(["/".join(map(str, path)) for path in empty])
            self.notes.append(f"left out, as DCP stores no empty dict: {names}")

    def _append(self, name: str, value: Any) -> Any:
        """Write one item; return its place."""
        import torch
        from torch.distributed.checkpoint.filesystem import _StorageInfo

        with storage_errors("write", self._where):
            offset = self._file.tell()
            if isinstance(value, torch.Tensor):
                checksum = torch_save(value, self._file)
            else:
                # In memory torch's writer meets no error and no Python code that Ctrl-C interrupts;
                # a thread for each small value takes three times as long.
                item = io.BytesIO()
                torch.save(value, item)
                self._file.write(item.getbuffer())
                checksum = crc32c.crc32c(item.getbuffer())
        place = _StorageInfo(_FILE, offset, self._file.tell() - offset)
        self._parts.append(
            WrittenBlock(name, self._draft.path / _FILE, [(offset, place.length)], checksum)
        )
        return place

    def _add_empty(self, name: str, tensor: TensorRecord) -> None:
        """Write the item of a tensor without elements; DCP writes one, too."""
        import torch

        place = self._append(name, torch.empty(tensor.shape, dtype=self._dtypes[name]))
        self._items[name] = {(0,) * len(tensor.shape): (tensor.shape, place)}

    def _write_metadata(self, values: dict[str, Any]) -> None:
        """Write `.metadata` with DCP's own writer."""
        import torch
        from torch.distributed.checkpoint import metadata as words
        from torch.distributed.checkpoint.storage import WriteResult

        entries: dict[str, Any] = {}
        results = [
            WriteResult(words.MetadataIndex(name), place.length, place)
            for name, place in values.items()
        ]
        for name, value in self._flat.items():
            if name in values:
                entries[name] = words.BytesStorageMetadata()
                continue
            items = sorted(self._items[self._stored[id(value)]].items())
            chunks = [
                words.ChunkStorageMetadata(torch.Size(start), torch.Size(shape))
                for start, (shape, _) in items
            ]
            entries[name] = words.TensorStorageMetadata(
                words.TensorProperties.create_from_tensor(value), value.shape, chunks
            )
            for i, (start, (_, place)) in enumerate(items):
                results.append(
                    WriteResult(words.MetadataIndex(name, start, i), place.length, place)
                )
        writer = _metadata_writer(self._draft.path, self._draft.final)
        writer.finish(words.Metadata(entries, planner_data=self._paths), [results])


def _metadata_writer(path: Path, final: Path) -> Any:
    """DCP's writer for a directory that will get another name."""
    import torch  # noqa: F401  (before a module of it, for other threads that import it)
    from torch.distributed.checkpoint import FileSystemWriter
    from torch.distributed.checkpoint.metadata import StorageMeta

    class Writer(FileSystemWriter):  # type: ignore[misc]  # torch is not followed
        def storage_meta(self) -> StorageMeta:
            return StorageMeta(checkpoint_id=final, save_id=self.save_id)

    return Writer(path)


def _is_tensor(value: object) -> bool:
    import torch

    return isinstance(value, torch.Tensor)


def _empty_dicts(value: object, path: tuple[str | int, ...]) -> Iterator[tuple[str | int, ...]]:
    """DCP's paths of the empty dicts in dicts and lists; DCP does not look into tuples."""
    if isinstance(value, dict):
        if not value:
            yield path
        for key, child in value.items():
            yield from _empty_dicts(child, (*path, str(key)))
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from _empty_dicts(item, (*path, i))


def _without_tuples(tree: Node, notes: list[str]) -> Node:
    """The same state, with lists instead of tuples that contain tensors."""
    if not isinstance(tree, Branch):
        return tree
    children = [_without_tuples(child, notes) for child in tree.children]
    if tree.form == "tuple" and any(isinstance(leaf, Tensor | Tied) for leaf in leaves_of(tree)):
        notes.append(
            f"{shown(tree.name)} is a tuple with tensors in it, where DCP looks for none; it is "
            "exported as a list."
        )
        return replace(tree, form="list", children=children)
    return replace(tree, children=children)
