"""Options that say how tensors are to be laid out: a mesh, and rules from the command line, a file, a family or another checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import typer

from shardckpt.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardckpt.mesh import Mesh
    from shardckpt.rules import Rules

__all__ = ["HfConfig", "Like", "MeshText", "Preset", "RuleTexts", "RulesFile", "Unmatched", "chosen_layouts"]

MeshText = Annotated[str | None, typer.Option("--mesh", metavar="AXES", help="The new mesh, as in data=2,model=4.")]
RuleTexts = Annotated[
    list[str] | None, typer.Option("--rule", metavar="PATTERN=SPEC", help="As in '**/w1=(None,model)'; the first that matches counts.")
]
RulesFile = Annotated[str | None, typer.Option("--rules", metavar="FILE", help="Rules in TOML or YAML.")]
Preset = Annotated[str | None, typer.Option("--preset", metavar="FAMILY", help="Rules of a family of models, as in llama/fsdp+tp.")]
Like = Annotated[str | None, typer.Option("--like", metavar="URL", help="Layouts of another checkpoint.")]
HfConfig = Annotated[str | None, typer.Option("--from-hf-config", metavar="FILE", help="The family that a config.json names.")]
Unmatched = Annotated[str, typer.Option("--unmatched", metavar="WHAT", help="Tensors without a rule: replicate, or error.")]


def chosen_layouts(
    mesh: str | None,
    rule: Sequence[str] | None,
    rules: str | None,
    preset: str | None,
    like: str | None,
    hf_config: str | None,
    unmatched: str,
) -> tuple[Mesh | None, Rules | None]:
    """The mesh and the rules, None where there are none: those of the command line first, then a file's, another checkpoint's, a family's.

    Raises:
        OptionError: one of them is nothing of the kind.
    """
    from dataclasses import replace

    from shardckpt.checkpoint import open as open_checkpoint
    from shardckpt.rules import Rules, parse_mesh

    found: list[Rules] = []
    if rule:
        found.append(Rules.parse(rule))
    if rules is not None:
        found.append(Rules.from_file(rules))
    if like is not None:
        found.append(Rules.like(open_checkpoint(like).record, like))
    if preset is not None:
        found.append(Rules.preset(preset))
    if hf_config is not None:
        found.append(Rules.from_hf_config(hf_config))
    over = parse_mesh(mesh) if mesh is not None else None
    if not found:
        if over is None:
            raise OptionError("no layout is given: name a mesh (--mesh data=2,model=4), or another checkpoint to be like (--like URL).")
        return over, None
    together = found[0]
    for others in found[1:]:
        together = together.then(others)
    what: Literal["replicate", "error"] = _unmatched(unmatched)
    if what == "error":
        together = replace(together, unmatched=what)
    return over or together.mesh, together


def _unmatched(text: str) -> Literal["replicate", "error"]:
    if text == "replicate":
        return "replicate"
    if text == "error":
        return "error"
    raise OptionError(f"--unmatched {text!r}: use replicate or error.")
