"""Placements give every rank its boxes. Torch is asked for the same in
frameworks/test_dtensor.py."""

import json
from itertools import pairwise, product
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardckpt.errors import FormatError, ShardingError
from shardckpt.layout.box import Box
from shardckpt.layout.mesh import Mesh
from shardckpt.layout.partition_spec import PartitionSpec
from shardckpt.layout.placements import MOST_BOXES, Placement, Placements
from shardckpt.layout.sharding import Sharding

DP_TP = Mesh((3, 2), ("dp", "tp"))


@st.composite
def layouts(draw):
    """Placements, strided ones too, and a shape of which they say where it is."""
    sizes = draw(st.lists(st.integers(1, 4), max_size=3))
    first = draw(st.sampled_from([0, 16]))
    mesh = Mesh(
        sizes,
        [f"axis{i}" for i in range(len(sizes))],
        draw(st.permutations(range(first, first + prod(sizes)))),
    )
    ndim = draw(st.integers(1, 3))
    texts = [draw(st.sampled_from(["R", *(f"S({d})" for d in range(ndim))])) for _ in sizes]
    shape = draw(st.lists(st.integers(0, 13), min_size=ndim, max_size=ndim))
    if draw(st.booleans()):
        factor = draw(st.sampled_from([2, 3, 4]))
        strided = [
            "_" + text.replace(")", f",{factor})")
            if text[0] == "S" and draw(st.booleans())
            else text
            for text in texts
        ]
        try:
            layout = Placements.of(mesh, strided)
        except ShardingError:
            return Placements.of(mesh, texts), tuple(shape)
        return layout, tuple(n * parts for n, parts in zip(shape, layout.parts(ndim), strict=True))
    return Placements.of(mesh, texts), tuple(shape)


def listed(boxes):
    return [boxes[i] for i in range(len(boxes))]


def cells(layout, shape):
    """The boxes between the cuts, in row-major order."""
    ranges = product(*(pairwise(cuts.tolist()) for cuts in layout.cuts(shape)))
    return [Box(tuple(a for a, _ in cell), tuple(b for _, b in cell)) for cell in ranges]


def painted(boxes, shape):
    counts = np.zeros(shape, int)
    for box in boxes:
        counts[box.slices] += 1
    return counts


# Boxes


@settings(max_examples=150, deadline=None)
@given(layouts())
def test_the_distinct_boxes_are_the_whole_tensor_each_element_once_and_none_of_them_empty(case):
    layout, shape = case
    boxes = cells(layout, shape)
    assert (painted(boxes, shape) == 1).all()
    assert all(box.size > 0 for box in boxes)
    assert [box.start for box in boxes] == sorted(box.start for box in boxes)
    assert (
        len(boxes)
        == prod(len(cuts) - 1 for cuts in layout.cuts(shape))
        <= prod(layout.parts(len(shape)))
    )


@settings(max_examples=150, deadline=None)
@given(layouts())
def test_ranks_hold_distinct_boxes_each_as_often_as_it_has_holders(case):
    layout, shape = case
    ranks, boxes = layout.boxes(shape)
    held = {rank: [] for rank in layout.mesh.device_ids.tolist()}
    for rank, box in zip(ranks.tolist(), listed(boxes), strict=True):
        held[rank].append(box)
    assert set(listed(boxes)) == set(cells(layout, shape))
    for rank, mine in held.items():
        assert mine == listed(layout.rank_boxes(shape, rank))
        same = [other for other in sorted(held) if held[other] == mine]
        assert rank in layout.holders(rank)
        assert not mine or list(layout.holders(rank)) == same


@settings(max_examples=150, deadline=None)
@given(layouts())
def test_a_rank_s_boxes_fill_its_local_tensor_in_their_order(case):
    layout, shape = case
    for rank in layout.mesh.device_ids.tolist():
        boxes, places = layout.rank_boxes(shape, rank), layout.local_boxes(shape, rank)
        assert [box.shape for box in listed(boxes)] == [place.shape for place in listed(places)]
        assert (painted(listed(places), layout.local_shape(shape, rank)) == 1).all()
        assert boxes.start.tolist() == sorted(boxes.start.tolist())
        assert places.start.tolist() == sorted(places.start.tolist())


@settings(max_examples=150, deadline=None)
@given(layouts())
def test_the_sharding_gives_every_rank_its_box_and_is_missing_only_where_it_would_not(case):
    layout, shape = case

    def differing(sharding):
        tiles = sharding.device_boxes(shape)
        boxes = {
            rank: [tiles.boxes[i]] if tiles.boxes[i].size else []
            for i, rank in enumerate(tiles.device_ids.tolist())
        }
        return [
            rank for rank, mine in boxes.items() if mine != listed(layout.rank_boxes(shape, rank))
        ]

    sharding = layout.as_sharding(shape)
    if sharding is not None:
        assert sharding.mesh is layout.mesh
        assert not differing(sharding)
        return
    even = layout.as_sharding(layout.parts(len(shape)))
    if even is None:
        assert any(
            len(layout.rank_boxes(shape, rank)) > 1 for rank in layout.mesh.device_ids.tolist()
        )
    else:
        assert differing(even)


