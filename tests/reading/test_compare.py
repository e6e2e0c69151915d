"""Comparing checkpoints: numpy is the oracle for values, the saved states for structure."""

import shutil
import tracemalloc

import ml_dtypes
import numpy as np
import pytest
import torch
from composites import Code, Scaled, register_code
from hypothesis import given, settings
from hypothesis import strategies as st

import shardckpt
from shardckpt import Mesh, OpSharding, PartitionSpec, PerProcess, SaveOptions, Sharding
from shardckpt.errors import CorruptionError, MissingDataError, OptionError, ReplacedError
from shardckpt.reading.compare import compare
from shardckpt.reading.compare_values import Pair, compare_values
from shardckpt.reading.reader import LOCAL_RUN

MESH = Mesh((4, 2), ("data", "model"))


@pytest.fixture
def saved(tmp_path):
    """Saves a state and opens it."""
    places = (tmp_path / str(i) for i in range(1000))

    def save(state, **options):
        place = next(places)
        shardckpt.save(place, state, options=SaveOptions(**options))
        return shardckpt.open(place)

    return save


def state():
    rng = np.random.default_rng(7)
    embed = rng.standard_normal((300, 33))
    return {
        "model": {
            "embed": embed,
            "head": embed,
            "bias": rng.integers(0, 9, (5,)),
            "empty": np.zeros((0, 3)),
        },
        "opt": {
            0: {"m": rng.standard_normal((17,)).astype(np.float32)},
            "betas": (0.9, 0.95),
            "none": None,
            "groups": [],
        },
        "step": 100,
    }


def changed(comparison, aspect=None):
    return [(c.name, c.a, c.b) for c in comparison.changes if aspect is None or c.aspect == aspect]


# --- equality -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"layout": "zarr"},
        {"compression": "zstd"},
        {"shardings": {"**/embed": Sharding(MESH, PartitionSpec("data", "model"))}},
    ],
)
def test_the_same_state_is_equal_however_it_was_stored(saved, options):
    comparison = compare(saved(state()), saved(state(), **options))
    assert comparison.equal()
    assert comparison.tensors_compared == 3  # the tied one once, the empty one not at all
    assert comparison.bytes_compared == 300 * 33 * 8 + 5 * 8 + 17 * 4


def test_another_layout_is_told_and_is_a_difference_only_on_request(saved):
    rows = Sharding(MESH, PartitionSpec("data"))
    comparison = compare(saved(state()), saved(state(), shardings={"opt/0/m": rows}))
    assert [(c.name, c.a, c.b) for c in comparison.layouts] == [("opt/0/m", None, rows)]
    assert comparison.equal()
    assert not comparison.equal(layout=True)


def test_layouts_are_compared_by_who_holds_what(saved):
    by_spec = saved(state(), shardings={"model/embed": Sharding(MESH, PartitionSpec("data"))})
    renamed = saved(
        state(), shardings={"model/embed": Sharding(Mesh((4, 2), ("x", "y")), PartitionSpec("x"))}
    )
    by_tiles = saved(
        state(),
        shardings={
            "model/embed": OpSharding.parse("{devices=[4,1,2]<=[8] last_tile_dim_replicate}")
        },
    )
    other = saved(state(), shardings={"model/embed": Sharding(MESH, PartitionSpec("model"))})
    assert compare(by_spec, renamed).equal(layout=True)
    assert compare(by_spec, by_tiles).equal(layout=True)
    assert not compare(by_spec, other).equal(layout=True)


# --- structure ------------------------------------------------------------------------------------


def test_names_that_only_one_has_are_listed_once_in_order(saved):
    more = state()
    more["model"]["extra"] = {"w": np.ones(3), "lr": 0.1, "nothing": {}}
    comparison = compare(saved(state()), saved(more))
    assert comparison.only_a == ()
    assert comparison.only_b == ("model/extra/w", "model/extra/lr", "model/extra/nothing")
    assert not comparison.equal()


def test_shapes_and_dtypes_that_differ_are_told_and_their_values_are_not_compared(saved):
    a = {"w": np.zeros((4, 6)), "x": np.zeros(3, np.float32)}
    b = {"w": np.zeros((6, 4)), "x": np.zeros(3, np.float16)}
    comparison = compare(saved(a), saved(b))
    assert changed(comparison, "shape") == [("w", (4, 6), (6, 4))]
    assert changed(comparison, "dtype") == [("x", "float32", "float16")]
    assert comparison.tensors_compared == 0


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (1, 2),
        (1, 1.0),
        (1, True),
        (0.0, -0.0),
        ("1", 1),
        (None, "None"),
        (b"a", "a"),
        (np.float32(1), np.float64(1)),
        (2**70, 2**70 + 1),
    ],
)
def test_small_leaves_that_differ_in_value_or_type_are_told(saved, a, b):
    comparison = compare(saved({"leaf": a}), saved({"leaf": b}))
    assert [name for name, *_ in changed(comparison, "leaf")] == ["leaf"]
    (_, text_a, text_b), *_ = changed(comparison)
    assert text_a != text_b


