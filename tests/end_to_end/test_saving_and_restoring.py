"""Saved states come back bit for bit, in every layout and container that is asked for."""

import json
import math
from collections import OrderedDict

import ml_dtypes
import numpy as np
import pytest
import tensorstore as ts
import torch
import zarr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from placeholders import undo_commit

import shardckpt
from shardckpt import Mesh, OpSharding, PartitionSpec, SaveOptions, Sharding, Target, errors
from shardckpt.io.store import Store
from shardckpt.runs.collecting import collect

LAYOUTS = ["packed", "zarr"]
TORCH_DTYPES = [
    *(
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.float8_e4m3fnuz,
    ),
    *(
        torch.float8_e5m2fnuz,
        torch.float8_e8m0fnu,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.uint8,
        torch.uint16,
    ),
    *(torch.uint32, torch.uint64, torch.bool, torch.complex64, torch.complex128),
]


def bits(value):
    return np.ascontiguousarray(value).reshape(-1).view(np.uint8).tobytes()


def same(a, b):
    """Equal to the bit, containers and types included."""
    if isinstance(a, np.ndarray):
        return (
            isinstance(b, np.ndarray)
            and a.dtype == b.dtype
            and a.shape == b.shape
            and bits(a) == bits(b)
        )
    if isinstance(a, dict):
        return (
            type(b) is dict
            and [(type(k), k) for k in a] == [(type(k), k) for k in b]
            and all(same(a[k], b[k]) for k in a)
        )
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float) and math.isnan(a):
        return isinstance(b, float) and math.isnan(b)
    return type(a) is type(b) and a == b


def random_tensor(dtype, shape=(5, 7)):
    generator = torch.Generator().manual_seed(1)
    if dtype == torch.bool:
        return torch.rand(shape, generator=generator) > 0.5
    raw = torch.randint(0, 256, (*shape, dtype.itemsize), generator=generator, dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)


def torch_bits(t):
    return t.contiguous().view(torch.uint8)


@st.composite
def arrays(draw):
    """An array of random bits."""
    dtype = np.dtype(
        draw(
            st.sampled_from(
                ["f4", "f2", "i8", "u1", "?", "c8", ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn]
            )
        )
    )
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=6))
    size = int(np.prod(shape)) * dtype.itemsize
    raw = np.frombuffer(draw(st.binary(min_size=size, max_size=size)), np.uint8)
    return (raw & (1 if dtype.kind == "b" else 255)).view(dtype).reshape(shape)


LEAVES = st.one_of(
    arrays(),
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=5),
    st.binary(max_size=5),
)
KEYS = st.one_of(st.text(max_size=6), st.integers(-3, 3), st.none())
STATES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.dictionaries(KEYS, inner, max_size=4),
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
    ),
    max_leaves=8,
)


