"""Chunks that each process of a job writes; each process plans alone."""

from __future__ import annotations

import numpy as np
import pytest
from chunk_oracle import chunks_inside
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_hosts import Hosts, HostSource

from shardckpt.errors import LeafError
from shardckpt.layout.box import Box, BoxArray
from shardckpt.layout.dtypes import by_name
from shardckpt.layout.mesh import Mesh
from shardckpt.layout.partition_spec import PartitionSpec
from shardckpt.layout.placements import Placements
from shardckpt.layout.sharding import Sharding
from shardckpt.options import SaveOptions
from shardckpt.plan.chunks import even_runs
from shardckpt.plan.pieces import coverage_gap
from shardckpt.writing.save_plan import SMALL_BYTES, plan_save


def written_chunks(hosts: Hosts, tensors):
    """Per piece, how often each chunk is written; and the stored bytes per host."""
    counts: dict[str, np.ndarray] = {}
    per_host = np.zeros(hosts.number)
    pieces = {}
    for host in range(hosts.number):
        sources = hosts.sources(host, tensors)
        plan = plan_save(sources, SaveOptions(), hosts.world(host))
        for tensor in plan.tensors.values():
            for piece in tensor.pieces:
                counts.setdefault(piece.path, np.zeros(piece.num_chunks, int))
                assert pieces.setdefault(piece.path, piece) == piece
        for name, blocks in plan.blocks.items():
            for block in blocks:
                assert sources[name].boxes[block.held].overlap(block.box) == block.box
                positions, boxes = chunks_inside(block.piece, block.box)
                counts[block.piece.path][positions] += 1
                per_host[host] += boxes.sizes().sum() * plan.tensors[name].dtype.storage.itemsize
    return counts, per_host


