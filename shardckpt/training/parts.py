"""Parts of the state of a training run: values, and objects with a state of their own."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

from shardckpt.errors import LeafError, OptionError, ShardckptError
from shardckpt.state import PerProcess
from shardckpt.training.generators import inherited
from shardckpt.training.likeness import LEFT_OUT, StoredLeaves, mirror
from shardckpt.training.optimizer_state.forms import keyed_by_ints

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from shardckpt.layout.world import World
    from shardckpt.reading.naming.adapt import Adaptation
    from shardckpt.state.document import Node

_log = logging.getLogger("shardckpt")


@runtime_checkable
class Stateful(Protocol):
    """An object with a state to save and load, e.g. torch's modules, optimizers and schedulers."""

    def state_dict(self) -> Any:
        """The state: nested dicts, lists and tuples of tensors and small leaves."""

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Load such a state; the return value is ignored."""


class StatePart(Protocol):
    """The interface of an object with a state, for saving and restoring."""

    @property
    def turn(self) -> int:
        """The position in the order of restoring: lower numbers come first."""

    def collect(self) -> Any:
        """The object's state, with names that stay the same in all versions."""

    def arranged(self, node: Node, state: Node, adaptation: Adaptation | None = None) -> Node:
        """The object's stored state in the form that `collect` makes.

        Args:
            node: the object's stored state.
            state: the complete stored state.
            adaptation: what becomes of other objects' tensors, which this object may follow.
        """

    def like(self, stored: StoredLeaves, node: Node) -> Any:
        """The restore target for a stored state; `LEFT_OUT` where no part is requested."""

    def put_back(self, restored: Any) -> None:
        """Load the restored state."""


@dataclass(frozen=True, slots=True)
class Whole:
    """An object whose state is restored completely or not at all."""

    of: Stateful
    turn: ClassVar[int] = 2

    def collect(self) -> Any:
        """See `StatePart`."""
        return self.of.state_dict()

    def arranged(self, node: Node, _state: Node, _adaptation: Adaptation | None = None) -> Node:
        """See `StatePart`."""
        return keyed_by_ints(node, self.of.state_dict())

    def like(self, stored: StoredLeaves, node: Node) -> Any:
        """See `StatePart`."""
        return (
            mirror(stored, node, self.of.state_dict()) if stored.all_or_nothing(node) else LEFT_OUT
        )

    def put_back(self, restored: Any) -> None:
        """See `StatePart`."""
        self.of.load_state_dict(restored)


@dataclass(frozen=True, slots=True)
class Own:
    """An object that every process has separately."""

    of: Stateful
    choose: Callable[[list[Any]], Any] | None
    """Chooses the state for this process, where other processes saved."""
    last: bool
    """Whether it is restored after all others, because they may draw random numbers."""
    draws: bool
    """Whether it draws random numbers when it resumes, which it does when its `state_dict` is
    called."""
    axis: tuple[int, int] | None
    """The position of this process on the data axis, and the size of the axis, where they are
    known."""

    @property
    def turn(self) -> int:
        """See `StatePart`."""
        return 3 if self.last else 2

    def collect(self) -> Any:
        """See `StatePart`."""
        return PerProcess(self.of.state_dict(), self.choose, self.axis)

    def arranged(self, node: Node, _state: Node, _adaptation: Adaptation | None = None) -> Node:
        """See `StatePart`."""
        return node

    def like(self, stored: StoredLeaves, node: Node) -> Any:
        """See `StatePart`."""
        return PerProcess(None, self.choose, self.axis) if stored.all_or_nothing(node) else LEFT_OUT

    def put_back(self, restored: Any) -> None:
        """See `StatePart`."""
        self.of.load_state_dict(restored.value if isinstance(restored, PerProcess) else restored)
        if self.draws:
            self.of.state_dict()


def choice(world: Callable[[], World]) -> Callable[[list[Any]], Any]:
    """The function that chooses a process's generators, where other processes saved theirs."""

    def choose(states: list[Any]) -> Any:
        process = world().process
        if process < len(states):
            return states[process]
        _log.warning(
            "rng: %d processes saved their random number generators, and none of them was "
            "process %d. This process restores generators that were equal on all of them, and "
            "derives the others from process 0's generators and its own number.",
            len(states),
            process,
        )
        return inherited(states, process)

    return choose


@contextmanager
def collecting(key: str) -> Iterator[None]:
    """Name the object in the error of its `state_dict`.

    An error that tells of the object becomes a LeafError. Others, such as those of a device or of a
    collective, stay what they are, and get a note.
    """
    try:
        yield
    except ShardckptError:
        raise
    except (TypeError, ValueError, AttributeError, KeyError, NotImplementedError) as e:
        raise LeafError(
            f"{key} cannot give its state ({type(e).__name__}: {e}); give train_state an object "
            "whose state_dict() works now, or leave it out."
        ) from e
    except Exception as e:
        e.add_note(f"train_state was collecting the state of {key}.")
        raise


def check_stateful(key: str, value: object) -> None:
    """Raise OptionError unless the value has `state_dict` and `load_state_dict`."""
    if isinstance(value, type):
        raise OptionError(
            f"train_state({key}=…): {value.__qualname__} is a class; give an instance of it."
        )
    if isinstance(value, Stateful):
        return
    advice = (
        "use torchdata.stateful_dataloader.StatefulDataLoader"
        if key == "loader"
        else "give one that has, or wrap it in one"
    )
    raise OptionError(
        f"train_state({key}=…): a {type(value).__qualname__} has no state_dict and "
        f"load_state_dict; {advice}."
    )
