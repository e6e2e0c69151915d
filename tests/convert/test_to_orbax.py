"""A state as an Orbax checkpoint, against Orbax itself in a process with 8 virtual devices."""

from __future__ import annotations

import json
import subprocess
import sys

import exported
import ml_dtypes
import numpy as np
import pytest
import zarr
from paths import CHILDREN

import shardckpt
from shardckpt import errors
from shardckpt.convert.options import StateOptions
from shardckpt.convert.whole_state import write_state
from shardckpt.io.url import parse
from shardckpt.reading.checkpoint import Checkpoint
from shardckpt.state import PerProcess

MiB = 1 << 20
CHILD = CHILDREN / "orbax_restores.py"


def export(source, place, **options):
    return write_state(
        Checkpoint(source),
        parse(place),
        "orbax",
        StateOptions(**{"memory_limit": 64 * MiB, **options}),
    )


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("orbax")
    exported.save(root / "checkpoint")
    return root


@pytest.fixture(scope="module")
def orbax(root):
    """Answers of Orbax about the exported checkpoints."""
    child = subprocess.run(
        [sys.executable, CHILD, root], capture_output=True, text=True, timeout=250, check=False
    )
    assert child.returncode == 0, child.stderr[-4000:]
    return json.loads(child.stdout.splitlines()[-1])


def test_orbax_restores_the_state_bit_by_bit_onto_the_recorded_shardings(orbax):
    assert orbax["as it was"] == []
    ids = exported.MESH.devices.tolist()
    assert orbax["recorded"] == {
        "w": [ids, "P('data', 'model')"],
        "wide": [ids, "P(None, ('model', 'data'))"],
        "replicated": [ids, "P()"],
        "rows": [ids, "P('data',)"],
    }


def test_what_jax_has_no_sharding_for_comes_back_as_numpy_arrays(orbax):
    assert orbax["arrays of numpy"] == ["empty", "layers.0.bias", "scalar", "uneven"]


def test_orbax_restores_it_onto_shardings_of_the_caller_s(orbax):
    assert orbax["placed"] == []
    assert orbax["shardings"] == len(exported.state()["dtypes"]) + 9 + 3


def test_the_checkpointer_that_takes_no_texts_restores_what_has_none(orbax):
    assert (orbax["standard"], orbax["standard as it was"]) == ([], [])


def test_random_keys_of_jax_come_back_as_keys(orbax):
    assert orbax["key"] == ["threefry2x32", [0, 3]]


def test_damage_is_noticed_when_orbax_reads(orbax):
    assert "Digest mismatch" in orbax["damage"]


def test_zarr_reads_the_arrays_too(root, tmp_path):
    export(root / "checkpoint", tmp_path / "o", include=["model/*", "optimizer/**"])
    assert (
        exported.raw(zarr.open_array(tmp_path / "o" / "model.uneven")[:])
        == exported.state()["model"]["uneven"].tobytes()
    )
    assert zarr.open_array(tmp_path / "o" / "optimizer.state.0.step")[()] == 7


def test_chunks_are_shards_of_the_recorded_layout_where_these_are_large_enough(tmp_path):
    w = np.zeros((4096, 2048), np.float32)
    sharding = shardckpt.Sharding(exported.MESH, shardckpt.PartitionSpec("data"))
    shardckpt.save(
        tmp_path / "c", {"w": w}, options=shardckpt.SaveOptions(shardings={"w": sharding})
    )
    export(tmp_path / "c", tmp_path / "o", memory_limit=256 * MiB)
    assert sorted(path.name for path in (tmp_path / "o" / "w" / "c").iterdir()) == [
        "0",
        "1",
        "2",
        "3",
    ]


def test_what_orbax_has_no_place_for_is_left_out_by_name_and_keeps_its_place_in_lists(tmp_path):
    state = {
        "list": [1, b"bytes", 3],
        "z": 1j,
        "huge": 1 << 70,
        "own": PerProcess(4),
        "w": np.ones(2),
        "brain": ml_dtypes.bfloat16(2),
    }
    exported.save(tmp_path / "c", state)
    written = export(tmp_path / "c", tmp_path / "o")
    names = ("list/1", "z", "huge", "own")
    assert [note.split(":")[0] for note in written.notes] == [
        f"'{name}' is left out" for name in names
    ]
    tree = json.loads((tmp_path / "o" / "_METADATA").read_text())["tree_metadata"]
    assert tree["('list', '1')"]["value_metadata"] == {
        "value_type": "None",
        "skip_deserialize": True,
    }
    assert not {"('z',)", "('huge',)", "('own',)"} & set(tree)


