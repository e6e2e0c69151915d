"""The options of a reshard, checked where they are made.

Options name neither source nor destination. They can be pickled, so every worker of a job has the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from shardckpt.errors import OptionError
from shardckpt.excerpt import excerpt
from shardckpt.layout.mesh import Mesh
from shardckpt.options import check_flag, parse_bytes
from shardckpt.reshard.dtype_rules import check_dtypes
from shardckpt.reshard.rules import Rules
from shardckpt.state.names import selector

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

DEFAULT_MEMORY_LIMIT = 512 << 20
"""Default bytes of buffers, over all workers of one machine together."""
DEFAULT_TASK_BYTES = 256 << 20
MOST_WORKERS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ReshardOptions:
    """Options of `shardckpt.reshard`."""

    mesh: Mesh | None = None
    """The devices that specs refer to. Without rules, every tensor keeps its recorded spec, over this mesh."""
    rules: Rules | None = None
    """Rules for the layout of each tensor. None: tensors keep their recorded specs."""
    layout: Literal["packed", "zarr"] | None = None
    """As in `SaveOptions`; None: same as the source."""
    compression: Literal["zstd", "none"] | None = None
    """"zstd" or "none"; None: same as the source."""
    dtype: str | Mapping[str, str] | None = None
    """Name of a dtype, or name pattern → dtype; the first matching pattern counts. `dtype_rules` describes what each converts."""
    only: str | Sequence[str] | None = None
    """The names in the new checkpoint: a pattern, or several; None: all."""
    memory_limit: int | str = DEFAULT_MEMORY_LIMIT
    """Size of buffers, over all workers of one machine together: bytes, or a string such as "512MiB"."""
    workers: int | None = None
    """Number of concurrent processes on one machine; None: as many as cores and memory allow."""
    task_bytes: int | str = DEFAULT_TASK_BYTES
    """Approximate size of a task's output: bytes, or a string. An interruption loses this much, and workers receive this much at a time.
    Another size makes another job."""
    overwrite: bool = False
    """Replace a committed checkpoint, atomically, when the new one is complete; if False, the job raises AlreadyExistsError instead."""
    verify: bool = True
    """Read back the data of each task and compare it with its checksums before the task counts."""

    def __post_init__(self) -> None:
        """Check every option."""
        if self.mesh is not None and not isinstance(self.mesh, Mesh):
            raise OptionError(f"mesh=…: a {type(self.mesh).__name__} is no shardckpt.Mesh; give Mesh(shape, axis_names).")
        if self.rules is not None and not isinstance(self.rules, Rules):
            raise OptionError(f"rules=…: a {type(self.rules).__name__} is no shardckpt.Rules; use Rules.parse(['pattern=spec', …]).")
        if self.layout not in (None, "packed", "zarr"):
            raise OptionError(f'layout={excerpt(self.layout)}: use "packed" or "zarr".')
        if self.compression not in (None, "zstd", "none"):
            raise OptionError(f'compression={excerpt(self.compression)}: use "zstd" or "none".')
        object.__setattr__(self, "memory_limit", parse_bytes(self.memory_limit, "memory_limit"))
        object.__setattr__(self, "task_bytes", parse_bytes(self.task_bytes, "task_bytes"))
        if self.task_length <= 0:
            raise OptionError(f"task_bytes={self.task_length}: must be positive.")
        workers = self.workers
        if workers is not None and (not isinstance(workers, int) or isinstance(workers, bool) or not 0 < workers <= MOST_WORKERS):
            raise OptionError(f"workers={excerpt(workers)}: give a number from 1 to {MOST_WORKERS}.")
        check_flag(self.overwrite, "overwrite")
        check_flag(self.verify, "verify")
        if callable(self.only):
            raise OptionError("only=…: give patterns, which workers in other processes can be told.")
        selector(self.only)
        check_dtypes(self.dtype)

    @property
    def task_length(self) -> int:
        """`task_bytes` in bytes."""
        assert isinstance(self.task_bytes, int)
        return self.task_bytes

    @property
    def budget(self) -> int:
        """`memory_limit` in bytes."""
        assert isinstance(self.memory_limit, int)
        return self.memory_limit
