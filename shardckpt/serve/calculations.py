"""Answers that may take long: plans, statistics, comparisons, and what matches patterns.

Each is computed in a process of its own, forked from one that has the modules loaded. It has a
limit of memory, and ends at its deadline, whatever it is doing. Few run at a time, and at most half
of them for one user. The other threads of the service stay free meanwhile.
"""

from __future__ import annotations

import json
import multiprocessing
import multiprocessing.forkserver
import resource
import signal
import threading
import time
import traceback
from collections import Counter
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.exceptions import HTTPException

from shardckpt.errors import BudgetError, ShardckptError, by_code
from shardckpt.io.failures import process_advice
from shardckpt.reading import documents
from shardckpt.reading.compare import compare
from shardckpt.reading.inspection.statistics import tensor_statistics
from shardckpt.reshard.forecast.document import document as forecast_document
from shardckpt.reshard.forecast.forecast import Forecast, forecast, known_places
from shardckpt.reshard.forecast.rates import Rates, given_rates
from shardckpt.reshard.options import ReshardOptions
from shardckpt.reshard.plan import plan_reshard
from shardckpt.serve.access.identity import UNKNOWN, WHO
from shardckpt.serve.opened import OpenCheckpoints
from shardckpt.serve.pages.plan import plan_parts
from shardckpt.serve.problems import RETRY, text_of
from shardckpt.serve.roots import Roots
from shardckpt.state.select import selector
from shardckpt.text import file_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.connection import Connection

SECONDS = 60.0
"""Most seconds of a calculation."""
_MEMORY = 256 << 20
"""Most bytes that a calculation allocates."""
_AT_ONCE, _WAIT = 2, 30.0
LARGEST_DIFF = 64 << 30
_STACK = 1 << 20
_BUG = "bug"
_LATE = "this takes longer than {:.0f} s; use the command line on a machine near the data."
_context = multiprocessing.get_context("forkserver")


class Calculations:
    """The calculations of a service."""

    def __init__(self, roots: Roots) -> None:
        """Start nothing yet."""
        self._roots = roots
        self._at_work: Counter[str] = Counter()
        self._changed = threading.Condition()

    @staticmethod
    def start() -> None:
        """Start the process that others are forked from, without waiting for it."""
        _context.set_forkserver_preload([__name__])
        multiprocessing.forkserver.ensure_running()

    def run(self, name: str, *path: str, **asked: Any) -> bytes:
        """The answer of a function in `_CALCULATED`, as JSON.

        Raises:
            HTTPException: other calculations are at work, or it takes too long.
            BudgetError: it takes too much memory.
            ShardckptError: as the function.
        """
        with self._place(WHO.get().name):
            given = self._roots.given, self._roots.given_bases, WHO.get()
            with ExitStack() as unless_started:
                try:
                    receiver, sender = map(
                        unless_started.enter_context, _context.Pipe(duplex=False)
                    )
                    process = _context.Process(
                        target=_calculate,
                        args=(sender, given, (SECONDS, _MEMORY), name, path, asked),
                        daemon=True,
                    )
                    process.start()
                except (EOFError, OSError) as e:
                    advice = process_advice(e)
                    raise HTTPException(
                        503, f"no process can be started for it ({e}). {advice}", RETRY
                    ) from e
                unless_started.pop_all()
            try:
                sender.close()
                if not receiver.poll(SECONDS):
                    raise HTTPException(503, _LATE.format(SECONDS))
                kind = receiver.recv_bytes().decode()
                data = receiver.recv_bytes()
            except (EOFError, OSError):
                raise BudgetError(
                    "The process of this calculation ended; it may take too much memory. Ask for "
                    "less, or use the command line."
                ) from None
            finally:
                process.kill()
                process.join()
                process.close()
                receiver.close()
        if kind == _BUG:
            raise RuntimeError(data.decode())
        if kind:
            raise by_code(kind)(data.decode())  # of this version of the library
        return data

    @contextmanager
    def _place(self, who: str) -> Iterator[None]:
        end = time.monotonic() + _WAIT
        with self._changed:
            most = _AT_ONCE if who == UNKNOWN else _AT_ONCE // 2
            while self._at_work.total() >= _AT_ONCE or self._at_work[who] >= most:
                left = end - time.monotonic()
                if left <= 0:
                    detail = "other comparisons, plans and statistics are at work; try again."
                    raise HTTPException(503, detail, RETRY)
                self._changed.wait(left)
            self._at_work[who] += 1
        try:
            yield
        finally:
            with self._changed:
                self._at_work -= Counter({who: 1})
                self._changed.notify_all()


