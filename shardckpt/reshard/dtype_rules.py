"""The dtype that each tensor will have in a new checkpoint or in an export, and what becomes of each subtree.

1. The first pattern that matches a tensor's name decides. The pattern "" stands for all tensors that no other one matches; a dtype alone
   is short for `{"": dtype}`.
2. The pattern "" converts floating-point tensors only, and neither tensors without dimensions (counts of steps) nor state of an optimizer:
   rounding those changes a training.
3. Any other pattern converts what it matches, but integers and tensors without dimensions only where the pattern's last part, after the
   last "/" or ".", has no wildcard: `optimizer/**` leaves each `step` as it is, and `optimizer/**/step` converts it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Protocol

from shardckpt.errors import DtypeError, DtypeMismatchError, OptionError
from shardckpt.excerpt import excerpt
from shardckpt.layout.dtypes import DTYPES, by_name, castable
from shardckpt.state.names import matches, shown

if TYPE_CHECKING:
    from collections.abc import Container

    from shardckpt.layout.dtypes import DType

__all__ = ["SHORT_NAMES", "ConvertedSubtree", "DtypePlan", "check_dtypes", "plan_dtypes"]

SHORT_NAMES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "f16": "float16",
    "half": "float16",
    "fp32": "float32",
    "f32": "float32",
    "fp64": "float64",
    "f64": "float64",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}
"""What people write for a dtype, and its name."""

Wanted = str | Mapping[str, str] | None
"""Name of a dtype, or name pattern → dtype; None: tensors stay as they are."""

_ALL = ""
"""The pattern for all tensors that no other one matches."""
_LITERAL_END = re.compile(r"(?:.*[/.])?[^*?\[\]/.]+", re.DOTALL)
"""Patterns whose last part has no wildcard."""
_FLOATING = ("float", "bfloat")
_INTEGER = ("int", "uint", "bool")


class _Typed(Protocol):
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> DType: ...


@dataclass(frozen=True, slots=True)
class ConvertedSubtree:
    """The number of tensors in one subtree that a conversion changes, and of those that it leaves."""

    subtree: str
    """Its key; "" for tensors that lie at the top."""
    converted: Mapping[str, int]
    """New dtype → number of tensors that are converted to it."""
    left: Mapping[str, int]
    """Why tensors stay as they are → how many."""

    def __str__(self) -> str:
        """One line for people."""
        made = [f"{n:,} to {dtype}" for dtype, n in self.converted.items()]
        left = ", ".join(f"{n:,} {reason}" for reason, n in self.left.items())
        counts = [f"converted {', '.join(made)}"] if made else []
        counts += [f"left {sum(self.left.values()):,} ({left})"] if left else []
        return f"{self.subtree or 'at the top'}: {'; '.join(counts)}"

    def to_json(self) -> dict[str, object]:
        """JSON form."""
        return {"subtree": self.subtree, "converted": dict(self.converted), "left": dict(self.left)}


@dataclass(frozen=True, slots=True)
class DtypePlan:
    """The dtype of each tensor after conversion, and a summary by subtree."""

    dtypes: Mapping[str, DType]
    """By name, the dtype that each tensor will have."""
    subtrees: tuple[ConvertedSubtree, ...]
    """Converted and unconverted tensors by subtree, in the state's order; empty without a conversion."""


def check_dtypes(wanted: object) -> None:
    """Refuse what is no `Wanted`.

    Raises:
        OptionError: it is none, names an unknown dtype, or a dtype for all tensors that is not for floating-point numbers.
    """
    if wanted is not None and not isinstance(wanted, str | Mapping):
        raise OptionError(f"dtype={excerpt(wanted)}: give a dtype's name, or a dict of pattern → name.")
    for pattern, dtype in _rules(wanted).items():
        if pattern == _ALL and not _is_floating(dtype):
            raise OptionError(
                f"dtype={dtype.name!r}: a dtype alone converts floating-point tensors, to a floating-point dtype; give a pattern for the "
                f"tensors that are meant, as in dtype={{'**/position_ids': {dtype.name!r}}}."
            )


