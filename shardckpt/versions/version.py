"""One version on its way to the storage, and what process 0 decides about it.

A version is written as differences from the version before, if that is published (`writing.kept`).
Process 0 alone decides: the base, by the digest of its contents; a version with all elements (an
*anchor*); or that a waiting version is skipped because a later one has come. It announces the
decision, and the others wait for it. A process that does not have the base's elements, because it
restarted or its part failed, writes its chunks as a whole.

A version that was not published is never a base: the next one is an anchor.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

from shardckpt.commit.base_places import base_record, base_url, may_differ
from shardckpt.commit.waiting import pause
from shardckpt.errors import CommitError, NamesMismatchError, ShardckptError
from shardckpt.format.bases import Base
from shardckpt.format.documents import utc_now
from shardckpt.frameworks.coordination import WaitNotice
from shardckpt.io.threads import InterruptibleCondition
from shardckpt.layout.dtypes import castable
from shardckpt.runs.job import PUBLISHED
from shardckpt.state.select import check_selection, matches, select
from shardckpt.versions.converted import ConvertedSource
from shardckpt.versions.device import DeviceSource, comparable
from shardckpt.writing.kept import SkippedError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from shardckpt.format.record import CheckpointRecord, Contents
    from shardckpt.frameworks.base import Source
    from shardckpt.frameworks.coordination import Coordinator
    from shardckpt.io.store import Store
    from shardckpt.layout.dtypes import DType
    from shardckpt.state.flatten import Flat
    from shardckpt.state.select import Only
    from shardckpt.versions.device import DeviceShare
    from shardckpt.writing.handle import SaveHandle
    from shardckpt.writing.kept import KeptChunks

_KEYS = 16
"""Number of keys of a publisher's decisions: few, as each decision lists a whole chain."""
_LOOK, _LAST_LOOK = 0.01, 1.0
"""Seconds between two looks for the decision of process 0: least and most. The least also for the
end of the version before, which takes no request."""


@dataclass(frozen=True, slots=True)
class Published:
    """A published version, as the base of the next one."""

    step: int
    attempt: str
    """The attempt that the commit record named; processes know by it whether they have its
    elements."""
    contents: str
    """SHA-256 of its fingerprint's file."""
    compression: str | None
    chain: tuple[Base, ...]
    """Its own chain, as its record names it."""

    @classmethod
    def of(cls, step: int, record: CheckpointRecord) -> Self:
        """The version of a commit record."""
        assert record.fingerprint is not None
        return cls(
            step,
            record.attempt,
            record.fingerprint.sha256,
            record.compression,
            record.structure.chain,
        )

    def chain_from(self, root: Store, step: int) -> tuple[Base, ...]:
        """The chain of a version that differs from this one."""
        url = base_url(root.location.join(str(step)), root.location.join(str(self.step)))
        return (Base("", "packed", self.compression, url, self.contents), *self.chain)

    def to_json(self) -> dict[str, Any]:
        """JSON form."""
        chain = [base.to_json() for base in self.chain]
        return {
            "step": self.step,
            "attempt": self.attempt,
            "contents": self.contents,
            "compression": self.compression,
            "chain": chain,
        }

    @classmethod
    def from_json(cls, doc: dict[str, Any]) -> Self:
        """Inverse of `to_json`."""
        chain = tuple(
            Base("", base["layout"], base["compression"], base["url"], base["contents"])
            for base in doc["chain"]
        )
        return cls(doc["step"], doc["attempt"], doc["contents"], doc["compression"], chain)


@dataclass(slots=True)
class Selection:
    """The tensors that are published, and their dtype."""

    include: Only | None
    exclude: Only | None
    dtype: DType | None
    _is_checked: bool = False
    """Whether a state has passed `check`."""

    def selects(self, name: str) -> bool:
        """Whether a name is published."""
        return (self.include is None or matches(self.include, name)) and not (
            self.exclude is not None and matches(self.exclude, name)
        )

    def check(self, flat: Flat) -> None:
        """Refuse patterns of `exclude` that leave nothing out: they are probably misspelt.

        Once a state has passed, others do too: tensors may come and go.
        """
        if not self._is_checked and not callable(self.exclude):
            check_selection(self.exclude or None, flat.tree, "the state", option="exclude")
        self._is_checked = True

    def selected(self, flat: Flat) -> Flat:
        """The selected part of a flattened state."""
        if self.include is None and self.exclude is None:
            return flat
        tree, stored = select(flat.tree, self.selects)
        if not stored:
            raise NamesMismatchError(
                "include= and exclude= select no tensor of the state; the names are those of "
                "`shardckpt info`."
            )
        tensors = {name: flat.tensors[old] for name, old in stored.items()}
        values = {name: value for name, value in flat.per_process.items() if self.selects(name)}
        return replace(flat, tree=tree, tensors=tensors, per_process=values)

    def converted(self, sources: dict[str, Source]) -> dict[str, Source]:
        """Sources of floating-point tensors in the dtype to publish."""
        to = self.dtype
        if to is None:
            return sources
        return {
            name: ConvertedSource(one, to)
            if one.dtype != to and _is_float(one.dtype) and castable(one.dtype, to)
            else one
            for name, one in sources.items()
        }


