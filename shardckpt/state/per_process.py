"""`PerProcess`: parts of a state of which every process stores its own value.

Tensors and small leaves are the same for all processes. A part that differs on purpose, such as the state of a random number
generator or of a data loader, is marked with `PerProcess`, and every process stores its own value of it.
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

    If as many processes restore as saved, each gets its own value back. For another number of processes, `choose` decides: it is
    called with the values of all the processes that saved, in their order, and returns the one to use.

        PerProcess(loader.state_dict(), choose=lambda values: values[0])
    """

    value: Any
    """Any nesting of containers, small leaves and host arrays: numpy's, torch's on the CPU, and JAX's without parts in another
    process. At most 64 MiB per process in total. The value in `like` is ignored. A restored value consists of plain dicts, lists and
    tuples."""
    choose: Callable[[list[Any]], Any] | None = None
    """Function that chooses among the saved values when restoring; never stored."""

    def __post_init__(self) -> None:
        """Refuse a `choose` that could only fail when restoring."""
        if self.choose is not None and not callable(self.choose):
            raise OptionError(f"PerProcess(choose=…) takes a function of the list of all values, not a {type(self.choose).__qualname__}.")
