"""The stored forms of a torch optimizer's state, and the conversions between them.

| form | | made by |
|---|---|---|
| named | `"param_groups": {first: …}, "group_of": {name: first}` | `train_state` |
| listed | `"param_groups": [{…, "params": [name, …]}, …]` | `get_optimizer_state_dict` |
| numbered | `"param_groups": [{…, "params": [0, …]}, …]` | `Optimizer.state_dict` |
| flat | `"param_groups.<name>.lr": …` | `get_optimizer_state_dict`, flattened |

All but the last have `"state": {name: …}`, by numbers in the numbered form; the flat one has
`"state.<name>.exp_avg": …`. A group is called by the name of its first parameter (`first`).

All functions take and return nodes of a stored tree. A leaf keeps its stored name wherever it
moves, so that selections, reads and messages use the names in the checkpoint. This module does not
need torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from shardckpt.state import leaves
from shardckpt.state.document import Branch, Node, Small, child
from shardckpt.state.names import PathKey, child_name
from shardckpt.state.unflatten import decode_leaf

PER_GROUP = frozenset(
    {"base_lrs", "_last_lr", "lr_lambdas", "min_lrs", "max_lrs", "base_momentums", "max_momentums"}
)
"""Keys of a scheduler's state that have a value for each parameter group, for all schedulers of
torch 2.9."""
_STATE, _GROUPS, _GROUP_OF, _MEMBERS, _NAMES = (
    "state",
    "param_groups",
    "group_of",
    "params",
    "param_names",
)


@dataclass(frozen=True, slots=True)
class Group:
    """A parameter group."""

    members: tuple[str | int, ...]
    """Its parameters: names, or numbers."""
    settings: Mapping[PathKey, Node]
    said_by: tuple[Node, ...]
    """For each member, the stored leaf that assigns it to the group."""


@dataclass(frozen=True, slots=True)
class OptimizerNodes:
    """The state of an optimizer, independent of its stored form."""

    name: str
    """The stored name of the optimizer."""
    form: str
    state: Mapping[PathKey, Node]
    """State by parameter, and state that belongs to no parameter."""
    groups: tuple[Group, ...]
    rest: Mapping[PathKey, Node]
    """Other entries that the optimizer stores."""
    beside_numbers: bool = False
    """Whether the names stood beside numbers (`param_names`): they may be names in a part of the
    module."""

    def firsts(self) -> list[str]:
        """The name of each group."""
        return [group_name(group.members, number) for number, group in enumerate(self.groups)]

    def members(self) -> list[str | int]:
        """All parameters, in the order of the groups."""
        return [member for group in self.groups for member in group.members]

    def renamed(self, new: Callable[[str | int], str]) -> OptimizerNodes:
        """The same state with other names for the parameters."""
        known = {member: new(member) for member in self.members()}
        state = {known.get(self._member(key), key): node for key, node in self.state.items()}
        groups = tuple(
            replace(group, members=tuple(known[member] for member in group.members))
            for group in self.groups
        )
        return replace(
            self,
            form="listed" if self.form == "numbered" else self.form,
            state=state,
            groups=groups,
        )

    def named(self) -> Branch:
        """The form that `train_state` stores."""
        firsts = self.firsts()
        below = child_name(self.name, _GROUPS)
        settings = {
            first: _branch(child_name(below, first), group.settings)
            for first, group in zip(firsts, self.groups, strict=True)
        }
        group_of = {
            str(member): Small(leaf.name, leaves.encode(first, leaf.name))
            for first, group in zip(firsts, self.groups, strict=True)
            for member, leaf in zip(group.members, group.said_by, strict=True)
        }
        state = _branch(child_name(self.name, _STATE), self.state)
        return _branch(
            self.name,
            {
                _STATE: state,
                _GROUPS: _branch(below, settings),
                _GROUP_OF: _branch(below, group_of),
                **self.rest,
            },
        )

    def listed(self, *, numbers: bool = False) -> Branch:
        """The form that `set_optimizer_state_dict` loads.

        With `numbers`, it is the form that `Optimizer.load_state_dict` loads.
        """
        number_of = {member: number for number, member in enumerate(self.members())}
        shown = {member: number if numbers else member for member, number in number_of.items()}
        groups = [
            _branch(
                self.name,
                {
                    **group.settings,
                    _MEMBERS: _list(
                        self.name, [_small(self.name, shown[m]) for m in group.members]
                    ),
                },
            )
            for group in self.groups
        ]
        state = {shown.get(self._member(key), key): node for key, node in self.state.items()}
        return _branch(
            self.name,
            {_STATE: _branch(self.name, state), _GROUPS: _list(self.name, groups), **self.rest},
        )

    def flat(self) -> Branch:
        """The form of `get_optimizer_state_dict` with `flatten_optimizer_state_dict=True`."""
        nodes: dict[PathKey, Node] = dict(self.rest)
        for member, of_one in self.state.items():
            if _is_dict(of_one):
                nodes |= {f"{_STATE}.{member}.{key}": node for key, node in _items(of_one)}
            else:  # state of no parameter
                nodes[f"{_STATE}.{member}"] = of_one
        for group in self.groups:
            nodes |= {
                f"{_GROUPS}.{member}.{key}": node
                for member in group.members
                for key, node in group.settings.items()
            }
        return _branch(self.name, nodes)

    def _member(self, key: PathKey) -> str | int:
        """The parameter that a key of the state stands for; DCP turns numbers into text."""
        if self.form == "numbered" and isinstance(key, str) and key.isdecimal():
            return int(key)
        return key if isinstance(key, str | int) else str(key)


FORMS: Mapping[str, Callable[[OptimizerNodes], Branch]] = {
    "names": OptimizerNodes.listed,
    "numbers": lambda nodes: nodes.listed(numbers=True),
    "flat": OptimizerNodes.flat,
}
"""The forms in which an optimizer can be exported."""


def read_optimizer(node: Node | None) -> OptimizerNodes | None:
    """An optimizer's state in any form; None if a node is anything else."""
    return read_named(node) or _read_listed(node) or _read_flat(node)


