"""Versions of a publisher, as directories that stock receivers apply to a model's files.

Such receivers are those of slime and ModelExpress.

    weight_v000000/   the full model, as `export_safetensors` writes it: one file, or several
    weight_v000001/   model-00001.safetensors …     the tensors that differ from those of version 0
                      model.safetensors.index.json  written last: without it this is no version yet

Each entry of a delta's file is U8: one zstd frame. It holds `new XOR old` of all bytes of the
tensor; or, as `overwrite`, a u32 count, so many u32 positions of bytes, and the new bytes. The
header's metadata has a hexadecimal digest of each tensor's new bytes. Versions are consecutive,
whatever the steps are; `shardckpt-version.json` in each directory names its step, so that a later
call continues.

One copy of the model's stored chunks is held in memory (`versions.cache`), and one of the tensors
as written. Of each version only the differences are read.

The format: `update_weight_from_disk_delta.py` in https://github.com/THUDM/slime, `modelexpress_rl`
in ai-dynamo/modelexpress.
"""

from __future__ import annotations

import json
import time
import zlib
from collections import deque
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np

from shardckpt.commit.attempts import unfolded
from shardckpt.commit.publish import published_attempt
from shardckpt.convert.formats.canonical_delta.directories import (
    ELSEWHERE,
    VersionDirectories,
    contents_of,
    forms_of,
    note_of,
)
from shardckpt.convert.formats.safetensors.hf_index import INDEX
from shardckpt.convert.formats.safetensors.layout import header_of
from shardckpt.convert.formats.safetensors.model_files import plan_model_files
from shardckpt.convert.naming.apply import outputs_of
from shardckpt.errors import (
    AlreadyExistsError,
    MissingExtraError,
    NotFoundError,
    OptionError,
    ReplacedError,
    StructureMismatchError,
)
from shardckpt.format.hf_files import CONFIG
from shardckpt.format.stored_chunks import compress
from shardckpt.io.store import Store
from shardckpt.io.threads import map_on_threads
from shardckpt.layout.box import Box
from shardckpt.plan.pieces import batches
from shardckpt.reading.checkpoint import Checkpoint
from shardckpt.runs.steps import step_numbers
from shardckpt.state.names import shown
from shardckpt.streaming.elements import OutputReader
from shardckpt.text import Message, few, named
from shardckpt.versions.follower import Follower

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable
    from typing import NoReturn

    from numpy.typing import NDArray

    from shardckpt.convert.options import DeltaOptions
    from shardckpt.io.url import Location
    from shardckpt.reading.naming.outputs import OutputTensor
    from shardckpt.versions.follower import FollowedVersion

    Bytes = NDArray[np.uint8]

_LARGEST = 1 << 32
"""Bytes of a tensor from which on positions of `overwrite` do not fit into 32 bits."""
_FILE_BYTES = 1 << 30
"""Bytes of compressed tensors from which on a version gets another file; less by the budget."""
_PARTS = {"xor": 4, "overwrite": 16}
"""Encoding → budget by bytes of a batch: new bytes, differences, entries, frames, and a file."""
_SLICE = 1 << 20
"""Bytes of which the positions are found at a time."""
_PAUSE = 0.5
"""Seconds between two looks for a new version."""


@dataclass(frozen=True, slots=True)
class WrittenVersion:
    """A directory that was written."""

    url: str
    version: int
    step: int
    tensors: int
    """Number of the tensors in it."""
    nbytes: int
    """Bytes of these tensors' elements."""
    written_bytes: int
    """Bytes of its files."""
    read_bytes: int
    """Stored bytes that were read for it."""

    def to_json(self) -> dict[str, Any]:
        """The version as JSON."""
        return {
            "url": self.url,
            "version": self.version,
            "step": self.step,
            "tensors": self.tensors,
            "bytes": self.nbytes,
            "read_bytes": self.read_bytes,
            "written_bytes": self.written_bytes,
        }


