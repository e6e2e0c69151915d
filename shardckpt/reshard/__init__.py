"""Resharding: a checkpoint written anew, stored as it suits another layout. `shardckpt.reshard(src, dst, …)` is this package.

What is asked for is in `options`, what each tensor becomes in `layouts` and `targets`, the work in `cells`, `memory` and `plan`,
all of them pure. `job` names the attempt that all workers write into, `task` does a part of it, `engines` are who does, and
`execute` is the whole. May import what a save is made of; below `cli` nobody imports it.

The package can be called, which Python allows a module by giving it another class ("Customizing module attribute access" in
the language reference): a function of the same name beside it would vanish behind the package once that is imported.
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
    """Import what `name` stands for, once."""
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