def read_named(node: Node | None) -> OptimizerNodes | None:
    """An optimizer's state in the form of `train_state`.

    None if a node is anything else, or incomplete.
    """
    groups, group_of = child(node, _GROUPS), child(node, _GROUP_OF)
    if not (isinstance(node, Branch) and _is_dict(groups) and _is_dict(group_of)):
        return None
    settings_of = dict(_items(groups))
    members: dict[object, dict[str, Node]] = {first: {} for first in settings_of}
    for name, leaf in _items(group_of):
        first = value_of(leaf)
        if not isinstance(name, str) or not isinstance(first, str) or first not in members:
            return None
        members[first][name] = leaf
    if not all(map(_is_dict, settings_of.values())):
        return None
    listing = [
        Group(tuple(members[first]), dict(_items(of)), tuple(members[first].values()))
        for first, of in settings_of.items()
    ]
    return OptimizerNodes(
        node.name, "named", *_state_and(node, listing, {_STATE, _GROUPS, _GROUP_OF})
    )


def _read_listed(node: Node | None) -> OptimizerNodes | None:
    groups = child(node, _GROUPS)
    if (
        not isinstance(node, Branch)
        or not isinstance(groups, Branch)
        or groups.form == "dict"
        or not groups.children
    ):
        return None
    listing, names = [], []
    for group in groups.children:
        members = child(group, _MEMBERS)
        if (
            not _is_dict(group)
            or not isinstance(members, Branch)
            or (members.form == "dict" and members.keys)
        ):
            return None
        given = child(group, _NAMES)
        names.extend(
            [value_of(leaf) for leaf in given.children] if isinstance(given, Branch) else []
        )
        settings = {key: setting for key, setting in _items(group) if key not in {_MEMBERS, _NAMES}}
        listing.append(
            Group(
                tuple(value_of(leaf) for leaf in members.children),  # type: ignore[misc]
                settings,
                tuple(members.children),
            )
        )
    members_of_all = [member for group in listing for member in group.members]
    kinds = {type(member) for member in members_of_all}
    if not (kinds <= {int} or kinds == {str}) or len(set(members_of_all)) < len(members_of_all):
        return None
    nodes = OptimizerNodes(
        node.name,
        "numbered" if int in kinds else "listed",
        *_state_and(node, listing, {_STATE, _GROUPS}),
    )
    if (
        nodes.form == "numbered"
        # Those of an optimizer that was made of two modules' `named_parameters()` may be equal.
        and len(set(map(str, names))) == len(names) == len(members_of_all)
        and all(isinstance(name, str) for name in names)
    ):
        known = dict(zip(members_of_all, names, strict=True))
        return replace(nodes.renamed(lambda number: str(known[number])), beside_numbers=True)
    return nodes


