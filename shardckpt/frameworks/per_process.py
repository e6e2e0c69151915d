"""Values that every process has separately: their stored form and the choice of one to restore.

A process stores its values in its own file, each as a JSON document:

    {"tree": tree document,
     "arrays": {name: {"kind", "dtype", "shape", "data"}, …},
     "axis": [position, size]}

1. The tree has the same form as for any state (`shardckpt.state`). All names in it begin with the
   value's own name.
2. Its tensors are host arrays, stored in the document: `data` is base64 of the elements in
   row-major order, little-endian. `kind` is the type that they are restored as: `numpy`, `torch`,
   or `jax`. JAX arrays become numpy arrays if the program has not imported jax; for key arrays
   (`jax.random.key`) these have the words of the keys.
3. `axis` is the position of the process on an axis of the mesh; it is absent if the value goes by
   the number of the process. A file with such a value has version 3.0, because a reader that
   ignored it would restore the value of another position.
4. All values of a process take at most 64 MiB. They are meant for small state that cannot be
   shared; other state is tensors.

The decoder trusts no part of the document, and takes memory in proportion to its size.
"""

from __future__ import annotations

import base64
import binascii
import json
import sys
from math import prod
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from shardckpt import frameworks
from shardckpt.errors import (
    DtypeError,
    FormatError,
    LeafError,
    MismatchError,
    MissingExtraError,
)
from shardckpt.format.documents import AXIS_VERSION, FORMAT_VERSION, Fields, seal
from shardckpt.layout.dtypes import DType, by_name, with_plain_bools
from shardckpt.layout.world import World
from shardckpt.state import PerProcess, flatten
from shardckpt.state.document import Owned, Tensor, leaves_of, parse
from shardckpt.state.names import imported_module, shown
from shardckpt.state.unflatten import assemble

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from shardckpt.state.leaves import JSON

LARGEST_VALUES = 64 << 20
"""Most bytes of all encoded values of one process."""
_KEY = "jax.key:"
"""Prefix of the meaning of a JAX key's words (`frameworks.jax_keys`); the generator's name
follows."""


# --- choice of the value --------------------------------------------------------------------------


def choose_value(
    values: Mapping[int, object],
    leaf: PerProcess,
    name: str,
    *,
    saved: int,
    world: World,
    axes: Mapping[int, tuple[int, int]] = MappingProxyType({}),
) -> object:
    """The value that this process restores.

    Args:
        values: the stored values of this name, by process; processes without one are left out.
        leaf: the leaf in `like`.
        name: the name of the value.
        saved: the number of processes that saved the checkpoint.
        world: the number of this process, and of all processes.
        axes: the recorded positions of the values, and the size of the axis.

    Raises:
        MismatchError: the axis has another size, or no position is known here; or another number of
            processes saved, or this process saved no value; and `leaf` has no `choose`.
    """
    if axes and (
        leaf.axis is not None or any(axis != (p, world.processes) for p, axis in axes.items())
    ):
        return _choose_by_axis(values, leaf, name, axes)
    if saved == world.processes and world.process in values:
        return values[world.process]
    if leaf.choose is not None:
        return leaf.choose([values[process] for process in sorted(values)])
    reason = (
        f"process {world.process} saved none"
        if saved == world.processes
        else f"{saved} process{'es' if saved > 1 else ''} saved the checkpoint, and "
        f"{world.processes} restore it"
    )
    raise MismatchError(
        f"{shown(name)} has one value per process; {reason}. Say which one to restore, as in "
        f"PerProcess(value, choose=lambda values: values[0]), or leave it out with only=."
    )


def _choose_by_axis(
    values: Mapping[int, object], leaf: PerProcess, name: str, axes: Mapping[int, tuple[int, int]]
) -> object:
    """The value at this process's position on the axis along which the stored values differ."""
    at: dict[int, object] = {}
    for process in sorted(axes.keys() & values.keys()):
        at.setdefault(axes[process][0], values[process])
    sizes = sorted({size for _, size in axes.values()})
    if leaf.axis is not None and sizes == [leaf.axis[1]] and leaf.axis[0] in at:
        return at[leaf.axis[0]]
    if leaf.choose is not None:
        return leaf.choose([at[position] for position in sorted(at)])
    here = (
        "this process has not said its position"
        if leaf.axis is None
        else f"this process is at {leaf.axis[0]} of {leaf.axis[1]}"
    )
    raise MismatchError(
        f"{shown(name)} has one value per position on an axis of size "
        f"{' and '.join(map(str, sizes))}, and {here}. Give the position, as in PerProcess(value, "
        "axis=(data_rank, data_size)); if the size has changed, choose a value with "
        "PerProcess(value, choose=lambda values: values[0]), or leave it out with only=."
    )