def test_the_plain_layout_has_a_file_per_mebibyte_or_tensor_and_the_packed_one_its_own_chunks(
    tmp_path,
):
    state = {str(i): np.full((300, 300), float(i)) for i in range(5)}
    for layout in LAYOUTS:
        shardckpt.save(tmp_path / layout, state, options=SaveOptions(layout=layout))
    shardckpt.reshard(tmp_path / "packed", tmp_path / "unpacked", layout="zarr")
    shardckpt.reshard(tmp_path / "unpacked", tmp_path / "repacked", layout="packed")
    for place, chunks in {
        "packed": (38, 60),
        "zarr": (300, 300),
        "unpacked": (300, 300),
        "repacked": (38, 60),
    }.items():
        opened = shardckpt.open(tmp_path / place)
        assert {
            piece.chunks
            for tensor in opened.record.structure.tensors.values()
            for piece in tensor.pieces
        } == {chunks}
        assert same(shardckpt.restore(opened), state)
    assert len(list((tmp_path / "zarr").glob("*/zarr/*/c/*/*"))) == len(state)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_keys_that_end_like_a_lock_file_are_stored_as_all_others(tmp_path, layout):
    """TensorStore's file driver keeps the ending `.__lock` for itself."""
    large = np.arange(40_000, dtype=np.float32).reshape(200, 200)
    state = {
        "a.__lock": {"w": large},
        "w.__lock": large + 1,
        "small.__lock": large[0, :3],
        ".__lock": large + 2,
        "cut.__lock": large + 3,
    }
    options = SaveOptions(
        layout=layout, shardings={"cut*": Sharding(Mesh((7,), ("x",)), PartitionSpec("x"))}
    )
    shardckpt.save(tmp_path / "c", state, options=options)
    shardckpt.reshard(tmp_path / "c", tmp_path / "d", mesh=Mesh((2,), ("x",)), rules=["**=(x)"])
    for place in (tmp_path / "c", tmp_path / "d"):
        opened = shardckpt.open(place)
        assert opened.verify().ok
        assert same(shardckpt.restore(place), state)
        for name in opened.names():
            assert np.array_equal(
                ts.open(opened.stock_spec(name)).result().read().result(), opened.read(name)
            )
    if layout == "zarr":
        group = zarr.open_group(next((tmp_path / "c").glob("*/zarr")), mode="r")
        assert np.array_equal(group["a=2E__lock/w"][...], large)


@given(STATES, st.sampled_from(LAYOUTS), st.sampled_from([None, "zstd"]))
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_save_restore_save_is_a_fixed_point(state, layout, compression):
    root = f"memory://fixed-point/{np.random.default_rng().integers(1 << 62)}"
    options = SaveOptions(layout=layout, compression=compression)
    shardckpt.save(f"{root}/a", state, options=options)
    once = shardckpt.restore(f"{root}/a")
    assert same(state, once)
    shardckpt.save(f"{root}/b", once, options=options)
    a, b = (shardckpt.open(f"{root}/{name}").record for name in "ab")
    assert json.dumps(a.structure.to_json()) == json.dumps(b.structure.to_json())
    assert a.totals == b.totals


@st.composite
def layouts(draw, ndim):
    """A sharding over 2 to 8 devices, ids permuted."""
    shape = draw(st.sampled_from([(8,), (4, 2), (2, 4), (2, 2, 2), (3, 2)]))
    names = ("a", "b", "c")[: len(shape)]
    ids = draw(st.permutations(range(int(np.prod(shape)))))
    spec, free = [], list(names)
    for _ in range(ndim):
        axes = (
            draw(st.lists(st.sampled_from(free), unique=True, max_size=len(free))) if free else []
        )
        free = [n for n in free if n not in axes]
        spec.append(tuple(axes) if axes else None)
    return Sharding(Mesh(shape, names, ids), PartitionSpec(*spec))


@given(st.data(), st.tuples(st.integers(1, 40), st.integers(1, 40)), st.sampled_from(LAYOUTS))
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_layout_is_read_in_any_other(data, shape, layout):
    value = np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
    source, target = data.draw(layouts(2)), data.draw(layouts(2))
    url = f"memory://layouts/{np.random.default_rng().integers(1 << 62)}"
    shardckpt.save(url, {"w": value}, options=SaveOptions(layout=layout, shardings={"w": source}))
    checkpoint = shardckpt.open(url)
    assert checkpoint.info("w").layout == source
    boxes = target.device_boxes(shape).boxes
    for i in range(len(boxes)):
        np.testing.assert_array_equal(checkpoint.read("w", boxes[i]), value[boxes[i].slices])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_torch_dtype_comes_back_to_the_bit_and_in_place(tmp_path, layout):
    state = {str(d): random_tensor(d) for d in TORCH_DTYPES}
    shardckpt.save(tmp_path / "c", state, options=SaveOptions(layout=layout))
    like = {name: torch.zeros_like(t) for name, t in state.items()}
    restored = shardckpt.restore(tmp_path / "c", like)
    for name, tensor in state.items():
        assert restored[name] is like[name]
        assert torch.equal(torch_bits(restored[name]), torch_bits(tensor)), name
    arrays = shardckpt.restore(tmp_path / "c")
    for name, tensor in state.items():
        assert arrays[name].dtype.name == name.removeprefix("torch.")
        assert bits(arrays[name]) == torch_bits(tensor).numpy().tobytes()


