"""The `Coordinator`: this process, its job's other processes, and the messages they exchange.

At the start of a round of the job (its processes were started, or restarted) the processes agree on
a run id and on the owner of each device. `share` and `agree` serve other agreements at the start,
such as the step to resume from; they block. Afterwards processes use only `announce` and `peek`,
which do not wait for other processes.

`Coordinator.current` finds the job's store. It looks for torch and jax among the modules that the
program has imported, and never imports them itself. A process that is alone is a `SingleProcess`.
"""

from __future__ import annotations

import os
import secrets
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from shardckpt.errors import CoordinationError, OptionError
from shardckpt.frameworks.coordination import agreement
from shardckpt.frameworks.coordination.agreement import decode, encode
from shardckpt.frameworks.coordination.devices import (
    framework_of_several,
    given_devices,
    report,
    world_of,
)
from shardckpt.frameworks.coordination.executing import execute, until
from shardckpt.frameworks.coordination.waiting import ALL_MUST_CALL
from shardckpt.layout.world import World
from shardckpt.options import check_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from shardckpt.frameworks.coordination.agreement import Steps
    from shardckpt.frameworks.coordination.jax_client import JaxClient
    from shardckpt.frameworks.coordination.torch_store import TorchStore

T = TypeVar("T")

_PREFIX = "shardckpt/"
"""The prefix of all keys, because other programs use the store, too."""
_TIMEOUT = 600.0
"""Default seconds to wait for other processes."""


