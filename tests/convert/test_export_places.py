"""An export takes the place that it is given, and nothing that lies around it."""

from __future__ import annotations

import fcntl
import os
import re
import shutil

import numpy as np
import pytest
import safetensors.numpy
from convert_states import saved

import shardckpt
from shardckpt import errors
from shardckpt.convert.files import draft, local_files
from shardckpt.streaming import stream as streaming

STATE = {"a": np.arange(24, dtype=np.float32).reshape(4, 6), "b": np.ones(3, np.float32)}


@pytest.fixture
def place(tmp_path):
    saved(tmp_path / "c", STATE)
    return tmp_path / "c"


@pytest.fixture
def small(monkeypatch):
    """Progress is noted after each batch of 64 bytes."""
    monkeypatch.setattr(streaming, "_BATCH", 64)
    monkeypatch.setattr(local_files, "_NOTE_BYTES", 64)


def names(directory):
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.parametrize(
    ("to", "below"),
    [
        ("safetensors", ""),
        ("safetensors", "a.safetensors"),
        ("torch", "checkpoint.json"),
        ("dcp", "d"),
    ],
)
@pytest.mark.parametrize("linked", [False, True])
def test_nothing_is_written_into_the_checkpoint_that_is_exported(
    tmp_path, place, to, below, linked
):
    given = place
    if linked:
        given = tmp_path / "link"
        given.symlink_to(place)
    before = names(place)
    with pytest.raises(
        errors.OptionError,
        match=r"is inside the checkpoint that is exported, .*choose another place",
    ):
        shardckpt.export(place, given / below, to=to, overwrite=True)
    assert names(place) == before
    assert shardckpt.open(place).names() == ["a", "b"]


@pytest.mark.parametrize(
    ("before", "after"),
    [(None, 100), (100, None), (20, 100)],
    ids=["one-many", "many-one", "more-fewer"],
)
def test_a_directory_holds_one_model_and_another_one_is_replaced_as_a_whole(
    tmp_path, place, before, after
):
    """Loaders take `model.safetensors` before an index, or every file that they find: the old
    model, or both."""
    saved(tmp_path / "other", {name: -array for name, array in STATE.items()})
    out = tmp_path / "out"
    shardckpt.export(tmp_path / "other", out, max_shard_size=before)
    (out / "config.json").write_text("{}")
    held = names(out)
    with pytest.raises(errors.AlreadyExistsError, match=r"(is|holds another model: .* is) there"):
        shardckpt.export(place, out, max_shard_size=after)
    assert names(out) == held
    report = shardckpt.export(place, out, max_shard_size=after, overwrite=True)
    assert names(out) == sorted([*report.files, "config.json"])
    arrays = {}
    for file in out.glob("*.safetensors"):
        arrays |= safetensors.numpy.load_file(file)
    assert {name: array.tobytes() for name, array in arrays.items()} == {
        name: array.tobytes() for name, array in STATE.items()
    }


@pytest.mark.parametrize(
    ("to", "name", "words"),
    [
        ("safetensors", "a.pt", r"a file of torch, .*to='torch', or choose .* \.safetensors, or"),
        ("torch", "a.safetensors", r"a file of safetensors, .*to='safetensors', or .* in \.pt\."),
        ("torch", "a.gguf", r"a file of another format \(\.gguf\), .* ends in \.pt\."),
        ("dcp", "a.pt", r"a file of torch, .*to='torch', or choose a name without \.pt for"),
        ("orbax", "a.safetensors", r"a file of safetensors, .* without \.safetensors for"),
        ("peft", "a.bin", r"a file of torch, and the format is peft; .* without \.bin for the dir"),
        ("peft", "a.safetensors", r"a file of safetensors, .* without \.safetensors for"),
    ],
)
def test_a_name_of_another_formats_file_is_refused(tmp_path, place, to, name, words):
    with pytest.raises(errors.OptionError, match=f"{name} is named like {words}"):
        shardckpt.export(place, tmp_path / name, to=to)
    assert names(tmp_path) == ["c"]


@pytest.mark.parametrize("to", [["torch"], np.arange(2), None, "gguf"])
def test_what_is_no_format_is_refused(tmp_path, place, to):
    with pytest.raises(errors.OptionError, match=r"to=.*: give 'safetensors', 'peft', 'torch'"):
        shardckpt.export(place, tmp_path / "a", to=to)