def test_small_leaves_that_are_nan_are_equal_if_their_bits_are(saved):
    nan = float("nan")
    assert compare(
        saved({"lr": nan, "x": np.float32("nan")}), saved({"lr": nan, "x": np.float32("nan")})
    ).equal()


def test_a_tensor_that_is_tied_in_one_only_is_a_difference_and_its_values_are_compared_all_the_same(
    saved,
):
    apart = state()
    apart["model"]["head"] = apart["model"]["embed"].copy()
    apart["model"]["head"][2, 3] += 1
    comparison = compare(saved(state()), saved(apart))
    assert changed(comparison) == [("model/head", "model/embed", None)]
    assert [(v.name, v.differing, v.first) for v in comparison.values] == [
        ("model/head", 1, (2, 3))
    ]


def test_tied_tensors_are_equal_in_any_order_of_their_names(saved):
    p, q = np.zeros(2), np.zeros(2)
    a = saved({"x": p, "y": p, "z": p, "w": q})
    assert compare(a, saved({"z": p, "y": p, "w": q, "x": p})).equal()
    other = compare(a, saved({"y": p, "z": p, "w": q, "x": q}))
    assert changed(other, "tied") == [("x", None, "w"), ("y", "x", None), ("z", "x", "y")]


def test_a_container_of_another_kind_is_a_difference(saved):
    a = {"x": [1, 2], "y": {0: 1}, "z": {}, "w": np.ones(2), "same": {}}
    b = {"x": (1, 2), "y": {"0": 1}, "z": [], "w": {"v": np.ones(2)}, "same": {"more": 1}}
    comparison = compare(saved(a), saved(b))
    assert changed(comparison, "kind") == [
        ("x", "list", "tuple"),
        ("y", "dict[int]", "dict"),
        ("z", "dict", "list"),
        ("w", "tensor", "dict"),
    ]
    assert comparison.only_b == ("w/v", "same/more")


def test_keys_of_two_types_that_are_exchanged_are_a_difference(saved):
    p, q = np.zeros(2), np.ones(2)
    comparison = compare(saved({"m": {1: p, "2": q}}), saved({"m": {"1": p, 2: q}}))
    assert changed(comparison) == [("m", "dict, key 1 of type int", "dict, key 1 of type str")]
    assert not comparison.equal()


def test_values_of_processes_that_differ_are_counted(saved):
    one, same, *others = (saved({"rng": PerProcess({"seed": seed})}) for seed in (1, 1, 2, 1.0))
    assert compare(one, same).equal()
    for other in others:
        assert changed(compare(one, other), "per process") == [
            ("rng", "1 value", "1 value, different in 1 process")
        ]


def test_composite_tensors_are_compared_with_their_types_shapes_and_contexts(saved):
    data, scale = torch.arange(12, dtype=torch.int8).reshape(3, 4), torch.ones(3, 1)
    one, same = (saved({"w": Scaled(data.clone(), scale.clone()), "plain": 1}) for _ in range(2))
    assert compare(one, same).equal()
    other = compare(one, saved({"w": Scaled(data, scale, (1, 2)), "plain": 1}), values=False)
    assert not other.equal()
    ((name, a, b),) = changed(other, "context")
    assert (name, "[1, 4]" in a, "[1, 2]" in b) == ("w", True, True)
    parts = compare(one, saved({"w": {"data_": data, "scale": scale}, "plain": 1}))
    assert changed(parts) == [("w", "composites.Scaled", "dict")]
    register_code()
    codes = Code(data.view(torch.uint8).flatten(), torch.ones(3), torch.ones(256), True, (3, 4))
    assert ("w", "composites.Scaled", "tests.Code") in changed(
        compare(one, saved({"w": codes, "plain": 1})), "kind"
    )


def test_without_values_no_tensor_is_read(saved):
    a, b = saved(state()), saved({**state(), "step": 101})
    comparison = compare(a, b, values=False)
    assert changed(comparison) == [("step", "100", "101")]
    assert comparison.tensors_compared == comparison.bytes_compared == 0
    assert "reader" not in vars(a)


# --- values ---------------------------------------------------------------------------------------


def one_value(saved, a, b):
    comparison = compare(saved({"t": np.asarray(a)}), saved({"t": np.asarray(b)}))
    (value,) = comparison.values
    return value


@pytest.mark.parametrize(
    ("a", "b", "dtype", "largest"),
    [
        ([1, 2, 3], [1, 5, 1], "int32", 3),
        ([-(2**63)], [2**63 - 1], "int64", 2**64 - 1),
        ([2**64 - 1], [0], "uint64", 2**64 - 1),
        ([-128], [127], "int8", 255),
        ([True, False], [False, False], "bool", 1),
        ([-8], [7], "int4", 15),
        ([1.5, 2.0], [1.5, 2.25], "bfloat16", 0.25),
        ([1.0], [-2.0], "float8_e4m3fn", 3.0),
        ([0.0], [-0.0], "float32", 0.0),
        ([1.0], [np.inf], "float64", np.inf),
        ([3 + 4j], [0j], "complex64", 5.0),
        ([3 + 4j], [0j], "complex128", 5.0),
    ],
)
def test_the_largest_difference_is_exact_in_every_kind_of_dtype(saved, a, b, dtype, largest):
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    value = one_value(saved, np.array(a).astype(kind), np.array(b).astype(kind))
    assert value.largest == largest
    assert value.nans == 0


