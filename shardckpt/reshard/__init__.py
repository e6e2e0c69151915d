"""Resharding: rewriting a checkpoint so that it suits another layout.

`shardckpt.reshard(src, dst, …)` is this package.

`options` holds the request. `targets` decides what each tensor becomes, by `rules` if there are any
(`batch_dims` infers such rules from a program); `dtype_rules` decides its dtype. `plan` divides the
work into tasks. Apart from reading rule files, these are pure. `job` names the attempt that all
workers write into, `task` does one part of it (`streaming` reads into target chunks), or `reuse`
links or copies the source's files. `engines` run the tasks: `processes` here, `clusters` elsewhere.
`execute` drives a complete reshard. `forecast` counts what one would cost.

`convert` and `cli` may import this package; it imports `writing`, `streaming` and the packages
below them. Begin with `execute`.

The package can be called: its module object has another class ("Customizing module attribute
access" in the language reference). A function of the same name would not work: importing the
package later would hide it.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardckpt.reshard.execute import ReshardReport


class _Callable(ModuleType):
    """The package, as a function."""

    def __call__(self, *args: Any, **kwargs: Any) -> ReshardReport:
        """See `shardckpt.reshard.execute.reshard`."""
        from shardckpt.reshard.execute import reshard

        return reshard(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable
