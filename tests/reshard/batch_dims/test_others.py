"""Checks against others: DTensor for single operators, and models of transformers, in processes of
their own."""

from __future__ import annotations

import json
import sys

import forks
import pytest
import torch
from operators import CONSTANTS, OPERATORS, SAMPLES
from paths import CHILDREN
from torch.export import Dim

from shardckpt.reshard.batch_dims import batch_dims


def printed(child):
    done = forks.run(
        [sys.executable, CHILDREN / f"{child}.py"], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


class Every(torch.nn.Module):
    """All operators at once."""

    def forward(self, x, w):
        return tuple(function(x, w) for function in OPERATORS.values())


@pytest.mark.slow
def test_of_single_operators_dtensor_says_the_same():
    program = torch.export.export(
        Every(),
        (torch.randn(SAMPLES), torch.randn(CONSTANTS)),
        dynamic_shapes=({0: Dim("batch")}, None),
    )
    inferred = batch_dims(program)
    (output,) = [node for node in inferred.program.graph.nodes if node.op == "output"]
    ours = {
        name: str(inferred[node.name]) for name, node in zip(OPERATORS, output.args[0], strict=True)
    }
    assert ours == printed("batch_dims_dtensor")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_logits_of_transformers_are_cut_and_gradients_are_means():
    models = printed("batch_dims_hf")
    for name, model in models.items():
        assert model["wrong"] == [], name
        assert model["unknown"] == {}, name
        assert list(model["states"]) == ["Replicate"], name
        assert list(model["outputs"]) == (
            ["Partial(mean)"] if "gradients" in name else ["Shard(0)"]
        ), name
        assert model["claims"] > 100, name
    tied = {"model.lm_head.weight", "model.model.embed_tokens.weight"}
    assert tied <= set(models["Llama, tied"]["names"])
