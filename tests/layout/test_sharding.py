"""A mesh and a spec give every device its box. torch_xla and JAX are asked for the same in
test_sharding_{xla,jax}.py."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardckpt.errors import FormatError, ShardingError
from shardckpt.layout.mesh import Mesh
from shardckpt.layout.op_sharding import Kind, OpSharding
from shardckpt.layout.partition_spec import PartitionSpec
from shardckpt.layout.sharding import Sharding

P = PartitionSpec
MESH = Mesh((4, 2), ("data", "model"))


@st.composite
def shardings(draw, max_dims=3):
    """A sharding, and a tensor shape that it fits."""
    sizes = draw(st.lists(st.integers(1, 4), max_size=3))
    names = [f"axis{i}" for i in range(len(sizes))]
    first = draw(st.sampled_from([0, 2048]))
    mesh = Mesh(sizes, names, draw(st.permutations(range(first, first + int(np.prod(sizes))))))
    shape = draw(st.lists(st.integers(0, 9), max_size=max_dims))
    parts = [[] for _ in shape]
    for name in draw(st.permutations(names)):
        place = draw(st.integers(-1, len(shape) - 1))
        if place >= 0:
            parts[place].append(name)
    return Sharding(mesh, P(*map(tuple, parts))), tuple(shape)


# Boxes


@given(shardings())
def test_the_boxes_of_every_replica_tile_the_tensor_exactly_once(case):
    sharding, shape = case
    tiles = sharding.device_boxes(shape)
    assert tiles.device_ids.tolist() == sorted(sharding.mesh.device_ids.tolist())
    assert (tiles.tile, tiles.parts) == (sharding.tile(shape), sharding.parts(len(shape)))
    replicas = sharding.num_devices // int(np.prod(tiles.parts))
    assert sorted(tiles.replica_id.tolist()) == sorted(
        list(range(replicas)) * int(np.prod(tiles.parts))
    )
    for replica in range(replicas):
        painted = np.zeros(shape, int)
        for i in np.flatnonzero(tiles.replica_id == replica).tolist():
            painted[tiles.boxes[i].slices] += 1
        assert (painted == 1).all()


@given(shardings())
def test_a_box_fits_its_padded_tile(case):
    sharding, shape = case
    tiles = sharding.device_boxes(shape)
    extent = tiles.boxes.stop - tiles.boxes.start
    assert ((extent >= 0) & (extent <= np.array(tiles.tile, int))).all()


@given(shardings(), st.data())
def test_some_devices_get_the_rows_they_have_among_all(case, data):
    sharding, shape = case
    devices = data.draw(st.lists(st.sampled_from(sharding.mesh.device_ids.tolist()), max_size=4))
    every, few = sharding.device_boxes(shape), sharding.device_boxes(shape, devices)
    rows = np.searchsorted(every.device_ids, sorted(set(devices)))
    assert few.device_ids.tolist() == sorted(set(devices))
    assert few.boxes.start.tolist() == every.boxes.start[rows].tolist()
    assert few.boxes.stop.tolist() == every.boxes.stop[rows].tolist()
    assert few.replica_id.tolist() == every.replica_id[rows].tolist()


def test_replicas_count_up_with_the_device_id_however_many_there_are():
    ids = np.random.default_rng(1).permutation(100_000) + 7
    every = Sharding(Mesh((4, 1000, 25), ("x", "y", "z"), ids), P("z", "x")).device_boxes((50, 8))
    tiles = every.boxes.start[:, 0] * 8 + every.boxes.start[:, 1]
    for tile in np.unique(tiles).tolist():
        assert every.replica_id[tiles == tile].tolist() == list(range(1000))


def test_ten_rows_over_four_are_three_three_three_one_and_over_eight_end_empty():
    assert [b - a for a, b in rows_of((10, 1), "data")] == [3, 3, 3, 3, 3, 3, 1, 1]
    assert rows_of((10, 1), ("data", "model")) == [
        (0, 2),
        (2, 4),
        (4, 6),
        (6, 8),
        (8, 10),
        (10, 10),
        (10, 10),
        (10, 10),
    ]


def rows_of(shape, part):
    boxes = Sharding(MESH, P(part)).device_boxes(shape).boxes
    return [
        (a, b) for (a, _), (b, _) in zip(boxes.start.tolist(), boxes.stop.tolist(), strict=True)
    ]


def test_the_first_axis_of_a_tuple_is_the_outermost():
    assert rows_of((8, 1), ("model", "data")) == [
        (0, 1),
        (4, 5),
        (1, 2),
        (5, 6),
        (2, 3),
        (6, 7),
        (3, 4),
        (7, 8),
    ]


def test_dimensions_beyond_the_spec_are_whole():
    assert Sharding(MESH, P("model")).tile((8, 5, 3)) == (4, 5, 3)
    assert Sharding(MESH, P()).device_boxes(()).tile == ()


def test_a_spec_longer_than_the_tensor_is_refused():
    with pytest.raises(
        ShardingError,
        match=r"PartitionSpec\('data', None\) has 2 entries and the tensor 1 dimensions",
    ):
        Sharding(MESH, P("data", None)).device_boxes((8,))


def test_a_device_of_another_mesh_is_refused():
    with pytest.raises(ShardingError, match="Device 9 is not among the 8 devices"):
        Sharding(MESH, P("data")).device_boxes((8,), [0, 9])


@pytest.mark.parametrize("shape", [(-1,), (2.5,), (True,), (2**63,), (1,) * 33])
def test_what_is_no_shape_is_refused(shape):
    with pytest.raises(ShardingError, match="Tensor shape"):
        Sharding(MESH, P()).device_boxes(shape)


def test_results_shared_between_tensors_cannot_be_written_to():
    tiles = Sharding(MESH, P("data")).device_boxes((8,))
    with pytest.raises(ValueError, match="read-only"):
        tiles.replica_id[0] = 1


# Names


def test_indices_and_names_are_one_sharding():
    assert Sharding(MESH, P(1, 0)) == Sharding(MESH, P("model", "data"))


def test_axes_the_mesh_does_not_have_are_refused():
    with pytest.raises(ShardingError, match="no axis 'tensor'"):
        Sharding(MESH, P("tensor"))


def test_a_bare_tuple_is_refused_with_what_to_write():
    with pytest.raises(
        ShardingError, match=r"found Mesh and tuple; write PartitionSpec\(\*entries\)"
    ):
        Sharding(MESH, ("data", None))


# OpSharding, there and back


@given(shardings())
def test_the_op_sharding_gives_every_device_the_same_box_and_replica_id(case):
    sharding, shape = case
    ours, theirs = (
        sharding.device_boxes(shape),
        sharding.op_sharding(len(shape)).device_boxes(shape),
    )
    assert ours.device_ids.tolist() == theirs.device_ids.tolist()
    assert ours.boxes.start.tolist() == theirs.boxes.start.tolist()
    assert ours.boxes.stop.tolist() == theirs.boxes.stop.tolist()
    assert ours.replica_id.tolist() == theirs.replica_id.tolist()
    assert (ours.tile, ours.parts) == (theirs.tile, theirs.parts)


@given(shardings())
def test_the_op_sharding_is_canonical(case):
    sharding, shape = case
    op_sharding = sharding.op_sharding(len(shape))
    assert op_sharding.canonical() == op_sharding


@given(shardings())
def test_a_spec_is_inferred_from_its_own_op_sharding(case):
    sharding, shape = case
    ndim = len(shape)
    inferred = Sharding.infer(sharding.mesh, sharding.op_sharding(ndim), ndim)
    assert inferred is not None
    sizes = sharding.mesh.axis_sizes
    assert inferred.spec.axes == tuple(
        tuple(a for a in axes if sizes[a] > 1) for axes in sharding.spec.axes
    )


@given(st.permutations(range(8)), st.sampled_from([(8,), (4, 2), (2, 2, 2)]))
def test_what_is_inferred_is_equivalent_and_otherwise_nothing_is(ids, dims):
    op_sharding = OpSharding.tiled(dims, ids)
    inferred = Sharding.infer(MESH, op_sharding, len(dims))
    assert inferred is None or inferred.op_sharding(len(dims)).equivalent(op_sharding)


@pytest.mark.parametrize(
    ("op_sharding", "ndim"),
    [
        (OpSharding.tiled((8,), [1, 0, 2, 3, 4, 5, 6, 7]), 1),
        (OpSharding.tiled((8, 1)), 1),  # another rank
        (OpSharding.tiled((4,)), 1),  # another number of devices
        (OpSharding.tiled((8,), range(1, 9)), 1),  # other devices
        (OpSharding.tiled((2, 2, 2)), 3),  # cuts the axis of 4 in two dimensions
        (OpSharding.maximal(0), 1),
        (OpSharding(Kind.MANUAL), 1),
        (OpSharding(Kind.UNKNOWN), 1),
    ],
)
def test_nothing_is_inferred_where_no_spec_says_the_same(op_sharding, ndim):
    assert Sharding.infer(MESH, op_sharding, ndim) is None


def test_replicated_is_inferred_with_and_without_a_number_of_devices():
    for op_sharding in (
        OpSharding.parse("{replicated}"),
        OpSharding.replicated(8),
        OpSharding.parse("{devices=[1,1,8]<=[8] last_tile_dim_replicate}"),
    ):
        assert Sharding.infer(MESH, op_sharding, 2) == Sharding(MESH, P(None, None))
    assert Sharding.infer(MESH, OpSharding.replicated(4), 2) is None


# Partition counts


@pytest.mark.parametrize(
    ("counts", "devices", "text", "spec"),
    [
        ((4, 1), 4, "{devices=[4,1]<=[4]}", P("dim0", None)),
        ((4, 1), 8, "{devices=[4,1,2]<=[8] last_tile_dim_replicate}", P("dim0", None)),
        ((2, 4), 8, "{devices=[2,4]<=[8]}", P("dim0", "dim1")),
        ((None, 2), 4, "{devices=[1,2,2]<=[4] last_tile_dim_replicate}", P(None, "dim1")),
        ((1, 1), 4, "{replicated}", P(None, None)),
        (None, 4, "{replicated}", P()),
        ((1,), 1, "{replicated}", P(None)),
        (np.array([4, 1]), 4, "{devices=[4,1]<=[4]}", P("dim0", None)),
    ],
)
def test_partition_counts_cut_in_row_major_order_and_the_rest_are_replicas(
    counts, devices, text, spec
):
    sharding = Sharding.from_partition_counts(counts, devices)
    assert sharding.num_devices == devices
    assert sharding.op_sharding(2).to_hlo() == text
    assert sharding.spec == spec


@pytest.mark.parametrize(
    ("counts", "devices", "message"),
    [
        ((3,), 8, "3 parts, which do not divide 8 devices evenly"),
        ((0,), 8, "at least 1"),
        ((2.0,), 8, "found 2.0"),
        ((2,), 0, "Number of devices"),
    ],
)
def test_partition_counts_that_do_not_fit_are_refused(counts, devices, message):
    with pytest.raises(ShardingError, match=message):
        Sharding.from_partition_counts(counts, devices)


# JSON


@given(shardings())
def test_json_brings_the_same_sharding_back(case):
    sharding, _ = case
    assert Sharding.from_json(json.loads(json.dumps(sharding.to_json()))) == sharding
    other = Mesh((3,), ("z",))
    assert (
        Sharding.from_json(json.loads(json.dumps(sharding.to_json(mesh=1))), [other, sharding.mesh])
        == sharding
    )


def test_layouts_of_both_kinds_come_back_from_json():
    op_sharding = OpSharding.replicated([4, 9])
    assert OpSharding.from_json(op_sharding.to_json()) == op_sharding
    assert Sharding.from_json(Sharding(MESH, P("data")).to_json()) == Sharding(MESH, P("data"))


@pytest.mark.parametrize(
    "doc",
    [
        None,
        [],
        {},
        {"mesh": 0},
        {"mesh": 1, "spec": []},
        {"mesh": -1, "spec": []},
        {"mesh": True, "spec": []},
        {"mesh": 0, "spec": ["nope"]},
        {"mesh": 0, "spec": ["data", "data"]},
        {"mesh": 0, "spec": "data"},
        {"mesh": 0, "spec": [], "more": 1},
        {"mesh": {"shape": [0], "axes": ["x"], "devices": None}, "spec": []},
    ],
)
def test_json_that_is_no_sharding_is_a_format_error(doc):
    with pytest.raises(FormatError):
        Sharding.from_json(doc, [MESH])


json_values = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-3, 10**20),
        st.floats(),
        st.sampled_from(["data", "hlo", "{replicated}", ""]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(["mesh", "spec", "hlo", "devices", "shape", "axes"]), inner, max_size=3
        ),
    ),
    max_leaves=12,
)


@given(json_values)
@pytest.mark.parametrize(
    "parse", [lambda doc: Sharding.from_json(doc, [MESH]), OpSharding.from_json]
)
def test_any_json_is_a_layout_or_a_format_error(parse, doc):
    try:
        parse(doc)
    except FormatError:
        pass
    else:
        assert isinstance(doc, dict)
