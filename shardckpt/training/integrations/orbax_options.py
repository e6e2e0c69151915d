"""Orbax's policies, options and `args` as those of shardckpt.

A policy or option that shardckpt lacks is refused by name.
"""

from __future__ import annotations

import dataclasses
import json
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Literal

import jax
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint import v1

from shardckpt.errors import OptionError
from shardckpt.frameworks.jax_keys import is_keys, keys_of, new_keys
from shardckpt.runs.retention import Retention, SavedStep
from shardckpt.state.listing import meanings
from shardckpt.state.names import component_names
from shardckpt.state.unflatten import unflatten
from shardckpt.training.policies import AtSteps, Continuous, OnPreemption, Policy, any_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from shardckpt.reading.checkpoint import Checkpoint

DEFAULT = "default"
"""The name of the item that a CheckpointManager saves without `args.Composite`."""
CUSTOM = "custom_metadata"
"""The name of the custom metadata in a state."""
Abstract = jax.ShapeDtypeStruct
_saving, _keeping = v1.training.save_decision_policies, v1.training.preservation_policies
_SAVED = (
    ocp.args.StandardSave,
    ocp.args.PyTreeSave,
    ocp.args.ArraySave,
    ocp.args.JsonSave,
    ocp.args.JaxRandomKeySave,
)
_RESTORED = (
    *(
        ocp.args.StandardRestore,
        ocp.args.PyTreeRestore,
        ocp.args.ArrayRestore,
        ocp.args.JsonRestore,
    ),
    ocp.args.JaxRandomKeyRestore,
)
_USED = frozenset(
    {
        "save_interval_steps",
        "save_on_steps",
        "save_decision_policy",
        "max_to_keep",
        "keep_period",
        "keep_time_interval",
        "best_fn",
    }
    | {
        "best_mode",
        "keep_checkpoints_without_metrics",
        "preservation_policy",
        "enable_async_checkpointing",
        "read_only",
    }
)
_NOT_NEEDED = frozenset(
    {
        "create",
        "cleanup_tmp_directories",
        "enable_background_delete",
        "num_deletion_threads",
        "save_root_metadata",
        "async_options",
    }
    | {
        "file_options",
        "single_host_load_and_broadcast",
        "lightweight_initialize",
        "enable_per_process_directory_creation",
    }
    | {
        "enable_should_save_is_saving_in_progress_check",
        "multiprocessing_options",
        "atomicity_options",
    }
)


@dataclasses.dataclass(frozen=True, slots=True)
class _Multiples(Policy):
    """Orbax's FixedIntervalPolicy: exactly the multiples, and step 0."""

    n: int

    def due(self, step: int, previous: int | None) -> bool:
        return step != previous and step % self.n == 0


@dataclasses.dataclass(frozen=True, slots=True)
class _First(Policy):
    """Orbax's InitialSavePolicy: the first step of a run without checkpoints."""

    steps: Callable[[], list[int]]

    def due(self, step: int, previous: int | None) -> bool:
        del step
        return previous is None and not self.steps()


def policy_of(given: Any, steps: Callable[[], list[int]]) -> Policy:  # noqa: PLR0911  (a return for each kind)
    """The policy of shardckpt that saves the same steps."""
    match given:
        case Policy():
            return given
        case _saving.FixedIntervalPolicy(interval=n):
            return _Multiples(n)
        case _saving.SpecificStepsPolicy(steps=steps):
            return AtSteps(steps)
        case _saving.InitialSavePolicy():
            return _First(steps)
        case _saving.ContinuousCheckpointingPolicy(minimum_interval_secs=None):
            return Continuous()
        case _saving.PreemptionCheckpointingPolicy():
            return OnPreemption()
        case _saving.AnySavePolicy(policies=policies):
            return any_of(*(policy_of(one, steps) for one in policies))
    raise OptionError(
        f"save_decision_policy: {given!r:.200} is not supported; give a policy of "
        "shardckpt.training.policies in its place."
    )


@dataclasses.dataclass(frozen=True, slots=True)
class KeptByOrbax(Retention):
    """A preservation policy of Orbax."""

    policy: Any

    def kept(self, steps: Sequence[SavedStep]) -> set[int]:
        """The steps that the policy preserves."""
        now = datetime.now(UTC)
        infos = [
            _Info(one.step, now - timedelta(seconds=one.age), dict(one.metrics) or None)
            for one in steps
        ]
        keeps = self.policy.should_preserve(infos, context=_keeping.PreservationContext())
        return {one.step for one, keep in zip(steps, keeps, strict=True) if keep}