def test_nested_shards_round_up_twice_where_a_sharding_rounds_once():
    layout = Placements.of(Mesh((4, 2), ("x", "y")), ["S(0)", "S(0)"])
    assert layout.cuts((10,))[0].tolist() == [0, 2, 3, 5, 6, 8, 9, 10]
    assert layout.as_sharding((10,)) is None
    assert layout.as_sharding((16,)) == Sharding(layout.mesh, PartitionSpec(("x", "y")))


def test_seven_rows_of_fsdp_over_tensor_parallelism_are_split_by_tp_first():
    layout = Placements.of(DP_TP, ["_S(0,2)", "S(0)"])
    held = [[str(box) for box in listed(layout.rank_boxes((7,), rank))] for rank in range(6)]
    assert held == [["[0:2]"], ["[4:5]"], ["[2:4]"], ["[5:6]"], [], ["[6:7]"]]
    assert layout.as_sharding((12,)) == Sharding(DP_TP, PartitionSpec(("tp", "dp")))


def test_a_strided_shard_within_a_shard_is_several_boxes():
    layout = Placements.of(Mesh((2, 2), ("x", "y")), ["S(0)", "_S(0,2)"])
    assert [str(box) for box in listed(layout.rank_boxes((16, 3), 2))] == [
        "[8:10, 0:3]",
        "[12:14, 0:3]",
    ]
    assert [str(box) for box in listed(layout.local_boxes((16, 3), 2))] == [
        "[0:2, 0:3]",
        "[2:4, 0:3]",
    ]
    assert (layout.parts(2), layout.local_shape((16, 3), 2), layout.as_sharding((16, 3))) == (
        (8, 1),
        (4, 3),
        None,
    )


@pytest.mark.parametrize(
    ("sizes", "texts", "order"),
    [
        ((2, 2), ["_S(0,2)", "S(0)"], (1, 0)),
        ((2, 2, 2), ["_S(0,4)", "_S(0,2)", "S(0)"], (2, 1, 0)),
        ((2, 2, 2), ["_S(0,4)", "S(0)", "S(0)"], (1, 2, 0)),
        ((2, 2, 2), ["_S(0,2)", "S(0)", "S(0)"], (1, 0, 2)),
        ((2, 2, 2), ["S(0)", "_S(0,2)", "S(0)"], (0, 2, 1)),
        ((2, 2, 2), ["_S(0,2)", "R", "S(0)"], (2, 0)),
        ((1, 2, 2), ["_S(0,7)", "S(0)", "S(0)"], (0, 1, 2)),
    ],
)
def test_a_split_factor_puts_a_split_behind_those_of_later_dimensions(sizes, texts, order):
    names = ("a", "b", "c")[: len(sizes)]
    layout = Placements.of(Mesh(sizes, names), texts)
    assert layout.as_sharding((8,)) == Sharding(
        layout.mesh, PartitionSpec(tuple(names[axis] for axis in order))
    )


def test_a_rank_that_the_mesh_does_not_have_holds_nothing():
    layout = Placements.of(Mesh((2,), ("x",), [3, 5]), ["S(0)"])
    assert (len(layout.rank_boxes((4, 2), 0)), len(layout.local_boxes((4, 2), 0))) == (0, 0)
    assert (layout.local_shape((4, 2), 0), layout.holders(0)) == (None, ())


def test_scalars_and_meshes_without_dimensions_are_held_whole():
    for layout in Placements.of(DP_TP, ["R", "R"]), Placements.of(Mesh((), ()), []):
        assert listed(layout.rank_boxes((), 0)) == cells(layout, ()) == [Box((), ())]
        assert layout.holders(0) == tuple(range(layout.num_devices))
        assert layout.as_sharding(()) == Sharding(layout.mesh, PartitionSpec())
        assert (layout.local_shape((), 0), layout.boxes(())[0].tolist()) == (
            (),
            list(range(layout.num_devices)),
        )


def test_a_hundred_thousand_ranks_are_no_trouble():
    layout = Placements.of(
        Mesh((50, 2000), ("replicate", "shard"), np.random.default_rng(1).permutation(100_000)),
        ["R", "S(0)"],
    )
    ranks, boxes = layout.boxes((6001, 3))
    assert len(ranks) == 50 * 1501  # four rows each, the last shard has one, and the rest nothing
    for at in (0, 1500, 75_000):
        assert boxes[at] == layout.rank_boxes((6001, 3), int(ranks[at]))[0]
        assert len(layout.holders(int(ranks[at]))) == 50


# Impossible cases


