"""A checkpoint's state written as another format that holds states too: nested containers, tensors and small leaves.

1. What is wanted of the state is selected: names, and the dtypes that tensors are converted to. Optimizers take the form that the
   format's readers load (`optimizer_states`).
2. The format's writer lays it out, and refuses what the format cannot hold, before anything is read.
3. Blocks come from `streaming`. When all are written, the writer publishes them under the final name.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import chain
from typing import TYPE_CHECKING, Any

from shardckpt.convert.optimizer_states import check_form, with_optimizers_as
from shardckpt.convert.streaming.outputs import identity
from shardckpt.convert.streaming.stream import Stream
from shardckpt.errors import NamesMismatchError, OptionError
from shardckpt.excerpt import excerpt, given
from shardckpt.format.structure import Structure
from shardckpt.reshard.dtype_rules import check_dtypes, plan_dtypes
from shardckpt.reshard.optimizer_state import optimizer_state
from shardckpt.state import meanings, select
from shardckpt.state.names import selector

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from shardckpt.convert.naming.choose import Patterns
    from shardckpt.convert.state_writer import StateWriter
    from shardckpt.convert.streaming.outputs import OutputTensor
    from shardckpt.io.url import Location
    from shardckpt.reading.checkpoint import Checkpoint
    from shardckpt.reshard.dtype_rules import ConvertedSubtree

__all__ = ["FORMATS", "WrittenState", "write_state"]

FORMATS = {"torch": ("torch", "TorchFileWriter"), "dcp": ("dcp", "DcpDirectory"), "orbax": ("orbax", "OrbaxDirectory")}
"""By the name that `--to` takes: the module, and its writer."""
_OPTIMIZERS = {"torch": "names", "dcp": "names"}
"""The form that optimizers take unless another one is asked for; elsewhere they stay as they are stored."""


@dataclass(frozen=True, slots=True)
class WrittenState:
    """What writing a state took."""

    tensors: int
    nbytes: int
    """Of their elements, as they were written."""
    read_bytes: int
    """Stored bytes of the checkpoint that were read."""
    notes: tuple[str, ...]
    """What is not there, or not as it was, in a line each."""
    conversions: tuple[ConvertedSubtree, ...]
    """How many tensors `dtype` converts and leaves, by subtree."""


def write_state(
    checkpoint: Checkpoint,
    location: Location,
    to: str,
    *,
    include: Patterns = None,
    exclude: Patterns = None,
    dtype: str | Mapping[str, str] | None = None,
    optimizer: str | None = None,
    limit: int,
    overwrite: bool = False,
    verify: bool = True,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> WrittenState:
    """Write a checkpoint's state, or a part of it.

    Args:
        checkpoint: where from; nothing of it has been read yet.
        location: where to, on a local disk.
        to: one of `FORMATS`.
        include: patterns of the names that are wanted; None: all.
        exclude: patterns of those that are not.
        dtype: what tensors are converted to: a dtype, or pattern → dtype (`dtype_rules`).
        optimizer: the form of optimizers, one of `training.optimizer_forms.FORMS`; None: the format's own.
        limit: bytes of buffers.
        overwrite: whether to replace what is there.
        verify: whether to read back what was written.
        progress: called with bytes of elements that are written, and in all.

    Raises:
        OptionError: an unknown format, a pattern that matches nothing, or a place that is not on a local disk.
        NamesMismatchError: nothing is selected; or the format has no names for what is.
        StructureMismatchError, DtypeError, DtypeMismatchError: the format cannot hold what is asked for.
        AlreadyExistsError: something is there.
        BudgetError: the memory limit is too low.
        CorruptionError, ReplacedError: the checkpoint cannot be read, or what was written not read back.
        StorageError: it cannot be written. MissingExtraError: the format's library is not installed.
    """
    if to not in FORMATS:
        raise OptionError(f"export(to={excerpt(to)}): states are exported to {', '.join(map(repr, FORMATS))}.")
    check_form(optimizer)
    check_dtypes(dtype)
    structure, outputs, conversions = _selected(checkpoint, include, exclude, dtype)
    form = optimizer or _OPTIMIZERS.get(to)
    notes: tuple[str, ...] = ()
    if form is not None:
        structure, outputs, notes = with_optimizers_as(form, structure, outputs)
    total, done = sum(output.nbytes for output in outputs), 0
    progress(0, total)
    with _writer(to, structure, location, overwrite=overwrite) as writer:
        stream = Stream(checkpoint, outputs, writer.blocks, limit=limit, beside=writer.memory)
        with closing(stream.read()) as batches:
            for block in chain.from_iterable(batches):
                writer.put(block.output, block.box, block.elements)
                done += block.elements.nbytes
                progress(done, total)
        writer.finish(verify=verify)
    return WrittenState(len(outputs), total, stream.read_bytes, (*notes, *writer.notes), conversions)


def _selected(
    checkpoint: Checkpoint, include: Patterns, exclude: Patterns, dtype: str | Mapping[str, str] | None
) -> tuple[Structure, list[OutputTensor], tuple[ConvertedSubtree, ...]]:
    """The structure of what is wanted, what its tensors are made of, and what is converted."""
    wanted, unwanted = selector(include), selector(exclude if exclude is not None else ())
    tree, stored = select(checkpoint.parsed_tree, lambda name: wanted(name) and not unwanted(name))
    if not tree and (include is not None or exclude is not None):
        raise NamesMismatchError(
            f"{checkpoint.location}: {given(include=include, exclude=exclude)}: none of its names is left; `shardckpt info` lists them."
        )
    sources = {name: checkpoint.record.structure.tensors[old] for name, old in stored.items()}
    planned = plan_dtypes(sources, dtype, meanings(tree), optimizer_state(checkpoint.parsed_tree) if dtype else ())
    types = planned.dtypes
    outputs = [identity(tensor, name, types[name]) for name, tensor in sources.items()]
    tensors = {name: replace(tensor, name=name, dtype=types[name]) for name, tensor in sources.items()}
    return Structure(tree, tensors), outputs, planned.subtrees


def _writer(to: str, structure: Structure, location: Location, *, overwrite: bool) -> StateWriter:
    module, name = FORMATS[to]
    made: Any = getattr(import_module(f"shardckpt.convert.formats.{module}.target"), name)
    writer: StateWriter = made(structure, location, overwrite=overwrite)
    return writer
