"""Leaves of a state in any framework: tensors to boxes and host arrays, and back.

There is one module per framework, each with the same functions: `matches`, `accepts`, `identity`,
`sources`, `target`; some have `meaning` and `settle`, too. A framework's module is imported when a
leaf of it occurs, and a leaf can only occur if the program has imported the framework: so a state
without torch, torch_xla or jax leaves imports none of them. `writing` and `reading` import this
package; it imports the pure core.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import cache, lru_cache
from importlib import import_module
from math import prod
from typing import TYPE_CHECKING, Any, Protocol

from shardckpt.errors import LeafError
from shardckpt.frameworks.base import Target
from shardckpt.layout.world import World
from shardckpt.state.composites import CompositeTensor
from shardckpt.state.names import shown

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Hashable, Iterable, Mapping, Sequence
    from types import EllipsisType

    from shardckpt.frameworks.base import Array, Placer, Sink, Source
    from shardckpt.frameworks.cuda import DeviceCopies
    from shardckpt.frameworks.snapshots import Snapshot
    from shardckpt.layout.dtypes import DType
    from shardckpt.state.document import Composite

__all__ = [
    "check_aliases",
    "composite",
    "composite_place",
    "fetch",
    "identity",
    "is_tensor",
    "meaning",
    "names_on_devices",
    "on_accelerator",
    "on_devices",
    "pinning",
    "placers",
    "reduce_partial",
    "settle",
    "snapshot",
    "source",
    "sources",
    "sum_on_device",
    "target",
    "warm",
]

ALONE = World()
"""A job of one process."""
_ADAPTERS = {
    "torch_xla": "torch_xla",
    "dtensor": "torch.distributed.tensor",
    "dcp_protocol": "torch",
    "torch": "torch",
    "jax": "jax",
    "numpy": "numpy",
}
"""The module that a program must have imported before it can have leaves of each adapter. The
adapters are asked in this order: torch_xla's sharded tensors are DTensors too, and all of these are
torch tensors."""
_MARKS = {"dcp_protocol": ("__create_write_items__", "global_offsets")}
"""Attributes of an adapter's leaves, which have one of them. Programs without such leaves do not
import the adapter."""
_SETTLED = ("torch_xla", "jax")
"""The modules of adapters that have a `settle`."""
_NO_LEAVES = frozenset((dict, list, tuple, str, int, float, bool, type(None)))
"""Types whose values are not tensors, so that no adapter is asked."""
_BY_CLASS: dict[type, tuple[str, Callable[[Any], bool], _Adapter]] = {}
"""The adapter of a class in its `CLASSES`: its name, its function `owns`, which decides for one
instance, and itself. No other adapter is asked then."""
ADDRESSES: dict[type, Callable[[Any], int]] = {}
"""The adapter's function `address`, for some of the classes in `_BY_CLASS`; see `flatten`."""


class _Adapter(Protocol):
    """The interface of each framework's module."""

    def matches(self, leaf: object) -> bool: ...
    def accepts(self, leaf: Target) -> bool: ...
    def identity(self, leaf: Any) -> Hashable | None: ...
    def sources(self, leaves: dict[str, Any], world: World) -> dict[str, Source]: ...
    def target(self, name: str, leaf: Any, shape: tuple[int, ...], dtype: DType) -> Sink: ...


def is_tensor(leaf: object) -> bool:
    """Whether a value in a state is a tensor leaf, or a `Target` that stands for one."""
    return _adapter(leaf) is not None or isinstance(leaf, Target)


def identity(leaf: object) -> Hashable | None:
    """A key, equal for tensor leaves over the same memory in the same form (tied weights).

    The keys are equal as long as both leaves are alive.

    None for a leaf that shares nothing, and for values that are not tensors.
    """
    adapter = _adapter(leaf)
    return None if adapter is None else adapter.identity(leaf)


def composite(leaf: object, name: str) -> CompositeTensor | None:
    """The parts of a tensor that is made of other tensors, by its name.

    None for all other leaves.
    """
    kind = type(leaf)
    if kind in _NO_LEAVES:
        return None
    if kind is CompositeTensor:
        return leaf  # type: ignore[return-value]
    if not _may_be_composite(kind):  # type: ignore[arg-type]
        return None
    known = _BY_CLASS.get(kind)
    if known is not None and known[1](leaf):  # a DTensor of a plain tensor
        return None
    composites: Any = _module("composites")
    return composites.split(name, leaf)  # type: ignore[no-any-return]


