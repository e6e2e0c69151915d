"""Writer of a checkpoint that Orbax restores.

1. `orbax.documents` determines the arrays and documents. Numbers of the state are arrays without
   dimensions.
2. Each block is a chunk of a zarr v3 array: a shard of the recorded layout if shards have a good
   size (`block_shape`). It is written with its checksum, which Orbax ignores and TensorStore
   checks. A tied tensor is written once for each of its names.
3. When everything is durable, the documents are written, and the directory takes its name.
"""

from __future__ import annotations

import json
import os
import re
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from shardckpt.convert.files.draft import Draft
from shardckpt.convert.files.read_back import WrittenBlock
from shardckpt.convert.formats.orbax import documents
from shardckpt.convert.formats.orbax.source import open_foreign
from shardckpt.convert.formats.orbax.tree import array_names
from shardckpt.convert.small_leaves import describe_losses
from shardckpt.convert.state_writer import StateWriter
from shardckpt.convert.tree_back import check_tree
from shardckpt.errors import DtypeError, MissingDataError
from shardckpt.format.stored_chunks import encode
from shardckpt.format.zarr_arrays import CHECKSUM_BYTES, array_json, chunk_key
from shardckpt.io.failures import storage_errors
from shardckpt.io.locks import HIDDEN
from shardckpt.io.status import is_directory
from shardckpt.io.store import Store
from shardckpt.io.url import parse as parse_url
from shardckpt.plan.grids import LARGEST, block_shape, one_grid
from shardckpt.state.names import shown
from shardckpt.writing.plain import PlainWriter

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from shardckpt.format.structure import Structure
    from shardckpt.io.url import Location
    from shardckpt.layout.box import Box
    from shardckpt.plan.pieces import Piece
    from shardckpt.reading.naming.outputs import OutputTensor

_DIRECTORY = re.compile(r"c|(c/)?\d+(/\d+)*", re.ASCII)
"""Directories in the directory of an array, of zarr v2 or v3."""
_FILE = re.compile(r"zarr\.json|\.zarray|\.zattrs|c|(c[./])?\d+([./]\d+)*", re.ASCII)
"""Files there."""
_OF_PROCESS = re.compile(r"process_\w+", re.ASCII)
"""Files with metadata of arrays."""


