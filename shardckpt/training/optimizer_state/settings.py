"""Settings of the groups of an optimizer, from those that were saved."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from shardckpt.errors import StructureMismatchError
from shardckpt.state.document import Branch
from shardckpt.state.names import shown
from shardckpt.text import few

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from shardckpt.state.document import Node

OF_THE_GROUP = frozenset({"params", "param_names"})
"""Entries of a group that are not settings."""
_OF_SCHEDULERS = frozenset(
    {"initial_lr", "swa_lr", "max_lr", "min_lr", "max_momentum", "base_momentum"}
)
"""Settings that schedulers add to groups."""


def check_class(optimizer: torch.optim.Optimizer, key: str, settings: Node) -> None:
    """Refuse settings that the optimizer does not have, and without which it would make no step.

    Torch would take them.
    """
    for group in settings.children if isinstance(settings, Branch) else ():
        names = {str(key) for key in group.keys} if isinstance(group, Branch) else set()
        lacking, strange = (
            optimizer.defaults.keys() - names,
            names - optimizer.defaults.keys() - _OF_SCHEDULERS,
        )
        own = set().union(*optimizer.param_groups)
        if lacking and strange - own and (lacking := lacking - _filled_in(optimizer, names)):
            raise StructureMismatchError(
                f"{shown(group.name)} has settings of another class of optimizer "
                f"({few(sorted(strange - own), 3)}), and {type(optimizer).__qualname__} "
                f"needs {few(sorted(lacking), 3)}; make the optimizer that was saved, or "
                f"leave {key} out with only=."
            )


def _filled_in(optimizer: torch.optim.Optimizer, names: Collection[str]) -> set[str]:
    """The settings that the optimizer's class adds to a group that has only `names`.

    The class adds the settings of later versions of torch.
    """
    group: dict[str, Any] = {"params": [], **dict.fromkeys(names)}
    blank = object.__new__(type(optimizer))
    blank.__setstate__({"state": {}, "param_groups": [group], "defaults": optimizer.defaults})
    return set(group)


def settings_of_group(
    optimizer: torch.optim.Optimizer, key: str, number: int, candidates: list[Mapping[str, Any]]
) -> Mapping[str, Any]:
    """Settings of one group of the optimizer, from the saved settings of its parameters."""
    for other in candidates[1:]:
        names = [*candidates[0], *other]
        differs = next(
            (
                n
                for n in names
                if n not in candidates[0] or n not in other or candidates[0][n] != other[n]
            ),
            None,
        )
        if differs is not None:
            raise StructureMismatchError(
                f"{shown(key)}: group {number} has parameters that were saved with "
                f"different settings, {differs}={candidates[0].get(differs)!r} and "
                f"{other.get(differs)!r}; give each a group of its own, or leave out "
                f"{key}/param_groups and {key}/group_of with only=."
            )
    own = optimizer.param_groups[number]
    if not candidates:
        return {name: value for name, value in own.items() if name not in OF_THE_GROUP}
    return {name: _move(value, own.get(name)) for name, value in candidates[0].items()}


def _move(value: object, own: object) -> object:
    """A setting in the optimizer's own form and on its device.

    Formats without tuples turn them into lists.
    """
    if isinstance(value, list) and isinstance(own, tuple):
        return tuple(value)
    return (
        value.to(own.device)
        if isinstance(value, torch.Tensor) and isinstance(own, torch.Tensor)
        else value
    )