@lru_cache(maxsize=1024)
def _may_be_composite(kind: type) -> bool:
    """Whether a class is a subclass of torch's tensor other than torch's own."""
    torch: Any = sys.modules.get("torch")
    plain = getattr(torch, "Tensor", None)
    return plain is not None and issubclass(kind, plain) and kind not in (plain, torch.nn.Parameter)


def composite_place(
    name: str, of: Composite, parts: Mapping[str, Any], beside: object = None
) -> CompositeTensor:
    """A place for a stored composite tensor where `like` has none; see `composites.place`."""
    if "torch" not in sys.modules:
        raise LeafError(
            f"{shown(name)} is a composite tensor ({of.type_name}); import torch first, or leave "
            "it out with only=."
        )
    from shardckpt.frameworks import composites

    return composites.place(name, of, parts, beside)


def meaning(leaf: object) -> str | EllipsisType | None:
    """Meaning of a tensor leaf's elements beyond their dtype, such as the keys of a JAX generator.

    None for most leaves; `...` for a Target, which does not know.
    """
    known = _BY_CLASS.get(type(leaf))
    if known is not None and known[1](leaf):  # adapters with `CLASSES` have none
        return None
    adapter = _adapter(leaf)
    if adapter is None:
        return ... if isinstance(leaf, Target) else None
    meaning_of = vars(adapter).get("meaning")
    return None if meaning_of is None else meaning_of(leaf)


def settle(leaves: Iterable[object]) -> None:
    """Compute the pending leaves whose layout is unknown before, in one program per framework.

    Call it before `target` on many leaves, which else runs a program per such leaf. (`sources`
    computes all pending leaves.)
    """
    if sys.modules.keys().isdisjoint(_SETTLED):
        return
    pending: dict[str, list[object]] = {}
    for leaf in leaves:
        known = _BY_CLASS.get(type(leaf))
        if known is not None and known[1](leaf):  # adapters with `CLASSES` have nothing to settle
            continue
        framework = None if isinstance(leaf, Target) else framework_of(leaf)
        if framework is not None:
            pending.setdefault(framework, []).append(leaf)
    for framework, group in pending.items():
        if settle_of := vars(_module(framework)).get("settle"):
            settle_of(group)


