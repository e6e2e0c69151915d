"""Opening a job: all workers find the same attempt to write into, without talking to each other.

Its name follows from what is read and what is to come of it: the source's attempt, or what tells a foreign source from any other
(`Foreign.identity`); the new structure, layout and compression; how the work is cut into tasks; and the commit record that the
destination has before. So a worker on another machine, or a job that was interrupted and is started again, finds what the others
have written; with other options, or after something else was committed there, it is another attempt, and nothing is mixed up.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import json
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from shardckpt._version import __version__
from shardckpt.commit.assemble import finished_hosts, read_host_record, read_table
from shardckpt.commit.attempts import RESHARD
from shardckpt.commit.publish import hold_place, read_prior
from shardckpt.errors import AlreadyExistsError, CommitError, OptionError, ShardckptError, StorageError
from shardckpt.format.record import CheckpointRecord, Contents
from shardckpt.io.store import Store
from shardckpt.io.url import parse
from shardckpt.reading.checkpoint import Checkpoint
from shardckpt.reshard.carrying import way
from shardckpt.reshard.memory import readers
from shardckpt.reshard.plan import ReshardPlan, plan_reshard
from shardckpt.reshard.source import OpenSource, open_source
from shardckpt.writing.host import describe

if TYPE_CHECKING:
    from shardckpt.commit.publish import Prior
    from shardckpt.format.documents import FileReference
    from shardckpt.io.url import Location
    from shardckpt.reshard.options import ReshardOptions
    from shardckpt.reshard.source import SourceSpec

__all__ = ["Job", "OpenJob", "check_destination"]


@dataclass(frozen=True, slots=True)
class Job:
    """What a worker is told; small, and can be pickled."""

    source: str | SourceSpec
    """The checkpoint that is read: url of one of ours, or the spec of any other."""
    destination: str
    """Url of the new one."""
    options: ReshardOptions
    attempt: str | None = None
    """The one that all write into, for a worker to compare; None: whichever follows from the rest."""
    call: str = ""
    """Tells this call from others of the same job: what a worker remembers of one is no longer so if all was removed since."""
    alone: bool = False
    """Whether this process does all of it, and so may take files over as they are."""


class OpenJob:
    """A job with its source open and its plan made: what a process has of it."""

    def __init__(self, job: Job, found: OpenSource | None = None) -> None:
        """Read the source's record and the destination's, and plan.

        Args:
            job: which one.
            found: its source, where that is open already.

        Raises:
            NotFoundError: no source there.
            AlreadyExistsError: a checkpoint is committed at the destination, and is not to be replaced.
            StorageError: a file stands there.
            OptionError: the destination holds tensors that the source has left there, and would be replaced.
            CommitError: this process makes another plan of it than who began the job.
        """
        self.job = job
        location = parse(job.destination)
        check_destination(location)
        self.checkpoint: OpenSource = open_source(job.source) if found is None else found
        self.plan: ReshardPlan = plan_reshard(self.checkpoint, job.options, location)
        self.checkpoint.limit_reading(threads=readers(self.checkpoint.location), memory=self.plan.memory.reading)
        self.store = Store.open(location)
        self.carries = False
        """Whether the source's files are taken over as they are (`carry`)."""
        self.prior: Prior = hold_place(self.store, read_prior(self.store, overwrite=True), overwrite=True)
        self.attempt, self.committed = self._attempt()
        """The second: whether the job is done, for what is committed at the destination is what it makes of what was there before."""
        ours = isinstance(self.checkpoint, Checkpoint)
        if job.alone and ours and self.plan.unchanged and way(self.source_place, self.store):
            begun = self.committed or finished_hosts(self.store.sub(self.attempt))  # by workers that others started: go on there
            self.carries = not begun
            self.attempt, self.committed = self._attempt()
        if not self.committed and not job.options.overwrite and not self.prior.holds:
            self._refuse_to_replace()
        if not self.committed and any(base.attempt == self.prior.attempt for base in self.plan.source.structure.bases):
            raise OptionError(
                f"{self.store}: {self.checkpoint.location} has left tensors in this checkpoint, its base, and could not be read any more "
                f"if it were replaced; reshard to another place."
            )
        if job.attempt not in (None, self.attempt):
            raise CommitError(
                f"{self.store}: this worker would write into the attempt {self.attempt}, and the job writes into {job.attempt}: the source "
                f"or the destination has changed since it began, or it runs another shardckpt than {__version__}; start the job anew."
            )
        self.place = self.store.sub(self.attempt)

    @cached_property
    def source_place(self) -> Store:
        """The attempt that is read, of a checkpoint of ours."""
        return Store.open(self.checkpoint.location).sub(self.plan.source.attempt)

    @cached_property
    def described(self) -> FileReference:
        """The file, written by now, in which every host says what the new checkpoint holds."""
        record, small = self.plan.source, dict[str, bytes]()
        if self.carries and record.small_table is not None:  # no host has these, and the committer writes them anew
            assert isinstance(self.checkpoint, Checkpoint)
            written = read_table(self.source_place, record.small_table).counts
            tensors = record.structure.tensors
            small = {name: self.checkpoint.read(name).tobytes() for name in tensors if tensors[name].pieces[0].path in written}
        saved_by = record.saved_by if self.carries else record.processes if self.plan.values else None
        return describe(self.place, Contents(self.plan.target, small, record.metadata, processes=saved_by))

    def _refuse_to_replace(self) -> None:
        """Raise, because there is a checkpoint, or what is left of one."""
        try:
            read_prior(self.store, overwrite=False)
        except AlreadyExistsError as e:
            what = (
                "the source itself lies there"
                if self.store.location == self.checkpoint.location
                else "another checkpoint is committed there already"
            )
            raise AlreadyExistsError(f"{self.store}: {what}; choose another place, or replace it with overwrite=True.") from e

    def _attempt(self) -> tuple[str, bool]:
        """The attempt, and whether it is committed."""
        there = self.prior.record
        if isinstance(there, CheckpointRecord) and RESHARD in there.attempt:
            with suppress(ShardckptError):  # damaged: not what this job makes
                before = read_host_record(self.store.sub(there.attempt), 0)[0].prior  # what lay here when that was begun
                if there.attempt == self._name(before):
                    return there.attempt, True
        return self._name(self.prior.digest), False

    def _name(self, prior: str | None) -> str:
        """The attempt of a job that finds that commit record (its SHA-256; None: there is none)."""
        plan = self.plan
        decided: dict[str, Any] = {
            "shardckpt": __version__,
            "source": plan.source.attempt,
            "target": plan.target.to_json(),
            "layout": plan.layout,
            "compression": [plan.compression, _compressor() if plan.compression is not None else None],
            "tasks": self.carries or [[(s.tensor, s.cells.start, s.cells.stop) for s in task.shares] for task in plan.tasks],
            "metadata": plan.source.metadata,
            "prior": prior,
        }
        digest = hashlib.sha256(json.dumps(decided, separators=(",", ":")).encode()).hexdigest()
        return f"{_when(plan.source)}-{digest[:8]}{RESHARD}{digest[8:24]}"


def check_destination(location: Location) -> None:
    """Whether a checkpoint may go there, as far as a look at a path tells.

    Raises:
        StorageError: something else than a directory stands there.
    """
    path = location.local
    if path is not None and not path.is_dir() and (path.exists() or path.is_symlink()):
        what = "a symbolic link that leads nowhere" if path.is_symlink() else "a file"
        raise StorageError(f"{location}: {what} stands where the new checkpoint is to go; choose another place.")


def _compressor() -> str:
    """What compresses chunks: two versions may make different bytes of the same elements."""
    from importlib.metadata import version

    return version("numcodecs")


def _when(source: CheckpointRecord) -> str:
    """The time at which the source was made, as attempts' names begin; the record's time is anybody's text."""
    try:
        created = dt.datetime.fromisoformat(source.created).astimezone(dt.UTC)
    except (ValueError, OverflowError):
        created = dt.datetime(2000, 1, 1, tzinfo=dt.UTC)
    return f"{created:%Y%m%dT%H%M%S}"
