"""Programs that invite a wrong claim: each is run on a batch and on its parts, and what is said of
its result is written down."""

from __future__ import annotations

import pytest
import torch
from parts import contradictions
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

from shardckpt.errors import OptionError
from shardckpt.reshard.batch_dims import batch_dims

BATCH, WIDTH = 12, 5


def labels():
    return torch.tensor([0, 1, 1, 0])


TRAPS = {
    # Broadcasting and expanding
    "row added to samples": (lambda x, w: x + w[0], "Shard(0)"),
    "sample expanded to all pairs": (lambda x, w: x[:, None] - x[None], "Unknown"),
    "constant expanded to the batch": (lambda x, w: w[:1].expand(x.shape[0], WIDTH), "Shard(0)"),
    "constant expanded to the batch squared": (
        lambda x, w: w[0].expand(x.shape[0] * x.shape[0], WIDTH),
        "Unknown",
    ),
    "ones, batch squared": (lambda x, w: torch.ones(x.shape[0] * x.shape[0]), "Unknown"),
    "ones, twice the batch": (lambda x, w: torch.ones(2 * x.shape[0]), "Shard(0)"),
    "ones, half the batch": (lambda x, w: torch.ones(x.shape[0] // 2), "Unknown"),
    "number of samples, at least seven": (lambda x, w: w * torch.sym_max(x.shape[0], 7), "Unknown"),
    "repeated samples": (lambda x, w: x.repeat(2, 1), "Unknown"),
    # The batch inside of a dimension
    "batch merged behind features": (lambda x, w: x.t()[:2].reshape(-1), "Shard(0, outer=2)"),
    "merged and taken apart again": (lambda x, w: x.t()[:2].reshape(-1).view(2, -1), "Shard(1)"),
    "merged and taken apart elsewhere": (lambda x, w: x.t()[:2].reshape(-1).view(-1, 2), "Unknown"),
    "pairs of samples": (lambda x, w: x.reshape(-1, 2, WIDTH), "Unknown"),
    "samples behind one another": (lambda x, w: torch.cat([x, 2 * x]), "Shard(0, outer=2)"),
    "samples and constants behind one another": (lambda x, w: torch.cat([x, w]), "Unknown"),
    "behind one another, then taken apart": (
        lambda x, w: torch.cat([x, 2 * x]).view(2, -1, WIDTH),
        "Shard(1)",
    ),
    "behind one another, one half": (lambda x, w: torch.cat([x, 2 * x])[: x.shape[0]], "Unknown"),
    "chunks of the batch": (lambda x, w: x.chunk(2)[0], "Unknown"),
    "last sample": (lambda x, w: x[-1], "Unknown"),
    "all but one": (lambda x, w: x[1:] - x[:-1], "Unknown"),
    "all samples, as a slice": (lambda x, w: x[: x.shape[0]], "Shard(0)"),
    "no element before the batch": (lambda x, w: x.t()[:0].reshape(-1), "Unknown"),
    "no element behind the batch": (lambda x, w: x[:, :0].reshape(0, x.shape[0]), "Unknown"),
    "no element in a sample": (
        lambda x, w: x[:, :0].unsqueeze(2).reshape(x.shape[0], 0),
        "Shard(0)",
    ),
    # Along the batch
    "flipped": (lambda x, w: x.flip(0), "Unknown"),
    "flipped features": (lambda x, w: x.flip(1), "Shard(0)"),
    "rolled": (lambda x, w: x.roll(1, 0), "Unknown"),
    "rolled as one": (lambda x, w: x.roll(1), "Unknown"),
    "sorted": (lambda x, w: x.sort(0)[0], "Unknown"),
    "running sum": (lambda x, w: x.cumsum(0), "Unknown"),
    "softmax over samples": (lambda x, w: x.softmax(0), "Unknown"),
    "best sample": (lambda x, w: x.argmax(0), "Unknown"),
    "best feature": (lambda x, w: x.argmax(1), "Shard(0)"),
    "median": (lambda x, w: x.median(0)[0], "Unknown"),
    "largest two samples": (lambda x, w: x.topk(2, 0)[0], "Unknown"),
    "variance of samples": (lambda x, w: x.var(0), "Unknown"),
    "norm of all": (lambda x, w: x.norm(), "Unknown"),
    "samples centred": (lambda x, w: x - x.mean(0), "Unknown"),
    "samples centred by features": (lambda x, w: x - x.mean(1, keepdim=True), "Shard(0)"),
    "lower triangle": (lambda x, w: x.tril(), "Unknown"),
    "batch normalisation": (
        lambda x, w: functional.batch_norm(x, None, None, training=True),
        "Unknown",
    ),
    # Sums and means
    "mean of samples and features": (lambda x, w: x.mean(), "Partial(mean)"),
    "sum divided by samples": (lambda x, w: x.sum(0) / x.shape[0], "Partial(mean)"),
    "sum divided by one less": (lambda x, w: x.sum(0) / (x.shape[0] - 1), "Unknown"),
    "sum divided by the root": (lambda x, w: x.sum(0) / x.shape[0] ** 0.5, "Unknown"),
    "sum times remainder": (lambda x, w: x.sum(0) * (x.shape[0] % 5), "Unknown"),
    "sum times half, rounded": (lambda x, w: x.sum(0) * (x.shape[0] // 2), "Unknown"),
    "sum and its square": (lambda x, w: x.sum(0) * x.sum(0), "Unknown"),
    "sum plus constant": (lambda x, w: x.sum(0) + w[0], "Unknown"),
    "mean plus constant": (lambda x, w: x.mean(0) + w[0], "Partial(mean)"),
    "sum plus constant per sample": (lambda x, w: x.sum(0) + w[0] * x.shape[0], "Partial(sum)"),
    "mean minus sum": (lambda x, w: x.mean(0) - x.sum(0), "Unknown"),
    "largest plus largest": (lambda x, w: x.amax(0) + x.amax(0), "Unknown"),
    "largest minus constant": (lambda x, w: x.amax(0) - w[0], "Unknown"),
    "minus the largest": (lambda x, w: -x.amax(0), "Partial(min)"),
    "twice the largest": (lambda x, w: x.amax(0) * -2, "Unknown"),
    "sum of largest": (lambda x, w: x.amax(0).sum(), "Unknown"),
    "largest of sums": (lambda x, w: x.sum(0).amax(), "Unknown"),
    "largest, twice at one place": (
        lambda x, w: torch.zeros(2).scatter_add(0, labels(), x.amax(0)[:4]),
        "Unknown",
    ),
    "largest, added at places": (
        lambda x, w: torch.zeros(2).index_put((labels(),), x.amax(0)[:4], accumulate=True),
        "Unknown",
    ),
    "sums, added at places": (
        lambda x, w: torch.zeros(2).index_put((labels(),), x.sum(0)[:4], accumulate=True),
        "Partial(sum)",
    ),
    "bits of a sum": (lambda x, w: x.sum(0).view(torch.int32), "Unknown"),
    "bits of samples": (lambda x, w: x.view(torch.int32), "Shard(0)"),
    "integer part of a sum": (lambda x, w: x.sum(0).long(), "Unknown"),
    "zero where the mean is negative": (lambda x, w: x.mean(0).relu(), "Unknown"),
    "gradient masked by itself": (
        lambda x, w: torch.ops.aten.threshold_backward(x.sum(0), x.sum(0), 0),
        "Unknown",
    ),
    "gradient masked by constants": (
        lambda x, w: torch.ops.aten.threshold_backward(x.sum(0), w[0], 0),
        "Partial(sum)",
    ),
    # Products
    "samples with each other": (lambda x, w: x @ x.t(), "Unknown"),
    "features with each other": (lambda x, w: x.t() @ x, "Partial(sum)"),
    "contracted by einsum": (lambda x, w: torch.einsum("bi,bj->ij", x, x.tanh()), "Partial(sum)"),
    "outer product per sample": (lambda x, w: torch.einsum("bi,bj->bij", x, x), "Shard(0)"),
    "samples as matrices": (lambda x, w: torch.bmm(x[:, :, None], x[:, None]), "Shard(0)"),
    "samples in the columns": (lambda x, w: w @ x.t(), "Shard(1)"),
    "samples as weights": (lambda x, w: functional.linear(w, x), "Shard(1)"),
    "samples as kernels": (lambda x, w: functional.conv1d(w[None, :1], x[:, None, :2]), "Unknown"),
    "attention among samples": (
        lambda x, w: functional.scaled_dot_product_attention(x[None], x[None], x[None]),
        "Unknown",
    ),
    # Positions
    "indexed by constants": (lambda x, w: x[torch.tensor([0, 2])], "Unknown"),
    "features indexed by constants": (lambda x, w: x[:, torch.tensor([0, 2])], "Shard(0)"),
    "looked up": (lambda x, w: w[(x[:, 0] > 0).long()], "Shard(0)"),
    "samples looked up by samples": (lambda x, w: x[(x[:, 0] > 0).long()], "Unknown"),
    "reversed by numbers": (lambda x, w: x[x.shape[0] - 1 - torch.arange(x.shape[0])], "Unknown"),
    "own row": (lambda x, w: x[torch.arange(x.shape[0]), (x[:, 0] > 0).long()], "Shard(0)"),
    "number of the sample": (lambda x, w: x + torch.arange(x.shape[0])[:, None], "Unknown"),
    "row of the number of samples": (
        lambda x, w: w[x.shape[0] - 3 - (x.shape[0] - 4)],
        "Replicate",
    ),
    "row of half the samples": (
        lambda x, w: torch.select(w.repeat(9, 1), 0, x.shape[0] - 4),
        "Unknown",
    ),
    "rows up to the samples": (
        lambda x, w: w.repeat(9, 1)[x.shape[0] - 4 : x.shape[0] - 3],
        "Unknown",
    ),
    "rolled by samples": (lambda x, w: w.roll(x.shape[0], 0), "Unknown"),
    "added at places of their own": (
        lambda x, w: torch.zeros(2, WIDTH).index_put(((x[:, 0] > 0).long(),), x, accumulate=True),
        "Partial(sum)",
    ),
    "written at places of their own": (
        lambda x, w: torch.zeros(2, WIDTH).index_put(((x[:, 0] > 0).long(),), x),
        "Unknown",
    ),
    "fewer added than there are": (
        lambda x, w: torch.zeros(1, WIDTH).scatter_add(
            0, torch.zeros_like(x, dtype=torch.long), torch.cat([x, 2 * x])
        ),
        "Unknown",
    ),
    # Random numbers
    "noise per sample": (lambda x, w: torch.zeros_like(x) * torch.rand_like(x), "Shard(0)"),
    "noise for all": (lambda x, w: x + torch.rand(WIDTH), "Unknown"),
}


def traced(functions):
    x, w = torch.randn(BATCH, WIDTH), torch.randn(3, WIDTH)
    return make_fx(lambda x, w: tuple(f(x, w) for f in functions), tracing_mode="symbolic")(x, w)


@pytest.fixture(scope="module")
def program_and_claims():
    """Of all of them at once: tracing costs more than the rest."""
    program = traced([f for f, _ in TRAPS.values()])
    return program, batch_dims(program, {"x_1": 0})


@pytest.mark.long
def test_nothing_that_is_claimed_of_them_is_contradicted(program_and_claims):
    program, claims = program_and_claims
    for batch, parts in ((12, 2), (12, 3), (24, 2)):
        wrong, count = contradictions(
            claims, program, (torch.randn(batch, WIDTH), torch.randn(3, WIDTH)), parts
        )
        assert not wrong
        assert count > 100


@pytest.mark.parametrize("name", TRAPS)
def test_what_is_said_of(name, program_and_claims):
    program, claims = program_and_claims
    (output,) = [node for node in program.graph.nodes if node.op == "output"]
    result = output.args[0][list(TRAPS).index(name)]
    assert str(claims[result.name]).partition(":")[0] == TRAPS[name][1], claims.explain(result.name)


def test_a_dynamic_size_is_no_number_of_runs():
    """Between the two, the batch is behind the other size, of which nothing is known."""
    program = traced([lambda x, w: x.t().reshape(-1).view(*x.t().shape)])
    inferred = batch_dims(program, {"x_1": 0})
    assert (
        str(inferred["_unsafe_view"])
        == "Unknown: _unsafe_view: dimension 0 has the batch behind another dynamic size"
    )
    assert str(inferred["view"]) == "Shard(1)"


FIXED = {
    "bias per sample": (lambda x, w: torch.addmm(x, w, w.t() @ w), "Unknown"),
    "size of the batch in features": (lambda x, w: x.t() + w.t(), "Unknown"),
    "row of the batch's number": (lambda x, w: torch.cat([w, w])[12], "Unknown"),
    "rolled by it": (lambda x, w: w.roll(12, 0), "Unknown"),
    "divided by it": (lambda x, w: x.sum(0) / 12, "Unknown"),
    "one row per sample, by accident or not": (lambda x, w: w[:1].expand(12, 5), "Unknown"),
    "whole slice": (lambda x, w: x[:12], "Shard(0)"),
    "ones of its size": (lambda x, w: torch.ones(12, 5), "Unknown"),
}


@pytest.mark.parametrize("name", FIXED)
def test_in_a_graph_of_fixed_sizes_a_literal_is_no_evidence(name):
    function, expected = FIXED[name]
    program = make_fx(function, tracing_mode="fake")(
        torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH)
    )
    inferred = batch_dims(program, {"x_1": 0})
    assert [str(layout).partition(":")[0] for layout in inferred.outputs.values()] == [expected]


def test_programs_that_change_tensors_in_place_or_call_modules_are_refused():
    in_place = make_fx(lambda x: x.add_(1).sum(0))(torch.randn(BATCH, WIDTH))
    with pytest.raises(OptionError, match=r"add_.*is not a functional ATen operator"):
        batch_dims(in_place, {"x_1": 0})
    calls = torch.fx.symbolic_trace(torch.nn.Sequential(torch.nn.ReLU()))
    next(iter(calls.graph.nodes)).meta["val"] = torch.randn(BATCH, WIDTH)
    with pytest.raises(OptionError, match="is not a functional ATen operator"):
        batch_dims(calls, {"input_1": 0})
    functional_form = make_fx(torch.func.functionalize(lambda x: x.clone().add_(1).sum(0)))(
        torch.randn(BATCH, WIDTH)
    )
    assert list(map(str, batch_dims(functional_form, {"x_1": 0}).outputs.values())) == [
        "Partial(sum)"
    ]
