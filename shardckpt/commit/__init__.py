"""Committing: an attempt becomes the checkpoint, or is removed. `shardckpt.commit(root)` is this package.

`assemble` makes the commit record from the hosts' records, `publish` writes it conditionally, `collect` removes attempts that no
record names, and `index` writes the metadata for other zarr readers. `committing`, `collecting` and `pinning` have the functions for
users. `reading` and the packages above it may import this package; it imports `io`, `frameworks` and the packages below. Begin with
`publish`.

The package can be called, like `shardckpt.reshard`, and for the same reason.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardckpt.commit.committing import Outcome


class _Callable(ModuleType):
    """The package, as a function."""

    def __call__(self, *args: Any, **kwargs: Any) -> list[Outcome]:
        """See `shardckpt.commit.committing.commit`."""
        from shardckpt.commit.committing import commit

        return commit(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable
