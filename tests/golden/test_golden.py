"""Every checkpoint format that was ever released is read for ever: `tools/make_golden.py` wrote
these checkpoints."""

import json
import shutil

import numpy as np
import pytest
import tensorstore as ts
import zarr
from golden_facts import Interval, facts, layout_facts
from one_of_several import OneOfSeveral
from paths import GOLDEN

import shardckpt
from shardckpt.state.composites import CompositeTensor
from shardckpt.state.names import array_path

CHECKPOINTS = sorted(path.parent for path in GOLDEN.glob("v1/*/*/checkpoint.json"))
LARGEST_BYTES = 200 << 10


@pytest.fixture(params=CHECKPOINTS, ids=lambda path: "-".join(path.relative_to(GOLDEN).parts))
def path(request):
    return request.param


@pytest.fixture(autouse=True)
def interval():
    """The registered leaf type that the checkpoints hold."""
    shardckpt.register_leaf(
        Interval,
        name="golden.Interval",
        encode=lambda i: [i.low, i.high],
        decode=lambda pair: Interval(*pair),
    )


def expected(path):
    return json.loads((path.parent / "expected.json").read_text())


def equal(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def test_there_are_checkpoints_of_one_host_and_of_three_in_both_layouts():
    records = [shardckpt.open(path).record for path in CHECKPOINTS]

    assert sorted((len(record.hosts), record.layout) for record in records) == [
        (1, "packed"),
        (1, "zarr"),
        (3, "packed"),
        (3, "zarr"),
    ]


def test_the_state_is_restored_to_the_last_bit(path):
    assert facts(shardckpt.restore(path)) == expected(path)["state"]


def test_metadata_and_layouts_are_what_was_given(path):
    checkpoint = shardckpt.open(path)

    assert checkpoint.metadata == expected(path)["metadata"]
    infos = {name: checkpoint.info(name) for name in checkpoint.names()}
    assert {
        name: layout_facts(i.layout, i.shape) for name, i in infos.items() if i.layout is not None
    } == expected(path)["layouts"]


def test_tied_tensors_are_known_by_both_names(path):
    checkpoint = shardckpt.open(path)

    (tied,) = [
        (name, checkpoint.info(name).tied_names)
        for name in checkpoint.names()
        if checkpoint.info(name).tied_names
    ][:1]
    assert tied in {("tied/first", ("tied/second",)), ("plain/tied/0", ("plain/tied/1",))}
    assert checkpoint.info(*tied[1]).tied_names == (tied[0],)


def test_every_box_is_the_part_of_the_whole(path):
    checkpoint = shardckpt.open(path)

    for name in checkpoint.names():
        whole = checkpoint.read(name)
        box = shardckpt.Box(
            tuple(n // 3 for n in whole.shape), tuple(n - n // 4 for n in whole.shape)
        )
        assert equal(
            checkpoint.read(name, box),
            np.ascontiguousarray(whole[(*box.slices, ...)]).reshape(box.shape),
        ), name


def test_a_process_gets_its_own_values_back(path):
    """As many as saved: with a coordinator of each of them."""
    hosts = len(shardckpt.open(path).record.hosts)
    whole = shardckpt.restore(path)["rng"]

    assert len(whole) == hosts
    for process in range(hosts):
        like = {"rng": shardckpt.PerProcess(None)}
        mine = shardckpt.restore(path, like, only="rng", coordinator=OneOfSeveral(process, hosts))[
            "rng"
        ].value
        assert facts(mine) == facts(whole[process])
        assert mine["seen"][0] == process


def test_the_hosts_own_tables_do_without_the_one_of_all(path, tmp_path):
    shutil.copytree(path, tmp_path / "c")
    (table,) = (tmp_path / "c").glob("*/table")
    table.unlink()

    assert facts(shardckpt.restore(tmp_path / "c")) == expected(path)["state"]


def test_it_verifies(path):
    report = shardckpt.open(path).verify()

    assert report.damage == []
    assert report.chunks > len(shardckpt.open(path).names())


def arrays(checkpoint):
    """The tensors that are stored as one array each."""
    names = [t.name for t in checkpoint.record.structure.tensors.values() if len(t.pieces) == 1]
    assert len(names) < len(checkpoint.record.structure.tensors)
    return names


def test_zarr_python_reads_the_same(path):
    checkpoint = shardckpt.open(path)
    group = zarr.open_group(checkpoint.zarr_store(), mode="r")

    for name in arrays(checkpoint):
        assert equal(
            group[array_path(name)][...],
            checkpoint.read(name).view(checkpoint.info(name).dtype.storage),
        ), name


def test_stock_tensorstore_reads_the_same(path):
    checkpoint = shardckpt.open(path)

    for name in arrays(checkpoint):
        array = ts.open(checkpoint.stock_spec(name)).result().read().result()
        assert equal(array, checkpoint.read(name).view(checkpoint.info(name).dtype.storage)), name


def test_it_is_small_enough_to_stay_in_the_repository(path):
    assert sum(file.stat().st_size for file in path.rglob("*") if file.is_file()) <= LARGEST_BYTES


BASES = GOLDEN / "v2" / "bases"


@pytest.mark.parametrize(("step", "bases"), [("0", []), ("1", ["0"]), ("2", ["0", "1"])])
def test_a_checkpoint_is_restored_together_with_what_it_has_left_in_others(step, bases):
    checkpoint = shardckpt.open(BASES / step)

    assert checkpoint.bases() == [str(BASES / base) for base in bases]
    assert (
        facts(shardckpt.restore(checkpoint))
        == json.loads((BASES / "expected.json").read_text())[step]
    )
    assert checkpoint.verify().damage == []
    group = zarr.open_group(checkpoint.zarr_store(), mode="r")
    for name in arrays(checkpoint):
        stored = checkpoint.read(name).view(checkpoint.info(name).dtype.storage)
        assert equal(group[array_path(name)][...], stored), name
        assert equal(ts.open(checkpoint.stock_spec(name)).result().read().result(), stored), name
    assert (
        sum(file.stat().st_size for file in (BASES / step).rglob("*") if file.is_file())
        <= LARGEST_BYTES
    )


def test_values_that_belong_to_each_process_are_restored_by_process():
    path = GOLDEN / "v4" / "local" / "packed"
    assert facts(shardckpt.restore(path)) == json.loads((path.parent / "expected.json").read_text())
    for process in range(2):
        given = {
            "q": np.zeros((3 + process, 4), np.int8),
            "kept": np.zeros(9, np.float32),
            "nested": None,
        }
        state = shardckpt.train_state(rng=False, local=["q", "nested/*"], **given)
        shardckpt.restore(path, state, coordinator=OneOfSeveral(process, 2))
        assert equal(state.values["q"], shardckpt.restore(path)["q"][process])
        assert state.values["nested"] == {"n": process, "only": {process: "x"}}
        assert state.step == 7
    assert shardckpt.open(path).verify().damage == []


@pytest.mark.parametrize("layout", ["packed", "zarr"])
def test_composite_tensors_are_restored_as_parts_and_into_places_of_their_class(layout):
    path = GOLDEN / "v5" / "composite" / layout
    whole = shardckpt.restore(path)
    assert facts(whole) == json.loads((path.parent / "expected.json").read_text())
    context = {
        "block": {"$tuple": [1, 4]},
        "dtype": {"$torch.dtype": "float32"},
        "rounding": "Rounding.NEAREST",
        "none": None,
    }
    parts = {"data": np.zeros((6, 4), np.int8), "scale": np.zeros((6, 1), np.float32)}
    like = CompositeTensor("golden.Scaled", (6, 4), context, parts, lambda values: values)
    parts_restored = shardckpt.restore(path, {"w": like}, strict=False)["w"]
    assert equal(parts_restored[0], whole["w"]["data"])
    assert equal(parts_restored[1], whole["w"]["scale"])
    assert shardckpt.open(path).verify().damage == []


def test_values_by_the_position_on_an_axis_are_restored_by_position():
    path = GOLDEN / "v3" / "axis" / "packed"
    whole = shardckpt.restore(path)
    assert facts(whole) == json.loads((path.parent / "expected.json").read_text())
    for processes in (2, 4):
        for process in range(processes):
            position = process * 2 // processes
            like = {"loader": shardckpt.PerProcess(None, axis=(position, 2))}
            read = shardckpt.restore(
                path, like, only="loader", coordinator=OneOfSeveral(process, processes)
            )["loader"].value
            assert facts(read) == facts(whole["loader"][2 * position])
    with pytest.raises(
        shardckpt.errors.MismatchError, match="an axis of size 2, and this process is at 0 of 4"
    ):
        shardckpt.restore(
            path,
            {"loader": shardckpt.PerProcess(None, axis=(0, 4))},
            only="loader",
            coordinator=OneOfSeveral(0, 4),
        )
    assert shardckpt.open(path).verify().damage == []


@pytest.mark.parametrize("step", [0, 1, 2])
def test_versions_with_differences_are_restored_with_those_that_they_differ_from(step):
    path = GOLDEN / "v6" / "differences" / str(step)
    checkpoint = shardckpt.open(path)
    assert (
        facts(shardckpt.restore(checkpoint))
        == json.loads((path.parent / "expected.json").read_text())[str(step)]
    )
    assert checkpoint.bases() == [str(path.parent / str(base)) for base in reversed(range(step))]
    assert checkpoint.verify().damage == []
    assert checkpoint.fingerprint() == checkpoint.fingerprint(recorded=False)
