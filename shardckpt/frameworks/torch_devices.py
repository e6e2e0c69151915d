"""Torch's devices: which of them have streams to copy with, and errors of new tensors there."""

from __future__ import annotations

from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING

import torch

from shardckpt.errors import BudgetError, LeafError
from shardckpt.state.names import shown

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def device_memory(name: str, device: object) -> Iterator[None]:
    """Raise BudgetError if a device has no memory for a new tensor.

    This raises LeafError if there is no such device.
    """
    try:
        yield
    except torch.OutOfMemoryError as e:
        raise BudgetError(
            f"{shown(name)}: {device} has no memory left to restore this tensor to ({e}); free "
            "some first."
        ) from e
    except (RuntimeError, AssertionError) as e:  # torch built without the device
        reason = str(e).partition("\n")[0]
        raise LeafError(
            f"{shown(name)}: no tensor can be made on {device} here ({reason}); restore it to "
            "another device."
        ) from e


@cache
def has_streams(kind: str) -> bool:
    """Whether `cuda` makes the copies from and to a kind of device.

    `cuda` makes them for CUDA, and for the accelerator of this torch if it has streams and events.
    """
    if kind == "cuda":
        return True
    # Since torch 2.6.
    accelerator = torch.accelerator.current_accelerator() if hasattr(torch, "accelerator") else None
    if accelerator is None or accelerator.type != kind:
        return False
    return all(
        hasattr(torch.get_device_module(kind), name)
        for name in ("Stream", "Event", "current_stream", "stream", "device")
    )
