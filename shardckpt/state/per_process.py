"""`PerProcess`: parts of a state of which every process stores its own value.

Tensors and small leaves are the same for all processes. A part that differs on purpose, such as the
state of a random number generator or of a data loader, is marked with `PerProcess`, and every
process stores its own value of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardckpt.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, slots=True, eq=False)
class PerProcess:
    """Marks a part of the state of which every process stores its own value.

        state = {"model": model.state_dict(), "rng": shardckpt.PerProcess(torch.get_rng_state())}
        torch.set_rng_state(shardckpt.restore(url, like=state)["rng"].value)

    If as many processes restore as saved, each gets its own value back. For another number of
    processes, `choose` decides: it is called with the values of all the processes that saved, in
    their order, and returns the one to use.

        PerProcess(loader.state_dict(), choose=lambda values: values[0])
    """

    value: Any
    """Any nesting of containers, small leaves and host arrays: numpy's, torch's on the CPU, and
    JAX's without parts in another process. At most 64 MiB per process in total. The value in `like`
    is ignored. A restored value consists of plain dicts, lists and tuples."""
    choose: Callable[[list[Any]], Any] | None = None
    """Function that chooses among the saved values when restoring; never stored."""
    axis: tuple[int, int] | None = None
    """Position of this process on the axis of the mesh along which the values differ, and the size
    of that axis: `(data_rank, data_size)`. It is stored. A restore goes by the position and not by
    the number of the process, and refuses another size without `choose`, which then gets one value
    for each position. Processes at one position have equal values; the one with the lowest number
    counts."""

    def __post_init__(self) -> None:
        """Refuse a `choose` that could only fail when restoring."""
        if self.choose is not None and not callable(self.choose):
            raise OptionError(
                "PerProcess(choose=…) takes a function of the list of all values, not a "
                f"{type(self.choose).__qualname__}."
            )
        if self.axis is not None and not _is_axis(self.axis):
            raise OptionError(
                f"PerProcess(axis={self.axis!r:.60}): give the position and the size, such as "
                "(data_rank, data_size)."
            )


def _is_axis(axis: object) -> bool:
    """Whether a value is a position on an axis, and the axis's size."""
    if (
        not isinstance(axis, tuple | list)
        or len(axis) != 2
        or any(isinstance(n, bool) or not isinstance(n, int) for n in axis)
    ):
        return False
    position, size = axis
    return 0 <= int(position) < int(size)
