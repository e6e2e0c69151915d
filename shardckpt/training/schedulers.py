"""A torch learning rate scheduler whose per-group values go by the group's name.

Schedulers keep lists with an item for each group, in the order of the optimizer's groups:
`base_lrs`, `_last_lr` and similar ones. They are saved by the first parameter of the group, as in
`optimizers`, so that groups in another order, or divided in another manner, get back the values
that their parameters had.

Functions among the entries (`SWALR` has one) are left out: the scheduler that restores keeps its
own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from shardckpt.errors import StructureMismatchError
from shardckpt.state.document import Branch, Small, child
from shardckpt.state.names import shown
from shardckpt.training.likeness import LEFT_OUT, mirror, renamed
from shardckpt.training.optimizer_state.forms import (
    PER_GROUP,
    keyed_by_ints,
    map_schedules,
    read_optimizer,
    value_of,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardckpt.reading.naming.adapt import Adaptation
    from shardckpt.state.document import Node
    from shardckpt.training.likeness import StoredLeaves
    from shardckpt.training.optimizer_state.forms import OptimizerNodes
    from shardckpt.training.optimizers import NamedOptimizer

_RATES = {"base_lrs": "initial_lr", "_last_lr": "lr"}
"""Per-group keys of a scheduler, and the optimizer's setting that has the same value."""
_INNER = "_schedulers"
"""Key under which schedulers of schedulers (`SequentialLR`, `ChainedScheduler`) store the inner
states."""


class NamedScheduler:
    """A scheduler and its optimizer."""

    turn: ClassVar[int] = 2
    follows: ClassVar[bool] = True

    def __init__(self, key: str, scheduler: Any, optimizer: NamedOptimizer) -> None:
        self.key = key
        self.scheduler = scheduler
        self.optimizer = optimizer

    def collect(self) -> dict[str, Any]:
        """The state, with per-group values by group name."""
        return self._by_names(self.scheduler.state_dict())

    def arranged(self, node: Node, state: Node, adaptation: Adaptation | None = None) -> Node:
        """The stored state in the form that `collect` makes.

        `state` is the complete stored state, with the optimizer's groups.
        """
        optimizer = child(state, self.optimizer.key)
        before, stored = (
            read_optimizer(optimizer),
            self.optimizer.read(optimizer, state, adaptation),
        )
        firsts = [] if stored is None else stored.firsts()

        def by_group(scheduler: Branch, of_each: Branch) -> Branch | None:
            if stored is None:
                return None
            if of_each.form == "dict":
                return renamed(
                    of_each,
                    dict(zip([] if before is None else before.firsts(), firsts, strict=True)),
                )
            if stored.form == "flat":
                return self._by_rate(stored, scheduler, of_each)
            return (
                Branch(of_each.name, "dict", firsts, of_each.children)
                if len(of_each.keys) == len(firsts)
                else None
            )

        return map_schedules(keyed_by_ints(node, self.scheduler.state_dict()), by_group)

    def like(self, stored: StoredLeaves, node: Node) -> Any:
        """The restore target; `LEFT_OUT` if it is not requested."""
        return mirror(stored, node, self.collect()) if stored.all_or_nothing(node) else LEFT_OUT

    def put_back(self, restored: Mapping[str, Any]) -> None:
        """Give the scheduler the state that was restored into `like`.

        Its optimizer is restored already.

        Raises:
            StructureMismatchError: the parameters of a group had different values, or a group has
                no value.
        """
        self.scheduler.load_state_dict(self._as_list(restored))

    def _by_rate(self, stored: OptimizerNodes, scheduler: Branch, of_each: Branch) -> Branch:
        """A per-group list as a dict, where the optimizer is stored flat.

        Groups are recognized by their initial rates.

        Raises:
            StructureMismatchError: several groups match, and have different values.
        """
        settings = {str(group.members[0]): group.settings for group in stored.groups}
        items = of_each.children
        values: dict[str, Node] = {}
        for first in self.optimizer.firsts() if items else ():
            fits = list(items)
            for rates_name, setting in _RATES.items():
                rates, own = (
                    child(scheduler, rates_name),
                    value_of(settings.get(first, {}).get(setting)),
                )
                known = (
                    [value_of(rate) for rate in rates.children] if isinstance(rates, Branch) else []
                )
                if own in known and len(known) == len(items):
                    fits = [item for item, rate in zip(items, known, strict=True) if rate == own]
                    break
            if any(
                value_of(item) != value_of(fits[0]) or not isinstance(item, Small)
                for item in fits[1:]
            ):
                raise StructureMismatchError(
                    f"{of_each.name} is a list with an item per group, but {shown(stored.name)} "
                    f"is stored without the order of groups; leave out {self.key} with only=, and "
                    "make a new one."
                )
            values[first] = fits[0]
        return Branch(of_each.name, "dict", list(values), list(values.values()))

    def _by_names(self, state: Mapping[str, Any]) -> dict[str, Any]:
        by_name = {name: value for name, value in state.items() if not callable(value)}
        firsts = self.optimizer.firsts()
        for name, value in state.items():
            if name in PER_GROUP and isinstance(value, list) and len(value) == len(firsts):
                by_name[name] = dict(zip(firsts, value, strict=True))
            elif name == _INNER:
                by_name[name] = [self._by_names(inner) for inner in value]
        return by_name

    def _as_list(self, state: Mapping[str, Any]) -> dict[str, Any]:
        by_name = dict(state)
        for name, value in state.items():
            if name in PER_GROUP and isinstance(value, dict):
                by_name[name] = [
                    self._of_group(name, value, sources) for sources in self.optimizer.sources()
                ]
            elif (
                name in PER_GROUP
                and isinstance(value, list)
                and len(value) != len(self.optimizer.groups)
            ):
                raise StructureMismatchError(
                    f"{shown(self.key)}: {name} was saved for {len(value)} groups, but the "
                    f"optimizer has {len(self.optimizer.groups)}; give it the groups that it had, "
                    f"or leave {self.key} out with only=."
                )
            elif name == _INNER:
                by_name[name] = [self._as_list(inner) for inner in value]
        return by_name

    def _of_group(self, name: str, of_each: Mapping[str, Any], sources: list[str]) -> Any:
        values = [of_each[source] for source in sources if source in of_each]
        if not values or any(value != values[0] for value in values[1:]):
            raise StructureMismatchError(
                f"{shown(self.key)}: {name} was saved for the groups of "
                f"{', '.join(map(repr, of_each))}. It has "
                f"{'different values' if values else 'no value'} for the parameters of "
                f"{', '.join(map(repr, sources))}, which are one group here; give the optimizer "
                "the groups of the save."
            )
        return values[0]
