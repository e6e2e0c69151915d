"""Arrays that JAX can make here, by dtype and device; one element shows it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from shardckpt.errors import BudgetError, DtypeError, DtypeMismatchError, LeafError
from shardckpt.state.names import shown

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shardckpt.frameworks.jax_layout import JaxShards
    from shardckpt.layout.dtypes import DType


def check_placeable(name: str, dtype: DType, shards: JaxShards) -> None:
    """Check that JAX makes arrays of a dtype on the devices of some shards.

    Raises:
        DtypeError: JAX has no such dtype, or would silently replace it with a smaller one.
        LeafError, BudgetError: as for `probe`.
    """
    x64 = bool(jax.config.jax_enable_x64)
    device = next(iter(shards.devices), None)
    key = dtype, x64, device
    if key not in _made:
        _made[key] = _made_of(dtype, device, shown(name))
    made = _made[key]
    if made == dtype.name:
        return
    if made is not None and not x64:
        raise DtypeError(
            f"{shown(name)}: JAX would convert {dtype} to {made} silently; call "
            f"jax.config.update('jax_enable_x64', True), or restore into a {made} leaf with "
            "cast=True."
        )
    raise DtypeError(
        f"{shown(name)}: JAX has no arrays of {dtype} on this platform; restore it as another "
        "dtype, or as a numpy array."
    )


_made: dict[tuple[DType, bool, Any], str | None] = {}
"""JAX's dtype for elements of a dtype, with 64 bits enabled or not, on a device. An answer that may
change, such as a full device, is not kept."""


def _made_of(dtype: DType, device: Any, what: str) -> str | None:
    """JAX's dtype for elements of a dtype; None if JAX has none."""
    try:
        return str(probe(dtype.numpy, device, what).dtype)
    except (TypeError, ValueError):
        return None


def probe(dtype: np.dtype[Any], device: Any, what: str) -> Any:
    """An array of one element.

    Raises:
        LeafError: a function is being traced, or JAX refuses transfers, for a reason that may pass.
        BudgetError: the device is full.
        ValueError: the platform has no such arrays.
    """
    try:
        array = jax.device_put(np.zeros((), dtype), device)
    except jax.errors.JaxRuntimeError as e:
        reason = str(e).partition("\n")[0]
        if reason.startswith("RESOURCE_EXHAUSTED"):
            raise BudgetError(
                f"{what} cannot be restored: the device has no memory left ({reason}); free some "
                "first."
            ) from e
        if reason.startswith(("UNIMPLEMENTED", "INVALID_ARGUMENT")) and "isallowed" not in reason:
            raise ValueError(reason) from e
        raise LeafError(
            f"{what} cannot be restored, because JAX makes no array here ({reason}); restore "
            "outside of transfer guards, or numpy arrays."
        ) from e
    if isinstance(array, jax.core.Tracer):
        raise LeafError(
            f"{what} cannot be restored while a function is traced, as in jax.jit or "
            "jax.eval_shape; call shardckpt.restore outside of it, and pass what jax.eval_shape "
            "returns as `like`."
        )
    return array


def array_of(elements: NDArray[Any], what: str, instead: str, device: Any = None) -> Any:
    """A `jax.Array` of the elements, on a device or on JAX's default device.

    Args:
        elements: the elements; they may have 64 bits each.
        what: the array, for messages.
        instead: what the user may do to restore no such array, for messages.
        device: the device.

    Raises:
        DtypeMismatchError: JAX would silently replace the dtype with a smaller one.
    """
    made = jax.dtypes.canonicalize_dtype(elements.dtype)
    if made != elements.dtype:
        raise DtypeMismatchError(
            f"{what} is an array of {elements.dtype}, and JAX makes it {made} here; call "
            f'jax.config.update("jax_enable_x64", True) first, or {instead}.'
        )
    return jax.device_put(elements, device)
