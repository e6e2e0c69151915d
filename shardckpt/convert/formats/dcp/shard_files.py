"""Reader of the safetensors files of DCP's `HuggingFaceStorageWriter(save_distributed=True)`.

    shard-00002-model-00001-of-00003.safetensors  the parts that process 2 has of the tensors of the
                                                  first of three files

Each header gives the offset of every part in its tensor (`DCP_SHARDING_INFO`,
torch/distributed/checkpoint/_hf_utils.py), but not the tensor's shape: it is computed from the
parts. The files of a process are known to be missing by its number, unless it is the last one. A
process writes no file for which it has no part, so a note names the files that no process has, or
only some.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardckpt.convert.files.file_version import FileVersion, identity_of
from shardckpt.convert.foreign import ForeignPart, row_chunks
from shardckpt.convert.formats.safetensors.header import open_header
from shardckpt.convert.placed import PlacedTensor, RowMajor, place_tensors
from shardckpt.convert.span import Span
from shardckpt.errors import FormatError, MissingDataError
from shardckpt.io.store import Store
from shardckpt.io.threads import map_on_threads
from shardckpt.state.names import shown
from shardckpt.text import few, shorten

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardckpt.convert.placed import Foreign
    from shardckpt.io.url import Location
    from shardckpt.layout.dtypes import DType

_SHARD = re.compile(r"shard-([0-9]{5,})-model-([0-9]{5,})-of-([0-9]{5,})\.safetensors", re.ASCII)
_STARTS = "DCP_SHARDING_INFO"
_MOVE = "The writer removes no older files; move those of all saves but one elsewhere."


def shard_files(names: Sequence[str]) -> list[str]:
    """The names of such files among the names in a directory."""
    return [name for name in names if _SHARD.fullmatch(name)]


def open_shards(location: Location, names: Sequence[str]) -> Foreign:
    """Open such files.

    Args:
        location: their directory.
        names: their names.

    Raises:
        MissingDataError: the files of a process are missing.
        FormatError: a file is malformed, parts do not cover a tensor (the message names it), or
            there are files of several saves.
        DtypeError: a tensor's dtype cannot be stored.
    """
    store = Store.open(location)
    notes = _notes(location, names)
    parts: dict[str, dict[tuple[tuple[int, ...], tuple[int, ...]], _Shard]] = {}
    opened = map_on_threads(lambda name: _open(store, name), names)
    for _, shards in opened:
        for name, shard in shards.items():
            key = shard.start, shard.shape
            first = parts.setdefault(name, {}).setdefault(key, shard)
            if first is not shard and 0 not in shard.shape:
                raise FormatError(
                    f"{location}: there are files of several saves: {shown(name)} has one part in "
                    f"{first.span.file} and in {shard.span.file}, and one save writes a "
                    f"part once. {_MOVE}"
                )
    state = {
        name: _tensor(name, list(of_tensor.values()), str(location))
        for name, of_tensor in parts.items()
    }
    return place_tensors(
        state, "dcp", location, identity_of(location, [version for version, _ in opened]), notes
    )


def _notes(location: Location, names: Sequence[str]) -> list[str]:
    """Notes on files that may be missing.

    Raises:
        MissingDataError: the files of a process are missing.
        FormatError: there are files of several saves, whose parts would be mixed.
    """
    matches = [match for name in names if (match := _SHARD.fullmatch(name))]
    held = {tuple(map(int, match.groups())) for match in matches}
    count, *others = sorted({count for _, _, count in held})
    if others:
        raise FormatError(
            f"{location}: there are files of several saves: of {count} and of {others[0]} for each "
            f"process. {_MOVE}"
        )
    processes = sorted({process for process, _, _ in held})
    last = processes[-1]
    if (process := _first_gap(processes)) < last:
        raise MissingDataError(
            f"{location}: the file of shard {process} is missing, although shard {last} exists; "
            "replace it with a backup."
        )
    files = sorted(Counter(file for _, file, _ in held).items())
    gap = _first_gap([file for file, _ in files])
    lacking = [f"no shard has file {gap} of {count}"] if gap <= count else []
    lacking.extend(
        f"file {file} of {count} is there for {shards} of {len(processes)} shards"
        for file, shards in files
        if shards < len(processes)
    )
    note = (
        f"{len(names)} safetensors files of {len(processes)} processes. They do not say how large "
        f"tensors are: if there were more processes than {last}, their data is missing."
    )
    if not lacking:
        return [note]
    return [
        note,
        f"{few(lacking)}: either no part of a tensor belonged there, or files are missing.",
    ]


def _first_gap(numbers: Sequence[int]) -> int:
    """The least number from 1 on that is not among ascending numbers.

    >>> _first_gap([0, 1, 2, 4])
    3
    """
    positive = [n for n in numbers if n > 0]
    return next((i for i, n in enumerate(positive, 1) if i != n), len(positive) + 1)


@dataclass(slots=True, eq=False)
class _Shard(RowMajor):
    """A part of a tensor."""

    start: tuple[int, ...]
    dtype: DType


def _open(store: Store, name: str) -> tuple[FileVersion, dict[str, _Shard]]:
    version = FileVersion(store, name)
    header = open_header(version)
    try:
        document = json.loads(header.metadata[_STARTS])
        starts = {tensor: tuple(document[tensor]["saved_offsets"]) for tensor in header.tensors}
    except (KeyError, TypeError, ValueError, RecursionError) as e:
        raise FormatError(
            f"{version}: its header has no {_STARTS} that says where each part begins "
            f"({shorten(str(e))})."
        ) from e
    shards = {}
    for tensor, stored in header.tensors.items():
        start, shape = starts[tensor], stored.shape
        if len(start) != len(shape) or not all(type(n) is int and n >= 0 for n in start):
            raise FormatError(
                f"{version}: {shown(tensor)} of shape {shape} cannot begin at {shorten(start)}; "
                "the file is damaged."
            )
        shards[tensor] = _Shard(
            Span(version, stored.start, stored.stop), shape, start, stored.dtype
        )
    return version, shards


def _tensor(name: str, shards: list[_Shard], where: str) -> PlacedTensor:
    first = shards[0]
    if any(shard.dtype != first.dtype or len(shard.start) != len(first.start) for shard in shards):
        raise FormatError(
            f"{where}: {shown(name)}: its parts have different dtypes or numbers of dimensions; "
            "give the files of a single save."
        )
    shape = tuple(
        max(shard.start[d] + shard.shape[d] for shard in shards) for d in range(len(first.start))
    )
    kept = [shard for shard in shards if 0 not in shard.shape] or shards[:1]
    parts = tuple(
        ForeignPart(
            shard.start,
            shard.shape,
            row_chunks(shard.shape, first.dtype.itemsize),
        )
        for shard in kept
    )
    return PlacedTensor(shape, first.dtype, parts, places=tuple(kept))
