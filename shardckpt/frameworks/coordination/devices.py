"""The owner of each device, and the processes that share cores.

The module has what each process reports at the start of a job, and the results.

Devices that are numbered across the complete job belong to the one process that has them. Where
every process has a framework's devices for itself, the same numbers occur in every process, so
these devices are in no common map.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from shardckpt.errors import OptionError
from shardckpt.layout.world import DeviceOwners, World

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_FRAMEWORKS = ("jax", "torch_xla")


def report(processes: int, devices: Mapping[str, Iterable[int]] | None) -> dict[str, Any]:
    """The report of this process to the others at the start of a job, as JSON.

    Raises:
        OptionError: as for `given_devices`.
    """
    # A single process owns all its devices.
    local = found_devices() if processes > 1 else {}
    return {"told": given_devices(devices), "found": local, "cores": cores_of_host()}


def world_of(process: int, processes: int, reports: Sequence[dict[str, Any]]) -> World:
    """A process's world, from the reports of all processes.

    Raises:
        OptionError: as for `owners`.
    """
    whole = owners([one["told"] for one in reports], [one["found"] for one in reports])
    cores = sharing(process, [one["cores"] for one in reports])
    return World(process, processes, whole, cores)


def given_devices(devices: Mapping[str, Iterable[int]] | None) -> dict[str, list[int]]:
    """The sorted device ids that the caller assigns to this process, by framework.

    Raises:
        OptionError: a framework without device ids, or an invalid device id.
    """
    checked: dict[str, list[int]] = {}
    if devices is None:
        return checked
    if not isinstance(devices, Mapping):
        raise OptionError(f"devices={devices!r}: give a dict of framework → device ids.")
    for framework, given in devices.items():
        if framework not in _FRAMEWORKS:
            raise OptionError(
                f"devices= names the framework {framework!r}; it is one of "
                f"{', '.join(_FRAMEWORKS)}."
            )
        try:
            ids = list(given)
        except TypeError as e:
            raise OptionError(
                f"devices= gives {given!r} for {framework}; give a list of device ids."
            ) from e
        wrong = [
            i for i in ids if not isinstance(i, int | np.integer) or isinstance(i, bool) or i < 0
        ]
        if wrong:
            raise OptionError(
                f"devices= gives {wrong[0]!r} for {framework}; device ids are whole numbers from 0."
            )
        checked[framework] = sorted({int(i) for i in ids})
    return checked


def found_devices() -> dict[str, list[int]]:
    """The devices of this process in the frameworks that the program uses.

    The query sets up no framework.
    """
    ids = {}
    if "jax" in sys.modules:
        import jax
        from jax._src import xla_bridge

        if xla_bridge.backends_are_initialized() or jax.distributed.is_initialized():
            ids["jax"] = sorted(d.id for d in jax.local_devices())
    if "torch_xla" in sys.modules:
        import torch_xla  # noqa: F401  (before a module of it, for other threads that import it)
        import torch_xla.runtime as xr
        from torch_xla import _XLAC

        if xr.is_spmd():
            ids["torch_xla"] = sorted(
                int(d.rpartition(":")[2]) for d in _XLAC._xla_get_runtime_devices()
            )
    return ids


def owners(
    given: Sequence[Mapping[str, Any]], local: Sequence[Mapping[str, Any]]
) -> dict[str, DeviceOwners]:
    """The process of every device, for frameworks whose devices are numbered across the job.

    These are the frameworks for which a caller has given devices, and the frameworks for which all
    processes have found devices and no device was found twice.

    Args:
        given: for each process, the device ids by framework that its caller gave.
        local: for each process, the device ids that it found. Given ids take precedence.

    Raises:
        OptionError: two processes own the same device, where callers have given devices.
    """
    whole = {}
    for framework in _FRAMEWORKS:
        is_given = [framework in t for t in given]
        ids = [t.get(framework, f.get(framework)) for t, f in zip(given, local, strict=True)]
        if not any(is_given) and None in ids:
            continue
        process = np.repeat(np.arange(len(ids)), [len(i or ()) for i in ids])
        device = np.array([d for i in ids for d in i or ()], np.int64)
        order = np.argsort(device, kind="stable")
        device, process = device[order], process[order]
        double = np.flatnonzero(device[1:] == device[:-1])
        if not len(double):
            whole[framework] = DeviceOwners(device, process)
        elif any(is_given):
            at = double[0]
            raise OptionError(
                f"{framework} device {device[at]} is owned by process {process[at]} and by "
                f"process {process[at + 1]}, according to devices= and the processes; give every "
                f"process devices={{'{framework}': …}} with ids that no other has."
            )
    return whole


def cores_of_host() -> list[str]:
    """This process's host name, and the mask of the cores on which it may run, as hex digits."""
    return [os.uname().nodename, f"{sum(1 << core for core in os.sched_getaffinity(0)):x}"]


def sharing(process: int, reports: Sequence[Sequence[str]]) -> int:
    """The number of processes that may run on a core of a process, itself included.

    `reports` has, for each process, what `cores_of_host` returned.

    >>> sharing(0, [["a", "3"], ["a", "2"], ["a", "4"], ["b", "3"]])
    2
    """
    host, own = reports[process]
    return sum(name == host and bool(int(mask, 16) & int(own, 16)) for name, mask in reports)


def framework_of_several() -> str | None:
    """A description of the framework that runs in more than one process; None if there is none."""
    if "torch_xla" in sys.modules:
        import torch_xla  # noqa: F401  (before a module of it, for other threads that import it)
        import torch_xla.runtime as xr
        from torch_xla import _XLAC

        if (xr.is_spmd() or _XLAC._xla_runtime_is_initialized()) and xr.process_count() > 1:
            return f"this torch_xla job runs in {xr.process_count()} processes"
    if "jax" in sys.modules:
        import jax
        from jax._src import xla_bridge

        if xla_bridge.backends_are_initialized() and jax.process_count() > 1:
            return f"this JAX job runs in {jax.process_count()} processes"
    return None
