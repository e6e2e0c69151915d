"""Checkpoints that Orbax has written are read as Orbax itself reads them."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys

import msgpack
import numpy as np
import pytest
from emulators import _free_port
from foreign_contents import contents
from foreign_states import described
from paths import CHILDREN

import shardckpt
from shardckpt import Mesh, PartitionSpec, Sharding
from shardckpt.convert.files.file_version import Candidate
from shardckpt.convert.formats.orbax.source import looks_like, open_foreign
from shardckpt.convert.importing import import_checkpoint
from shardckpt.errors import (
    CorruptionError,
    FormatError,
    MissingDataError,
    NotFoundError,
    ReplacedError,
    StorageError,
    UncommittedError,
)
from shardckpt.io.store import Store
from shardckpt.io.url import parse

LAYOUTS = ["ocdbt, zarr 2", "ocdbt, zarr 3", "zarr 2", "zarr 3", "uncompressed"]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The directory of the checkpoints, and by their names the states that Orbax restores from
    them."""
    root = tmp_path_factory.mktemp("orbax")
    flags = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    command = [sys.executable, CHILDREN / "orbax_checkpoints.py", root]
    done = subprocess.run(
        command,
        env={**os.environ, **flags},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return root, json.loads(done.stdout.splitlines()[-1])


@pytest.fixture
def copied(written, tmp_path):
    """A checkpoint by its name, to be damaged."""

    def copy(name):
        shutil.copytree(written[0] / name, tmp_path / name)
        return tmp_path / name

    return copy


def opened(path):
    return open_foreign(parse(str(path)))


@pytest.mark.parametrize(
    "name", [*LAYOUTS, "steps/10", "items/step_00000005", "v1", "rich", "older"]
)
def test_a_checkpoint_is_read_as_orbax_itself_reads_it(written, name):
    root, answers = written
    assert described(contents(opened(root / name))) == answers[name]
    assert looks_like(Candidate.at(parse(str(root / name)))).startswith("an Orbax checkpoint, by ")


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_and_the_chunks_of_the_file_are_kept(written, name):
    tensors = opened(written[0] / name).structure.tensors
    mesh = Mesh((4, 2), ("data", "model"), [1, 0, 2, 3, 4, 5, 7, 6])
    expected = {
        "params/both": PartitionSpec("data", "model"),
        "params/tuple": PartitionSpec(("model", "data")),
        "params/one axis": PartitionSpec(None, "model"),
        "params/replicated": PartitionSpec(),
        "keys/one": None,
        "one device": None,
        "numpy/0-d": None,
    }
    assert {n: tensors[n].layout for n in expected} == {
        n: None if spec is None else Sharding(mesh, spec) for n, spec in expected.items()
    }
    assert tensors["keys/rbg"].shape == (4, 4)


@pytest.mark.slow
def test_what_several_processes_have_saved_is_read(tmp_path):
    flags = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    command = [sys.executable, CHILDREN / "orbax_processes.py", f"127.0.0.1:{_free_port()}"]
    processes = [
        subprocess.Popen(
            [*command, str(i), tmp_path], env={**os.environ, **flags}, stderr=subprocess.PIPE
        )
        for i in range(2)
    ]
    try:
        errors = [process.communicate(timeout=250)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0, 0], errors
    array = np.random.default_rng(0).standard_normal((32, 24)).astype("float32")
    expected = {
        "both": array,
        "numpy": np.arange(5),
        "replicated": array,
        "step": 3,
        "tuple": array,
    }
    for name in ("ocdbt", "plain"):
        foreign = opened(tmp_path / name)
        assert described(contents(foreign)) == described(expected)
        assert foreign.structure.tensors["both"].layout.spec == PartitionSpec("data", "model")


def test_random_keys_are_words_that_are_known_to_be_keys(written):
    tree = opened(written[0] / "zarr 2").structure.tree
    assert tree["keys"] == {
        "one": {"$tensor": "jax.key:threefry2x32"},
        "rbg": {"$tensor": "jax.key:rbg"},
    }


def test_neither_orbax_nor_jax_is_imported(written):
    code = (
        "import sys; from shardckpt.io.url import parse; from "
        "shardckpt.convert.formats.orbax.source import open_foreign;f = "
        f"open_foreign(parse({str(written[0] / 'older')!r}));print(len(f.structure.tensors), "
        "[name for name in ('jax', 'orbax', 'torch') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=True
    )
    assert done.stdout == "5 []\n"


def test_a_managers_directory_is_refused_with_its_steps(written):
    assert (
        looks_like(Candidate.at(parse(str(written[0] / "steps"))))
        == "steps of an Orbax CheckpointManager"
    )
    with pytest.raises(
        NotFoundError,
        match=r"steps of a CheckpointManager: 9, 10\. Give one of them, for example .*/steps/10",
    ):
        opened(written[0] / "steps")


def test_metrics_and_custom_metadata_become_metadata(written):
    foreign = opened(written[0] / "steps" / "10")
    assert foreign.metadata == {"metrics": {"loss": 1.5}, "custom_metadata": {"run": [7]}}
    assert foreign.notes == ()


def test_what_is_no_orbax_checkpoint_is_not_taken_for_one(written, tmp_path):
    (tmp_path / "checkpoint").write_text('model_checkpoint_path: "TensorFlow\'s"')
    (tmp_path / "state").mkdir()
    signs = [
        looks_like(Candidate.at(parse(str(p))))
        for p in (tmp_path, tmp_path / "nothing", tmp_path / "checkpoint", written[0])
    ]
    assert signs == [None] * 4, "several checkpoints side by side are none either"
    with pytest.raises(FormatError, match="not an Orbax checkpoint"):
        opened(tmp_path / "state")


def test_what_is_not_finished_is_refused(written, copied, tmp_path):
    by_name = tmp_path / "3.orbax-checkpoint-tmp-1234"
    shutil.copytree(written[0] / "steps" / "10", by_name)
    assert "not finished" in looks_like(Candidate.at(parse(str(by_name))))
    item = copied("items/step_00000005")
    (item / "state").rename(item / "state.orbax-checkpoint-tmp")
    unmerged = copied("ocdbt, zarr 3")
    (unmerged / "manifest.ocdbt").unlink()
    for path in (by_name, item, unmerged):
        with pytest.raises(UncommittedError, match="import another"):
            opened(path)


def test_in_a_bucket_what_is_finished_has_the_file_that_says_so(written, cloud):
    source = written[0] / "steps" / "10"
    location = parse(cloud.url("orbax", "10"))
    store = Store.open(location)
    for path in sorted(
        p for p in source.rglob("*") if p.is_file() and p.name != "commit_success.txt"
    ):
        store.write(str(path.relative_to(source)), path.read_bytes())
    for place in (location, location.join("default")):
        with pytest.raises(UncommittedError, match=r"commit_success\.txt is missing"):
            open_foreign(place)
    store.write("commit_success.txt", b"")
    assert described(contents(open_foreign(location))) == written[1]["steps/10"]
    assert described(contents(open_foreign(location.join("default")))) == written[1]["steps/10"]


@pytest.mark.parametrize("name", ["zarr 2", "zarr 3"])
def test_a_chunk_that_is_missing_is_an_error_though_it_would_be_zeros(copied, name):
    path = copied(name)
    foreign = opened(path)
    chunk = next(
        file
        for file in sorted((path / "numpy.zeros").rglob("*"))
        if file.is_file() and "zarr" not in file.name
    )
    chunk.unlink()
    with pytest.raises(MissingDataError, match=r"numpy\.zeros.*missing"):
        contents(foreign)


@pytest.mark.parametrize("zeros_left_out", [False, True])
@pytest.mark.parametrize("name", ["ocdbt, zarr 2", "ocdbt, zarr 3"])
def test_a_missing_data_file_of_a_database_is_an_error(copied, name, zeros_left_out):
    path = copied(name)
    metadata = json.loads((path / "_METADATA").read_text())
    metadata["store_array_data_equal_to_fill_value"] = not zeros_left_out
    (path / "_METADATA").write_text(json.dumps(metadata))
    foreign = opened(path)
    for file in path.glob("ocdbt.process_*/d/*"):
        file.unlink()
    with pytest.raises(CorruptionError, match="small pieces"):
        contents(foreign)


def test_what_was_once_left_out_is_zeros_and_a_note_says_so(written):
    foreign = opened(written[0] / "older")
    assert not contents(foreign)["list"][0].any()
    assert [note for note in foreign.notes if "does not store chunks of zeros" in note]


def test_a_chunk_that_was_cut_off_is_an_error(copied):
    path = copied("zarr 2")
    foreign = opened(path)
    for chunk in (path / "params.both").glob("[0-9]*"):
        os.truncate(chunk, chunk.stat().st_size - 3)
    with pytest.raises(CorruptionError, match=r"params\.both: stored bytes cannot be read"):
        contents(foreign)


@pytest.mark.parametrize("name", ["zarr 2", "zarr 3"])
@pytest.mark.parametrize("damage", ["missing", "empty", "no JSON"])
def test_an_array_without_its_metadata_is_an_error(copied, name, damage):
    file = next((copied(name) / "params.both").glob("*zarr*" if name == "zarr 3" else ".z*"))
    file.unlink() if damage == "missing" else file.write_bytes(
        b"" if damage == "empty" else b'{"shape": ['
    )
    with pytest.raises(
        MissingDataError if damage == "missing" else CorruptionError, match=r"params\.both"
    ):
        opened(file.parents[1])


@pytest.mark.parametrize("name", ["zarr 2", "zarr 3"])
def test_a_chunk_that_no_memory_could_hold_is_refused_before_it_is_read(copied, name):
    file = next((copied(name) / "numpy.zeros").glob("*zarr*" if name == "zarr 3" else ".z*"))
    text = file.read_text()
    assert text.count("[4,7]") in (2, 3), "shape and chunks"
    file.write_text(re.sub(r'("chunks":|"chunk_shape":)\[4,7\]', rf"\1[4,{7 << 40}]", text))
    with pytest.raises(FormatError, match=r"shape \(4, 7\) has chunks of shape"):
        opened(file.parents[1])


def test_two_leaves_that_were_stored_under_one_name_are_refused(copied):
    path = copied("zarr 2")
    metadata = json.loads((path / "_METADATA").read_text())
    entries = metadata["tree_metadata"]
    keys = [{"key": "params", "key_type": 2}, {"key": "both", "key_type": 2}]
    entries["('params.both',)"] = {
        **entries["('params', 'both')"],
        "key_metadata": [{"key": "params.both", "key_type": 2}],
    }
    assert entries["('params', 'both')"]["key_metadata"] == keys
    (path / "_METADATA").write_text(json.dumps(metadata))
    with pytest.raises(FormatError, match=r"two leaves are stored as 'params\.both'"):
        opened(path)


@pytest.mark.parametrize(
    "metadata",
    [
        b"",
        b"[]",
        b"{}",
        b"[" * 100_000,
        b'{"tree_metadata": {"a": 3}}',
        (
            b'{"tree_metadata": {"a": {"key_metadata": [{"key": 1, "key_type": 2}], '
            b'"value_metadata": {"value_type": "scalar"}}}}'
        ),
        (
            b'{"tree_metadata": {"a": {"key_metadata": [{"key": "7", "key_type": 1}], '
            b'"value_metadata": {"value_type": "scalar"}}}}'
        ),
        b'{"tree_metadata": {}, "value_metadata_tree": 5}',
        b'{"tree_metadata": {}, "value_metadata_tree": "{"}',
    ],
)
def test_metadata_that_make_no_sense_are_refused(copied, metadata):
    path = copied("rich")
    (path / "_METADATA").write_bytes(metadata)
    with pytest.raises(
        FormatError, match=r"^[^:]*/_METADATA (is not JSON: |was not written by Orbax )"
    ) as raised:
        opened(path)
    assert str(raised.value).count("replace it with a backup") == 1


@pytest.mark.parametrize("file", ["_sharding", "array_metadatas/process_0"])
@pytest.mark.parametrize(
    ("content", "words"), [(b"{", "is not JSON: "), (b"[0]", r"was not written by Orbax \(")]
)
def test_layouts_and_generators_that_make_no_sense_are_refused(copied, file, content, words):
    path = copied("rich")
    (path / file).parent.mkdir(exist_ok=True)
    (path / file).write_bytes(content)
    with pytest.raises(FormatError, match=rf"^[^:]*/{file} {words}") as raised:
        opened(path)
    assert str(raised.value).count("replace it with a backup") == 1


@pytest.mark.parametrize(
    "content", [b"", b"\x81", b"\x81\xa1a\xc7\x03\x09abc", b"\xc1", b"\x91" * 5000]
)
def test_a_msgpack_file_that_makes_no_sense_is_refused(copied, content):
    path = copied("older")
    (path / "checkpoint").write_bytes(content)
    with pytest.raises(FormatError, match="checkpoint is not a tree in msgpack"):
        opened(path)


@pytest.mark.parametrize("name", ["../../outside", "/etc/passwd", "a//b", "..", "w\\x"])
def test_an_array_outside_of_the_checkpoint_is_refused(copied, name):
    path = copied("older")
    (path / "checkpoint").write_bytes(msgpack.packb({"w": f"PLACEHOLDER://{name}"}))
    with pytest.raises(FormatError, match="is not a valid key below"):
        opened(path)


def test_a_pipe_in_the_place_of_a_chunk_is_refused_and_not_waited_for(copied):
    place = copied("zarr 2")
    chunk = next(
        path for path in sorted(place.rglob("*")) if path.name[0].isdecimal() and path.is_file()
    )
    chunk.unlink()
    os.mkfifo(chunk)
    with pytest.raises(StorageError, match="is a pipe or device, not a file"):
        opened(place)


def test_a_checkpoint_that_was_written_anew_is_another(copied):
    path = copied("zarr 2")
    before = opened(path).identity
    assert opened(path).identity == before
    chunk = path / "params.both" / "0.0"
    os.utime(chunk, ns=(1, 1))
    assert opened(path).identity != before


@pytest.mark.parametrize("name", ["zarr 2", "ocdbt, zarr 3"])
def test_a_checkpoint_that_is_replaced_while_it_is_read_is_an_error(written, copied, name):
    path = copied(name)
    foreign = opened(path)
    shutil.rmtree(path)
    with pytest.raises(ReplacedError, match="_METADATA was changed, replaced or deleted"):
        contents(foreign)
    shutil.copytree(written[0] / name, path, copy_function=shutil.copyfile)
    with pytest.raises(ReplacedError, match="_METADATA was changed, replaced or deleted"):
        contents(foreign)


@pytest.mark.parametrize("name", [*LAYOUTS, "older"])
def test_an_export_replaces_a_checkpoint_that_orbax_has_written(copied, tmp_path, name):
    shardckpt.save(tmp_path / "new", {"w": np.arange(4.0)})
    shardckpt.export(tmp_path / "new", copied(name), to="orbax", overwrite=True)
    assert shardckpt.open(tmp_path / name).names() == ["w"]


def test_a_checkpoint_whose_chunk_changes_during_its_import_is_an_error(copied, tmp_path):
    path = copied("zarr 2")
    with pytest.raises(ReplacedError, match="was changed, replaced or deleted"):
        import_checkpoint(
            path,
            tmp_path / "imported",
            workers=1,
            progress=lambda done, total: os.utime(path / "params.both" / "0.0"),
        )


@pytest.mark.parametrize("name", ["ocdbt, zarr 3", "zarr 2"])
def test_an_import_keeps_layouts_and_restores_as_orbax_does(written, tmp_path, name):
    report = import_checkpoint(written[0] / name, tmp_path / "imported")
    assert report.format == "orbax"
    assert described(shardckpt.restore(tmp_path / "imported")) == written[1][name]
    info = shardckpt.open(tmp_path / "imported").info("params/both")
    assert info.layout == Sharding(
        Mesh((4, 2), ("data", "model"), [1, 0, 2, 3, 4, 5, 7, 6]), PartitionSpec("data", "model")
    )


def test_many_small_chunks_are_read_at_once(written):
    tensor = opened(written[0] / "zarr 2").structure.tensors["params/small pieces"]
    assert tensor.num_chunks == 1
    assert np.prod(tensor.shape) * 4 > 1 << 11, "it is stored in several"
