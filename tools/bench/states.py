"""States to save: the same elements for everybody, made anew in each process from a seed.

Llama-like: 12 layers of 9 tensors, embedding and head, 2.69 GB in float32; the same in bfloat16;
many small tensors, and few; one large; and 16 of one size. The rows of a chunk of a matrix lie
apart in memory, and are laid out when it is saved, and when it is restored. A flat tensor's chunks
are contiguous.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np

__all__ = ["STATES", "State", "elements", "scaled"]

WIDTH, HIDDEN, VOCABULARY, LAYERS, KV = 2048, 5632, 32000, 12, 512


@dataclass(frozen=True, slots=True)
class State:
    """Names, shapes and one dtype."""

    name: str
    what: str
    """In words."""
    shapes: dict[str, tuple[int, ...]]
    dtype: str
    """As numpy and ml_dtypes call it."""

    @property
    def nbytes(self) -> int:
        """Of all elements."""
        size = 2 if self.dtype == "bfloat16" else np.dtype(self.dtype).itemsize
        return sum(prod(shape) for shape in self.shapes.values()) * size


def _llama() -> dict[str, tuple[int, ...]]:
    layer = {
        "self_attn.q_proj": (WIDTH, WIDTH),
        "self_attn.k_proj": (KV, WIDTH),
        "self_attn.v_proj": (KV, WIDTH),
        "self_attn.o_proj": (WIDTH, WIDTH),
        "mlp.gate_proj": (HIDDEN, WIDTH),
        "mlp.up_proj": (HIDDEN, WIDTH),
        "mlp.down_proj": (WIDTH, HIDDEN),
        "input_layernorm": (WIDTH,),
        "post_attention_layernorm": (WIDTH,),
    }
    shapes = {
        f"model.layers.{i}.{name}.weight": shape
        for i in range(LAYERS)
        for name, shape in layer.items()
    }
    return {
        "model.embed_tokens.weight": (VOCABULARY, WIDTH),
        **shapes,
        "lm_head.weight": (VOCABULARY, WIDTH),
    }


STATES = {
    state.name: state
    for state in (
        State("llama", "110 tensors of a Llama-like model, float32", _llama(), "float32"),
        State("bf16", "the same 110 tensors, bfloat16", _llama(), "bfloat16"),
        State(
            "small",
            "2,000 tensors of 64 KiB, float32",
            {f"block.{i}.weight": (128, 128) for i in range(2000)},
            "float32",
        ),
        State(
            "ten",
            "10 tensors of 64 KiB, float32",
            {f"block.{i}.weight": (128, 128) for i in range(10)},
            "float32",
        ),
        State(
            "flat",
            "16 1-D tensors of 64 MiB, float32",
            {f"block.{i}.weight": (1 << 24,) for i in range(16)},
            "float32",
        ),
        State(
            "matrices",
            "16 matrices of 64 MiB, float32",
            {f"block.{i}.weight": (4096, 4096) for i in range(16)},
            "float32",
        ),
        State("one", "one tensor of 2 GiB, float32", {"table.weight": (32768, 16384)}, "float32"),
    )
}


def scaled(state: State, part: int) -> State:
    """The same with about a part of the bytes: of large tensors fewer rows, of many tensors fewer.

    Ten small ones are few enough.
    """
    if part == 1 or state.name == "ten":
        return state
    if state.name == "small":
        shapes = dict(list(state.shapes.items())[:: max(1, part // 4)])
    else:
        shapes = {
            name: (max(64, shape[0] // part // 64 * 64), *shape[1:])
            if prod(shape) > WIDTH
            else shape
            for name, shape in state.shapes.items()
        }
    return State(state.name, f"{state.what}, 1/{part} of it", shapes, state.dtype)


def elements(state: State) -> dict[str, np.ndarray]:
    """Random elements, touched and contiguous.

    They are unsigned integers of the dtype's width where numpy lacks the dtype.
    """
    random = np.random.default_rng(20)
    # Noise that repeats: making it should not take longer than what is measured, and nobody here
    # compresses.
    noise = random.standard_normal(1 << 22, np.float32)
    arrays = {}
    for i, (name, shape) in enumerate(state.shapes.items()):
        count = prod(shape)
        values = np.resize(np.roll(noise[: max(1, min(len(noise), count))], i), count).reshape(
            shape
        )
        arrays[name] = (
            (values.view(np.uint32) >> 16).astype(np.uint16)
            if state.dtype == "bfloat16"
            else values
        )
    return arrays
