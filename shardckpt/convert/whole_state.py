"""A checkpoint's state written as another format that holds states too: nested containers, tensors and small leaves."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from shardckpt.convert.outputs import identity
from shardckpt.convert.streaming import stream
from shardckpt.errors import OptionError
from shardckpt.excerpt import excerpt
from shardckpt.reshard.options import ReshardOptions
from shardckpt.reshard.targets import targets

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from shardckpt.box import Box
    from shardckpt.checkpoint import Checkpoint
    from shardckpt.convert.outputs import OutputTensor
    from shardckpt.convert.state_writer import StateWriter
    from shardckpt.io.url import Location
    from shardckpt.structure import Structure

__all__ = ["FORMATS", "write_state"]

FORMATS = {"torch": ("to_torch", "TorchFile"), "dcp": ("to_dcp", "DcpDirectory"), "orbax": ("to_orbax", "OrbaxDirectory")}
"""By the name that `--to` takes: the module, and its writer."""


def write_state(
    checkpoint: Checkpoint,
    location: Location,
    to: str,
    *,
    only: str | Sequence[str] | None = None,
    dtype: str | Mapping[str, str] | None = None,
    memory_limit: int = 512 << 20,
    overwrite: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> list[str]:
    """Write a checkpoint's state, or a part of it.

    Args:
        checkpoint: where from; nothing of it has been read yet.
        location: where to, on a local disk.
        to: "torch", "dcp" or "orbax".
        only: the names that are wanted: a pattern, or several.
        dtype: converted to this, if floating point, or pattern → dtype.
        memory_limit: bytes of buffers in all.
        overwrite: whether to replace what is there.
        progress: called with bytes of elements written so far, and in all.

    Returns:
        What is not there, or not as it was, in a line each.

    Raises:
        OptionError: an unknown format, or a place that is not on a local disk.
        NamesMismatchError, StructureMismatchError, DtypeError, DtypeMismatchError: the format cannot hold what is asked for.
        AlreadyExistsError: something is there.
        BudgetError: the memory limit is too low.
        CorruptionError, ReplacedError: the checkpoint cannot be read.
        StorageError: it cannot be written; MissingExtraError: the format's library is not installed.
    """
    if to not in FORMATS:
        raise OptionError(f"export(to={excerpt(to)}): states are exported to {', '.join(map(repr, FORMATS))}.")
    wanted = targets(checkpoint.record.structure, ReshardOptions(only=only, dtype=dtype), str(checkpoint.location))
    outputs = [identity(wanted.sources[name], name, tensor.dtype) for name, tensor in wanted.structure.tensors.items()]
    total, done, tell = sum(output.nbytes for output in outputs), 0, progress or (lambda _done, _total: None)
    tell(0, total)
    with _writer(to, wanted.structure, location, overwrite=overwrite) as writer:

        def put(output: OutputTensor, box: Box, array: NDArray[Any]) -> None:
            nonlocal done
            writer.put(output, box, array)
            done += array.nbytes
            tell(done, total)

        stream(checkpoint, outputs, writer.blocks, memory_limit, put)
    return writer.notes


def _writer(to: str, structure: Structure, location: Location, *, overwrite: bool) -> StateWriter:
    module, name = FORMATS[to]
    made: StateWriter = getattr(import_module(f"shardckpt.convert.{module}"), name)(structure, location, overwrite=overwrite)
    return made
