"""Extension of Griffe for the reference.

Functions whose options are declared elsewhere get the docstring that Python has for them. Defaults
that are names of constants are shown as values.
"""

from __future__ import annotations

import re
from importlib import import_module
from inspect import getdoc
from typing import TYPE_CHECKING, Any

from griffe import Extension

if TYPE_CHECKING:
    from griffe import Attribute, Function, Object

_CONSTANT = re.compile(r"[A-Z_][A-Z0-9_]*")
_SIMPLE = (str, int, float, tuple)


class OptionDocstrings(Extension):
    """Replaces docstrings of functions that `shardckpt.options.documented` decorates."""

    def on_function(self, *, func: Function, **_more: Any) -> None:
        """Take the docstring from the function itself."""
        if func.docstring is not None and any(
            str(one.value).startswith("documented(") for one in func.decorators
        ):
            func.docstring.value = getdoc(getattr(import_module(func.module.path), func.name)) or ""
        for one in func.parameters:
            one.default = _shown(one.default, func)

    def on_attribute_instance(self, *, attr: Attribute, **_more: Any) -> None:
        """Show the default of a dataclass's field as a value."""
        attr.value = _shown(attr.value, attr)


def _shown(value: Any, owner: Object) -> Any:
    """A value in place of the name of a constant of the owner's module."""
    if not _CONSTANT.fullmatch(str(value)):
        return value
    constant = getattr(import_module(owner.module.path), str(value), None)
    return repr(constant) if isinstance(constant, _SIMPLE) else value
