"""Tensors that speak the protocol of torch.distributed.checkpoint, against that package itself."""

import json
import sys
from dataclasses import replace

import forks
import numpy as np
import pytest
import torch
from counting import steps
from paths import CHILDREN
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

from shardckpt import frameworks
from shardckpt.errors import DtypeError, LeafError
from shardckpt.layout.dtypes import by_name
from shardckpt.layout.world import World

CHILD = CHILDREN / "dtensor_ranks.py"
F32 = by_name("float32")


class Table(torch.Tensor):
    """A tensor that says of itself whatever it is told to."""

    @staticmethod
    def __new__(cls, shards, offsets, size, sizes=None):
        table = torch.Tensor._make_wrapper_subclass(
            cls, size, dtype=shards[0].dtype if shards else torch.float32
        )
        table.shards = shards
        table.chunks = [
            ChunkStorageMetadata(torch.Size(offset), torch.Size(n))
            for offset, n in zip(offsets, sizes or [shard.shape for shard in shards], strict=True)
        ]
        return table

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} is not for a table")

    def __create_write_items__(self, fqn, _):
        data = [
            TensorWriteData(chunk, TensorProperties(dtype=self.dtype), torch.Size(self.size()))
            for chunk in self.chunks
        ]
        return [
            WriteItem(MetadataIndex(fqn, chunk.offsets), WriteItemType.SHARD, tensor_data=d)
            for chunk, d in zip(self.chunks, data, strict=True)
        ]

    def __create_chunk_list__(self):
        return self.chunks

    def __get_tensor_shard__(self, index):
        return self.shards[index.index]


