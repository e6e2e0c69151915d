"""Modules of other libraries that the program has imported."""

from __future__ import annotations

import sys
from typing import Any


def imported_module(name: str) -> Any:
    """A module that the program has imported; None if it has not, or if another thread is still importing it.

    An object of the module's own types exists only after the import.
    """
    module = sys.modules.get(name)
    return None if getattr(getattr(module, "__spec__", None), "_initializing", False) else module
