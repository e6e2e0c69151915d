"""Renaming: a tensor's name in the other format, derived from the checkpoint's step by step.

1. By default the keys that lead to it are joined with ".": `model/layers.0/w` is `model.layers.0.w`. (For an import names stay.)
2. `strip_prefix` removes a prefix.
3. A file maps old names to new names, or to null to leave a tensor out. Old names are those of the checkpoint, or the results of 1 and 2.
4. `s/regex/replacement/`, one after the other (`substitution`).

A step that changes nothing is an error, because it is probably misspelt; so are two tensors of one name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shardckpt.errors import NamesMismatchError, OptionError
from shardckpt.excerpt import excerpt
from shardckpt.reshard.config_files import read_file
from shardckpt.state.names import did_you_mean, shown

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable

    from shardckpt.convert.naming.substitution import Substitution

__all__ = ["Renaming", "dotted", "read_names"]

_ESCAPED = re.compile(r"~[01e]|~$")
_PLAIN = {"~0": "~", "~1": "/"}


def dotted(name: str) -> str:
    """The keys of a name joined with ".", without escapes.

    >>> dotted("model/layers.0/w"), dotted("params/a~1b"), dotted("0~/w")
    ('model.layers.0.w', 'params.a/b', '0.w')
    """
    return ".".join(_ESCAPED.sub(lambda found: _PLAIN.get(found[0], ""), component) for component in name.split("/"))


def read_names(path: str | os.PathLike[str]) -> dict[str, str | None]:
    """Read a JSON, YAML or TOML file of old names → new names, or None to leave a tensor out (TOML has `false` for null).

    Raises:
        OptionError: the file cannot be read, or has other contents.
    """
    doc = read_file(path, "file of names", (".json", ".toml", ".yaml", ".yml"))
    if not isinstance(doc, Mapping):
        raise OptionError(f"{path}: a {type(doc).__name__} stands where old and new names are expected.")
    for old, new in doc.items():
        if isinstance(new, Mapping):
            raise OptionError(f'{path}: {excerpt(old)} is a table; in TOML, put a name with dots in quotes: "a.b" = "c.d".')
        if not isinstance(old, str) or not (new is None or new is False or (isinstance(new, str) and new)):
            raise OptionError(f"{path}: {excerpt(old)} = {excerpt(new)}: give a new name, or null (in TOML false) to leave it out.")
    return {old: new or None for old, new in doc.items()}


@dataclass(frozen=True, slots=True)
class Renaming:
    """Rules that change names."""

    strip_prefix: str | None = None
    """A prefix such as "model/", or "model.", which means the same; at least one name must have it."""
    names: Mapping[str, str | None] = field(default_factory=dict)
    """Old name → new name, or None to leave the tensor out."""
    rules: tuple[Substitution, ...] = ()
    origin: str = "the file of names"
    """Origin of `names`, for messages."""

    def __post_init__(self) -> None:
        """Refuse a prefix that is not text."""
        if self.strip_prefix is not None and (not isinstance(self.strip_prefix, str) or not self.strip_prefix):
            raise OptionError(f"strip_prefix={excerpt(self.strip_prefix)}: give what names begin with, such as 'model/'.")

    def apply(self, names: Iterable[str], *, keep_slashes: bool = False) -> dict[str, str]:
        """Old name → new name, in order, without the names that are left out.

        Args:
            names: names of tensors.
            keep_slashes: whether "/" is kept, as for an import.

        Raises:
            OptionError: a rule matches nothing.
            NamesMismatchError: two tensors would have one name, or one would have none; the message names them.
        """
        new = {name: name if keep_slashes else dotted(name) for name in names}
        self._strip(new)
        self._look_up(new)
        for rule in self.rules:
            found = {old: changed for old, name in new.items() if (changed := rule.of(name)) is not None}
            if not found:
                raise OptionError(f"rename {rule} matches none of {len(new)} names, such as {shown(next(iter(new), ''))}; correct it.")
            new |= found
        _refuse_collisions(new)
        return new

    def _strip(self, new: dict[str, str]) -> None:
        prefix = self.strip_prefix
        if prefix is None:
            return
        found = {}
        for old, name in new.items():
            for given in (prefix, prefix.replace("/", ".")):
                if name.startswith(given):
                    found[old] = name.removeprefix(given)
                    break
        if not found:
            first = shown(next(iter(new.values()), ""))
            raise OptionError(f"strip_prefix={prefix!r}: none of {len(new)} names begins so; the first is {first}.")
        new |= found

    def _look_up(self, new: dict[str, str]) -> None:
        """Apply the file of names: rename each name that it lists once, and remove the names that it maps to None."""
        current = {name: old for old, name in new.items()}
        for given, wanted in self.names.items():
            old = given if given in new else current.get(given)
            if old is None:
                raise OptionError(f"{self.origin}: there is no tensor {shown(given)}{did_you_mean(given, [*current, *new])}.")
            if wanted is None:
                del new[old]
            else:
                new[old] = wanted


def _refuse_collisions(new: Mapping[str, str]) -> None:
    seen: dict[str, str] = {}
    for old, name in new.items():
        if not name:
            raise NamesMismatchError(f"{shown(old)} would have no name after renaming; leave it out, or rename it otherwise.")
        other = seen.setdefault(name, old)
        if other != old:
            raise NamesMismatchError(
                f"{shown(other)} and {shown(old)} would both be called {shown(name)}; rename one of them, or leave it out (exclude)."
            )