def plan_dtypes(tensors: Mapping[str, _Typed], wanted: Wanted, meaning: Mapping[str, str], optimizer: Container[str]) -> DtypePlan:
    """Decide the dtype of each tensor.

    Args:
        tensors: by name.
        wanted: what is asked for.
        meaning: by name, what the elements of some tensors mean; those cannot be converted.
        optimizer: the names of those that are state of an optimizer.

    Raises:
        OptionError: a pattern that matches nothing, or an unknown dtype.
        DtypeMismatchError: a tensor that cannot be converted, by name.
    """
    rules = _rules(wanted)
    for pattern in rules:
        if pattern != _ALL and not any(matches(pattern, name) for name in tensors):
            raise OptionError(f"dtype=…: {pattern!r} matches no tensor; patterns are matched with whole names.")
    dtypes, converted, left = {}, dict[str, Counter[str]](), dict[str, Counter[str]]()
    for name, tensor in tensors.items():
        pattern = next((p for p in rules if p != _ALL and matches(p, name)), _ALL)
        new = rules.get(pattern, tensor.dtype)
        reason = "matched by no pattern" if pattern not in rules else _stays(pattern, name, tensor, new, meaning, optimizer)
        dtypes[name] = tensor.dtype if reason else new
        if not reason and (name in meaning or not castable(tensor.dtype, new)):
            has = f"dtype {tensor.dtype}" if name not in meaning else f"dtype {tensor.dtype} and means {meaning[name]}"
            raise DtypeMismatchError(f"{shown(name)} has {has}, which cannot be converted to {new}; leave it out of dtype={pattern!r}.")
        subtree = _subtree(name)
        converted.setdefault(subtree, Counter()).update([] if reason else [new.name])
        left.setdefault(subtree, Counter()).update([reason] if reason else [])
    return DtypePlan(dtypes, tuple(ConvertedSubtree(key, converted[key], left[key]) for key in converted) if rules else ())


def _stays(pattern: str, name: str, tensor: _Typed, new: DType, meaning: Mapping[str, str], optimizer: Container[str]) -> str | None:
    """Why a tensor that a pattern matches stays as it is; None: it is converted."""
    integer, named = tensor.dtype.name.startswith(_INTEGER), bool(_LITERAL_END.fullmatch(pattern))
    reason = None
    if tensor.dtype == new:
        reason = f"{new} already"
    elif pattern == _ALL and (not _is_floating(tensor.dtype) or name in meaning):
        reason = "not floating-point"
    elif pattern == _ALL and name in optimizer:
        reason = "optimizer state"
    elif integer and not named:
        reason = "not floating-point"
    elif not tensor.shape and not named:
        reason = "without dimensions"
    return reason


def _subtree(name: str) -> str:
    """The first key on the way to a tensor; keys may be joined with dots."""
    first, border, _ = name.partition("/")
    head, dot, _ = first.partition(".")
    return first if border and not dot else head if dot else ""


def _rules(wanted: Wanted) -> dict[str, DType]:
    """Pattern → dtype."""
    named = {_ALL: wanted} if isinstance(wanted, str) else wanted or {}
    return {pattern: _named(name) for pattern, name in named.items()}


def _named(name: object) -> DType:
    try:
        return by_name(SHORT_NAMES.get(name, name) if isinstance(name, str) else name)  # type: ignore[arg-type]  # it looks for itself
    except DtypeError as e:
        if not isinstance(name, str) or "unknown" in str(e):
            raise OptionError(f"dtype=…: {e}") from e
    close = get_close_matches(name, [*DTYPES, *SHORT_NAMES], n=3)
    if not close and any(character in name for character in "*/"):
        raise OptionError(f"dtype=…: unknown dtype {excerpt(name)}; after a pattern comes =DTYPE, as in {excerpt(f'{name}=bfloat16')}.")
    advice = f"did you mean {' or '.join(close)}?" if close else f"known are {', '.join(DTYPES)}."
    raise OptionError(f"dtype=…: unknown dtype {excerpt(name)}; {advice}")


def _is_floating(dtype: DType) -> bool:
    return dtype.name.startswith(_FLOATING)