def recorded_axis(document: JSON, name: str) -> tuple[int, int] | None:
    """The position that a stored value has on an axis, and the axis's size.

    None if it goes by the number of the process.

    Raises:
        FormatError: the document is invalid.
    """
    read = Fields(document, f"The per-process value of {shown(name)}")
    if "axis" not in read.doc:
        return None
    axis = read.dimensions("axis", least=0)
    if len(axis) != 2 or axis[0] >= axis[1]:
        read.fail(f"'axis' is {axis}, a position and a size are expected")
    return axis[0], axis[1]


# --- encoding -------------------------------------------------------------------------------------


def encode_values(
    values: Mapping[str, object], axes: Mapping[str, tuple[int, int]] = MappingProxyType({})
) -> dict[str, JSON]:
    """All values of this process as JSON documents.

    Args:
        values: the values by name (`Flat.per_process`).
        axes: their positions on axes (`Flat.axes`).

    Raises:
        LeafError: a value cannot be stored, by name; or all values together are too large.
    """
    documents: dict[str, Any] = {}
    room = LARGEST_VALUES
    for name, value in values.items():
        documents[name], size = _encode(value, name, room)
        if name in axes:
            documents[name]["axis"] = [*axes[name]]
        room -= size
    return documents


def values_file(values: Mapping[str, JSON]) -> bytes | None:
    """A host's file of values; None if there are none.

    It has the lowest version that covers them.
    """
    has_axes = any("axis" in value for value in values.values() if isinstance(value, dict))
    return (
        seal({"values": values}, AXIS_VERSION if has_axes else FORMAT_VERSION) if values else None
    )


def encode_value(value: object, name: str) -> JSON:
    """One value as a JSON document; see `encode_values`."""
    document: JSON = _encode(value, name, LARGEST_VALUES)[0]
    return document