def test_an_optimizer_state_comes_back_into_an_optimizer(tmp_path):
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 1}
    shardckpt.save(tmp_path / "c", state)
    restored = shardckpt.restore(tmp_path / "c")
    assert list(restored["optimizer"]["state"]) == [0, 1]
    fresh = torch.optim.AdamW(torch.nn.Linear(4, 3).parameters())
    like = {"optimizer": optimizer.state_dict()}
    fresh.load_state_dict(shardckpt.restore(tmp_path / "c", like, only="optimizer/**")["optimizer"])
    assert torch.equal(
        fresh.state_dict()["state"][0]["exp_avg"], optimizer.state_dict()["state"][0]["exp_avg"]
    )


def test_tied_weights_are_stored_once_and_restored_tied(tmp_path):
    weight = torch.randn(6, 4)
    state = {"embed": weight, "head": weight, "view": weight.T, "other": weight.clone()}
    shardckpt.save(tmp_path / "c", state)
    checkpoint = shardckpt.open(tmp_path / "c")
    assert list(checkpoint.record.structure.tensors) == ["embed", "view", "other"]
    assert checkpoint.info("head").tied_names == ("embed",)
    arrays = shardckpt.restore(checkpoint)
    assert arrays["head"] is arrays["embed"]
    assert arrays["other"] is not arrays["embed"]
    like = {name: torch.empty_like(t, device="meta") for name, t in state.items()}
    restored = shardckpt.restore(checkpoint, like)
    assert restored["head"] is restored["embed"]
    for name, tensor in state.items():
        assert torch.equal(restored[name], tensor)


def test_containers_come_from_like(tmp_path):
    state = OrderedDict(w=np.arange(3), deep=[{"x": 1}, (np.zeros(2), None)])
    shardckpt.save(tmp_path / "c", state)
    plain = shardckpt.restore(tmp_path / "c")
    assert type(plain) is dict
    like = OrderedDict(w=np.empty(3, int), deep=[{"x": 0}, (np.empty(2), None)])
    restored = shardckpt.restore(tmp_path / "c", like)
    assert type(restored) is OrderedDict
    assert restored["deep"][0]["x"] == 1
    assert restored["w"] is like["w"]


def test_only_restores_a_part(tmp_path):
    shardckpt.save(tmp_path / "c", {"model": {"w": np.ones(3), "b": np.ones(2)}, "step": 7})
    assert same(
        shardckpt.restore(tmp_path / "c", only="model/**"),
        {"model": {"w": np.ones(3), "b": np.ones(2)}},
    )
    like = {"model": {"w": np.zeros(3), "b": np.zeros(2)}, "step": 0}
    restored = shardckpt.restore(tmp_path / "c", like, only=["**/b"])
    assert same(restored, {"model": {"w": np.zeros(3), "b": np.ones(2)}, "step": 0})
    with pytest.raises(errors.NamesMismatchError, match="selects none"):
        shardckpt.restore(tmp_path / "c", only="modle/**")


