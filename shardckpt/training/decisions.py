"""The decision whether a step is saved: the same answer on all processes, without a collective.

Every process answers by itself where the answer follows from step numbers alone. Clocks, signals
and saves in flight differ between processes, so the leader (process 0) decides about those, for
future steps:

1. The leader announces a timeline (`timeline`) that reaches some steps ahead of its own step, and
   extends it before it reaches the end. A new save is placed at the first step beyond the timeline,
   which no process can have passed.
2. The other processes read the timeline (`peek`) when they reach a step beyond the part that they
   know, not at every step. A process ahead of the timeline waits, for a bounded time, until the
   leader has extended it.
3. A process that gets a notice of preemption announces it; the leader looks for such notices
   whenever it extends the timeline.

The timeline reaches as many steps ahead as fit into `lead_time`, from 2 to 64. So a loop of slow
steps reacts within a few steps, and a loop of fast steps within the lead time, with a fraction of
an exchange per step:

| per step | leader | others |
|---|---|---|
| policies of step numbers alone | 0 | 0 |
| all others, steps of a second or more | ≤ ½ `announce`, ≤ ½ `peek` | ≤ ½ `peek` |
| all others, steps of 10 ms | ≤ 1/32 `announce`, ≤ 1/32 `peek` | ≤ 1/32 `peek` |

Waiting cannot deadlock: a process waits only for a leader that is at least two steps behind, and
only after it has done its own part of all those steps.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardckpt.errors import CoordinationError
from shardckpt.frameworks.coordination import ALL_MUST_CALL, SilentStoreError, WaitNotice
from shardckpt.training.policies import Moment
from shardckpt.training.timeline import Timeline

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardckpt.frameworks.coordination import Coordinator
    from shardckpt.training.policies import Policy

LEADER = 0
"""The process that decides."""
_LEAST_LEAD, _MOST_LEAD = 2, 64
"""Bounds of the number of steps that the leader decides ahead. With fewer, processes in step would
wait for each other; with more, a loop that becomes slow would react late."""
_FIRST_LOOK, _LAST_LOOK = 0.001, 0.1
"""Shortest and longest pause, in seconds, between two looks of a waiting process."""


@dataclass(frozen=True, slots=True)
class StepDecision:
    """The decision about one step."""

    save: bool
    skipped: bool = False
    """Whether the step was due, and is skipped because a save is in flight."""
    notice: str | None = None
    """The source of a preemption notice that all processes know by now."""


class Decisions:
    """One process's view of which steps are saved."""

    def __init__(
        self,
        coordinator: Coordinator,
        policy: Policy,
        *,
        key: str,
        skips: bool = False,
        lead_time: float = 1.0,
        timeout: float = 600.0,
        in_flight: Callable[[], bool] = lambda: False,
        notice: Callable[[], str | None] = lambda: None,
    ) -> None:
        """Decide by a policy.

        Args:
            coordinator: passes the leader's decisions to the other processes.
            policy: when to save; the same on all processes.
            key: a key that no other decisions of this job use.
            skips: whether to skip a step that is due while a save is in flight.
            lead_time: seconds of steps that the leader decides ahead.
            timeout: seconds that a process waits for the leader.
            in_flight: whether a save is in flight; called on the leader only.
            notice: the source of the preemption notice that this process has received, if any.
        """
        world = coordinator.world
        self._coordinator = coordinator
        self._policy = policy
        self._skips = skips
        self._lead_time = lead_time
        self._timeout = timeout
        self._in_flight = in_flight
        self._notice = notice
        self._alone = world.processes == 1
        self._leads = world.process == LEADER
        self._together = not self._alone and (policy.by_leader or skips)
        self._key = key
        self._rounds = 0
        self.previous: int | None = None
        """The last step that was asked about, or the restored step."""
        self._answer = StepDecision(save=False)
        self._begin(None)

    def restart(self, step: int | None) -> None:
        """Continue after this step, or from the beginning, on all processes."""
        self._rounds += 1
        self._begin(step)

    def _begin(self, step: int | None) -> None:
        self.previous = step
        self._answer = StepDecision(save=False)
        self._timeline = Timeline(0 if step is None else step + 1)
        self._saved_at: int | None = None
        self._noticed: str | None = None
        self._unannounced = False
        self._acted = False
        self._asked = self._decided = time.monotonic()

    def saved(self, step: int) -> None:
        """Note that a save was made at a step, due or forced."""
        self._saved_at = step
        self._decided = time.monotonic()

    def at(self, step: int) -> StepDecision:
        """The decision about a step; the same answer when asked again about the same step.

        Raises:
            CoordinationError: the leader has not decided in time, or is unreachable.
        """
        if self.previous is not None and step <= self.previous:
            return self._answer if step == self.previous else StepDecision(save=False)
        source = self._notice() if self._policy.notices else None
        if not self._together:
            self._answer = self._by_itself(step, source)
        else:
            if self._leads:
                self._lead(step, source)
            else:
                self._follow(step, source)
            self._answer = self._by_timeline(step)
        self.previous = step
        if self._answer.save:
            self.saved(step)
        return self._answer

    def _by_itself(self, step: int, source: str | None) -> StepDecision:
        """The decision of a process that is alone, or whose policy needs no leader."""
        due = self._policy.due(step, self.previous)
        if self._alone and self._policy.by_leader:
            now = time.monotonic()
            moment = Moment(
                step,
                now - self._decided,
                self._in_flight(),
                preempted=source is not None and not self._acted,
            )
            due = self._policy.wanted(moment) or due
            self._acted = self._acted or source is not None
        if due and self._skips and source is None and self._in_flight():
            return StepDecision(save=False, skipped=True, notice=source)
        return StepDecision(due, notice=source)

    def _by_timeline(self, step: int) -> StepDecision:
        line = self._timeline
        notice = (
            line.notice.source if line.notice is not None and line.notice.step <= step else None
        )
        if line.wants_save(step, -1 if self.previous is None else self.previous):
            return StepDecision(save=True, notice=notice)
        due = self._policy.due(step, self.previous)
        if due and self._skips:
            window = line.window(step)
            if window.busy or (self._saved_at is not None and self._saved_at >= window.start):
                return StepDecision(save=False, skipped=True, notice=notice)
        return StepDecision(due, notice=notice)

    def _lead(self, step: int, source: str | None) -> None:
        """Extend the timeline where it runs out or a save is wanted."""
        now, stride = (
            time.monotonic(),
            step - (step - 1 if self.previous is None else self.previous),
        )
        steps = self._lead_time / max(now - self._asked, 1e-6) if self.previous is not None else 0
        lead = int(min(max(steps, _LEAST_LEAD), _MOST_LEAD)) * stride
        self._asked = now
        line, before = self._timeline, self._timeline
        runs_out = line.until < step + (lead + stride) // 2
        if source is None and runs_out and self._policy.notices:
            source = self._noticed or self._hear()
        self._noticed = source
        planned = any(w.save and w.start > step for w in line.windows)
        busy = planned or self._in_flight() or (self._skips and self._will_save(line))
        preempted = source is not None and line.notice is None
        if not planned and self._policy.wanted(Moment(step, now - self._decided, busy, preempted)):
            self._decided = now
            if source is not None and preempted:
                # A process that ends its loop on the notice has saved by then.
                line = line.noticed(source)
            line = line.extended(max(line.until, step) + lead, save=True, busy=self._skips)
        elif runs_out:
            until = max(line.until + stride, step + lead)
            line = line.extended(
                until,
                busy=self._skips and busy,
                apart=self._skips and self._policy.due(until, line.until),
            )
        if line is not before or self._unannounced:
            self._timeline, self._unannounced = line, True
            # Announced again at the next step; the others wait for it, for a bounded time.
            with suppress(SilentStoreError):
                self._coordinator.announce(self._name("timeline"), line.to_json())
                self._unannounced = False

    def _will_save(self, line: Timeline) -> bool:
        """Whether a decided future step is due by its number and will be saved."""
        before = -1 if self.previous is None else self.previous
        open_windows = (
            w
            for w in line.windows
            if w.until > before
            and not w.busy
            and (self._saved_at is None or self._saved_at < w.start)
        )
        return any(self._policy.due(w.until, max(before, w.start - 1)) for w in open_windows)

    def _follow(self, step: int, source: str | None) -> None:
        """Wait for a timeline that reaches this step."""
        if source is not None and self._noticed is None and self._timeline.notice is None:
            # The leader has ended; its missing decision will be reported.
            with suppress(CoordinationError):
                self._coordinator.announce(
                    self._name("notice"),
                    {"source": f"{source}, process {self._coordinator.world.process}"},
                )
                self._noticed = source
        if step <= self._timeline.until:
            return
        deadline, pause, notice = (
            time.monotonic() + self._timeout,
            _FIRST_LOOK,
            WaitNotice(f"step {step}"),
        )
        while True:
            announcement, silent = None, ""
            try:
                announcement = self._coordinator.peek(self._name("timeline"))
            except SilentStoreError as e:  # the store may answer again before the deadline
                silent = f" ({str(e).rstrip('.')})"
            if announcement is not None:
                line = Timeline.from_json(announcement)
                if line.until >= step:
                    break
            if time.monotonic() >= deadline:
                raise CoordinationError(
                    f"step {step}: process {LEADER} has not decided within {self._timeout:g} s "
                    f"whether it is saved{silent}; check that it runs, and asks about the same "
                    f"steps as process {self._coordinator.world.process}. {ALL_MUST_CALL}"
                )
            notice.look(lambda: f"process {LEADER} to decide whether it is saved")
            time.sleep(pause)
            pause = min(2 * pause, _LAST_LOOK)
        if line.since > (0 if self.previous is None else self.previous + 1):
            raise CoordinationError(
                f"step {step}: process {self._coordinator.world.process} is so far behind process "
                f"{LEADER} that it has missed its decisions about earlier steps; all processes "
                "must go through the same steps. Restart the job."
            )
        self._timeline = line

    def _hear(self) -> str | None:
        """The source of a notice that another process announced."""
        announcement: Any = None
        with suppress(SilentStoreError):  # read again at the next extension of the timeline
            announcement = self._coordinator.peek(self._name("notice"))
        return None if announcement is None else str(announcement["source"])

    def _name(self, what: str) -> str:
        return f"{self._key}/{self._rounds}/{what}"
