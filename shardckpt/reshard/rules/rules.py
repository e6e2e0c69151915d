"""Ordered rules that give every tensor a layout.

1. Entries are tried in order, and the first one that means the tensor decides: a rule (pattern → spec), a preset (the rules of
   a family of models), or another checkpoint's layouts by name.
2. A rule means a name that its pattern matches, or that lies directly below one (`pattern`): state of an optimizer follows
   its parameter, as far as it has the parameter's shape. What has another (Adafactor's rows and columns, say) is replicated,
   with a notice.
3. What nothing means is replicated, with a notice, or an error, as `unmatched` says. What consists of one element is
   replicated in any case: there is nothing to cut.
4. Sides need not divide: parts are ceil(size / parts) long, the last ones short or empty, as in XLA, with a notice.

`decide` sees one tensor. `decide_all` sees all of a checkpoint: it knows the parameter that state belongs to, and refuses
rules that decide nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from shardckpt.errors import NamesMismatchError, OptionError
from shardckpt.excerpt import excerpt
from shardckpt.layout.mesh import Mesh
from shardckpt.reshard.rules.deciding import decide
from shardckpt.reshard.rules.entry import Entry, steps_of
from shardckpt.reshard.rules.like import Like
from shardckpt.reshard.rules.preset import Preset
from shardckpt.reshard.rules.rule import Rule
from shardckpt.reshard.rules.unused import refuse_unused
from shardckpt.state.names import did_you_mean, shown

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from shardckpt.format.record import CheckpointRecord
    from shardckpt.format.structure import StoredLayout
    from shardckpt.reshard.rules.deciding import Step
    from shardckpt.reshard.rules.decision import Decision

__all__ = ["Rules"]


@dataclass(frozen=True, slots=True)
class Rules:
    """Ordered rules; see the module's docstring.

    Raises:
        OptionError: an entry or `unmatched` is nothing of the above.

    >>> rules = Rules.parse(["**/*.bias=replicated", "**/*=(fsdp)"], mesh="fsdp=4")
    >>> rules.decide("model/w", (16, 8)).layout.tile((16, 8))
    (4, 8)
    """

    entries: tuple[Entry, ...] = ()
    """What decides, in order."""
    unmatched: Literal["replicate", "error"] = "replicate"
    """What becomes of tensors that no entry means."""
    mesh: Mesh | None = None
    """What the layouts are over, where `decide` is told of no mesh."""

    def __post_init__(self) -> None:
        """Refuse what is no rule."""
        object.__setattr__(self, "entries", tuple(self.entries))
        for entry in self.entries:
            if not isinstance(entry, Entry):
                raise OptionError(f"Rules: {excerpt(entry)} is no rule; use Rules.parse(['pattern=spec', …]).")
        if self.unmatched not in ("replicate", "error"):
            raise OptionError(f'Rules(unmatched={self.unmatched!r}): use "replicate" or "error".')
        if self.mesh is not None and not isinstance(self.mesh, Mesh):
            raise OptionError(f"Rules(mesh={excerpt(self.mesh)}): give a shardckpt.Mesh, or use parse_mesh on text.")

    @classmethod
    def parse(
        cls, texts: str | Iterable[str], *, mesh: Mesh | str | None = None, unmatched: Literal["replicate", "error"] = "replicate"
    ) -> Rules:
        """Rules from text, as in `--rule`: `pattern=spec` each.

        Raises:
            OptionError: one is no rule; says which, and at which character.
        """
        from shardckpt.reshard.rules.mesh_text import parse_mesh

        listed = [texts] if isinstance(texts, str) else list(texts) if isinstance(texts, Iterable) else [texts]
        entries = tuple(Rule.parse(text, f"rule {number}") for number, text in enumerate(listed, 1))
        return cls(entries, unmatched, parse_mesh(mesh) if isinstance(mesh, str) else mesh)

    @classmethod
    def preset(cls, text: str) -> Rules:
        """The rules of a family of models: "llama", "mixtral/ep", "gpt2/fsdp=data+tp"; see `preset`.

        Raises:
            OptionError: there is no such preset; lists those that there are.
        """
        return cls((Preset.parse(text),))

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> Rules:
        """Rules from a file in TOML or YAML; see `files`.

        Raises:
            OptionError, ShardingError: it cannot be read, or says what cannot be; names file and place.
        """
        from shardckpt.reshard.rules.files import read_rules

        return read_rules(path)

    @classmethod
    def from_hf_config(cls, path: str | os.PathLike[str], roles: str = "") -> Rules:
        """The preset of the family that a Hugging Face model's `config.json` names; see `hf_config`.

        Args:
            path: the file, or the directory that has it.
            roles: such as "fsdp+tp"; without, all roles for which the mesh has an axis.

        Raises:
            OptionError: it cannot be read, or names a model that no preset knows; lists those that are known.
        """
        from shardckpt.reshard.rules.hf_config import read_preset

        return cls((read_preset(path, roles),))

    @classmethod
    def like(cls, record: CheckpointRecord, origin: str = "the other checkpoint") -> Rules:
        """The layouts of another checkpoint, by name; over its mesh where it has one, and no other is given.

        Args:
            record: of the other checkpoint.
            origin: its url, for messages.
        """
        entry = Like.of(record.structure, origin)
        return cls((entry,), mesh=entry.mesh)

    @classmethod
    def by_name(cls, layouts: Mapping[str, StoredLayout], origin: str = "its layout by name") -> Rules:
        """Layouts that were worked out for each tensor; over their own mesh where no other is given.

        `shardckpt.reshard.batch_dims.batch_shardings` gives such, from the graph of a program.

        Args:
            layouts: name in the checkpoint → layout.
            origin: where they are from, for messages.
        """
        entry = Like(tuple((name, None, layout) for name, layout in layouts.items()), origin)
        return cls((entry,), mesh=entry.mesh)

    @classmethod
    def from_program(
        cls, exported: Any, batch: Mapping[str, int] | None = None, *, mesh: Mesh, axis: str = "data", prefix: str = "", **assumptions: Any
    ) -> Rules:
        """The layouts of a program's parameters and buffers: cut over `axis` where they have a row per sample, replicated otherwise.

        Args:
            exported: a `torch.export.ExportedProgram` or a functional `torch.fx.GraphModule`.
            batch: input or buffer → the dimension that is its batch; optional for a graph with one dynamic dimension.
            mesh: the devices.
            axis: the axis of the mesh that the batch is cut over.
            prefix: put before each name, such as "model/" for a state {"model": module.state_dict()}.
            assumptions: further arguments of `shardckpt.reshard.batch_dims.batch_shardings`, such as `replicated`.

        Raises:
            OptionError: no such input or dimension, or the batch was not named and cannot be told.
            ShardingError: the mesh has no such axis, or a tensor holds a part of a sum, or what the program does to it is not known.
        """
        from shardckpt.reshard.batch_dims import batch_shardings

        return cls.by_name(batch_shardings(exported, batch, mesh=mesh, axis=axis, prefix=prefix, **assumptions), "the program")

    def then(self, others: Rules) -> Rules:
        """These rules, and others for what they do not mean; `mesh` and `unmatched` are these, where they say anything."""
        unmatched = others.unmatched if self.unmatched == "replicate" else self.unmatched
        return Rules((*self.entries, *others.entries), unmatched, self.mesh or others.mesh)

    def steps(self, mesh: Mesh | None = None) -> tuple[Step, ...]:
        """The entries for a mesh, those of presets one by one, and all their axes checked.

        Raises:
            ShardingError: the mesh lacks an axis, or there is none; names the rule.
        """
        mesh = mesh or self.mesh
        return tuple(step for entry in self.entries for step in steps_of(entry, mesh))

    def decide(self, name: str, shape: tuple[int, ...], mesh: Mesh | None = None) -> Decision:
        """The layout of one tensor.

        Args:
            name: of the tensor in the checkpoint.
            shape: of the tensor.
            mesh: what to lay it out over; None: the rules' own. Where there is none at all, tensors are plain.

        Raises:
            OptionError: nothing means it, and `unmatched` is "error".
            ShardingError: the rule that decides cannot be followed: it has more entries than the tensor dimensions, or an
                axis that the mesh has not.
        """
        decided = decide(self.steps(mesh), {name: shape}, mesh or self.mesh)
        self._refuse(decided.unmatched)
        return decided.decisions[name]

    def decide_all(self, tensors: Mapping[str, tuple[int, ...]], mesh: Mesh | None = None) -> dict[str, Decision]:
        """The layouts of all tensors of a checkpoint.

        Args:
            tensors: shape by name.
            mesh: as for `decide`.

        Raises:
            OptionError: also, a rule decides nothing: it matches no name, or another one comes before it.
            ShardingError: as for `decide`.
        """
        steps = self.steps(mesh)
        decided = decide(steps, tensors, mesh or self.mesh)
        refuse_unused(self.entries, steps, decided.used, tensors)
        self._refuse(decided.unmatched)
        return decided.decisions

    def explain(self, name: str, tensors: Mapping[str, tuple[int, ...]], mesh: Mesh | None = None, *, itemsize: int = 1) -> str:
        """Why one tensor of a checkpoint is laid out as it is, for people: every rule that is asked, and what comes of it.

        Args:
            name: of the tensor.
            tensors: shape by name, of all.
            mesh: as for `decide`.
            itemsize: bytes of an element.

        Raises:
            NamesMismatchError: there is no such tensor; says which name is nearest.
            ShardingError: as for `decide`.
        """
        from shardckpt.reshard.rules.explain import explanation

        if name not in tensors:
            raise NamesMismatchError(f"There is no tensor {shown(name)}{did_you_mean(name, tensors)}.")
        steps = self.steps(mesh)
        decision = decide(steps, tensors, mesh or self.mesh, [name]).decisions[name]
        return explanation(name, tensors[name], steps, decision, itemsize)

    def _refuse(self, unmatched: tuple[str, ...]) -> None:
        if unmatched and self.unmatched == "error":
            more = len(unmatched) - 1
            others = f" and {more:,} other tensor{'s' * (more > 1)}" if more else ""
            raise OptionError(
                f"No rule means {shown(unmatched[0])}{others}; add a rule, such as '**=replicated' at the end, or choose "
                'unmatched="replicate".'
            )