def test_one_misspelt_pattern_of_several_is_an_error(tmp_path):
    shardckpt.save(tmp_path / "c", {"model": {"w": np.ones(3)}, "empty": {}, "step": 7})
    assert shardckpt.restore(tmp_path / "c", only=["model/**", "empty"])["empty"] == {}
    like = {"model": {"w": np.zeros(3)}, "lora": {"a": np.zeros(2)}, "empty": {}, "step": 0}
    for target in (None, {**like}):
        with pytest.raises(
            errors.NamesMismatchError, match=r"/c: only=\['stpe', 'x'\] selects none of its names"
        ):
            shardckpt.restore(tmp_path / "c", target, only=["model/**", "stpe", "x"])
    restored = shardckpt.restore(tmp_path / "c", like, only=["model/**", "lora/**"], strict=False)
    assert same(restored, {**like, "model": {"w": np.ones(3)}})
    with pytest.raises(errors.NamesMismatchError, match="selects none"):
        shardckpt.restore(tmp_path / "c", like, only=["lora/**", "head"], strict=False)


def test_a_restore_of_nothing_is_an_error_even_if_names_may_differ(tmp_path):
    shardckpt.save(tmp_path / "c", {"model": {"w": np.ones(3)}, "step": 7})
    for like, only in (
        ({"net": {"w": np.zeros(3)}, "epoch": 0}, None),
        ({"model": {"v": np.zeros(3)}, "step": 0}, "model/**"),
    ):
        with pytest.raises(
            errors.NamesMismatchError,
            match=r"No name is in both, so nothing would be restored; "
            r"change the names in `like`\.$",
        ):
            shardckpt.restore(tmp_path / "c", like, only=only, strict=False)
    assert shardckpt.restore(tmp_path / "c", {"step": 0, "epoch": 0}, strict=False) == {
        "step": 7,
        "epoch": 0,
    }
    hooks = {"model": {"w": np.ones(3)}, "hooks": {}, "rng": 1}
    shardckpt.save(tmp_path / "d", hooks)
    for like, only in (
        ({}, None),
        ({"w": np.zeros(3)}, "model/**"),
        ({"hooks": {}}, None),
        ({"model": {"module.w": np.zeros(3)}, "hooks": {}, "rng": 0}, None),
    ):
        with pytest.raises(errors.NamesMismatchError, match="nothing would be restored"):
            shardckpt.restore(tmp_path / "d", like, only=only, strict=False)
    assert shardckpt.restore(tmp_path / "d", {"rng": 0}, strict=False) == {"rng": 1}


def test_a_target_without_sharding_is_a_numpy_array(tmp_path):
    shardckpt.save(tmp_path / "c", {"w": torch.arange(6.0).reshape(2, 3)})
    restored = shardckpt.restore(tmp_path / "c", {"w": Target()})
    assert same(restored, {"w": np.arange(6, dtype=np.float32).reshape(2, 3)})
    half = shardckpt.restore(tmp_path / "c", {"w": Target(dtype="bfloat16")}, cast=True)
    assert same(half, {"w": np.arange(6).astype(ml_dtypes.bfloat16).reshape(2, 3)})


@pytest.mark.parametrize(
    ("like", "error", "message"),
    [
        ({"w": np.zeros(3), "x": np.zeros(1)}, errors.NamesMismatchError, "'x'"),
        ({}, errors.NamesMismatchError, "'w'"),
        ({"w": np.zeros(4)}, errors.ShapeMismatchError, r"w: .* has shape \(3,\), .* \(4,\)"),
        (
            {"w": np.zeros(3, "f4")},
            errors.DtypeMismatchError,
            "w: .* has dtype float64, .* float32; pass cast=True",
        ),
        ({"w": 0}, errors.StructureMismatchError, "w"),
        ({"w": {"a": np.zeros(3)}}, errors.StructureMismatchError, "w"),
    ],
)
def test_a_like_that_does_not_fit_is_refused_before_anything_is_read(
    tmp_path, like, error, message
):
    shardckpt.save(tmp_path / "c", {"w": np.ones(3)})
    checkpoint = shardckpt.open(tmp_path / "c")
    with pytest.raises(error, match=message) as raised:
        shardckpt.restore(checkpoint, like)
    assert str(tmp_path / "c") in str(raised.value)
    assert checkpoint.stats.reads == 0


