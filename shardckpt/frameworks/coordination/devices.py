"""The owner of each device: what a process says of its own when a job starts, and what follows from what all have said.

Devices that are numbered through the whole job belong to the one process that has them. Devices of a framework that
every process has for itself bear the same numbers everywhere, and belong in no common map.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from shardckpt.errors import OptionError
from shardckpt.layout.world import DeviceOwners

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


_FRAMEWORKS = ("jax", "torch_xla")


def given_devices(devices: Mapping[str, Iterable[int]] | None) -> dict[str, list[int]]:
    """What the caller says that this process owns, in order.

    Raises:
        OptionError: a framework without device ids, or what is no device id.
    """
    told = {}
    for framework, given in ({} if devices is None else devices).items():
        if framework not in _FRAMEWORKS:
            raise OptionError(f"devices= names the framework {framework!r}; it is one of {', '.join(_FRAMEWORKS)}.")
        ids = list(given)
        wrong = [i for i in ids if not isinstance(i, int | np.integer) or isinstance(i, bool) or i < 0]
        if wrong:
            raise OptionError(f"devices= gives {wrong[0]!r} for {framework}; device ids are whole numbers from 0.")
        told[framework] = sorted({int(i) for i in ids})
    return told


def found_devices() -> dict[str, list[int]]:
    """The devices of this process in frameworks that the program uses. None of them is set up by asking."""
    found = {}
    if "jax" in sys.modules:
        import jax
        from jax._src import xla_bridge

        if xla_bridge.backends_are_initialized() or jax.distributed.is_initialized():
            found["jax"] = sorted(d.id for d in jax.local_devices())
    if "torch_xla" in sys.modules:
        import torch_xla.runtime as xr
        from torch_xla import _XLAC

        if xr.is_spmd():
            found["torch_xla"] = sorted(int(d.rpartition(":")[2]) for d in _XLAC._xla_get_runtime_devices())
    return found


def owners(told: Sequence[Mapping[str, Any]], found: Sequence[Mapping[str, Any]]) -> dict[str, DeviceOwners]:
    """The process of every device, of the frameworks whose devices are the whole job's.

    Those are the frameworks of which some process was told what it owns, and those of which all processes have found
    devices, no two of them the same.

    Args:
        told: by process, device ids by framework, as its caller gave them.
        found: the same as the process found them. What it was told goes before what it found.

    Raises:
        OptionError: processes that were told what they own both own a device.
    """
    whole = {}
    for framework in _FRAMEWORKS:
        was_told = [framework in t for t in told]
        ids = [t.get(framework, f.get(framework)) for t, f in zip(told, found, strict=True)]
        if not any(was_told) and None in ids:
            continue
        process = np.repeat(np.arange(len(ids)), [len(i or ()) for i in ids])
        device = np.array([d for i in ids for d in i or ()], np.int64)
        order = np.argsort(device, kind="stable")
        device, process = device[order], process[order]
        double = np.flatnonzero(device[1:] == device[:-1])
        if not len(double):
            whole[framework] = DeviceOwners(device, process)
        elif any(was_told):
            at = double[0]
            raise OptionError(
                f"{framework} device {device[at]} is owned by process {process[at]} and by process {process[at + 1]}, as devices= "
                f"and the processes say; give every process devices={{'{framework}': …}} with ids that no other has."
            )
    return whole