def reduce_partial(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """The leaves, with partial values of DTensors reduced, because these cannot be saved directly.

    It runs a collective for each partial leaf, in the order of their names: every rank of their
    meshes must call it with the same leaves. All other functions here involve only one process and
    its own tensors.
    """
    dtensors = {name: leaf for name, leaf in leaves.items() if framework_of(leaf) == "dtensor"}
    module: Any = _module("dtensor") if dtensors else None
    return {**leaves, **(module.reduce_partial(dtensors) if dtensors else {})}


def sources(
    leaves: Mapping[str, object],
    world: World = ALONE,
    *,
    unread: Container[str] = (),
    local: Container[str] = (),
) -> dict[str, Source]:
    """Sources of the tensor leaves to save, by name, in the same order.

    Args:
        leaves: the leaves by name.
        world: this process and the others, whose devices hold the leaves too.
        unread: names of leaves whose elements are not fetched: they may be meta tensors.
        local: names of leaves that belong to this process alone.

    Raises:
        LeafError: a leaf cannot be stored, by name.
        ShardingError: a layout does not determine where data is, by name.
    """
    groups: dict[str, dict[str, object]] = {}
    for name, leaf in leaves.items():
        groups.setdefault(framework_of(leaf) or _require_framework(name, leaf, "saved"), {})[
            name
        ] = leaf
        if getattr(leaf, "is_meta", False) and name not in unread:
            raise LeafError(
                f"{shown(name)}: a meta tensor has no data to save; materialize it first, or "
                "leave it out of the state."
            )
    by_name: dict[str, Source] = {}
    for framework, group in groups.items():
        by_name.update(_module(framework).sources(group, world))
    if local:
        by_name.update({name: _own(by_name[name], world) for name in leaves if name in local})
    return by_name if len(groups) < 2 else {name: by_name[name] for name in leaves}


def _own(source: Any, world: World) -> Source:
    """The source of a tensor that this process alone has."""
    if hasattr(source, "of"):  # on a CUDA device
        return replace(source, of=_own(source.of, world))  # type: ignore[no-any-return]
    own = [(world.process,)] * len(source.boxes)
    if source.boxes.elements != prod(source.shape) or source.holders not in (None, own):
        raise LeafError(
            f"{shown(source.name)} is laid out over several processes, so it does not belong to "
            "one of them; let the patterns of local= select tensors of one process only."
        )
    return replace(source, holders=own) if source.holders is None else source  # type: ignore[no-any-return]


def source(name: str, leaf: object, world: World = ALONE) -> Source:
    """Source of one tensor leaf to save; for many leaves `sources` is cheaper."""
    return sources({name: leaf}, world)[name]


def check_aliases(sources: Mapping[str, Source], *, plain: bool) -> None:
    """Refuse tensors over the same memory that claim to be different parts of a tensor.

    Args:
        sources: tensors to save.
        plain: whether plain tensors count, each as the complete tensor; False: they belong to one
            process.

    Raises:
        LeafError: names both.
    """
    torch: Any = sys.modules.get(f"{__name__}.torch")  # imported with the first torch tensor
    if torch is None:
        return
    from shardckpt.frameworks.torch_kinds import memory_key

    seen: dict[Hashable, tuple[str, Source]] = {}
    for name, source in sources.items():
        # A source for a CUDA device is about another one.
        described: Any = getattr(source, "of", source)
        tensor = getattr(described, "local", getattr(described, "tensor", None))
        if not torch.matches(tensor) or not (plain or source.holders is not None):
            continue
        memory = memory_key(tensor)
        if memory is None:
            continue
        first, other = seen.setdefault(memory, (name, source))
        if other is not source and (claim := _claim(source)) != (others := _claim(other)):
            raise LeafError(
                f"{shown(name)} and {shown(first)} are over the same memory, and claim to be "
                f"different parts: {claim}, and {others}. A local shard is not the whole tensor: "
                "pass the same DTensor under both names, or make the second one with the "
                "placements and the shape that are true (DTensor.from_local checks neither)."
            )


def _claim(source: Source) -> str:
    """The part of a tensor that a source claims to have."""
    boxes = ", ".join(str(source.boxes[i]) for i in range(len(source.boxes)))
    return f"{boxes} of shape {source.shape}"


def fetch(
    sources: Sequence[Source], positions: Sequence[Sequence[int]] | None = None
) -> list[list[Array]]:
    """The elements of many sources: for each source, one host array per requested box.

    Frameworks copy theirs in few calls.

    Args:
        sources: leaves of any frameworks.
        positions: for each source, the positions of the boxes to copy; None: all boxes of all
            sources.
    """
    if positions is None:
        positions = [range(len(source.boxes)) for source in sources]
    groups: dict[type[Source], list[int]] = {}
    for i, source in enumerate(sources):
        groups.setdefault(type(source), []).append(i)
    fetched: list[list[Array]] = [[] for _ in sources]
    for kind, indices in groups.items():
        for i, arrays in zip(
            indices,
            kind.fetch([sources[i] for i in indices], [positions[i] for i in indices]),
            strict=True,
        ):
            fetched[i] = arrays
    return fetched


def names_on_devices(sources: Mapping[str, Source]) -> Iterable[str]:
    """The names of the sources that `on_devices` leaves on their devices."""
    return [name for name, source in sources.items() if source.copier is not None]


def on_devices(
    sources: Mapping[str, Source], *, overlap: bool
) -> tuple[Mapping[str, Source], DeviceCopies | None]:
    """The sources with the elements of CUDA tensors left on their devices, and their copier.

    The second value is the object that copies these elements, or None if there are none.

    The copies are ordered after the work that this thread has queued.

    Args:
        sources: tensors to save.
        overlap: see `SaveOptions.device_copy`.
    """
    there: Any = {name: source for name, source in sources.items() if source.copier is not None}
    copiers: set[Any] = {source.copier for source in there.values()}
    if not copiers:
        return sources, None
    assert len(copiers) == 1, "the tensors of a state are on devices of one kind"
    (copier,) = copiers
    left, copies = copier.of(there, overlap=overlap)
    return {**sources, **left}, copies


def sum_on_device(elements: Any) -> Callable[[Array], bool]:
    """Have a device sum elements that were left there.

    Return a function that compares a copy in host memory with the sum.
    """
    return _module("torch_snapshots").QueuedSum(elements.tensor).equals  # type: ignore[attr-defined, no-any-return]


def snapshot(comparer: str) -> Snapshot:
    """A copy on a device that has no elements yet, for the `comparer` of a source."""
    module: Any = _module(f"{comparer}_snapshots")
    return module.make()  # type: ignore[no-any-return]


def warm(sources: Iterable[Source]) -> None:
    """Have frameworks take the memory that copies of these tensors will be kept in.

    This is done only for memory that is a framework's own.
    """
    jax: Any = sys.modules.get(f"{__name__}.jax")
    if jax is not None:
        jax.warm(sources)


def on_accelerator(state: object) -> bool:
    """Whether a state may have tensors on devices with memory of their own.

    The answer is as good as it can be without flattening the state.
    """
    torch: Any = sys.modules.get("torch")
    if f"{__name__}.cuda" in sys.modules or (torch is not None and torch.cuda.is_initialized()):
        return True
    jax: Any = _module("jax") if "jax" in sys.modules else None
    return jax is not None and bool(jax.on_accelerator(state))


def placers(sinks: Iterable[Sink]) -> dict[type[Placer], Placer]:
    """The objects that copy to devices for sinks, by their class, where sinks have one."""
    groups: dict[type[Placer], list[Sink]] = {}
    for sink in sinks:
        if (kind := sink.placer) is not None:
            groups.setdefault(kind, []).append(sink)
    return {kind: kind(group) for kind, group in groups.items()}


def pinning(placers: Iterable[Placer]) -> Callable[[Any, Any], Callable[[], object]] | None:
    """The function that pins buffers, if a placer needs that; for a `BufferPool`."""
    return next((placer.pin for placer in placers if placer.pin is not None), None)


def target(name: str, leaf: object, shape: tuple[int, ...], dtype: DType) -> Sink:
    """The sink for a stored tensor.

    Args:
        name: for messages.
        leaf: the leaf of `like`: a tensor or a `Target`. The sink has its shape and dtype; the
            caller decides whether they may differ from the stored ones.
        shape: the stored shape, in elements, for a `Target` without a shape.
        dtype: the stored dtype, for a `Target` without a dtype.

    Raises:
        LeafError: nothing can be restored into this leaf, or only by a framework that is not
            imported.
        ShardingError: a sharding does not fit the tensor or this process's devices.
    """
    adapter = _adapter(leaf) or _module(_require_framework(name, leaf, "restored"))
    return adapter.target(name, leaf, shape, dtype)


def framework_of(leaf: object) -> str | None:
    """Name of the framework that a leaf is a tensor of.

    None: it is not a tensor of an imported framework.
    """
    kind = type(leaf)
    if kind in _NO_LEAVES:
        return None
    known = _BY_CLASS.get(kind)
    return known[0] if known is not None and known[1](leaf) else _first_match(leaf)


def _first_match(leaf: object) -> str | None:
    """The first adapter that a leaf matches."""
    for framework, needed in _ADAPTERS.items():
        marks = _MARKS.get(framework)
        if needed not in sys.modules or (
            marks is not None and not any(hasattr(leaf, mark) for mark in marks)
        ):
            continue
        adapter: Any = _module(framework)
        if adapter.matches(leaf):
            if type(leaf) in getattr(adapter, "CLASSES", ()):
                _BY_CLASS[type(leaf)] = framework, adapter.owns, adapter
                if hasattr(adapter, "address"):
                    ADDRESSES[type(leaf)] = adapter.address
            return framework
    return None


def _adapter(leaf: object) -> _Adapter | None:
    known = _BY_CLASS.get(type(leaf))
    if known is not None and known[1](leaf):
        return known[2]
    framework = framework_of(leaf)
    return None if framework is None else _module(framework)


def _require_framework(name: str, leaf: object, done: str) -> str:
    if isinstance(leaf, Target):
        if done == "saved":
            raise LeafError(
                f"{shown(name)}: a Target says where to restore a tensor to and has no data to "
                "save; leave it out of the state."
            )
        framework = next(
            (
                f
                for f, needed in _ADAPTERS.items()
                if needed in sys.modules and _module(f).accepts(leaf)
            ),
            None,
        )
        if framework is None:
            raise LeafError(
                f"{shown(name)}: no imported framework can restore to "
                f"Target(sharding={leaf.sharding!r:.200}); for torch_xla, import it and call "
                "torch_xla.runtime.use_spmd() first, for JAX give a jax.sharding.Sharding, for "
                "DTensor a pair of DeviceMesh and placements, for a torch tensor a torch.device, "
                "for a numpy array sharding=None."
            )
        return framework
    framework = framework_of(leaf)
    if framework is None:
        raise LeafError(
            f"{shown(name)}: a {type(leaf).__qualname__} cannot be {done} as a tensor; pass a "
            "tensor or a numpy array."
        )
    return framework


@cache
def _module(framework: str) -> _Adapter:
    """A framework's module, cached after its import.

    During the import, `sys.modules` shows other threads an incomplete module.
    """
    module: Any = import_module(f"{__name__}.{framework}")
    return module  # type: ignore[no-any-return]