def test_a_misspelt_name_is_answered_with_the_nearest_one(tmp_path):
    shardckpt.save(tmp_path / "c", {"model": {"layers.0.weight": np.ones(3)}})
    with pytest.raises(errors.NamesMismatchError, match=r"did you mean 'model/layers\.0\.weight'"):
        shardckpt.open(tmp_path / "c").read("model/layer.0.weight")


def test_names_that_are_no_file_names_are_stored_and_found(tmp_path):
    names = [
        "..",
        ".",
        "a/b",
        "",
        "ünï\u2028",
        "x" * 300,
        "zarr.json",
        "c",
        "__x",
        "a~b",
        "A",
        "a",
        "nul\0",
        "\ud800",
        "c/0",
    ]
    state = {name: np.full((2,), i) for i, name in enumerate(names)}
    for layout in LAYOUTS:
        shardckpt.save(tmp_path / layout, state, options=SaveOptions(layout=layout))
        assert same(shardckpt.restore(tmp_path / layout), state)
        assert shardckpt.open(tmp_path / layout).verify().ok
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(LAYOUTS)


def test_a_save_returns_what_it_did(tmp_path):
    state = {"w": np.ones((512, 512), np.float32), "n": np.ones(3), "step": 1}
    report = shardckpt.save(tmp_path / "c", state)
    record = shardckpt.open(tmp_path / "c").record
    assert (report.url, report.attempt) == (str(tmp_path / "c"), record.attempt)
    assert (report.tensors, report.nbytes, report.stored_bytes) == (
        2,
        (1 << 20) + 24,
        record.totals["stored_bytes"],
    )
    phases = (report.planning_s, report.writing_s, report.waiting_s, report.committing_s)
    assert min(phases) >= 0
    assert report.total_s == pytest.approx(sum(phases))
    assert shardckpt.save_async(tmp_path / "d", state).wait().stored_bytes == report.stored_bytes


def test_a_checkpoint_lists_what_is_for_users(tmp_path):
    shardckpt.save(tmp_path / "c", {"w": np.ones(3)})
    checkpoint = shardckpt.open(tmp_path / "c")
    listed = dir(checkpoint)
    assert {"names", "info", "read", "tree", "metadata", "zarr_store", "verify"} <= set(listed)
    assert all(hasattr(checkpoint, name) for name in listed)
    assert not {name for name in listed if name.startswith("_")} | (
        {"reader", "place", "parsed_tree", "limit_reading"} & set(listed)
    )


def test_a_checkpoint_is_there_once(tmp_path):
    shardckpt.save(tmp_path / "c", {"w": np.zeros(3)})
    with pytest.raises(errors.AlreadyExistsError, match="overwrite=True"):
        shardckpt.save(tmp_path / "c", {"w": np.ones(3)})
    assert shardckpt.restore(tmp_path / "c")["w"].tolist() == [0, 0, 0]
    shardckpt.save(tmp_path / "c", {"w": np.ones(3)}, options=SaveOptions(overwrite=True))
    assert shardckpt.restore(tmp_path / "c")["w"].tolist() == [1, 1, 1]
    # The replaced data is gone: the record and one attempt are left.
    assert len(list((tmp_path / "c").iterdir())) == 2


@pytest.mark.parametrize("damaged", [b"", b"{}", b"x" * 1000])
def test_an_unreadable_record_is_replaced_on_request_only(tmp_path, damaged):
    shardckpt.save(tmp_path / "c", {"w": np.zeros(3)})
    (tmp_path / "c" / "checkpoint.json").write_bytes(damaged)
    with pytest.raises(errors.FormatError, match="overwrite=True"):
        shardckpt.save(tmp_path / "c", {"w": np.ones(3)})
    shardckpt.save(tmp_path / "c", {"w": np.ones(3)}, options=SaveOptions(overwrite=True))
    assert shardckpt.restore(tmp_path / "c")["w"].tolist() == [1, 1, 1]