@dataclasses.dataclass(frozen=True, slots=True)
class _Info:
    """A step, as Orbax's policies see it."""

    step: int
    time: datetime
    metrics: dict[str, float] | None


def without_placeholders(abstract: Any) -> Any:
    """An abstract state without placeholders.

    Raises:
        OptionError: Orbax's placeholder (`...`) is in it.
    """
    if any(leaf is ... for leaf in jax.tree.leaves(abstract)):
        raise OptionError(
            "the abstract state has placeholders (...); leave these entries out of it, and give "
            "only the rest."
        )
    return abstract


def retention_of(given: ocp.CheckpointManagerOptions) -> Retention | None:
    """The rule of Orbax's options: those of any of them are kept."""
    if given.preservation_policy is not None:
        return KeptByOrbax(given.preservation_policy)
    if given.max_to_keep is None:
        return None
    rules: list[Any] = []
    if given.best_fn is None:
        rules.append(_keeping.LatestN(given.max_to_keep))
    else:
        without = given.keep_checkpoints_without_metrics
        reverse = given.best_mode == "min"
        rules.append(
            _keeping.BestN(
                get_metric_fn=given.best_fn,
                reverse=reverse,
                n=given.max_to_keep,
                keep_checkpoints_without_metrics=without,
            )
        )
    if given.keep_period is not None:
        rules.append(_keeping.EveryNSteps(given.keep_period))
    if given.keep_time_interval is not None:
        rules.append(
            _keeping.EveryNSeconds(interval_secs=int(given.keep_time_interval.total_seconds()))
        )
    return KeptByOrbax(_keeping.AnyPreservationPolicy(rules))


def items_of(args: Any) -> dict[str, Any]:
    """The `args` of each item, by its name."""
    return dict(args.items()) if isinstance(args, ocp.args.Composite) else {DEFAULT: args}


def _refusal(name: str, args: Any, verb: Literal["save", "restore"]) -> OptionError:
    return OptionError(
        f"{verb}(args=…): {name!r} is a {type(args).__name__}, which is not supported; give "
        "Standard, PyTree, Array, Json or JaxRandomKey."
    )


def saved_value(name: str, args: Any) -> Any:
    """The value to save under a name."""
    if not isinstance(args, _SAVED):
        raise _refusal(name, args, "save")
    if getattr(args, "save_args", None) is not None:
        raise OptionError(
            f"save(args=…): {name!r} has save_args, which are not supported; give "
            "save_options=shardckpt.SaveOptions(…)."
        )
    if isinstance(args, ocp.args.JsonSave):
        try:
            return json.loads(json.dumps(args.item))
        except (TypeError, ValueError) as error:
            raise OptionError(
                f"save(args=…): {name!r} is a JsonSave of what JSON does not have ({error}); give "
                "StandardSave."
            ) from error
    return args.item


def check_items(items: Mapping[str, Any]) -> None:
    """Raise OptionError if an item's name is reserved, or if JAX cannot sort an item's keys.

    An item with such keys could not be restored.
    """
    for name, item in items.items():
        if name == CUSTOM:
            raise OptionError(f"{name!r} is a reserved name; give the item another name.")
        try:
            jax.tree.structure(item)
        except ValueError as error:
            raise OptionError(
                f"{name!r} has a dict whose keys JAX cannot sort; give it keys of one type."
            ) from error


def abstract_items(checkpoint: Checkpoint) -> dict[str, Any]:
    """The items of a step: `Abstract` in the place of arrays and of random keys.

    Raises:
        OptionError: JAX has no such generator of random keys.
    """
    infos = {name: checkpoint.info(name) for name in checkpoint.names()}
    shapes: dict[str, Any] = {
        name: Abstract(info.shape, info.dtype.numpy) for name, info in infos.items()
    }
    for name, meaning in meanings(checkpoint.parsed_tree).items():
        if name in shapes and meaning.startswith("jax.key:"):
            keys = new_keys(meaning, infos[name].shape)
            if keys is None:
                raise OptionError(
                    f"{checkpoint.location}: {name} has random keys ({meaning}) of a generator "
                    "that JAX lacks; define it first."
                )
            shapes[name] = keys
    items: dict[str, Any] = unflatten(checkpoint.parsed_tree, shapes)
    return items


