"""The lease of a root: the one job that saves there.

Two jobs that save to one root would disturb each other, for example after a restart while the old
job still lives. `job.json` in the root names the run that saves, or publishes versions, there.

1. A run writes its id there with its first save, by compare-and-swap, in place of any earlier id.
2. Before it publishes or deletes anything, it checks that its id is still there. If another id is
   there, a later job controls the root; this one then raises and changes nothing any more.
3. A run's checkpoints have its id in the metadata. A process that commits complete attempts of
   others (`committing`) leaves attempts of any other run than the one in `job.json` alone, because
   that run may have been refused publication.

This does not prevent one save of either job from being published between the check and the
publication. If two jobs save one step at the same time, the conditional write of the commit record
decides: no data of either is lost. The job that comes second finds the other one's step, and its
error names that run (`of_other_job`).

Managers of one process have the same run id, so `job.json` does not tell them apart: `ProcessClaim`
does.
"""

from __future__ import annotations

import gc
import logging
import socket
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakValueDictionary

from shardckpt.commit.publish import RECORD
from shardckpt.errors import (
    AlreadyExistsError,
    CommitError,
    FormatError,
    OptionError,
    OtherJobError,
    StorageError,
)
from shardckpt.format.documents import Fields, open_envelope, seal, utc_now
from shardckpt.format.record import CheckpointRecord, parse_checkpoint
from shardckpt.runs.steps import step_numbers

if TYPE_CHECKING:
    from shardckpt.io.store import Store

JOB = "job.json"
"""Key relative to the root."""
RUN = "run_id"
"""The member of a checkpoint's metadata that names its run."""
PUBLISHED = "published"
"""The member of a version's metadata that its `Publisher` writes: an object with `began`, the time
at which process 0 began it. In `job.json`, `true` if a `Publisher` has claimed the root."""
_ROUNDS = 10
_log = logging.getLogger("shardckpt")
_claims: WeakValueDictionary[tuple[str, str, int], ProcessClaim] = WeakValueDictionary()
"""By root, run and process: the claim of the manager that saves there. It ends with its manager."""


def holder(root: Store) -> str | None:
    """The run that saves to a root; None if no run has claimed it.

    Raises:
        StorageError: the storage failed.
    """
    claim = claim_of(root)
    return None if claim is None else claim.run_id


def claim_of(root: Store) -> JobClaim | None:
    """The claim of the run that saves to a root; None if no run has claimed it.

    Raises:
        StorageError: the storage failed.
    """
    data, _ = root.read_versioned(JOB)
    return None if data is None else _read(root, data)


def of_other_job(root: Store, step: int, run_id: str, error: BaseException) -> OtherJobError | None:
    """The OtherJobError of a save that failed because another job has saved its step.

    Args:
        root: the run's root.
        step: the step that was being saved as a new one.
        run_id: this job's run id.
        error: the error of the save.

    Raises:
        FormatError: the step's commit record cannot be read.
        StorageError: the storage failed.
    """
    if not isinstance(error, AlreadyExistsError | CommitError):
        return None
    place = root.sub(str(step))
    data, _ = place.read_versioned(RECORD)
    record = None if data is None else parse_checkpoint(data, place.path_of(RECORD))
    if isinstance(record, CheckpointRecord):
        run = record.metadata.get(RUN)
    else:  # it was deleted since
        run = holder(root) if isinstance(error, AlreadyExistsError) else None
    if run in (None, run_id):
        return None
    return OtherJobError(
        f"{place}: run {run} has saved this step, and this job, run {run_id}, saves there, too; "
        f"end one of the two, or give it a root of its own. If run {run} has ended, go on from "
        "its latest step with restore(). Nothing of this save was published."
    )