@pytest.mark.parametrize("to", ["safetensors", "peft", "torch", "dcp", "canonical-delta"])
def test_an_option_that_there_is_not_is_refused(tmp_path, place, to):
    with pytest.raises(errors.OptionError, match=f"to='{to}' does not have the option foo=; leave"):
        shardckpt.export(place, tmp_path / "a", to=to, foo=1)


@pytest.mark.parametrize("name", ["last.ckpt", "step.5"])
@pytest.mark.parametrize(("to", "sign"), [("dcp", ".metadata"), ("orbax", "_METADATA")])
def test_a_directory_of_dcp_or_orbax_may_have_a_suffix(tmp_path, place, name, to, sign):
    shardckpt.export(place, tmp_path / name, to=to)
    assert (tmp_path / name / sign).is_file()


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize(("one", "other"), [(None, 100), (100, None)], ids=["one", "many"])
def test_a_model_that_appears_during_an_export_is_the_only_one_or_is_replaced(
    tmp_path, place, one, other, overwrite
):
    out, begun = tmp_path / "out", []

    def copy_another(_done, _total):
        if not begun:
            begun.append(shardckpt.export(place, tmp_path / "other", max_shard_size=other).files)
            shutil.copytree(tmp_path / "other", out, dirs_exist_ok=True)

    options = {"max_shard_size": one, "overwrite": overwrite, "progress": copy_another}
    if overwrite:
        report = shardckpt.export(place, out, **options)
        assert names(out) == sorted(report.files)
    else:
        with pytest.raises(errors.AlreadyExistsError, match="holds another model"):
            shardckpt.export(place, out, **options)
        assert names(out) == sorted(*begun)


@pytest.mark.parametrize(("one", "other"), [(None, 100), (100, None)], ids=["one", "many"])
def test_an_export_of_one_file_and_one_of_several_share_their_progress(
    tmp_path, place, small, one, other
):
    """Else the drafts of an interrupted export stay for ever beside the model of the other one."""
    out = tmp_path / "out"

    def interrupted(done, _total):
        if done:
            with pytest.raises(errors.StorageError, match="another export is writing there"):
                shardckpt.export(place, out, max_shard_size=other, overwrite=True)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        shardckpt.export(place, out, max_shard_size=one, progress=interrupted)
    assert names(out) == [".model.safetensors.partial"]
    report = shardckpt.export(place, out, max_shard_size=other, overwrite=True)
    assert names(out) == sorted(report.files)


