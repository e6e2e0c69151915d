"""Placeholders for stored tensors, which note what a model copies of them.

An inference engine's model takes an iterator of (name, tensor), and keeps of each tensor what its
rank needs: it narrows, splits, transposes, reshapes, and at last copies into a parameter. A
`Placeholder` has the shape and dtype of a stored tensor and no elements. Views of it are
placeholders; a copy into a parameter is noted. `Recorder.fill` then reads just the noted parts,
many at a time, most of them straight into the parameters.

An operation that is neither a view nor such a copy gets the elements, which are read at once. So
its result is the same as with a real tensor. These reads are counted (`Recorder.read_at_once`).
Before an operation of torch uses a parameter with a noted copy, the copy is made; readers that
torch does not dispatch, such as `numpy()`, `pickle` and some kernels, would see the parameter
without it, and so would another thread. As soon as another thread copies a placeholder, all copies
are made at once. If a model changes a placeholder in place, its function is called again, with
tensors, and reads all of them.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only

from shardckpt.errors import OptionError
from shardckpt.frameworks.torch import array_of, torch_dtype
from shardckpt.io.threads import map_on_threads
from shardckpt.layout.box import Box
from shardckpt.layout.dtypes import by_name
from shardckpt.plan.pieces import batches
from shardckpt.views.strided import are_apart, index_at, lacks_memory, row_major, storage_address

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from typing import Self

    from numpy.typing import NDArray

    from shardckpt.views.model_view import ModelView

_BATCH_BYTES = 256 << 20
"""Bytes that are read at a time; also those of memory for parts that are not read straight into a
parameter."""
_aten = torch.ops.aten
_VIEWS = {
    *(
        _aten.alias,
        _aten.as_strided,
        _aten.detach,
        _aten.diagonal,
        _aten.expand,
        _aten.lift_fresh,
        _aten.permute,
        _aten.select,
    ),
    *(
        _aten.slice,
        _aten.split,
        _aten.split_with_sizes,
        _aten.squeeze,
        _aten.t,
        _aten.transpose,
        _aten.unbind,
        _aten.unfold,
    ),
    *(_aten.unsqueeze, _aten.view, _aten._reshape_alias, _aten._unsafe_view),  # noqa: SLF001  (what `reshape` becomes)
}
"""Operations whose result is a view of their argument."""
_log = logging.getLogger("shardckpt")


class _ChangedInPlaceError(BaseException):
    """A model writes to a placeholder, which has no memory.

    No `Exception`, because a model may catch those.
    """


class Placeholder(torch.Tensor):  # type: ignore[misc]  # torch's types are not checked
    """A stored tensor, or a view of one, without elements."""

    @staticmethod
    def __new__(cls: type[Self], _recorder: Recorder, _number: int, place: torch.Tensor) -> Self:
        """A tensor on the CPU, of the size, strides and dtype of `place`."""
        made: Self = torch.Tensor._make_wrapper_subclass(  # noqa: SLF001  (torch's documented way to make one)
            cls,
            place.size(),
            strides=place.stride(),
            storage_offset=place.storage_offset(),
            dtype=place.dtype,
            device="cpu",
        )
        return made

    def __init__(self, recorder: Recorder, number: int, place: torch.Tensor) -> None:
        """See `Recorder.placeholders`.

        `place` is a view of a meta tensor with the shape of the stored one.
        """
        self.recorder = recorder
        self.number = number
        self.place = place

    @property
    def data(self) -> Placeholder:
        """A view of all elements."""
        view: Placeholder = self.detach()
        return view

    @data.setter
    def data(self, _: object) -> None:
        raise _ChangedInPlaceError("data =")

    def share_memory_(self) -> Placeholder:
        """Raise TypeError: there is no memory."""
        raise TypeError(f"{self!r} has no memory; clone it first")

    def __dlpack__(self, **_: Any) -> Any:
        raise TypeError(f"{self!r} has no memory; clone it first")

    def __repr__(self) -> str:
        """Shape and dtype."""
        return f"<shardckpt placeholder of {self.dtype} {tuple(self.shape)}>"

    @classmethod
    def __torch_dispatch__(cls, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note a copy, view the place, or read the elements."""
        kwargs = kwargs or {}
        packet = func.overloadpacket
        if packet is _aten.copy_ and not isinstance(args[0], Placeholder):
            args[1].recorder.note(args[0], args[1])
            return args[0]
        if _is_view(func):
            one = args[0]
            places = func(one.place, *args[1:], **kwargs)
            return tree_map_only(
                torch.Tensor, lambda place: cls(one.recorder, one.number, place), places
            )
        if any(
            isinstance(leaf, Placeholder)
            for leaf in tree_leaves(_written_arguments(func, args, kwargs))
        ):
            raise _ChangedInPlaceError(str(packet))
        leaves, spec = tree_flatten((args, kwargs))
        args, kwargs = spec.unflatten(
            [
                leaf.recorder.read(leaf, str(packet)) if isinstance(leaf, Placeholder) else leaf
                for leaf in leaves
            ]
        )
        return func(*args, **kwargs)


