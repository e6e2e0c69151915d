"""Tensors of a job: the trees of Llama 3.1 in three sizes, dense or with experts.

There are as many tensors as are asked for.

The parameters come first, in bfloat16, and then in float32 the optimizer's copies of them and
Adam's moments, until there are enough.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain, islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["TREES", "Tensor", "Tree"]

KV = 1024
VOCABULARY = 128256
EXPERTS = 64
"""Per layer, where there are any; each is an eighth as wide as the dense one."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """One of them."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class Tree:
    """A model."""

    name: str
    layers: int
    embed: int
    mlp: int

    def tensors(self, number: int, *, experts: bool = False) -> list[Tensor]:
        """The first so many tensors of its training's state.

        Args:
            number: at most four times the parameters.
            experts: whether each layer has experts, stacked, in place of one MLP.
        """
        parameters = list(self._parameters(experts=experts))
        kept = ("master", "exp_avg", "exp_avg_sq")
        moments = (
            Tensor(f"optimizer.{name}.{what}", shape, "float32")
            for what in kept
            for name, shape in parameters
        )
        tensors = list(
            islice(
                chain(
                    (Tensor(f"model.{name}", shape, "bfloat16") for name, shape in parameters),
                    moments,
                ),
                number,
            )
        )
        if len(tensors) != number:
            raise ValueError(
                f"{self.name}: a state of {number} tensors is asked for, and it has {len(tensors)}"
            )
        return tensors

    def _parameters(self, *, experts: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield "embed_tokens.weight", (VOCABULARY, self.embed)
        yield "lm_head.weight", (VOCABULARY, self.embed)
        yield "norm.weight", (self.embed,)
        wide, narrow = (self.mlp, self.embed), (self.embed, self.mlp)
        if experts:
            wide, narrow = (
                (EXPERTS, self.mlp // 8, self.embed),
                (EXPERTS, self.embed, self.mlp // 8),
            )
        layer = {
            "self_attn.q_proj.weight": (self.embed, self.embed),
            "self_attn.k_proj.weight": (KV, self.embed),
            "self_attn.v_proj.weight": (KV, self.embed),
            "self_attn.o_proj.weight": (self.embed, self.embed),
            "mlp.gate_proj.weight": wide,
            "mlp.up_proj.weight": wide,
            "mlp.down_proj.weight": narrow,
            "input_layernorm.weight": (self.embed,),
            "post_attention_layernorm.weight": (self.embed,),
        }
        for i in range(self.layers):
            yield from ((f"layers.{i}.{name}", shape) for name, shape in layer.items())


TREES = {
    tree.name: tree
    for tree in (
        Tree("8B", 32, 4096, 14336),
        Tree("70B", 80, 8192, 28672),
        Tree("405B", 126, 16384, 53248),
    )
}
