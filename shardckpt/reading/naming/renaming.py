"""Rules that change names: substitutions (`substitution`), and tables of old and new names.

`rename` applies them.

A rule that changes nothing is an error, because it is probably misspelt; so are two tensors of one
name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardckpt.errors import NamesMismatchError, OptionError
from shardckpt.io.config_files import read_file
from shardckpt.state.names import did_you_mean, shown
from shardckpt.text import shorten

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable

    from shardckpt.reading.naming.substitution import Substitution

_ESCAPED = re.compile(r"~[01e]|~$")
_PLAIN = {"~0": "~", "~1": "/"}


def dotted(name: str) -> str:
    """The keys of a name joined with ".", without escapes.

    >>> dotted("model/layers.0/w"), dotted("params/a~1b"), dotted("0~/w")
    ('model.layers.0.w', 'params.a/b', '0.w')
    """
    return ".".join(
        _ESCAPED.sub(lambda match: _PLAIN.get(match[0], ""), component)
        for component in name.split("/")
    )


def read_names(path: str | os.PathLike[str]) -> NameTable:
    """Read a JSON, YAML or TOML file of old names → new names.

    A null in place of a new name leaves the leaf out; TOML has `false` for null.

    Raises:
        OptionError: the file cannot be read, or has other contents.
    """
    doc = read_file(path, "file of names", (".json", ".toml", ".yaml", ".yml"))
    if not isinstance(doc, Mapping):
        raise OptionError(
            f"{path}: expected a table of old and new names, found a {type(doc).__name__}."
        )
    for old, new in doc.items():
        if isinstance(new, Mapping):
            raise OptionError(
                f"{path}: {shorten(old)} is a table; in TOML, put a name with dots in quotes: "
                '"a.b" = "c.d".'
            )
        if not isinstance(old, str) or not (
            new is None or new is False or (isinstance(new, str) and new)
        ):
            raise OptionError(
                f"{path}: {shorten(old)} = {shorten(new)}: give a new name, or null (in TOML "
                "false) to leave it out."
            )
    return NameTable(str(path), {old: new or None for old, new in doc.items()})


@dataclass(frozen=True, slots=True)
class NameTable:
    """Old name → new name, or None to leave a leaf out. All entries apply at once."""

    origin: str
    """The file, for messages."""
    names: Mapping[str, str | None]
    """New name by old name. Old names are those of the source, or those that earlier rules made."""

    def changes(self, present: Mapping[str, str]) -> dict[str, str | None]:
        """Name in the source → new name, for the leaves that the table names.

        See `Substitution.changes`.
        """
        changed = {}
        sources = {name: old for old, name in present.items()}
        for old, new in self.names.items():
            source = old if old in present else sources.get(old)
            if source is None:
                raise OptionError(
                    f"{self.origin}: there is no tensor "
                    f"{shown(old)}{did_you_mean(old, [*sources, *present])}."
                )
            if source in changed:
                raise OptionError(
                    f"{self.origin}: {shown(old)} and another name mean one tensor, "
                    f"{shown(source)}; leave one of them out."
                )
            changed[source] = new
        return changed


def rename(
    names: Mapping[str, str],
    rules: Iterable[Substitution | NameTable],
    give_way: Callable[[dict[str, str]], dict[str, str]] | None = None,
) -> dict[str, str]:
    """Apply rules to names, one after the other.

    Args:
        names: name in the source → present name.
        rules: the rules, in order.
        give_way: leaves out the names that other ones replace.

    Returns:
        Name in the source → new name, without the leaves that are left out.

    Raises:
        OptionError: a rule matches nothing.
        NamesMismatchError: two leaves would have one name, or one would have none; the message
            names them.
    """
    renamed = dict(names)
    for rule in rules:
        changes = rule.changes(renamed)
        present = {old: changes.get(old, name) for old, name in renamed.items()}
        renamed = {old: name for old, name in present.items() if name is not None}
    renamed = renamed if give_way is None else give_way(renamed)
    _refuse_collisions(renamed)
    return renamed


def _refuse_collisions(renamed: Mapping[str, str]) -> None:
    seen: dict[str, str] = {}
    for old, name in renamed.items():
        if not name:
            raise NamesMismatchError(
                f"{shown(old)} would have no name after renaming; leave it out, or rename it "
                "otherwise."
            )
        other = seen.setdefault(name, old)
        if other != old:
            raise NamesMismatchError(
                f"{shown(other)} and {shown(old)} would both be called {shown(name)}; rename one "
                "of them otherwise. An export may leave it out (exclude)."
            )