def write_deltas(
    src: Location, dst: Location, options: DeltaOptions, full: Callable[[Checkpoint, Location], Any]
) -> Generator[WrittenVersion]:
    """Write a directory for each version of a publisher; yield each as soon as it is complete.

    Args:
        src: the place of all versions of a `Publisher`.
        dst: the directory of the directories.
        options: with `since`, and `follow`: then the iterator waits for further versions, and does
            not end.
        full: writes a checkpoint as the files of a model, and returns the report.

    Raises:
        NotFoundError: there is no version `since`, or the one is gone that the last directory was
            written from.
        OptionError, NamesMismatchError, ShapeMismatchError, DtypeError, DtypeMismatchError: as in
        `export_safetensors`.
        StructureMismatchError: a version's tensors are not those of version 0.
        AlreadyExistsError: another process writes there (a bucket); or the directory was begun with
            another version.
        FormatError: a file of a written version is missing or damaged.
        CorruptionError, ReplacedError, StorageError: a version could not be read, or not be
            written; or another export writes there.
        MissingExtraError: the package of a checksum is not installed.
    """
    since, root = options.since, Store.open(src)
    directories = VersionDirectories(Store.open(dst))
    writer = _Writer(directories, options)
    assert since is not None, "the options have checked it"
    with directories.locked():
        notes = [] if options.overwrite else directories.notes()
        if not notes:
            first = _version(root, since)
            outputs = plan_model_files(first, options).outputs.tensors
            older = [step for step in step_numbers(root) if step < since]
            attempts = map_on_threads(lambda step: published_attempt(root.sub(str(step))), older)
            before = {
                str(step): unfolded(attempt)
                for step, attempt in zip(older, attempts, strict=True)
                if attempt
            }
            place = directories.prepare_first(overwrite=options.overwrite)
            directories.write_note(place, **note_of(first, since, outputs), before=before)
            report = full(first, place.location)
            directories.finish_first(place)
            place = directories.place(0)
            yield WrittenVersion(
                str(place),
                0,
                since,
                report.tensors,
                report.nbytes,
                report.written_bytes,
                report.read_bytes,
            )
            notes = [directories.note(0)]
        step = notes[0]["step"]
        if step != since:
            there = f"{dst}: version 0 there is step {step}; continue with "
            raise AlreadyExistsError(
                Message(there, named("since", step), ", or write to another directory.")
            )
        current, number = _Current(root, options, notes), len(notes) - 1
        try:
            held = current.begin(notes[-1], str(directories.place(number)))
            while True:
                version = current.next()
                if version is not None:
                    number += 1
                    yield writer.write(number, version, current, held)
                elif options.follow:
                    time.sleep(_PAUSE)
                else:
                    return
        finally:
            current.close()


def _version(root: Store, step: int) -> Checkpoint:
    try:
        return Checkpoint(root.sub(str(step)).location)
    except NotFoundError as e:
        there = step_numbers(root)
        versions = (
            f"there are {few([*map(str, there[-5:])])}, the newest last"
            if there
            else "there are no versions"
        )
        raise NotFoundError(
            Message(
                f"{root}: there is no version {step} (", named("since", step), f"); {versions}."
            )
        ) from e


