"""vLLM's weight-transfer engine: it brings the versions of a publisher to a running engine.

    worker = "shardckpt.views.vllm_follow.FollowWorker"
    llm = LLM(
        model, weight_transfer_config={"backend": "shardckpt"}, worker_extension_cls=worker
    )
    init_info = {"url": "gs://bucket/policy", "options": {"include": "model/**", …}}
    llm.init_weight_transfer_engine({"init_info": init_info})
    step = next_version(llm)  # prepare, start_weight_update, update_weights, finish_weight_update

1. A rehearsal: the model's own `load_weights` is called once with placeholders, while the model's
   parameters are those of before any repacking, on the meta device (vLLM keeps their description).
   The copies that it makes are the boxes that this rank needs.
2. `prepare` reads the chunks of these boxes in a thread, while the engine serves: of later
   versions, only the differences.
3. `update_weights` loads them through vLLM's layerwise reload, which repacks each layer and copies
   it to where it was. The elements come from memory. All ranks have prepared the version, or none
   loads it.
4. `prove` compares what the loader was given with the publisher's fingerprint.
"""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed import get_world_group
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import restore_layer_on_meta, to_meta_tensor
from vllm.model_executor.model_loader.reload.types import LayerReloadingInfo

from shardckpt.commit.attempts import unfolded
from shardckpt.errors import OptionError, ReplacedError, by_code, error_document
from shardckpt.frameworks.coordination import SingleProcess
from shardckpt.versions.cache import chunks_of
from shardckpt.versions.follower import Follower
from shardckpt.views.model_view import ModelView
from shardckpt.views.placeholders import Recorder
from shardckpt.views.proof import ReadProof
from shardckpt.views.vllm_plugin import NAME, load_weights, of_all_ranks, refuse_models

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn

    from shardckpt.layout.box import Box
    from shardckpt.reading.checkpoint import Checkpoint
    from shardckpt.versions.cache import Needed
    from shardckpt.versions.follower import FollowedVersion

    Forms = list[tuple[str, tuple[int, ...], str]]

T = TypeVar("T")
_PAUSE = 0.02
"""Seconds between two questions whether a version is prepared."""


@dataclass
class FollowInit(WeightTransferInitInfo):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """The argument of `init_weight_transfer_engine`."""

    url: str
    """The place of all versions of a `Publisher`."""
    options: dict[str, Any] = field(default_factory=dict)
    """`include`, `strip_prefix`, `mapping` and other options of `safetensors_view` that choose and
    name tensors as the model does."""


@dataclass
class FollowUpdate(WeightTransferUpdateInfo):  # type: ignore[misc]
    """The argument of `update_weights`."""

    step: int | None = None
    """The version; None: the one that is prepared, or else the newest."""


class _ModelFollower(Follower):
    """Follows the boxes that a rank of a model needs."""

    def __init__(self, info: FollowInit) -> None:
        super().__init__(info.url, None, coordinator=SingleProcess())
        self.options = info.options
        self.forms: Forms = []
        """Name, shape and dtype of the tensors, for which the boxes hold."""
        self.boxes: set[tuple[int, Box]] = set()
        """Position in `ModelView.arrays()` and box."""
        self.changes_tensors = False
        """See `Recorder.changes_tensors`."""

    def take_back(self) -> None:
        """Let `poll` give the version given last once more."""
        self._finder.take_back()

    def view(self, checkpoint: Checkpoint) -> ModelView:
        """The model's files as a version has them."""
        return ModelView(checkpoint, **self.options)

    def needed(self, checkpoint: Checkpoint) -> list[Needed]:
        """See `Follower`."""
        return chunks_of(self.view(checkpoint).requests(self.boxes))