def test_a_newer_version_s_checkpoint_is_never_replaced(tmp_path):
    shardckpt.save(tmp_path / "c", {"w": np.zeros(3)})
    record = tmp_path / "c" / "checkpoint.json"
    record.write_bytes(record.read_bytes().replace(b'"version":[1,', b'"version":[7,'))
    with pytest.raises(errors.VersionError, match="newer"):
        shardckpt.save(tmp_path / "c", {"w": np.ones(3)}, options=SaveOptions(overwrite=True))


def test_a_place_without_a_checkpoint_says_what_is_there(tmp_path):
    with pytest.raises(errors.NotFoundError, match="no checkpoint there"):
        shardckpt.open(tmp_path / "none")
    shardckpt.save(tmp_path / "9", {})
    shardckpt.save(tmp_path / "100", {})
    with pytest.raises(FileNotFoundError, match=r"did you mean .*/100"):
        shardckpt.restore(tmp_path)
    (tmp_path / "200").mkdir()
    with pytest.raises(FileNotFoundError, match=r"did you mean .*/100"):
        shardckpt.open(tmp_path)
    (tmp_path / "200").rmdir()
    for step in range(70, 77):
        (tmp_path / str(step)).mkdir()
    with pytest.raises(
        errors.NotFoundError, match=r"/80: no checkpoint there; the nearest steps are 9, 100\.$"
    ):
        shardckpt.restore(tmp_path / "80")
    undo_commit(tmp_path / "100")
    with pytest.raises(
        errors.UncommittedError, match=r"never committed.*`shardckpt commit` commits it"
    ):
        shardckpt.open(tmp_path / "100")


def test_leaves_that_cannot_be_stored_are_named_and_nothing_is_written(tmp_path):
    with pytest.raises(errors.LeafError, match="model/f"):
        shardckpt.save(tmp_path / "c", {"model": {"w": np.ones(3), "f": lambda: 0}})
    with pytest.raises(errors.DtypeError, match="w"):
        shardckpt.save(tmp_path / "c", {"w": np.array(["a"])})
    assert not (tmp_path / "c").exists()


def test_a_pattern_of_shardings_that_matches_nothing_is_refused(tmp_path):
    sharding = Sharding(Mesh((2,), ("x",)), PartitionSpec("x"))
    with pytest.raises(errors.OptionError, match="'v' matches no plain tensor"):
        shardckpt.save(
            tmp_path / "c", {"w": np.ones(3)}, options=SaveOptions(shardings={"v": sharding})
        )


def test_shards_without_a_common_grid_become_pieces(tmp_path):
    """A tile of prime length that is too large to be one chunk."""
    n = 4_194_319  # prime
    value = np.arange(2 * n, dtype=np.float32)
    sharding = Sharding(Mesh((2,), ("x",)), PartitionSpec("x"))
    for layout in LAYOUTS:
        shardckpt.save(
            tmp_path / layout,
            {"w": value},
            options=SaveOptions(layout=layout, shardings={"w": sharding}),
        )
        checkpoint = shardckpt.open(tmp_path / layout)
        assert [p.box.start for p in checkpoint.tensor("w").pieces] == [(0,), (n,)]
        assert max(p.chunks[0] for p in checkpoint.tensor("w").pieces) * 4 <= 1.01 * (2 << 20)
        np.testing.assert_array_equal(checkpoint.read("w"), value)
        box = shardckpt.Box((n - 5,), (n + 5,))
        np.testing.assert_array_equal(checkpoint.read("w", box), value[box.slices])
        assert checkpoint.verify().ok


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("compression", [None, "zstd"])
def test_stock_tensorstore_and_zarr_read_the_same_values(tmp_path, layout, compression):
    sharding = Sharding(Mesh((4, 2), ("data", "model")), PartitionSpec("data", "model"))
    state = {
        "w": np.random.default_rng(0).normal(size=(101, 67)).astype("f4"),
        "b": np.zeros((1000,), "i8"),
        "s": np.array(3.5),
        "z": np.ones((0, 3)),
    }
    options = SaveOptions(layout=layout, compression=compression, shardings={"w": sharding})
    shardckpt.save(tmp_path / "c", state, options=options)
    checkpoint = shardckpt.open(tmp_path / "c")
    for name, value in state.items():
        array = ts.open(
            checkpoint.stock_spec(name), context=Store.open(checkpoint.location).context()
        ).result()
        np.testing.assert_array_equal(array.read().result(), value)
        by_url = ts.open(checkpoint.stock_url(name)).result()
        np.testing.assert_array_equal(by_url.read().result(), value)
        np.testing.assert_array_equal(
            zarr.open_group(checkpoint.zarr_store(), mode="r")[name][...], value
        )
    if layout == "zarr":
        group = zarr.open_group(tmp_path / "c" / checkpoint.record.attempt / "zarr", mode="r")
        for name, value in state.items():
            np.testing.assert_array_equal(group[name][...], value)
        attribute = group["w"].attrs["shardckpt"]
        assert attribute["op_sharding"].startswith("{devices=[4,2]")
        assert attribute["spec"] == ["data", "model"]
        assert attribute["mesh"]["axes"] == ["data", "model"]


