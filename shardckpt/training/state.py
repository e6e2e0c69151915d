"""The state of a training run: collected from its objects to save, put back after a restore.

It is put back into the same objects.

    state = shardckpt.train_state(
        model=model, optimizer=optimizer, scheduler=scheduler, loader=loader, step=0
    )
    shardckpt.save("run/100", state)
    shardckpt.restore("run/100", state)  # the objects themselves are restored, and state.step

Saving uses `state_dict()`: a dict with an entry for each object, by its keyword. Restoring

1. makes a `like` for the stored state (`TrainState.like`), in which every object has placed its own
   tensors;
2. restores into it as into any other `like`;
3. passes the result to `load_state_dict`: modules first, then their optimizers, then the other
   objects in the order in which they were given, and random number generators last, because the
   others may draw from them.

All checks run before an object changes. If an object then refuses its state, the objects before it
have changed already, and the error names it.
"""

from __future__ import annotations

import logging
import sys
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from shardckpt.errors import MismatchError, NamesMismatchError, OptionError, ShardckptError
from shardckpt.state import PerProcess
from shardckpt.state.document import Branch, child, leaves_of
from shardckpt.state.flatten import StateOwner
from shardckpt.state.select import matches, may_select_below, selector
from shardckpt.text import shorten
from shardckpt.training.generators import Generators
from shardckpt.training.likeness import LEFT_OUT, SetApart, StoredLeaves, mirror, set_apart
from shardckpt.training.parts import (
    Own,
    Stateful,
    StatePart,
    Whole,
    check_stateful,
    choice,
    collecting,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from shardckpt.format.structure import TensorRecord
    from shardckpt.layout.world import World
    from shardckpt.state.document import Node

log = logging.getLogger("shardckpt")


def train_state(
    *,
    model: Any = None,
    optimizer: Any = None,
    scheduler: Stateful | None = None,
    scaler: Stateful | None = None,
    ema: Any = None,
    loader: Any = None,
    rng: bool | Literal["exact"] = True,
    step: int | None = None,
    metadata: Mapping[str, Any] | None = None,
    local: str | Sequence[str] = (),
    **more: Any,
) -> TrainState:
    """Collect the objects of a training run, so that one `save` and one `restore` cover all.

    Names in the checkpoint begin with the keyword: `model/blocks.0.weight`,
    `optimizer/state/blocks.0.weight/exp_avg`. They do not contain the names of wrappers such as
    DDP, so `restore(url, only="model/**")` finds the weights for inference. Optimizer states go by
    parameter names: the mesh and the order of parameter groups may change.

    Args:
        model: a `torch.nn.Module`: plain, under DDP or `torch.compile`, of DTensors (FSDP2, tensor
            parallelism), or on a torch_xla device.
        optimizer: a `torch.optim.Optimizer` over parameters of the modules given here. It may be
            restored before its first step.
        scheduler: a learning rate scheduler.
        scaler: a `GradScaler`.
        ema: averaged weights: `torch.optim.swa_utils.AveragedModel`, or anything with a
            `state_dict`.
        loader: a data loader with a `state_dict`, such as torchdata's `StatefulDataLoader`. Every
            process stores its own state. If the number of processes changes, choose the state of
            each process: `loader=PerProcess(loader, choose=lambda states: states[0])`. Under model
            parallelism, say which data the process reads: `loader=PerProcess(loader,
            axis=(data_rank, data_size))`; by default taken from the names of the axes of the
            modules' DTensors (`data`, `dp`, `fsdp`, …). A restore goes by it, and refuses another
            size of the axis.
        rng: whether to include the random number generators of Python, numpy, torch (CPU and CUDA)
            and torch_xla. Every process stores its own. If more processes restore than saved, each
            additional process derives its generators from process 0's generators and its own
            number, and logs a warning. A generator that was equal on all saving processes stays
            equal. With "exact", a changed number of processes is a MismatchError.
        step: the training step; `state.step` from then on.
        metadata: any storable value; `state.metadata` from then on.
        local: name patterns of values that every process has for itself, although they are inside
            of these objects: FP8 statistics in a module's `_extra_state`, quantized moments of an
            optimizer's own shards. Every process stores its own, under its number, and gets it back
            in a job of as many processes. DTensors are not selected. A pattern that selects nothing
            of any process is an OptionError of the first save, or of the first one after the
            optimizers' first step.
        **more: further modules, optimizers, and objects with `state_dict` and `load_state_dict`.
            Wrap an object in `PerProcess` if each process has its own state. Any other value is
            stored unchanged; after a restore it is in `state.values`.

    Raises:
        OptionError: an object has no state to save; names its keyword.
    """
    given = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "scaler": scaler,
        "ema": ema,
        "loader": loader,
    }
    given = {key: value for key, value in given.items() if value is not None}
    for key, value in given.items():
        check_stateful(key, value.value if isinstance(value, PerProcess) else value)
    if "loader" in given and not isinstance(loader, PerProcess):
        given["loader"] = PerProcess(loader)
    if rng is not True and rng is not False and rng != "exact":
        raise OptionError(f'train_state(rng={shorten(rng)}): give True, False or "exact".')
    values = {
        key: value
        for key, value in {"step": step, "metadata": metadata}.items()
        if value is not None
    }
    for key, value in more.items():
        of = value.value if isinstance(value, PerProcess) else value
        if isinstance(of, Stateful):
            check_stateful(key, of)
            given[key] = value
        else:
            values[key] = value
    return TrainState(given, values, rng=rng, local=local)


