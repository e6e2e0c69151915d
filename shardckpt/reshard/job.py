"""Opening a job: all workers find the same attempt to write into, without talking to each other.

The attempt's name is derived from the input and the output of the job: the source's attempt, or the
identity of a foreign source (`Foreign.identity`); the new structure, layout and compression; how
the work is cut into tasks; and the commit record that the destination had before. So a worker on
another machine, or a restarted job, finds the data that the other workers wrote. With other
options, or after another commit at the destination, the attempt is a different one, and nothing is
mixed up.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import json
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from shardckpt._version import __version__
from shardckpt.commit.assemble import finished_hosts, read_host_record
from shardckpt.commit.attempts import RESHARD, same_elements
from shardckpt.commit.publish import hold_place, read_prior
from shardckpt.commit.table_reading import read_table
from shardckpt.errors import (
    AlreadyExistsError,
    CommitError,
    CorruptionError,
    FormatError,
    MissingDataError,
    OptionError,
    ShardckptError,
    StorageError,
)
from shardckpt.format.record import CheckpointRecord, Contents, host_record_key
from shardckpt.frameworks.base import whole
from shardckpt.io.status import exists, is_directory, is_link
from shardckpt.io.store import Store
from shardckpt.io.threads import map_on_threads
from shardckpt.io.url import parse
from shardckpt.layout.box import BoxArray
from shardckpt.reading.checkpoint import Checkpoint
from shardckpt.reading.fetch import CODECS, ReadableChunks
from shardckpt.reading.locate import Request
from shardckpt.reading.lookup import WholeTable
from shardckpt.reading.reader import ChunkReader
from shardckpt.reshard.plan import ReshardPlan, plan_reshard
from shardckpt.reshard.reuse_method import reuse_method
from shardckpt.streaming.memory import readers
from shardckpt.streaming.source import OpenSource, open_source
from shardckpt.text import Message, named
from shardckpt.writing.host import describe

if TYPE_CHECKING:
    from shardckpt.commit.publish import Prior
    from shardckpt.format.documents import FileReference
    from shardckpt.format.table import Table
    from shardckpt.io.url import Location
    from shardckpt.reshard.options import ReshardOptions
    from shardckpt.reshard.reuse_method import ReuseMethod
    from shardckpt.streaming.source import SourceSpec


@dataclass(frozen=True, slots=True)
class Job:
    """The description of a job that each worker receives; small, and can be pickled."""

    source: str | SourceSpec
    """The checkpoint to read: the URL of a shardckpt checkpoint, or the spec of a foreign one."""
    destination: str
    """URL of the new checkpoint."""
    options: ReshardOptions
    attempt: str | None = None
    """The attempt of all workers, for a worker to compare; None: no comparison, the attempt follows
    from the other fields."""
    call: str = ""
    """Identifies one call of the job: what a worker remembers from an earlier call may have been
    removed since."""
    alone: bool = False
    """Whether this process does the complete job, and so may reuse the source's files."""


