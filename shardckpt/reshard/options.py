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
from shardckpt.state.select import selector

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

DEFAULT_MEMORY_LIMIT = 512 << 20
"""Default bytes of buffers, over all workers of one machine together."""
DEFAULT_TASK_BYTES = 256 << 20
MOST_WORKERS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ReshardOptions:
    """Options of `shardckpt.reshard`; see there."""

    mesh: Mesh | None = None
    rules: Rules | None = None
    layout: Literal["packed", "zarr"] | None = None
    compression: Literal["zstd", "none"] | None = None
    dtype: str | Mapping[str, str] | None = None
    only: str | Sequence[str] | None = None
    memory_limit: int | str = DEFAULT_MEMORY_LIMIT
    workers: int | None = None
    task_bytes: int | str = DEFAULT_TASK_BYTES
    """An interrupted job continues only with the same size."""
    overwrite: bool = False
    verify: bool = True

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
            raise OptionError("only=…: give patterns; worker processes cannot receive a function.")
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
