"""A reshard changes no value, for all layouts, storages and options."""

import uuid
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardckpt
from shardckpt import Mesh, PartitionSpec, SaveOptions, Sharding, errors
from shardckpt.layout import dtypes
from shardckpt.layout.placements import Placements
from shardckpt.plan.chunks import Floor, smallest_chunk
from shardckpt.runs.collecting import delete
from shardckpt.writing.tensor_storage import tensor_record

EIGHT = Mesh((8,), ("x",))
GRID = Mesh((2, 4), ("x", "y"))
KiB = 1 << 10
SMALL = {"workers": 1, "task_bytes": 40 * KiB}
"""Many tasks, of a small checkpoint."""


RULES = ["long=(x)", "**=replicated"]


def random(shape, dtype, seed=0):
    """Elements of any bits."""
    kind = dtypes.by_name(dtype)
    bits = np.random.default_rng(seed).integers(
        0, 256, int(np.prod(shape)) * kind.itemsize, np.uint8
    )
    if dtype == "bool":
        bits &= 1
    return bits.view(kind.numpy).reshape(shape)


def bits(array):
    return np.asarray(array).tobytes()


def layouts():
    """Layouts that a checkpoint may record for a tensor of two dimensions."""
    specs = st.sampled_from(
        [(), ("x",), (None, "x"), ("x", "y"), ("y", "x"), (("x", "y"),), (None, ("y", "x"))]
    )
    meshes = st.tuples(st.integers(1, 5), st.integers(1, 5)).map(
        lambda shape: Mesh(shape, ("x", "y"))
    )
    return st.builds(lambda mesh, spec: Sharding(mesh, PartitionSpec(*spec)), meshes, specs)


@pytest.fixture
def memory(request):
    """A place of its own in this process's memory."""
    return f"memory://{request.node.name.replace('[', '-').replace(']', '')}"


@given(
    data=st.data(),
    dtype=st.sampled_from(["float32", "bfloat16", "uint8", "complex128", "float8_e4m3fn"]),
    shape=st.tuples(st.integers(1, 300), st.integers(2, 300)),  # rules replicate a single element
    formats=st.tuples(
        *[st.tuples(st.sampled_from(["packed", "zarr"]), st.sampled_from([None, "zstd"]))] * 2
    ),
    task=st.sampled_from([8 * KiB, 1 << 28]),
)
@settings(max_examples=12, deadline=None)
def test_any_layout_becomes_any_other_bit_for_bit(
    tmp_path_factory, data, dtype, shape, formats, task
):
    (layout, compression), (new_layout, new_compression) = formats
    place = tmp_path_factory.mktemp("any")
    source, target = data.draw(layouts()), data.draw(layouts())
    state = {"w": random(shape, dtype)}
    shardckpt.save(
        place / "a",
        state,
        options=SaveOptions(layout=layout, compression=compression, shardings={"w": source}),
    )
    shardckpt.reshard(
        place / "a",
        place / "b",
        mesh=target.mesh,
        rules={"w": target.spec},
        layout=new_layout,
        compression=new_compression or "none",
        task_bytes=task,
        workers=1,
    )
    made = shardckpt.open(place / "b")
    assert bits(made.read("w")) == bits(state["w"])
    assert made.info("w").layout == target
    assert (made.record.layout, made.record.compression) == (new_layout, new_compression)
    assert made.verify().ok
    smallest = smallest_chunk(state["w"].nbytes, files=new_layout == "zarr")
    expected = tensor_record("w", shape, dtypes.by_name(dtype), target, smallest)
    assert source == target or made.tensor("w").pieces == expected.pieces


@pytest.mark.parametrize("layout", ["packed", "zarr"])
def test_every_dtype_and_every_odd_shape_survives(tmp_path, layout):
    state = {name: random((5, 67), name) for name in dtypes.DTYPES}
    state |= {
        "scalar": np.float64(2.5),
        "none": np.zeros((0, 7), np.int8),
        "one": random((1, 1, 1), "int16"),
        "long": random((40_001,), "float16"),
    }
    shardckpt.save(tmp_path / "a", state)
    report = shardckpt.reshard(
        tmp_path / "a", tmp_path / "b", mesh=GRID, rules=RULES, layout=layout, **SMALL
    )
    assert report.tasks > 1
    got = shardckpt.restore(tmp_path / "b")
    for name, array in state.items():
        assert (got[name].dtype, got[name].shape) == (np.asarray(array).dtype, np.shape(array)), (
            name
        )
        assert bits(got[name]) == bits(array), name
    assert shardckpt.open(tmp_path / "b").verify().ok


