"""Ordered rules that give every tensor a layout.

1. Entries are tried in order, and the first one that applies to the tensor decides: a rule (pattern
   → spec), a preset (the rules of a model family), or another checkpoint's layouts by name.
2. A rule applies to the names that its pattern matches, and to names directly below them
   (`pattern`): optimizer state follows its parameter if it has the parameter's shape. State with
   another shape (such as Adafactor's rows and columns) is replicated, with a notice.
3. A tensor to which no entry applies is replicated, with a notice, or is an error, as `unmatched`
   says. A tensor of one element is always replicated: there is nothing to cut.
4. Dimensions need not divide evenly: parts are ceil(size / parts) long, the last ones short or
   empty, as in XLA, with a notice.

`decide` sees one tensor. `decide_all` sees all tensors of a checkpoint: it knows the parameter that
state belongs to, and refuses rules that decide nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from shardckpt.errors import NamesMismatchError, OptionError
from shardckpt.layout.mesh import Mesh
from shardckpt.reshard.rules.decisions import decide, meaning
from shardckpt.reshard.rules.explain import explanation
from shardckpt.reshard.rules.files import read_rules
from shardckpt.reshard.rules.hf_config import read_preset
from shardckpt.reshard.rules.like import Like
from shardckpt.reshard.rules.mesh_text import parse_mesh
from shardckpt.reshard.rules.pattern import match
from shardckpt.reshard.rules.preset import Preset
from shardckpt.reshard.rules.rule import Rule
from shardckpt.state.names import Candidates, did_you_mean, shown
from shardckpt.text import Message, named, shorten

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence

    from shardckpt.format.record import CheckpointRecord
    from shardckpt.format.structure import StoredLayout
    from shardckpt.reshard.rules.decisions import Decision, Step

Entry: TypeAlias = Rule | Preset | Like
"""A rule, the preset of a family, or another checkpoint's layouts."""

_EVERYTHING = "**"
"""The pattern for all remaining tensors; it may match none."""


