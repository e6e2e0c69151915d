"""Extension of Griffe for the reference: functions whose options are declared elsewhere get the docstring that Python has for them."""

from __future__ import annotations

from importlib import import_module
from inspect import getdoc
from typing import TYPE_CHECKING, Any

from griffe import Extension

if TYPE_CHECKING:
    from griffe import Function


class OptionDocstrings(Extension):
    """Replaces docstrings of functions that `shardckpt.options.documented` decorates."""

    def on_function(self, *, func: Function, **_more: Any) -> None:
        """Take the docstring from the function itself."""
        if func.docstring is not None and any(str(one.value).startswith("documented(") for one in func.decorators):
            func.docstring.value = getdoc(getattr(import_module(func.module.path), func.name)) or ""