def test_every_chunk_is_stored_zeros_included(tmp_path):
    shardckpt.save(tmp_path / "c", {"w": np.zeros((512, 512), "f4")})
    record = shardckpt.open(tmp_path / "c").record
    assert record.totals["stored_bytes"] == 512 * 512 * 4 + 4 * record.totals["chunks"]


def test_a_checkpoint_works_where_it_is_moved_to(tmp_path):
    shardckpt.save(tmp_path / "a", {"w": np.arange(5)})
    (tmp_path / "a").rename(tmp_path / "b")
    checkpoint = shardckpt.open(tmp_path / "b")
    assert checkpoint.verify().ok
    np.testing.assert_array_equal(
        ts.open(checkpoint.stock_url("w")).result().read().result(), np.arange(5)
    )


def test_metadata_is_kept_as_it_is(tmp_path):
    metadata = {"step": 3, "loss": 0.25, "tags": ["a", None], "nested": {"x": True}}
    shardckpt.save(tmp_path / "c", {}, options=SaveOptions(metadata=metadata))
    assert shardckpt.open(tmp_path / "c").metadata == metadata
    for bad in ({"x": {1}}, {"x": float("nan")}, {1: 2}, {"x": (1, 2)}, [1], "text"):
        with pytest.raises(errors.OptionError, match="metadata"):
            SaveOptions(metadata=bad)


def test_a_tensor_of_too_many_dimensions_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(errors.LeafError, match="'deep' has 33 dimensions, and at most 32"):
        shardckpt.save(tmp_path / "c", {"deep": np.zeros((1,) * 33)})
    assert not (tmp_path / "c").exists()
    shardckpt.save(tmp_path / "c", {"deep": np.ones((1,) * 32)})
    assert shardckpt.restore(tmp_path / "c")["deep"].shape == (1,) * 32


def test_a_tensor_of_no_elements_that_no_reader_would_believe_is_refused(tmp_path):
    with pytest.raises(errors.LeafError, match="'long' has no elements"):
        shardckpt.save(tmp_path / "c", {"long": np.empty((0, 2**61 + 1), np.uint16)})
    assert not (tmp_path / "c").exists()
    shardckpt.save(tmp_path / "c", {"long": np.empty((0, 2**61), np.uint16)})
    assert shardckpt.restore(tmp_path / "c")["long"].shape == (0, 2**61)


