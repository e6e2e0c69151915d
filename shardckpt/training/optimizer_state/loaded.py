"""State that an optimizer has loaded, given the values as they were stored.

`load_state_dict` converts state to the dtype of its parameter, and its class may unpack or drop
parts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves

from shardckpt.errors import NamesMismatchError
from shardckpt.state.names import shown
from shardckpt.text import few

if TYPE_CHECKING:
    from collections.abc import Mapping


def put_back_as_stored(
    optimizer: torch.optim.Optimizer,
    key: str,
    parameters: Mapping[str, Any],
    state: Mapping[Any, Any],
) -> None:
    """Undo the conversions of `load_state_dict`, also in containers inside of a parameter's state.

    A class may unpack a key: bitsandbytes stores its quantized moments in a dict and keeps its
    entries beside the others.

    Raises:
        NamesMismatchError: the optimizer's class has not loaded a part of the state: it has
            neither the key nor the values.
    """
    lost = []
    for number, (parameter_name, parameter) in enumerate(parameters.items()):
        loaded = optimizer.state[parameter] if number in state else {}
        part = state.get(number, {})
        unpacked = (
            tree_leaves([value for name, value in loaded.items() if name not in part])
            if part.keys() - loaded
            else []
        )
        for name, value in part.items():
            if name in loaded:
                loaded[name] = _as_stored_value(value, loaded[name], parameter.device)
            elif all(any(_same(item, other) for other in unpacked) for item in tree_leaves(value)):
                loaded |= (
                    _as_stored_value(value, loaded, parameter.device)
                    if isinstance(value, dict)
                    else {}
                )
            else:
                lost.append(f"{parameter_name}/{name}")
    if lost:
        raise NamesMismatchError(
            f"{shown(key)}: load_state_dict() of {type(optimizer).__qualname__} has "
            f"not loaded {few(lost)}; change that, leave the names out with only=, or pass "
            "strict=False to go on without them."
        )


def _same(value: Any, loaded: Any) -> bool:
    """Whether an optimizer has a value, even in another dtype or on another device."""
    if not isinstance(value, torch.Tensor) or not isinstance(loaded, torch.Tensor):
        return type(value) is type(loaded) and bool(value == loaded)
    one, other = (getattr(tensor, "_local_tensor", tensor) for tensor in (value, loaded))
    if one.shape != other.shape:
        return False
    one = one.to(other.device, other.dtype)
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


def _as_stored_value(value: Any, loaded: Any, device: torch.device) -> Any:
    """A value as it was stored, on the device that it was loaded to.

    Torch converts whatever it finds to the parameter's dtype.
    """
    if isinstance(value, torch.Tensor) and isinstance(loaded, torch.Tensor):
        return loaded if loaded.dtype == value.dtype else value.to(device)
    if isinstance(value, str):
        return value  # torch takes it for a container
    if isinstance(value, dict) and isinstance(loaded, dict):
        return loaded | {
            key: _as_stored_value(item, loaded[key], device)
            for key, item in value.items()
            if key in loaded
        }
    if (
        isinstance(value, list | tuple)
        and type(loaded) is type(value)
        and len(loaded) == len(value)
    ):
        return type(value)(
            _as_stored_value(item, other, device) for item, other in zip(value, loaded, strict=True)
        )
    return loaded
