"""Which dtype will each tensor have? One for all floating-point tensors, or one per pattern of names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from shardckpt.dtypes import by_name, castable
from shardckpt.errors import DtypeError, DtypeMismatchError, OptionError
from shardckpt.excerpt import excerpt
from shardckpt.names import matches, shown

if TYPE_CHECKING:
    from shardckpt.dtypes import DType

__all__ = ["SHORT_NAMES", "check_dtypes", "converted"]

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
"""Name of a dtype, for all floating-point tensors, or name pattern → dtype, of which the first that matches counts; None: as they are."""


def check_dtypes(wanted: object) -> None:
    """Refuse what is no `Wanted`.

    Raises:
        OptionError: it is none, or names a dtype that there is not.
    """
    if wanted is not None and not isinstance(wanted, str | Mapping):
        raise OptionError(f"dtype={excerpt(wanted)}: give a dtype's name, or a dict of pattern → name.")
    for name in [wanted] if isinstance(wanted, str) else (wanted or {}).values():
        try:
            _named(name)
        except DtypeError as e:
            raise OptionError(f"dtype=…: {e}") from e


def converted(tensors: Mapping[str, DType], wanted: Wanted, meaning: Mapping[str, str]) -> dict[str, DType]:
    """By name the dtype that each tensor will have.

    Args:
        tensors: the dtype that each has.
        wanted: what is asked for.
        meaning: by name, what the elements of some tensors mean; those cannot be converted.

    Raises:
        OptionError: a pattern that matches nothing.
        DtypeMismatchError: a tensor that cannot be converted, by name.
    """
    if isinstance(wanted, str):
        dtype = _named(wanted)
        return {name: dtype if _is_floating(old) and _is_floating(dtype) else old for name, old in tensors.items()}
    rules = {pattern: _named(name) for pattern, name in (wanted or {}).items()}
    for pattern in rules:
        if not any(matches(pattern, name) for name in tensors):
            raise OptionError(f"dtype=…: {pattern!r} matches no tensor; patterns are matched with whole names.")
    found = {}
    for name, old in tensors.items():
        first = next((p for p in rules if matches(p, name)), None)
        found[name] = new = old if first is None else rules[first]
        if new != old and (name in meaning or not castable(old, new)):
            has = f"dtype {old}" if name not in meaning else f"dtype {old} and means {meaning[name]}"
            raise DtypeMismatchError(f"{shown(name)} has {has}, which cannot be converted to {new}; leave it out of dtype={first!r}.")
    return found


def _named(name: str) -> DType:
    return by_name(SHORT_NAMES.get(name, name) if isinstance(name, str) else name)


def _is_floating(dtype: DType) -> bool:
    return dtype.name.startswith(("float", "bfloat"))