@pytest.mark.parametrize(
    ("state", "error", "words"),
    [
        ({}, errors.StructureMismatchError, "that is not empty"),
        (
            {"a.b": np.ones(2), "a": {"b": np.ones(3)}},
            errors.NamesMismatchError,
            "two names become 'a.b' in Orbax",
        ),
        (
            {"ocdbt.process_0": np.ones(2)},
            errors.NamesMismatchError,
            "'ocdbt.process_0' is the name of a file of Orbax itself",
        ),
        (
            {"checkpoint": np.ones(2)},
            errors.NamesMismatchError,
            "'checkpoint' is the name of a file of Orbax itself",
        ),
        (
            {"_METADATA": np.ones(2)},
            errors.NamesMismatchError,
            "'_METADATA' is the name of a file of Orbax itself",
        ),
        (
            {"../../w": np.ones(2)},
            errors.NamesMismatchError,
            "directory of its name: '../../w' is not a valid key below",
        ),
        (
            {"a": np.ones(2), "a/c": np.ones(2)},
            errors.NamesMismatchError,
            "'a/c' would be inside the directory of another array",
        ),
        (
            {"w": exported.bits((3,), "uint4", 0)},
            errors.DtypeError,
            "'w': TensorStore has no dtype uint4",
        ),
    ],
)
def test_what_orbax_has_no_words_for_is_refused_and_nothing_is_left(tmp_path, state, error, words):
    exported.save(tmp_path / "c", state)
    with pytest.raises(error, match=words):
        export(tmp_path / "c", tmp_path / "o")
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_a_directory_appears_whole_or_not_at_all_and_a_former_checkpoint_stays_until_then(
    root, tmp_path
):
    export(root / "checkpoint", tmp_path / "o", include="model/w")

    def stop(done, _total):
        if done:
            assert (tmp_path / "o" / "_METADATA").exists()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export(root / "checkpoint", tmp_path / "o", overwrite=True, progress=stop)
    assert [path.name for path in tmp_path.iterdir()] == ["o"]
    assert not (tmp_path / "o" / "model.b").exists()
    export(root / "checkpoint", tmp_path / "o", overwrite=True)
    assert (tmp_path / "o" / "model.rows").is_dir()
    assert [path.name for path in tmp_path.iterdir()] == ["o"]


@pytest.mark.parametrize(
    "foreign",
    [
        *("runs/100/model.bin", "runs/notes.txt", "runs/w/notes.txt", "runs/w/7/model.bin"),
        *("runs/w/c/0/model.bin", "runs/w/c/model.bin", "array_metadatas/notes.txt"),
    ],
)
def test_a_directory_with_other_files_among_its_arrays_is_not_replaced(tmp_path, foreign):
    shardckpt.save(tmp_path / "c", {"runs/w": np.ones((2, 3)), "v": np.ones(2), "step": 3})
    export(tmp_path / "c", tmp_path / "o")
    export(tmp_path / "c", tmp_path / "o", overwrite=True)
    (tmp_path / "o" / foreign).parent.mkdir(exist_ok=True)
    (tmp_path / "o" / foreign).write_text("mine")
    first = foreign.split("/")[0]
    with pytest.raises(
        errors.AlreadyExistsError, match=rf"holds '{first}/.* beside an earlier export"
    ):
        export(tmp_path / "c", tmp_path / "o", overwrite=True)
    assert (tmp_path / "o" / foreign).read_text() == "mine"


def test_a_checkpoint_that_an_export_replaced_is_read_with_its_new_dtype(tmp_path):
    for dtype in ("float32", "int32"):
        tensors = {"w": np.arange(4, dtype=dtype)}
        shardckpt.save(tmp_path / dtype, tensors)
        export(tmp_path / dtype, tmp_path / "o", overwrite=True)
        np.testing.assert_array_equal(shardckpt.open(tmp_path / "o").read("w"), tensors["w"])


def test_orbax_finds_the_shardings_of_arrays_with_any_name(tmp_path):
    """Their names are in base64, for which there are two alphabets."""
    import tensorstore as ts
    from orbax.checkpoint._src.serialization.tensorstore_utils import get_sharding_tensorstore_spec

    layout = shardckpt.Sharding(shardckpt.Mesh((2,), ("x",)), shardckpt.PartitionSpec("x"))
    names = ("ab?", "params.w?", "a>b", "w")
    shardckpt.save(
        tmp_path / "c",
        {n: np.ones(4) for n in names},
        options=shardckpt.SaveOptions(shardings=dict.fromkeys(names, layout)),
    )
    shardckpt.export(tmp_path / "c", tmp_path / "o", to="orbax")
    for name in names:
        document = (
            ts.open(get_sharding_tensorstore_spec(str(tmp_path / "o"), name))
            .result()
            .read()
            .result()
            .item()
        )
        assert json.loads(document)["partition_spec"] == ["x"]