def test_pieces_of_uneven_shards_are_read_and_written(tmp_path):
    """1003 rows over 4 × 3 ranks nest unevenly, and strided shards are runs of rows."""
    uneven = Placements.of(Mesh((4, 3), ("a", "b")), ["S(0)", "S(0)"])
    strided = Placements.of(Mesh((2, 2), ("a", "b")), ["_S(0,2)", "S(0)"])
    state = {"u": random((1003, 200), "int32"), "s": random((402, 64), "float32", 1)}
    shardckpt.save(tmp_path / "a", state)
    like = shardckpt.open(tmp_path / "a")
    tensors = like.record.structure.tensors
    for name, layout in (("u", uneven), ("s", strided)):
        tensors[name] = tensor_record(
            name, tensors[name].shape, tensors[name].dtype, layout, Floor(64 * KiB)
        )
    shardckpt.reshard(tmp_path / "a", tmp_path / "b", like=like, **SMALL)
    middle = shardckpt.open(tmp_path / "b")
    assert middle.info("u").layout == uneven
    assert len(middle.tensor("u").pieces) > 1
    shardckpt.reshard(
        tmp_path / "b", tmp_path / "c", mesh=GRID, rules=["u=(y,x)", "s=(None,y)"], **SMALL
    )
    for url in ("b", "c"):
        for name, array in state.items():
            assert bits(shardckpt.open(tmp_path / url).read(name)) == bits(array)


def test_what_is_not_a_tensor_is_carried_over_and_so_are_ties_and_metadata(tmp_path):
    w = random((64, 64), "float32")
    state = {
        "a": w,
        "tied": w,
        "lr": 0.1,
        "big": 1 << 70,
        "none": None,
        "list": [1, {"x": b"y"}],
        "rng": shardckpt.PerProcess({"seed": 7}),
    }
    shardckpt.save(tmp_path / "a", state, options=SaveOptions(metadata={"loss": 1.5}))
    shardckpt.reshard(tmp_path / "a", tmp_path / "b", mesh=EIGHT, rules=["a=(x)"], workers=1)
    made = shardckpt.open(tmp_path / "b")
    assert made.tree == shardckpt.open(tmp_path / "a").tree
    assert made.metadata == {"loss": 1.5}
    assert made.info("a").tied_names == ("tied",)
    like = {**state, "a": np.zeros_like(w), "rng": shardckpt.PerProcess(None)}
    like["tied"] = like["a"]
    got = shardckpt.restore(tmp_path / "b", like)
    assert bits(got["a"]) == bits(w)
    assert got["a"] is got["tied"]
    assert (got["rng"].value, got["big"], got["list"]) == ({"seed": 7}, 1 << 70, [1, {"x": b"y"}])


def test_only_some_names_are_taken_over_and_a_tie_finds_another_first_name(tmp_path):
    w = random((64, 64), "float32")
    state = {
        "model": {"w": w, "head": w, "b": random((64,), "float32")},
        "opt": [random((3,), "int8"), 5],
    }
    shardckpt.save(tmp_path / "a", state)
    shardckpt.reshard(
        tmp_path / "a", tmp_path / "b", only=["model/head", "opt/1", "model/b"], workers=1
    )
    got = shardckpt.restore(tmp_path / "b")
    assert list(got) == ["model", "opt"]
    assert list(got["model"]) == ["head", "b"]
    assert bits(got["model"]["head"]) == bits(w)
    assert got["opt"] == {1: 5}
    assert shardckpt.open(tmp_path / "b").names() == ["model/head", "model/b"]
    with pytest.raises(errors.NamesMismatchError, match="selects none of its names"):
        shardckpt.reshard(tmp_path / "a", tmp_path / "c", only="modle/**")
    with pytest.raises(
        errors.NamesMismatchError, match=r"only=\['otp/1'\] selects none of its names"
    ):
        shardckpt.reshard(tmp_path / "a", tmp_path / "c", only=["model/*", "otp/1"])


