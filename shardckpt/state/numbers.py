"""Conversions between Python numbers, numpy scalars and arrays without dimensions."""

from __future__ import annotations

import warnings
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from shardckpt.errors import DtypeMismatchError
from shardckpt.state.names import shown

if TYPE_CHECKING:
    from numpy.typing import NDArray


def is_number(value: object) -> bool:
    """Whether a value is a Python number or a numpy scalar of numbers; bools count."""
    return type(value) in (bool, int, float, complex) or (
        isinstance(value, np.generic)
        and value.dtype.kind in "biufcV"
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
        if same == number or same != same:  # noqa: PLR0124 - a NaN of either form
            return same
    return number


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


def array_of_number(number: Any, dtype: np.dtype[Any], where: str) -> NDArray[Any]:
    """An array without dimensions of a number; floats are rounded to the dtype.

    Raises:
        DtypeMismatchError: the dtype does not have this number; names the leaf.
    """
    exact = dtype.kind in "biu" or isinstance(number, complex | np.complexfloating)
    with (
        suppress(TypeError, ValueError, OverflowError),
        np.errstate(all="ignore"),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        array: NDArray[Any] = np.asarray(np.asarray(number).astype(dtype))
        if not exact or array.item() == number:
            return array
    raise DtypeMismatchError(
        f"{shown(where)} is the number {number!r} in the checkpoint, which {dtype.name} in `like` "
        "does not have; pass a tensor of another dtype there, or a Python number."
    )