class OpenJob:
    """A job with its source open and its plan made, in one process."""

    def __init__(self, job: Job, checkpoint: OpenSource | None = None) -> None:
        """Read the source's record and the destination's, and plan.

        Args:
            job: the job.
            checkpoint: its source, if that is already open.

        Raises:
            NotFoundError: there is no source.
            AlreadyExistsError: a checkpoint is committed at the destination, and `overwrite` is not
                set.
            StorageError: the destination is a file.
            OptionError: the source reuses tensors stored at the destination, which would be
                replaced.
            CommitError: this process makes a different plan than the process that began the job.
        """
        self.job = job
        location = parse(job.destination)
        check_destination(location)
        self.checkpoint: OpenSource = open_source(job.source) if checkpoint is None else checkpoint
        self.plan: ReshardPlan = plan_reshard(self.checkpoint, job.options, location)
        self.checkpoint.limit_reading(
            threads=readers(self.checkpoint.location), memory=self.plan.memory.reading
        )
        self.store = Store.open(location)
        self.reuse: ReuseMethod | None = None
        """The method by which the source's files are reused unchanged (`reuse_files`); None: its
        tensors are read and written."""
        self.prior: Prior = hold_place(
            self.store, read_prior(self.store, overwrite=True), overwrite=True
        )
        self.attempt, self.committed = self._attempt()
        """`committed`: whether the job is done: the checkpoint at the destination is this job's
        result from the earlier state."""
        unchanged = self.checkpoint.native and self.plan.unchanged
        if job.alone and unchanged and (method := reuse_method(self.source_place, self.store)):
            # By workers started elsewhere: continue their attempt.
            begun = self.committed or finished_hosts(self.store.sub(self.attempt))
            self.reuse = None if begun else method
            self.attempt, self.committed = self._attempt()
        if not self.committed and not job.options.overwrite and not self.prior.holds:
            self._refuse_to_replace()
        if not self.committed and any(
            base.attempt and same_elements(base.attempt, self.prior.attempt)
            for base in self.plan.source.structure.bases
        ):
            raise OptionError(
                f"{self.store}: this checkpoint is the base of {self.checkpoint.location}, which "
                "reads tensors from it and could not be read without it; choose another place."
            )
        if job.attempt not in (None, self.attempt):
            raise CommitError(
                f"{self.store}: this worker would write into attempt {self.attempt}, but the job "
                f"writes into {job.attempt}: the source or the destination has changed since the "
                f"job began, or the job runs another shardckpt than {__version__}; start it again."
            )
        self.place = self.store.sub(self.attempt)

    @cached_property
    def source_place(self) -> Store:
        """The attempt to read, of a shardckpt checkpoint."""
        return Store.open(self.checkpoint.location).sub(self.plan.source.attempt)

    @cached_property
    def contents(self) -> Contents:
        """Contents of the new checkpoint; the records of all hosts agree on them."""
        record, small = self.plan.source, dict[str, bytes]()
        # No host has these; the committer rewrites them.
        if self.reuse and record.small_table is not None:
            assert isinstance(self.checkpoint, Checkpoint)
            written = read_table(self.source_place, record.small_table).counts
            requests = [
                Request.of(t, whole(t.shape), [np.empty(t.shape, t.dtype.storage)])
                for t in record.structure.tensors.values()
                if t.pieces[0].path in written
            ]
            with self.checkpoint.reading():
                self.checkpoint.reader.read(requests)
            small = {request.name: request.buffers[0].tobytes() for request in requests}
        by_processes = bool(self.plan.values) or record.processes < len(self.plan.tasks)
        saved_by = record.saved_by if self.reuse else record.processes if by_processes else None
        return Contents(self.plan.target, small, record.metadata, processes=saved_by)

    @cached_property
    def described(self) -> FileReference:
        """A reference to the file of the `contents`; the file is written first if necessary."""
        # Another call of the job may have failed to make that file durable, so on a disk it is
        # written again.
        return describe(self.place, self.contents, always=not self.place.durable_when_visible)

    def hold_finished_tasks(self) -> None:
        """Write a file, so that no collection takes what an earlier call has left for abandoned."""
        self.described = describe(self.place, self.contents, always=True)

    def finished_tasks(self) -> set[int]:
        """Numbers of the tasks whose record exists, with all files that it names.

        A record whose files were removed since proves nothing: it is removed, and the task is done
        again. One listing of the hosts' files shows what exists. In the plain layout, which stores
        chunks as thousands of objects, the check covers only tables and values.
        """
        recorded = finished_hosts(self.place)
        if not recorded:
            return set()
        there = {key for key, _ in self.place.modification_times("hosts/")}
        complete = map_on_threads(lambda number: _is_complete(self.place, number, there), recorded)
        finished = {
            number for number, is_complete in zip(recorded, complete, strict=True) if is_complete
        }
        for number in set(recorded) - finished:
            self.place.delete(host_record_key(number))
        return finished

    def read_back(self, table: Table, place: Store) -> int:
        """Compare the data in an attempt (the new one, or the source's) with a chunk table.

        Return the bytes read.

        Raises:
            CorruptionError, MissingDataError: a chunk differs from the table.
        """
        plan, arrays = self.plan, table.arrays()
        reader = ChunkReader(
            ReadableChunks(place, WholeTable(table), CODECS[plan.compression]),
            threads=readers(place.location),
            memory=plan.memory.writing,
        )
        pieces = {
            piece.path: (tensor, piece)
            for tensor in plan.target.tensors.values()
            for piece in tensor.pieces
            if piece.path in arrays
        }
        reader.confirm(
            (
                Request(
                    tensor.name,
                    tensor.dtype.storage,
                    [piece],
                    BoxArray.of([], len(piece.shape)),
                    [],
                ),
                piece,
                rows.chunk.astype(np.int64),
            )
            for (tensor, piece), rows in ((pieces[path], rows) for path, rows in arrays.items())
        )
        return reader.stats.bytes_read

    def _refuse_to_replace(self) -> None:
        """Raise, because the destination has a checkpoint, or remains of one."""
        try:
            read_prior(self.store, overwrite=False)
        except AlreadyExistsError as e:
            what = (
                "the source itself is there"
                if self.store.location == self.checkpoint.location
                else "another checkpoint is committed there already"
            )
            advice = f"{self.store}: {what}; choose another place, or replace it with "
            raise AlreadyExistsError(Message(advice, named("overwrite", True), ".")) from e

    def _attempt(self) -> tuple[str, bool]:
        """The attempt, and whether it is committed."""
        there = self.prior.record
        if isinstance(there, CheckpointRecord) and RESHARD in there.attempt:
            with suppress(ShardckptError):  # damaged: not this job's result
                before = read_host_record(self.store.sub(there.attempt), 0)[
                    0
                ].prior  # the commit record from when that attempt began
                if there.attempt == self._name(before):
                    return there.attempt, True
        return self._name(self.prior.digest), False

    def _name(self, prior: str | None) -> str:
        """The attempt's name, given the SHA-256 of the destination's commit record.

        None means that there is no record.
        """
        plan = self.plan
        decided: dict[str, Any] = {
            "shardckpt": __version__,
            "source": plan.source.attempt,
            "target": plan.target.to_json(),
            "layout": plan.layout,
            "compression": [
                plan.compression,
                _compressor() if plan.compression is not None else None,
            ],
            "tasks": self.reuse is not None
            or [
                [(s.tensor, s.cells.start, s.cells.stop) for s in task.shares]
                for task in plan.tasks
            ],
            "metadata": plan.source.metadata,
            "prior": prior,
        }
        digest = hashlib.sha256(json.dumps(decided, separators=(",", ":")).encode()).hexdigest()
        return f"{_when(plan.source)}-{digest[:8]}{RESHARD}{digest[8:24]}"