def _is_view(func: Any) -> bool:
    # That one has other elements.
    return func.overloadpacket in _VIEWS and func is not _aten.view.dtype


@dataclass(frozen=True, slots=True)
class _Part:
    """A box of a stored tensor, and how a view lies in it."""

    number: int
    """Position of the tensor in the view of the model."""
    box: Box
    size: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    @property
    def is_whole(self) -> bool:
        """Whether the view is the box's elements in their order."""
        return (
            prod(self.size) == self.box.size
            and self.strides == row_major(self.size)
            and self.offset == 0
        )

    @classmethod
    def of(cls, source: Placeholder, shape: Sequence[int]) -> _Part:
        """The smallest box that contains a placeholder's elements.

        If the view crosses rows, the box has the complete rows that the view touches.
        """
        place = source.place
        size, strides, offset = tuple(place.shape), place.stride(), place.storage_offset()
        apart = row_major(shape)
        steps = [index_at(stride, apart) for stride in strides]
        start = index_at(offset, apart)
        last = [
            a + sum((n - 1) * step[d] for n, step in zip(size, steps, strict=True))
            for d, a in enumerate(start)
        ]
        # No index is carried over to the dimension before.
        if all(at < n for at, n in zip(last, shape, strict=True)):
            box = Box(tuple(start), tuple(at + 1 for at in last))
            inside = row_major(box.shape)
            return cls(
                source.number,
                box,
                size,
                tuple(sum(a * b for a, b in zip(step, inside, strict=True)) for step in steps),
                0,
            )
        end = offset + sum((n - 1) * stride for n, stride in zip(size, strides, strict=True))
        rows = offset // apart[0], end // apart[0] + 1
        box = Box((rows[0], *[0] * (len(shape) - 1)), (rows[1], *shape[1:]))
        return cls(source.number, box, size, strides, offset - rows[0] * apart[0])