def _is_float(dtype: DType) -> bool:
    return dtype.name in ("float64", "float32", "float16", "bfloat16")


class PublishedVersion:
    """One version, on one process; see `writing.kept.VersionToWrite`."""

    def __init__(
        self,
        root: Store,
        step: int,
        key: str,
        kept: KeptChunks,
        selection: Selection,
        *,
        number: int,
        share: DeviceShare | None,
        proof: bool,
        before: PublishedVersion | None,
        decide: Callable[[PublishedVersion, PublishedVersion | None], Published | None],
        settle: Callable[[Published], None],
        timeout: float,
    ) -> None:
        """Nothing is decided yet.

        Args:
            root: the place of all versions.
            step: of this version.
            key: names the publisher, alike on all processes.
            kept: the elements that this process wrote last.
            selection: what is published.
            number: number of the call of `publish`.
            share: the copies on this process's devices; None: tensors are staged in host memory.
            proof: see `VersionToWrite`.
            before: the version of the call before.
            decide: called on process 0 with this version and the last one before that was not
                skipped, which has ended; returns the base, None for an anchor.
            settle: called on process 0 after the version is published and announced.
            timeout: seconds to wait for process 0.
        """
        self.step = step
        self.before = before
        """The version that it waits for."""
        self.is_skipped = False
        """Whether it is skipped; known to process 0."""
        self.kept = kept
        self.selection = selection
        self.proof = proof
        self.supersedes: Mapping[str, str | None] = {}
        """See `VersionToWrite`."""
        self.outcome: Published | None = None
        """The version when it is published; on process 0 only."""
        self.handle: SaveHandle | None = None
        """See `VersionToWrite`."""
        self.base: Published | None = None
        """The version that this one differs from."""
        self._root = root
        self._key = f"{key}/{number % _KEYS}"
        self._number = number
        self._share = share
        self._decide = decide
        self._settle = settle
        self._timeout = timeout
        self._changed = InterruptibleCondition()
        self._began = ""
        """Time at which process 0 began it."""
        self._started = False

    @property
    def done(self) -> bool:
        """Whether no thread works at it: it was published, failed, skipped or not begun."""
        return self.handle is None or self.handle.done()

    def skip(self) -> bool:
        """Skip it, unless it has started; return whether it is skipped.

        Process 0 alone decides that.
        """
        with self._changed.lock:
            self.is_skipped = not self._started
            self._changed.notify_all()
            return self.is_skipped

    def fail(self, coordinator: Coordinator, error: BaseException) -> None:
        """Tell the other processes, as process 0, that this version is not begun."""
        if coordinator.world.process == 0 and coordinator.world.processes > 1:
            with suppress(ShardckptError):  # they wait for a limited time
                self._announce(coordinator, {"failed": str(error) or type(error).__name__})

    # --- asked by the save

    def selected(self, flat: Flat) -> Flat:
        """See `VersionToWrite`."""
        self.selection.check(flat)
        return self.selection.selected(flat)

    def converted(self, sources: dict[str, Source]) -> dict[str, Source]:
        """See `VersionToWrite`."""
        converted = self.selection.converted(sources)
        if self._share is None:
            return converted
        return {
            name: DeviceSource(source, converted[name].dtype, self._share, self._number)
            if comparable(source, converted[name].dtype)
            else converted[name]
            for name, source in sources.items()
        }

    def await_turn(
        self, place: Store, coordinator: Coordinator, stopped: Callable[[], str]
    ) -> None:
        """See `VersionToWrite`."""

        def check() -> None:
            if reason := stopped():
                raise CommitError(f"{place}: {reason} Nothing was published.")

        self.base = self._agree_on_base(str(place), coordinator, check)
        # Here an earlier version may still be at work that process 0 has given up, and would change
        # the kept elements.
        before, self.before = self.before, None
        while before is not None:
            while not before.done:
                check()
                time.sleep(_LOOK)
            before = before.before

    def begin(self, contents: Contents, place: Store, attempt: str) -> Contents:
        """See `VersionToWrite`."""
        structure = contents.structure
        contents = replace(
            contents, metadata={**contents.metadata, PUBLISHED: {"began": self._began}}
        )
        if self._share is not None:
            self._share.arrive(self._number)
        if self.base is None:
            self.kept.begin(attempt, ())
            return contents
        if self.kept.attempt != self.base.attempt:
            self.kept.forget()  # they are of another version
        chain = self.base.chain_from(self._root, self.step)
        _, earlier = base_record(
            place.location,
            chain[0],
            f"version {self.step}",
            "publish again, which begins with all elements",
        )
        tensors, differing = dict(structure.tensors), set[str]()
        for name, tensor in structure.tensors.items():
            before = earlier.structure.tensors.get(name)
            if before is not None and tensor.base is None and may_differ(tensor, before):
                tensors[name] = replace(tensor, difference=True)
                differing.update(
                    piece.path for piece in {*tensor.pieces}.intersection(before.pieces)
                )
        self.kept.begin(attempt, differing)
        return replace(contents, structure=replace(structure, tensors=tensors, chain=chain))

    def published(self, record: CheckpointRecord) -> None:
        """See `VersionToWrite`."""
        self.outcome = Published.of(self.step, record)

    def settle(self) -> None:
        """See `VersionToWrite`."""
        if self.outcome is not None:
            self._settle(self.outcome)

    # --- the decision

    def _agree_on_base(
        self, where: str, coordinator: Coordinator, check: Callable[[], None]
    ) -> Published | None:
        """The base, as process 0 decides it; it decides when the version before has ended."""
        if coordinator.world.process:
            decision = self._hear(coordinator, where, check)
        else:
            try:
                decision = self._decide_now(check)
            except BaseException as e:
                self.fail(coordinator, e)
                raise
            if coordinator.world.processes > 1:
                self._announce(coordinator, decision)
        if "skipped" in decision:
            if self._share is not None:
                self._share.skip(self._number)
            raise SkippedError(
                f"{where}: this version is skipped, because a later one was published while it "
                "waited."
            )
        if "failed" in decision:
            raise CommitError(
                f"{where}: process 0 could not begin this version: {decision['failed']} Nothing "
                "was published."
            )
        self._began = decision["began"]
        return None if decision["base"] is None else Published.from_json(decision["base"])

    def _announce(self, coordinator: Coordinator, decision: dict[str, Any]) -> None:
        coordinator.announce(self._key, {"number": self._number, **decision})

    def _decide_now(self, check: Callable[[], None]) -> dict[str, Any]:
        before = self.before
        while before is not None and (not before.done or before.is_skipped):
            if before.done:
                before = before.before
                continue
            check()
            with self._changed.lock:
                if self.is_skipped:
                    return {"skipped": True}
                self._changed.wait(_LOOK)
        with self._changed.lock:
            if self.is_skipped:
                return {"skipped": True}
            self._started = True
        base = self._decide(self, before)
        return {"base": None if base is None else base.to_json(), "began": utc_now()}

    def _hear(
        self, coordinator: Coordinator, where: str, check: Callable[[], None]
    ) -> dict[str, Any]:
        began, notice = time.monotonic(), WaitNotice(where)
        before, waited = self.before, 0.0
        while (decision := coordinator.peek(self._key)) is None or (
            decision["number"] < self._number
        ):
            if waited > self._timeout and before is None:
                raise CommitError(
                    f"{where}: process 0 has not begun this version within {self._timeout:g} s. "
                    "All processes must publish the same steps."
                )
            notice.look(lambda: "process 0 to begin this version")
            look = time.monotonic() + pause(waited, _LOOK, _LAST_LOOK)
            while time.monotonic() < look:
                check()
                time.sleep(_LOOK)
                while before is not None and before.done:  # process 0 begins this one now
                    before, began, look = before.before, time.monotonic(), 0.0
            waited = time.monotonic() - began
        document: dict[str, Any] = decision
        # A version that this process has not written is not published: process 0 has gone on.
        return document if document["number"] == self._number else {"skipped": True}
