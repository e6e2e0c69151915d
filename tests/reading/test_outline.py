"""The outline of a state: dots as trees, numbers in order, repetitions folded."""

from __future__ import annotations

import numpy as np
import pytest

import shardckpt
from shardckpt.reading.inspection.outline import outline, walk


@pytest.fixture
def drawn(tmp_path):
    """Saves a state and draws its outline, a line for each entry: guide, label, and numbers of
    repeats and tensors."""

    def draw(state, depth=None):
        shardckpt.save(tmp_path / "1", state)
        checkpoint = shardckpt.open(tmp_path / "1")
        root = outline(checkpoint, checkpoint.parsed_tree)
        return [
            f"{guide}{entry.label}" + (f" ×{times}" if times > 1 else "")
            for entry, guide, times in walk(root, depth)
        ]

    return draw


def one():
    return np.ones(2, np.float32)


def test_layers_that_repeat_are_one_entry_in_the_order_of_numbers(drawn):
    state = {
        f"model.layers.{i}.{part}.weight": one()
        for i in (0, 1, 10, 11, 2, 3, 4, 5, 6, 7, 8, 9)
        for part in ("mlp", "attn")
    }
    assert drawn(state | {"head": one()}) == [
        "├─ model.layers.{0…11} ×12",
        "│  ├─ mlp.weight ×12",
        "│  └─ attn.weight ×12",
        "└─ head",
    ]


def test_layers_with_other_contents_are_entries_of_their_own(drawn):
    shapes = [2, 2, 2, 5, 2, 2]
    assert (
        drawn({f"l.{i}.w": np.ones(n, np.float32) for i, n in enumerate(shapes)})
        == [
            "└─ l",
            "   ├─ {0…2}.w ×3",
            "   ├─ 3.w",
            "   ├─ 4.w",
            "   └─ 5.w",
        ]
        or drawn
    )


def test_lists_and_nested_dicts_are_folded_too(drawn):
    layers = [{"w": one(), "lr": 0.1} for _ in range(4)]
    assert drawn({"layers": layers, "betas": (0.9, 0.999), "ids": list(range(20))}) == [
        "├─ layers",
        "│  └─ {0…3} ×4",
        "│     ├─ w ×4",
        "│     └─ lr ×4",
        "├─ betas",
        "└─ ids",
    ]


def test_experts_in_layers_multiply(drawn):
    state = {f"layers.{i}.experts.{k}.w": one() for i in range(3) for k in range(4)}
    assert drawn(state) == ["└─ layers.{0…2}.experts.{0…3}.w ×12"]


def test_depth_counts_the_levels_that_are_shown(drawn):
    state = {"model.a.x": one(), "model.a.y": one(), "model.b": one()}
    assert drawn(state, depth=1) == ["└─ model"]


def test_keys_with_dots_at_an_end_or_very_many_dots_stay_readable(drawn):
    lines = drawn({".": one(), "a..b": one(), "end.": one(), "x" + ".y" * 5000: one()})
    assert len(lines) == 4
    assert lines[0] == "├─ ."