class Recorder:
    """Gives placeholders of a model's tensors, and fills what was copied of them."""

    def __init__(
        self,
        view: ModelView,
        seen: Callable[[int, Box, NDArray[Any]], None] | None = None,
        *,
        copy_at_once: bool = False,
    ) -> None:
        """Note copies of the tensors of `view`.

        Args:
            view: the files of a model.
            seen: called on several threads with all that is read: position in `view.arrays()`, box,
                and elements in its dtype.
            copy_at_once: make each copy when it is noted. A function that also repacks parameters
                needs that: operations that torch does not dispatch would read them before they are
                filled. It suits elements that are in memory already.
        """
        self._view = view
        self._seen = seen
        self._copy_at_once = copy_at_once
        self._arrays = view.arrays()
        self._dtypes = [by_name(array.dtype_name) for array in self._arrays]
        self._thread: int | None = threading.get_ident()
        """The thread in which copies are noted; in others, and after `run`, they are made at
        once."""
        self._lock = threading.RLock()
        """Held while copies are noted, or noted ones are made."""
        self._noted: list[tuple[torch.Tensor, _Part]] = []
        self._touched: set[int] = set()
        """Addresses of the storages into which copies are noted."""
        self.read_at_once: Counter[str] = Counter()
        """Operation → how often it needed elements while the model loaded."""
        self.changes_tensors = False
        """Whether the model has changed a placeholder in place, and was called again."""
        self._written: Counter[int] = Counter()
        """Address of a storage → elements that were copied or written to it."""
        self.boxes: set[tuple[int, Box]] = set()
        """Position in `view.arrays()` and box of all that was copied or read, also to tensors on
        the meta device."""

    def run(self, load_weights: Callable[[Iterator[tuple[str, torch.Tensor]]], Any]) -> Any:
        """Call a model's function with the placeholders, and read what it copied.

        Return what it returned.

        Args:
            load_weights: takes pairs of name and tensor. It is called a second time if it changes a
                placeholder in place.

        Raises:
            CorruptionError, MissingDataError, StorageError: stored bytes are damaged, gone, or
                cannot be read.
            OptionError: the second call changes a placeholder of the first one.
        """
        where = self._view.checkpoint.location
        try:
            with _FillBeforeUse(self):
                returned = load_weights(self.placeholders())
            self.fill()
        except _ChangedInPlaceError as changed:
            _log.warning("%s: %s changes a tensor in place; all tensors are read", where, changed)
            self.changes_tensors = True
            with self._lock:
                self._noted.clear()
                self._touched.clear()
                self._written.clear()
            tensors = ((name, self.read(one, str(changed))) for name, one in self.placeholders())
            try:
                with _FillBeforeUse(self):
                    returned = load_weights(tensors)
            except _ChangedInPlaceError as again:
                raise OptionError(
                    f"{where}: {again} changes a placeholder that the model kept from its first "
                    "call; export the checkpoint to safetensors, and load that."
                ) from again
        finally:
            self._thread = None
        return returned

    def placeholders(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and placeholder of each tensor, in the order of their bytes."""
        for number, (array, dtype) in enumerate(zip(self._arrays, self._dtypes, strict=True)):
            place = torch.empty(array.shape, dtype=torch_dtype(dtype), device="meta")
            yield array.name, Placeholder(self, number, place)

    def note(self, into: torch.Tensor, source: Placeholder) -> None:
        """Note a copy, which `fill` makes."""
        # Raises an error for shapes that do not fit.
        into.new_empty(into.shape, device="meta").copy_(source.place)
        if not source.numel():
            return
        self.count(into)
        if self._thread != threading.get_ident():
            with self._lock:
                self._copy_at_once = True
                self.fill()
            into.copy_(self.read(source, "aten.copy_"))
            return
        part = _Part.of(source, self._arrays[source.number].shape)
        self.boxes.add((part.number, part.box))
        if into.device.type == "meta":
            return
        with self._lock:
            if self._copy_at_once:
                self._fill([(into.detach(), part)])
            else:
                # An alias, because the program may give the tensor other memory.
                self._noted.append((into.detach(), part))
                self._touched.add(storage_address(into))

    def count(self, tensor: torch.Tensor) -> None:
        """Count the elements of a tensor as written."""
        if tensor.layout == torch.strided:
            self._written[storage_address(tensor)] += tensor.numel()

    def filled_in_part(self, parameters: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
        """Names of the parameters of which only some elements were written.

        For example, a part of a fused weight may be missing.

        Parameters that are placeholders still are among them. Elements are counted, so a part that
        was written twice may hide another one.
        """
        return [
            name for name, one in parameters if _is_placeholder(one) or self._is_filled_in_part(one)
        ]

    def _is_filled_in_part(self, tensor: torch.Tensor) -> bool:
        elements: int = tensor.numel()
        return 0 < self._written[storage_address(tensor)] < elements

    def unwritten(
        self, parameters: Iterable[tuple[str, torch.Tensor]], before: Mapping[str, int]
    ) -> list[str]:
        """Names of the parameters of which nothing was written, for models that do not say it.

        Args:
            parameters: the parameters.
            before: `storage_addresses` before `run`. A parameter with other memory was given it.
        """
        return [
            name
            for name, address in storage_addresses(parameters).items()
            if before.get(name) == address and not self._written[address]
        ]

    def fill_before_use(self, tensors: Iterable[torch.Tensor]) -> None:
        """Make the noted copies if any is into the memory of one of these tensors."""
        with self._lock:
            if self._touched and any(map(self._is_noted, tensors)):
                self.fill()

    def _is_noted(self, tensor: torch.Tensor) -> bool:
        if tensor.device.type == "meta" or tensor.layout != torch.strided:
            return False
        return tensor.untyped_storage().data_ptr() in self._touched

    def read(self, source: Placeholder, operation: str) -> torch.Tensor:
        """The elements that a placeholder stands for, for an operation that needs them now."""
        where, name = self._view.checkpoint.location, self._arrays[source.number].name
        self.read_at_once[operation] += 1
        _log.info("%s: %s needs all elements of %s at once", where, operation, name)
        if source.numel() == 0:
            return torch.empty(source.shape, dtype=source.dtype)
        part = _Part.of(source, self._arrays[source.number].shape)
        self.boxes.add((part.number, part.box))
        buffer = torch.empty(part.box.shape, dtype=source.dtype)
        self._read([(part, buffer)])
        return buffer.as_strided(part.size, part.strides, part.offset).clone()

    def fill(self) -> None:
        """Read all noted parts into the places that they were copied to.

        Raises:
            CorruptionError, MissingDataError, StorageError: stored bytes are damaged, gone, or
                cannot be read.
        """
        with self._lock:
            self._fill(self._noted)
            self._noted.clear()
            self._touched.clear()

    def _fill(self, noted: Sequence[tuple[torch.Tensor, _Part]]) -> None:
        apart = are_apart([into for into, _ in noted])
        with torch.no_grad():
            for batch in batches(
                enumerate(noted), lambda one: (self._nbytes(one[1][1]),), (_BATCH_BYTES,)
            ):
                reads, copies = [], []
                for i, (into, part) in batch:
                    dtype = torch_dtype(self._dtypes[part.number])
                    straight = (
                        into.device.type == "cpu"
                        and into.dtype == dtype
                        and into.shape == part.size
                        and into.is_contiguous()
                    )
                    straight = straight and not into.is_conj() and not into.is_neg()
                    if straight and part.is_whole and apart[i]:
                        reads.append((part, into.detach().view(part.box.shape)))
                    else:
                        buffer = torch.empty(part.box.shape, dtype=dtype)
                        reads.append((part, buffer))
                        copies.append(
                            (into, buffer.as_strided(part.size, part.strides, part.offset))
                        )
                self._read(reads)
                for into, elements in copies:  # in the order in which the model made them
                    into.copy_(elements)

    def _nbytes(self, part: _Part) -> int:
        return part.box.size * self._dtypes[part.number].itemsize

    def _read(self, reads: Sequence[tuple[_Part, torch.Tensor]]) -> None:
        """Read boxes into contiguous tensors of their shapes."""
        boxes = [
            (part.number, part.box, array_of(into, self._dtypes[part.number]))
            for part, into in reads
        ]
        self._view.read_boxes(boxes)
        seen = self._seen
        if seen is not None:
            map_on_threads(lambda one: seen(*one), boxes)


def _written_arguments(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """The arguments that an operation writes to."""
    writes = [
        (i, one.name)
        for i, one in enumerate(func._schema.arguments)  # noqa: SLF001
        if one.alias_info and one.alias_info.is_write
    ]
    return [args[i] if i < len(args) else kwargs.get(name) for i, name in writes]


def _with_memory(arguments: Any) -> list[torch.Tensor]:
    """The tensors in some arguments that are not placeholders."""
    return [
        leaf
        for leaf in tree_leaves(arguments)
        if isinstance(leaf, torch.Tensor) and not isinstance(leaf, Placeholder)
    ]


def _is_placeholder(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a placeholder, or has become one by `tensor.data = placeholder`."""
    return isinstance(tensor.data, Placeholder) or lacks_memory(tensor)


def storage_addresses(parameters: Iterable[tuple[str, torch.Tensor]]) -> dict[str, int]:
    """Name → `storage_address` of the parameters with elements."""
    return {
        name: storage_address(one)
        for name, one in parameters
        if not _is_placeholder(one) and one.layout == torch.strided and one.numel()
    }


class _FillBeforeUse(TorchDispatchMode):  # type: ignore[misc]  # torch's types are not checked
    """While it is active, an operation on the target of a noted copy sees the copied elements."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        packet = func.overloadpacket
        used = [] if _is_view(func) else _with_memory((args, kwargs))
        for tensor in filter(_is_placeholder, used):
            raise _ChangedInPlaceError(f"{packet} after `data =` of {tuple(tensor.shape)}")
        if used and not (packet is _aten.copy_ and isinstance(args[1], Placeholder)):
            self._recorder.fill_before_use(used)
            for tensor in _with_memory(_written_arguments(func, args, kwargs)):
                self._recorder.count(tensor)
        return func(*args, **kwargs)
