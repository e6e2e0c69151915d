"""States that collect themselves for saving, and say what to restore into."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from shardckpt.layout.world import World
    from shardckpt.state.document import Node

__all__ = ["StateOwner", "plain_state"]


class StateOwner(ABC):
    """The owner of a whole state, as `shardckpt.TrainState` is: all that saving and restoring know of it."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """The state as plain containers, for saving."""

    @abstractmethod
    def arranged(self, tree: Node, wanted: Callable[[str], bool]) -> Node:
        """A stored state in the form that `state_dict` has.

        Args:
            tree: the stored state.
            wanted: whether a name is to be restored.
        """

    @abstractmethod
    def like(self, tree: Node, tensor: Callable[[str], Any], wanted: Callable[[str], bool], world: Callable[[], World]) -> dict[str, Any]:
        """What to restore a stored state into, so that `load_state_dict` can take the result.

        Args:
            tree: what `arranged` returned.
            tensor: the record of a stored tensor, by its name.
            wanted: whether a name is to be restored.
            world: which process this is, of how many; asked where other processes saved.
        """

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what was restored into `like`."""


def plain_state(state: Any) -> Any:
    """The plain containers of a state: those that a `StateOwner` collects, and any other state as it is."""
    return state.state_dict() if isinstance(state, StateOwner) else state
