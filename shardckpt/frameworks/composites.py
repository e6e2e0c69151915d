"""Torch tensors made of other tensors: `__tensor_flatten__` subclasses, and registered ones.

A DTensor of such a tensor is stored as DTensors of its parts, with the same placements. Each
sharded dimension of a part must be in a fixed ratio to that dimension of the tensor (packed or
block-wise data). A part without dimensions, and a one-dimensional part of a tensor that is not
sharded along its first dimension, gets one element or row for each shard. The stored context says
which shards these are, since the elements have no meaning for others.

The register entries of this module are for classes of other libraries, and do not import these.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from shardckpt.errors import LeafError, ShardingError, StructureMismatchError
from shardckpt.state.composites import (
    SHARDS,
    CompositeTensor,
    TensorType,
    plain_context,
    tensor_type,
    tensor_type_named,
)
from shardckpt.state.document import write
from shardckpt.state.flatten import flatten
from shardckpt.state.names import shown
from shardckpt.state.registered import call_registered
from shardckpt.state.unflatten import assemble
from shardckpt.text import shorten

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shardckpt.state.document import Composite
    from shardckpt.state.leaves import JSON

_EXCLUDED = ("torch.distributed.", "torch.nested.", "torch._subclasses.", "torch_xla.")
"""Modules whose subclasses are not composite, although they have `__tensor_flatten__`."""


def split(name: str, leaf: Any) -> CompositeTensor | None:
    """The parts of a torch tensor; None if it is not composite.

    Raises:
        LeafError: the context is not plain data, or an attribute is not a tensor.
        ShardingError: a part of a DTensor is not sharded as the tensor is.
    """
    local = getattr(leaf, "_local_tensor", None)
    if local is not None and type(leaf).__name__ == "DTensor":
        return (
            None
            if type(local) in (torch.Tensor, torch.nn.Parameter)
            else _split_sharded(name, leaf, local)
        )
    contents = _inner(name, leaf)
    if contents is None:
        return None
    kind, parts, context = contents

    def rebuild(values: Sequence[Any]) -> Any:
        if all(new is old for new, old in zip(values, parts.values(), strict=True)):
            return leaf
        return _as(
            leaf, kind.make(dict(zip(parts, values, strict=True)), context, tuple(leaf.shape))
        )

    return CompositeTensor(
        kind.name, tuple(leaf.shape), _document(plain_context(context, name), name), parts, rebuild
    )


def place(
    name: str, of: Composite, parts: Mapping[str, Any], beside: Any = None
) -> CompositeTensor:
    """A place for a stored composite tensor, where `like` has none.

    Args:
        name: its name.
        of: the stored description.
        parts: the places of its parts: meta tensors, or places of composite tensors.
        beside: a parameter whose state the tensor is; if it is a DTensor, so is the new one, with
            the same placements.

    Raises:
        StructureMismatchError: no class is registered under its name.
        ShardingError: a part cannot be sharded as the parameter is.
    """
    kind = tensor_type_named(of.type_name) or _library_type(of.type_name)
    if kind is None:
        raise StructureMismatchError(
            f"{shown(name)} is a composite tensor ({of.type_name}) in the checkpoint, and there "
            "is none to restore it into; make one there first (an optimizer does by a step), or "
            "call shardckpt.register_tensor for its class."
        )
    context: Any = assemble(of.context, {})
    if isinstance(context, dict) and SHARDS in context:
        raise ShardingError(
            f"{shown(name)}: a part of it has one element or row for each of {context[SHARDS]}; "
            "restore after one step of the optimizer."
        )
    local = getattr(beside, "_local_tensor", None)
    if local is None or tuple(beside.shape) != of.shape:

        def rebuild(values: Sequence[Any]) -> Any:
            return kind.make(dict(zip(parts, values, strict=True)), context, of.shape)

        return CompositeTensor(of.type_name, of.shape, write(of.context), parts, rebuild)
    own, shape = _with_shape(context, of.shape, tuple(local.shape)), tuple(local.shape)

    def rebuild_sharded(values: Sequence[Any]) -> Any:
        locals_ = {key: value._local_tensor for key, value in zip(parts, values, strict=True)}
        return _shard(kind.make(locals_, own, shape), beside, beside.placements, of.shape)

    sharded = {
        key: _place_part(name, key, part, beside, shared=key in kind.shared)
        for key, part in parts.items()
    }
    return CompositeTensor(of.type_name, of.shape, write(of.context), sharded, rebuild_sharded)


def _place_part(name: str, key: str, part: Any, beside: Any, *, shared: bool) -> Any:
    """A meta DTensor for a part of a stored tensor that is laid out as another DTensor is."""
    split_dims = _split_dims(beside)
    if shared or not split_dims:
        return _shard(part, beside, _replicate(beside), tuple(part.shape))
    own, shape = tuple(beside._local_tensor.shape), tuple(beside.shape)
    if part.dim() == 0 or (part.dim() < len(shape) and split_dims != {0}):
        raise ShardingError(
            f"{shown(name)}: {key} cannot be sharded as the parameter is; restore after one step "
            "of the optimizer."
        )
    local = list(part.shape)
    for dim in split_dims:
        if local[dim] * own[dim] % shape[dim]:
            raise ShardingError(
                f"{shown(name)}: {key} of shape {tuple(part.shape)} cannot be sharded as its "
                f"parameter of {shape} is."
            )
        local[dim] = local[dim] * own[dim] // shape[dim]
    return _shard(part.new_empty(local), beside, beside.placements, tuple(part.shape))


def _with_shape(
    context: Any, old: tuple[int, ...], new: tuple[int, ...], name: str = "shape"
) -> Any:
    """A plain context with the shape of a shard in the place of the complete tensor's, or back.

    Values with other names than a shape's stay: a block may be as large as a shard.
    """
    if isinstance(context, dict):
        return {key: _with_shape(value, old, new, str(key)) for key, value in context.items()}
    if not isinstance(context, tuple | list):
        return context
    is_shape = isinstance(context, torch.Size) or name.endswith("shape") or name == "size"
    if is_shape and tuple(context) == old:
        return type(context)(new)
    return type(context)(_with_shape(value, old, new, name) for value in context)


def _split_dims(leaf: Any) -> set[int]:
    from shardckpt.frameworks.dtensor_layout import SHARDED

    return {placement.dim for placement in leaf.placements if isinstance(placement, SHARDED)}


def _replicate(leaf: Any) -> list[Any]:
    from torch.distributed.tensor import Replicate

    return [Replicate()] * len(leaf.placements)


def _inner(name: str, tensor: Any) -> tuple[TensorType, dict[str, Any], Any] | None:
    """The class, the parts and the context of a tensor that is not sharded.

    None if it is not composite.
    """
    kind: Any = type(tensor)
    known = tensor_type(kind) or _library_type(f"{kind.__module__}.{kind.__qualname__}")
    if known is None:
        if (
            not hasattr(kind, "__tensor_flatten__")
            or kind.__module__.startswith(_EXCLUDED)
            or tensor.is_nested
        ):
            return None
        known = TensorType(
            kind, f"{kind.__module__}.{kind.__qualname__}", _flatten, _unflatten(kind)
        )
    parts, context = call_registered(known.split, tensor, name, "split function of", known.name)
    if not isinstance(parts, Mapping) or not all(isinstance(key, str) for key in parts):
        raise LeafError(
            f"{shown(name)}: the split function of {shorten(known.name)} returned "
            f"{shorten(parts)} as the parts; it returns a dict of tensors by name, and a context."
        )
    for key, part in parts.items():
        if not isinstance(part, torch.Tensor):
            raise LeafError(
                f"{shown(name)}: {key} of this {known.name} is a {type(part).__qualname__}; its "
                "parts are tensors."
            )
    return known, dict(parts), context


def _document(context: Any, where: str) -> JSON:
    """The document of a context."""
    return flatten(context, lambda _value: False, root=where).tree


def _flatten(tensor: Any) -> tuple[dict[str, Any], Any]:
    keys, context = tensor.__tensor_flatten__()
    return {key: getattr(tensor, key) for key in keys}, context


def _unflatten(kind: Any) -> Callable[[Mapping[str, Any], Any, tuple[int, ...]], Any]:
    def make(parts: Mapping[str, Any], context: Any, shape: tuple[int, ...]) -> Any:
        return kind.__tensor_unflatten__(
            dict(parts), context, torch.Size(shape), torch.empty(shape, device="meta").stride()
        )

    return make


def _as(leaf: Any, made: Any) -> Any:
    """A new tensor as a Parameter, if the leaf is one."""
    return (
        torch.nn.Parameter(made, leaf.requires_grad)
        if isinstance(leaf, torch.nn.Parameter)
        else made
    )


# --- sharded


def _split_sharded(name: str, leaf: Any, local: Any) -> CompositeTensor | None:
    from shardckpt.frameworks.dtensor import describe_shards

    contents = _inner(name, local)
    if contents is None:
        return None
    kind, inner, context = contents
    shape = tuple(leaf.shape)
    parts = {
        key: _wrap(name, key, part, leaf, shared=key in kind.shared) for key, part in inner.items()
    }

    def rebuild(values: Sequence[Any]) -> Any:
        if all(new is old for new, old in zip(values, parts.values(), strict=True)):
            return leaf
        new = {
            key: getattr(value, "_local_tensor", value)
            for key, value in zip(parts, values, strict=True)
        }
        new = {
            key: value.squeeze(0) if value.dim() > inner[key].dim() else value
            for key, value in new.items()
        }
        return _as(
            leaf, _shard(kind.make(new, context, tuple(local.shape)), leaf, leaf.placements, shape)
        )

    whole = _with_shape(plain_context(context, name), tuple(local.shape), shape)
    document = _document(whole, name)
    by_shard = any(part.dim() > inner[key].dim() for key, part in parts.items())
    shards = describe_shards(name, leaf.device_mesh, leaf.placements, shape) if by_shard else None
    return CompositeTensor(kind.name, shape, document, parts, rebuild, shards)


def _wrap(name: str, key: str, part: Any, leaf: Any, *, shared: bool) -> Any:
    """A part of the local tensor as a DTensor."""
    from torch.distributed.tensor import Shard

    from shardckpt.frameworks.dtensor import local_shape
    from shardckpt.frameworks.dtensor_layout import SHARDED

    inner = _inner(name, part)
    if inner is not None:
        raise LeafError(
            f"{shown(name)}: {key} of this sharded composite tensor is composite itself "
            f"({inner[0].name}); only one level is."
        )
    split_dims = _split_dims(leaf)
    if shared or not split_dims:
        return _shard(part, leaf, _replicate(leaf), tuple(part.shape))
    local, shape = tuple(leaf._local_tensor.shape), tuple(leaf.shape)
    if part.dim() == 0 or (part.dim() < len(shape) and split_dims != {0}):
        placements = [
            Shard(0) if isinstance(placement, SHARDED) else placement
            for placement in leaf.placements
        ]
        shards = 1
        for placement, size in zip(leaf.placements, leaf.device_mesh.shape, strict=True):
            shards *= size if isinstance(placement, SHARDED) else 1
        return _shard(part.unsqueeze(0), leaf, placements, (shards, *part.shape))
    whole = [*part.shape]
    for dim in split_dims:
        # An empty shard does not show the ratio. If it is not 1, the save fails.
        whole[dim] = part.shape[dim] * shape[dim] // local[dim] if local[dim] else shape[dim]
    if local_shape(name, leaf.device_mesh, leaf.placements, tuple(whole)) != tuple(part.shape):
        raise ShardingError(
            f"{shown(name)}: {key} of shape {tuple(part.shape)} belongs to a shard of shape "
            f"{local} of the tensor's {shape}, and no tensor has such a shard under these "
            "placements; use sizes that the mesh divides, or train_state(local=…) for plain "
            "tensors."
        )
    return _shard(part, leaf, leaf.placements, tuple(whole))


def _shard(local: Any, like: Any, placements: Sequence[Any], shape: tuple[int, ...]) -> Any:
    """A DTensor of a local tensor on the mesh of another one.

    `from_local` alone would call operations of the local tensor's class.
    """
    from torch.distributed.tensor import DTensor

    plain = type(local) in (torch.Tensor, torch.nn.Parameter)
    stride = torch.empty(shape, device="meta").stride()
    with torch.no_grad():
        given = (
            local
            if plain
            else torch.empty((1,) * local.dim(), dtype=local.dtype, device=local.device).expand(
                local.shape
            )
        )
        made = DTensor.from_local(
            given,
            like.device_mesh,
            placements,
            run_check=False,
            shape=torch.Size(shape),
            stride=stride,
        )
    if not plain:
        made._local_tensor = local
    return made


# --- classes of other libraries


def _library_type(name: str) -> TensorType | None:
    """The entry of a class that its library has loaded."""
    entry = _LIBRARIES.get(name)
    module = None if entry is None else sys.modules.get(name.rpartition(".")[0])
    kind: Any = getattr(module, name.rpartition(".")[2], None)
    if entry is None or kind is None:
        return None
    split_it, make, shared = entry
    return TensorType(kind, name, split_it, make or _unflatten(kind), shared)


def _split_params4bit(tensor: Any) -> tuple[dict[str, Any], Any]:
    """Packed 4-bit data, and what `bitsandbytes.functional.QuantState` keeps."""
    parts = {"data": tensor.detach().as_subclass(torch.Tensor)}
    context: dict[str, Any] = {
        "quant_type": tensor.quant_type,
        "blocksize": tensor.blocksize,
        "quantized": tensor.bnb_quantized,
    }
    state = tensor.quant_state
    if state is not None:
        parts |= {"absmax": state.absmax, "quant_map": state.code}
        context |= {
            "shape": [*state.shape],
            "dtype": state.dtype,
            "state_blocksize": state.blocksize,
            "state_type": state.quant_type,
        }
        if state.nested:
            nested = state.state2
            parts |= {
                "nested_offset": state.offset,
                "nested_absmax": nested.absmax,
                "nested_quant_map": nested.code,
            }
            context |= {"nested_blocksize": nested.blocksize, "nested_dtype": nested.dtype}
    return parts, context


def _split_int8params(tensor: Any, scales: Any = None) -> tuple[dict[str, Any], Any]:
    """8-bit data, and the scales of its rows, which its module may keep."""
    scales = tensor.SCB if scales is None else scales
    parts = {"data": tensor.detach().as_subclass(torch.Tensor)}
    return parts | ({} if scales is None else {"SCB": scales}), {
        "has_fp16_weights": tensor.has_fp16_weights
    }


def of_modules(held: Mapping[str, Any]) -> tuple[dict[str, CompositeTensor], set[str]]:
    """A module's composite parameters that have parts as separate entries in its `state_dict`.

    The modules of bitsandbytes have such parameters.

    Args:
        held: the entries of the module's `state_dict`.

    Returns:
        The composite parameters by key, and the keys of the entries that are parts of them.
    """
    composites: dict[str, CompositeTensor] = {}
    inside: set[str] = set()
    for key, value in held.items() if "bitsandbytes" in sys.modules else ():
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        if kind == _PARAMS_4BIT:
            inside.update(other for other in held if other.startswith(f"{key}."))
        elif kind == _INT8_PARAMS:
            prefix = key.removesuffix("weight")
            inside.update({f"{prefix}SCB", f"{prefix}weight_format"} & held.keys())
            parts, context = _split_int8params(value, held.get(f"{prefix}SCB"))
            composites[key] = CompositeTensor(
                kind,
                tuple(value.shape),
                _document(plain_context(context, key), key),
                parts,
                _keep(value, [*parts.values()]),
            )
    return composites, inside


def _keep(leaf: Any, parts: Sequence[Any]) -> Callable[[Sequence[Any]], Any]:
    def rebuild(values: Sequence[Any]) -> Any:
        return (
            leaf
            if all(new is old for new, old in zip(values, parts, strict=True))
            else _only_filled({}, None, ())
        )

    return rebuild


def _only_filled(_parts: Mapping[str, Any], _context: Any, _shape: tuple[int, ...]) -> Any:
    raise StructureMismatchError(
        "A quantized parameter of bitsandbytes is restored in place only; make the module as for "
        "the save."
    )


_PARAMS_4BIT, _INT8_PARAMS = (
    "bitsandbytes.nn.modules.Params4bit",
    "bitsandbytes.nn.modules.Int8Params",
)
_MAP: frozenset[str] = frozenset({"qmap"})
_LIBRARIES: dict[str, tuple[Callable[[Any], Any], Callable[..., Any] | None, frozenset[str]]] = {
    _PARAMS_4BIT: (_split_params4bit, _only_filled, frozenset()),
    _INT8_PARAMS: (_split_int8params, _only_filled, frozenset()),
    "torchao.optim.subclass_8bit.OptimState8bit": (_flatten, None, _MAP),
    "torchao.optim.subclass_4bit.OptimState4bit": (_flatten, None, _MAP),
    "torchao.optim.subclass_fp8.OptimStateFp8": (_flatten, None, frozenset()),
}
"""Classes without `__tensor_flatten__`, and classes of optimizer states, which a new optimizer has
none of."""
