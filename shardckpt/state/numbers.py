"""Conversions between Python numbers, numpy scalars and arrays without dimensions."""

from __future__ import annotations

import math
import warnings
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from shardckpt.errors import DtypeMismatchError
from shardckpt.state.names import shown
from shardckpt.text import shorten

if TYPE_CHECKING:
    from numpy.typing import NDArray


def is_number(value: object) -> bool:
    """Whether a value is a Python number or a numpy scalar of numbers; bools count."""
    return type(value) in (bool, int, float, complex) or (
        isinstance(value, np.generic)
        and value.dtype.kind in "biufcVW"
        and not isinstance(value, np.void)
    )


def number_like(array: NDArray[Any], like: object) -> object:
    """The number in an array without dimensions, in the form of another number.

    It takes that form only where the form can represent its value.

    >>> number_like(np.array(3, np.int32), 0), number_like(np.array(0.5, np.float32), 0)
    (3, 0.5)
    """
    number = array[()] if isinstance(like, np.generic) else array.item()
    form: Any = type(like)
    with suppress(TypeError, ValueError, OverflowError), np.errstate(all="ignore"):
        same = form(number)
        if _is_same(np.asarray(same).item(), array.item()):
            return same
    return number


def _is_same(one: Any, other: Any) -> bool:
    """Whether two Python numbers are equal, or both are a NaN and the second is real.

    Python compares numbers of two types exactly; numpy rounds an integer to compare it.
    """
    nan = one != one and other != other  # noqa: PLR0124 - only a NaN is not itself
    return bool(one == other or (nan and not np.iscomplexobj(other)))


def in_form_of(like: object, stored: object) -> object:
    """The stored value, in the form of `like` where both are numbers.

    It is a Python number if `like` is a Python number, and a numpy scalar if `like` is a numpy
    scalar.
    """
    if (
        isinstance(like, np.generic) == isinstance(stored, np.generic)
        or not is_number(like)
        or not is_number(stored)
    ):
        return stored
    return number_like(np.asarray(stored), like)


def array_of_number(number: Any, dtype: np.dtype[Any], where: str, *, cast: bool) -> NDArray[Any]:
    """An array without dimensions of a number; floats are rounded to the dtype.

    With `cast`, other numbers are converted, too, as `numpy.astype` does.

    Raises:
        DtypeMismatchError: the dtype does not have this number; names the leaf.
    """
    natural = np.asarray(number)
    if natural.dtype == dtype:
        return natural
    cast = cast and (dtype.kind in "cW" or natural.dtype.kind not in "cW")
    with (
        suppress(TypeError, ValueError, OverflowError),
        np.errstate(all="ignore"),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        array: NDArray[Any] = np.asarray(natural.astype(dtype))
        if cast or _is_rounded(natural.item(), array.item()):
            return array
    raise DtypeMismatchError(
        f"{shown(where)} is the number {shorten(number)} in the checkpoint, which {dtype.name} in "
        "`like` does not have; pass a tensor of another dtype there, a Python number, or cast=True "
        "to convert real numbers."
    )


def _is_rounded(number: complex, converted: complex) -> bool:
    """Whether a converted number is the same, or a finite float rounded to another."""
    if isinstance(number, float) and isinstance(converted, float) and number != converted:
        finite = math.isfinite(number) and math.isfinite(converted)
        return finite or (math.isnan(number) and math.isnan(converted))
    return number == converted
