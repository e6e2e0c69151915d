"""The rules of a model family for chosen kinds of parallelism, such as `llama/fsdp+tp`.

1. A *role* names the purpose of a mesh axis, and thereby the logical axes (`families`) that it
   cuts:

       fsdp   embed                               axis "fsdp", else "data" or "dp"
       tp     heads, kv_heads, mlp, vocab         axis "tensor", "model", "tp" or "mp"
       ep     expert                              axis "expert" or "ep"

   T5X, MaxText and torchprime use the same layouts for these models. Where transformers' plans for
   tensor parallelism cover a tensor, tp agrees with them: `colwise` cuts the first dimension of a
   Linear's weight, `rowwise` the second.
2. The mesh determines the axis of each role: the first axis in the list above that it has.
   `llama/fsdp=replica+tp=y` names the axes. Without roles (`llama`), every role applies whose own
   axis name the mesh has; "data" then holds replicas.
3. If one axis has two roles, it cuts the first dimension of a tensor that either role would cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from shardckpt.errors import OptionError, ShardingError
from shardckpt.layout.partition_spec import PartitionSpec
from shardckpt.reshard.rules.families import FAMILIES
from shardckpt.reshard.rules.rule import Rule, Units
from shardckpt.state.names import did_you_mean
from shardckpt.text import shorten

if TYPE_CHECKING:
    from shardckpt.layout.mesh import Mesh

_CUTS = {
    "embed": "fsdp",
    "heads": "tp",
    "kv_heads": "tp",
    "mlp": "tp",
    "vocab": "tp",
    "expert": "ep",
}
"""Logical axis → the role that cuts it. Packed dimensions are cut like heads and mlp."""
_AXES = {"fsdp": ("fsdp",), "tp": ("tensor", "model", "tp", "mp"), "ep": ("expert", "ep")}
"""Role → the names of its axis."""
_MORE_AXES = {"fsdp": ("data", "dp")}
"""Role → further names of its axis that count only if the role is requested explicitly."""
_HEADS = {"heads": "query heads", "kv_heads": "key-value heads"}


@dataclass(frozen=True, slots=True)
class Heads:
    """Numbers of attention heads of a model, for notices about cuts through a head."""

    query: int
    key_value: int

    def units(self, dim: int, logical: str) -> Units | None:
        """The units of a dimension; None: it has none."""
        what = _HEADS.get(logical)
        return (
            None
            if what is None
            else Units(dim, self.query if logical == "heads" else self.key_value, what)
        )


@dataclass(frozen=True, slots=True)
class Preset:
    """The rules of one family for some roles.

    Raises:
        OptionError: there is no such family or role.

    >>> preset = Preset.parse("llama/fsdp+tp=y")
    >>> preset.family, preset.roles, str(preset)
    ('llama', (('fsdp', ''), ('tp', 'y')), 'llama/fsdp+tp=y')
    """

    family: str
    """A key of `FAMILIES`."""
    roles: tuple[tuple[str, str], ...] = ()
    """Role and its axis, which is empty if the mesh determines it; no roles: every role for which
    the mesh has an axis."""
    heads: Heads | None = None
    """Numbers of attention heads of the model, if known."""

    def __post_init__(self) -> None:
        """Refuse unknown families and roles."""
        if self.family not in FAMILIES:
            raise OptionError(
                f"preset {shorten(str(self))}: there is no family "
                f"{shorten(self.family)}{did_you_mean(str(self.family), FAMILIES)}; there are "
                f"{', '.join(FAMILIES)}, each as it is or followed by /fsdp, /tp, /ep or several "
                "of them (/fsdp+tp)."
            )
        names = [role for role, _ in self.roles]
        for role in names:
            if role not in _AXES or names.count(role) > 1:
                problem = "appears twice" if role in _AXES else "is unknown"
                raise OptionError(
                    f"preset {shorten(str(self))}: the role {shorten(role)} {problem}; the roles "
                    f"are {', '.join(_AXES)}, joined by +, and each may name its axis, as in "
                    f"{self.family}/fsdp=data+tp."
                )

    @classmethod
    def parse(cls, text: str, heads: Heads | None = None) -> Preset:
        """Parse the text form of a preset.

        Raises:
            OptionError: the text is not a preset.
        """
        if not isinstance(text, str):
            raise OptionError(f"preset {shorten(text)}: give text such as 'llama/fsdp+tp'.")
        family, slash, roles = text.strip().partition("/")
        pairs = [role.partition("=") for role in roles.split("+")] if slash else []
        return cls(family, tuple((role.strip(), axis.strip()) for role, _, axis in pairs), heads)

    def __str__(self) -> str:
        """The preset as text."""
        roles = "+".join(f"{role}={axis}" if axis else role for role, axis in self.roles)
        return f"{self.family}/{roles}" if roles else str(self.family)

    @property
    def origin(self) -> str:
        """The preset as messages name it."""
        return f"preset {self}"

    def rules(self, mesh: Mesh | None) -> tuple[Rule, ...]:
        """The rules over a mesh.

        Raises:
            ShardingError: there is no mesh, or it has no axis for a role.
        """
        if mesh is None:
            raise ShardingError(f"{self.origin} needs a mesh; give one, as in data=2,model=4.")
        return _rules(self, mesh.axis_names)

    def axes(self, names: tuple[str, ...]) -> dict[str, str]:
        """Role → axis, in a mesh whose axes have these names.

        Raises:
            ShardingError: the mesh has no axis for a role.
        """
        requested = self.roles or tuple((role, "") for role in _AXES)
        chosen, no_axes = {}, "give a mesh with axes"
        for role, given in requested:
            options = (
                (given,)
                if given
                else _AXES[role] + (_MORE_AXES.get(role, ()) if self.roles else ())
            )
            axis = next((option for option in options if option in names), None)
            if axis is None and self.roles:
                meant = did_you_mean(given, names) if given else ""
                advice = f"name the axis, as in {role}={names[0]}" if names else no_axes
                raise ShardingError(
                    f"{self.origin}: the role {role} needs an axis "
                    f"{' or '.join(map(repr, options))}, but the mesh has "
                    f"{', '.join(names) or 'none'}{meant}; {advice}, or "
                    "leave the role out."
                )
            if axis is not None:
                chosen[role] = axis
        if not chosen:
            advice = f"name the axis, as in {self.family}/fsdp={names[0]}" if names else no_axes
            raise ShardingError(
                f"{self.origin}: no axis of the mesh ({', '.join(names) or 'none'}) is named "
                f"after a role; {advice}, or write '**=replicated'."
            )
        return chosen


@lru_cache(maxsize=64)
def _rules(preset: Preset, names: tuple[str, ...]) -> tuple[Rule, ...]:
    axes = preset.axes(names)
    lines = [
        line.split() for table in FAMILIES[preset.family] for line in table.split("\n") if line
    ]
    return tuple(_rule(preset, pattern, logical, axes) for pattern, *logical in lines)


def _rule(preset: Preset, pattern: str, logical: list[str], axes: dict[str, str]) -> Rule:
    parts: list[str | None] = []
    for name in logical:
        axis = axes.get("tp" if "+" in name else _CUTS.get(name, ""))
        parts.append(None if axis in parts else axis)
    units = (
        None
        if preset.heads is None
        else next(filter(None, map(preset.heads.units, range(len(logical)), logical)), None)
    )
    packed = next(
        (
            (dim, name.replace("+", " and ", 1).replace("+", " and "))
            for dim, name in enumerate(logical)
            if "+" in name
        ),
        None,
    )
    spec = PartitionSpec(*parts) if any(parts) else PartitionSpec()
    return Rule(
        pattern,
        spec,
        preset.origin,
        len(logical),
        may_match_nothing=True,
        packed=packed,
        units=units,
    )
