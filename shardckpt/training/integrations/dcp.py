"""torch.distributed.checkpoint through shardckpt: how do `dcp.save` and `dcp.load` of an existing script store through us?

    dcp.save(state, storage_writer=StorageWriter("gs://bucket/run/100"))
    dcp.load(state, storage_reader=StorageReader("gs://bucket/run/100"))

Saving
1. DCP flattens the state, plans, and lets the processes talk, as it always does.
2. `write_data` puts the flattened state together again (keys are text then, and empty containers are gone: that is DCP's
   doing) and hands it to `shardckpt.save`. What is stored is a checkpoint as any other, with every tensor's layout.
3. What DCP would pickle must be plain: leaves that shardckpt stores, in lists, tuples and dicts. All else is refused by name.

Loading
1. The stored tree is flattened by DCP's own function, with something in the place of each tensor. So a checkpoint that
   `shardckpt.save` made of the same state is found under the same names.
2. DCP is told that every tensor is one chunk. What its planner then asks for are boxes of whole tensors: exactly the chunks
   that they touch are read, each once, into place.
3. A dtype that differs is an error, where DCP's own readers convert silently. So is a tensor in the place of a plain value.

DCP raises a `CheckpointException` on all ranks; the `ShardckptError`s are in its `failures`, by rank.
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

from shardckpt.errors import LeafError, OptionError, ReplacedError, ShardckptError, StructureMismatchError
from shardckpt.frameworks.coordination import Coordinator, check_coordinator
from shardckpt.frameworks.per_process import PerProcess
from shardckpt.io.store import Store
from shardckpt.io.url import parse
from shardckpt.options import checked_options
from shardckpt.reading.checkpoint import Checkpoint
from shardckpt.reading.restore import chosen_values, fill
from shardckpt.state.names import shown
from shardckpt.training.integrations.dcp_contents import DcpContents, DcpOwned
from shardckpt.training.integrations.plain import plain
from shardckpt.writing.attempt import Attempt
from shardckpt.writing.save import save

if TYPE_CHECKING:
    import os

    from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner
    from torch.distributed.checkpoint.storage import WriteResult

    from shardckpt.frameworks.base import Sink
    from shardckpt.options import SaveOptions

__all__ = ["StorageReader", "StorageWriter"]

_CHANGES_VALUES = ("create_local_plan", "lookup_object", "resolve_data", "transform_object")
"""Methods of DCP's planner through which another one could store something other than its flattened state."""


class StorageWriter(_StorageWriter):  # type: ignore[misc]  # torch is not followed
    """Stores what `torch.distributed.checkpoint.save` or `async_save` saves."""

    def __init__(
        self,
        url: str | os.PathLike[str] | None = None,
        *,
        options: SaveOptions | None = None,
        coordinator: Coordinator | None = None,
    ) -> None:
        """Store at `url`, or at the `checkpoint_id` that a save is given.

        Args:
            url: as for `shardckpt.save`.
            options: as for `shardckpt.save`. What DCP does by default, replacing what is there, is `overwrite=True`.
            coordinator: of the processes that save, where those are not all of the job (`process_group=…`).

        Raises:
            OptionError, UrlError: not what it should be.
        """
        check_coordinator(coordinator)
        self.url = _checked(url)
        self._options = checked_options(options)
        self._coordinator = coordinator
        self._together = True

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a new checkpoint: at `checkpoint_id`, if that is given."""
        if checkpoint_id is not None:
            self.url = _checked(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: ARG002 - DCP's signature
        """Take note of whether the processes plan together (`use_collectives`)."""
        _required(self.url)
        self._together = kwargs.get("use_collectives", True)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Leave the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Check that those who save are those who will be waited for.

        Raises:
            OptionError: they are not all processes of the job.
        """
        # What torch knows must do: others wait for this process here, and cannot agree on a coordinator.
        known = distributed.get_world_size() if distributed.is_initialized() else 1
        job = known if self._coordinator is None else self._coordinator.world.processes
        if self._together and len(plans) != job:
            raise OptionError(
                f"{self.url}: {len(plans)} of the job's {job} processes save (process_group=…, or no_dist=True); give a "
                f"shardckpt.Coordinator of just these, StorageWriter(coordinator=…), or let all of them save."
            )
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:  # noqa: ARG002 - DCP's signature
        """Save the planner's state; when this returns the checkpoint is committed, and all processes know.

        Raises:
            OptionError: a planner that would have something else saved.
            LeafError: a value that DCP would pickle, by name; or as in `shardckpt.save`.
            AlreadyExistsError, CommitError, StorageError: as in `shardckpt.save`.
        """
        url, coordinator = _required(self.url), Coordinator.current() if self._coordinator is None else self._coordinator
        try:
            state = _state_of(planner)
        except Exception as e:  # the others save already: they are told, and all processes count the attempt
            Attempt(Store.open(parse(url)), coordinator, self._options).give_up(e)
            raise
        save(url, state, options=self._options, coordinator=coordinator)
        done: Future[list[WriteResult]] = Future()
        done.set_result([])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Nothing: the checkpoint has its own record, and it is written."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether shardckpt can store there."""
        return _is_url(checkpoint_id)


