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

from shardckpt.errors import CoordinationError, OptionError, extend
from shardckpt.frameworks.coordination.waiting import ALL_MUST_CALL

T = TypeVar("T")

_NAMED = 12
"""Most processes that a message names."""
_KEYS = 8
"""Number of questions of one name that have keys of their own, so that a job of any length keeps
few. A process may leave so many in a row while another one still looks for the answer to the one
before."""


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
        if (yield from _are_there(f"{run_id}/start", values, processes)):
            served |= nonces
            in_order = [values[p] for p in range(processes)]
            yield Set(f"{run_id}/start/all", numbered(0, encode(in_order)))
            return in_order


class Questions:
    """The questions of one name that the processes ask each other, as one process counts them.

    `share` and `leave` go by these rules, whatever fails in between:

    1. A process asks with the number of the question and of its call: `<key>/<process> = [number,
       [call, value]]`. Process 0 publishes all values, and every `call` that is not 1, under
       `<key>/all`. A call that returns ends its question.
    2. A process that leaves sends a value, and ends its question without the answer; process 0
       publishes at once, for all calls. So a process may be ahead of others: an older number is no
       value yet, and a newer one means that the process has left.
    3. A call that fails withdraws its value and ends no question, so that all can call again. If
       process 0 had seen the value, the others have their answer and go on. The next call of this
       process sees that the answer is for another call, and takes part in the next question.
    4. A call that is interrupted leaves, unless its answer is there: then the others have it, too.

    One gap remains: if a process leaves in the moment between process 0's look at the value of its
    failed call and the answer, the others wait for it at the next question.
    """

    def __init__(self, name: str) -> None:
        """Nothing was asked yet.

        Args:
            name: the beginning of the keys, under the run id.
        """
        self._name = name
        self.number = 0
        """The current question."""
        self.calls = 0
        """Calls of this process about it, with the current one."""

    @property
    def key(self) -> str:
        """The key of the current question."""
        return f"{self._name}#{self.number % _KEYS}"

    def end(self) -> None:
        """Go on to the next question."""
        self.number += 1
        self.calls = 0


def share(questions: Questions, process: int, processes: int, value: bytes) -> Steps[list[Any]]:
    """The values of all processes for the current question; the caller ends it.

    Args:
        questions: the questions of a name; the call is counted.
        process: the number of this process.
        processes: the number of processes.
        value: the value of this process, encoded.

    Returns:
        The value of each process, by process; as for `gather`.

    Raises:
        CoordinationError: the time is up; names the missing processes. Or process 0 has gone on.
    """
    who = process, processes, value
    values = yield from gather(questions.key, *who, questions.calls, questions.number)
    if values is None:
        questions.end()
        questions.calls = 1
        try:
            values = yield from gather(questions.key, *who, 1, questions.number)
        except CoordinationError as e:
            extend(
                e,
                after=" The call before, which failed on this process, was answered on the others: "
                "they may have gone on without a second one.",
            )
            raise
    assert values is not None  # no call before has asked it
    return values


def leave(questions: Questions, process: int, value: bytes) -> Steps[None]:
    """End the current question, and wait for nobody.

    Args:
        questions: the questions of a name; the call is counted. If an earlier call, which has
            failed, was answered, the question after it is the one to end.
        process: the number of this process.
        value: the value that the others get, encoded. The others get None as that of all other
            processes if this is process 0, which collects them.
    """
    data = yield Get(f"{questions.key}/all")
    number, answer = (-1, None) if data is None else decode(data)
    if number == questions.number:
        calls = questions.calls
        questions.end()
        if _answers(answer, process, calls):
            return
        questions.calls = 1
    if process:
        own = b"[%d,%b]" % (questions.calls, value)
        yield Set(f"{questions.key}/{process}", numbered(questions.number, own))
    else:
        yield Set(f"{questions.key}/all", numbered(questions.number, b"[[%b],null]" % value))
    questions.end()


def gather(
    key: str, process: int, processes: int, value: bytes, call: int = 1, number: int = 0
) -> Steps[list[Any] | None]:
    """The values of all processes, by process: process 0 collects them and publishes them as one.

    A process whose call has failed sets `WITHDRAWN`, so every look reads all values.

    Args:
        key: a key under the run id.
        process: the number of this process.
        processes: the number of processes.
        value: the value of this process, encoded.
        call: the number of this call with the key and the number, from 1.
        number: greater than in all earlier uses of the key.

    Returns:
        The values, None for a process that has left without one. None if an earlier call of this
        process, which has failed, was answered: nobody else asks this question any more.

    Raises:
        CoordinationError: the time is up; names the missing processes. Or process 0 has gone on.
    """
    own = b"[%d,%b]" % (call, value)
    if process:
        yield Set(f"{key}/{process}", numbered(number, own))
        answer = yield from await_answer(key, process, number)
    else:
        answer = yield from _collect(key, processes, own, number)
    if not _answers(answer, process, call):
        return None
    values: list[Any] = answer[0]
    return values + [None] * (processes - len(values))


def _collect(key: str, processes: int, own: bytes, number: int) -> Steps[list[Any]]:
    """The values of all processes, and their calls, as process 0.

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
                values[p] = answered[1] if answered[0] == number else [1, None]
        if (yield from _are_there(key, values, processes, number)):
            calls = {str(p): values[p][0] for p in values if values[p][0] != 1}
            answer = [[values[p][1] for p in range(processes)], calls]
            yield Set(f"{key}/all", numbered(number, encode(answer)))
            return answer


def _answers(answer: Any, process: int, call: int) -> bool:
    """Whether a published answer is for this call of a process, and not for an earlier one."""
    calls = answer[1]
    if calls is None:  # process 0 has left
        return process > 0
    return bool(calls.get(str(process), 1) == call)


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
            others = _without_answer(process, (yield Get(f"{key}/missing")), number)
            silent: list[int] = []
            for p in others[:_NAMED]:  # process 0 may have gone before they came
                data = yield Get(f"{key}/{p}")
                if data is None or decode(data)[0] < number:
                    silent.append(p)
            yield from _overdue(process, [*silent, *others[_NAMED:]] or [0], late)


def _are_there(key: str, values: dict[int, Any], processes: int, number: int = 0) -> Steps[bool]:
    """Whether all processes have values; if not, publish the missing ones, and wait."""
    missing = [p for p in range(processes) if p not in values]
    if missing:
        # So that the other processes can name them too, without their own search.
        yield Set(f"{key}/missing", numbered(number, encode(missing)))
        late = yield Wait()
        if late is not None:
            yield from _overdue(0, missing, late)
    return not missing


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
