"""Parser of configuration files that users write: TOML, YAML or JSON, chosen by file name.

Code is never run.

The formats disagree about duplicate keys; here a duplicate key is an error.
"""

from __future__ import annotations

import json
import os
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardckpt.errors import OptionError
from shardckpt.text import shorten

if TYPE_CHECKING:
    from collections.abc import Sequence

_NAMES = {".toml": "TOML", ".yaml": "YAML", ".yml": "YAML", ".json": "JSON"}


def read_file(path: str | os.PathLike[str], what: str, kinds: Sequence[str]) -> Any:
    """The document in a file.

    Args:
        path: path of the file.
        what: description of the file for messages: "rules file".
        kinds: the allowed file name endings: ".toml".

    Raises:
        OptionError: the file has another ending, cannot be read, or cannot be parsed; the message
            names the file.
    """
    if not isinstance(path, str | os.PathLike):
        raise OptionError(f"{shorten(path)} is not the path of a {what}.")
    file = Path(path)
    kind = file.suffix.lower()
    if kind not in kinds:
        formats = " or ".join(dict.fromkeys(_NAMES[kind] for kind in kinds))
        raise OptionError(
            f"{file}: a {what} is {formats}, so its name must end with {', '.join(kinds[:-1])} or "
            f"{kinds[-1]}."
        )
    try:
        text = file.read_text("utf-8")
    except (OSError, ValueError) as error:
        raise OptionError(f"{file}: the {what} cannot be read: {error}.") from error
    return parse_text(text, kind, str(file))


def parse_text(text: str, kind: str, where: str) -> Any:
    """The document in a text.

    Args:
        text: text of a file.
        kind: the ending of the file's name: ".toml".
        where: name of the file, for messages.

    Raises:
        OptionError: the text is not a document of that kind.
    """
    read = {".toml": _toml, ".json": _json}.get(kind, _yaml)
    return read(text, where)


def _toml(text: str, where: str) -> Any:
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise OptionError(f"{where}: not TOML: {error}.") from error


def _json(text: str, where: str) -> Any:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        members: dict[str, Any] = {}
        for key, value in pairs:
            if key in members:
                raise ValueError(f"the key {key!r} appears twice")
            members[key] = value
        return members

    try:
        return json.loads(text, object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        raise OptionError(f"{where}: not JSON: {error}.") from error


def _yaml(text: str, where: str) -> Any:
    import yaml

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        """A loader that refuses duplicate keys; YAML's own loader keeps the last one.

        Its errors have a place, also where YAML's own loader raises what Python raises.
        """

        def construct_object(self, node: Any, deep: bool = False) -> Any:
            try:
                return super().construct_object(node, deep)
            except (ValueError, TypeError, AttributeError, LookupError) as error:
                raise yaml.constructor.ConstructorError(
                    None,
                    None,
                    f"{shorten(node.value)} cannot be read as {node.tag.rpartition(':')[2]}",
                    node.start_mark,
                ) from error

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            keys: set[Any] = set()
            for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
                name = (key.tag, str(key.value))
                if name in keys:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {key.value!r} appears twice", key.start_mark
                    )
                keys.add(name)
            return super().construct_mapping(node, deep)

    try:
        return yaml.load(text, Loader)  # noqa: S506  # a SafeLoader
    except (yaml.YAMLError, RecursionError) as error:
        raise OptionError(f"{where}: not YAML: {' '.join(str(error).split())}.") from error