@dataclass(frozen=True, slots=True)
class Rules:
    """Ordered rules that give every tensor a layout: the first entry that applies decides.

    An entry is a rule (pattern → spec), a preset (the rules of a model family), or the layouts of
    another checkpoint. Most `Rules` are made by the class methods below. Patterns, specs, files and
    presets are described in docs/rules.md.

    Raises:
        OptionError: an entry or `unmatched` is invalid.

    Examples:
        >>> rules = Rules.parse(["**/*.bias=replicated", "**/*=(fsdp)"], mesh="fsdp=4")
        >>> rules.decide("model/w", (16, 8)).layout.tile((16, 8))
        (4, 8)
    """

    entries: tuple[Entry, ...] = ()
    """Rules, presets and other checkpoints' layouts, in order."""
    unmatched: Literal["replicate", "error"] = "replicate"
    """Treatment of tensors to which no entry applies: replicate them, or raise OptionError."""
    mesh: Mesh | None = None
    """The mesh of the layouts if a call gives no mesh."""

    def __post_init__(self) -> None:
        """Refuse invalid entries."""
        object.__setattr__(self, "entries", tuple(self.entries))
        for entry in self.entries:
            if not isinstance(entry, Entry):
                raise OptionError(
                    f"Rules: {shorten(entry)} is not a rule; use Rules.parse(['pattern=spec', …])."
                )
        if self.unmatched not in ("replicate", "error"):
            raise OptionError(
                f'Rules(unmatched={shorten(self.unmatched)}): use "replicate" or "error".'
            )
        if self.mesh is not None and not isinstance(self.mesh, Mesh):
            raise OptionError(
                f"Rules(mesh={shorten(self.mesh)}): give a shardckpt.Mesh, or use parse_mesh on "
                "text."
            )

    @classmethod
    def parse(
        cls,
        texts: str | Iterable[str],
        *,
        mesh: Mesh | str | None = None,
        unmatched: Literal["replicate", "error"] = "replicate",
    ) -> Rules:
        """Parse rules from texts of the form `pattern=spec`, as in `--rule`.

        Raises:
            OptionError: a text is not a rule; the message names the text and the position of the
                mistake.
        """
        listed = (
            [texts]
            if isinstance(texts, str)
            else list(texts)
            if isinstance(texts, Iterable)
            else [texts]
        )
        entries = tuple(Rule.parse(text, f"rule {number}") for number, text in enumerate(listed, 1))
        return cls(entries, unmatched, parse_mesh(mesh) if isinstance(mesh, str) else mesh)

    @classmethod
    def preset(cls, text: str) -> Rules:
        """The rules of a model family, such as "llama", "mixtral/ep" or "gpt2/fsdp=data+tp".

        Raises:
            OptionError: there is no such preset; the message lists all presets.
        """
        return cls((Preset.parse(text),))

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> Rules:
        """Read rules from a TOML or YAML file.

        Raises:
            OptionError, ShardingError: the file cannot be read or is invalid; the message names the
                file and the entry.
        """
        fields = read_rules(path)
        try:
            return cls(**fields)
        except OptionError as error:
            raise OptionError(f"{path}: {error}") from error

    @classmethod
    def from_hf_config(cls, path: str | os.PathLike[str], roles: str = "") -> Rules:
        """The preset for a Hugging Face model, chosen by the `model_type` in its `config.json`.

        Args:
            path: the file, or its directory.
            roles: kinds of parallelism, such as "fsdp+tp"; empty: all for which the mesh has an
                axis.

        Raises:
            OptionError: the file cannot be read, or names a model without a preset; the message
                lists the known models.
        """
        return cls((read_preset(path, roles),))

    @classmethod
    def like(cls, record: CheckpointRecord, origin: str = "the other checkpoint") -> Rules:
        """The layouts of another checkpoint, by name.

        The mesh is the other checkpoint's, if all its tensors have the same one; a mesh given to a
        call replaces it.

        Args:
            record: the other checkpoint's `Checkpoint.record`.
            origin: its URL, for messages.
        """
        entry = Like.of(record.structure, origin)
        return cls((entry,), mesh=entry.mesh)

    @classmethod
    def by_name(
        cls, layouts: Mapping[str, StoredLayout], origin: str = "its layout by name"
    ) -> Rules:
        """Layouts computed for each tensor; a mesh given to a call replaces theirs.

        `shardckpt.reshard.batch_dims.batch_shardings` computes such layouts from the graph of a
        program.

        Args:
            layouts: name in the checkpoint → layout.
            origin: origin of the layouts, for messages.
        """
        entry = Like(tuple((name, None, layout) for name, layout in layouts.items()), origin)
        return cls((entry,), mesh=entry.mesh)

    @classmethod
    def from_program(
        cls,
        exported: Any,
        batch: Mapping[str, int] | None = None,
        *,
        mesh: Mesh,
        axis: str = "data",
        prefix: str = "",
        **assumptions: Any,
    ) -> Rules:
        """The layouts of a program's parameters and buffers, from its exported graph.

        Tensors with one row per sample are cut over `axis`; all others are replicated
        (docs/batch-dims.md).

        Args:
            exported: a `torch.export.ExportedProgram` or a functional `torch.fx.GraphModule`.
            batch: input or buffer → its batch dimension; optional for a graph with one dynamic
                dimension.
            mesh: the mesh.
            axis: the mesh axis that cuts the batch.
            prefix: text before each name, such as "model/" for a state {"model":
                module.state_dict()}.
            assumptions: further arguments of `shardckpt.reshard.batch_dims.batch_shardings`, such
                as `replicated`.

        Raises:
            OptionError: there is no such input or dimension, or `batch` is missing and cannot be
                inferred.
            ShardingError: the mesh has no such axis, or a tensor's layout is partial or unknown.
        """
        from shardckpt.reshard.batch_dims import batch_shardings

        return cls.by_name(
            batch_shardings(exported, batch, mesh=mesh, axis=axis, prefix=prefix, **assumptions),
            "the program",
        )

    def then(self, others: Rules) -> Rules:
        """These rules first, then `others`.

        If both have a mesh, these rules' mesh is used; unmatched="error" of either one is kept.
        """
        unmatched = others.unmatched if self.unmatched == "replicate" else self.unmatched
        return Rules((*self.entries, *others.entries), unmatched, self.mesh or others.mesh)

    def steps(self, mesh: Mesh | None = None) -> tuple[Step, ...]:
        """The rules and copied layouts in order, with presets expanded for a mesh.

        All axes are checked.

        Raises:
            ShardingError: the mesh lacks an axis, or there is no mesh; the message names the rule.
        """
        mesh = mesh or self.mesh
        steps: list[Step] = []
        for entry in self.entries:
            if isinstance(entry, Rule):
                entry.check_axes(mesh)
            steps += entry.rules(mesh) if isinstance(entry, Preset) else [entry]
        return tuple(steps)

    def decide(self, name: str, shape: tuple[int, ...], mesh: Mesh | None = None) -> Decision:
        """The layout of one tensor.

        Args:
            name: name of the tensor in the checkpoint.
            shape: shape of the tensor.
            mesh: mesh of the layout; None: the rules' own mesh. Without any mesh, the layout is
                None.

        Raises:
            OptionError: no entry applies to the tensor, and `unmatched` is "error".
            ShardingError: the rule that decides has more entries than the tensor has dimensions, or
                an axis that the mesh lacks.
        """
        decided = decide(self.steps(mesh), {name: shape}, mesh or self.mesh)
        self._refuse_undecided(decided.undecided)
        return decided.decisions[name]

    def decide_all(
        self, tensors: Mapping[str, tuple[int, ...]], mesh: Mesh | None = None
    ) -> dict[str, Decision]:
        """The layouts of all tensors of a checkpoint.

        Args:
            tensors: shape by name.
            mesh: as for `decide`.

        Raises:
            OptionError: as for `decide`; or a rule decides for no tensor, because it matches none
                or earlier rules match first.
            ShardingError: as for `decide`.
        """
        steps = self.steps(mesh)
        decided = decide(steps, tensors, mesh or self.mesh)
        self._refuse_unused(steps, decided.used, tensors)
        self._refuse_undecided(decided.undecided)
        return decided.decisions

    def explain(
        self,
        name: str,
        tensors: Mapping[str, tuple[int, ...]],
        mesh: Mesh | None = None,
        *,
        itemsize: int = 1,
    ) -> str:
        """Explain one tensor's layout as text: every rule tested, and the resulting shards.

        Args:
            name: name of the tensor.
            tensors: shape by name, of all tensors.
            mesh: as for `decide`.
            itemsize: bytes per element.

        Raises:
            NamesMismatchError: there is no such tensor; the message names the most similar one.
            ShardingError: as for `decide`.
        """
        if name not in tensors:
            raise NamesMismatchError(
                f"There is no tensor {shown(name)}{did_you_mean(name, tensors)}."
            )
        steps = self.steps(mesh)
        decision = decide(steps, tensors, mesh or self.mesh, [name]).decisions[name]
        return explanation(name, tensors[name], steps, decision, itemsize)

    def _refuse_undecided(self, undecided: tuple[str, ...]) -> None:
        if undecided and self.unmatched == "error":
            more = len(undecided) - 1
            others = f" and {more:,} other tensor{'s' * (more > 1)}" if more else ""
            advice = (
                f"No rule matches {shown(undecided[0])}{others}; add a rule, such as "
                "'**=replicated' at the end, or choose "
            )
            raise OptionError(Message(advice, named("unmatched", "replicate"), "."))

    def _refuse_unused(
        self, steps: Sequence[Step], used: frozenset[int], tensors: Mapping[str, tuple[int, ...]]
    ) -> None:
        """Raise OptionError if a rule, preset or copied checkpoint has decided for no tensor."""
        if not tensors:
            return
        for number, step in enumerate(steps):
            if (
                number not in used
                and isinstance(step, Rule)
                and not step.may_match_nothing
                and step.pattern != _EVERYTHING
            ):
                raise OptionError(_why_unused(step, steps[:number], tensors))
        deciding, nothing = (
            [steps[number] for number in used],
            f"none of the {len(tensors):,} tensors, such as {shown(next(iter(tensors)))}",
        )
        for entry in self.entries:
            if isinstance(entry, Preset) and not any(
                isinstance(step, Rule) and step.origin == entry.origin for step in deciding
            ):
                raise OptionError(
                    f"{entry.origin} matches {nothing}; choose the family that has such names."
                )
            if isinstance(entry, Like) and entry not in deciding:
                raise OptionError(
                    f"{entry.origin} has {nothing}; give a checkpoint with the same names."
                )


