"""torch.distributed.checkpoint through shardckpt.

`dcp.save` and `dcp.load` of an existing script store shardckpt's format.

    dcp.save(state, storage_writer=StorageWriter("gs://bucket/run/100"))
    dcp.load(state, storage_reader=StorageReader("gs://bucket/run/100"))

Saving
1. DCP flattens the state, plans, and lets the processes communicate, as it always does.
2. `write_data` rebuilds the nested state (DCP has turned keys into text and dropped empty
   containers) and passes it to `shardckpt.save`. The result is an ordinary checkpoint, with every
   tensor's layout.
3. Values that DCP would pickle must be plain: leaves that shardckpt stores, in lists, tuples and
   dicts. Anything else is refused by name.

Loading
1. DCP's own function flattens the stored tree, with a placeholder for each tensor. So a checkpoint
   that `shardckpt.save` made of the same state has the same names.
2. DCP sees every tensor as one chunk. Its planner then asks for boxes of complete tensors: exactly
   the chunks that these boxes touch are read, each once, into place.
3. A dtype that differs is an error, where DCP's own readers convert silently. A tensor in the place
   of a plain value is one, too.

DCP raises a `CheckpointException` on all ranks; the `ShardckptError`s are in its `failures`, by
rank.
"""

from __future__ import annotations

import io
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint._nested_dict import flatten_state_dict, unflatten_state_dict
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType
from torch.distributed.checkpoint.storage import StorageReader as _StorageReader
from torch.distributed.checkpoint.storage import StorageWriter as _StorageWriter
from torch.futures import Future

from shardckpt.errors import (
    LeafError,
    OptionError,
    ReplacedError,
    ShardckptError,
    StructureMismatchError,
)
from shardckpt.frameworks.coordination import Coordinator, check_coordinator, coordinator_of
from shardckpt.io.store import Store
from shardckpt.io.url import parse
from shardckpt.options import checked_options
from shardckpt.reading.checkpoint import Checkpoint
from shardckpt.reading.restoring.filling import fill
from shardckpt.reading.restoring.process_values import chosen_values
from shardckpt.state.names import shown
from shardckpt.state.per_process import PerProcess
from shardckpt.training.integrations.dcp_contents import DcpContents, DcpOwned
from shardckpt.training.integrations.plain import plain
from shardckpt.writing.attempt import Attempt
from shardckpt.writing.save import save

if TYPE_CHECKING:
    import os

    from torch.distributed.checkpoint.planner import (
        LoadPlan,
        LoadPlanner,
        ReadItem,
        SavePlan,
        SavePlanner,
    )
    from torch.distributed.checkpoint.storage import WriteResult

    from shardckpt.frameworks.base import Sink
    from shardckpt.options import SaveOptions

__all__ = ["StorageReader", "StorageWriter"]

_CHANGES_VALUES = ("create_local_plan", "lookup_object", "resolve_data", "transform_object")
"""Methods of DCP's planner; an overridden one could store something other than the planner's
flattened state."""


