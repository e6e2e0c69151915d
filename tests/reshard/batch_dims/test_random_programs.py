"""Nothing that is claimed of random programs is contradicted by running them on the whole batch and
on its parts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, reject, settings
from parts import contradictions
from programs import BATCH, inputs, programs, run
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from shardckpt.errors import OptionError
from shardckpt.reshard.batch_dims import batch_dims


def traced(steps, symbolic, batch=BATCH):
    try:
        return make_fx(lambda *a: run(steps, *a), tracing_mode="symbolic" if symbolic else "fake")(
            *inputs(batch)
        )
    except GuardOnDataDependentSymNode:
        # Its sizes follow from elements, and torch does not trace it.
        return reject()


def named(graph_module):
    placeholders = [node.target for node in graph_module.graph.nodes if node.op == "placeholder"]
    return dict.fromkeys(placeholders[2:], 0)


def followed(program):
    """Layouts found for a program. A program with operators that change tensors in place is
    refused."""
    try:
        return batch_dims(program, named(program))
    except OptionError as e:
        if "functional" not in str(e):
            raise
        return reject()


def literals(graph_module):
    """All numbers that are written in a graph."""
    leaves = torch.utils._pytree.tree_leaves(
        [[node.args, node.kwargs] for node in graph_module.graph.nodes]
    )
    return [leaf for leaf in leaves if type(leaf) in (int, float)]


@pytest.mark.slow
@given(steps=programs())
@settings(max_examples=20, derandomize=True)
def test_every_claim_holds_for_parts_of_any_size(steps):
    program = traced(steps, symbolic=True)
    inferred = followed(program)
    for batch, parts in ((BATCH, 2), (BATCH, 3)):
        try:
            wrong, claims = contradictions(inferred, program, inputs(batch, seed=1), parts)
        except IndexError:
            reject()  # it unrolls its batch
        assert not wrong, (steps, program.code)
        assert claims >= 4


@pytest.mark.slow
@given(steps=programs())
@settings(max_examples=10, derandomize=True)
def test_every_claim_holds_in_graphs_of_fixed_sizes(steps):
    program, part = (traced(steps, False, batch) for batch in (BATCH, BATCH // 2))
    if [str(node.target) for node in program.graph.nodes] != [
        str(node.target) for node in part.graph.nodes
    ]:
        return  # it unrolls its batch
    if any(a != b and a % BATCH for a, b in zip(literals(program), literals(part), strict=True)):
        return  # a size less one, which is a constant like any other in such a graph
    inferred = followed(program)
    wrong, claims = contradictions(inferred, program, inputs(seed=1), 2, part)
    assert not wrong, (steps, program.code)
    assert claims >= 4


@pytest.mark.parametrize("batch", [BATCH, 6])
def test_the_oracle_notices_a_wrong_claim(batch):
    program = traced([("sum", 3, 0, 0), ("tanh", 4, 0, 0)], symbolic=True)
    inferred = batch_dims(program, named(program))
    lies = type(inferred)(
        inferred.program, {**inferred.nodes, "tanh": inferred.nodes["sum_1"]}, {}, {}, {}, {}
    )
    assert [name for name, _, _ in contradictions(lies, program, inputs(batch), 2)[0]] == ["tanh"]
