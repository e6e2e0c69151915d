"""Command-line options of `export` and `import` for names: which tensors, their names and sources."""

from __future__ import annotations

from typing import Annotated, Any

import typer

__all__ = [
    "AddPrefix",
    "Config",
    "Exclude",
    "Include",
    "InvertMapping",
    "MappingFile",
    "Rename",
    "RenameFile",
    "StripPrefix",
    "TiesText",
    "given",
]

Include = Annotated[list[str] | None, typer.Option("--include", metavar="PATTERN", help="Names to take; may be repeated.")]
Exclude = Annotated[list[str] | None, typer.Option("--exclude", metavar="PATTERN", help="Names to leave out; may be repeated.")]
StripPrefix = Annotated[str | None, typer.Option("--strip-prefix", metavar="TEXT", help="Take it off names.")]
Rename = Annotated[list[str] | None, typer.Option("--rename", metavar="s/RE/NEW/", help="Change names; may be repeated.")]
RenameFile = Annotated[str | None, typer.Option("--rename-file", metavar="FILE", help="Old names and new ones.")]
MappingFile = Annotated[str | None, typer.Option("--mapping", metavar="FILE", help="What is joined, split or transposed.")]
InvertMapping = Annotated[bool, typer.Option("--invert-mapping", help="Read the mapping backwards.")]
AddPrefix = Annotated[str | None, typer.Option("--add-prefix", metavar="TEXT", help="Put it before names.")]
TiesText = Annotated[str | None, typer.Option("--ties", metavar="HOW", help="Tied tensors: auto, once or copies.")]
Config = Annotated[str | None, typer.Option("--config", metavar="FILE", help="The model's config.json.")]


def given(**options: Any) -> dict[str, Any]:
    """The options that were given, for a call that has defaults of its own."""
    return {name: value for name, value in options.items() if value}