def test_an_attempt_that_no_reader_would_accept_is_not_published_and_the_checkpoint_stays(tmp_path):
    n = 1 << 20  # devices of each of 17 layouts: readers take 2^24 of all together
    layouts = {
        f"w{i:02}": OpSharding.parse(f"{{devices=[1,{n - i}]<=[{n - i}] last_tile_dim_replicate}}")
        for i in range(17)
    }
    shardckpt.save(tmp_path / "c", {"before": np.ones(3)})
    with pytest.raises(
        errors.CommitError,
        match=r"nothing was published.*its shardings have more than 16777216 devices together",
    ):
        shardckpt.save(
            tmp_path / "c",
            {name: np.ones(3) for name in layouts},
            options=SaveOptions(shardings=layouts, overwrite=True),
        )
    assert list(shardckpt.restore(tmp_path / "c")) == ["before"]
    # Its data was complete: a collection tries once more to publish it.
    (left,) = collect(tmp_path / "c", grace=0)
    assert left.outcome == "removed"
    assert len([path for path in (tmp_path / "c").iterdir() if path.is_dir()]) == 1


def test_a_layout_that_does_not_fit_names_the_tensor(tmp_path):
    mesh = Mesh((2,), ("x",))
    for layout in (
        Sharding(mesh, PartitionSpec(None, "x")),
        OpSharding.parse("{devices=[2,1]<=[2]}"),
        OpSharding.parse("{manual}"),
    ):
        with pytest.raises(errors.ShardingError, match=r"^'a/w': "):
            shardckpt.save(
                tmp_path / "c",
                {"a": {"w": np.ones(3)}},
                options=SaveOptions(shardings={"a/w": layout}),
            )
    assert not (tmp_path / "c").exists()


def test_a_pattern_behind_a_wider_one_is_said_to_be_shadowed(tmp_path):
    layout = Sharding(Mesh((2,), ("x",)), PartitionSpec("x"))
    with pytest.raises(errors.OptionError, match=r"'a/w' is shadowed by 'a/\*'"):
        shardckpt.save(
            tmp_path / "c",
            {"a": {"w": np.ones(3)}},
            options=SaveOptions(shardings={"a/*": layout, "a/w": layout}),
        )
    shardckpt.save(
        tmp_path / "c",
        {"a": {"w": np.ones(3), "b": np.ones(3)}},
        options=SaveOptions(shardings={"a/w": layout, "a/*": layout}),
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_saving_below_a_file_says_that_it_is_one_and_not_that_nothing_can_be_deleted(
    tmp_path, layout
):
    (tmp_path / "file").write_text("")
    with pytest.raises(errors.StorageError, match="cannot make a directory"):
        shardckpt.save(
            tmp_path / "file" / "c", {"w": np.ones(3)}, options=SaveOptions(layout=layout)
        )


@pytest.mark.parametrize("options", [{}, {"layout": "zarr"}, "zarr", SaveOptions])
def test_options_of_another_type_are_refused(tmp_path, options):
    with pytest.raises(errors.OptionError, match=r"give shardckpt\.SaveOptions"):
        shardckpt.save(tmp_path / "c", {}, options=options)


def test_flags_are_bools_and_nothing_that_counts_as_one(tmp_path):
    shardckpt.save(tmp_path / "c", {"w": np.ones(3)})
    for flag in ({"strict": "no"}, {"strict": None}, {"cast": 1}, {"cast": "float32"}):
        with pytest.raises(errors.OptionError, match=f"{next(iter(flag))}=.*give True or False"):
            shardckpt.restore(tmp_path / "c", **flag)


def test_reading_takes_a_name_and_a_box(tmp_path):
    shardckpt.save(tmp_path / "c", {"w": np.ones((3, 3))})
    checkpoint = shardckpt.open(tmp_path / "c")
    for box in ((0, 2), slice(0, 2), "w", [(0, 0), (2, 2)]):
        with pytest.raises(errors.OptionError, match=r"^w: .* give shardckpt\.Box\(\("):
            checkpoint.read("w", box)
    for name in (5, None, ["w"], b"w"):
        with pytest.raises(errors.OptionError, match="not a name of a tensor"):
            checkpoint.read(name)