def llama(spec_of, layers=32, dim=4096, ffn=14336, vocabulary=128256):
    """Llama 8B's tensors and AdamW's moments: name → (shape, layout)."""
    shapes = {"embed": (vocabulary, dim), "head": (vocabulary, dim), "norm": (dim,)}
    for i in range(layers):
        shapes |= {f"{i}/{n}": (dim, dim) for n in ("wq", "wo")} | {
            f"{i}/{n}": (dim // 4, dim) for n in ("wk", "wv")
        }
        shapes |= (
            {f"{i}/{n}": (ffn, dim) for n in ("w1", "w3")}
            | {f"{i}/w2": (dim, ffn)}
            | {f"{i}/{n}": (dim,) for n in ("n1", "n2")}
        )
    return {
        f"{kind}/{name}": (shape, spec_of(shape))
        for kind in ("p", "m", "v")
        for name, shape in shapes.items()
    }


MESH = Mesh((8, 8, 4), ("replica", "fsdp", "tensor"))
PLANS = {
    "hsdp and tensor parallel": lambda s: Sharding(
        MESH, PartitionSpec("fsdp", "tensor") if len(s) == 2 else PartitionSpec("fsdp")
    ),
    "tensor parallel alone": lambda s: Sharding(
        MESH, PartitionSpec("tensor") if len(s) == 2 else PartitionSpec()
    ),
    "replicated": lambda _s: Sharding(MESH, PartitionSpec()),
    "fsdp over all": lambda s: Sharding(MESH, PartitionSpec(("replica", "fsdp", "tensor"))),
}


@pytest.mark.long
@pytest.mark.parametrize(
    "plan",
    [pytest.param(plan, marks=[pytest.mark.slow] if i else []) for i, plan in enumerate(PLANS)],
)
def test_64_hosts_of_a_llama_write_equal_shares_each_chunk_once(plan):
    counts, per_host = written_chunks(Hosts(64, 4), llama(PLANS[plan], layers=4))
    assert all((c == 1).all() for c in counts.values())
    assert per_host.max() / per_host.mean() <= 1.02, per_host


def test_plain_tensors_of_all_processes_are_written_by_all_together():
    tensors = {f"w{i}": ((1000, 1000), None) for i in range(8)}
    counts, per_host = written_chunks(Hosts(4, 1), tensors)
    assert all((c == 1).all() for c in counts.values())
    assert per_host.max() / per_host.mean() <= 1.02


def test_small_plain_tensors_are_told_of_and_not_written_where_there_are_several_processes():
    tensors = {"small": ((SMALL_BYTES // 4 - 1,), None), "large": ((SMALL_BYTES // 4,), None)}
    many, one = Hosts(2, 1), Hosts(1, 1)
    plan = plan_save(many.sources(1, tensors), SaveOptions(), many.world(1))
    assert (plan.small, "small" in plan.blocks) == (["small"], False)
    plan = plan_save(one.sources(0, tensors), SaveOptions(), one.world(0))
    assert (plan.small, set(plan.blocks)) == ([], {"small", "large"})


def test_more_small_plain_tensors_than_can_be_told_of_are_refused():
    hosts = Hosts(2, 1)
    sources = hosts.sources(0, {f"w{i}": ((SMALL_BYTES // 4 - 1,), None) for i in range(1025)})
    with pytest.raises(
        LeafError, match=r"'w0' and 1,024 other plain tensors .* stores at most 67,108,864;"
    ):
        plan_save(sources, SaveOptions(), hosts.world(0))


def test_local_plain_tensors_are_written_whole_by_whoever_has_them():
    hosts = Hosts(3, 1)
    for host in range(3):
        plan = plan_save(
            hosts.sources(host, {f"{host}": ((200, 100), None)}),
            SaveOptions(host_tensors="local"),
            hosts.world(host),
        )
        assert plan.small == []
        (block,) = plan.blocks[f"{host}"]
        assert block.box == block.piece.box


def test_what_other_plain_tensors_a_process_knows_does_not_change_how_one_is_cut():
    hosts = Hosts(2, 1)
    huge = {f"huge{i}": ((1 << 20, 1 << 20), None) for i in range(4)}
    shared = {"w": ((8192, 8192), None)}
    alone = plan_save(hosts.sources(0, shared), SaveOptions(), hosts.world(0)).tensors["w"]
    among_others = plan_save(
        hosts.sources(1, {**huge, **shared}), SaveOptions(), hosts.world(1)
    ).tensors["w"]
    assert alone == among_others


def test_what_other_devices_hold_besides_does_not_change_how_a_tensor_of_some_devices_is_cut():
    # Two stages of a pipeline: a tensor of all devices, and others that only one stage knows of.
    hosts = Hosts(2, 2)
    everywhere = {"w": ((8192, 8192), Sharding(Mesh((4,), ("x",)), PartitionSpec("x")))}
    stage = {
        f"huge{i}": ((1 << 20, 1 << 20), Sharding(Mesh((2,), ("x",), [2, 3]), PartitionSpec("x")))
        for i in range(4)
    }
    first = plan_save(hosts.sources(0, everywhere), SaveOptions(), hosts.world(0)).tensors
    second = plan_save(
        hosts.sources(1, {**stage, **everywhere}), SaveOptions(), hosts.world(1)
    ).tensors
    assert first["w"] == second["w"]


@pytest.mark.parametrize("outside_first", [True, False])
def test_a_scalar_is_written_by_who_holds_it_whatever_other_scalars_others_hold(outside_first):
    hosts = Hosts(2, 1)
    here, elsewhere = (Sharding(Mesh((1,), ("x",), [device]), PartitionSpec()) for device in (0, 1))
    held = hosts.source(0, "held", (), here)
    # A DTensor of a mesh that this process is outside of is known to it all the same.
    outside = HostSource("outside", (), by_name("float32"), elsewhere, BoxArray.of([], 0), [])
    sources = {
        source.name: source for source in ((outside, held) if outside_first else (held, outside))
    }
    plan = plan_save(sources, SaveOptions(), hosts.world(0))
    assert [*plan.blocks] == ["held"]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=20))
def test_even_runs_are_cut_as_an_array_is_that_is_cut_into_equal_tiles(tiles):
    cuts = np.cumsum([0, *tiles])
    again = [0]
    for first, length, parts in even_runs(cuts):
        assert first == again[-1]
        again += [first + min(length, (i + 1) * -(-length // parts)) for i in range(parts)]
    assert again == cuts.tolist()


PLACED = [
    ((2, 3), ["S(0)", "S(0)"]),
    ((2, 3), ["_S(0,3)", "S(0)"]),
    ((3, 2), ["S(1)", "S(1)"]),
    ((2, 2, 2), ["S(0)", "S(0)", "S(1)"]),
]


@pytest.mark.parametrize(("mesh", "texts"), PLACED)
@given(st.integers(1, 40), st.integers(1, 40))
@settings(max_examples=30, deadline=None)
def test_tensors_in_nested_shards_are_written_each_chunk_once_in_no_more_arrays_than_shards(
    mesh, texts, rows, columns
):
    layout = Placements.of(Mesh(mesh, ("a", "b", "c")[: len(mesh)]), texts)
    shape, ranks = (rows, columns), layout.mesh.size

    class Ranks(Hosts):
        def source(self, host, name, shape, layout, dtype="float32"):
            boxes = layout.rank_boxes(shape, host)
            named = layout.as_sharding(shape) or layout
            return HostSource(
                name, shape, by_name(dtype), named, boxes, [layout.holders(host)] * len(boxes)
            )

    tensors = {"w": (shape, layout)}
    counts, _ = written_chunks(Ranks(ranks, 1), tensors)
    pieces = (
        plan_save(Ranks(ranks, 1).sources(0, tensors), SaveOptions(), Ranks(ranks, 1).world(0))
        .tensors["w"]
        .pieces
    )
    assert {piece.path for piece in pieces} == set(counts)
    assert all((c == 1).all() for c in counts.values())
    assert coverage_gap(shape, pieces) is None
    assert len(pieces) <= np.prod([len(cuts) - 1 for cuts in layout.cuts(shape)])


def test_evenly_nested_and_strided_shards_are_stored_as_one_array():
    for texts, shape in (
        (["S(0)", "S(0)"], (6, 5)),
        (["_S(0,64)", "R"], (4096, 5)),
        (["_S(0,64)", "S(0)"], (1000, 5)),
    ):
        layout = Placements.of(Mesh((64, 64), ("fsdp", "tensor")), texts)
        source = HostSource(
            "w",
            shape,
            by_name("float32"),
            layout,
            layout.rank_boxes(shape, 0),
            [layout.holders(0)] * 4096,
        )
        (piece,) = (
            plan_save({"w": source}, SaveOptions(), Hosts(4096, 1).world(0)).tensors["w"].pieces
        )
        assert piece.box == Box.full(shape)


def test_a_name_that_is_too_long_for_the_storage_is_refused_in_few_words():
    hosts = Hosts(1, 1)
    longest = "/".join(["n" * 100] * 594)
    plan_save(hosts.sources(0, {longest: ((2,), None)}), SaveOptions(), hosts.world(0))
    with pytest.raises(LeafError, match="has a name of 60,094 characters") as raised:
        plan_save(
            hosts.sources(0, {f"{longest}/{'n' * 100}": ((2,), None)}),
            SaveOptions(),
            hosts.world(0),
        )
    assert len(str(raised.value)) < 500


@st.composite
def jobs(draw):
    """A few tensors on random meshes over some of the devices, ids in any order; uneven dimensions
    too."""
    hosts = draw(st.integers(1, 5))
    per_host = draw(st.sampled_from([1, 2, 4]))
    offset = draw(st.sampled_from([0, 100]))
    ids = [i + offset * (i // per_host) for i in draw(st.permutations(range(hosts * per_host)))]
    job = Hosts(hosts, per_host, sorted(ids))
    tensors = {}
    for i in range(draw(st.integers(1, 4))):
        used = draw(st.integers(1, len(ids)))
        shape = draw(
            st.sampled_from(
                list([(used,), (used, 1), (1, used)] + ([(2, used // 2)] if used % 2 == 0 else []))
            )
        )
        mesh = Mesh(shape, ("x", "y")[: len(shape)], ids[:used])
        names = list(mesh.axis_names)
        spec = draw(
            st.sampled_from(
                [(), (names[0],), (None, names[-1]), (tuple(names),), (names[0], *names[1:])]
            )
        )
        tensors[f"w{i}"] = (
            tuple(draw(st.lists(st.integers(0, 300), min_size=2, max_size=3))),
            Sharding(mesh, PartitionSpec(*spec)),
        )
    return job, tensors


@given(jobs())
@settings(max_examples=150, deadline=None)
def test_any_tensors_of_any_meshes_are_written_each_chunk_once(job):
    hosts, tensors = job
    counts, _ = written_chunks(hosts, tensors)
    assert all((c == 1).all() for c in counts.values())