def test_a_mesh_that_does_not_cut_what_one_expects_gives_a_notice(tmp_path):
    shardckpt.save(tmp_path / "plain", {"w": np.ones((8, 8)), "lr": np.ones(())})
    report = shardckpt.reshard(tmp_path / "plain", tmp_path / "a", mesh=EIGHT, workers=1)
    linked = (
        "no chunk changed: the new files are hard links to the source's, so damage to one "
        "damages both"
    )
    assert report.notices == (
        (
            "w and 1 other tensor: no tensor has a sharding that the mesh could apply to; a rule "
            "says which dimensions to cut"
        ),
        linked,
    )
    rows = Sharding(Mesh((2,), ("rows",)), PartitionSpec("rows"))
    shardckpt.save(
        tmp_path / "cut",
        {"w": np.ones((8, 8)), "lr": np.ones(())},
        options=SaveOptions(shardings={"w": rows}),
    )
    report = shardckpt.reshard(tmp_path / "cut", tmp_path / "b", mesh=EIGHT, workers=1)
    assert [one for one in report.notices if one != linked] == [
        "w: the mesh has no axis rows, which cut the tensor in the source"
    ]
    assert shardckpt.reshard(
        tmp_path / "cut", tmp_path / "c", mesh=Mesh((4,), ("rows",)), workers=1
    ).notices in ((), (linked,))


def test_floats_are_converted_as_restore_converts_them(tmp_path):
    state = {
        "w": np.random.default_rng(0).normal(size=(300, 200)).astype(np.float32),
        "n": np.arange(9),
        "h": np.ones(5, np.float16),
    }
    shardckpt.save(tmp_path / "a", state)
    shardckpt.reshard(
        tmp_path / "a", tmp_path / "b", dtype="bfloat16", mesh=EIGHT, rules=["w=(x)"], **SMALL
    )
    like = {
        "w": np.empty((300, 200), ml_dtypes.bfloat16),
        "n": np.empty(9, int),
        "h": np.empty(5, ml_dtypes.bfloat16),
    }
    expected = shardckpt.restore(tmp_path / "a", like, cast=True)
    got = shardckpt.restore(tmp_path / "b")
    for name, array in expected.items():
        assert got[name].dtype == array.dtype
        assert bits(got[name]) == bits(array)


def test_a_dtype_by_pattern_is_the_first_that_matches_and_impossible_ones_are_refused(tmp_path):
    shardckpt.save(
        tmp_path / "a",
        {
            "w": np.ones((4, 4), np.float32),
            "v": np.ones(4, np.float32),
            "c": np.ones(3, np.complex64),
        },
    )
    shardckpt.reshard(
        tmp_path / "a", tmp_path / "b", dtype={"w": "float64", "[wv]": "float16"}, workers=1
    )
    made = shardckpt.open(tmp_path / "b")
    assert [made.info(name).dtype.name for name in "wvc"] == ["float64", "float16", "complex64"]
    with pytest.raises(
        errors.DtypeMismatchError,
        match=r"'c' has dtype complex64, which cannot be converted to float32",
    ):
        shardckpt.reshard(tmp_path / "a", tmp_path / "c", dtype={"c": "float32"})
    with pytest.raises(errors.OptionError, match="'x' matches no tensor"):
        shardckpt.reshard(tmp_path / "a", tmp_path / "c", dtype={"x": "float32"})
    with pytest.raises(errors.OptionError, match="unknown dtype 'float17'"):
        shardckpt.reshard(tmp_path / "a", tmp_path / "c", dtype="float17")
    assert not (tmp_path / "c").exists()


def test_a_mesh_alone_keeps_the_recorded_specs_as_far_as_it_has_their_axes(tmp_path):
    state = {"w": random((64, 48), "float32"), "plain": random((5,), "int8")}
    shardckpt.save(
        tmp_path / "a",
        state,
        options=SaveOptions(shardings={"w": Sharding(GRID, PartitionSpec("x", "y"))}),
    )
    shardckpt.reshard(tmp_path / "a", tmp_path / "b", mesh=Mesh((3, 4), ("z", "y")), workers=1)
    made = shardckpt.open(tmp_path / "b")
    assert made.info("w").layout == Sharding(Mesh((3, 4), ("z", "y")), PartitionSpec(None, "y"))
    assert made.info("plain").layout is None
    assert bits(made.read("w")) == bits(state["w"])