class JobFence:
    """One run's claim on a root; used by its leader alone."""

    def __init__(self, root: Store, run_id: str, *, publishes: bool = False) -> None:
        """Nothing is claimed yet; `publishes`: for a `Publisher`, and not for a manager."""
        self._root = root
        self._run_id = run_id
        self._publishes = publishes
        self._claimed = False

    def check(self) -> None:
        """Check that the root is still this run's, if it was claimed.

        Raises the errors of `hold`.
        """
        if self._claimed:
            self.hold()

    def hold(self) -> None:
        """Claim the root at the first call; later check that it is still this run's.

        Raises:
            OtherJobError: another run has claimed it since; the message names both.
            OptionError: a `Publisher` publishes there, and this is a manager, or the reverse.
            StorageError: the storage failed.
        """
        for _ in range(_ROUNDS):
            data, generation = self._root.read_versioned(JOB)
            claim = None if data is None else _read(self._root, data)
            if claim is not None and self._is_own(claim):
                self._claimed = True
                return
            if claim is None and not self._publishes:
                check_root(self._root)
            document = self._document()
            if (
                self._root.create(JOB, document)
                if data is None
                else self._root.replace(JOB, document, generation)
            ):
                self._claimed = True
                if data is None:
                    _log.info(
                        "%s: a new run begins there; none has saved there before.", self._root
                    )
                return
        raise StorageError(
            f"cannot claim {self._root.path_of(JOB)}: other jobs keep changing it; let only one "
            "job save there."
        )

    def _is_own(self, claim: JobClaim) -> bool:
        """Whether a claim is this run's; if not, this run may still claim the root."""
        if claim.publishes and not self._publishes:
            raise _publishes_there(self._root)
        if self._publishes and not claim.publishes:
            raise OptionError(
                f"{self._root}: a CheckpointManager keeps its run there; publish to a directory "
                "of its own."
            )
        if claim.run_id != self._run_id and self._claimed:
            raise OtherJobError(
                f"{self._root}: run {claim.run_id} ({claim.where_from}) saves there now, and took "
                f"over from run {self._run_id}, which is this job; end one of the two, or "
                "give it a root of its own. Nothing more is published here, and what is "
                "there stays."
            )
        return claim.run_id == self._run_id

    def _document(self) -> bytes:
        kind = {PUBLISHED: True} if self._publishes else {}
        machine = {"machine": socket.gethostname(), "since": utc_now()}
        return seal({"run": self._run_id, **machine, **kind})


class ProcessClaim:
    """One manager's claim on a root among the open managers of this process.

    The manager whose first save began last has the claim.
    """

    def __init__(self, root: Store, run_id: str, process: int) -> None:
        self._key = str(root.location.resolved), run_id, process
        self._claimed = False

    def check(self) -> None:
        """Check that no other open manager has claimed the root since this one did.

        Raises OtherJobError if one has.
        """
        if self._is_taken():
            gc.collect()  # that manager may be gone: managers are in cycles of references
        if self._is_taken():
            raise OtherJobError(
                f"{self._key[0]}: another CheckpointManager of this process has begun to save "
                "there; use one manager for each root, or close that one first. This one saves "
                "and deletes nothing more there."
            )

    def _is_taken(self) -> bool:
        return self._claimed and _claims.get(self._key, self) is not self

    def take(self) -> None:
        """Claim the root at the first call, or if no other manager has it."""
        if not self._claimed or self._key not in _claims:
            self._claimed = True
            _claims[self._key] = self

    def release(self) -> None:
        """Leave the root to other managers."""
        if _claims.get(self._key) is self:
            del _claims[self._key]


def check_root(root: Store) -> None:
    """Refuse a place whose newest step belongs to a `Publisher` or to another program.

    Such a step is a version of a `Publisher`, or a checkpoint of a program such as Orbax.

    The rules of a manager would delete versions that others follow. Beside steps of another program
    it would begin anew.

    Raises:
        OptionError: it is one of these.
    """
    for step in reversed(step_numbers(root)):
        place = root.sub(str(step))
        with suppress(FormatError):
            data = place.read_versioned(RECORD)[0]
            if data is None:
                _check_own(root, place)
            record = None if data is None else parse_checkpoint(data, place.path_of(RECORD))
            if isinstance(record, CheckpointRecord):
                if PUBLISHED in record.metadata:
                    raise _publishes_there(root)
                return


def _check_own(root: Store, place: Store) -> None:
    from shardckpt.reading.missing import other_format  # a save does without what reads

    if other := other_format(place.list_children()):
        raise OptionError(
            f"{root}: step {place.location.name} there is {other}, which a CheckpointManager does "
            f"not continue; import it (`shardckpt import {place} URL`), or give the manager a "
            "directory of its own. Nothing was published."
        )


def _publishes_there(root: Store) -> OptionError:
    return OptionError(
        f"{root}: a Publisher keeps its versions there; save to a directory of its own. Nothing "
        "was published or deleted."
    )


class JobClaim(NamedTuple):
    """The contents of `job.json`."""

    run_id: str
    where_from: str
    """Details for people."""
    publishes: bool
    """Whether a `Publisher` has claimed the root."""


def _read(root: Store, data: bytes) -> JobClaim | None:
    """The claim of a file; None: the file is damaged, and claims nothing."""
    where = root.path_of(JOB)
    try:
        document = open_envelope(data, where)
        read = Fields(document, where)
        where_from = f"on {read.string('machine')}, since {read.string('since')}"
        return JobClaim(read.string("run"), where_from, PUBLISHED in document)
    except FormatError:
        return None
