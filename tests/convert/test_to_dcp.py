"""A state as a directory of torch.distributed.checkpoint, against that package itself: real gloo
jobs, real loads."""

from __future__ import annotations

import exported
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from processes import Processes
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import shardckpt
from shardckpt import errors
from shardckpt.convert.options import StateOptions
from shardckpt.convert.whole_state import write_state
from shardckpt.io.url import parse
from shardckpt.reading.checkpoint import Checkpoint

MiB = 1 << 20
QUIET = {"PYTHONWARNINGS": "ignore", "TF_CPP_MIN_LOG_LEVEL": "3"}


@pytest.fixture(scope="module")
def processes():
    with Processes("exports", env=QUIET) as processes:
        yield processes


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return exported.save(tmp_path_factory.mktemp("dcp") / "checkpoint")


@pytest.fixture(scope="module")
def directory(checkpoint, tmp_path_factory):
    place = tmp_path_factory.mktemp("out") / "dcp"
    export(checkpoint, place)
    return place


def export(source, place, **options):
    return write_state(
        Checkpoint(source),
        parse(place),
        "dcp",
        StateOptions(**{"memory_limit": 64 * MiB, **options}),
    )


@pytest.mark.parametrize("mesh", [(2,), (2, 2)], ids=["2 processes", "2 x 2 processes"])
def test_dcp_loads_the_state_onto_shardings_of_its_own_bit_by_bit(
    processes, checkpoint, directory, mesh
):
    assert processes.run("load", int(np.prod(mesh)), checkpoint, directory, mesh) == [[]] * int(
        np.prod(mesh)
    )


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_dcp_makes_one_file_of_it_with_the_same_elements(checkpoint, directory, tmp_path):
    dcp_to_torch_save(directory, tmp_path / "state.pt")
    actual, expected = torch.load(tmp_path / "state.pt", weights_only=False), exported.state()
    for group in ("model", "dtypes"):
        for name, array in expected[group].items():
            assert exported.raw(actual[group][name]) == array.tobytes(), name
    assert actual["optimizer"]["lr"] == 1e-3
    assert actual["numpy number"] == np.float32(0.5)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_its_metadata_says_what_dcp_s_own_says_of_the_same_state(checkpoint, directory, tmp_path):
    state = torch_state(shardckpt.restore(checkpoint))
    dcp.save(state, checkpoint_id=tmp_path / "theirs", no_dist=True)
    theirs, ours = (
        dcp.FileSystemReader(place).read_metadata() for place in (tmp_path / "theirs", directory)
    )
    assert ours.planner_data == theirs.planner_data
    assert list(ours.state_dict_metadata) == list(theirs.state_dict_metadata)
    for name, stored in theirs.state_dict_metadata.items():
        own = ours.state_dict_metadata[name]
        assert type(own) is type(stored), name
        if hasattr(stored, "size"):
            assert (own.size, own.properties) == (stored.size, stored.properties), name
    assert ours.version == theirs.version
    assert str(ours.storage_meta.checkpoint_id) == str(directory)