class TrainState(StateOwner):
    """The objects and values of one training run; see `train_state`."""

    def __init__(
        self,
        objects: Mapping[str, Any],
        values: Mapping[str, Any],
        *,
        rng: bool | Literal["exact"],
        local: str | Sequence[str] = (),
    ) -> None:
        """Take objects with a state, and values that are stored unchanged.

        An object is wrapped in `PerProcess` if each process has its own.
        """
        self._local: _Local | None = None
        self._objects = {**objects, **({"rng": PerProcess(Generators())} if rng else {})}
        if local:
            if not isinstance(local, str | list | tuple) or not all(
                isinstance(pattern, str) for pattern in local
            ):
                raise OptionError(
                    f"train_state(local={shorten(local)}): give a name pattern, or a list of them."
                )
            self.is_local = self._local = _Local([local] if isinstance(local, str) else [*local])
        self._derives = rng is True
        """Whether a process without a counterpart derives its generators from process 0's."""
        self._left_out: dict[str, Collection[str]] = {}
        self._apart: SetApart | None = None
        """The tensors that the restore in progress does not fill where they are."""
        self.values = dict(values)
        """Values that are stored unchanged and replaced by a restore: `step`, `metadata`, and other
        given values."""

    @property
    def step(self) -> int:
        """The training step that was given, set or restored last."""
        if "step" not in self.values:
            raise AttributeError(
                "this train_state has no step; give train_state(step=…), or set state.step."
            )
        step: int = self.values["step"]
        return step

    @step.setter
    def step(self, step: int) -> None:
        self.values["step"] = step

    @property
    def metadata(self) -> Mapping[str, Any]:
        """The metadata that was given, set or restored last."""
        metadata: Mapping[str, Any] = self.values.get("metadata", {})
        return metadata

    @metadata.setter
    def metadata(self, metadata: Mapping[str, Any]) -> None:
        self.values["metadata"] = metadata

    def leave_out(self, key: str, names: Collection[str]) -> None:
        """Neither save nor restore some tensors of a module.

        They are frozen weights that the program itself loads before each restore.

        Args:
            key: the keyword of the module.
            names: names of its tensors, without the keyword.
        """
        self._left_out[key] = names

    def state_dict(self) -> dict[str, Any]:
        """The state as plain containers, for saving. Its tensors are the objects' own.

        Raises:
            LeafError: a module or optimizer whose tensors have no names; or an object does not give
                its state.
        """
        state: dict[str, Any] = {}
        for key, part in self._parts().items():
            with collecting(key):
                state[key] = part.collect()
        return {**state, **self.values}

    def unused_local(self) -> list[str]:
        """The patterns of `local` that have selected nothing.

        The state of an optimizer before its first step may yet be selected.
        """
        if self._local is None:
            return []
        growing = [key for key, of in self._objects.items() if not getattr(of, "state", True)]
        return [
            pattern
            for pattern in self._local.unused
            if not any(may_select_below(pattern, key) for key in growing)
        ]

    def arranged(self, tree: Node, wanted: Callable[[str], bool], adaptation: Any = None) -> Node:
        """A stored state converted to the form of `state_dict`.

        Only what torch or DCP stored in another form is converted.

        Args:
            tree: the stored state.
            wanted: whether a name is to be restored; objects without a requested name are skipped.
            adaptation: renames, joins and splits the tensors of modules, which optimizers and
                schedulers follow.

        Raises:
            StructureMismatchError: the stored optimizer numbers its parameters, and its groups have
                other lengths.
        """
        if not isinstance(tree, Branch):
            return tree
        parts: Mapping[Any, StatePart] = self._parts()
        stored: Branch = tree
        if adaptation is not None:
            following = {key for key, part in parts.items() if getattr(part, "follows", False)}
            stored = adaptation.rearranged(
                tree, following, [key for key, part in parts.items() if part.turn == 0]
            )
        children = [
            parts[key].arranged(node, stored, adaptation)
            if key in parts and any(wanted(leaf.name) for leaf in leaves_of(node))
            else node
            for key, node in zip(stored.keys, stored.children, strict=True)
        ]
        return replace(stored, children=children)

    def like(
        self,
        tree: Node,
        tensor: Callable[[str], TensorRecord],
        wanted: Callable[[str], bool],
        world: Callable[[], World],
        adaptation: Any = None,
    ) -> dict[str, Any]:
        """The restore target for a stored state; `load_state_dict` takes the result.

        Args:
            tree: the stored state, as `arranged`.
            tensor: the record of a tensor, by any of its names.
            wanted: whether a name is to be restored.
            world: returns this process's number and the number of processes; called where other
                processes saved.
            adaptation: fits tensors of other sizes.

        Raises:
            OptionError: only a part is requested of an object that must be restored completely.
        """
        stored = StoredLeaves(tensor, wanted, adaptation)
        targets: dict[str, Any] = {}
        for key, part in self._parts(world).items():
            node = child(tree, key)
            targets[key] = part.collect() if node is None else part.like(stored, node)
        for key in dict.fromkeys((*self.values, "step", "metadata")):
            node = child(tree, key)
            if node is not None:
                targets[key] = mirror(stored, node, self.values.get(key))
            elif key in self.values:
                targets[key] = self.values[key]
        target: dict[str, Any] = {
            key: like for key, like in targets.items() if like is not LEFT_OUT
        }
        target, self._apart = set_apart(stored, tree, target)
        return target

    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """Load a state into the objects; objects that it lacks stay unchanged.

        Args:
            state: the state that was restored into `like`, or a result of `state_dict`.
            strict: whether it is an error if an object does not take all of its state. Otherwise it
                is a warning in the log.

        Raises:
            NamesMismatchError: an object does not take all of its state; names the tensors.
            StructureMismatchError: the state has different values for one memory.
            MismatchError: an object refuses its state; names its keyword.
        """
        apart, self._apart = self._apart, None
        with nullcontext() if apart is None else apart.loading(state):
            self._load(state, strict=strict)
        self.values |= {key: value for key, value in state.items() if key not in self._objects}

    def _load(self, state: Mapping[str, Any], *, strict: bool) -> None:
        parts = {key: part for key, part in self._parts().items() if key in state}
        for key, part in sorted(parts.items(), key=lambda item: item[1].turn):
            try:
                part.put_back(state[key])
            except NamesMismatchError as e:
                if strict:
                    raise
                log.warning("%s", e)
            except ShardckptError:
                raise
            except Exception as e:
                raise MismatchError(
                    f"{key} cannot load its stored state ({type(e).__name__}: {e}); construct it "
                    "as for the save, or leave it out with only=. Other objects in `like` may "
                    "have been restored already."
                ) from e

    def _parts(self, world: Callable[[], World] | None = None) -> dict[str, StatePart]:
        """Every object, wrapped by its kind."""
        parts: dict[str, StatePart] = {}
        known_axis = None
        if "torch" in sys.modules:
            from shardckpt.training.of_torch import data_axis, of_torch

            known_axis = data_axis(self._objects.values())
            parts.update(of_torch(self._objects, self.is_local, self._left_out))
        for key, of in self._objects.items():
            if isinstance(of, PerProcess):
                choose = (
                    choice(world)
                    if isinstance(of.value, Generators) and self._derives and world
                    else of.choose
                )
                axis = known_axis if key == "loader" and of.axis is None else of.axis
                parts[key] = Own(
                    of.value,
                    choose,
                    last=isinstance(of.value, Generators),
                    draws=key == "loader",
                    axis=axis,
                )
            elif key not in parts:
                parts[key] = Whole(of)
        return {key: parts[key] for key in self._objects}

    def __repr__(self) -> str:
        """The keys of the objects and values."""
        return f"<shardckpt.TrainState of {', '.join((*self._objects, *self.values))}>"


class _Local:
    """Selects the values that each process has for itself, and remembers unused patterns.

    An unused pattern has selected nothing.
    """

    def __init__(self, patterns: list[str]) -> None:
        self.unused = patterns
        self._selects = selector(patterns)

    def __call__(self, name: str) -> bool:
        """Whether the value of a name belongs to each process alone."""
        selects = self._selects(name)
        if selects and self.unused:
            self.unused = [
                one
                for one in self.unused
                if not matches(one, name) and not may_select_below(one, name)
            ]
        return selects