class _Current:
    """The version that was written last, and those that come."""

    def __init__(self, root: Store, options: DeltaOptions, notes: list[dict[str, Any]]) -> None:
        self._root, self._options, self._begun = root, options, notes[0]
        self.outputs: tuple[OutputTensor, ...] = ()
        """The outputs of the version that `next` or `begin` returned."""
        self.changed: list[OutputTensor] = []
        """Those that may differ from the outputs of the version before."""
        self._sources: set[str] = set()
        """Stored names of the tensors that are written."""
        given = {int(step): attempt for step, attempt in notes[0]["before"].items()} | {
            note["step"]: note["attempt"] for note in notes
        }
        self._follower = Follower(
            str(root.location), None, mode="each", only=self._sources.__contains__, given=given
        )
        self._read_bytes = 0

    def begin(self, last: dict[str, Any], written: str) -> dict[str, Bytes]:
        """Read the version that was written last, to the directory `written`.

        Return its tensors.
        """
        try:
            version = self._follower.at(last["step"])
        except NotFoundError as e:
            raise NotFoundError(
                f"{self._root}: version {last['step']} is gone, and {written} was written from "
                f"it{ELSEWHERE}"
            ) from e
        if contents_of(version.checkpoint) != last["contents"]:
            raise ReplacedError(
                f"{self._root}: version {last['step']} was replaced, and {written} was written "
                f"from it{ELSEWHERE}"
            )
        outputs = self._find_outputs(version.checkpoint)
        digests = forms_of(outputs), forms_of(outputs, views=False)
        if last.get("forms", self._begun["forms"]) not in digests:
            self._refuse(version.checkpoint, "names, shapes, dtypes or sources")
        version.prepare()
        held = {output.name: np.empty(output.nbytes, np.uint8) for output in outputs}
        with version.reading():
            _read(version.checkpoint, [(output, held[output.name]) for output in outputs])
        return held

    def close(self) -> None:
        """Give the lease up, and free the memory."""
        self._follower.close()

    def next(self) -> FollowedVersion | None:
        """The next version, prepared.

        An output may have another source than before: a tensor's stored name is the first one of
        tied tensors, or one that is renamed.
        """
        version = self._follower.poll()
        if version is None:
            return None
        before, plain = self.outputs, forms_of(self.outputs, views=False)
        if forms_of(self._find_outputs(version.checkpoint), views=False) != plain:
            self._refuse(version.checkpoint, "names, shapes or dtypes")
        version.prepare()
        sources = {output.name: output.sources for output in before}
        self.changed = [
            output
            for output in self.outputs
            if output.sources != sources[output.name]
            or any(view.tensor in version.changed for view in output.sources)
        ]
        return version

    def new_bytes(self) -> int:
        """Stored bytes read since the last call."""
        before, self._read_bytes = self._read_bytes, self._follower.cache.read_bytes
        return self._read_bytes - before

    def _find_outputs(self, checkpoint: Checkpoint) -> tuple[OutputTensor, ...]:
        """The outputs of a version; the follower reads their sources from now on."""
        structure, where = checkpoint.record.structure, str(checkpoint.location)
        config = checkpoint.metadata.get(CONFIG)
        self.outputs = outputs_of(structure, self._options, where, config=config).tensors
        self._sources.clear()
        self._sources.update(view.tensor for output in self.outputs for view in output.sources)
        return self.outputs

    def _refuse(self, checkpoint: Checkpoint, what: str) -> NoReturn:
        raise StructureMismatchError(
            f"{checkpoint.location}: {what} of its tensors are not those of version 0 (step "
            f"{self._begun['step']}), and receivers only change bytes. Use the options of the "
            "first call, or write to another directory."
        )


def _read(checkpoint: Checkpoint, outputs: Iterable[tuple[OutputTensor, Bytes]]) -> None:
    """Read complete outputs into memory."""
    parts = [(output, memory) for output, memory in outputs if output.nbytes]
    reader = OutputReader(checkpoint, [output for output, _ in parts])
    reader.read_boxes(
        [
            (i, Box.full(output.shape), memory.view(output.dtype.numpy).reshape(output.shape))
            for i, (output, memory) in enumerate(parts)
        ]
    )


