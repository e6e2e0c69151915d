"""The state of a training, whatever it consists of: collected for saving, put back after restoring.

    state = shardckpt.train_state(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader, step=0)
    shardckpt.save("run/100", state)
    shardckpt.restore("run/100", state)           # the objects themselves are as they were, state.step as well

Saving takes `state_dict()`: a dict with an entry for each object, by its keyword. Restoring

1. asks for a `like` of what is stored (`TrainState.like`), in which every object has laid its own tensors out;
2. restores into it as into any other;
3. hands the result to `load_state_dict`: modules first, then their optimizers, then everything else in the order in
   which it was given, and random number generators last, because the others may draw from them.

What is checked is checked before an object has changed; should an object then refuse what is stored, those before it
have changed already, and the error names it.
"""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, runtime_checkable

from shardckpt.errors import MismatchError, OptionError, ShardckptError
from shardckpt.excerpt import excerpt
from shardckpt.state import PerProcess
from shardckpt.state.document import Branch, child, leaves_of
from shardckpt.state.flatten import StateOwner
from shardckpt.training.generators import Generators, inherited
from shardckpt.training.likeness import LEFT_OUT, StoredLeaves, mirror
from shardckpt.training.optimizer_forms import keyed_by_ints

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from shardckpt.format.structure import TensorRecord
    from shardckpt.layout.world import World
    from shardckpt.state.document import Node

__all__ = ["Stateful", "TrainState", "train_state"]

log = logging.getLogger("shardckpt")


