"""A `torch.nn.Module` as named tensors whose names do not depend on its wrappers.

1. Names are the names in the unwrapped module. `_WRAPPERS` lists the classes of wrappers (DDP,
   `torch.compile`, activation checkpointing, …); the attribute in which each keeps the wrapped
   module is not a part of a name. So a checkpoint of a wrapped module fits any other wrapping, and
   a child of another class keeps its name, whatever that is.
2. Values are the module's own Parameters and buffers, DTensors under FSDP2. They are restored in
   place. Tensors of torch_xla and of a module on the meta device are restored as new tensors, which
   go into the same Parameters, because an optimizer may hold these already.
3. A `state_dict` hook may give other tensors than the module's own: fused, split, converted or
   renamed. They are restored as new values, and `load_state_dict` passes them to the hooks that
   convert them back. Afterwards every tensor of the module has been filled in place or written by
   `load_state_dict`: its identity or its version proves that. Otherwise it is an error.
4. Extra state (`get_extra_state`) is restored as it is stored, whatever kind, dtype and shape the
   module's own has now.
5. Where processes train copies of a module, each process has its own buffers (a BatchNorm's
   statistics), and the first process's buffers are the true ones. Under DDP that is rank 0 of its
   group, which sends them to the others before each step; for a module whose own parameters are
   DTensors (FSDP2) it is the first process of their mesh. The other processes leave these buffers
   out of their saves if they are small. All processes write large buffers together, so they must
   agree on them.
"""

from __future__ import annotations

import copy
import logging
from collections import Counter
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakSet

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from shardckpt import frameworks
from shardckpt.errors import LeafError, NamesMismatchError, StructureMismatchError
from shardckpt.frameworks.composites import of_modules
from shardckpt.state.composites import CompositeTensor
from shardckpt.state.document import Branch, child
from shardckpt.state.names import child_name, shown
from shardckpt.text import few
from shardckpt.training.likeness import LEFT_OUT, mirror, renamed
from shardckpt.training.tensor_memory import (
    allocate,
    disturbs,
    fill,
    is_same,
    local_bytes,
    replace_memory,
    shares_memory,
    storage_of,
    version_of,
)
from shardckpt.writing.save_plan import SMALL_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

    from shardckpt.reading.naming.adapt import Adaptation
    from shardckpt.state.document import Node
    from shardckpt.training.likeness import StoredLeaves

_log = logging.getLogger("shardckpt")
_WRAPPERS = {
    ("torch._dynamo.eval_frame", "OptimizedModule"): "_orig_mod",
    (
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
        "ActivationWrapper",
    ): "_checkpoint_wrapped_module",
    ("torch.nn.parallel.data_parallel", "DataParallel"): "module",
    ("torch.nn.parallel.distributed", "DistributedDataParallel"): "module",
    ("torch.optim.swa_utils", "AveragedModel"): "module",
    (
        "torch_xla.experimental.spmd_fully_sharded_data_parallel",
        "SpmdFullyShardedDataParallel",
    ): "_orig_module",
    ("lightning.fabric.wrappers", "_FabricModule"): "_original_module",
    ("lightning_fabric.wrappers", "_FabricModule"): "_original_module",
}
"""Modules and names of classes of wrappers, and the attribute in which each keeps the wrapped
module."""
_COLLECTED: WeakSet[torch.nn.Module] = WeakSet()
"""Modules whose state was collected before, so that the log warns once."""
_LEFT_OUT_BY_THEMSELVES = frozenset({"_checkpoint_wrapped_module", "_original_module"})
"""Attributes that do not occur in the keys of their wrapper's `state_dict`."""
_SAME_MODULE = "_forward_module"
"""Attribute in which Fabric's wrapper keeps the wrapped module once more, in further wrappers."""
_STRIPPED_BEFORE = frozenset({"_orig_mod", "_orig_module", "_checkpoint_wrapped_module"})
"""Parts that 0.2.0 removed from all names, under whatever class."""


