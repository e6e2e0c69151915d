"""A checkpoint's state written in another format that holds states.

A state has nested containers, tensors and small leaves.

1. A part of the state is selected by names, and the dtypes to which tensors are converted are
   planned. Optimizers are rewritten in the form that the format's readers load
   (`optimizer_states`).
2. The format's writer lays the state out, and refuses parts that the format cannot hold, before
   anything is read.
3. Blocks come from `streaming`. When all are written, the writer publishes them under the final
   name.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import chain
from typing import TYPE_CHECKING, Any

from shardckpt.convert.optimizer_states import notes_of_parts, with_optimizers_as
from shardckpt.errors import NamesMismatchError
from shardckpt.format.structure import Structure
from shardckpt.reading.naming.outputs import identity
from shardckpt.reshard.dtype_rules import plan_dtypes
from shardckpt.reshard.optimizer_state import unrounded
from shardckpt.state import meanings, select
from shardckpt.state.document import leaves_of
from shardckpt.state.select import check_selection, selector
from shardckpt.streaming.stream import Stream
from shardckpt.text import Message, given

if TYPE_CHECKING:
    from shardckpt.convert.options import StateOptions
    from shardckpt.convert.state_writer import StateWriter
    from shardckpt.io.url import Location
    from shardckpt.reading.checkpoint import Checkpoint
    from shardckpt.reading.naming.outputs import OutputTensor
    from shardckpt.reshard.dtype_rules import ConvertedSubtree

FORMATS = {"torch": "TorchFileWriter", "dcp": "DcpDirectory", "orbax": "OrbaxDirectory"}
"""Format name, as `--to` expects it → its writer."""
_OPTIMIZERS = {"torch": "names", "dcp": "names"}
"""Default form of optimizers; in other formats they keep their stored form."""


@dataclass(frozen=True, slots=True)
class WrittenState:
    """The result of writing a state."""

    tensors: int
    nbytes: int
    """Bytes of their elements, as written."""
    read_bytes: int
    """Stored bytes of the checkpoint that were read."""
    notes: tuple[str, ...]
    """Parts of the state that are left out or changed, a line each."""
    conversions: tuple[ConvertedSubtree, ...]
    """Tensors that `dtype` converts and leaves, counted by subtree."""


def write_state(
    checkpoint: Checkpoint, location: Location, to: str, options: StateOptions
) -> WrittenState:
    """Write a checkpoint's state, or a part of it.

    Args:
        checkpoint: the source; nothing of it has been read yet.
        location: the destination, on a local disk.
        to: one of `FORMATS`.
        options: selection, dtypes, form of optimizers, and limits.

    Raises:
        OptionError: a pattern that matches nothing, or a location that is not on a local disk.
        NamesMismatchError: nothing is selected; or the format has no names for parts of it.
        StructureMismatchError, DtypeError, DtypeMismatchError: the format cannot hold the selected
            state.
        AlreadyExistsError: the destination exists.
        BudgetError: the memory limit is too low.
        CorruptionError, ReplacedError: the checkpoint cannot be read, or the written bytes do not
            read back.
        StorageError: the files cannot be written. MissingExtraError: the format's library is not
            installed.
    """
    structure, outputs, conversions = _select(checkpoint, options)
    form = options.optimizer or _OPTIMIZERS.get(to)
    notes: tuple[str, ...] = ()
    names = {leaf.name for leaf in leaves_of(structure.nodes)}
    if form is not None:
        structure, outputs, notes = with_optimizers_as(
            form, structure, outputs, checkpoint.parsed_tree
        )
    notes += tuple(notes_of_parts(checkpoint.parsed_tree, names))
    total, done = sum(output.nbytes for output in outputs), 0
    progress = options.report_progress
    progress(0, total)
    with _writer(to, structure, location, overwrite=options.overwrite) as writer:
        stream = Stream(
            checkpoint, outputs, writer.blocks, limit=options.budget, beside=writer.memory
        )
        with closing(stream.read()) as batches:
            for block in chain.from_iterable(batches):
                writer.put(block.output, block.box, block.elements)
                done += block.elements.nbytes
                progress(done, total)
        writer.finish(verify=options.verify)
    return WrittenState(
        len(outputs), total, stream.read_bytes, (*notes, *writer.notes), conversions
    )


def _select(
    checkpoint: Checkpoint, options: StateOptions
) -> tuple[Structure, list[OutputTensor], tuple[ConvertedSubtree, ...]]:
    """The selected structure, the outputs of its tensors, and the conversions."""
    include, exclude, dtype = options.include, options.exclude, options.dtype
    for name, patterns in ("include", include), ("exclude", exclude or None):
        check_selection(patterns, checkpoint.parsed_tree, str(checkpoint.location), option=name)
    included, excluded = selector(include), selector(exclude if exclude is not None else ())
    tree, stored = select(
        checkpoint.parsed_tree, lambda name: included(name) and not excluded(name)
    )
    if not tree and (include is not None or exclude is not None):
        asked = given(include=include, exclude=exclude)
        raise NamesMismatchError(
            Message(
                f"{checkpoint.location}: ",
                asked,
                " selects none of its names; `shardckpt info` lists them.",
            )
        )
    sources = {name: checkpoint.record.structure.tensors[old] for name, old in stored.items()}
    planned = plan_dtypes(
        sources, dtype, meanings(tree), unrounded(checkpoint.record.structure) if dtype else {}
    )
    dtypes = planned.dtypes
    outputs = [identity(tensor, name, dtypes[name]) for name, tensor in sources.items()]
    tensors = {
        name: replace(tensor, name=name, dtype=dtypes[name]) for name, tensor in sources.items()
    }
    return Structure(tree, tensors), outputs, planned.subtrees


def _writer(to: str, structure: Structure, location: Location, *, overwrite: bool) -> StateWriter:
    made: Any = getattr(import_module(f"shardckpt.convert.formats.{to}.target"), FORMATS[to])
    writer: StateWriter = made(structure, location, overwrite=overwrite)
    return writer