@runtime_checkable
class Stateful(Protocol):
    """What has a state and takes it back, as torch's modules, optimizers and schedulers do."""

    def state_dict(self) -> Any:
        """The state: nested dicts, lists and tuples of tensors and small leaves."""

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Take such a state back; what it returns is not looked at."""


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
    **more: Any,
) -> TrainState:
    """Collect the objects of a training, so that `save` and `restore` take them all at once.

    Names in the checkpoint begin with the keyword: `model/blocks.0.weight`, `optimizer/state/blocks.0.weight/exp_avg`.
    They are the same whatever a module is wrapped in, so `restore(url, only="model/**")` finds them for inference, and
    another mesh or another order of parameter groups restores what belongs to each parameter.

    Args:
        model: a `torch.nn.Module`: plain, under DDP or `torch.compile`, of DTensors (FSDP2, tensor parallelism), or on a
            torch_xla device.
        optimizer: a `torch.optim.Optimizer` over parameters of the modules given here. One that has made no step
            needs none to be restored into.
        scheduler: a learning rate scheduler.
        scaler: a `GradScaler`.
        ema: averaged weights: `torch.optim.swa_utils.AveragedModel`, or anything with a `state_dict`.
        loader: a data loader with a `state_dict`, such as torchdata's `StatefulDataLoader`: every process stores its
            own. Where other than the number of processes that saved restore, say which state each one takes:
            `loader=PerProcess(loader, choose=lambda states: states[0])`.
        rng: whether the random number generators of Python, numpy, torch (CPU and CUDA) and torch_xla are part of it, of
            each process its own. Of other processes than saved, those with a number that saved take its generators,
            and the others derive theirs from process 0's and their number, or take over what all had in the same state
            (a warning in the log says so). "exact": that is a MismatchError.
        step: how far the training is; `state.step` from then on.
        metadata: anything storable, `state.metadata` from then on.
        **more: further objects: modules and optimizers by what they are, anything with `state_dict` and
            `load_state_dict`; wrapped in `PerProcess`, each process's own. Everything else is a value, stored as it is
            and found in `state.values` after restoring.

    Raises:
        OptionError: an object that has no state to save, by its keyword.
    """
    given = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler, "ema": ema, "loader": loader}
    given = {key: value for key, value in given.items() if value is not None}
    for key, value in given.items():
        _check_stateful(key, value.value if isinstance(value, PerProcess) else value)
    if "loader" in given and not isinstance(loader, PerProcess):
        given["loader"] = PerProcess(loader)
    if rng is not True and rng is not False and rng != "exact":
        raise OptionError(f'train_state(rng={excerpt(rng)}): give True, False or "exact".')
    values = {key: value for key, value in {"step": step, "metadata": metadata}.items() if value is not None}
    for key, value in more.items():
        stateful = isinstance(value.value if isinstance(value, PerProcess) else value, Stateful)
        (given if stateful else values)[key] = value
    return TrainState(given, values, rng=rng)


class TrainState(StateOwner):
    """The objects and values of one training; see `train_state`."""

    def __init__(self, objects: Mapping[str, Any], values: Mapping[str, Any], *, rng: bool | Literal["exact"]) -> None:
        """Take objects with a state, in `PerProcess` where each process has its own, and values that are stored as they are."""
        self._objects = {**objects, **({"rng": PerProcess(Generators())} if rng else {})}
        self._derives = rng is True
        """Whether a process without a counterpart makes generators of process 0's."""
        self.values = dict(values)
        """What is stored as it is, and replaced by restoring: `step`, `metadata`, and what else was given."""

    @property
    def step(self) -> int:
        """How far the training is: what was given, set or restored last."""
        if "step" not in self.values:
            raise AttributeError("this train_state has no step; give train_state(step=…), or set state.step.")
        step: int = self.values["step"]
        return step

    @step.setter
    def step(self, step: int) -> None:
        self.values["step"] = step

    @property
    def metadata(self) -> Mapping[str, Any]:
        """What was given, set or restored last."""
        metadata: Mapping[str, Any] = self.values.get("metadata", {})
        return metadata

    @metadata.setter
    def metadata(self, metadata: Mapping[str, Any]) -> None:
        self.values["metadata"] = metadata

    def state_dict(self) -> dict[str, Any]:
        """The state as plain containers, for saving. Tensors are the objects' own.

        Raises:
            LeafError: a module or optimizer whose tensors have no names.
        """
        return {**{key: part.collect() for key, part in self._parts().items()}, **self.values}

    def arranged(self, tree: Node, wanted: Callable[[str], bool]) -> Node:
        """A stored state in the form that `state_dict` has, where torch or DCP stored it in one of theirs.

        Args:
            tree: the stored state.
            wanted: whether a name is to be restored; an object of which nothing is asked for is not looked at.

        Raises:
            StructureMismatchError: an optimizer of other groups, with numbers for parameters.
        """
        if not isinstance(tree, Branch):
            return tree
        parts: Mapping[Any, _Part] = self._parts()
        children = [
            parts[key].arranged(node, tree) if key in parts and any(wanted(leaf.name) for leaf in leaves_of(node)) else node
            for key, node in zip(tree.keys, tree.children, strict=True)
        ]
        return replace(tree, children=children)

    def like(
        self, tree: Node, tensor: Callable[[str], TensorRecord], wanted: Callable[[str], bool], world: Callable[[], World]
    ) -> dict[str, Any]:
        """What to restore a stored state into, so that `load_state_dict` can take the result.

        Args:
            tree: the stored state, as `arranged`.
            tensor: the record of a tensor, by any of its names.
            wanted: whether a name is to be restored.
            world: which process this is, of how many; asked where other processes saved.

        Raises:
            OptionError: a part is asked for of an object that can only be put back whole.
        """
        stored = StoredLeaves(tensor, wanted)
        found: dict[str, Any] = {}
        for key, part in self._parts(world).items():
            node = child(tree, key)
            found[key] = part.collect() if node is None else part.like(stored, node)
        for key in dict.fromkeys((*self.values, "step", "metadata")):
            node = child(tree, key)
            if node is not None:
                found[key] = mirror(stored, node, self.values.get(key))
            elif key in self.values:
                found[key] = self.values[key]
        return {key: like for key, like in found.items() if like is not LEFT_OUT}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put a state back into the objects; what it lacks stays as it is.

        Args:
            state: what was restored into `like`, or what `state_dict` gave.

        Raises:
            MismatchError: an object refuses its state, by its keyword.
        """
        parts = {key: part for key, part in self._parts().items() if key in state}
        for key, part in sorted(parts.items(), key=lambda item: item[1].turn):
            try:
                part.put_back(state[key])
            except ShardckptError:
                raise
            except Exception as e:
                raise MismatchError(
                    f"{key} does not take back what was stored ({type(e).__name__}: {e}); make it as it was made for the save, or leave it "
                    f"out with only=. What else `like` holds may have been put back already."
                ) from e
        self.values |= {key: value for key, value in state.items() if key not in self._objects}

    def _parts(self, world: Callable[[], World] | None = None) -> dict[str, _Part]:
        """Every object, seen by its kind."""
        parts: dict[str, _Part] = {}
        if "torch" in sys.modules:
            from shardckpt.training.of_torch import of_torch

            parts.update(of_torch(self._objects))
        for key, of in self._objects.items():
            if isinstance(of, PerProcess):
                choose = _chosen(world) if isinstance(of.value, Generators) and self._derives and world else of.choose
                parts[key] = _Own(of.value, choose, last=isinstance(of.value, Generators), draws=key == "loader")
            elif key not in parts:
                parts[key] = _Whole(of)
        return {key: parts[key] for key in self._objects}

    def __repr__(self) -> str:
        """Its entries."""
        return f"<shardckpt.TrainState of {', '.join((*self._objects, *self.values))}>"


class _Part(Protocol):
    """An object with a state, as saving and restoring see it."""

    @property
    def turn(self) -> int:
        """When it is put back: those with lower numbers come first."""

    def collect(self) -> Any:
        """Its state, named for ever."""

    def arranged(self, node: Node, state: Node) -> Node:
        """What is stored of it in the form that `collect` makes.

        Args:
            node: what is stored of it.
            state: the whole stored state.
        """

    def like(self, stored: StoredLeaves, node: Node) -> Any:
        """What to restore a stored state into; `LEFT_OUT` where nothing of it is asked for."""

    def put_back(self, restored: Any) -> None:
        """Take the state back."""


@dataclass(frozen=True, slots=True)
class _Whole:
    """An object that takes its state back as a whole."""

    of: Stateful
    turn: ClassVar[int] = 2

    def collect(self) -> Any:
        return self.of.state_dict()

    def arranged(self, node: Node, _state: Node) -> Node:
        return keyed_by_ints(node, self.of.state_dict())

    def like(self, stored: StoredLeaves, node: Node) -> Any:
        return mirror(stored, node, self.of.state_dict()) if stored.all_or_nothing(node) else LEFT_OUT

    def put_back(self, restored: Any) -> None:
        self.of.load_state_dict(restored)


@dataclass(frozen=True, slots=True)
class _Own:
    """An object of which every process has its own."""

    of: Stateful
    choose: Callable[[list[Any]], Any] | None
    """The state for this process, where the processes that saved were others."""
    last: bool
    """Whether it is put back after all others: they may draw random numbers meanwhile."""
    draws: bool
    """Whether it draws some when it takes its place up again, which it does when it is asked where it is."""

    @property
    def turn(self) -> int:
        return 3 if self.last else 2

    def collect(self) -> Any:
        return PerProcess(self.of.state_dict(), self.choose)

    def arranged(self, node: Node, _state: Node) -> Node:
        return node

    def like(self, stored: StoredLeaves, node: Node) -> Any:
        return PerProcess(None, self.choose) if stored.all_or_nothing(node) else LEFT_OUT

    def put_back(self, restored: Any) -> None:
        self.of.load_state_dict(restored.value if isinstance(restored, PerProcess) else restored)
        if self.draws:
            self.of.state_dict()


def _chosen(world: Callable[[], World]) -> Callable[[list[Any]], Any]:
    """Whose generators a process takes, where other processes saved theirs."""

    def choose(states: list[Any]) -> Any:
        process = world().process
        if process < len(states):
            return states[process]
        log.warning(
            "rng: %d processes saved their random number generators, and process %d has no counterpart among them: where theirs were all "
            "in the same state, so are its own now; all others follow from those of process 0 and from its number.",
            len(states),
            process,
        )
        return inherited(states, process)

    return choose


def _check_stateful(key: str, value: object) -> None:
    if isinstance(value, Stateful):
        return
    advice = "use torchdata.stateful_dataloader.StatefulDataLoader" if key == "loader" else "give one that has, or wrap it in one"
    raise OptionError(f"train_state({key}=…): a {type(value).__qualname__} has no state_dict and load_state_dict; {advice}.")