def described(
    opened: OpenCheckpoints, ident: str, *, only: list[str] | None, depth: int | None
) -> dict[str, Any]:
    """The description of a checkpoint, of names that match patterns.

    Without patterns the description takes no calculation.
    """
    checkpoint = opened.get(ident).checkpoint
    node = documents.choose_nodes(checkpoint.parsed_tree, selector(only))
    empty: dict[str, Any] = {"tensors": [], "leaves": []}
    document = documents.checkpoint_json(
        checkpoint, node if node is not None else checkpoint.parsed_tree
    )
    if depth is not None:
        document["tensors"] = [one for one in document["tensors"] if one["name"].count("/") < depth]
    return {"id": ident, **document, **(empty if node is None else {})}


def _statistics(opened: OpenCheckpoints, ident: str, name: str, *, budget: int) -> dict[str, Any]:
    return {
        "id": ident,
        "name": name,
        **tensor_statistics(opened.get(ident).checkpoint, name, budget),
    }


def _compare(
    opened: OpenCheckpoints, a: str, b: str, *, values: bool, layouts: bool
) -> dict[str, Any]:
    first, second = (opened.get(ident).checkpoint for ident in (a, b))
    nbytes = first.record.totals["bytes"]
    if values and nbytes > LARGEST_DIFF:
        raise BudgetError(
            f"{a}: {file_size(nbytes)} are too many to compare here; ask for values=false, or use "
            "`shardckpt diff`."
        )
    comparison = compare(first, second, values=values, memory_limit="64MiB")
    return {
        "a": a,
        "b": b,
        **documents.comparison_json(comparison, structure=not values, layout=layouts),
    }


def _plan(opened: OpenCheckpoints, ident: str, **asked: Any) -> dict[str, Any]:
    return {"id": ident, **forecast_document(_forecast(opened, ident, **asked))}


def _plan_page(opened: OpenCheckpoints, ident: str, **asked: Any) -> list[str]:
    plan = _forecast(opened, ident, **asked)
    return [str(part) for part in plan_parts(plan, forecast_document(plan))]


def _forecast(
    opened: OpenCheckpoints,
    ident: str,
    *,
    devices_per_host: int | None,
    rate: str | None,
    **asked: Any,
) -> Forecast:
    """The forecast of a reshard of a checkpoint."""
    checkpoint = opened.get(ident).checkpoint
    options = ReshardOptions(**ReshardOptions.arguments(asked), workers=1)
    planned = plan_reshard(checkpoint, options, None)
    rates = Rates() if rate is None else given_rates(rate)
    return forecast(
        checkpoint,
        planned,
        rates,
        options=options,
        devices_per_host=devices_per_host,
        places=known_places(checkpoint),
    )


_CALCULATED: dict[str, Callable[..., Any]] = {
    one.__name__: one for one in (described, _statistics, _compare, _plan, _plan_page)
}


def _calculate(
    sender: Connection,
    given: Any,
    limits: tuple[float, int],
    name: str,
    path: tuple[str, ...],
    asked: dict[str, Any],
) -> None:
    """Compute an answer, in the process that was forked for it."""
    seconds, memory = limits
    signal.alarm(round(seconds) + 1)  # the service may have gone
    threading.stack_size(_STACK)
    used = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_DATA, (used + memory, used + memory))
    *places, who = given
    WHO.set(who)
    roots = Roots(*places)
    try:
        answer = _CALCULATED[name](OpenCheckpoints(roots), *path, **asked)
        kind, data = "", json.dumps(answer, allow_nan=False, separators=(",", ":")).encode("ascii")
    except ShardckptError as e:
        kind, data = e.code, text_of(e).encode("utf-8", "backslashreplace")
    except MemoryError:
        message = (
            f"This calculation takes more than {memory >> 20} MiB of memory; ask for less, or use "
            "the command line."
        )
        kind, data = BudgetError.code, message.encode()
    except Exception:  # noqa: BLE001  (a bug, of which the service tells)
        kind, data = _BUG, traceback.format_exc().encode("utf-8", "backslashreplace")
    sender.send_bytes(kind.encode())
    sender.send_bytes(data)