class Coordinator(ABC):
    """This process and the other processes of its job.

    `Coordinator.current()` finds the job's own store.

    To use another key-value store, subclass this with `_set` and `_get`, and pass an instance to
    every `coordinator` argument. The constructor agrees with the other processes, so all of them
    create their coordinators at the same point of the program, and new ones whenever the job is
    restarted. The store may keep its keys from round to round.
    """

    world: World
    """The number of this process, the number of processes, and the owner of each device."""
    run_id: str
    """The id of this round of the job, the same on all processes: `20261121T115800-1f2e3d4c`, its
    start in UTC and four random bytes."""

    def __init__(
        self,
        process: int,
        processes: int,
        *,
        devices: Mapping[str, Iterable[int]] | None = None,
        timeout: float = 600,
    ) -> None:
        """Agree with the other processes; block until all have joined.

        Args:
            process: the number of this process.
            processes: the number of processes.
            devices: ids of the devices that this process owns, by framework (`jax`, `torch_xla`),
                where they differ from the devices that the framework shows. No two processes may
                own the same device.
            timeout: seconds to wait for the others, here and later.

        Raises:
            CoordinationError: not all processes joined in time; names the missing ones.
            OptionError: two processes own the same device, or the timeout is invalid.
        """
        check_seconds(timeout, f"{type(self).__name__}(timeout")
        self.world = World(process, processes)
        self._timeout = timeout
        self._asked: dict[str, agreement.Questions] = {}
        self._served: defaultdict[str, dict[int, bytes]] = defaultdict(dict)
        own = encode(report(processes, devices))
        new = time.strftime("%Y%m%dT%H%M%S-", time.gmtime()) + secrets.token_hex(4)
        self.run_id, answers = self._run(
            agreement.start(process, processes, own, secrets.token_hex(8), new), timeout
        )
        self.world = world_of(process, processes, answers)

    @staticmethod
    def current(
        *, devices: Mapping[str, Iterable[int]] | None = None, timeout: float | None = None
    ) -> Coordinator:
        """The coordinator of this process's job.

        It uses torch.distributed's store if a process group is set up, or else jax.distributed's;
        without either, this process is alone. The first call in a round of the job agrees with the
        other processes, which must call it, too; later calls return the same object.

        Args:
            devices: ids of the devices that this process owns, by framework, where they differ from
                the devices that the framework shows; pass it with the first call.
            timeout: seconds to wait for the others, now and until the process group is replaced;
                None: as before, or 600. Saves have `SaveOptions.commit_timeout` instead.

        Raises:
            CoordinationError: not all processes joined in time; or there are several processes and
                no common store; or this process was forked from a process of the job.
            OptionError: two processes own the same device, `devices` differs from the first call's,
                or the timeout is invalid.
        """
        if timeout is not None:
            check_seconds(timeout, "Coordinator.current(timeout")
        return _current(devices, timeout, timeout or _TIMEOUT)

    def share(self, key: str, value: Any, *, timeout: float | None = None) -> list[Any]:
        """The values of all processes, by process; None for one that has declined.

        Blocks until all have called it: for the start of a job.

        Args:
            key: the name of the value. All processes use the same keys in the same order; a key may
                be used again.
            value: JSON; tuples come back as lists.
            timeout: seconds to wait for the others; by default the coordinator's own timeout.

        Raises:
            CoordinationError: not all processes called it in time; names the missing ones.
            OptionError: the value is not JSON. The others get None, as after Ctrl-C.
        """
        seconds = self._seconds(timeout, "share")
        process, questions = self.world.process, self._questions(key)
        try:
            steps = agreement.share(questions, process, self.world.processes, encode(value))
            values = self._run(steps, seconds)
        except CoordinationError:
            with suppress(Exception):
                self._set(f"{_PREFIX}{questions.key}/{process}", agreement.WITHDRAWN)
            raise
        except BaseException:
            with suppress(Exception):
                self._run(agreement.leave(questions, process, encode(None)), 0)
            raise
        questions.end()
        return values

    def decline(self, key: str) -> None:
        """Take part in `share` without a value, because this process has failed; wait for nobody.

        The others get None as its value. If it is process 0, which collects them, they get None as
        all values.

        Raises:
            CoordinationError: the store is gone, or silent.
        """
        self._leave(key, None)

    def _leave(self, key: str, value: Any) -> None:
        """Take part in `share` with a value, but wait for nobody; see `decline`."""
        steps = agreement.leave(self._questions(key), self.world.process, encode(value))
        self._run(steps, 0)

    def agree(self, key: str, propose: Callable[[], Any], *, timeout: float | None = None) -> Any:
        """The value that process 0 proposes, when all have called it: for the start of a job.

        Blocks until all have. A call that has failed, or was interrupted, on some processes does
        not count: the next one agrees anew.

        Args:
            key: the name of the value, as in `share`.
            propose: called on process 0 alone; returns JSON. Its exception is raised there, and
                reported to the others.
            timeout: seconds to wait for the others; by default the coordinator's own timeout.

        Raises:
            CoordinationError: not all processes called it in time; names the missing ones. Or
                process 0 failed to propose.
        """
        seconds = self._seconds(timeout, "agree")
        met = self.meet(f"agree/{key}", timeout=seconds, check=lambda: None)
        question = f"{self.run_id}/agree/{met}"
        if self.world.process == 0:

            def publish(answer: bytes, wait: float) -> None:
                numbered = agreement.numbered(0, answer)
                until(wait, lambda: self._set(f"{_PREFIX}{question}/all", numbered))

            try:
                proposed = encode({"value": propose()})
            except BaseException as error:
                failure = encode({"failure": f"{type(error).__name__}: {error}"})
                with suppress(Exception):
                    publish(failure, seconds if isinstance(error, Exception) else 0)
                raise
            publish(proposed, seconds)
            return decode(proposed)["value"]
        answer = self._run(agreement.await_answer(question, self.world.process), seconds)
        if "failure" in answer:
            raise CoordinationError(
                f"process 0 could not decide on {key!r}: {answer['failure']}; see its log."
            )
        return answer["value"]

    @cached_property
    def notes(self) -> dict[str, Any]:
        """Values that other modules keep for this round of the job, by names of their own.

        They go with the coordinator.
        """
        return {}

    def announce(self, key: str, value: Any) -> None:
        """Set a value that every process of this round sees when it peeks at the key.

        It replaces an earlier value, and waits for no process. If the store is silent, because the
        process that holds it is stopped, it gives up after 5 seconds.

        Args:
            key: the name of the value.
            value: JSON.

        Raises:
            CoordinationError: the store is gone, or silent.
        """
        self._set(f"{_PREFIX}{self.run_id}/announce/{key}", encode(value))

    def peek(self, key: str) -> Any:
        """The value last announced under a key, by any process, or None.

        Waits no longer than `announce`.

        Raises:
            CoordinationError: the store is gone, or silent.
        """
        value = self._get(f"{_PREFIX}{self.run_id}/announce/{key}")
        return None if value is None else decode(value)

    def listen(
        self, key: str, processes: Sequence[int], *, timeout: float | None = None
    ) -> list[Any]:
        """The values that some processes have announced under `<key>/<process>`, in their order.

        Blocks until all are there.

        Args:
            key: the name of the values.
            processes: the processes to listen to.
            timeout: seconds to wait for them; by default the coordinator's own timeout.

        Raises:
            CoordinationError: not all of them announced a value in time; names the missing ones.
        """
        steps = agreement.listen(f"{self.run_id}/announce/{key}", self.world.process, processes)
        return self._run(steps, self._seconds(timeout, "listen"))

    def meet(self, key: str, *, timeout: float, check: Callable[[], None]) -> str:
        """A new id, the same on all processes that meet.

        Blocks until all have called it; earlier calls that have ended do not count.

        Args:
            key: the name of the meeting; it may be used again.
            timeout: seconds to wait for the others.
            check: called while this process waits; an exception from it ends the wait.

        Raises:
            CoordinationError: not all processes came in time; names the missing ones.
        """
        who, met = (self.world.process, self.world.processes), secrets.token_hex(4)
        steps = agreement.start(*who, encode(None), secrets.token_hex(8), met, self._served[key])
        return self._run(steps, timeout, under=f"{self.run_id}/meet/{key}/", check=check)[0]

    @abstractmethod
    def _set(self, key: str, value: bytes) -> None:
        """Set a key to a value (ASCII), whether it exists or not.

        All processes see the value soon, and see the values that this process sets in the order of
        the calls.
        """

    @abstractmethod
    def _get(self, key: str) -> bytes | None:
        """The value of a key; None, at once, if the key is missing."""

    def _questions(self, key: str) -> agreement.Questions:
        """The questions for `share` of a name, with a new call that is counted."""
        # Not the name of 0.2.0, whose values have another form: a mixed job misses processes.
        questions = self._asked.setdefault(key, agreement.Questions(f"{self.run_id}/shares/{key}"))
        questions.calls += 1
        return questions

    def _seconds(self, timeout: float | None, call: str) -> float:
        """The time limit of a call: its `timeout`, or the coordinator's own."""
        if timeout is not None:
            check_seconds(timeout, f"Coordinator.{call}(timeout")
        return self._timeout if timeout is None else timeout

    def _run(
        self,
        steps: Steps[T],
        seconds: float,
        *,
        under: str = "",
        check: Callable[[], None] = lambda: None,
    ) -> T:
        """Execute an agreement, whose keys get the prefix `under`."""
        prefix = _PREFIX + under
        return execute(
            steps,
            lambda key: self._get(prefix + key),
            lambda key, value: self._set(prefix + key, value),
            seconds=seconds,
            check=check,
        )