class StorageWriter(_StorageWriter):  # type: ignore[misc]  # torch is not followed
    """Stores the states that `torch.distributed.checkpoint.save` or `async_save` saves."""

    def __init__(
        self,
        url: str | os.PathLike[str] | None = None,
        *,
        options: SaveOptions | None = None,
        coordinator: Coordinator | None = None,
    ) -> None:
        """Store at `url`, or at the `checkpoint_id` passed to a save.

        Args:
            url: as for `shardckpt.save`.
            options: as for `shardckpt.save`. DCP by default replaces an existing checkpoint; here
                `overwrite=True` does.
            coordinator: a coordinator of the saving processes, where these are not all processes of
                the job (`process_group=…`).

        Raises:
            OptionError, UrlError: an argument is invalid.
        """
        check_coordinator(coordinator)
        self.url = _check(url)
        self._options = checked_options(options)
        self._coordinator = coordinator
        self._together = True

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a new checkpoint, at `checkpoint_id` if given."""
        if checkpoint_id is not None:
            self.url = _check(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: ARG002 - DCP's signature
        """Note whether the processes plan together (`use_collectives`)."""
        _require_url(self.url)
        self._together = kwargs.get("use_collectives", True)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Check that the saving processes are all processes that the commit waits for.

        Raises:
            OptionError: not all processes of the job save.
        """
        # Only torch's knowledge is used: the other processes wait for this one here, and cannot
        # agree on a coordinator.
        known = distributed.get_world_size() if distributed.is_initialized() else 1
        job = known if self._coordinator is None else self._coordinator.world.processes
        if self._together and len(plans) != job:
            raise OptionError(
                f"{self.url}: only {len(plans)} of the job's {job} processes save "
                "(process_group=…, or no_dist=True); give a shardckpt.Coordinator of just these, "
                "StorageWriter(coordinator=…), or let all of them save."
            )
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:  # noqa: ARG002 - DCP's signature
        """Save the planner's state; on return the checkpoint is committed, and all processes know.

        Raises:
            OptionError: a planner that would save something other than its state.
            LeafError: a value that DCP would pickle, by name; or as in `shardckpt.save`.
            AlreadyExistsError, CommitError, StorageError: as in `shardckpt.save`.
        """
        url, coordinator = (
            _require_url(self.url),
            coordinator_of(self._coordinator, self._options.commit_timeout),
        )
        try:
            state = _state_of(planner)
        except Exception as e:
            # The others are saving already: report the failure to them, so that all processes count
            # the attempt.
            Attempt(Store.open(parse(url)), coordinator, self._options).give_up(e)
            raise
        save(url, state, options=self._options, coordinator=coordinator)
        done: Future[list[WriteResult]] = Future()
        done.set_result([])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Do nothing: the checkpoint's own record is written already."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether the id is a place that shardckpt can store to."""
        return _is_url(checkpoint_id)


def _state_of(planner: SavePlanner) -> dict[str, Any]:
    """The nested state that a planner saves, checked to hold nothing that DCP would pickle."""
    changed = [
        m
        for m in _CHANGES_VALUES
        if getattr(type(planner), m, None) is not getattr(DefaultSavePlanner, m)
    ]
    if changed:
        raise OptionError(
            f"The planner {type(planner).__qualname__} overrides {changed[0]}, so it could save "
            "something other than its state; change the state before the save, or in "
            "set_up_planner of a DefaultSavePlanner."
        )
    flat, paths = planner.state_dict, planner.mappings
    if not planner.flatten_state_dict:
        flat, paths = flatten_state_dict(flat)
    for name, value in flat.items():
        if not isinstance(value, torch.Tensor | PerProcess):
            plain(value, name, tensors=False)
    nested: dict[str, Any] = unflatten_state_dict(flat, paths)
    odd = sorted(flatten_state_dict(nested)[0].keys() ^ flat.keys())
    if odd:
        raise LeafError(
            f"{shown(odd[0])} is, or is in, a list with an empty dict. DCP drops the empty dict, "
            "and the other items move; remove the empty dict, or make the list a dict."
        )
    return nested