class NamedModule:
    """A module, and the current names of its tensors."""

    turn: ClassVar[int] = 0

    def __init__(
        self,
        key: str,
        module: torch.nn.Module,
        is_local: Callable[[str], bool] | None = None,
        left_out: Collection[str] = (),
    ) -> None:
        """Find the names.

        Args:
            key: the name that the module is saved under.
            module: any module, wrapped or not.
            is_local: whether each process has its own value under a name.
            left_out: names of tensors that are neither collected nor restored.

        Raises:
            LeafError: it is wrapped in the first version of FSDP, whose parameters are not the
                model's tensors; or wrappers give two of its tensors one name.
        """
        self.key = key
        self.module = module
        self._is_local = is_local or (lambda _name: False)
        self.replica = False
        """Whether another process has the true buffers, under DDP."""
        copies: list[torch.nn.Module] = []
        self._ddp: set[str] = set()
        """Paths of the modules that DDP wraps."""
        distributed: Any = torch.distributed
        for path, part in module.named_modules():
            if isinstance(part, DistributedDataParallel):
                self._ddp.add(f"{path}.module" if path else "module")
                self.replica |= distributed.get_rank(part.process_group) > 0
            elif type(part).__name__ == "FullyShardedDataParallel" and type(
                part
            ).__module__.startswith("torch.distributed"):
                raise LeafError(
                    f"{shown(key)} is wrapped in FullyShardedDataParallel, which flattens several "
                    "parameters into one; use torch.distributed.fsdp.fully_shard, or save what "
                    "torch's get_model_state_dict gives."
                )
            elif _is_copy(part):
                copies.append(part)
        self._copied = {id(buffer) for part in copies for buffer in part.buffers(recurse=False)}
        """Ids of the buffers whose true values are on another process."""
        with torch.no_grad():  # views that hooks make are filled in place
            self._held = module.state_dict(keep_vars=True)  # also makes FSDP2 show its shards
        self._composites, inside = of_modules(self._held)
        """Composite parameters that are collected as such, by key."""
        self._keys: dict[str, str] = {}
        """Key in the module's own `state_dict` of each name."""
        for path in (path for path in self._held if path not in inside):
            other = self._keys.setdefault(self.name_of(path), path)
            if other != path:
                raise LeafError(
                    f"{shown(key)}: {other!r} and {path!r} are both called {self.name_of(path)!r} "
                    "without the wrappers of the module; rename one of them, or give train_state "
                    "the wrapped module instead."
                )
        for name in left_out:
            self._keys.pop(name, None)

    def collect(self) -> dict[str, Any]:
        """The module's own tensors and the other entries of its `state_dict`, by name."""
        if self.module not in _COLLECTED:
            _COLLECTED.add(self.module)
            self._tell_left_out()
        copied = {id(buffer) for buffer in self.module.buffers()} if self.replica else self._copied
        held = {
            name: self._composites.get(key, self._held[key]) for name, key in self._keys.items()
        }
        return {
            name: value
            for name, value in held.items()
            if id(value) not in copied
            or not _is_left_out(value)
            or self._is_local(child_name(self.key, name))
        }

    def _tell_left_out(self) -> None:
        """Warn of tensors that `state_dict` leaves out.

        There is no warning if `state_dict` has values that hooks computed, maybe from these
        tensors.
        """
        own = _tensors(self.module)
        held = {storage_of(value) for value in self._held.values()} - {None}
        names = [name for name, tensor in own.items() if storage_of(tensor) not in held]
        if names and held <= {storage_of(tensor) for tensor in own.values()}:
            _log.warning(
                "%s: state_dict() leaves out %s, so they are not saved; a restore into the module "
                "refuses that, unless its load_state_dict() accepts it, or strict=False is given.",
                shown(self.key),
                few(names),
            )

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all entries, including buffers that other processes save."""
        return tuple(self._keys)

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Each Parameter with its name; one that has several names occurs several times."""
        for prefix, part in _parts(self.module):
            for name, parameter in part.named_parameters(recurse=False):
                yield prefix + name, parameter

    def parameter_names(self) -> dict[int, str]:
        """Each Parameter's name, by its id; the first name where it has several."""
        names: dict[int, str] = {}
        for name, parameter in self.named_parameters():
            names.setdefault(id(parameter), name)
        return names

    def earlier_parameter_names(self) -> dict[str, str]:
        """Today's name of each Parameter, by the name that 0.2.0 gave it, where these differ."""
        names = self.parameter_names()
        earlier = {
            self._earlier(path): names[id(parameter)]
            for path, parameter in self.module.named_parameters()
        }
        today = set(names.values())
        return {before: now for before, now in earlier.items() if before not in today}

    def arranged(self, node: Node, _state: Node, _adaptation: Adaptation | None = None) -> Node:
        """The stored state, with names that 0.2.0 gave changed to today's."""
        if not isinstance(node, Branch) or node.form != "dict":
            return node
        earlier = {self._earlier(key): name for name, key in self._keys.items()}
        return renamed(
            node, {before: now for before, now in earlier.items() if before not in self._keys}
        )

    def like(self, stored: StoredLeaves, node: Node) -> Any:
        """The restore target; `LEFT_OUT` where no part is requested."""
        if not stored.any(node):
            return LEFT_OUT
        targets: dict[str, Any] = {}
        as_stored = stored if stored.adaptation is None else replace(stored, adaptation=None)
        for name, key in self._keys.items():
            value = self._held[key]
            if key in self._composites:
                targets[name] = self._composites[key]
                continue
            below = (
                child(node, name) if _is_extra(key) or not isinstance(value, torch.Tensor) else None
            )
            extra = LEFT_OUT if below is None else mirror(as_stored, below, value)
            targets[name] = value if extra is LEFT_OUT else extra
        return targets

    def put_back(self, restored: Mapping[str, Any]) -> None:
        """Give the module the state that was restored into `like`.

        Raises:
            NamesMismatchError: tensors of the module were neither filled nor written, or stored
                tensors went nowhere.
            StructureMismatchError: tensors that share memory have different values in the
                checkpoint.
        """
        own = _tensors(self.module)
        ids = {id(tensor): tensor for tensor in own.values()}
        with (
            torch.inference_mode()
            if any(tensor.is_inference() for tensor in own.values())
            else torch.no_grad()
        ):
            self._load(self._values_to_load(restored, ids), own)

    def _values_to_load(
        self, restored: Mapping[str, Any], own: Mapping[int, Any]
    ) -> dict[str, Any]:
        """The values for `load_state_dict`, with the module's own tensors that are filled.

        These tensors are filled already, or are filled here.

        Args:
            restored: see `put_back`.
            own: the module's tensors by id.
        """
        storages = Counter(map(storage_of, own.values()))
        apart: dict[str, tuple[Any, Any]] = {}
        replaced: dict[int, Any] = {}
        wrong: list[str] = []
        # Keeps the attribute in which torch stores the modules' versions.
        loaded: dict[str, Any] = copy.copy(self._held)
        loaded.clear()
        for name, key in self._keys.items():
            held = self._held[key]
            value = restored.get(name, held)
            if id(held) in own and frameworks.composite(held, name) is not None:
                if value is not held and not isinstance(value, CompositeTensor):
                    torch.utils.swap_tensors(held, value)
                continue  # its parts are filled in place, and its class may have no copy_()
            is_new = id(held) in own and (held.is_meta or held.device.type == "xla")
            if is_new or id(held) in replaced:
                if value is not held and not replace_memory(held, value, replaced):
                    wrong.append(name)
                if held.device.type == "xla":
                    continue  # copied onto itself, it would become a pending computation
                value = held
            elif id(held) in own and value is not held and shares_memory(held, value, storages):
                apart[name] = held, value
                value = held
            loaded[key] = value
        written = {id(held) for held, _ in apart.values()}
        filled = [tensor for tensor in own.values() if id(tensor) not in written]
        self._write(apart, filled, wrong)
        return loaded

    def _write(
        self, apart: Mapping[str, tuple[Any, Any]], filled: list[Any], wrong: list[str]
    ) -> None:
        """Write values into tensors that share memory with others of the module.

        The other tensors were filled where they are.

        Args:
            apart: tensor and value, by name.
            filled: all other tensors of the module.
            wrong: names of those whose values differ from their memory's.
        """
        for name, (tensor, value) in apart.items():
            disturbed = disturbs(tensor, value, filled)
            fill(tensor, value)
            filled.append(tensor)
            if disturbed or not is_same(tensor, value):
                wrong.append(name)
        if wrong:
            raise StructureMismatchError(
                f"{shown(self.key)}: other tensors of the module share memory with {few(wrong)}, "
                "and the checkpoint has different values for the same elements; restore into a "
                "module that has memory for each, or leave names out with only=. The contents of "
                "these tensors are undefined now."
            )

    def _load(self, loaded: dict[str, Any], own: Mapping[str, Any]) -> None:
        filled = Counter[int | None]()
        for value in loaded.values():
            filled[storage_of(value)] += (
                local_bytes(value) if isinstance(value, torch.Tensor) else 0
            )
        given = {id(value) for value in self._held.values()}
        self._held.clear()  # views of meta tensors keep these from getting memory
        hidden = {
            name: t
            for name, t in own.items()
            if id(t) not in given and filled[storage_of(t)] < local_bytes(t)
        }
        allocated = [
            (name, tensor, allocate(tensor)) for name, tensor in hidden.items() if tensor.is_meta
        ]
        versions = {name: version_of(tensor) for name, tensor in hidden.items()}
        # Tensors that are the module's own are copied onto themselves, which does nothing. Its
        # hooks run, and it gets its extra state.
        result = self.module.load_state_dict(loaded, strict=False)
        unwritten = {
            name for name, tensor in hidden.items() if version_of(tensor) == versions[name]
        }
        for name, tensor, meta in allocated:
            if name in unwritten:
                torch.utils.swap_tensors(tensor, meta)
        self._check(loaded, own, unwritten, result)

    def _check(
        self, loaded: Mapping[str, Any], own: Mapping[str, Any], unwritten: set[str], result: Any
    ) -> None:
        """Raise NamesMismatchError unless the module holds all that it was given.

        Args:
            loaded: what it was given, by the keys of its own `state_dict`.
            own: its tensors by name.
            unwritten: those of them that were not filled in place and that `load_state_dict` has
                not written.
            result: the result of `load_state_dict`; a class may return nothing.
        """
        names = {id(tensor): name for name, tensor in own.items()}
        missing = [
            names.get(id(_at(self.module, key)), self.name_of(key))
            for key in getattr(result, "missing_keys", ())
        ]
        lost = [name for name in missing if name in unwritten or name not in own]
        # The module's class accepts that, or writes in its own manner.
        silent = unwritten.difference(missing)
        ignored = set(getattr(result, "unexpected_keys", ()))
        memory = {storage_of(tensor) for tensor in own.values()}
        doubtful = [
            key
            for key, value in loaded.items()
            if (silent or key in ignored) and storage_of(value) not in memory
        ]
        after = self.module.state_dict() if doubtful else {}
        wrong = [self.name_of(key) for key in doubtful if not is_same(after.get(key), loaded[key])]
        if not lost and not wrong:
            return
        if not silent:
            try:
                self.module.load_state_dict(loaded, strict=True)
            except RuntimeError:
                pass  # the error below names only what is wrong; this one names more
            else:
                return  # a hook or the class itself declares that this is all
        parts = [f"{few(lost)} keep the values from before the restore"] if lost else []
        parts += (
            [f"{few(wrong)} were read, and the module does not hold what was read"] if wrong else []
        )
        raise NamesMismatchError(
            f"{shown(self.key)}: {'; '.join(parts)}: its state_dict() fuses, renames or drops "
            "tensors, and its load_state_dict() does not undo that. Register the hook that does "
            "(register_load_state_dict_pre_hook), leave the names out with only=, or pass "
            "strict=False to go on without them."
        )

    def name_of(self, key: str) -> str:
        """The name of a key of the module's own `state_dict`: without wrappers."""
        at: Any = self.module
        kept = []
        for part in key.split("."):
            while (inner := _inner(at)) in _LEFT_OUT_BY_THEMSELVES:
                at = getattr(at, str(inner))
            if part != inner:
                kept.append(part)
            below = getattr(at, part, None)
            at = below if isinstance(below, torch.nn.Module) else None
        return ".".join(kept)

    def _earlier(self, path: str) -> str:
        """The name that 0.2.0 gave."""
        parts = path.split(".")
        kept = (
            part
            for i, part in enumerate(parts)
            if part not in _STRIPPED_BEFORE and ".".join(parts[: i + 1]) not in self._ddp
        )
        return ".".join(kept)


def _inner(module: object) -> str | None:
    """The attribute in which a wrapper keeps the wrapped module; None for all other modules."""
    kind: Any = type(module)
    return _inner_of(kind)


@lru_cache(maxsize=1024)
def _inner_of(kind: type) -> str | None:
    kinds = ((base.__module__, base.__name__) for base in kind.__mro__)
    return next((_WRAPPERS[kind] for kind in kinds if kind in _WRAPPERS), None)


def _at(module: Any, path: str) -> object:
    """The attribute of an attribute of a module, by a path of names; None if there is none."""
    for part in path.split("."):
        module = getattr(module, part, None)
    return module


def _parts(module: torch.nn.Module, prefix: str = "") -> Iterator[tuple[str, torch.nn.Module]]:
    """A module and all modules in it, each with the prefix of its tensors' names."""
    inner = _inner(module)
    yield prefix, module
    if inner is not None:
        yield from _parts(getattr(module, inner), prefix)
    for name, below in module.named_children():
        if inner is None or name not in {inner, _SAME_MODULE}:
            yield from _parts(below, f"{prefix}{name}.")


def _tensors(module: torch.nn.Module) -> dict[str, Any]:
    """The tensors of a module that its state has, by name: a tied one once."""
    tensors: dict[str, Any] = {}
    for prefix, part in _parts(module):
        transient = part._non_persistent_buffers_set  # noqa: SLF001  (torch has no public name for it)
        held = (*part.named_parameters(recurse=False), *part.named_buffers(recurse=False))
        tensors |= {prefix + name: tensor for name, tensor in held if name not in transient}
    return tensors


def _is_extra(name: str) -> bool:
    """Whether an entry is what a module's `get_extra_state` returned.

    The entry is a value of any kind, also a tensor of changing length.
    """
    return name.rpartition(".")[2] == "_extra_state"


def _is_copy(part: torch.nn.Module) -> bool:
    """Whether this process is not the first in the mesh of a module's own parameters.

    This is true only if these parameters are DTensors.
    """
    meshes = [
        getattr(parameter, "device_mesh", None) for parameter in part.parameters(recurse=False)
    ]
    return any(isinstance(mesh, DeviceMesh) and any(mesh.get_coordinate() or ()) for mesh in meshes)


def _is_left_out(buffer: torch.Tensor) -> bool:
    """Whether a buffer can be saved by one process alone: it is small, and no DTensor."""
    return buffer.nbytes < SMALL_BYTES and getattr(buffer, "device_mesh", None) is None