def test_nans_are_equal_if_their_payloads_are(saved):
    quiet = np.array([0x7FC00000, 0x7FC00001], np.uint32).view(np.float32)
    other = np.array([0x7FC00000, 0x7FC00002], np.uint32).view(np.float32)
    assert compare(saved({"t": quiet}), saved({"t": quiet.copy()})).equal()
    value = one_value(saved, quiet, other)
    assert (value.differing, value.nans, value.largest, value.first) == (1, 1, None, (1,))


def test_a_scalar_is_compared(saved):
    value = one_value(saved, np.array(2.0), np.array(2.5))
    assert (value.differing, value.size, value.largest, value.first) == (1, 1, 0.5, ())


@pytest.mark.long
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_values_agree_with_numpy_for_any_shape_layouts_and_memory(tmp_path_factory, data):
    shape = tuple(data.draw(st.lists(st.integers(1, 15), min_size=1, max_size=3), label="shape"))
    a = np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
    b = a.copy()
    for _ in range(data.draw(st.integers(0, 5), label="changes")):
        b[tuple(data.draw(st.integers(0, n - 1)) for n in shape)] += data.draw(st.integers(-9, 9))
    axes = st.permutations(["data", "model", None, None])
    opened = []
    for array in (a, b):
        spec = PartitionSpec(*data.draw(axes, label="spec")[: len(shape)])
        place = tmp_path_factory.mktemp("c") / "1"
        shardckpt.save(
            place, {"t": array}, options=SaveOptions(shardings={"t": Sharding(MESH, spec)})
        )
        opened.append(shardckpt.open(place))
    one, other = opened
    calls = []
    pair = Pair("t", one.tensor("t"), other.tensor("t"))
    limit = data.draw(st.integers(a.nbytes // 20 + 1, 4 * a.nbytes), label="limit")
    differences = list(
        compare_values(
            one.reader, other.reader, [pair], limit, lambda done, total: calls.append((done, total))
        )
    )
    if (a == b).all():
        assert differences == []
    else:
        (value,) = differences
        where = np.argwhere(a != b)
        assert value.differing == len(where)
        assert value.size == a.size
        assert value.largest == np.abs(a.astype(np.int64) - b).max()
        assert value.first == tuple(where[0])
    assert calls[-1] == (a.nbytes, a.nbytes)
    assert calls == sorted(calls)


def test_comparing_takes_no_more_memory_than_it_may(saved):
    big = np.zeros((8192, 1024), np.float32)  # 32 MiB
    a, b = saved({"t": big}), saved({"t": big})
    assert a.reader, b.reader
    # The readers' threads have buffers of their own; what is compared at once is one run of each.
    tracemalloc.start()
    try:
        assert compare(a, b, memory_limit="4MiB").equal()
        assert tracemalloc.get_traced_memory()[1] < (4 << 20) + 2 * LOCAL_RUN[1] + (2 << 20)
    finally:
        tracemalloc.stop()


def test_a_memory_limit_too_low_to_work_with_is_refused(saved):
    one = saved({"t": np.ones(3)})
    with pytest.raises(OptionError, match="at least"):
        compare(one, one, memory_limit=1000)


def test_damage_is_an_error_and_not_a_difference(saved, tmp_path):
    a, b = (
        saved({"t": np.arange(9999)}, layout="zarr"),
        saved({"t": np.arange(9999)}, layout="zarr"),
    )
    chunk = next(path for path in sorted((tmp_path / "1").rglob("c/0")) if path.is_file())
    chunk.write_bytes(b"\xff" + chunk.read_bytes()[1:])
    with pytest.raises(CorruptionError, match=r"^t"):
        compare(a, b)


@pytest.mark.parametrize("deleted", [0, 1])
@pytest.mark.parametrize("options", [{}, {"fingerprint": True}])
def test_a_checkpoint_that_is_deleted_meanwhile_is_named_and_not_called_damaged(
    saved, deleted, options
):
    pair = [saved({"t": np.arange(9999) + i}, **options) for i in range(2)]
    shutil.rmtree(str(pair[deleted].location))
    with pytest.raises(ReplacedError, match=f"{pair[deleted].location}: the checkpoint was del"):
        compare(*pair)


def test_a_base_that_is_gone_is_an_error_before_anything_is_read(saved):
    base = saved({"t": np.ones(9)})
    large = np.zeros(1 << 18)
    a = saved({"s": large, "t": np.ones(9)}, base=str(base.location), skip="t")
    b = saved({"s": large, "t": np.zeros(9)})
    shutil.rmtree(str(base.location))
    with pytest.raises(MissingDataError, match="t"):
        compare(a, b, memory_limit="1MiB")
    assert a.stats.bytes_read == 0