@pytest.mark.parametrize(
    ("to", "others"),
    [
        ("dcp", "my_notes.txt"),
        ("dcp", "step_2/a.bin"),
        ("dcp", "common.pt"),
        ("dcp", "__0_0.distcp.old"),
        ("orbax", "my_notes.txt"),
        ("orbax", "step_2/_METADATA"),
        ("orbax", "default/d/0"),
        ("orbax", "other/zarr.json"),
        ("orbax", "step_2/w/zarr.json"),
        ("orbax", "d/mydata.txt"),
    ],
)
def test_a_directory_that_holds_more_than_an_earlier_export_is_not_replaced(
    tmp_path, place, to, others
):
    out = tmp_path / "out"
    shardckpt.export(place, out, to=to)
    (out / others).parent.mkdir(parents=True, exist_ok=True)
    (out / others).write_text("mine")
    before = sorted(out.rglob("*"))
    with pytest.raises(errors.AlreadyExistsError, match=re.escape(others.partition("/")[0])):
        shardckpt.export(place, out, to=to, overwrite=True)
    assert sorted(out.rglob("*")) == before
    (out / others).unlink()
    if "/" in others:
        shutil.rmtree(out / others.partition("/")[0])
    shardckpt.export(place, out, to=to, overwrite=True)
    assert names(tmp_path) == ["c", "out"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_an_adapter_is_written_beside_its_base_model_which_stays(tmp_path, place, overwrite):
    """PEFT reads no other weights than `adapter_model.safetensors`."""
    out = tmp_path / "out"
    shardckpt.export(place, out, max_shard_size=100)
    base = {path.name: path.read_bytes() for path in out.iterdir()}
    adapters = {"default": {"config": {"r": 1}, "keys": {}, "computed": []}}
    state = {"model": {"q.lora_A.default.weight": STATE["a"]}}
    options = shardckpt.SaveOptions(metadata={"peft": adapters})
    shardckpt.save(tmp_path / "adapter", state, options=options)
    shardckpt.export(tmp_path / "adapter", out, to="peft", overwrite=overwrite)
    assert names(out) == sorted([*base, "adapter_config.json", "adapter_model.safetensors"])
    assert {name: (out / name).read_bytes() for name in base} == base


def test_what_other_exports_have_left_is_not_taken_for_ones_own(tmp_path, place):
    others = [
        tmp_path / name for name in (".model.safetensors.partial", ".model.old.0123abcd.partial")
    ]
    own = tmp_path / ".model.0123abcd.partial"
    for directory in (*others, own):
        directory.mkdir()
        (directory / "0").write_bytes(b"half")
    shardckpt.export(place, tmp_path / "model", to="dcp")
    assert [directory.exists() for directory in (*others, own)] == [True, True, False]


def test_what_a_killed_export_of_another_form_left_under_a_name_is_removed(tmp_path, place):
    directory, file = tmp_path / ".model.0123abcd.partial", tmp_path / ".state.0123abcd.partial"
    directory.mkdir()
    for path in (directory / "0", file):
        path.write_bytes(b"half")
    shardckpt.export(place, tmp_path / "model", to="torch")
    shardckpt.export(place, tmp_path / "state", to="dcp")
    assert names(tmp_path) == ["c", "model", "state"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_file_does_not_take_the_place_of_finished_directories_beside_it(
    tmp_path, place, overwrite
):
    left = [".model.0123abcd.complete", ".model.0123abcd.replaced"]
    for name in left:
        (tmp_path / name).mkdir()
    shardckpt.export(place, tmp_path / "model", to="torch", overwrite=overwrite)
    assert names(tmp_path) == [*left, "c", "model"]


def test_a_directory_that_was_about_to_be_replaced_is_brought_back(tmp_path, place):
    out, replaced, draft = (
        tmp_path / "d",
        tmp_path / ".d.0123abcd.replaced",
        tmp_path / ".d.0123abcd.partial",
    )
    shardckpt.export(place, out, to="dcp")
    before = names(out)
    out.rename(replaced)
    draft.mkdir()
    with pytest.raises(errors.AlreadyExistsError, match="is there already"):
        shardckpt.export(place, out, to="dcp")
    assert (names(tmp_path), names(out)) == (["c", "d"], before)


def test_a_directory_that_was_replaced_goes_when_its_successor_is_there(tmp_path, place):
    replaced = tmp_path / ".d.0123abcd.replaced"
    shardckpt.export(place, tmp_path / "d", to="dcp")
    replaced.mkdir()
    shardckpt.export(place, tmp_path / "d", to="dcp", overwrite=True)
    assert names(tmp_path) == ["c", "d"]


def test_the_draft_of_a_living_writer_and_what_it_replaces_stay(tmp_path, place):
    replaced, partial = tmp_path / ".d.0123abcd.replaced", tmp_path / ".d.0123abcd.partial"
    replaced.mkdir()
    partial.mkdir()
    fd = os.open(partial, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        shardckpt.export(place, tmp_path / "d", to="dcp")
    finally:
        os.close(fd)
    assert names(tmp_path) == sorted([replaced.name, partial.name, "c", "d"])


@pytest.mark.parametrize("to", ["torch", "dcp"])
@pytest.mark.parametrize("moment", ["before it", "while it looks"])
def test_an_export_keeps_its_draft_though_another_one_starts_before_it_is_locked(
    tmp_path, place, monkeypatch, to, moment
):
    lock = draft.lock_whole
    calls = []

    def lock_late(fd, path):
        calls.append(path)
        if len(calls) == 1 and moment == "while it looks":
            raise BlockingIOError
        if len(calls) == 1:  # the other export looks for drafts now, and finds this one unlocked
            shardckpt.export(place, tmp_path / "d", to=to, overwrite=True)
        lock(fd, path)

    monkeypatch.setattr(draft, "lock_whole", lock_late)
    shardckpt.export(place, tmp_path / "d", to=to, overwrite=True)
    assert names(tmp_path) == ["c", "d"]


@pytest.mark.parametrize(
    ("limit", "notes"),
    [
        (1, ("'a' and 1 more: larger than max_shard_size, so in a file of its own.",)),
        (50, ("'a': larger than max_shard_size, so in a file of its own.",)),
        (100, ()),
    ],
)
def test_a_note_says_that_tensors_are_larger_than_files_may_be(tmp_path, place, limit, notes):
    assert shardckpt.export(place, tmp_path / "out", max_shard_size=limit).notes == notes
