"""The state of the random number generators, which every process has separately.

Covered: Python's `random`, numpy's global generator, torch's generators on the CPU and on every
CUDA device, torch_xla's generator. Generators that the program creates are not found here: pass
them (if they have a `state_dict`) or their states to `train_state`. JAX's keys are arrays in the
program's own state.

A generator is restored exactly: its next numbers are the numbers that followed the save. A process
without a counterpart among the saving processes

1. takes over a generator that had the same state on all of them: such processes draw the same
   numbers on purpose (for dropout under tensor parallelism, say);
2. derives all other generators from process 0's state and its own process number, so that no two
   processes draw the same numbers, and a job that is resumed twice draws the same numbers both
   times. Under SPMD all processes run one program, so torch_xla's generator is process 0's.

The first of the states of CUDA devices is the state of the process's current device. The current
device gets it back, whatever its number is now, and the other devices get the others in ascending
order. Devices beyond those that were saved derive theirs from the first state.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from shardckpt.frameworks import per_process
from shardckpt.state.names import imported_module

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class Generators:
    """The generators of this process, as one object that has a `state_dict`."""

    def state_dict(self) -> dict[str, Any]:
        """The states of this program's generators: small leaves, host arrays and CPU tensors."""
        version, words, normal = random.getstate()
        states: dict[str, Any] = {
            "python": {"version": version, "words": np.array(words, np.uint32), "normal": normal},
            "numpy": np.random.get_state(legacy=False),  # noqa: NPY002  (the generator that programs share)
        }
        if (torch := imported_module("torch")) is not None:
            states["torch"] = torch.get_rng_state()
            if torch.cuda.is_available() and torch.cuda.is_initialized():
                states["cuda_devices"] = [
                    torch.cuda.get_rng_state(device) for device in _cuda_devices(torch)
                ]
        if (xla := _xla()) is not None:
            states["xla"] = xla.get_rng_state()
        return states

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the states of the generators that this program has."""
        if (python := state.get("python")) is not None:
            random.setstate((python["version"], tuple(python["words"].tolist()), python["normal"]))
        if (numpy_state := state.get("numpy")) is not None:
            np.random.set_state(numpy_state)  # noqa: NPY002
        torch = imported_module("torch")
        if torch is not None and "torch" in state:
            torch.set_rng_state(state["torch"])
        if torch is not None and torch.cuda.is_available():
            # Of earlier versions.
            for device, of_device in zip(
                range(torch.cuda.device_count()), state.get("cuda", ()), strict=False
            ):
                torch.cuda.set_rng_state(of_device, device)
            if "cuda_devices" in state:
                _load_cuda(torch, state["cuda_devices"])
        if "xla" in state and (xla := _xla()) is not None:
            xla.set_rng_state(state["xla"])


def inherited(states: Sequence[Mapping[str, Any]], process: int) -> dict[str, Any]:
    """States of generators for a process that has no counterpart among those that saved.

    Args:
        states: the generator states of the saving processes, in process order.
        process: the number of this process; equal numbers get equal states, different numbers
            unrelated ones.
    """
    first, *others = (
        {name: per_process.encode_value(value, name) for name, value in state.items()}
        for state in states
    )
    shared = [
        name
        for name, state in first.items()
        if others and all(other.get(name) == state for other in others)
    ]
    return {
        **_derive(states[0], process, json.dumps(first)),
        **{name: states[0][name] for name in shared},
    }


def _derive(state: Mapping[str, Any], process: int, document: str) -> dict[str, Any]:
    seed = int.from_bytes(hashlib.sha256(f"{process} {document}".encode()).digest()[:8])
    version, words, normal = random.Random(seed).getstate()  # noqa: S311  (not for secrets)
    runtime = imported_module("torch_xla.runtime")
    made: dict[str, Any] = {
        "python": {"version": version, "words": np.array(words, np.uint32), "normal": normal},
        "numpy": np.random.RandomState([seed >> 32, seed & 0xFFFFFFFF]).get_state(legacy=False),
        "xla": state.get("xla") if runtime is not None and runtime.is_spmd() else seed,
    }
    if (torch := imported_module("torch")) is not None:
        made["torch"] = torch.Generator("cpu").manual_seed(seed).get_state()
        if torch.cuda.is_available():
            for key in ("cuda", "cuda_devices"):
                made[key] = [
                    _cuda_state(torch, seed + place) for place in range(len(state.get(key, ())))
                ]
    return {name: value for name, value in made.items() if name in state}


def _cuda_devices(torch: Any) -> list[int]:
    """The numbers of all CUDA devices: the current one, and then the others in ascending order."""
    current = torch.cuda.current_device() if torch.cuda.is_initialized() else 0
    return sorted(range(torch.cuda.device_count()), key=lambda device: (device != current, device))


def _load_cuda(torch: Any, states: Sequence[Any]) -> None:
    """Restore the generators of all CUDA devices, in the order of `_cuda_devices`."""
    devices = _cuda_devices(torch)
    for device, of_device in zip(devices, states, strict=False):
        torch.cuda.set_rng_state(of_device, device)
    for place, device in enumerate(devices[len(states) :]):
        digest = hashlib.sha256(f"{place} {states[0].tolist()}".encode()).digest()
        torch.cuda.set_rng_state(_cuda_state(torch, int.from_bytes(digest[:8])), device)


def _cuda_state(torch: Any, seed: int) -> Any:
    """The state of a CUDA generator, of any device, with that seed."""
    return torch.Generator("cuda").manual_seed(seed % (1 << 64)).get_state()


def _xla() -> Any:
    """torch_xla's `xla_model` if the program runs torch_xla; None otherwise.

    Never starts the XLA runtime.
    """
    if "torch_xla" not in sys.modules:
        return None
    import torch_xla
    from torch_xla.core import xla_model

    return xla_model if torch_xla._XLAC._xla_runtime_is_initialized() else None  # noqa: SLF001  (no public function reports this)