def _read_flat(node: Node | None) -> OptimizerNodes | None:
    if not _is_dict(node):
        return None
    assert isinstance(node, Branch)
    state: dict[PathKey, dict[PathKey, Node]] = {}
    of_none: dict[PathKey, Node] = {}
    settings: dict[str, dict[PathKey, Node]] = {}
    rest: dict[PathKey, Node] = {}
    for key, below in _items(node):
        kind, _, path = key.partition(".") if isinstance(key, str) else ("", "", "")
        member, _, last = path.rpartition(".")
        if kind == _GROUPS and member:
            of_group = settings.setdefault(member, {})
            if last != _NAMES:  # lists the complete group
                of_group[last] = below
        elif kind == _STATE and member:
            state.setdefault(member, {})[last] = below
        elif kind == _STATE and last:
            of_none[last] = below
        else:
            rest[key] = below
    if not settings:
        return None
    groups = tuple(
        Group((member,), of_member, (next(iter(of_member.values()), node),))
        for member, of_member in settings.items()
    )
    states = {
        member: _branch(f"{node.name}/{_STATE}.{member}", of_member)
        for member, of_member in state.items()
    }
    return OptimizerNodes(node.name, "flat", {**states, **of_none}, groups, rest)


def map_schedules(node: Node, change: Callable[[Branch, Branch], Node | None]) -> Node:
    """A scheduler's state with its per-group containers changed, in nested schedulers, too.

    Args:
        node: the state, or anything that contains such states.
        change: called with a scheduler's state and a `PER_GROUP` container in it; returns the
            replacement, or None to keep it.
    """
    if not isinstance(node, Branch):
        return node
    children = []
    for key, below in zip(node.keys, node.children, strict=True):
        changed = change(node, below) if key in PER_GROUP and isinstance(below, Branch) else None
        children.append(map_schedules(below, change) if changed is None else changed)
    return replace(node, children=children)


def keyed_by_ints(node: Node, own: object) -> Node:
    """A state whose decimal text keys are ints again where the object's own state has ints.

    DCP makes such text keys of ints.
    """
    if not isinstance(node, Branch) or node.form != "dict" or not isinstance(own, Mapping):
        return node
    texts = all(isinstance(key, str) and key.isdecimal() for key in node.keys)
    ints = bool(own) and all(type(key) is int for key in own)
    keys: Sequence[PathKey] = [int(str(key)) for key in node.keys] if texts and ints else node.keys
    if len(set(keys)) < len(keys):
        return node
    children = [
        keyed_by_ints(below, own.get(key)) for key, below in zip(keys, node.children, strict=True)
    ]
    return replace(node, keys=keys, children=children)


def _state_and(
    node: Branch, groups: Sequence[Group], known: set[str]
) -> tuple[Mapping[PathKey, Node], tuple[Group, ...], Mapping[PathKey, Node]]:
    """The state by parameter, the groups, and the other entries.

    DCP leaves the state out where it is empty.
    """
    return (
        dict(_items(child(node, _STATE))),
        tuple(groups),
        {key: below for key, below in _items(node) if key not in known},
    )


def _is_dict(node: Node | None) -> bool:
    return isinstance(node, Branch) and node.form == "dict"


def _items(node: Node | None) -> list[tuple[PathKey, Node]]:
    return list(zip(node.keys, node.children, strict=True)) if isinstance(node, Branch) else []


def group_name(members: Sequence[str | int], number: int) -> str:
    """The name of a group: the name of its first parameter."""
    return str(members[0]) if members else f"(empty group {number})"


def value_of(node: Node | None) -> object:
    """A small leaf's value; None for anything else."""
    return decode_leaf(node) if isinstance(node, Small) else None


def _branch(name: str, parts: Mapping[PathKey, Node] | Mapping[str, Node]) -> Branch:
    return Branch(name, "dict", list(parts), list(parts.values()))


def _list(name: str, parts: Sequence[Node]) -> Branch:
    return Branch(name, "list", range(len(parts)), parts)


def _small(name: str, value: str | int) -> Small:
    return Small(name, leaves.encode(value, name))