class _Writer:
    """Writes differences."""

    def __init__(self, directories: VersionDirectories, options: DeltaOptions) -> None:
        self._directories = directories
        self._options = options
        self._digest = _digest(options.checksum_format)

    def write(
        self,
        number: int,
        version: FollowedVersion,
        current: _Current,
        held: dict[str, Bytes],
    ) -> WrittenVersion:
        """Write the tensors that differ from those before, and put them in their place.

        Args:
            number: of the version.
            version: the version, prepared.
            current: has its outputs.
            held: all tensors of the version before; this one's afterwards.
        """
        options, place = self._options, self._directories.place(number)
        read_bytes = current.new_bytes()
        if place.exists(INDEX):
            raise AlreadyExistsError(
                f"{place} is complete, and this process has not written it; let one process write "
                "there."
            )
        place.delete_prefix()  # what a killed call left
        files, nbytes = _Files(place, min(_FILE_BYTES, options.budget // 4)), 0
        room = options.budget // _PARTS[options.delta_encoding]
        for batch in batches(current.changed, lambda output: (output.nbytes,), (room,)):
            new = {output.name: np.empty(output.nbytes, np.uint8) for output in batch}
            with version.reading():
                _read(version.checkpoint, [(output, new[output.name]) for output in batch])
            encoded = map_on_threads(
                lambda output: self._encode(output, new[output.name], held[output.name]),  # noqa: B023
                batch,
            )
            for output, entry in zip(batch, encoded, strict=True):
                if entry is not None:
                    files.add(output.name, *entry)
                    nbytes += output.nbytes
            held |= new
        files.flush()
        index = {
            "metadata": {
                "version": f"{number:06d}",
                "base_version": f"{number - 1:06d}",
                "delta_encoding": options.delta_encoding,
                "compression_format": "zstd",
                "checksum_format": options.checksum_format,
            },
            "weight_map": files.weight_map,
        }
        data = json.dumps(index, indent=1).encode()
        sizes = files.sizes | {INDEX: len(data)}
        note_bytes = self._directories.write_note(
            place,
            **note_of(version.checkpoint, version.step, current.outputs),
            files=sizes,
        )
        if not place.create(INDEX, data):
            raise AlreadyExistsError(
                f"{place}: another process has written it meanwhile; let one process write there."
            )
        return WrittenVersion(
            str(place),
            number,
            version.step,
            len(files.weight_map),
            nbytes,
            note_bytes + sum(sizes.values()),
            read_bytes,
        )

    def _encode(self, output: OutputTensor, new: Bytes, old: Bytes) -> tuple[bytes, str] | None:
        """The entry of a tensor and the digest of its new bytes; None if nothing differs."""
        difference = new ^ old
        if not difference.any():
            return None
        if self._options.delta_encoding == "overwrite":
            if output.nbytes >= _LARGEST:
                advice = " has 4 GiB or more, and positions have 32 bits; use "
                raise OptionError(
                    Message(f"{shown(output.name)}{advice}", named("delta_encoding", "xor"), ".")
                )
            difference = _overwrite(difference, new)
        return compress(difference), self._digest(new)


def _overwrite(difference: Bytes, new: Bytes) -> Bytes:
    """The number of bytes that differ, their positions, and their new values."""
    count = np.count_nonzero(difference)
    entry = np.empty(4 + 5 * count, np.uint8)
    numbers, values = entry[: 4 + 4 * count].view("<u4"), entry[4 + 4 * count :]
    numbers[0], end = count, 0
    for start in range(0, difference.size, _SLICE):
        at = np.flatnonzero(difference[start : start + _SLICE]) + start
        begin, end = end, end + at.size
        numbers[1 + begin : 1 + end], values[begin:end] = at, new[at]
    return entry


class _Files:
    """The files of one version."""

    def __init__(self, place: Store, file_bytes: int) -> None:
        self._place, self._file_bytes = place, file_bytes
        self.weight_map: dict[str, str] = {}
        """Tensor → file."""
        self.sizes: dict[str, int] = {}
        """File → bytes."""
        self._entries: dict[str, tuple[bytes, str]] = {}
        self._held = 0

    def add(self, name: str, frame: bytes, digest: str) -> None:
        """Add a tensor; write a file if there are enough."""
        self._entries[name] = frame, digest
        self._held += len(frame)
        if self._held >= self._file_bytes:
            self.flush()

    def flush(self) -> None:
        """Write a file with the tensors that are in none yet."""
        if not self._entries:
            return
        name, at = f"model-{len(self.sizes) + 1:05d}.safetensors", 0
        header: dict[str, Any] = {
            "__metadata__": {key: digest for key, (_, digest) in self._entries.items()}
        }
        for key, (frame, _) in self._entries.items():
            header[key] = {
                "dtype": "U8",
                "shape": [len(frame)],
                "data_offsets": [at, at + len(frame)],
            }
            at += len(frame)
            self.weight_map[key] = name
        data, frames = bytearray(header_of(header)), deque(self._entries.values())
        self._entries.clear()
        while frames:  # each is freed when it is copied
            data += frames.popleft()[0]
        self._place.write(name, data)
        self.sizes[name] = len(data)
        self._held = 0


def _digest(checksum_format: str) -> Callable[[Bytes], str]:
    """The function that makes a tensor's digest."""
    if checksum_format == "adler32":
        return lambda data: f"{zlib.adler32(data.data):08x}"
    module, name = {"xxh3-128": ("xxhash", "xxh3_128"), "blake3": ("blake3", "blake3")}[
        checksum_format
    ]
    try:
        made = getattr(import_module(module), name)
    except ImportError as e:
        raise MissingExtraError(
            Message(
                named("checksum_format", checksum_format),
                f" needs the package {module}: pip install {module}; or use adler32.",
            )
        ) from e
    return lambda data: str(made(data).hexdigest())