def test_another_checkpoints_layout_is_copied(tmp_path):
    state = {"w": random((64, 48), "float32")}
    shardckpt.save(tmp_path / "a", state)
    shardckpt.save(
        tmp_path / "like",
        state,
        options=SaveOptions(shardings={"w": Sharding(GRID, PartitionSpec("y", "x"))}),
    )
    shardckpt.reshard(tmp_path / "a", tmp_path / "b", like=tmp_path / "like", workers=1)
    assert shardckpt.open(tmp_path / "b").tensor("w") == shardckpt.open(tmp_path / "like").tensor(
        "w"
    )


def test_there_and_back_again_is_the_same(tmp_path, memory):
    state = {"w": random((257, 129), "float32"), "v": random((1000,), "bfloat16")}
    shardckpt.save(
        f"{memory}/a",
        state,
        options=SaveOptions(shardings={"*": Sharding(EIGHT, PartitionSpec("x"))}),
    )
    shardckpt.reshard(
        f"{memory}/a",
        tmp_path / "b",
        mesh=GRID,
        rules=["w=(y,x)", "v=(y)"],
        layout="zarr",
        compression="zstd",
        task_bytes="40KiB",
    )
    shardckpt.reshard(
        tmp_path / "b", f"{memory}/c", like=f"{memory}/a", layout="packed", compression="none"
    )
    first, last = shardckpt.open(f"{memory}/a"), shardckpt.open(f"{memory}/c")
    assert last.record.structure == first.record.structure
    for name, array in state.items():
        assert bits(last.read(name)) == bits(array)
    with pytest.raises(errors.OptionError, match=r"no rule|There are no rules|no rules"):
        shardckpt.reshard(f"{memory}/a", tmp_path / "d", unmatched="error")


def test_buckets_are_read_and_written(cloud, tmp_path):
    bucket = f"{cloud.scheme}://{cloud.new_bucket(f'b-{uuid.uuid4().hex}')}"
    state = {"w": random((500, 300), "float32")}
    shardckpt.save(tmp_path / "a", state)
    shardckpt.reshard(tmp_path / "a", f"{bucket}/b", mesh=EIGHT, rules=["w=(x)"], workers=1)
    shardckpt.reshard(
        f"{bucket}/b", f"{bucket}/c", mesh=GRID, rules=["w=(y,x)"], layout="zarr", workers=1
    )
    for url in ("b", "c"):
        made = shardckpt.open(f"{bucket}/{url}")
        assert bits(made.read("w")) == bits(state["w"])
        assert made.verify().ok


def test_a_place_inside_the_source_is_refused(tmp_path):
    shardckpt.save(tmp_path / "a", {"w": np.zeros(4)})
    with pytest.raises(
        errors.OptionError, match=r"/a/b is inside the source, .*/a; choose another place"
    ):
        shardckpt.reshard(tmp_path / "a", tmp_path / "a" / "b", workers=1)


def test_the_very_same_call_again_does_nothing_and_another_one_is_refused(tmp_path):
    shardckpt.save(tmp_path / "a", {"w": random((64, 64), "float32")})
    first = shardckpt.reshard(tmp_path / "a", tmp_path / "b", workers=1)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "b").rglob("*")}
    again = shardckpt.reshard(tmp_path / "a", tmp_path / "b", workers=1)
    assert (again.attempt, again.committed, again.done_before, again.stored_bytes) == (
        first.attempt,
        True,
        first.tasks,
        0,
    )
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "b").rglob("*")} == before
    with pytest.raises(
        errors.AlreadyExistsError, match="another checkpoint is committed there already"
    ):
        shardckpt.reshard(tmp_path / "a", tmp_path / "b", layout="zarr", workers=1)


@pytest.mark.parametrize("place", ["a", "b"], ids=["the source itself", "another checkpoint"])
def test_a_checkpoint_is_replaced_when_the_new_one_is_whole(tmp_path, place):
    w = random((64, 64), "float32")
    shardckpt.save(tmp_path / "a", {"w": w})
    shardckpt.save(tmp_path / "b", {"other": np.ones(3)})
    with pytest.raises(errors.AlreadyExistsError):
        shardckpt.reshard(tmp_path / "a", tmp_path / place, mesh=EIGHT, rules=["w=(x)"], workers=1)
    report = shardckpt.reshard(
        tmp_path / "a", tmp_path / place, mesh=EIGHT, rules=["w=(x)"], overwrite=True, workers=1
    )
    assert {path.name for path in (tmp_path / place).iterdir()} == {
        "checkpoint.json",
        report.attempt,
    }
    assert bits(shardckpt.open(tmp_path / place).read("w")) == bits(w)


