"""One rule: a pattern over tensor names, and the spec that cuts the tensors.

Its text form is `pattern=spec`: `**/layers.*.w1.weight=(None,model)`. A pattern may contain "=" as
well; the spec is the longest suffix of the text that is a spec.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shardckpt.errors import OptionError, ShardingError
from shardckpt.layout.partition_spec import PartitionSpec
from shardckpt.reshard.rules.spec_text import format_spec, parse_spec
from shardckpt.state.glob import compile_glob
from shardckpt.state.names import did_you_mean
from shardckpt.text import clip, shorten

if TYPE_CHECKING:
    from shardckpt.layout.mesh import Mesh


@dataclass(frozen=True, slots=True)
class Units:
    """Units of a dimension that should not be divided between parts, such as attention heads."""

    dim: int
    """The tensor dimension."""
    count: int
    """Number of units in the dimension."""
    what: str
    """Name of the units, for messages: "key-value heads"."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A pattern over tensor names, and the spec that cuts the tensors.

    Raises:
        OptionError: the pattern is invalid.

    >>> rule = Rule.parse("**/layers.*.w1=(None,model)")
    >>> rule.pattern, rule.spec, str(rule)
    ('**/layers.*.w1', PartitionSpec(None, 'model'), '**/layers.*.w1=(None,model)')
    """

    pattern: str
    """Pattern of tensor names; see `pattern`."""
    spec: PartitionSpec
    """Mesh axes that cut each dimension."""
    origin: str = field(default="", compare=False)
    """Place of the rule's text, for messages: "rules.toml, rule 3"."""
    rank: int | None = None
    """The number of dimensions of tensors to which the rule applies; None: any number."""
    may_match_nothing: bool = False
    """Whether the rule may apply to no tensor: the rules of a model family cover several naming
    schemes."""
    packed: tuple[int, str] | None = None
    """A dimension, and the name of the parts concatenated along it, such as "gate and up" in a
    fused projection."""
    units: Units | None = None
    """The units of one of the dimensions."""

    def __post_init__(self) -> None:
        """Refuse invalid patterns and specs."""
        pattern: object = self.pattern
        spec: object = self.spec
        if not isinstance(pattern, str) or not pattern:
            raise OptionError(
                f"{self._where}{shorten(pattern)} is not a pattern of names; give text such as "
                "'**/layers.*.w1'."
            )
        if not isinstance(spec, PartitionSpec):
            raise OptionError(
                f"{self._where}{pattern!r} has a {type(spec).__name__}; give a "
                "shardckpt.PartitionSpec."
            )
        try:
            compile_glob(self.pattern)
        except OptionError as error:
            raise OptionError(f"{self._where}{error}") from error

    @classmethod
    def parse(cls, text: str, origin: str = "") -> Rule:
        """Parse the text form of a rule.

        Raises:
            OptionError: the text is not a rule; the message names `origin`.
        """
        if not isinstance(text, str) or "=" not in text:
            raise OptionError(
                f"{origin or 'rule'}: {shorten(text)} is not a rule; write pattern=spec, such as "
                "'**/layers.*.w1=(None,model)'."
            )
        at = text.find("=")
        first = (
            text.rfind("=")
            if text.rstrip().endswith("replicated")
            else text.rfind("=(")
            if "=(" in text
            else at
        )
        mistake: OptionError | None = None
        while at >= 0:
            try:
                spec = parse_spec(text[at + 1 :])
            except OptionError as error:
                if at == first or mistake is None:
                    mistake = error
            else:
                return cls(text[:at].strip(), spec, origin)
            at = text.find("=", at + 1)
        raise OptionError(f"{_title(text, origin)}: {mistake}") from mistake

    def __str__(self) -> str:
        """The rule as text."""
        return f"{self.pattern}={format_spec(self.spec)}"

    @property
    def _where(self) -> str:
        return f"{self.origin}: " if self.origin else ""

    @property
    def title(self) -> str:
        """The rule in messages: its origin and its text."""
        return _title(str(self), self.origin)

    def check_axes(self, mesh: Mesh | None) -> None:
        """Raise ShardingError unless the mesh has all axes of the spec, each once."""
        for axis in (axis for axes in self.spec.axes for axis in axes):
            if mesh is None:
                raise ShardingError(
                    f"{self.title} cuts over the axis {axis!r} and needs a mesh; give one, as in "
                    "data=2,model=4."
                )
            if axis not in mesh.axis_names and not (isinstance(axis, int) and axis < mesh.ndim):
                meant = did_you_mean(axis, mesh.axis_names) if isinstance(axis, str) else ""
                raise ShardingError(
                    f"{self.title}: the mesh has no axis {axis!r}{meant}; its axes are "
                    f"{', '.join(mesh.axis_names) or 'none'}."
                )
        try:
            _ = self.spec if mesh is None else self.spec.named(mesh)
        except ShardingError as error:  # an index and a name of the same axis
            raise ShardingError(f"{self.title}: {error}") from error


def _title(text: str, origin: str) -> str:
    return f"{origin} ({clip(text)!r})" if origin else f"rule {clip(text)!r}"
