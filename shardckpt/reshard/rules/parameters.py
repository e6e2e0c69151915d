"""The parameter that a tensor of an optimizer's state belongs to.

Frameworks keep state under the parameter's own path, somewhere else in the tree:

    model/layers.0.w1.weight             optimizer/state/layers.0.w1.weight/exp_avg          (torch, by name)
    params/layers_0/wq/kernel            opt_state/0/mu/layers_0/wq/kernel                   (optax)
    model/layers.0.w1.weight             optim/state.layers.0.w1.weight.exp_avg              (DCP, flattened)

So a parameter's path is its name without the first component. A tensor belongs to the parameter whose path is the longest
proper suffix of the tensor's name, or of the name directly above the tensor. If several parameters share a path, such as a model's
weights and their moving averages, the first one that a rule matches is the parameter, wherever the others are in the tree.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardckpt.reshard.rules.pattern import owners

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


class Parameters:
    """The tensors of a checkpoint by their paths."""

    def __init__(self, tensors: Mapping[str, tuple[int, ...]], meant: Callable[[str], bool]) -> None:
        """Store shapes by name, and a function that tests whether a rule matches a name; the index is built on first use."""
        self._tensors = tensors
        self._meant = meant
        self._by_path: dict[str, str] | None = None

    def of(self, name: str) -> str | None:
        """The name of the parameter that a tensor belongs to; None: there is none."""
        if self._by_path is None:
            self._by_path = self._indexed()
        ends = [end for text in (name, *owners(name)) for end in _ends(text) if self._by_path.get(end, name) != name]
        return self._by_path[max(ends, key=len)] if ends else None

    def _indexed(self) -> dict[str, str]:
        """Path → parameter."""
        alike: dict[str, list[str]] = {}
        for name in self._tensors:
            alike.setdefault(name.partition("/")[2] or name, []).append(name)
        return {path: names[0] if len(names) == 1 else next(filter(self._meant, names), names[0]) for path, names in alike.items()}

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a parameter."""
        return tuple(self._tensors[name])


def _ends(name: str) -> list[str]:
    """The name without its first component, without its first two, and so on."""
    return [name[at + 1 :] for at, character in enumerate(name) if character == "/"]
