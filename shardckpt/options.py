"""How to save: every choice a user has, checked where it is made."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from shardckpt.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardckpt.sharding import Layout

__all__ = ["DEFAULT_MEMORY_LIMIT", "SaveOptions", "parse_bytes"]

DEFAULT_MEMORY_LIMIT = 1 << 30
"""Host bytes that a save or restore uses beyond the state itself, unless told otherwise."""
LEAST_MEMORY_LIMIT = 16 << 20
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?\s*", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class SaveOptions:
    """Options of `shardckpt.save`."""

    layout: Literal["packed", "zarr"] = "packed"
    """"packed": chunks in a few large data files (OCDBT). "zarr": every chunk an object in a plain zarr group."""
    compression: Literal["zstd"] | None = None
    """Trained weights hardly compress: None is the default."""
    shardings: Mapping[str, Layout] = field(default_factory=dict)
    """Name pattern → layout: plain tensors whose names match are chunked and recorded as if they were laid out so."""
    overwrite: bool = False
    """Replace a committed checkpoint, atomically; otherwise that is an AlreadyExistsError."""
    memory_limit: int | str = DEFAULT_MEMORY_LIMIT
    """Bytes, or a string such as "512MiB": host memory for staging and for chunks on their way to storage."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Any JSON object, kept with the checkpoint: `shardckpt.open(url).metadata`."""

    def __post_init__(self) -> None:
        """Check every option."""
        if self.layout not in ("packed", "zarr"):
            raise OptionError(f'SaveOptions(layout={self.layout!r}): use "packed" or "zarr".')
        if self.compression not in (None, "zstd"):
            raise OptionError(f'SaveOptions(compression={self.compression!r}): use None or "zstd".')
        object.__setattr__(self, "memory_limit", parse_bytes(self.memory_limit, "memory_limit"))
        if self.budget < LEAST_MEMORY_LIMIT:
            raise OptionError(f"SaveOptions(memory_limit={self.budget}): at least {LEAST_MEMORY_LIMIT} bytes (16MiB) are needed.")
        try:
            same = json.loads(json.dumps(self.metadata, allow_nan=False))
        except (TypeError, ValueError, RecursionError) as e:
            raise OptionError(f"SaveOptions(metadata=…): not a JSON object ({e}); use strings, finite numbers, lists and dicts.") from e
        if same != self.metadata:
            raise OptionError("SaveOptions(metadata=…): JSON would change it; use string keys, and lists instead of tuples.")

    @property
    def budget(self) -> int:
        """`memory_limit` in bytes."""
        assert isinstance(self.memory_limit, int)
        return self.memory_limit


def parse_bytes(value: int | str, what: str) -> int:
    """A number of bytes, given as such or as text.

    >>> parse_bytes("512MiB", "memory_limit"), parse_bytes("1.5 GB", "memory_limit")
    (536870912, 1500000000)
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise OptionError(f'{what}={value!r}: give bytes as a whole number, or as text such as "512MiB".')
    base = 1024 if match[3] else 1000
    return int(float(match[1]) * base ** " KMGT".index(match[2].upper() or " "))