class FollowEngine(WeightTransferEngine[FollowInit, FollowUpdate]):  # type: ignore[misc]
    """One worker's side; see the module."""

    init_info_cls = FollowInit
    update_info_cls = FollowUpdate
    supports_draft_weight_update = False

    _follower: _ModelFollower | None = None
    _version: FollowedVersion | None = None
    """The version that is prepared, or being prepared, and not applied yet."""
    _reading: threading.Thread | None = None
    _failed: Exception | None = None
    """The error because of which the version is not prepared."""
    _applied: tuple[FollowedVersion, ModelView, ReadProof] | None = None
    _is_broken = False
    """Whether an update has failed while it changed the model."""

    def init_transfer_engine(self, init_info: FollowInit) -> None:
        """Follow the versions at a url; nothing is read yet.

        Raises:
            OptionError: the model is quantised, or needs weights of a second model.
            UrlError: the url is invalid.
        """
        refuse_models(init_info.url, self.model, self.model_config)
        self.shutdown()
        self._follower = _ModelFollower(init_info)

    def prepare(self, step: int | None = None) -> int | None:
        """Begin to read a version in a thread; all ranks call it.

        Args:
            step: the version; None: the newest, if it is not the one of the last update.

        Returns:
            The step; None if there is no other version.

        Raises:
            OptionError: the engine is not initialised.
            NotFoundError: there is no such version.
            NamesMismatchError: the model does not take its tensors, or needs others.
            StorageError: the place cannot be listed.
        """
        follower = self._check_on_all_ranks()
        chosen = self._choose(follower, step, newest=True)
        if chosen is not None:
            self._begin(follower, *chosen)
        return None if chosen is None else chosen[0]

    def _check(self) -> _ModelFollower:
        if self._follower is None:
            raise OptionError(
                f'{NAME}: call init_weight_transfer_engine({{"init_info": {{"url": …}}}}) first.'
            )
        if self._is_broken:
            raise OptionError(
                f"{self._follower.root}: an earlier update failed while it changed this engine's "
                "weights; start vLLM again."
            )
        return self._follower

    def _check_on_all_ranks(self) -> _ModelFollower:
        _on_all_ranks(NAME, lambda: bool(self._check()))
        return self._check()

    def _choose(
        self, follower: _ModelFollower, step: int | None, *, newest: bool
    ) -> tuple[int, bool] | None:
        """Step of the version to load next, and whether it was found just now.

        The first rank decides this, and all ranks call the method.

        Args:
            follower: finds versions.
            step: the version; None: the first rank looks.
            newest: whether to look for a newer one than the one that is prepared.
        """

        def choose() -> tuple[int, bool] | None:
            if step is not None:
                return step, False
            if get_world_group().rank_in_group > 0:
                return None
            look = self._version is None or (newest and not self._is_reading())
            newer = follower.poll() if look else None
            version = newer or self._version
            return None if version is None else (version.step, newer is not None)

        return _on_all_ranks(f"{follower.root}: no version was found", choose)[0]

    def _begin(self, follower: _ModelFollower, step: int, is_new: bool) -> None:
        """Begin to prepare a version, unless it is prepared or being prepared."""
        if (
            self._version is not None
            and self._version.step == step
            and self._failed is None
            and not is_new
        ):
            return
        self._join()
        try:
            version = follower.at(step)
            self._rehearse(follower, version.checkpoint)
        except BaseException:
            if is_new:
                follower.take_back()
            raise
        self._version, self._failed = version, None
        self._reading = threading.Thread(
            target=self._prepare, args=(version,), name="shardckpt-prepare", daemon=True
        )
        self._reading.start()

    def _is_reading(self) -> bool:
        return self._reading is not None and self._reading.is_alive()

    def _rehearse(self, follower: _ModelFollower, checkpoint: Checkpoint) -> None:
        """Learn which boxes this rank's parameters need."""
        view = follower.view(checkpoint)
        forms = [(array.name, array.shape, array.dtype_name) for array in view.arrays()]
        if forms == follower.forms:
            return
        where, recorder = str(checkpoint.location), Recorder(view)
        advice = 'init_info, as in {"options": {"include": "model/**", "strip_prefix": "model/"}}'
        with set_current_vllm_config(self.vllm_config), _unpack(self.model):
            load_weights(where, self.model, recorder, advice)
        follower.forms, follower.boxes = forms, recorder.boxes
        follower.changes_tensors = recorder.changes_tensors

    def _prepare(self, version: FollowedVersion) -> None:
        try:
            version.prepare()
        except Exception as e:  # noqa: BLE001  (raised by `is_ready` and `update_weights`)
            self._failed = e

    def is_ready(self) -> bool:
        """Whether the version is prepared.

        Raises:
            CorruptionError, MissingDataError, ReplacedError, StorageError: it could not be read.
        """
        if self._is_reading():
            return False
        self._join()
        if self._failed is not None:
            raise self._failed
        return self._version is not None

    def _join(self) -> None:
        if self._reading is not None:
            self._reading.join()
            self._reading = None

    def start_weight_update(self) -> None:
        """Check that the engine can follow.

        The model stays as it is until all ranks have what they need.
        """
        self._check()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load the prepared version, or prepare it first; all ranks call it."""
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: FollowUpdate) -> None:
        """See `update_weights`.

        Raises:
            OptionError: there is no version; or an earlier update failed while it changed the
                model.
            CorruptionError, MissingDataError, StorageError: a rank could not prepare it; all keep
                what they have.
            ReplacedError: the same, or the version was replaced while the ranks opened it.
        """
        follower = self._check_on_all_ranks()
        chosen = self._choose(follower, update_info.step, newest=False)

        def prepared() -> str | None:
            if chosen is None:
                raise OptionError(
                    f"{follower.root}: there is no version other than the one that this engine has."
                )
            self._begin(follower, *chosen)
            self._join()
            self.is_ready()
            assert self._version is not None
            return unfolded(self._version.checkpoint.record.attempt)

        attempts = _on_all_ranks(f"{follower.root}: the version could not be prepared", prepared)
        version = self._version
        self._version = None
        assert version is not None
        if len({*attempts}) > 1:
            follower.take_back()
            raise ReplacedError(
                f"{version.checkpoint.location}: the version was replaced while the ranks opened "
                "it; all keep what they have. Ask for the next version."
            )
        view = follower.view(version.checkpoint)
        proof = ReadProof(view)
        recorder = Recorder(view, proof.add, copy_at_once=True)
        self._applied, self._is_broken = None, True

        def load() -> None:
            with version.reading():
                initialize_layerwise_reload(self.model)
                recorder.run(partial(self._reload, follower, recorder))

        _on_all_ranks(f"{version.checkpoint.location}: the version could not be loaded", load)
        self._is_broken = False
        self._applied = version, view, proof

    def _reload(
        self,
        follower: _ModelFollower,
        recorder: Recorder,
        tensors: Iterator[tuple[str, torch.Tensor]],
    ) -> None:
        """Call the model's `load_weights`, once: vLLM counts the elements that each layer got.

        A model that changed placeholders in the rehearsal gets tensors.
        """
        if recorder.changes_tensors:
            raise OptionError(
                f"{follower.root}: the model changes a tensor in place, which it did not in the "
                "rehearsal; start vLLM again."
            )
        if follower.changes_tensors:
            tensors = ((name, placeholder.clone()) for name, placeholder in tensors)
        self.model.load_weights(tensors)
        finalize_layerwise_reload(self.model, self.model_config)

    def finish_weight_update(self) -> None:
        """Nothing: `update_weights` has finished it."""

    def prove(self) -> dict[str, Any]:
        """Compare what the model's loader was given, and copied, with the publisher's fingerprint.

        All ranks call it.

        Returns:
            `step`; `proved`, the stored names of the tensors that all ranks together got
            completely, in the stored dtype, as published; and `not_proved`, all others: converted
            or merged by an option, read in part, or without a fingerprint.

        Raises:
            CorruptionError: a tensor's elements are not those of the version; names it.
            OptionError: no version was loaded.
        """
        if self._applied is None:
            raise OptionError(f"{NAME}: no version was loaded; call update_weights first.")
        version, view, proof = self._applied
        proved = proof.check(of_all_ranks(proof.parts))
        return {
            "step": version.step,
            "proved": proved,
            "not_proved": [name for name in view.sources if name not in set(proved)],
        }

    def shutdown(self) -> None:
        """Wait for the thread, and free the memory."""
        self._join()
        if self._follower is not None:
            self._follower.close()
        self._follower = self._version = self._failed = self._applied = None


def _on_all_ranks(failing: str, act: Callable[[], T]) -> list[T]:
    """The results of a call that all ranks make, by rank.

    If it fails on one, an error of the same class is raised on all.

    Args:
        failing: begins the message on the other ranks.
        act: the call.
    """
    result: T | None = None
    failed: Exception | None = None
    try:
        result = act()
    except Exception as e:  # noqa: BLE001  (raised below, after the others know)
        failed = e
    outcomes = of_all_ranks((result, None if failed is None else error_document(failed)))
    if failed is not None:
        raise failed
    for failure in (failure for _, failure in outcomes if failure is not None):
        raise by_code(failure["code"])(f"{failing}, on another rank: {failure['message']}")
    return [cast("T", result) for result, _ in outcomes]


@contextmanager
def _unpack(model: nn.Module) -> Iterator[None]:
    """A context in which a model's parameters are those that its loader fills, on device meta."""
    kept = [
        (layer, dict(vars(layer)), dict(layer._parameters), dict(layer._buffers))  # noqa: SLF001
        for layer in model.modules()
    ]
    unsaved = [{*layer._non_persistent_buffers_set} for layer, *_ in kept]  # noqa: SLF001
    try:
        for layer, *_ in kept:
            known = get_layerwise_info(layer)
            copies = tuple(
                {name: to_meta_tensor(tensor) for name, tensor in tensors.items()}
                for tensors in known.restore_metadata
            )
            restore_layer_on_meta(
                layer,
                LayerReloadingInfo(restore_metadata=copies, restore_device=known.restore_device),
            )
        yield
    finally:
        for (layer, attributes, parameters, buffers), names in zip(kept, unsaved, strict=True):
            vars(layer).clear()
            vars(layer).update(attributes)
            for own, before in ((layer._parameters, parameters), (layer._buffers, buffers)):  # noqa: SLF001
                own.clear()
                own.update(before)
            layer._non_persistent_buffers_set.clear()  # noqa: SLF001
            layer._non_persistent_buffers_set.update(names)  # noqa: SLF001