def coordinator_of(coordinator: Coordinator | None, seconds: float) -> Coordinator:
    """A caller's `coordinator`, or the job's own.

    Args:
        coordinator: the argument of the call.
        seconds: maximum wait for the others, if the processes have not agreed yet.

    Raises:
        CoordinationError: as `Coordinator.current` does.
    """
    return _current(None, None, seconds) if coordinator is None else coordinator


def check_coordinator(coordinator: object) -> None:
    """Check a caller's `coordinator` argument.

    Raises:
        OptionError: it is neither None nor a coordinator.
    """
    if coordinator is None or isinstance(coordinator, Coordinator):
        return
    kind = coordinator.__name__ if isinstance(coordinator, type) else type(coordinator).__name__
    raise OptionError(
        f"coordinator=…: {'the class' if isinstance(coordinator, type) else 'a'} {kind} is not a "
        "coordinator; give an instance of shardckpt.Coordinator, such as Coordinator.current(), "
        "or nothing."
    )


class SingleProcess(Coordinator):
    """The coordinator of a process that saves or restores by itself.

    The process may also be one of several processes of a job.

        if rank == 0:
            shardckpt.save("run/final", state, coordinator=shardckpt.SingleProcess())

    The state must be complete in this process: a tensor of which other processes hold shards is an
    error.
    """

    def __init__(
        self, *, devices: Mapping[str, Iterable[int]] | None = None, timeout: float = 600
    ) -> None:
        """Create a run id; there is no other process to wait for.

        Args:
            devices: as for `Coordinator`.
            timeout: as for `Coordinator`; it has no effect.
        """
        self._values: dict[str, bytes] = {}
        super().__init__(0, 1, devices=devices, timeout=timeout)

    def _set(self, key: str, value: bytes) -> None:
        self._values[key] = value

    def _get(self, key: str) -> bytes | None:
        return self._values.get(key)


