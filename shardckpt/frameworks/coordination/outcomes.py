"""A call that all processes of a job make, and of which all learn the outcomes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from shardckpt.errors import CoordinationError, by_code, error_document

if TYPE_CHECKING:
    from collections.abc import Callable

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
    outcome: dict[str, Any] = {}
    try:
        outcome["result"] = act()
    except Exception as e:  # noqa: BLE001  (raised below, after the others know)
        failed = e
        outcome |= error_document(e) | {"message": f"{type(e).__name__}: {e}"}
    except BaseException:  # Ctrl-C: the others do not wait
        coordinator.decline(key)
        raise
    outcomes = coordinator.share(key, outcome)
    if failed is not None:
        raise failed
    for process, one in enumerate(outcomes):
        if one is None:
            raise CoordinationError(f"process {process} was interrupted")
        if "result" not in one:
            raise by_code(one["code"])(f"process {process} failed with {one['message']}")
    return [one["result"] for one in outcomes]
