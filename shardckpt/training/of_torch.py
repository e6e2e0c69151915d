"""Finder of the torch objects of a training, which name the state of each object from the others.

Optimizer state is named after the modules' parameters: without a prefix for `model`, as `keyword.name` for other modules.
Scheduler state is named after its optimizer's groups. This module is imported only for programs that have torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from shardckpt.training.modules import NamedModule
from shardckpt.training.optimizers import NamedOptimizer
from shardckpt.training.schedulers import NamedScheduler

if TYPE_CHECKING:
    from collections.abc import Mapping


def of_torch(objects: Mapping[str, Any]) -> dict[str, NamedModule | NamedOptimizer | NamedScheduler]:
    """The torch objects among some objects, with their names, by the same keys.

    Raises:
        LeafError: a module or optimizer whose tensors have no names.
    """
    modules = {key: NamedModule(key, of) for key, of in objects.items() if isinstance(of, torch.nn.Module)}
    names: dict[int, str] = {}
    for key, module in modules.items():
        found = module.parameter_names()
        names = {i: name if key == "model" else f"{key}.{name}" for i, name in found.items()} | names
        module.replica = any(other.replica for other in modules.values())  # averaged weights are not wrapped in DDP themselves
    optimizers = {
        key: NamedOptimizer(key, of, names, modules.keys() - {"model"})
        for key, of in objects.items()
        if isinstance(of, torch.optim.Optimizer)
    }
    schedulers = {}
    for key, of in objects.items():
        if isinstance(of, torch.optim.lr_scheduler.LRScheduler):
            optimizer = next((named for named in optimizers.values() if named.optimizer is of.optimizer), None)
            if optimizer is not None:
                schedulers[key] = NamedScheduler(key, of, optimizer)
    return {**modules, **optimizers, **schedulers}
