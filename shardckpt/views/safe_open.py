"""The interface of `safetensors.safe_open` over a checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np

from shardckpt.convert.formats.safetensors.layout import DTYPES
from shardckpt.errors import NamesMismatchError, OptionError
from shardckpt.layout.box import Box
from shardckpt.layout.dtypes import by_name
from shardckpt.plan.pieces import batches
from shardckpt.reading.lazy_array import empty
from shardckpt.state.names import did_you_mean, shown
from shardckpt.text import shorten
from shardckpt.views.model_view import ModelView

if TYPE_CHECKING:
    import os
    from types import TracebackType

    from numpy.typing import NDArray

    from shardckpt.reading.checkpoint import Checkpoint
    from shardckpt.reading.lazy_array import LazyArray

_BATCH_BYTES = 256 << 20
"""Bytes of tensors that are read together."""
_FRAMEWORKS = {
    "np": "np",
    "numpy": "np",
    "pt": "pt",
    "torch": "pt",
    "pytorch": "pt",
    "jax": "jax",
    "flax": "jax",
}


class safe_open:  # noqa: N801  (the name in safetensors)
    """Tensors of a checkpoint, with the interface of `safetensors.safe_open`.

    Use it as a context manager: `with shardckpt.safe_open(url, "pt") as f: weight =
    f.get_tensor("model.norm.weight")`.
    """

    def __init__(
        self,
        source: str | os.PathLike[str] | Checkpoint,
        framework: Literal["np", "numpy", "pt", "torch", "pytorch", "jax", "flax"] = "pt",
        device: Any = "cpu",
        **options: Any,
    ) -> None:
        """Open a checkpoint.

        Args:
            source: path or url of the checkpoint, or an open one.
            framework: the kind of tensors to return: numpy ("np"), torch ("pt") or JAX ("jax").
            device: the device of returned tensors, for torch and JAX.
            options: options of `safetensors_view`.

        Raises:
            OptionError: an option is invalid, or names no device.
            NotFoundError: there is no committed checkpoint.
        """
        if not isinstance(framework, str) or framework not in _FRAMEWORKS:
            raise OptionError(
                f"safe_open(framework={shorten(framework)}): give one of "
                f"{', '.join(map(repr, _FRAMEWORKS))}."
            )
        self._framework = _FRAMEWORKS[framework]
        _check_device(self._framework, device)
        self._device = device
        self._view = ModelView(source, **options)
        self._arrays = {array.name: array for array in self._view.arrays()}

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Nothing stays open."""

    def keys(self) -> list[str]:
        """Names of the tensors, sorted."""
        return sorted(self._arrays)

    def offset_keys(self) -> list[str]:
        """Names of the tensors, in the order of their bytes."""
        return list(self._arrays)

    def metadata(self) -> dict[str, str]:
        """The header's metadata."""
        return self._view.header_metadata

    def get_tensor(self, name: str) -> Any:
        """Read a tensor.

        Raises:
            NamesMismatchError: there is no such tensor.
            DtypeMismatchError: JAX would silently return 32 bits of elements of 64 bits.
            LeafError: there is no such device.
            BudgetError: the device has no memory left.
            CorruptionError, MissingDataError, StorageError: stored bytes are damaged or missing, or
                cannot be read.
        """
        return self.get_slice(name)[...]

    def get_tensors(self) -> dict[str, Any]:
        """Read all tensors, by name, in the order of their bytes.

        Raises:
            DtypeMismatchError, CorruptionError, MissingDataError, StorageError: as `get_tensor`.
        """
        tensors = {}
        arrays = enumerate(self._arrays.values())
        for batch in batches(arrays, lambda one: (one[1].nbytes,), (_BATCH_BYTES,)):
            boxes = [
                (number, Box.full(array.shape), empty(array.name, array.shape, array.dtype))
                for number, array in batch
            ]
            self._view.read_boxes(boxes)
            for (_, array), (_, _, elements) in zip(batch, boxes, strict=True):
                tensors[array.name] = _tensor(array, elements, self._framework, self._device)
        return tensors

    def get_slice(self, name: str) -> TensorSlice:
        """A handle of a tensor; indexing it reads a part of the tensor.

        Raises:
            NamesMismatchError: there is no such tensor.
        """
        if name not in self._arrays:
            raise NamesMismatchError(
                f"{self._view.checkpoint.location}: no tensor "
                f"{name!r}{did_you_mean(name, self._arrays)}."
            )
        return TensorSlice(self._arrays[name], self._framework, self._device)


def _check_device(framework: str, device: Any) -> None:
    """Raise OptionError unless it names a device of the framework, or is one."""
    try:
        if framework == "pt":
            import torch

            torch.device(device)
        elif framework == "jax" and device != "cpu":
            import jax

            if not isinstance(device, jax.Device | jax.sharding.Sharding):
                raise TypeError('JAX has "cpu", and objects such as jax.devices()[0]')  # noqa: TRY301
    except (RuntimeError, TypeError, ValueError) as e:
        reason = str(e).partition("\n")[0]
        raise OptionError(f"safe_open(device={shorten(device)}): {reason}.") from e


class TensorSlice:
    """Handle of a tensor in a checkpoint.

    Indexing it reads a part, as a tensor of the framework.
    """

    def __init__(self, array: LazyArray, framework: str, device: Any) -> None:
        """See `safe_open.get_slice`."""
        self._array = array
        self._framework = framework
        self._device = device

    def get_shape(self) -> list[int]:
        """Shape of the tensor."""
        return list(self._array.shape)

    def get_dtype(self) -> str:
        """The format's name of the dtype, such as "BF16"."""
        return DTYPES[self._array.dtype_name]

    def __getitem__(self, index: Any) -> Any:
        """Read a part of the tensor; see `LazyArray`."""
        elements = np.asarray(self._array[index])
        return _tensor(self._array, elements, self._framework, self._device)


def _tensor(array: LazyArray, elements: NDArray[Any], framework: str, device: Any) -> Any:
    """A tensor of a framework, of elements that were read of an array."""
    if framework == "np":
        return elements
    if framework == "jax":
        from shardckpt.frameworks.jax_arrays import array_of

        at = None if device == "cpu" else device
        return array_of(elements, shown(array.name), 'open with framework="np"', at)
    from shardckpt.frameworks.torch import tensor_of
    from shardckpt.frameworks.torch_devices import device_memory

    tensor = tensor_of(elements, by_name(array.dtype_name))
    with device_memory(array.name, device):
        return tensor.to(device)
