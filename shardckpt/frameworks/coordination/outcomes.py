"""A call that all processes of a job make, and of which all learn the outcomes."""

from __future__ import annotations

from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeVar

from shardckpt.errors import CoordinationError, ShardckptError, by_code, error_document
from shardckpt.frameworks.coordination.agreement import encode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from shardckpt.frameworks.coordination.base import Coordinator

T = TypeVar("T")


def on_all_processes(coordinator: Coordinator, key: str, act: Callable[[], T]) -> list[T]:
    """The results of a call that all processes make, by process.

    If it fails on one process, an error of the same class is raised on all.

    Args:
        coordinator: connects the processes.
        key: the name of the call, as in `Coordinator.share`.
        act: the call; returns JSON.

    Raises:
        CoordinationError: not all processes made the call in time; or it failed on another process
            with an exception that is not a ShardckptError.
    """
    failed: Exception | None = None
    outcome: dict[str, Any]
    try:
        outcome = {"result": act()}
        encode(outcome)
    except Exception as e:  # noqa: BLE001  (raised below, after the others know)
        failed = e
        outcome = error_document(e) | {"message": f"{type(e).__name__}: {e}"}
    except BaseException:  # Ctrl-C: the others do not wait
        with suppress(Exception):
            coordinator.decline(key)
        raise
    with suppress(*(() if failed is None else (Exception,))):
        outcomes = coordinator.share(key, outcome)
    if failed is not None:
        raise failed
    check_outcomes(outcomes, "failed with")
    return [one["result"] for one in outcomes]


def share_failure(coordinator: Coordinator, key: str, error: BaseException) -> None:
    """Take part in `Coordinator.share` with an error, for `check_outcomes`; wait for nobody.

    The caller raises its error, whether the others hear of it or not.
    """
    with suppress(Exception):
        coordinator._leave(key, error_document(error))


@contextmanager
def heard_by_all(coordinator: Coordinator, key: str) -> Iterator[None]:
    """Share an error of the block with the others, which would wait; see `share_failure`."""
    try:
        yield
    except BaseException as e:
        share_failure(coordinator, key, e)
        raise


def check_outcomes(answers: Sequence[Any], failed: str) -> None:
    """Check that no process has shared an error, or declined.

    Args:
        answers: the result of `Coordinator.share`, of values that are not None.
        failed: the verb of the message, such as "failed with".

    Raises:
        ShardckptError: the error of the first process that has shared one (`error_document`).
        CoordinationError: a process has declined.
    """
    error = first_failure(answers, failed)
    if error is not None:
        raise error
    check_answered(answers)


def first_failure(answers: Sequence[Any], failed: str) -> ShardckptError | None:
    """The error of the first process that has shared one; see `check_outcomes`."""
    for process, one in enumerate(answers):
        if one is not None and "code" in one:
            return by_code(one["code"])(f"process {process} {failed} {one['message']}")
    return None


def check_answered(answers: Sequence[Any]) -> None:
    """Check that no process has declined to share a value.

    Args:
        answers: the result of `Coordinator.share`, of values that are not None.

    Raises:
        CoordinationError: a process has declined.
    """
    for process, one in enumerate(answers):
        if one is None:
            raise CoordinationError(
                f"process {process} has failed, or was interrupted; see its log."
            )
