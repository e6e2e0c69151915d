"""Committing: an attempt becomes the checkpoint, or is removed.

`shardckpt.commit(root)` is this package.

`assemble` makes the commit record from the hosts' records, `publish` writes it conditionally,
`remove` removes attempts that no record names, and `index` writes the metadata for other zarr
readers. `markers`, `dependants` and `base_places` tell who relies on a checkpoint. `reading` and
the packages above it may import this package; it imports `io`, `frameworks` and the packages below.
Begin with `publish`. `committing` and `collecting` are paths of functions for users;
`shardckpt.runs`, which knows what a run is, has these.

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
