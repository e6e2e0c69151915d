"""`PerProcess`: parts of a state that every process owns by itself.

Tensors and small leaves are one for all processes. What differs on purpose, such as the state of a random number
generator or of a data loader, is marked with `PerProcess`, and every process stores its own value of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardckpt.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["PerProcess"]


@dataclass(frozen=True, slots=True, eq=False)
class PerProcess:
    """Marks a part of the state that every process owns by itself.

        state = {"model": model.state_dict(), "rng": shardckpt.PerProcess(torch.get_rng_state())}
        torch.set_rng_state(shardckpt.restore(url, like=state)["rng"].value)

    As many processes as saved get their own values back. Fewer or more need to be told which: `choose` is called with
    the values of all the processes that saved, in their order, and returns the one to use.

        PerProcess(loader.state_dict(), choose=lambda values: values[0])
    """

    value: Any
    """Any nesting of containers, small leaves and host arrays: numpy's, torch's on the CPU, and JAX's that have no part
    in another process. At most 64 MiB per process, all together. In `like` it is never looked at. It comes back as
    plain dicts, lists and tuples."""
    choose: Callable[[list[Any]], Any] | None = None
    """Used when restoring, never stored."""

    def __post_init__(self) -> None:
        """Refuse what could only fail when restoring."""
        if self.choose is not None and not callable(self.choose):
            raise OptionError(f"PerProcess(choose=…) takes a function of the list of all values, not a {type(self.choose).__qualname__}.")
