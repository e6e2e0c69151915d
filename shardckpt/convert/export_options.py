"""The options of an export, checked where they are made."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shardckpt.convert.naming.choose import NameOptions
from shardckpt.convert.optimizer_states import check_form
from shardckpt.options import check_flag, parse_bytes
from shardckpt.reshard.dtype_rules import check_dtypes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from shardckpt.convert.naming.choose import Patterns

DEFAULT_MEMORY_LIMIT = 512 << 20
"""Default limit of buffers, in bytes."""


def ignore_progress(_done: int, _total: int) -> None:
    """Do nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """Options of all formats."""

    memory_limit: int | str = DEFAULT_MEMORY_LIMIT
    """Bytes of buffers, or a string such as "512MiB"."""
    overwrite: bool = False
    """Replace existing files."""
    verify: bool = True
    """Read back the written bytes."""
    progress: Callable[[int, int], None] | None = None
    """Called with the bytes of elements written so far, and the total."""

    def __post_init__(self) -> None:
        """Check everything that needs no files."""
        check_flag(self.overwrite, "overwrite")
        check_flag(self.verify, "verify")
        object.__setattr__(self, "memory_limit", parse_bytes(self.memory_limit, "memory_limit"))

    @property
    def budget(self) -> int:
        """`memory_limit` in bytes."""
        assert isinstance(self.memory_limit, int)
        return self.memory_limit

    @property
    def report_progress(self) -> Callable[[int, int], None]:
        """`progress`, or a function that does nothing."""
        return self.progress or ignore_progress


@dataclass(frozen=True, slots=True, kw_only=True)
class SafetensorsOptions(ExportOptions):
    """Options of `export_safetensors`."""

    names: NameOptions = field(default_factory=NameOptions)
    """Selection and naming of the tensors."""
    max_shard_size: int | str | None = None
    """Bytes of tensors per file; None: one file."""
    metadata: Mapping[str, str] | None = None
    """Texts for the files' headers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateOptions(ExportOptions):
    """Options of an export to a format that holds states."""

    include: Patterns = None
    """Patterns of the names to export; None: all."""
    exclude: Patterns = None
    """Patterns of the names to leave out."""
    dtype: str | Mapping[str, str] | None = None
    """The dtype to convert tensors to, or pattern → dtype (`dtype_rules`)."""
    optimizer: str | None = None
    """Form of optimizers, one of `training.optimizer_state.forms.FORMS`; None: the format's default."""

    def __post_init__(self) -> None:
        """Check everything that needs no files."""
        ExportOptions.__post_init__(self)
        check_form(self.optimizer)
        check_dtypes(self.dtype)
