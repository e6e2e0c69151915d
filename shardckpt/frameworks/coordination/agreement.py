"""Agreements between the processes of a job through keys and values: the same run id, and what each process has to say.

The store may have outlived earlier rounds of the job, whose keys are then all still there: torchelastic's agent keeps
one, and so does torch_xla from one process group to the next. So nothing found under a name that an earlier round can
have used is believed:

1. Process p makes up a nonce and says `hello/p = nonce`.
2. Process 0 makes up a run id, reads the hellos again and again, and answers every nonce that it has not met with
   `welcome/<nonce> = run id`. It may answer hellos of earlier rounds as well: nobody reads that.
3. Process p waits for the welcome to its own nonce, which no earlier round can have written, and says what it has to
   say under `<run id>/start/<nonce>`.
4. Once every process's latest nonce has spoken, process 0 publishes all of it as one value under the run id.
5. Process p is done when it finds that. Until then it follows a welcome that changes, which is process 0 started anew.

All that comes later lies under the run id. This relies on one thing: when a round's processes start, those of the
round before have ended, which is what launchers see to. A process that starts anew after its round was agreed on is
left without an answer, never with a wrong one.

Each process does a few operations per look at the store and process 0 a few per process, so that agreeing costs
O(processes) in all. Nothing here touches a store or a clock: the functions are generators that yield the operation they
want done and are sent its result, so that every interleaving can be tried.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

from shardckpt.errors import CoordinationError

__all__ = ["Get", "Set", "Steps", "Wait", "await_answer", "decode", "encode", "gather", "join", "lead", "listen"]

T = TypeVar("T")

_NAMED = 12
"""Most processes that a message names."""


class Get(NamedTuple):
    """Send me the value of a key, or None where there is none."""

    key: str


class Set(NamedTuple):
    """Give a key a value, whether it has one or not."""

    key: str
    value: bytes


class Wait(NamedTuple):
    """Nothing to do until others have: let some time pass, and send me None, or the seconds waited if it was the last."""


Steps: TypeAlias = Generator[Get | Set | Wait, Any, T]


def encode(value: Any) -> bytes:
    """JSON, in ASCII."""
    return json.dumps(value, separators=(",", ":")).encode("ascii")


def decode(value: bytes) -> Any:
    """What `encode` was given, with lists for tuples."""
    return json.loads(value)


def join(process: int, value: bytes, nonce: str) -> Steps[tuple[str, list[Any]]]:
    """Take part in the start of a round, as any process but 0.

    Args:
        process: its number.
        value: what it has to say, encoded.
        nonce: fresh, and nobody else's.

    Returns:
        The run id, and what each process has to say, by process.

    Raises:
        CoordinationError: time is up; names the processes that are missing.
    """
    yield Set(f"hello/{process}", nonce.encode())
    run_id = None
    while True:
        welcome = yield Get(f"welcome/{nonce}")
        if welcome is not None and welcome.decode() != run_id:
            run_id = welcome.decode()
            yield Set(f"{run_id}/start/{nonce}", value)
        if run_id is not None:
            said = yield Get(f"{run_id}/start/all")
            if said is not None:
                return run_id, decode(said)
        seconds = yield Wait()
        if seconds is not None:
            missing = None if run_id is None else (yield Get(f"{run_id}/start/missing"))
            raise _late(process, missing, seconds)


def lead(processes: int, value: bytes, run_id: str) -> Steps[list[Any]]:
    """Take part in the start of a round, as process 0.

    Args:
        processes: how many there are.
        value: what process 0 has to say, encoded.
        run_id: fresh.

    Returns:
        What each process has to say, by process.

    Raises:
        CoordinationError: time is up; names the processes that are missing.
    """
    nonces: dict[int, bytes] = {}

    def greet(process: int) -> Steps[str | None]:
        nonce = yield Get(f"hello/{process}")
        if nonce is None:
            return None
        if nonce != nonces.get(process):
            nonces[process] = nonce
            yield Set(f"welcome/{nonce.decode()}", run_id.encode())
        return f"{run_id}/start/{nonce.decode()}"

    # All of them on every look: one that has spoken may have been started anew since.
    while True:
        said: dict[int, Any] = {0: decode(value)}
        for process in range(1, processes):
            key = yield from greet(process)
            found = None if key is None else (yield Get(key))
            if found is not None:
                said[process] = decode(found)
        if (yield from _publish(f"{run_id}/start", said, processes)):
            return [said[p] for p in range(processes)]


def gather(key: str, process: int, processes: int, value: bytes) -> Steps[list[Any]]:
    """Everybody's value, by process: process 0 collects them and publishes them as one.

    Args:
        key: under the run id, and asked about for the first time.
        process: this one's number.
        processes: how many there are.
        value: this process's, encoded.

    Raises:
        CoordinationError: time is up; names the processes that are missing.
    """
    if process:
        yield Set(f"{key}/{process}", value)
        answer: list[Any] = yield from await_answer(key, process)
        return answer
    said: dict[int, Any] = {0: decode(value)}
    while True:
        for p in range(1, processes):
            found = None if p in said else (yield Get(f"{key}/{p}"))
            if found is not None:
                said[p] = decode(found)
        if (yield from _publish(key, said, processes)):
            return [said[p] for p in range(processes)]


def listen(key: str, process: int, processes: Sequence[int]) -> Steps[list[Any]]:
    """What each of some processes says under a key, in their order.

    Args:
        key: each says it under `<key>/<process>`.
        process: this one's number.
        processes: whom to listen to.

    Raises:
        CoordinationError: time is up; names those that have said nothing.
    """
    said: dict[int, Any] = {}
    while True:
        for p in processes:
            found = None if p in said else (yield Get(f"{key}/{p}"))
            if found is not None:
                said[p] = decode(found)
        silent = [p for p in processes if p not in said]
        if not silent:
            return [said[p] for p in processes]
        seconds = yield Wait()
        if seconds is not None:
            raise _missing(process, silent, seconds)


def await_answer(key: str, process: int) -> Steps[Any]:
    """What process 0 publishes under a key.

    Raises:
        CoordinationError: time is up; names the processes that are missing.
    """
    while (answer := (yield Get(f"{key}/all"))) is None:
        seconds = yield Wait()
        if seconds is not None:
            raise _late(process, (yield Get(f"{key}/missing")), seconds)
    return decode(answer)


def _publish(key: str, said: dict[int, Any], processes: int) -> Steps[bool]:
    """Publish what all have said, or whom it waits for."""
    if len(said) == processes:
        yield Set(f"{key}/all", encode([said[p] for p in range(processes)]))
        return True
    missing = [p for p in range(processes) if p not in said]
    # So that the others can name them too, without looking for themselves.
    yield Set(f"{key}/missing", encode(missing))
    seconds = yield Wait()
    if seconds is not None:
        raise _missing(0, missing, seconds)
    return False


def _late(process: int, missing: bytes | None, seconds: float) -> CoordinationError:
    """The error of a process that had no answer from process 0, by what that says it waits for."""
    others = [] if missing is None else [p for p in decode(missing) if p != process]
    return _missing(process, others or [0], seconds)


def _missing(process: int, missing: Sequence[int], seconds: float) -> CoordinationError:
    return CoordinationError(
        f"process {process} waited {seconds:g} s for {_named(missing)}, which did not answer; see whether they run and reach "
        f"the same call of shardckpt as the others, or allow more time with timeout=."
    )


def _named(processes: Iterable[int]) -> str:
    numbers = [str(p) for p in processes]
    shown = ", ".join(numbers[:_NAMED])
    rest = f" and {len(numbers) - _NAMED} more" if len(numbers) > _NAMED else ""
    return f"process{'es' * (len(numbers) > 1)} {shown}{rest}"