def with_keys(abstract: Any, restored: Any) -> Any:
    """A restored item in which the words of random keys are keys again."""

    def whole(of: Any, value: Any) -> Any:
        return (
            keys_of(jax.numpy.asarray(value), of.dtype)
            if isinstance(of, Abstract) and is_keys(of)
            else value
        )

    return jax.tree.map(whole, abstract, restored)


def below(items: Iterable[str]) -> Callable[[str], bool]:
    """A function that selects the names of the items and of what is in them."""
    roots = component_names(list(items))
    return lambda name: any(name == root or name.startswith(f"{root}/") for root in roots)


_REFUSED = (
    *("transforms", "legacy_transform_fn", "partial_restore"),
    *("support_layout", "fallback_sharding"),
)
"""Fields of Orbax's `args` of restores that are refused."""


def restore_target(name: str, args: Any) -> Any:
    """The abstract value to restore under a name; None: as stored."""
    if not isinstance(args, _RESTORED):
        raise _refusal(name, args, "restore")
    odd = [key for key in _REFUSED if getattr(args, key, None)]
    if not getattr(args, "strict", True):
        odd.append("strict=False")
    if odd:
        raise OptionError(
            f"restore(args=…): {name!r} has {odd[0]}, which is not supported; see "
            "shardckpt.restore(rename=…, only=…, fit=…)."
        )
    item, restore_args = (
        without_placeholders(getattr(args, "item", None)),
        getattr(args, "restore_args", None),
    )
    if restore_args is None:
        return item
    if item is None:
        raise OptionError(
            f"restore(args=…): {name!r} has restore_args without an item; give the abstract state "
            "as the item."
        )
    return jax.tree.map(lambda leaf, of: _leaf_target(name, leaf, of), item, restore_args)


def _leaf_target(name: str, leaf: Any, of: ocp.RestoreArgs) -> Any:
    """The abstract value of a leaf, changed as its `restore_args` say.

    Raises:
        OptionError: a field of the `restore_args` that is not supported, by name.
    """
    sharding = getattr(of, "sharding", None)
    if sharding is None and getattr(of, "mesh", None) is not None:
        sharding = jax.sharding.NamedSharding(of.mesh, of.mesh_axes)
    is_array, kind = hasattr(leaf, "shape"), of.restore_type
    kinds = (None, type(leaf), jax.Array, np.ndarray) if is_array else (None, type(leaf))
    supported = {
        "strict": getattr(of, "strict", True),
        "global_shape": getattr(of, "global_shape", None) in (None, getattr(leaf, "shape", None)),
        "sharding": sharding is None or (is_array and isinstance(sharding, jax.sharding.Sharding)),
        "dtype": is_array or of.dtype is None,
        "restore_type": kind in kinds,
    }
    if odd := [field for field, is_supported in supported.items() if not is_supported]:
        raise OptionError(
            f"restore(args=…): {name!r} has restore_args with {odd[0]}="
            f"{getattr(of, odd[0], None)!r:.100} for a {type(leaf).__name__}, which is not "
            "supported; leave it out, and give the item the value that you need."
        )
    if not is_array:
        return leaf
    dtype = leaf.dtype if of.dtype is None else of.dtype
    if sharding is None and dtype == leaf.dtype and kind in (None, type(leaf)):
        return leaf
    if kind is np.ndarray or (kind is sharding is None and isinstance(leaf, np.ndarray)):
        return np.empty(leaf.shape, dtype)
    sharding = getattr(leaf, "sharding", None) if sharding is None else sharding
    return Abstract(leaf.shape, dtype, sharding=sharding)


def check_options(given: ocp.CheckpointManagerOptions) -> None:
    """Raise OptionError if an option is given that is not supported."""
    plain = ocp.CheckpointManagerOptions()
    for field in dataclasses.fields(given):
        if field.name not in _USED | _NOT_NEEDED and getattr(given, field.name) != getattr(
            plain, field.name
        ):
            raise OptionError(
                f"CheckpointManagerOptions({field.name}=…) is not supported; leave it out."
            )


def decision_of(given: ocp.CheckpointManagerOptions) -> Any:
    """The policy of Orbax's options, or a default one.

    The default saves at the multiples of an interval, at given steps, and before the job is
    stopped.
    """
    if given.save_decision_policy is not None:
        return given.save_decision_policy
    return any_of(
        _Multiples(given.save_interval_steps), AtSteps(given.save_on_steps or ()), OnPreemption()
    )