class StorageReader(_StorageReader):  # type: ignore[misc]  # torch is not followed
    """Reads tensors and values for `torch.distributed.checkpoint.load`.

    It reads those that the load requests, from any shardckpt checkpoint.
    """

    def __init__(
        self, url: str | os.PathLike[str] | None = None, *, coordinator: Coordinator | None = None
    ) -> None:
        """Read from `url`, or from the `checkpoint_id` passed to a load.

        Args:
            url: as for `shardckpt.restore`.
            coordinator: gives the number of this process, for `PerProcess` values; detected by
                default.

        Raises:
            OptionError, UrlError: an argument is invalid.
        """
        check_coordinator(coordinator)
        self.url = _check(url)
        self._coordinator = coordinator
        self._contents: DcpContents | ShardckptError | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin to load another checkpoint, from `checkpoint_id` if given."""
        if checkpoint_id is not None:
            self.url = _check(checkpoint_id)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:  # noqa: ARG002 - DCP's signature
        """The contents under DCP's names.

        Errors are raised later, because DCP ignores exceptions of this method.
        """
        try:
            self._contents = DcpContents(Checkpoint(_require_url(self.url)))
            return self._contents.metadata()
        except ShardckptError as e:
            self._contents = e
            return Metadata({})

    def set_up_storage_reader(
        self,
        metadata: Metadata,  # noqa: ARG002
        is_coordinator: bool,  # noqa: ARG002
        *args: Any,  # noqa: ARG002
        **kwargs: Any,  # noqa: ARG002 - DCP's signature
    ) -> None:
        """Raise the error of `read_metadata`, if there was one.

        Raises:
            NotFoundError, FormatError: no checkpoint, or none that can be read.
            NamesMismatchError: DCP uses one name for two stored names.
            DtypeError: a dtype that torch lacks, by name.
        """
        self._open_contents()

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Note in the plan which checkpoint this process has opened."""
        record = self._open_contents().checkpoint.record
        return replace(plan, storage_data=(record.attempt, record.hosts[0].sha256))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Check that all processes have opened the same checkpoint.

        Raises:
            ReplacedError: it was replaced before all processes had opened it.
        """
        if len({plan.storage_data for plan in plans}) > 1:
            raise ReplacedError(
                f"{self.url}: the checkpoint was replaced while the processes opened it; load it "
                "again."
            )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the requested tensors, and pass the plain values to the planner.

        Raises:
            ShapeMismatchError, DtypeMismatchError, StructureMismatchError: not as stored, by name;
            nothing was read.
            LeafError: a tensor that cannot be filled, by name; nothing was read.
            MismatchError: a `PerProcess` value that other processes saved.
            ReplacedError: the checkpoint was replaced or deleted while it was being read.
            CorruptionError: stored bytes are damaged or missing; tensors are then undefined.
        """
        contents = self._open_contents()
        values = [
            (item, self._value(contents, item, planner))
            for item in plan.items
            if item.type is LoadItemType.BYTE_IO
        ]
        places: dict[str, list[tuple[str, Sink]]] = {}
        filled = []
        for item in plan.items:
            if item.type is LoadItemType.TENSOR:
                tensor = planner.resolve_tensor(item)
                filled.append((item, tensor))
                stored, sink = contents.sink(item, tensor, key=len(filled))
                if sink is not None:
                    places.setdefault(stored, []).append((item.dest_index.fqn, sink))
        fill(contents.checkpoint, places)
        for item, tensor in filled:
            planner.commit_tensor(item, tensor)
        for item, value in values:
            planner.load_bytes(item, value)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether the id is a place that shardckpt can read from."""
        return _is_url(checkpoint_id)

    def _open_contents(self) -> DcpContents:
        if isinstance(self._contents, ShardckptError):
            raise self._contents
        assert self._contents is not None, "DCP reads the metadata first"
        return self._contents

    def _value(self, contents: DcpContents, item: ReadItem, planner: LoadPlanner) -> io.BytesIO:
        """A plain value, pickled for the planner, which unpickles it.

        The pickle exists in memory only and is never stored.
        """
        value, name = contents.value(item.storage_index.fqn), item.dest_index.fqn
        held = getattr(planner, "state_dict", {}).get(name)
        if isinstance(held, torch.Tensor):
            raise StructureMismatchError(
                f"{shown(name)} is not a tensor in {contents.checkpoint.location}, but a "
                f"{type(held).__qualname__} in the state to load; put a plain value there, or "
                "leave it out."
            )
        if isinstance(value, DcpOwned):
            value = PerProcess(
                chosen_values(
                    contents.checkpoint, {value.name: PerProcess(None)}, self._coordinator
                )[value.name]
            )
        handed = io.BytesIO()
        torch.save(value, handed)
        handed.seek(0)
        return handed


def _check(url: str | os.PathLike[str] | None) -> str | os.PathLike[str] | None:
    """Check that a url is a valid place, before any process waits for another one."""
    if url is not None:
        parse(url)
    return url


def _require_url(url: str | os.PathLike[str] | None) -> str | os.PathLike[str]:
    if url is None:
        raise OptionError(
            "no url to save to or load from; give one to StorageWriter or StorageReader, or give "
            "checkpoint_id=…."
        )
    return url


def _is_url(checkpoint_id: str | os.PathLike[str]) -> bool:
    try:
        parse(checkpoint_id)
    except ShardckptError:
        return False
    return True