class FollowWorker:
    """Methods of vLLM's workers, for `collective_rpc`: give this as `worker_extension_cls`."""

    weight_transfer_engine: Any

    def shardckpt_prepare(self, step: int | None = None) -> int | None:
        """See `FollowEngine.prepare`."""
        return _engine(self).prepare(step)

    def shardckpt_ready(self) -> bool:
        """See `FollowEngine.is_ready`."""
        return _engine(self).is_ready()

    def shardckpt_prove(self) -> dict[str, Any]:
        """See `FollowEngine.prove`."""
        return _engine(self).prove()


def _engine(worker: FollowWorker) -> FollowEngine:
    engine = worker.weight_transfer_engine
    if not isinstance(engine, FollowEngine):
        raise OptionError(
            f'{NAME}: start vLLM with weight_transfer_config={{"backend": "{NAME}"}}.'
        )
    return engine


def next_version(llm: Any) -> int | None:
    """Bring an `LLM` to the newest version, and set its `weight_version`.

    Requests that run meanwhile finish first.

    Args:
        llm: a `vllm.LLM` with `worker_extension_cls` and `weight_transfer_config` as above, whose
            weight-transfer engine is initialised.

    Returns:
        The step; None if there is no other version than the one it has.

    Raises:
        Exception: as vLLM passes on the errors of its workers.
    """
    step = llm.collective_rpc("shardckpt_prepare")[0]
    if step is None:
        return None
    while not all(llm.collective_rpc("shardckpt_ready")):
        time.sleep(_PAUSE)
    llm.start_weight_update()
    llm.update_weights({"update_info": {"step": step}})
    llm.finish_weight_update(weight_version=str(step))
    llm.reset_prefix_cache()  # its entries are of the old weights
    return int(step)