def _encode(value: object, name: str, room: int) -> tuple[Any, int]:
    """The document, and its bytes, at most `room`."""
    flat = flatten(value, frameworks.is_tensor, frameworks.identity, frameworks.meaning, root=name)
    for inner in flat.per_process:
        raise LeafError(
            f"{shown(inner)} is a PerProcess inside of the PerProcess {shown(name)}; mark the "
            "outer one only."
        )
    arrays = {path: _host_array(leaf, path) for path, leaf in flat.tensors.items()}
    size = len(json.dumps(flat.tree, separators=(",", ":"))) + sum(
        -(-array.nbytes // 3) * 4 for _, _, array in arrays.values()
    )
    if size > room:
        raise LeafError(
            f"{shown(name)} takes {size / 2**20:.1f} MiB, and all PerProcess values of a process "
            "may take "
            f"{LARGEST_VALUES >> 20} MiB; give large arrays keys of their own per process, "
            "outside of PerProcess, "
            f'and save with SaveOptions(host_tensors="local").'
        )
    written: dict[str, JSON] = {
        path: {
            "kind": kind,
            "dtype": dtype.name,
            "shape": list(array.shape),
            "data": base64.b64encode(_bits(array).data).decode(),
        }
        for path, (kind, dtype, array) in arrays.items()
    }
    return {"tree": flat.tree, "arrays": written}, size


def _bits(array: NDArray[Any]) -> NDArray[np.uint8]:
    return np.ascontiguousarray(with_plain_bools(array)).reshape(-1).view(np.uint8)


def _host_array(leaf: Any, name: str) -> tuple[str, DType, NDArray[Any]]:
    """The framework of a leaf, its dtype, and its elements, usually not copied."""
    torch, jax = imported_module("torch"), imported_module("jax")
    if isinstance(leaf, np.ndarray):
        return "numpy", *_of_numpy(leaf, name)
    if torch is not None and isinstance(leaf, torch.Tensor):
        return "torch", *_of_torch(leaf, name)
    if jax is not None and isinstance(leaf, jax.Array):
        return "jax", *_of_jax(leaf, name)
    raise LeafError(
        f"{shown(name)}: a {type(leaf).__qualname__} has no data to save; leave it out of the "
        "state."
    )


def _of_numpy(leaf: NDArray[Any], name: str) -> tuple[DType, NDArray[Any]]:
    from shardckpt.frameworks import numpy as adapter

    source: Any = adapter.sources({name: leaf}, World())[name]
    return source.dtype, source.array.astype(source.dtype.numpy, copy=False)


def _of_torch(leaf: Any, name: str) -> tuple[DType, NDArray[Any]]:
    from shardckpt.frameworks import torch as adapter

    if leaf.device.type != "cpu" or type(leaf).__name__ == "DTensor":
        raise LeafError(
            f"{shown(name)} is a {type(leaf).__name__} on {leaf.device}, inside of a PerProcess; "
            f"{_ADVICE}."
        )
    source: Any = adapter.sources({name: leaf}, World())[name]
    return source.dtype, adapter.array_of(leaf.detach().resolve_conj().resolve_neg(), source.dtype)


def _of_jax(leaf: Any, name: str) -> tuple[DType, NDArray[Any]]:
    import jax

    from shardckpt.frameworks import jax as adapter

    if not isinstance(leaf, jax.core.Tracer) and not leaf.is_fully_addressable:
        raise LeafError(
            f"{shown(name)} is a jax.Array that other processes have parts of, inside of a "
            f"PerProcess; {_ADVICE}."
        )
    source: Any = adapter.sources({name: leaf}, World())[name]
    return source.dtype, jax.device_get(source.array)


_ADVICE = (
    "keep it outside, where every process stores its part, or make it a local tensor on the CPU "
    "first"
)


# --- decoding -------------------------------------------------------------------------------------


def decode_value(document: JSON, name: str) -> Any:
    """The value of a document, in plain dicts, lists and tuples.

    Raises:
        FormatError: the document is invalid.
        MissingExtraError: a part of it is a torch tensor, and torch is not installed.
        DtypeMismatchError: a part of it is a JAX array of a dtype that JAX is not configured for.
    """
    read = Fields(document, f"The per-process value of {shown(name)}")
    root = parse(read.value("tree"), name)
    arrays = read.mapping("arrays")
    values: dict[str, object] = {}
    for leaf in leaves_of(root):
        if isinstance(leaf, Owned):
            read.fail(f"{leaf.name!r:.200} is a per-process value inside of one")
        if isinstance(leaf, Tensor):
            if leaf.name not in arrays:
                read.fail(f"the array {leaf.name!r:.200} is missing")
            values[leaf.name] = _decode_array(
                Fields(arrays[leaf.name], f"{read.where}, array {leaf.name!r:.200}"), leaf
            )
    if len(values) != len(arrays):
        read.fail("it has arrays that its tree does not name")
    return assemble(root, values)


def _decode_array(read: Fields, leaf: Tensor) -> object:
    kind = read.one_of("kind", ("numpy", "torch", "jax"))
    shape = read.dimensions("shape", least=0)
    try:
        dtype = by_name(read.string("dtype"))
        data = bytearray(base64.b64decode(read.string("data").encode("ascii"), validate=True))
    except (DtypeError, UnicodeEncodeError, binascii.Error) as e:
        read.fail(str(e)[:200])
    if len(data) != prod(shape) * dtype.itemsize:
        read.fail(f"it has {len(data)} bytes, and {prod(shape)} elements of {dtype} are expected")
    if dtype.name == "bool" and data.translate(None, b"\0\1"):
        read.fail("it has bools that are neither true nor false")
    try:
        array = np.frombuffer(data, dtype.numpy).reshape(shape)
    except ValueError as e:  # no array without elements can be as long as this in another dimension
        read.fail(str(e)[:200])
    if leaf.meaning is not None and (kind != "jax" or not leaf.meaning.startswith(_KEY)):
        read.fail(f"it means {leaf.meaning!r}, which is not known")
    if kind == "torch":
        return _to_torch(read, array, dtype)
    return array if kind == "numpy" or "jax" not in sys.modules else _to_jax(read, array, leaf)


def _to_torch(read: Fields, array: NDArray[Any], dtype: DType) -> object:
    try:
        from shardckpt.frameworks import torch as adapter
    except ImportError:
        raise MissingExtraError(
            f"{read.where} is a tensor of torch's: install torch to read it, or leave it out with "
            "only=."
        ) from None
    try:
        return adapter.tensor_of(array, dtype)
    except DtypeError as e:
        raise FormatError(f"{read.where}: {e}") from e


def _to_jax(read: Fields, array: NDArray[Any], leaf: Tensor) -> object:
    import jax

    from shardckpt.frameworks.jax_arrays import array_of

    made = array_of(array, read.where, "leave it out with only=")
    if leaf.meaning is None:
        return made
    try:
        return jax.random.wrap_key_data(made, impl=leaf.meaning.removeprefix(_KEY))
    except (ValueError, TypeError) as e:
        raise FormatError(
            f"{read.where} is a key of a random number generator that this JAX does not have "
            f"({str(e)[:200]})."
        ) from e