@pytest.mark.parametrize("shape", [(10,), (13,), (1,)])
def test_strided_shards_that_torch_itself_splits_in_two_ways_are_refused(shape):
    layout = Placements.of(Mesh((2, 2), ("x", "y")), ["S(0)", "_S(0,2)"])
    for question in (layout.cuts, layout.boxes, layout.as_sharding):
        with pytest.raises(
            ShardingError,
            match=r"S\(0\) over x=2, _S\(0,2\) over y=2: the length .*torch has no single rule .* "
            r"redistribute it",
        ):
            question(shape)
    assert cells(layout, (0,)) == []


@pytest.mark.parametrize("texts", [["_S(0,2)", "S(0)"], ["_S(0,5)", "S(0)"], ["_S(0,4)", "S(0)"]])
def test_a_split_factor_that_later_dimensions_do_not_fit_is_refused(texts):
    with pytest.raises(
        ShardingError,
        match=r"the split factor \d of tensor dimension 0 does not fit .*; redistribute it",
    ):
        Placements.of(Mesh((2, 3), ("x", "y")), texts)


def test_placements_of_another_number_or_for_another_rank_are_refused():
    with pytest.raises(ShardingError, match="1 placements for a mesh of 2 dimensions"):
        Placements.of(DP_TP, ["R"])
    with pytest.raises(
        ShardingError,
        match=r"S\(1\) over dp=3, R over tp=2: it shards dimension 1 of a tensor with 1",
    ):
        Placements.of(DP_TP, ["S(1)", "R"]).parts(1)


def test_more_boxes_than_anybody_has_are_refused():
    with pytest.raises(ShardingError, match=f"more than {MOST_BOXES} boxes"):
        Placements.of(DP_TP, [f"_S(0,{MOST_BOXES})", "R"])
    # As many cells as there can be boxes, a quarter of which every rank holds.
    most = MOST_BOXES // 4
    with pytest.raises(ShardingError, match=f"more than {MOST_BOXES} boxes"):
        Placements.of(Mesh((4, 2), None), ["R", f"_S(0,{most})"])


@pytest.mark.parametrize("shape", [(-1,), (2.5,), (2**63,), (1,) * 33])
def test_what_is_no_shape_is_refused(shape):
    with pytest.raises(ShardingError, match="Tensor shape"):
        Placements.of(DP_TP, ["R", "R"]).cuts(shape)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "r",
        "S",
        "S()",
        "S(-1)",
        "S(32)",
        "S(0",
        "S(0) ",
        "_S(0)",
        "_S(0,0)",
        "_S(0,2000000)",
        "P",
        "S(٣)",
        None,
        0,
        ["R"],
    ],
)
def test_what_is_no_placement_is_refused(text):
    with pytest.raises(ShardingError, match="Placement: "):
        Placement.parse(text)


@pytest.mark.parametrize("numbers", [(True,), (0, True), (None, 2), (0, 0), (33,), ("0",)])
def test_numbers_that_make_no_placement_are_refused(numbers):
    with pytest.raises(ShardingError, match="Placement: "):
        Placement(*numbers)


# In a record


def test_one_part_before_is_no_stride():
    assert Placement.parse("_S(2,1)") == Placement.parse("S(2)") == Placement(2)


@settings(max_examples=50, deadline=None)
@given(layouts())
def test_json_gives_back_the_same(case):
    layout, _ = case
    assert Placements.from_json(json.loads(json.dumps(layout.to_json()))) == layout
    doc = json.loads(json.dumps(layout.to_json(mesh=1)))
    assert doc["mesh"] == 1
    parsed = Placements.from_json(doc, [DP_TP, layout.mesh])
    assert parsed == layout
    assert hash(parsed) == hash(layout)


def test_people_read_which_mesh_dimension_does_what():
    assert Placements.of(DP_TP, ["_S(0,2)", "S(0)"]).text == "_S(0,2) over dp=3, S(0) over tp=2"


@pytest.mark.parametrize(
    "doc",
    [
        None,
        [],
        {},
        {"mesh": 0},
        {"mesh": 0, "placements": ["R", "R"], "more": 1},
        {"mesh": 1, "placements": ["R", "R"]},
        {"mesh": -1, "placements": ["R", "R"]},
        {"mesh": True, "placements": ["R", "R"]},
        {"mesh": {"shape": [2]}, "placements": ["R"]},
        {"mesh": 0, "placements": "RR"},
        {"mesh": 0, "placements": ["R"]},
        {"mesh": 0, "placements": ["R", None]},
        {"mesh": 0, "placements": ["R", "S(99)"]},
        {"mesh": 0, "placements": ["R", "_S(0,9999999)"]},
        {"mesh": 0, "placements": [f"_S(0,{MOST_BOXES})", f"_S(1,{MOST_BOXES})"]},
        {"mesh": 0, "placements": ["R"] * 1_000_000},
        {"mesh": 10**5000, "placements": ["R", "R"]},
    ],
)
def test_documents_that_are_something_else_are_refused(doc):
    with pytest.raises(FormatError):
        Placements.from_json(doc, [DP_TP])
