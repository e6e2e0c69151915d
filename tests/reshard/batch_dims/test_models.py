"""Real models: what is found of their state, and that running them on parts of the batch
contradicts none of it."""

from __future__ import annotations

import pytest
import torch
from models import AverageLoss, Block, CachedAttention, ConvNet, Statistics, exported, joint
from parts import contradictions, exported_inputs
from torch._functorch.aot_autograd import aot_export_joint_simple
from torch.fx import GraphModule

from shardckpt.reshard.batch_dims import Numbered, Partial, Replicate, Shard, Unknown, batch_dims


def checked(program, arguments, **options):
    """Layouts found for a program, after a comparison with runs on parts of the batch."""
    if program.graph_signature.backward_signature is None:
        program = program.run_decompositions()
    inferred = batch_dims(program, **options)
    module = GraphModule(program.graph_module, inferred.program.graph)
    wrong, claims = contradictions(inferred, module, exported_inputs(program, arguments), 2)
    assert not wrong
    assert claims > 10
    return inferred


@pytest.fixture(scope="module")
def tokens():
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 11, (8, 5), generator=generator), torch.randint(
        0, 11, (8, 5), generator=generator
    )


@pytest.mark.slow
def test_every_gradient_of_a_transformer_is_the_mean_of_those_of_the_parts(tokens):
    model = Block()
    inferred = checked(joint(model, tokens), tokens, even_counts=True)
    gradients = {
        name: layout for name, layout in inferred.outputs.items() if name.endswith(".grad")
    }
    assert gradients == {f"{name}.grad": Partial("sum", -1) for name, _ in model.named_parameters()}
    assert set(map(str, gradients.values())) == {"Partial(mean)"}
    assert not inferred.unknown_operators


@pytest.mark.slow
def test_a_loss_over_targets_some_of_which_are_ignored_is_no_mean_of_parts(tokens):
    inferred = checked(exported(Block(), tokens), tokens)
    (loss,) = inferred.outputs.values()
    assert isinstance(loss, Unknown)
    assert "quotient of sums" in loss.reason


@pytest.mark.slow
def test_running_statistics_of_training_are_partial_and_nothing_after_them_is_claimed():
    images = torch.randn(8, 3, 6, 6)
    training, serving = (
        checked(exported(ConvNet().train(mode), (images,)), (images,)) for mode in (True, False)
    )
    assert training.states["norm.running_mean"] == Partial("sum", -1)
    assert isinstance(training.states["norm.running_var"], Unknown)
    assert "couples samples" in str(*training.outputs.values())
    assert set(serving.states.values()) == {Replicate()}
    assert list(serving.outputs.values()) == [Shard(0)]


def test_accumulators_are_sums_means_and_extremes():
    samples = torch.randn(8, 4)
    inferred = checked(exported(Statistics(), (samples,)), (samples,))
    assert {name: str(layout) for name, layout in inferred.states.items()} == {
        "total": "Partial(sum)",
        "average": "Partial(mean)",
        "largest": "Partial(max)",
        "smallest": "Partial(min)",
        "steps": "Replicate",
        "seen": "Partial(sum)",
        "norm": (
            "Unknown: tanh: tanh: sum_2 is Partial(sum), and the operation is not linear in it: "
            "it must be reduced before"
        ),
    }


@pytest.mark.slow
def test_a_cache_is_cut_where_the_samples_are_that_are_written_into_it():
    """Its buffers have a row per sample, so that the sizes of the graph are fixed."""
    step = torch.randn(8, 1, 5), torch.tensor([2])
    whole, half = CachedAttention(8), CachedAttention(4)
    half.load_state_dict(
        {name: v for name, v in whole.state_dict().items() if "cache" not in name}, strict=False
    )
    program, part = (
        torch.export.export(m, (step[0][: m.batch], step[1])).run_decompositions()
        for m in (whole, half)
    )
    inferred = batch_dims(program, {"x": 0})
    assert inferred.states["cache_k"] == Shard(0)
    assert inferred.states["cache_v"] == Shard(1)
    assert {inferred.states[name] for name in ("project.weight", "project.bias")} == {Replicate()}
    modules = [
        GraphModule(p.graph_module, batch_dims(p, {"x": 0}).program.graph) for p in (program, part)
    ]
    wrong, claims = contradictions(
        inferred, modules[0], exported_inputs(program, step), 2, modules[1]
    )
    assert not wrong
    assert claims > 20


def test_gradients_of_a_mean_over_samples_follow_from_symbols_alone():
    samples = torch.randn(8, 4), torch.randn(8, 3)
    inferred = checked(joint(AverageLoss(), samples), samples)
    assert str(inferred["linear.weight.grad"]) == "Partial(mean)"
    assert {type(inferred.nodes[name]) for name in inferred.nodes} <= {
        Replicate,
        Shard,
        Partial,
        Numbered,
        tuple,
    }


@pytest.mark.slow
def test_explaining_a_tensor_goes_from_the_batch_to_it_node_by_node(tokens):
    inferred = batch_dims(joint(Block(), tokens), even_counts=True)
    lines = inferred.explain("embed.weight.grad").splitlines()
    assert lines[0].endswith("→ Shard(0)")
    assert lines[0].startswith("ids: input of shape [s")
    assert lines[-1] == "embed.weight.grad is Partial(mean)"
    assert any("Shard(0, outer=3)" in line for line in lines)


def test_local_batch_normalisation_is_followed_where_the_caller_means_it():
    """It is another function than that of the whole batch, so that only the parts put together can
    be compared: nothing of it is run."""
    program = exported(ConvNet(), (torch.randn(8, 3, 6, 6),))
    inferred = batch_dims(program, local_batch_norm=True)
    assert list(inferred.outputs.values()) == [Shard(0)]
    assert inferred.states["norm.running_mean"] == Partial("sum", -1)
    assert isinstance(inferred.states["norm.running_var"], Unknown)


def test_graphs_of_aot_autograd_are_read():
    """Their sizes are fixed, so that the gradient that comes in is named, too."""
    arguments = torch.randn(4, 3, requires_grad=True), torch.randn(8, 4)
    program = aot_export_joint_simple(lambda w, x: ((x @ w).tanh(),), arguments, trace_joint=True)
    inferred = batch_dims(program, {"primals_2": 0, "tangents_1": 0})
    assert list(map(str, inferred.outputs.values())) == ["Shard(0)", "Partial(sum)"]