class OrbaxDirectory(StateWriter):
    """A checkpoint that is being written."""

    memory = LARGEST
    """Bytes of buffers: a chunk with its checksum."""

    def __init__(
        self, structure: Structure, location: Location, *, overwrite: bool = False
    ) -> None:
        """Begin a checkpoint.

        Args:
            structure: the state; its tensors have the dtypes in which they are written.
            location: the directory.
            overwrite: whether to replace an existing checkpoint of Orbax when the new one is
                complete.

        Raises:
            DtypeError: TensorStore lacks the dtype of a tensor; the message names the tensor.
            StructureMismatchError, NamesMismatchError: Orbax has no names for parts of the state.
            AlreadyExistsError, OptionError, StorageError: the directory cannot be written at
                `location`.
        """
        self._began = time.time_ns()
        self._tensors = structure.tensors
        tree = structure.nodes
        left = documents.left_by_orbax(tree)
        self.notes: list[str] = describe_losses(tree, left, keys=True)
        """Parts of the state that are left out or changed, a line each."""
        self._entries = documents.entries(tree, left, self._tensors, str(location))
        if any(entry.what == "string" for entry in self._entries):
            self.notes.append(
                "There are texts in the state, for which Orbax's StandardCheckpointer has no "
                "targets: use PyTreeCheckpointer."
            )
        self._refuse_bits()
        self._arrays: dict[str, list[str]] = {name: [] for name in self._tensors}
        """Stored name of a tensor → names of its arrays."""
        for entry in self._entries:
            if entry.tensor is not None:
                self._arrays[entry.tensor].append(entry.name)
        self._chunks = {
            name: tuple(max(1, n) for n in tensor.shape) for name, tensor in self._tensors.items()
        }
        self._missing = dict.fromkeys(self._tensors, 0)
        """Number of chunks not yet written, by tensor."""
        self._parts: list[WrittenBlock] = []
        nbytes = sum(
            tensor.nbytes * len(self._arrays[name]) for name, tensor in self._tensors.items()
        )
        self._draft = Draft(
            location,
            overwrite=overwrite,
            nbytes=nbytes,
            marks=documents.RESERVED,
            foreign_name=_foreign_name,
        )
        try:
            self._writer = PlainWriter(Store.open(parse_url(self._draft.path)), place=str)
        except BaseException:
            self._draft.abandon()
            raise

    def blocks(self, output: OutputTensor, _stored: Sequence[Piece], room: int) -> Sequence[Piece]:
        """A grid of blocks: each is a shard, several shards, or a part of one."""
        tensor = self._tensors[output.name]
        self._chunks[output.name] = block_shape(
            tensor.shape, tensor.layout, tensor.dtype.itemsize, room
        )
        pieces = one_grid(output.name, output.shape, self._chunks[output.name])
        self._missing[output.name] = pieces[0].num_chunks
        return pieces

    def put(self, output: OutputTensor, box: Box, array: NDArray[Any]) -> None:
        """Write one block."""
        chunks = self._chunks[output.name]
        key = chunk_key([start // side for start, side in zip(box.start, chunks, strict=True)])
        data, crc = encode(array, chunks, None)
        for name in self._arrays[output.name]:
            self._writer.append([f"{name}/{key}"], [data])
            self._parts.append(
                WrittenBlock(
                    output.name,
                    self._draft.path / name / key,
                    [(0, data.nbytes - CHECKSUM_BYTES)],
                    crc,
                )
            )
        self._missing[output.name] -= 1

    def complete(self) -> list[WrittenBlock]:
        """Write the numbers of the state, and the documents."""
        lacking = next((name for name, chunks in self._missing.items() if chunks), None)
        if lacking is not None:
            raise MissingDataError(
                f"{self._draft.final}: not all of {shown(lacking)} was written; nothing was "
                "published. Export again."
            )
        for name, tensor in self._tensors.items():
            for array in self._arrays[name]:
                self._write_json(
                    f"{array}/zarr.json", array_json(tensor.shape, tensor.dtype, self._chunks[name])
                )
        self._write_small_leaves()
        self._write_json(documents.SHARDINGS, documents.shardings(self._entries, self._tensors))
        self._write_json(
            f"{documents.ARRAY_METADATAS}/process_0",
            documents.array_metadatas(self._entries, self._chunks),
        )
        self._write_json(documents.METADATA, documents.metadata(self._entries))
        self._write_json(
            documents.STEP,
            documents.checkpoint_metadata(self._entries, self._began, time.time_ns()),
        )
        self._writer.append(
            [documents.FINISHED],
            [f"Checkpoint commit was successful to {self._draft.final}".encode()],
        )
        self._writer.finish()
        return self._parts

    def check_tree(self) -> None:
        """Compare the tree with the one that shardckpt's reader of Orbax finds."""
        leaves = [
            (entry.path, None if entry.tensor is None else self._tensors[entry.tensor])
            for entry in self._entries
        ]
        check_tree(
            leaves, open_foreign(parse_url(self._draft.path)).structure, str(self._draft.final)
        )

    def abort(self) -> None:
        """Remove the written files."""
        self._writer.abort()
        super().abort()

    def _write_small_leaves(self) -> None:
        for entry in self._entries:
            if entry.what == "scalar":
                dtype = documents.scalar_dtype(entry.value)
                self._write_json(f"{entry.name}/zarr.json", array_json((), dtype, ()))
                data, _ = encode(np.asarray(entry.value), (), None)
                self._writer.append([f"{entry.name}/{chunk_key(())}"], [data])
        texts = documents.strings(self._entries)
        if texts:
            self._write_json(documents.STRINGS, texts)

    def _write_json(self, key: str, document: dict[str, Any]) -> None:
        self._writer.append([key], [json.dumps(document).encode()])

    def _refuse_bits(self) -> None:
        odd = next((tensor for tensor in self._tensors.values() if tensor.dtype.as_bits), None)
        if odd is not None:
            raise DtypeError(
                f"{shown(odd.name)}: TensorStore has no dtype {odd.dtype}, so Orbax cannot read "
                "it; export it in another dtype, or leave it out."
            )


def _foreign_name(directory: Path, names: list[str]) -> str | None:
    """The name of something in a checkpoint of Orbax that is not Orbax's; None: there is nothing.

    Arrays may lie in directories below each other, which can hold other files as well.
    """
    arrays = {*array_names(Store.open(parse_url(directory)))}
    database = documents.DATABASE if documents.MANIFEST in names else None
    above = {name[:i] for name in arrays for i, sign in enumerate(name) if sign == "/"}
    listed = [name for name in names if name != database and not documents.is_of_orbax(name)]
    other = next((name for name in listed if name not in arrays and name not in above), None)
    if other is not None:
        return other
    listed += {documents.ARRAY_METADATAS}.intersection(names)
    while listed:
        outer = listed.pop()
        with storage_errors("list", directory / outer):
            below = [*os.scandir(directory / outer)] if is_directory(directory / outer) else []
        for entry in below:
            name = f"{outer}/{entry.name}"
            if HIDDEN.fullmatch(entry.name):
                continue
            if not (name in arrays or name in above or _is_of_array(name, arrays, entry)):
                return name
            if entry.is_dir(follow_symlinks=False):
                listed.append(name)
    return None


def _is_of_array(name: str, arrays: Collection[str], entry: os.DirEntry[str]) -> bool:
    """Whether Orbax writes a file or directory of this name for an array, or for all of them."""
    if name.startswith(f"{documents.ARRAY_METADATAS}/"):
        return bool(_OF_PROCESS.fullmatch(entry.name)) and entry.is_file(follow_symlinks=False)
    ends = [i for i, sign in enumerate(name) if sign == "/"]
    end = next((i for i in reversed(ends) if name[:i] in arrays), None)
    pattern = _DIRECTORY if entry.is_dir(follow_symlinks=False) else _FILE
    return end is not None and pattern.fullmatch(name[end + 1 :]) is not None
