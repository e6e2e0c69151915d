"""What each process of a job writes, planned by each for itself."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardckpt.mesh import Mesh
from shardckpt.options import SaveOptions
from shardckpt.partition_spec import PartitionSpec
from shardckpt.reshard.plan import chunks_inside
from shardckpt.save_plan import SMALL_BYTES, plan_save
from shardckpt.sharding import Sharding

sys.path.insert(0, str(Path(__file__).parent))

from simulated_hosts import Hosts


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
        for name, writes in plan.writes.items():
            for write in writes:
                part = sources[name].boxes[write.box].overlap(write.piece.box)
                positions, boxes = chunks_inside(write.piece, part)
                mine = slice(write.chunks.start, write.chunks.stop)
                counts[write.piece.path][positions[mine]] += 1
                per_host[host] += boxes.sizes()[mine].sum() * plan.tensors[name].dtype.storage.itemsize
    return counts, per_host


def llama(spec_of, layers=32, dim=4096, ffn=14336, vocabulary=128256):
    """Llama 8B's tensors and AdamW's moments: name → (shape, layout)."""
    shapes = {"embed": (vocabulary, dim), "head": (vocabulary, dim), "norm": (dim,)}
    for i in range(layers):
        shapes |= {f"{i}/{n}": (dim, dim) for n in ("wq", "wo")} | {f"{i}/{n}": (dim // 4, dim) for n in ("wk", "wv")}
        shapes |= {f"{i}/{n}": (ffn, dim) for n in ("w1", "w3")} | {f"{i}/w2": (dim, ffn)} | {f"{i}/{n}": (dim,) for n in ("n1", "n2")}
    return {f"{kind}/{name}": (shape, spec_of(shape)) for kind in ("p", "m", "v") for name, shape in shapes.items()}


MESH = Mesh((8, 8, 4), ("replica", "fsdp", "tensor"))
PLANS = {
    "hsdp and tensor parallel": lambda s: Sharding(MESH, PartitionSpec("fsdp", "tensor") if len(s) == 2 else PartitionSpec("fsdp")),
    "tensor parallel alone": lambda s: Sharding(MESH, PartitionSpec("tensor") if len(s) == 2 else PartitionSpec()),
    "replicated": lambda _s: Sharding(MESH, PartitionSpec()),
    "fsdp over all": lambda s: Sharding(MESH, PartitionSpec(("replica", "fsdp", "tensor"))),
}


@pytest.mark.parametrize("plan", PLANS)
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
    assert (plan.small, "small" in plan.writes) == (["small"], False)
    plan = plan_save(one.sources(0, tensors), SaveOptions(), one.world(0))
    assert (plan.small, set(plan.writes)) == ([], {"small", "large"})


def test_local_plain_tensors_are_written_whole_by_whoever_has_them():
    hosts = Hosts(3, 1)
    for host in range(3):
        plan = plan_save(hosts.sources(host, {f"{host}": ((200, 100), None)}), SaveOptions(host_tensors="local"), hosts.world(host))
        assert plan.small == []
        (write,) = plan.writes[f"{host}"]
        assert len(write.chunks) == write.piece.num_chunks


def test_what_other_plain_tensors_a_process_knows_does_not_change_how_one_is_cut():
    hosts = Hosts(2, 1)
    huge = {f"huge{i}": ((1 << 20, 1 << 20), None) for i in range(4)}
    shared = {"w": ((8192, 8192), None)}
    alone = plan_save(hosts.sources(0, shared), SaveOptions(), hosts.world(0)).tensors["w"]
    among_others = plan_save(hosts.sources(1, {**huge, **shared}), SaveOptions(), hosts.world(1)).tensors["w"]
    assert alone == among_others


@st.composite
def jobs(draw):
    """A few tensors on random meshes over some of the devices, ids in any order; uneven dimensions too."""
    hosts = draw(st.integers(1, 5))
    per_host = draw(st.sampled_from([1, 2, 4]))
    offset = draw(st.sampled_from([0, 100]))
    ids = [i + offset * (i // per_host) for i in draw(st.permutations(range(hosts * per_host)))]
    job = Hosts(hosts, per_host, sorted(ids))
    tensors = {}
    for i in range(draw(st.integers(1, 4))):
        used = draw(st.integers(1, len(ids)))
        shape = draw(st.sampled_from(list([(used,), (used, 1), (1, used)] + ([(2, used // 2)] if used % 2 == 0 else []))))
        mesh = Mesh(shape, ("x", "y")[: len(shape)], ids[:used])
        names = list(mesh.axis_names)
        spec = draw(st.sampled_from([(), (names[0],), (None, names[-1]), (tuple(names),), (names[0], *names[1:])]))
        tensors[f"w{i}"] = (tuple(draw(st.lists(st.integers(0, 300), min_size=2, max_size=3))), Sharding(mesh, PartitionSpec(*spec)))
    return job, tensors


@given(jobs())
@settings(max_examples=150, deadline=None)
def test_any_tensors_of_any_meshes_are_written_each_chunk_once(job):
    hosts, tensors = job
    counts, _ = written_chunks(hosts, tensors)
    assert all((c == 1).all() for c in counts.values())
