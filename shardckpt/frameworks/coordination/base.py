"""The `Coordinator`: this process among those of its job, and the few words they exchange.

At the start of a round of the job (its processes were started, or started again) they agree on a run id and on whose
each device is. `share` and `agree` serve what else is agreed on then, such as the step to resume from; they block.
Afterwards there is only `announce` and `peek`, which never do.

`Coordinator.current` finds the store that the job brings along: torch and jax are looked for among the modules that the program
has imported, never imported for the sake of looking. A process that is alone is a `SingleProcess`.
"""

from __future__ import annotations

import os
import secrets
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from shardckpt.errors import CoordinationError, OptionError
from shardckpt.frameworks.coordination.agreement import Get, Set, Steps, await_answer, decode, encode, gather, join, lead, listen
from shardckpt.frameworks.coordination.calls import SilentStoreError
from shardckpt.frameworks.coordination.devices import found_devices, given_devices, owners
from shardckpt.layout.world import World

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from shardckpt.frameworks.coordination.jax_client import JaxClient
    from shardckpt.frameworks.coordination.torch_store import TorchStore

T = TypeVar("T")

_PREFIX = "shardckpt/"
"""Of all keys: the store is not ours alone."""
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.001, 0.25
"""Seconds between two looks at the store: growing, so that a quick start is quick and a slow one costs little."""