@pytest.mark.parametrize("before", ["another checkpoint", "a tombstone"])
def test_the_very_same_call_does_nothing_whatever_was_replaced(tmp_path, before):
    shardckpt.save(tmp_path / "a", {"w": random((64, 64), "float32")})
    shardckpt.save(tmp_path / "b", {"other": np.ones(3)})
    if before == "a tombstone":
        delete(tmp_path / "b")
    options = {"mesh": EIGHT, "rules": ["w=(x)"], "overwrite": True, "workers": 1}
    first = shardckpt.reshard(tmp_path / "a", tmp_path / "b", **options)
    again = shardckpt.reshard(tmp_path / "a", tmp_path / "b", **options)
    assert (again.attempt, again.committed, again.stored_bytes) == (first.attempt, True, 0)


def test_what_overflows_is_infinite_and_nobody_is_warned(tmp_path):
    w = np.array([1e6, -1e6, 65519.99, np.nan, 1e-9, 500.0], np.float32)
    shardckpt.save(tmp_path / "a", {"w": w})
    for dtype, expected in (
        ("float16", [np.inf, -np.inf, 65504, np.nan, 0, 500]),
        ("float8_e4m3fn", [np.nan, np.nan, np.nan, np.nan, 0, np.nan]),
    ):
        shardckpt.reshard(tmp_path / "a", tmp_path / dtype, dtype=dtype, workers=1)
        np.testing.assert_array_equal(
            shardckpt.restore(tmp_path / dtype)["w"].astype(np.float32), expected
        )


def test_damage_in_the_source_is_told_and_nothing_is_committed(tmp_path):
    shardckpt.save(tmp_path / "a", {"w": random((640, 640), "float32")})
    (data,) = Path(tmp_path / "a").rglob("d/00000")
    content = bytearray(data.read_bytes())
    content[100_000] ^= 1
    data.write_bytes(content)
    with pytest.raises(errors.CorruptionError, match="w"):
        shardckpt.reshard(tmp_path / "a", tmp_path / "b", mesh=EIGHT, rules=["w=(x)"], workers=1)
    with pytest.raises(errors.NotFoundError):
        shardckpt.open(tmp_path / "b")


def test_options_that_cannot_be_are_refused_before_anything_is_written(tmp_path):
    shardckpt.save(tmp_path / "a", {"w": np.ones((8, 8))})
    for options, what in (
        ({"mesh": (8,)}, "not a shardckpt.Mesh"),
        ({"rules": 5}, "rule"),
        ({"layout": "tar"}, "layout"),
        ({"compression": "gzip"}, "compression"),
        ({"workers": 0}, "workers"),
        ({"worker": (3, 3)}, "worker"),
        ({"engine": "slurm://x"}, "engine"),
        ({"only": len}, "patterns"),
        ({"verify": "no"}, "verify"),
        ({"memory_limit": "lots"}, "memory_limit"),
        ({"mesh": EIGHT, "rules": ["w=(z)"]}, "no axis"),
        ({"mesh": EIGHT, "rules": ["v=(x)"]}, "v"),
        ({"mesh": EIGHT, "rules": {}, "unmatched": "error"}, "No rule matches"),
    ):
        with pytest.raises(errors.ShardckptError, match=what):
            shardckpt.reshard(tmp_path / "a", tmp_path / "b", **options)
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("rules", [None, RULES], ids=["nothing changes", "other layouts"])
def test_what_a_checkpoint_has_left_in_a_base_is_brought_in(tmp_path, rules):
    state = {"long": random((64, 6), "float32"), "adapter": random((5,), "float32", 1)}
    shardckpt.save(tmp_path / "base", state)
    shardckpt.save(
        tmp_path / "tuned", state, options=SaveOptions(base=tmp_path / "base", skip="long")
    )
    shardckpt.reshard(tmp_path / "tuned", tmp_path / "alone", mesh=EIGHT, rules=rules, **SMALL)
    (tmp_path / "base").rename(tmp_path / "gone")
    alone = shardckpt.open(tmp_path / "alone")
    assert not alone.bases()
    assert alone.verify().ok
    assert {name: bits(alone.read(name)) for name in alone.names()} == {
        name: bits(array) for name, array in state.items()
    }