def _state_of(planner: SavePlanner) -> dict[str, Any]:
    """What a planner means to save, nested again, and nothing in it that DCP would have to pickle."""
    changed = [m for m in _CHANGES_VALUES if getattr(type(planner), m, None) is not getattr(DefaultSavePlanner, m)]
    if changed:
        raise OptionError(
            f"The planner {type(planner).__qualname__} has a {changed[0]} of its own, by which something other than its state could be "
            f"saved; change the state beforehand, or in set_up_planner of a DefaultSavePlanner."
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
            f"{shown(odd[0])} is in a list, or is one, with an empty dict in it, which DCP drops so that the others move; leave it out, "
            f"or make the list a dict."
        )
    return nested


class StorageReader(_StorageReader):  # type: ignore[misc]  # torch is not followed
    """Reads what `torch.distributed.checkpoint.load` asks for, from any checkpoint of shardckpt's."""

    def __init__(self, url: str | os.PathLike[str] | None = None, *, coordinator: Coordinator | None = None) -> None:
        """Read from `url`, or from the `checkpoint_id` that a load is given.

        Args:
            url: as for `shardckpt.restore`.
            coordinator: says which process this is, for `PerProcess` values; by default found out.

        Raises:
            OptionError, UrlError: not what it should be.
        """
        check_coordinator(coordinator)
        self.url = _checked(url)
        self._coordinator = coordinator
        self._contents: DcpContents | ShardckptError | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin to load another checkpoint: from `checkpoint_id`, if that is given."""
        if checkpoint_id is not None:
            self.url = _checked(checkpoint_id)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:  # noqa: ARG002 - DCP's signature
        """What is stored, as DCP names it. An error is raised later: DCP swallows what is raised here."""
        try:
            self._contents = DcpContents(Checkpoint(_required(self.url)))
            return self._contents.metadata()
        except ShardckptError as e:
            self._contents = e
            return Metadata({})

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: ARG002 - DCP's signature
        """Nothing, if the checkpoint could be opened.

        Raises:
            NotFoundError, FormatError: no checkpoint, or none that can be read.
            NamesMismatchError: two of its names are one to DCP.
            DtypeError: a dtype that torch has not, by name.
        """
        self._opened()

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Note in the plan which checkpoint this process has opened."""
        record = self._opened().checkpoint.record
        return replace(plan, storage_data=(record.attempt, record.hosts[0].sha256))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Check that all processes have opened the same.

        Raises:
            ReplacedError: it was replaced between one and another.
        """
        if len({plan.storage_data for plan in plans}) > 1:
            raise ReplacedError(f"{self.url}: the checkpoint was replaced while the processes opened it; load it again.")
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the tensors that the planner asks for, and hand it the plain values.

        Raises:
            ShapeMismatchError, DtypeMismatchError, StructureMismatchError: not what is stored, by name; nothing was read.
            LeafError: a tensor that cannot be filled, by name; nothing was read.
            MismatchError: a `PerProcess` value, of other processes than these.
            ReplacedError: the checkpoint was replaced or deleted while it was being read.
            CorruptionError: stored bytes are damaged or missing; tensors are then undefined.
        """
        contents = self._opened()
        values = [(item, self._value(contents, item, planner)) for item in plan.items if item.type is LoadItemType.BYTE_IO]
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
        """Whether shardckpt can read there."""
        return _is_url(checkpoint_id)

    def _opened(self) -> DcpContents:
        if isinstance(self._contents, ShardckptError):
            raise self._contents
        assert self._contents is not None, "DCP reads the metadata first"
        return self._contents

    def _value(self, contents: DcpContents, item: ReadItem, planner: LoadPlanner) -> io.BytesIO:
        """A plain value, as planners want it: they unpickle it. It goes from hand to hand here and was never stored so."""
        value, name = contents.value(item.storage_index.fqn), item.dest_index.fqn
        held = getattr(planner, "state_dict", {}).get(name)
        if isinstance(held, torch.Tensor):
            raise StructureMismatchError(
                f"{shown(name)} is no tensor in {contents.checkpoint.location}, and a {type(held).__qualname__} in the state to load; "
                f"put a plain value there, or leave it out."
            )
        if isinstance(value, DcpOwned):
            value = PerProcess(chosen_values(contents.checkpoint, {value.name: PerProcess(None)}, self._coordinator)[value.name])
        handed = io.BytesIO()
        torch.save(value, handed)
        handed.seek(0)
        return handed


def _checked(url: str | os.PathLike[str] | None) -> str | os.PathLike[str] | None:
    """Refuse what is no place to store to, before anybody waits for anybody."""
    if url is not None:
        parse(url)
    return url


def _required(url: str | os.PathLike[str] | None) -> str | os.PathLike[str]:
    if url is None:
        raise OptionError("No url to save to or load from; give one to StorageWriter or StorageReader, or a checkpoint_id=….")
    return url


def _is_url(checkpoint_id: str | os.PathLike[str]) -> bool:
    try:
        parse(checkpoint_id)
    except ShardckptError:
        return False
    return True