class _Round(NamedTuple):
    """The coordinator that was agreed on last."""

    coordinator: TorchStore | JaxClient | SingleProcess
    pid: int
    given: dict[str, list[int]]


_lock, _is_joining = threading.RLock(), False
_round: _Round | None = None


def _after_fork() -> None:
    """Replace the lock: a thread that the child does not have may hold it."""
    global _lock, _is_joining
    _lock, _is_joining = threading.RLock(), False


os.register_at_fork(after_in_child=_after_fork)


def _current(
    devices: Mapping[str, Iterable[int]] | None, timeout: float | None, joining: float
) -> Coordinator:
    """As `Coordinator.current`; other processes have `joining` seconds to join."""
    global _round, _is_joining  # noqa: PLW0603
    given = {} if devices is None else given_devices(devices)
    lock = _lock
    is_ours: list[bool] = []
    is_nested = False
    try:
        # C code alone: Ctrl-C comes before the lock is taken, or after that is noted.
        is_ours.extend(map(lock.acquire, (True,), (joining,)))
        if not is_ours[0]:
            raise CoordinationError(
                f"another thread of this process has waited {joining:g} s for the other processes "
                f"of the job. {ALL_MUST_CALL}"
            )
        is_nested, _is_joining = _is_joining, True  # before the look at the round
        kind = _kind()
        if _round is None or type(_round.coordinator) is not kind or not _is_current(_round):
            if is_nested:
                raise CoordinationError(
                    "this thread is joining the job; let a signal handler set a flag, no more."
                )
            made = kind(devices=given, timeout=joining)
            made._timeout = _TIMEOUT
            _round = _Round(made, os.getpid(), given)
        elif devices is not None and given != _round.given:
            raise OptionError(
                f"this process owns the devices {_round.given or 'that its frameworks show'}, as "
                f"agreed when the job started, and not {given}; give devices= with the first call "
                "that coordinates."
            )
        if timeout is not None:
            _round.coordinator._timeout = timeout
        return _round.coordinator
    finally:
        if is_ours == [True]:
            _is_joining = is_nested
            lock.release()


def _is_current(agreed: _Round) -> bool:
    forked = agreed.pid != os.getpid()
    if isinstance(agreed.coordinator, SingleProcess):
        return not forked
    if agreed.coordinator.is_current and forked:
        world = agreed.coordinator.world
        raise CoordinationError(
            f"this process was forked from process {world.process} of a job of {world.processes} "
            f"and is none of them; save and restore in process {world.process} itself, or pass "
            "coordinator=shardckpt.SingleProcess() for a checkpoint of this process alone."
        )
    return agreed.coordinator.is_current


def _kind() -> type[TorchStore | JaxClient | SingleProcess]:
    """The class of coordinator for the available store."""
    stores: list[tuple[int, type[TorchStore | JaxClient | SingleProcess]]] = []
    if "torch.distributed" in sys.modules:
        import torch  # noqa: F401  (before a module of it, for other threads that import it)
        import torch.distributed as dist

        if dist.is_available() and dist.is_initialized():
            from shardckpt.frameworks.coordination.torch_store import TorchStore

            stores.append((dist.get_world_size(), TorchStore))
    if "jax.distributed" in sys.modules:
        import jax

        if jax.distributed.is_initialized():
            from jax._src.distributed import global_state

            from shardckpt.frameworks.coordination.jax_client import JaxClient

            stores.append((global_state.num_processes, JaxClient))
    # Scripts often make a process group of one: a store with more processes is the job's.
    processes, kind = next((f for f in stores if f[0] > 1), (stores or [(1, SingleProcess)])[0])
    may_be_several = processes == 1 and not {"torch_xla", "jax"}.isdisjoint(sys.modules)
    others = framework_of_several() if may_be_several else None
    if others:
        raise CoordinationError(
            f"{others} and has no store in which they could meet; call "
            "torch.distributed.init_process_group (with torch_xla: 'gloo', init_method='xla://') "
            "or jax.distributed.initialize first."
        )
    return kind
