"""Check of plain values, for libraries that pickle their checkpoints.

A plain value is restored exactly as it was.

`shardckpt.save` also takes containers that come back as plainer ones unless a `like` rebuilds them:
named tuples, deques, dataclasses. These libraries load without a `like`, so such values, which they
would have pickled, are refused here by name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from shardckpt import frameworks
from shardckpt.errors import LeafError
from shardckpt.state import leaves
from shardckpt.state.names import child_name, shown

if TYPE_CHECKING:
    from collections.abc import Sequence


def plain(value: Any, name: str, *, tensors: bool, dicts: Sequence[type] = (dict,)) -> Any:
    """The value, rebuilt of lists, tuples, dicts, small and registered leaves, and torch tensors.

    Args:
        value: any value.
        name: its name, for messages.
        tensors: whether tensors are allowed in it.
        dicts: classes of dict that may be replaced by `dict`.

    Raises:
        LeafError: any other value, by name.
    """
    kind = type(value)
    if kind in (list, tuple):
        return kind(
            plain(inner, child_name(name, str(i)), tensors=tensors, dicts=dicts)
            for i, inner in enumerate(value)
        )
    if kind in dicts:
        return {
            key: plain(inner, child_name(name, str(key)), tensors=tensors, dicts=dicts)
            for key, inner in value.items()
        }
    if isinstance(value, torch.Tensor):
        if tensors:
            return value
        raise LeafError(
            f"{shown(name)} is a tensor in a tuple or another plain value, where tensors are not "
            "found; use lists and dicts."
        )
    if frameworks.is_tensor(value):
        raise LeafError(
            f"{shown(name)}: a {kind.__module__}.{kind.__qualname__} would be restored as another "
            "type; make it a torch.Tensor."
        )
    if leaves.is_small(value) or leaves.leaf_type(value) is not None:
        return value
    raise LeafError(
        f"{shown(name)} is a {kind.__module__}.{kind.__qualname__}, which only a pickle could "
        "hold; store its parts (for example its state_dict()), or call shardckpt.register_leaf "
        "for its class."
    )
