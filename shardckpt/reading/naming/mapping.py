"""Applying a mapping: outputs that are joined from several tensors or split from one.

A `TensorMapping` is an ordered list of rules (`mapping_rule`) over names. The first rule that
matches a tensor uses it; tensors without a matching rule stay the same. Nothing is read: the result
lists the elements of tensors from which each output is made.

    mapping = read_mapping("megatron.toml")              # mapping_file
    outputs = mapping.outputs(structure.tensors)         # export
    outputs = mapping.inverse().outputs(theirs)          # import
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from shardckpt.errors import NamesMismatchError, OptionError
from shardckpt.reading.naming.outputs import OutputTensor, identity
from shardckpt.state.names import did_you_mean, shown
from shardckpt.text import Message, named

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from typing import NoReturn

    from shardckpt.format.structure import TensorRecord
    from shardckpt.reading.naming.mapping_rule import MappingRule
    from shardckpt.reading.naming.name_pattern import Captures


@dataclass(frozen=True, slots=True)
class TensorMapping:
    """Rules that make tensors from others."""

    rules: tuple[MappingRule, ...] = ()

    def inverse(self) -> TensorMapping:
        """The mapping in the other direction.

        Raises:
            OptionError: a rule lacks the sizes that its inverse needs.
        """
        return TensorMapping(tuple(rule.inverse() for rule in self.rules))

    def outputs(
        self,
        tensors: Mapping[str, TensorRecord],
        tied: Mapping[str, str] = MappingProxyType({}),
        applied: set[MappingRule] | None = None,
    ) -> tuple[OutputTensor, ...]:
        """The outputs of the tensors, each at the position of its first tensor.

        Args:
            tensors: tensors by the names that the rules match; the views use the names in the
                records.
            tied: names that are left out because they are tied → the name that is kept, for
                messages.
            applied: receives the rules that match something; with it, no rule must.

        Raises:
            OptionError: a rule matches nothing, so it is probably misspelt.
            NamesMismatchError: a part is missing, or two outputs have the same name.
            ShapeMismatchError, DtypeMismatchError: parts do not fit together, or a tensor cannot be
                split as requested.
        """
        left = dict(tensors)
        made: dict[str, list[OutputTensor]] = {}
        for rule in self.rules:
            uses = list(_merge_all(rule, left, tied) if rule.merges else _split_all(rule, left))
            if applied is not None:
                applied.update([rule] if uses else [])
            elif not uses and not rule.optional:
                refuse_unused(rule, tensors, tied)
            for used, outputs in uses:
                made[used[0]] = outputs
                for name in used:
                    left.pop(name, None)
        in_order = []
        for name in tensors:
            in_order += made.get(name, [])
            in_order += [identity(left[name], name)] if name in left else []
        _refuse_collisions(in_order)
        return tuple(in_order)


def _merge_all(
    rule: MappingRule, tensors: Mapping[str, TensorRecord], tied: Mapping[str, str]
) -> Iterator[tuple[list[str], list[OutputTensor]]]:
    """The merges of a rule: the names that each uses, and its outputs."""
    groups: dict[tuple[str, ...], tuple[Captures, set[str]]] = {}
    for name in tensors:
        captures = next(
            (match for match in (part.match(name) for part in rule.parts) if match is not None),
            None,
        )
        index = "" if captures is None or rule.counted is None else captures[rule.counted]
        # For instance, an expert called "shared" is not counted.
        if captures is not None and (rule.counted is None or index.isdecimal()):
            groups.setdefault(tuple(captures[key] for key in rule.whole.keys), (captures, set()))[
                1
            ].add(index)
    for captures, counted in groups.values():
        whole, names = rule.whole.fill(captures), _part_names(rule, captures, len(counted))
        missing = next((name for row in names for name in row if name not in tensors), None)
        if missing is not None:
            needs = f"{rule}: {shown(whole)} needs {sum(map(len, names))} tensors, but "
            if missing in tied:
                raise NamesMismatchError(Message(needs, _tell_tied(missing, tied)))
            raise NamesMismatchError(
                f"{needs}{shown(missing)} is missing, or an earlier rule has used it; include it, "
                "or correct the rule."
            )
        yield (
            [name for row in names for name in row],
            [rule.merge(whole, [[tensors[name] for name in row] for row in names])],
        )


def refuse_unused(
    rule: MappingRule, names: Iterable[str], tied: Mapping[str, str] = MappingProxyType({})
) -> NoReturn:
    """Refuse a rule that matches none of the names; `tied` as in `TensorMapping.outputs`."""
    patterns = rule.parts if rule.merges else (rule.whole,)
    for name in tied:
        if any(pattern.match(name) is not None for pattern in patterns):
            raise OptionError(Message(f"{rule}: ", _tell_tied(name, tied)))
    raise OptionError(
        f"{rule}: it matches no tensor{did_you_mean(str(patterns[0]), names)}; correct it, or "
        "say optional = true."
    )


def _tell_tied(name: str, tied: Mapping[str, str]) -> Message:
    also = f"{shown(name)} is the same tensor as {shown(tied[name])}, and is left out; use "
    return Message(also, named("ties", "copies"), ".")


def _split_all(
    rule: MappingRule, tensors: Mapping[str, TensorRecord]
) -> Iterator[tuple[list[str], list[OutputTensor]]]:
    """The splits of a rule: the name that each uses, and its outputs."""
    for name, tensor in tensors.items():
        captures = rule.whole.match(name)
        if captures is not None:
            yield (
                [name],
                rule.split(
                    tensor,
                    _part_names(
                        rule,
                        captures,
                        rule.stacked_length(tensor) if rule.counted is not None else 1,
                    ),
                ),
            )


def _part_names(rule: MappingRule, captures: Captures, count: int) -> list[list[str]]:
    """The names of the parts, per index."""
    key = rule.counted
    if key is None:
        return [[part.fill(captures) for part in rule.parts]]
    return [
        [part.fill({**captures, key: str(index)}) for part in rule.parts] for index in range(count)
    ]


def _refuse_collisions(outputs: list[OutputTensor]) -> None:
    seen: dict[str, OutputTensor] = {}
    for output in outputs:
        other = seen.setdefault(output.name, output)
        if other is not output:
            sources = [
                next((shown(view.tensor) for view in one.sources), "nothing")
                for one in (other, output)
            ]
            raise NamesMismatchError(
                f"{shown(output.name)} would be made twice, from {sources[0]} and from "
                f"{sources[1]}; rename one of them, or leave it out."
            )
