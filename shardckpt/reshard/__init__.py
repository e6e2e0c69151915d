"""Resharding: rewriting a checkpoint so that it suits another layout. `shardckpt.reshard(src, dst, …)` is this package.

`options` holds the request. `layouts` and `targets` decide what each tensor becomes. `cells`, `memory` and `plan` divide the work.
All of these are pure. `job` names the attempt that all workers write into, `task` does one part of it, `engines` run the tasks, and
`execute` drives a complete reshard. This package may import everything that a save uses; only packages from `cli` upward import it.

The package is callable: its module object has another class ("Customizing module attribute access" in the language reference).
A function of the same name would not work: importing the package later would hide it.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardckpt.reshard.execute import ReshardReport, reshard
    from shardckpt.reshard.options import ReshardOptions
    from shardckpt.reshard.plan import ReshardPlan, plan_reshard

__all__ = ["ReshardOptions", "ReshardPlan", "ReshardReport", "plan_reshard", "reshard"]

_HOME = {
    "ReshardOptions": "options",
    "ReshardPlan": "plan",
    "ReshardReport": "execute",
    "plan_reshard": "plan",
    "reshard": "execute",
}


def __getattr__(name: str) -> object:
    """Import the object that `name` stands for, once."""
    if name not in _HOME:
        raise AttributeError(f"module 'shardckpt.reshard' has no attribute {name!r}")
    from importlib import import_module

    value = globals()[name] = getattr(import_module(f"shardckpt.reshard.{_HOME[name]}"), name)
    return value


class _Callable(ModuleType):
    """The package, as a function."""

    def __call__(self, *args: Any, **kwargs: Any) -> ReshardReport:
        """See `shardckpt.reshard.execute.reshard`."""
        from shardckpt.reshard.execute import reshard

        return reshard(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable
