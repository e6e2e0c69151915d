"""Parser of rules files: TOML, or the same in YAML.

    mesh = "data=2,model=4"        # or a table: {data = 2, model = 4}; --mesh has precedence
    unmatched = "error"            # or "replicate", the default
    preset = "llama/fsdp=data+tp"  # or several in a list; for tensors that no rule below matches

    [rules]                        # in order; or a list of texts: rules = ["pattern=spec", …]
    "**/layers.*.w1.weight" = "(None,model)"
    "**/layers.*.w2.weight" = ["model", []]  # an entry per dimension: an axis, a list of them, or
                                             # [] (null in YAML)

All keys are optional, and no others are allowed.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardckpt.errors import OptionError, ShardingError
from shardckpt.io.config_files import read_file
from shardckpt.layout.partition_spec import PartitionSpec
from shardckpt.reshard.rules.mesh_text import mesh_of
from shardckpt.reshard.rules.preset import Preset
from shardckpt.reshard.rules.rule import Rule
from shardckpt.reshard.rules.spec_text import parse_spec
from shardckpt.state.names import did_you_mean
from shardckpt.text import clip, shorten

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator

_KEYS = ("mesh", "unmatched", "preset", "rules")


def read_rules(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The arguments of `Rules` that are in a file; see `Rules.from_file`."""
    file = Path(path)
    doc = read_file(file, "rules file", (".toml", ".yaml", ".yml"))
    if not isinstance(doc, Mapping):
        raise OptionError(
            f"{file}: expected keys ({', '.join(_KEYS)}), found a {type(doc).__name__}."
        )
    for key in doc:
        if key not in _KEYS:
            raise OptionError(
                f"{file}: there is no key {shorten(key)}{did_you_mean(str(key), _KEYS)}; there "
                f"are {', '.join(_KEYS)}."
            )
    mesh = mesh_of(doc["mesh"], f"{file}, mesh") if doc.get("mesh") is not None else None
    rules = tuple(_rules(doc.get("rules"), file))
    try:
        presets = tuple(Preset.parse(preset) for preset in _as_list(doc.get("preset")))
    except OptionError as error:
        raise OptionError(f"{file}: {error}") from error
    return {
        "entries": (*rules, *presets),
        "unmatched": doc.get("unmatched", "replicate"),
        "mesh": mesh,
    }


def _rules(value: Any, file: Path) -> Iterator[Rule]:
    if isinstance(value, Mapping):
        for number, (pattern, spec) in enumerate(value.items(), 1):
            origin = f"{file}, rule {number}"
            yield Rule(pattern, _spec(spec, f"{origin} ({clip(str(pattern))!r})"), origin)
        return
    for number, text in enumerate(_as_list(value), 1):
        yield Rule.parse(text, f"{file}, rule {number}")


def _spec(value: Any, where: str) -> PartitionSpec:
    """A spec as text, or as a list of entries."""
    try:
        if isinstance(value, str):
            return parse_spec(value)
        if isinstance(value, list):
            return PartitionSpec(
                *(tuple(part) if isinstance(part, list) else part for part in value)
            )
    except (OptionError, ShardingError) as error:
        raise OptionError(f"{where}: {error}") from error
    raise OptionError(
        f'{where}: {shorten(value)} is not a partition spec; write "replicated", "(None,model)" '
        "or a list of entries."
    )


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]