def torch_state(value):
    if isinstance(value, dict):
        return {key: torch_state(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [torch_state(inner) for inner in value]
    if not isinstance(value, np.ndarray):
        return value
    flat = torch.from_numpy(np.ascontiguousarray(value).reshape(-1).view(np.uint8))
    return flat.view(getattr(torch, value.dtype.name)).reshape(value.shape)


def test_tied_tensors_are_stored_once(directory):
    places = dcp.FileSystemReader(directory).read_metadata().storage_data
    of = {
        name: [(p.offset, p.length) for index, p in places.items() if index.fqn == name]
        for name in ("model.w", "model.tied")
    }
    assert of["model.w"] == of["model.tied"] != []


def test_blocks_are_shards_of_the_recorded_layout_where_these_are_large_enough(tmp_path):
    w = np.zeros((4096, 2048), np.float32)
    sharding = shardckpt.Sharding(exported.MESH, shardckpt.PartitionSpec("data"))
    shardckpt.save(
        tmp_path / "c",
        {"w": w, "v": w[:8, :8].copy()},
        options=shardckpt.SaveOptions(shardings={"w": sharding, "v": sharding}),
    )
    export(tmp_path / "c", tmp_path / "d", memory_limit=256 * MiB)
    entries = dcp.FileSystemReader(tmp_path / "d").read_metadata().state_dict_metadata
    assert [tuple(chunk.sizes) for chunk in entries["w"].chunks] == [(1024, 2048)] * 4
    assert [tuple(chunk.offsets) for chunk in entries["w"].chunks] == [
        (1024 * i, 0) for i in range(4)
    ]
    assert [tuple(chunk.sizes) for chunk in entries["v"].chunks] == [(8, 8)]


def test_an_empty_dict_is_left_out_and_said_so(tmp_path):
    state = {"a": np.ones(2), "d": {}, "l": [{"x": {}, "y": 1}, 2], "t": ({},)}
    exported.save(tmp_path / "c", state)
    written = export(tmp_path / "c", tmp_path / "d")
    assert written.notes == ("left out, as DCP stores no empty dict: d, l/0/x",)


@pytest.mark.parametrize("items", [[{}], [{"x": {}}], [[{}], 1]])
def test_a_list_with_an_empty_dict_is_refused(tmp_path, items):
    exported.save(tmp_path / "c", {"a": np.ones(2), "e": items})
    with pytest.raises(errors.StructureMismatchError, match=r"'e\.0' is an empty dict in a list"):
        export(tmp_path / "c", tmp_path / "d")
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_tuples_with_tensors_in_them_become_lists_and_say_so(tmp_path):
    exported.save(tmp_path / "c", {"opt": (np.ones(3, np.float32), (1, 2)), "plain": (1, "a")})
    written = export(tmp_path / "c", tmp_path / "d")
    state = {"opt": [torch.zeros(3), (0, 0)], "plain": (0, "")}
    with pytest.warns(UserWarning, match="torch.distributed"):
        dcp.load(state, checkpoint_id=tmp_path / "d")
    assert state["opt"][0].tolist() == [1, 1, 1]
    assert (state["opt"][1], state["plain"]) == ((1, 2), (1, "a"))
    assert written.notes == (
        "'opt' is a tuple with tensors in it, where DCP looks for none; it is exported as a list.",
    )


@pytest.mark.parametrize(
    ("state", "error", "words"),
    [
        ([np.ones(2)], errors.StructureMismatchError, "is a list, but DCP stores only dicts"),
        (
            {"a.b": np.ones(2), "a": {"b": np.ones(3)}},
            errors.NamesMismatchError,
            r"two names become the same in DCP.*a\.b",
        ),
        (
            {"w": exported.bits((3,), "uint4", 0)},
            errors.DtypeError,
            "'w': torch has no dtype uint4",
        ),
    ],
)
def test_what_dcp_has_no_words_for_is_refused_and_nothing_is_left(tmp_path, state, error, words):
    exported.save(tmp_path / "c", state)
    with pytest.raises(error, match=words):
        export(tmp_path / "c", tmp_path / "d")
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_only_a_checkpoint_of_dcp_is_replaced(checkpoint, tmp_path):
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "thesis.tex").write_text("…")
    with pytest.raises(errors.AlreadyExistsError, match="is there already"):
        export(checkpoint, tmp_path / "d")
    with pytest.raises(
        errors.AlreadyExistsError, match=r"is not an earlier export \(it has no \.metadata\)"
    ):
        export(checkpoint, tmp_path / "d", overwrite=True)
    (tmp_path / "d" / "thesis.tex").rename(tmp_path / "d" / ".metadata")
    export(checkpoint, tmp_path / "d", overwrite=True)
    assert sorted(path.name for path in (tmp_path / "d").iterdir()) == [".metadata", "__0_0.distcp"]
    assert [path.name for path in tmp_path.iterdir()] == ["d"]


@pytest.mark.parametrize("overwrite", [True, False])
def test_a_link_to_a_checkpoint_of_dcp_is_not_replaced_and_said_to_be_one(
    checkpoint, tmp_path, overwrite
):
    export(checkpoint, tmp_path / "d")
    (tmp_path / "link").symlink_to("d")
    with pytest.raises(errors.AlreadyExistsError, match="link is a symbolic link, so"):
        export(checkpoint, tmp_path / "link", overwrite=overwrite)
    assert (tmp_path / "link").is_symlink()


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """One tensor of 256 MiB, in tall columns."""
    w = np.arange(64 * MiB, dtype=np.uint32).reshape(16384, 4096)
    sharding = shardckpt.Sharding(shardckpt.Mesh((4,), ("x",)), shardckpt.PartitionSpec(None, "x"))
    place = tmp_path_factory.mktemp("large") / "c"
    shardckpt.save(place, {"w": w}, options=shardckpt.SaveOptions(shardings={"w": sharding}))
    return place


@pytest.mark.long
@pytest.mark.parametrize("to", ["torch", "dcp", "orbax"])
def test_a_tensor_much_larger_than_the_limit_is_exported_within_it_and_read_once(
    processes, large, tmp_path, to
):
    (took,) = processes.run("memory", 1, large, tmp_path / to, to, 64 * MiB)
    assert took["memory"] <= 64 * MiB + 32 * MiB
    assert took["read"] <= 1.01 * 256 * MiB