def boxes_of(adapter):
    return [str(adapter.boxes[i]) for i in range(len(adapter.boxes))]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Descriptions by two ranks of one DTensor around shards of its own."""
    jobs = [{"ranks": 2, "topics": {"protocol": str(tmp_path_factory.mktemp("dcp"))}}]
    child = forks.run(
        [sys.executable, CHILD], input=json.dumps(jobs), capture_output=True, text=True, timeout=250
    )
    assert child.returncode == 0, child.stderr[-4000:]
    return [rank["protocol"] for rank in json.loads(child.stdout.splitlines()[-1])[0]]


def test_the_ranks_shards_are_together_what_dcp_saves_each_element_once(ranks):
    whole, covered = np.zeros((4, 9)), np.zeros((4, 9), int)
    for rank in ranks:
        assert rank["shape"] == [4, 9]
        for (start, stop), array in zip(rank["boxes"], rank["arrays"], strict=True):
            whole[tuple(map(slice, start, stop))] = array
            covered[tuple(map(slice, start, stop))] += 1
    assert (covered == 1).all()
    assert all(whole.tolist() == rank["theirs"] for rank in ranks)


def test_a_rank_speaks_for_its_own_shards_and_they_are_its_own_memory(ranks):
    for number, rank in enumerate(ranks):
        assert (rank["layout"], rank["own pieces"], rank["views"], rank["tied"]) == (
            None,
            True,
            True,
            True,
        )
        assert rank["holders"] == [[number]] * (2, 1)[number]


def test_restoring_fills_the_shards_where_they_are_and_autograd_hears_of_it(ranks):
    assert all(rank["filled"] and rank["versions"] for rank in ranks)


def test_a_tensor_of_torch_s_own_is_taken_as_it_describes_itself():
    leaf = LocalShardsWrapper(
        [torch.arange(4.0).reshape(2, 2), torch.arange(6.0).reshape(2, 3)], [(0, 0), (0, 2)]
    )
    source = frameworks.source("w", leaf, World(3, 5))
    assert (source.shape, boxes_of(source), source.holders) == (
        (2, 5),
        ["[0:2, 0:2]", "[0:2, 2:5]"],
        [(3,), (3,)],
    )
    assert [a.tolist() for a in frameworks.fetch([source], [[1]])[0]] == [[[0, 1, 2], [3, 4, 5]]]


def test_only_what_has_elements_is_a_shard():
    leaf = Table([torch.zeros(0, 3), torch.ones(2, 3)], [(0, 0), (4, 0)], (6, 3))
    for adapter in frameworks.source("w", leaf), frameworks.target("w", leaf, (6, 3), F32):
        assert (adapter.shape, boxes_of(adapter)) == ((6, 3), ["[4:6, 0:3]"])
    nothing = Table([], [], (6, 3))
    source = frameworks.source("w", nothing)
    assert (
        source.shape,
        source.dtype,
        len(source.boxes),
        source.holders,
        frameworks.fetch([source]),
    ) == ((6, 3), F32, 0, [], [[]])
    assert frameworks.target("w", nothing, (6, 3), F32).place([]) is nothing


def test_a_tensor_belongs_to_one_process_if_all_its_shards_are_there():
    world, half = World(1, 2), Table([torch.ones(3, 3)], [(0, 0)], (6, 3))
    with pytest.raises(LeafError, match="'w/1' is laid out over several processes"):
        frameworks.sources({"w/1": half}, world, local={"w/1"})
    both = Table([torch.ones(3, 3), torch.ones(3, 3)], [(0, 0), (3, 0)], (6, 3))
    nothing = Table([], [], (0, 3))
    for leaf, shards in ((both, 2), (nothing, 0)):
        (source,) = frameworks.sources({"w/1": leaf}, world, local={"w/1"}).values()
        assert source.holders == [(1,)] * shards


def test_a_scalar_is_one_shard():
    leaf = Table([torch.tensor(3.0)], [()], ())
    source = frameworks.source("w", leaf)
    assert (boxes_of(source), frameworks.fetch([source])[0][0].item()) == (["[]"], 3)


def test_bits_of_the_shards_dtype_go_there_and_back():
    shards = [
        torch.arange(6.0).reshape(2, 3).to(torch.bfloat16),
        torch.full((1, 3), torch.nan, dtype=torch.bfloat16),
    ]
    leaf = Table(shards, [(0, 0), (2, 0)], (3, 3))
    source = frameworks.source("w", leaf)
    (arrays,) = frameworks.fetch([source])
    assert source.dtype.name == "bfloat16"
    other = Table([torch.zeros_like(shard) for shard in shards], [(0, 0), (2, 0)], (3, 3))
    assert frameworks.target("w", other, (3, 3), F32).place(arrays) is other
    assert all(
        torch.equal(a.view(torch.int16), b.view(torch.int16))
        for a, b in zip(other.shards, shards, strict=True)
    )


def test_strided_shards_are_views():
    whole = torch.arange(24.0).reshape(4, 6)
    leaf = Table([whole.t()[:3]], [(0, 0)], (3, 4))
    source = frameworks.source("w", leaf)
    ((array,),) = frameworks.fetch([source])
    assert np.shares_memory(array, whole.numpy())
    assert array.tolist() == whole.t()[:3].tolist()


ONES = torch.ones(2, 3)


def freed():
    shard = torch.ones(2, 3)
    shard.untyped_storage().resize_(0)
    return shard


@pytest.mark.parametrize(
    ("leaf", "words"),
    [
        (
            lambda: Table([ONES, ONES], [(0, 0), (1, 0)], (4, 3)),
            r"shard \[1:3, 0:3\] overlaps another one",
        ),
        (
            lambda: Table([ONES, ONES], [(0, 0), (0, 0)], (2, 3)),
            r"shard \[0:2, 0:3\] overlaps another one",
        ),
        (
            lambda: Table([ONES], [(3, 0)], (4, 3)),
            r"shard 0 begins at \(3, 0\) of shape \(4, 3\) and has shape \(2, 3\)",
        ),
        (lambda: Table([ONES], [(-1, 0)], (4, 3)), r"shard 0 begins at \(-1, 0\)"),
        (lambda: Table([ONES], [(0,)], (4, 3)), r"shard 0 begins at \(0,\)"),
        (
            lambda: Table([ONES], [(0, 0)], (4, 3), [(3, 3)]),
            r"has shape \(3, 3\), but its data has shape \(2, 3\)",
        ),
        (
            lambda: Table([ONES, ONES.double()], [(0, 0), (2, 0)], (4, 3)),
            "dtypes .'float32', 'float64'.",
        ),
        (lambda: Table([ONES.to("meta")], [(0, 0)], (2, 3)), "meta tensor without data"),
        (lambda: Table([freed()], [(0, 0)], (2, 3)), "storage, which has 0: its memory was freed"),
        (
            lambda: Table([ONES.to_sparse()], [(0, 0)], (2, 3)),
            "layout torch.sparse_coo cannot be stored",
        ),
        (lambda: Table([ONES.as_subclass(Other)], [(0, 0)], (2, 3)), "Other computes its elements"),
        (
            lambda: Contradiction([ONES, ONES], [(0, 0), (2, 0)], (4, 3)),
            r"different shapes, \[\(4, 3\), \(5, 3\)\]",
        ),
    ],
)
def test_a_tensor_that_contradicts_itself_or_holds_what_cannot_be_stored_is_refused_by_name(
    leaf, words
):
    for ask in frameworks.source, lambda name, leaf: frameworks.target(name, leaf, (4, 3), F32):
        with pytest.raises(LeafError, match=f"'layer/w': .*{words}"):
            ask("layer/w", leaf())


class Other(torch.Tensor):
    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return super().__torch_dispatch__(func, types, args, kwargs or {})


class Contradiction(Table):
    def __create_write_items__(self, fqn, _):
        first, second = super().__create_write_items__(fqn, _)
        return [
            first,
            replace(second, tensor_data=replace(second.tensor_data, size=torch.Size((5, 3)))),
        ]


def test_shards_that_cannot_be_restored_into_are_refused_by_name():
    leaf = Table([torch.ones(1, 3).expand(2, 3)], [(0, 0)], (2, 3))
    assert boxes_of(frameworks.source("layer/w", leaf)) == ["[0:2, 0:3]"]
    with pytest.raises(LeafError, match="'layer/w': elements of this tensor share memory"):
        frameworks.target("layer/w", leaf, (2, 3), F32)


@pytest.mark.parametrize(
    ("begins", "sizes"),
    [(((0, 0), (0, 0)), ((2, 3), (2, 3))), (((0, 0), (1, 2)), ((2, 3), (1, 1)))],
)
def test_shards_over_the_same_memory_are_refused_by_name(begins, sizes):
    held = torch.ones(2, 3)
    views = [held[a : a + n, b : b + m] for (a, b), (n, m) in zip(begins, sizes, strict=True)]
    offsets = ((0, 0), (2, 0))
    for leaf in Table(views, offsets, (4, 3)), described(held, (4, 3), offsets, begins, sizes):
        for ask in frameworks.source, lambda name, leaf: frameworks.target(name, leaf, (4, 3), F32):
            with pytest.raises(
                LeafError, match=r"^'layer/w': its shards \[0:2, 0:3\] and .* share memory, so both"
            ):
                ask("layer/w", leaf)


@pytest.mark.parametrize("dim", [0, 1])
def test_shards_that_are_rows_or_columns_of_one_tensor_are_not_compared_in_pairs(dim):
    n, held = 300, torch.ones(600, 600)
    offsets = [(2 * i * (1 - dim), 2 * i * dim) for i in range(n)]
    sizes = [(600, 2) if dim else (2, 600)] * n
    leaves = [
        Table([*held.split(2, dim)], offsets, (600, 600)),
        described(held, (600, 600), offsets, offsets, sizes),
    ]
    assert steps(lambda: frameworks.sources(dict(enumerate(leaves)), World())) < n * n / 2


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_dtypes_that_cannot_be_stored_are_refused_by_name():
    with pytest.raises(DtypeError, match=r"'layer/w': torch.complex32 cannot be stored"):
        frameworks.source("layer/w", Table([torch.zeros(2, dtype=torch.complex32)], [(0,)], (2,)))


def described(tensor, shape, offsets, begins, sizes):
    tensor.global_shape, tensor.global_offsets, tensor.local_offsets, tensor.local_sizes = (
        shape,
        offsets,
        begins,
        sizes,
    )
    return tensor


def test_a_plain_tensor_is_recognised_by_the_attributes_that_describe_it_and_its_shards_are_views():
    leaf = described(
        torch.arange(12.0).reshape(4, 3),
        (9, 3),
        [(6, 0), torch.Size((0, 1))],
        ((1, 0), (0, 1)),
        [[2, 3], [1, 2]],
    )
    for adapter in (
        frameworks.source("w", leaf, World(1, 2)),
        frameworks.target("w", leaf, (9, 3), F32),
    ):
        assert (adapter.shape, boxes_of(adapter)) == ((9, 3), ["[6:8, 0:3]", "[0:1, 1:3]"])
    ((rows, corner),) = frameworks.fetch([frameworks.source("w", leaf)])
    assert (rows.tolist(), corner.tolist()) == ([[3, 4, 5], [6, 7, 8]], [[1, 2]])
    assert np.shares_memory(rows, leaf.numpy())
    version = leaf._version
    sink = frameworks.target("w", leaf, (9, 3), F32)
    sink.destinations[0][...] = 5
    assert sink.place(sink.destinations) is leaf
    assert (leaf[1:3].unique().tolist(), leaf._version > version) == ([5], True)


def test_a_tensor_with_some_of_the_attributes_is_an_ordinary_one():
    leaf = torch.ones(2, 3)
    leaf.global_shape, leaf.global_offsets = (4, 3), ((0, 0),)
    assert frameworks.source("w", leaf).shape == (2, 3)


def test_described_tensors_are_tied_by_their_memory_and_their_description():
    whole = torch.ones(2, 3)
    one = described(whole.detach(), (4, 3), ((0, 0),), ((0, 0),), ((2, 3),))
    same = described(whole.detach(), (4, 3), ((0, 0),), ((0, 0),), ((2, 3),))
    other = described(whole.detach(), (4, 3), ((2, 0),), ((0, 0),), ((2, 3),))
    empty = [described(torch.ones(0, 3), (4, 3), (), (), ()) for _ in range(2)]
    assert frameworks.identity(one) == frameworks.identity(same)
    assert len({frameworks.identity(leaf) for leaf in (one, other, whole, *empty)}) == 5


@pytest.mark.parametrize(
    "description",
    [
        ((4, 3), ((0, 0),), ((0, 0),), ((3, 3),)),
        ((1, 3), ((0, 0),), ((0, 0),), ((2, 3),)),
        ((4, 3), ((0, 0), (2, 0)), ((0, 0),), ((2, 3),)),
        ((4, 3), ((0,),), ((0, 0),), ((2, 3),)),
        ((4, 3), ((-1, 0),), ((0, 0),), ((2, 3),)),
        ((4, 3), ((0.5, 0),), ((0, 0),), ((2, 3),)),
        (None, ((0, 0),), ((0, 0),), ((2, 3),)),
    ],
)
def test_a_description_that_contradicts_itself_is_refused_by_name(description):
    for ask in frameworks.source, lambda name, leaf: frameworks.target(name, leaf, (4, 3), F32):
        with pytest.raises(
            LeafError,
            match=r"'layer/w': this tensor of shape \(2, 3\) describes itself as shards by "
            r"global_shape=",
        ):
            ask("layer/w", described(torch.ones(2, 3), *description))