def _why_unused(rule: Rule, before: Sequence[Step], tensors: Mapping[str, tuple[int, ...]]) -> str:
    for name, shape in tensors.items():
        if meaning(rule, name, len(shape)):
            first = next(step for step in before if meaning(step, name, len(shape)))
            other = first.title if isinstance(first, Rule) else first.origin
            return (
                f"{rule.title} decides for no tensor: earlier rules match first, such as {other} "
                f"for {shown(name)}; put it before them."
            )
    for wider in (
        f"**/{rule.pattern}",
        f"**/*{rule.pattern}",
        f"{rule.pattern}/**",
        f"{rule.pattern}*",
        f"**/*{rule.pattern}*",
    ):
        example = next((name for name in tensors if match(wider, name)), None)
        if example is not None:
            return (
                f"{rule.title} matches no tensor; patterns are matched with whole names, and "
                f"{wider!r} would match {shown(example)}."
            )
    like = Candidates(tensors).nearest(rule.pattern) or next(iter(tensors))
    return (
        f"{rule.title} matches no tensor; patterns are matched with whole names, such as "
        f"{shown(like)}."
    )


def combined_rules(
    texts: list[str] | None = None,
    *,
    file: str | None = None,
    preset: str | None = None,
    hf_config: str | None = None,
) -> Rules | None:
    """Rules from several sources, in this order of precedence; None if there are none.

    Raises:
        OptionError, ShardingError: a source is invalid; or a preset is chosen twice, by name and by
            a configuration.
    """
    if preset is not None and hf_config is not None:
        both = (
            f"The preset {shorten(preset)} and the configuration {shorten(hf_config)}, which "
            "chooses a preset, both decide the same "
        )
        raise OptionError(
            Message(
                both, "tensors; give one of ", named("preset"), " and ", named("hf_config"), "."
            )
        )
    sources = [Rules.parse(texts)] if texts else []
    sources += [Rules.from_file(file)] if file is not None else []
    sources += [Rules.preset(preset)] if preset is not None else []
    sources += [Rules.from_hf_config(hf_config)] if hf_config is not None else []
    if not sources:
        return None
    together, *others = sources
    for more in others:
        together = together.then(more)
    return together
