"""The dtype of each tensor in a new checkpoint or an export, with a summary by subtree.

1. The first pattern that matches a tensor's name decides. The pattern "" stands for all tensors
   that no other pattern matches; a dtype alone is short for `{"": dtype}`.
2. The pattern "" converts floating-point tensors only. It skips tensors without dimensions (step
   counts) and optimizer state: rounding those changes the training. It skips the parts of quantized
   tensors (scales) too.
3. Any other pattern converts every tensor that it matches. It converts integers and tensors without
   dimensions only if the pattern's last part, after the last "/" or ".", has no wildcard:
   `optimizer/**` leaves each `step` unchanged, and `optimizer/**/step` converts it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Protocol

from shardckpt.errors import DtypeError, DtypeMismatchError, OptionError
from shardckpt.layout.dtypes import DTYPES, by_name, castable
from shardckpt.state.names import shown
from shardckpt.state.select import matches
from shardckpt.text import Message, named, shorten

if TYPE_CHECKING:
    from shardckpt.layout.dtypes import DType

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
"""Common short name of a dtype → its name."""

DtypeOption = str | Mapping[str, str] | None
"""Name of a dtype, or name pattern → dtype; None: tensors keep their dtypes."""

_ALL = ""
"""The pattern for all tensors that no other pattern matches."""
_LITERAL_END = re.compile(r"(?:.*[/.])?[^*?\[\]/.]+", re.DOTALL)
"""Patterns whose last part has no wildcard."""
_DTYPE = named("dtype", ...)
_FLOATING = ("float", "bfloat")
_INTEGER = ("int", "uint", "bool")


class _Typed(Protocol):
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> DType: ...


@dataclass(frozen=True, slots=True)
class ConvertedSubtree:
    """Number of tensors in one subtree that a conversion changes, and number that it leaves."""

    subtree: str
    """Key of the subtree; "" for tensors at the top."""
    converted: Mapping[str, int]
    """New dtype → number of tensors that are converted to it."""
    left: Mapping[str, int]
    """Reason for keeping the dtype → number of tensors."""

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
    """Tensor name → its new dtype."""
    subtrees: tuple[ConvertedSubtree, ...]
    """Converted and unconverted tensors by subtree, in the state's order; empty if nothing is to be
    converted."""


def check_dtypes(requested: object) -> None:
    """Check that a value is a `DtypeOption`.

    Raises:
        OptionError: it is not, it names an unknown dtype, or its dtype for all tensors is not a
            floating-point dtype.
    """
    if requested is not None and not isinstance(requested, str | Mapping):
        raise OptionError(
            Message(
                named("dtype", requested), ": give a dtype's name, or a dict of pattern → name."
            )
        )
    for pattern, dtype in _rules(requested).items():
        if pattern == _ALL and not _is_floating(dtype):
            advice = (
                ": a dtype without a pattern must be a floating-point dtype; give a pattern for "
                "the tensors to convert, as in "
            )
            example = named("dtype", {"**/position_ids": dtype.name})
            raise OptionError(Message(named("dtype", dtype.name), advice, example, "."))


def plan_dtypes(
    tensors: Mapping[str, _Typed],
    requested: DtypeOption,
    meaning: Mapping[str, str],
    unrounded: Mapping[str, str],
) -> DtypePlan:
    """Decide the dtype of each tensor.

    Args:
        tensors: the tensors by name.
        requested: the requested dtypes.
        meaning: meaning of the elements, by name, for tensors that therefore cannot be converted.
        unrounded: name → reason for which the pattern "" leaves the tensor.

    Raises:
        OptionError: a pattern matches nothing, or a dtype is unknown.
        DtypeMismatchError: a tensor cannot be converted; the message names it.
    """
    rules = _rules(requested)
    for pattern in rules:
        if pattern != _ALL and not any(matches(pattern, name) for name in tensors):
            raise OptionError(
                Message(
                    _DTYPE,
                    f": {pattern!r} matches no tensor; patterns are matched with whole names.",
                )
            )
    dtypes, converted, left = {}, dict[str, Counter[str]](), dict[str, Counter[str]]()
    for name, tensor in tensors.items():
        pattern = next((p for p in rules if p != _ALL and matches(p, name)), _ALL)
        new = rules.get(pattern, tensor.dtype)
        reason = (
            "matched by no pattern"
            if pattern not in rules
            else _stays(pattern, name, tensor, new, meaning, unrounded)
        )
        dtypes[name] = tensor.dtype if reason else new
        if not reason and (name in meaning or not castable(tensor.dtype, new)):
            has = (
                f"dtype {tensor.dtype}"
                if name not in meaning
                else f"dtype {tensor.dtype} and means {meaning[name]}"
            )
            advice = (
                f"{shown(name)} has {has}, which cannot be converted to {new}; leave it out of "
            )
            raise DtypeMismatchError(Message(advice, named("dtype", pattern), "."))
        subtree = _subtree(name)
        converted.setdefault(subtree, Counter()).update([] if reason else [new.name])
        left.setdefault(subtree, Counter()).update([reason] if reason else [])
    return DtypePlan(
        dtypes,
        tuple(ConvertedSubtree(key, converted[key], left[key]) for key in converted)
        if rules
        else (),
    )


def _stays(
    pattern: str,
    name: str,
    tensor: _Typed,
    new: DType,
    meaning: Mapping[str, str],
    unrounded: Mapping[str, str],
) -> str | None:
    """The reason why a tensor that a pattern matches keeps its dtype; None: it is converted."""
    integer, named = tensor.dtype.name.startswith(_INTEGER), bool(_LITERAL_END.fullmatch(pattern))
    reason = None
    if tensor.dtype == new:
        reason = f"{new} already"
    elif pattern == _ALL and (not _is_floating(tensor.dtype) or name in meaning):
        reason = "not floating-point"
    elif pattern == _ALL and name in unrounded:
        reason = unrounded[name]
    elif integer and not named:
        reason = "not floating-point"
    elif not tensor.shape and not named:
        reason = "without dimensions"
    return reason


def _subtree(name: str) -> str:
    """The first key of a tensor's path; dots may join keys."""
    first, border, _ = name.partition("/")
    head, dot, _ = first.partition(".")
    return first if border and not dot else head if dot else ""


def _rules(requested: DtypeOption) -> dict[str, DType]:
    """Pattern → dtype."""
    named = {_ALL: requested} if isinstance(requested, str) else requested or {}
    return {pattern: _dtype_of(name) for pattern, name in named.items()}


def _dtype_of(name: object) -> DType:
    try:
        return by_name(SHORT_NAMES.get(name, name) if isinstance(name, str) else repr(name))
    except DtypeError as e:
        if not isinstance(name, str) or "unknown" in str(e):
            raise OptionError(Message(_DTYPE, f": {e}")) from e
    close = get_close_matches(name, [*DTYPES, *SHORT_NAMES], n=3)
    if not close and any(character in name for character in "*/"):
        example = shorten(f"{name}=bfloat16")
        raise OptionError(
            Message(
                _DTYPE,
                f": unknown dtype {shorten(name)}; after a pattern comes =DTYPE, as in {example}.",
            )
        )
    advice = f"did you mean {' or '.join(close)}?" if close else f"known are {', '.join(DTYPES)}."
    raise OptionError(Message(_DTYPE, f": unknown dtype {shorten(name)}; {advice}"))


def _is_floating(dtype: DType) -> bool:
    return dtype.name.startswith(_FLOATING)