class Coordinator(ABC):
    """This process among those of its job. `Coordinator.current()` finds what the job brings along.

    To bring a store of keys and values of your own, subclass this with `_set` and `_get`, and give an instance to
    whatever takes a `coordinator`. Making one agrees with the other processes, so all of them make theirs at the same
    point of the program, and a new one whenever the job starts again. The store may keep its keys from round to round.
    """

    world: World
    """Which process this is, of how many, and whose each device is."""
    run_id: str
    """Of this round of the job, the same on all processes: `20261121T115800-1f2e3d4c`, when it started in UTC and four
    random bytes."""

    def __init__(self, process: int, processes: int, *, devices: Mapping[str, Iterable[int]] | None = None, timeout: float = 600) -> None:
        """Agree with the other processes; blocks until all have come.

        Args:
            process: this process's number.
            processes: how many there are.
            devices: ids of the devices that are this process's, by framework (`jax`, `torch_xla`), where they are not
                those that the framework shows. None of them may be another process's as well.
            timeout: seconds to wait for the others, here and later.

        Raises:
            CoordinationError: not all processes came in time; names them.
            OptionError: two processes own the same device.
        """
        self.world = World(process, processes)
        self._timeout = timeout
        self._asked: Counter[tuple[str, str]] = Counter()
        # A process alone has all its devices for itself.
        found = found_devices() if processes > 1 else {}
        own = encode({"told": given_devices(devices), "found": found})
        if process:
            self.run_id, said = self._run(join(process, own, secrets.token_hex(8)), timeout)
        else:
            self.run_id = time.strftime("%Y%m%dT%H%M%S-", time.gmtime()) + secrets.token_hex(4)
            said = self._run(lead(processes, own, self.run_id), timeout)
        whole = owners([s["told"] for s in said], [s["found"] for s in said])
        self.world = World(process, processes, whole)

    @staticmethod
    def current(*, devices: Mapping[str, Iterable[int]] | None = None, timeout: float = 600) -> Coordinator:
        """The coordinator of the job that this process is in.

        Its store is torch.distributed's, where a process group is set up, else jax.distributed's; without either this
        process is alone. The first call in a round of the job agrees with the other processes, which make it too; later
        ones return the same object.

        Args:
            devices: ids of the devices that are this process's, by framework, where they are not those that the
                framework shows; to be given with the first call.
            timeout: seconds to wait for the others.

        Raises:
            CoordinationError: not all processes came in time, or there are several and no store to meet in, or this one
                was forked from a process of the job.
            OptionError: two processes own the same device, or `devices` is not what the first call was given.
        """
        return _current(devices, timeout)

    def share(self, key: str, value: Any, *, timeout: float | None = None) -> list[Any]:
        """Every process's value, by process. Blocks until all have called it: for the start of a job.

        Args:
            key: what it is about. All processes ask about the same keys in the same order; one may be asked about again.
            value: JSON; tuples come back as lists.
            timeout: seconds to wait for the others, if not those given at the start.

        Raises:
            CoordinationError: not all processes called it in time; names them.
        """
        question = self._question("share", key)
        steps = gather(question, self.world.process, self.world.processes, encode(value))
        said = self._run(steps, timeout)
        self._asked["share", key] += 1
        return said

    def agree(self, key: str, propose: Callable[[], Any], *, timeout: float | None = None) -> Any:
        """What process 0 proposes. Blocks the others until it has: for the start of a job.

        Args:
            key: what it is about, as in `share`.
            propose: called on process 0 alone; returns JSON. What it raises is raised there, and the others are told.
            timeout: seconds to wait for process 0, if not those given at the start.

        Raises:
            CoordinationError: process 0 did not call it in time, or failed to propose.
        """
        question = self._question("agree", key)
        if self.world.process == 0:
            try:
                published = encode({"value": propose()})
            except BaseException as error:
                published = encode({"failure": f"{type(error).__name__}: {error}"})
                raise
            finally:
                seconds = self._timeout if timeout is None else timeout
                self._until(seconds, lambda: self._set(f"{_PREFIX}{question}/all", published))
                self._asked["agree", key] += 1
            return decode(published)["value"]
        answer = self._run(await_answer(question, self.world.process), timeout)
        self._asked["agree", key] += 1
        if "failure" in answer:
            raise CoordinationError(f"process 0 could not decide on {key!r}: {answer['failure']}; see there.")
        return answer["value"]

    def announce(self, key: str, value: Any) -> None:
        """Let every process of this round that peeks at the key see a value, in place of an earlier one.

        Waits for no process. A store that is silent, since the process that holds it is stopped, is given up after 5 seconds.

        Args:
            key: what it is about.
            value: JSON.

        Raises:
            CoordinationError: the store is gone, or silent.
        """
        self._set(f"{_PREFIX}{self.run_id}/announce/{key}", encode(value))

    def peek(self, key: str) -> Any:
        """What was last announced under a key, by whichever process, or None. Waits no longer than `announce`.

        Raises:
            CoordinationError: the store is gone, or silent.
        """
        value = self._get(f"{_PREFIX}{self.run_id}/announce/{key}")
        return None if value is None else decode(value)

    def listen(self, key: str, processes: Sequence[int], *, timeout: float | None = None) -> list[Any]:
        """What each of some processes has announced under `<key>/<its number>`, in their order. Blocks until all of them have.

        Args:
            key: what it is about.
            processes: whom to listen to.
            timeout: seconds to wait for them, if not those given at the start.

        Raises:
            CoordinationError: not all of them announced it in time; names those that did not.
        """
        return self._run(listen(f"{self.run_id}/announce/{key}", self.world.process, processes), timeout)

    @abstractmethod
    def _set(self, key: str, value: bytes) -> None:
        """Give a key a value (ASCII), whether it has one or not.

        All processes see it soon, and see what this process sets in the order in which it does.
        """

    @abstractmethod
    def _get(self, key: str) -> bytes | None:
        """The value of a key; None, at once, where there is none."""

    def _question(self, kind: str, key: str) -> str:
        """The key of what is asked about now: once answered, the next question about it is a new one."""
        return f"{self.run_id}/{kind}/{key}#{self._asked[kind, key]}"

    def _run(self, steps: Steps[T], timeout: float | None) -> T:
        """Do what the steps of an agreement ask for, until they end or time is up."""
        seconds = self._timeout if timeout is None else timeout
        deadline = time.monotonic() + seconds
        pause = _SHORTEST_PAUSE
        result: bytes | float | None = None
        while True:
            try:
                step = steps.send(result)
            except StopIteration as end:
                answer: T = end.value
                return answer
            result = None
            if isinstance(step, Get):
                result = self._until(deadline - time.monotonic(), partial(self._get, _PREFIX + step.key))
            elif isinstance(step, Set):
                self._until(deadline - time.monotonic(), partial(self._set, _PREFIX + step.key, step.value))
            elif (left := deadline - time.monotonic()) > 0:
                time.sleep(min(pause, left))
                pause = min(pause * 1.5, _LONGEST_PAUSE)
            else:
                result = seconds

    @staticmethod
    def _until(seconds: float, ask: Callable[[], T]) -> T:
        """Ask a store that may be silent for so many seconds."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                return ask()
            except SilentStoreError:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(_LONGEST_PAUSE)


def check_coordinator(coordinator: object) -> None:
    """Refuse what a caller gave as `coordinator` and is none.

    Raises:
        OptionError: neither None nor a coordinator.
    """
    if coordinator is None or isinstance(coordinator, Coordinator):
        return
    kind = coordinator.__name__ if isinstance(coordinator, type) else type(coordinator).__name__
    raise OptionError(
        f"coordinator=…: {'the class' if isinstance(coordinator, type) else 'a'} {kind} is no coordinator; give an instance of "
        f"shardckpt.Coordinator, such as Coordinator.current(), or nothing."
    )


class SingleProcess(Coordinator):
    """The coordinator of a job of one process."""

    def __init__(self, *, devices: Mapping[str, Iterable[int]] | None = None, timeout: float = 600) -> None:
        """Take a run id; there is nobody to wait for."""
        self._values: dict[str, bytes] = {}
        super().__init__(0, 1, devices=devices, timeout=timeout)

    def _set(self, key: str, value: bytes) -> None:
        self._values[key] = value

    def _get(self, key: str) -> bytes | None:
        return self._values.get(key)


class _Round(NamedTuple):
    """What was agreed on last."""

    coordinator: TorchStore | JaxClient | SingleProcess
    pid: int
    told: dict[str, list[int]]


_lock = threading.Lock()
_round: _Round | None = None


def _after_fork() -> None:
    """Another thread of the parent may have held the lock, and nobody would ever release it here."""
    global _lock  # noqa: PLW0603
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


def _current(devices: Mapping[str, Iterable[int]] | None, timeout: float) -> Coordinator:
    """The coordinator of this round of the job; see `Coordinator.current`."""
    global _round  # noqa: PLW0603
    told = given_devices(devices) if devices else {}
    with _lock:
        kind = _kind()
        if _round is None or type(_round.coordinator) is not kind or not _is_current(_round):
            _round = _Round(kind(devices=told, timeout=timeout), os.getpid(), told)
        elif devices is not None and told != _round.told:
            raise OptionError(
                f"this process owns the devices {_round.told or 'that its frameworks show'}, as agreed when the job started, and "
                f"not {told}; give devices= with the first call that coordinates."
            )
        return _round.coordinator


def _is_current(agreed: _Round) -> bool:
    forked = agreed.pid != os.getpid()
    if isinstance(agreed.coordinator, SingleProcess):
        return not forked
    if agreed.coordinator.is_current and forked:
        world = agreed.coordinator.world
        raise CoordinationError(
            f"this process was forked from process {world.process} of a job of {world.processes} and is none of them; save and restore "
            f"in process {world.process} itself, or pass coordinator=SingleProcess() for a checkpoint of this process alone."
        )
    return agreed.coordinator.is_current


def _kind() -> type[TorchStore | JaxClient | SingleProcess]:
    """The class of coordinator for the store at hand."""
    found: list[tuple[int, type[TorchStore | JaxClient | SingleProcess]]] = []
    if "torch.distributed" in sys.modules:
        import torch.distributed as dist

        if dist.is_available() and dist.is_initialized():
            from shardckpt.frameworks.coordination.torch_store import TorchStore

            found.append((dist.get_world_size(), TorchStore))
    if "jax.distributed" in sys.modules:
        import jax

        if jax.distributed.is_initialized():
            from jax._src.distributed import global_state

            from shardckpt.frameworks.coordination.jax_client import JaxClient

            found.append((global_state.num_processes, JaxClient))
    # A group of one is a habit of scripts: where another store knows of more processes, that is the job's.
    processes, kind = next((f for f in found if f[0] > 1), (found or [(1, SingleProcess)])[0])
    others = _others() if processes == 1 else None
    if others:
        raise CoordinationError(
            f"{others} and has no store in which they could meet; call torch.distributed.init_process_group (with torch_xla: "
            f"'gloo', init_method='xla://') or jax.distributed.initialize first."
        )
    return kind


def _others() -> str | None:
    """The framework that runs in more processes than this one, if any, in words."""
    if "torch_xla" in sys.modules:
        import torch_xla.runtime as xr
        from torch_xla import _XLAC

        if (xr.is_spmd() or _XLAC._xla_runtime_is_initialized()) and xr.process_count() > 1:
            return f"this torch_xla job runs in {xr.process_count()} processes"
    if "jax" in sys.modules:
        import jax
        from jax._src import xla_bridge

        if xla_bridge.backends_are_initialized() and jax.process_count() > 1:
            return f"this JAX job runs in {jax.process_count()} processes"
    return None
