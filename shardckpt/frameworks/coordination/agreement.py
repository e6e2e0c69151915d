"""Agreements between the processes of a job through a key-value store.

All processes get the same run id, and the values of all processes.

The store may be older than this round of the job, and may still have all keys of earlier rounds:
torchelastic's agent keeps its store, and so does torch_xla from one process group to the next. So a
process never trusts a value under a name that an earlier round can have used:

1. Process p creates a nonce and sets `hello/p = nonce`.
2. Process 0 creates a run id, reads the hellos again and again, and answers every new nonce with
   `welcome/<nonce> = run id`. It may answer hellos of earlier rounds as well: nobody reads these
   answers.
3. Process p waits for the welcome to its own nonce, which no earlier round can have written, and
   sets its value under `<run id>/start/<nonce>`.
4. Once the value for every process's latest nonce is there, process 0 publishes all values as one
   under the run id.
5. Process p is done when it finds these. Until then it follows a welcome that changes, because
   process 0 may be restarted.

All later keys are under the run id. One assumption is needed: when a round's processes start, the
processes of the round before have ended; launchers ensure this. A process that is restarted after
it has set its value may get no answer, but never a wrong one.

Each process does a few operations per look at the store, and process 0 a few per process, so that
an agreement costs O(processes) in all. The functions touch neither a store nor a clock: they are
generators that yield the requested operation and receive its result, so that tests can try every
interleaving.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

from shardckpt.errors import CoordinationError, OptionError
from shardckpt.frameworks.coordination.waiting import ALL_MUST_CALL

T = TypeVar("T")

_NAMED = 12
"""Most processes that a message names."""


class Get(NamedTuple):
    """A request for the value of a key, or None if the key is missing."""

    key: str


class Set(NamedTuple):
    """A request to set a key, whether it exists or not."""

    key: str
    value: bytes


class Wait(NamedTuple):
    """A request to let some time pass. The answer is None, or a `Late`."""


class Late(NamedTuple):
    """The answer to a wait that takes long."""

    seconds: float
    """Seconds waited in all."""
    is_over: bool
    """Whether the time is up; otherwise the log is to name the missing processes."""


class Report(NamedTuple):
    """A request to name the missing processes in the log."""

    missing: str


Steps: TypeAlias = Generator[Get | Set | Wait | Report, Any, T]


def encode(value: Any) -> bytes:
    """The value as JSON, in ASCII.

    Raises:
        OptionError: it is not JSON.
    """
    try:
        return json.dumps(value, separators=(",", ":")).encode("ascii")
    except (TypeError, ValueError, RecursionError) as e:
        raise OptionError(
            f"the processes of a job exchange JSON, and this value is not JSON: {e}; give numbers, "
            "texts, lists, and dicts of them."
        ) from e


def decode(value: bytes) -> Any:
    """The value passed to `encode`, with lists instead of tuples."""
    return json.loads(value)


def start(
    process: int,
    processes: int,
    value: bytes,
    nonce: str,
    run_id: str,
    served: dict[int, bytes] | None = None,
) -> Steps[tuple[str, list[Any]]]:
    """Take part in the start of a round, as any process.

    Args:
        process: the number of this process.
        processes: the number of processes.
        value: the value of this process, encoded.
        nonce: a new random text, which a process except 0 needs.
        run_id: a new run id, which process 0 needs.
        served: as for `lead`.

    Returns:
        The run id, and the value of each process, by process.

    Raises:
        CoordinationError: the time is up; names the missing processes.
    """
    if process:
        return (yield from join(process, value, nonce))
    return run_id, (yield from lead(processes, value, run_id, served))


def join(process: int, value: bytes, nonce: str) -> Steps[tuple[str, list[Any]]]:
    """Take part in the start of a round, as any process except 0.

    Args:
        process: the number of this process.
        value: the value of this process, encoded.
        nonce: a new nonce that no other process uses.

    Returns:
        The run id, and the value of each process, by process.

    Raises:
        CoordinationError: the time is up; names the missing processes.
    """
    yield Set(f"hello/{process}", nonce.encode())
    run_id = None
    while True:
        welcome = yield Get(f"welcome/{nonce}")
        if welcome is not None and welcome.decode() != run_id:
            run_id = welcome.decode()
            yield Set(f"{run_id}/start/{nonce}", value)
        if run_id is not None:
            values = yield Get(f"{run_id}/start/all")
            if values is not None:
                return run_id, decode(values)[1]
        late = yield Wait()
        if late is not None:
            missing = None if run_id is None else (yield Get(f"{run_id}/start/missing"))
            yield from _overdue(process, _without_answer(process, missing), late)


def lead(
    processes: int, value: bytes, run_id: str, served: dict[int, bytes] | None = None
) -> Steps[list[Any]]:
    """Take part in the start of a round, as process 0.

    Args:
        processes: the number of processes.
        value: the value of process 0, encoded.
        run_id: a new run id.
        served: nonces that this process has answered in earlier calls with the same keys; a process
            that still shows one has yet to read that answer. It is kept up to date.

    Returns:
        The value of each process, by process.

    Raises:
        CoordinationError: the time is up; names the missing processes.
    """
    served = {} if served is None else served
    nonces: dict[int, bytes] = {}

    def greet(process: int) -> Steps[str | None]:
        nonce = yield Get(f"hello/{process}")
        if nonce is None or nonce == served.get(process):
            return None
        if nonce != nonces.get(process):
            nonces[process] = nonce
            yield Set(f"welcome/{nonce.decode()}", run_id.encode())
        return f"{run_id}/start/{nonce.decode()}"

    # Every look reads all of them: a process that has answered may have been restarted since.
    while True:
        values: dict[int, Any] = {0: decode(value)}
        for process in range(1, processes):
            key = yield from greet(process)
            data = None if key is None else (yield Get(key))
            if data is not None:
                values[process] = decode(data)
        if (yield from _publish(f"{run_id}/start", values, processes)):
            served |= nonces
            return [values[p] for p in range(processes)]


def gather(
    key: str, process: int, processes: int, value: bytes, token: str, number: int = 0
) -> Steps[list[Any] | None]:
    """The values of all processes, by process: process 0 collects them and publishes them as one.

    A process may be a question ahead of others only if it has declined that one: so an older number
    is no answer yet, and a process with a newer one has declined. A process whose call has failed
    sets `WITHDRAWN`, and may call again with another value, so every look reads all values. The
    answer may have the value of the failed call nevertheless; its token tells the two apart.

    Args:
        key: a key under the run id.
        process: the number of this process.
        processes: the number of processes.
        value: the value of this process, encoded.
        token: a new text, which no other call of this process has used.
        number: greater than in all earlier uses of the key.

    Returns:
        The values, None for a process that has declined. None if an earlier call of this process,
        which has failed, was answered: nobody else asks this question any more.

    Raises:
        CoordinationError: the time is up; names the missing processes. Or process 0 has gone on.
    """
    own = b"[%b,%b]" % (encode(token), value)
    if process:
        yield Set(f"{key}/{process}", numbered(number, own))
        answer = yield from await_answer(key, process, number)
    else:
        answer = yield from _collect(key, processes, own, number)
    if answer is None:  # process 0 has declined
        return [None] * processes
    if answer[process][0] != token:
        return None
    return [None if one is None else one[1] for one in answer]


def _collect(key: str, processes: int, own: bytes, number: int) -> Steps[list[Any]]:
    """The tokens and values of all processes, None for those that have declined, as process 0.

    They are published, unless an earlier call of process 0 has published an answer.
    """
    data = yield Get(f"{key}/all")
    published: tuple[int, list[Any]] = (-1, []) if data is None else decode(data)
    if published[0] == number:
        return published[1]
    while True:
        values: dict[int, Any] = {0: decode(own)}
        for p in range(1, processes):
            data = yield Get(f"{key}/{p}")
            if data is not None and (answered := decode(data))[0] >= number:
                values[p] = answered[1] if answered[0] == number else None
        if (yield from _publish(key, values, processes, number)):
            return [values[p] for p in range(processes)]


def numbered(number: int, value: bytes) -> bytes:
    """An encoded value with the number of its question, encoded."""
    return b"[%d,%b]" % (number, value)


WITHDRAWN = numbered(-1, encode(None))
"""The value of a process for `gather` whose call has failed: no answer to any question."""


def listen(key: str, process: int, processes: Sequence[int]) -> Steps[list[Any]]:
    """The values that some processes set under a key, in their order.

    Args:
        key: each process sets its value under `<key>/<process>`.
        process: the number of this process.
        processes: the processes to listen to.

    Raises:
        CoordinationError: the time is up; names the processes without a value.
    """
    values: dict[int, Any] = {}
    while True:
        for p in processes:
            data = None if p in values else (yield Get(f"{key}/{p}"))
            if data is not None:
                values[p] = decode(data)
        silent = [p for p in processes if p not in values]
        if not silent:
            return [values[p] for p in processes]
        late = yield Wait()
        if late is not None:
            yield from _overdue(process, silent, late)


def await_answer(key: str, process: int, number: int = 0) -> Steps[Any]:
    """The value that process 0 publishes under a key, for the question of a number.

    Raises:
        CoordinationError: the time is up; names the missing processes. Or process 0 has gone on.
    """
    while True:
        data = yield Get(f"{key}/all")
        answered, answer = (-1, None) if data is None else decode(data)
        if answered == number:
            return answer
        if answered > number:
            raise CoordinationError(
                f"process 0 has failed several times, and gone on without process {process}; see "
                "its log."
            )
        late = yield Wait()
        if late is not None:
            yield from _overdue(
                process, _without_answer(process, (yield Get(f"{key}/missing")), number), late
            )


def _publish(key: str, values: dict[int, Any], processes: int, number: int = 0) -> Steps[bool]:
    """Publish the values of all processes, or the numbers of the missing ones.

    Return whether all are there.
    """
    if len(values) == processes:
        answer = encode([values[p] for p in range(processes)])
        yield Set(f"{key}/all", numbered(number, answer))
        return True
    missing = [p for p in range(processes) if p not in values]
    # So that the other processes can name them too, without their own search.
    yield Set(f"{key}/missing", numbered(number, encode(missing)))
    late = yield Wait()
    if late is not None:
        yield from _overdue(0, missing, late)
    return False


def _without_answer(process: int, missing: bytes | None, number: int = 0) -> Sequence[int]:
    """The processes that process 0 waits for, by its last word on the question of a number.

    Process 0 itself if it waits for no other.
    """
    about, processes = (number, []) if missing is None else decode(missing)
    others = [p for p in processes if p != process and about == number]
    return others or [0]


def _overdue(process: int, missing: Sequence[int], late: Late) -> Steps[None]:
    """Name the missing processes: in the log, or in an error if the time is up."""
    if not late.is_over:
        yield Report(named(missing))
        return
    raise CoordinationError(
        f"process {process} waited {late.seconds:g} s for {named(missing)}, which did not answer. "
        f"{ALL_MUST_CALL} See whether the missing ones run and make this call, or allow more time: "
        "SaveOptions(commit_timeout=…) for saves, Coordinator.current(timeout=…) for other calls."
    )


def named(processes: Iterable[int]) -> str:
    """The numbers of some processes in words."""
    numbers = [str(p) for p in processes]
    shown = ", ".join(numbers[:_NAMED])
    rest = f" and {len(numbers) - _NAMED} more" if len(numbers) > _NAMED else ""
    return f"process{'es' * (len(numbers) > 1)} {shown}{rest}"
