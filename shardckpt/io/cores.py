"""How many cores may this process use? Not how many the machine has: a job may have been given a part of them."""

from __future__ import annotations

import os

__all__ = ["cores"]


def cores() -> int:
    """Those that the operating system lets this process run on: at least one."""
    return len(os.sched_getaffinity(0))