def _is_complete(place: Store, number: int, there: set[str]) -> bool:
    """Whether all files that a host's record names exist."""
    try:
        files = read_host_record(place, number)[0].files
        named = [
            files.table.key,
            *read_table(place, files.table).files,
            *(f"{lane}/manifest.ocdbt" for lane in files.lanes),
        ]
    except (MissingDataError, CorruptionError, FormatError):
        return False
    return there.issuperset([*named, files.values.key] if files.values else named)


def check_destination(location: Location) -> None:
    """Check that a path can hold a checkpoint, as far as the path alone shows.

    Raises:
        StorageError: the path is something other than a directory.
    """
    path = location.local_path
    if exists(path, follow=False) and not is_directory(path):
        what = "a broken symbolic link" if is_link(path) else "a file"
        raise StorageError(
            f"{location}: {what} is at the place of the new checkpoint; choose another place."
        )


def _compressor() -> str:
    """Version of the compressor: two versions may make different bytes of the same elements."""
    from importlib.metadata import version

    return version("numcodecs")


def _when(source: CheckpointRecord) -> str:
    """Creation time of the source in the format that begins attempt names.

    The record's text is not trusted.
    """
    try:
        created = dt.datetime.fromisoformat(source.created).astimezone(dt.UTC)
    except (ValueError, OverflowError):
        created = dt.datetime(2000, 1, 1, tzinfo=dt.UTC)
    return f"{created:%Y%m%dT%H%M%S}"
