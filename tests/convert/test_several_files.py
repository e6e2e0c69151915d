"""Several files and one that names them: the last one comes last, and what was there before is
whole or gone."""

from __future__ import annotations

import errno
import os
from contextlib import nullcontext
from pathlib import Path

import pytest
import safetensors.torch
from convert_states import random, saved, sharded

import shardckpt
from shardckpt import errors
from shardckpt.convert.files import local_files
from shardckpt.convert.files.local_files import LocalFiles
from shardckpt.convert.formats.safetensors.layout import lay_out
from shardckpt.convert.formats.safetensors.target import write_safetensors
from shardckpt.reading.naming.outputs import identity

NAMES = ["a.safetensors", "b.safetensors", "index.json"]
INDEX = b'{"weight_map": {}}'


def write(place, to, *, overwrite=False, **options):
    """Four tensors in two files, one of them without elements."""
    checkpoint = shardckpt.open(place)
    outputs = [identity(checkpoint.tensor(name)) for name in ("w", "v", "none", "s")]
    files = [lay_out(outputs[:3]), lay_out(outputs[3:])]
    return write_safetensors(
        checkpoint,
        files,
        LocalFiles(to, NAMES, overwrite=overwrite),
        limit=64 << 20,
        last=INDEX,
        **options,
    )


@pytest.fixture
def place(tmp_path):
    state = {
        "w": random((50, 40)),
        "v": random((3,), "bool", 1),
        "none": random((0, 4)),
        "s": random((), "float16", 2),
    }
    saved(tmp_path / "c", state)
    return tmp_path / "c"


def test_all_files_are_written_and_nothing_else_is_left(tmp_path, place):
    written = write(place, tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == NAMES
    assert sorted(safetensors.torch.load_file(tmp_path / "out" / "a.safetensors")) == [
        "none",
        "v",
        "w",
    ]
    assert safetensors.torch.load_file(tmp_path / "out" / "b.safetensors")["s"].shape == ()
    assert (tmp_path / "out" / "index.json").read_bytes() == INDEX
    assert written.written_bytes == sum(
        path.stat().st_size for path in (tmp_path / "out").iterdir()
    )


@pytest.mark.parametrize("there", NAMES)
def test_a_file_that_is_there_is_an_error_whichever_it_is(tmp_path, place, there):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / there).write_bytes(b"mine")
    with pytest.raises(errors.AlreadyExistsError, match=f"{there} is there already"):
        write(place, tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == [there]


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("dies_at", range(3))
def test_the_index_is_never_there_beside_files_that_it_does_not_mean(
    tmp_path, place, monkeypatch, overwrite, dies_at
):
    out = tmp_path / "out"
    if overwrite:
        out.mkdir()
        for name in NAMES:
            (out / name).write_bytes(b"old " + name.encode())
    links = []

    def link(*paths, really=os.link):
        state = {
            path.name: path.read_bytes()[:4] == b"old "
            for path in out.iterdir()
            if path.name in NAMES
        }
        assert "index.json" not in state or len(set(state.values())) == 1
        if len(links) == dies_at:
            raise KeyboardInterrupt
        links.append(paths)
        really(*paths)

    with monkeypatch.context() as patch:
        patch.setattr(os, "link", link)
        try:
            write(place, out, overwrite=overwrite)
        except KeyboardInterrupt:
            patch.undo()
            assert write(place, out, overwrite=overwrite).read_bytes == 0
    assert sorted(path.name for path in out.iterdir()) == NAMES
    assert (out / "index.json").read_bytes() == INDEX
    assert sorted(safetensors.torch.load_file(out / "a.safetensors")) == ["none", "v", "w"]


def test_an_export_killed_before_it_named_files_takes_none_of_an_older_model_of_equal_sizes(
    tmp_path, place, monkeypatch
):
    out = tmp_path / "out"
    state = {
        "w": random((50, 40), seed=7),
        "v": random((3,), "bool", 8),
        "none": random((0, 4)),
        "s": random((), "float16", 9),
    }
    saved(tmp_path / "old", state)
    write(tmp_path / "old", out)

    def stop(*_arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(local_files, "_NOTE_BYTES", 1)  # the index alone has as many
    with monkeypatch.context() as patch:
        patch.setattr(local_files, "read_back", stop)
        with pytest.raises(KeyboardInterrupt):
            write(place, out, overwrite=True)
    write(place, out, overwrite=True)
    weight = safetensors.torch.load_file(out / "a.safetensors")["w"].numpy()
    assert weight.tobytes() == random((50, 40)).tobytes()


def test_files_without_hard_links_are_replaced_by_one_rename_each(tmp_path, place, monkeypatch):
    out, renames = tmp_path / "out", []
    write(place, out)

    def replace(path, target, really=Path.replace):
        renames.append(Path(target).name)
        return really(path, target)

    def link(*_paths):
        raise PermissionError(errno.EPERM, "no hard links here")

    monkeypatch.setattr(os, "link", link)
    monkeypatch.setattr(Path, "replace", replace)
    monkeypatch.setattr(Path, "rename", replace)
    write(place, out, overwrite=True)
    assert (
        sorted(name for name in renames if name in NAMES)
        == NAMES
        == sorted(path.name for path in out.iterdir())
    )
    assert sum(not name.startswith("notes.") for name in renames) == len(NAMES)


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("named", [1, 2])
def test_an_export_that_was_stopped_while_it_named_files_is_continued_where_there_are_no_links(
    tmp_path, place, monkeypatch, named, overwrite
):
    out, renames = tmp_path / "out", []
    if overwrite:
        write(place, out)

    def stopped(path, target, really=Path.rename):
        if Path(target).name in NAMES:
            if len(renames) == named:
                raise KeyboardInterrupt
            renames.append(path)
        return really(path, target)

    def link(*_paths):
        raise PermissionError(errno.EPERM, "no hard links here")

    monkeypatch.setattr(os, "link", link)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", stopped)
        patch.setattr(Path, "replace", stopped)
        with pytest.raises(KeyboardInterrupt):
            write(place, out, overwrite=overwrite)
    assert (out / NAMES[0]).exists()
    assert not (out / NAMES[2]).exists()
    write(place, out, overwrite=overwrite)
    assert sorted(path.name for path in out.iterdir()) == NAMES


def test_an_export_stopped_while_it_names_files_goes_on_where_links_have_inodes_of_their_own(
    tmp_path, place, monkeypatch
):
    out = tmp_path / "out"

    def stopped(_draft, path, really=os.link):
        if Path(path).name == NAMES[1]:
            raise KeyboardInterrupt
        return really(_draft, path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "link", stopped)
        with pytest.raises(KeyboardInterrupt):
            write(place, out)
    monkeypatch.setattr(Path, "samefile", lambda _one, _other: False)
    write(place, out)
    assert sorted(path.name for path in out.iterdir()) == NAMES


def test_progress_tells_of_all_files(tmp_path, place):
    calls = []
    write(place, tmp_path / "out", progress=lambda done, total: calls.append((done, total)))
    assert calls[0] == (0, 8005)
    assert calls[-1] == (8005, 8005)


class FrontToBack:
    """Files that are only appended to, as uploads are, and stop after so many bytes."""

    in_order = True
    memory = 1 << 20

    def __init__(self, directory, stop_after=1 << 62):
        self.directory, self.stop_after = directory, stop_after

    def begin(self, plan):
        self.directory.mkdir(exist_ok=True)
        held = [self._size(number) for number in range(len(plan.sizes))]
        return next(
            (
                i
                for i, (_, file, runs) in enumerate(plan.blocks())
                if any(at + n > held[file] for at, n in runs)
            ),
            1 << 62,
        )

    def write(self, writes, checks):
        assert all(checks)
        for write in writes:
            have = self._size(write.file)
            assert have >= min(write.offset, have + len(write.data))
            new = write.data[max(0, have - write.offset) :]
            assert not new or max(write.offset, have) == have, "nothing is left out"
            self.stop_after -= len(new)
            if self.stop_after < 0:
                raise KeyboardInterrupt
            with (self.directory / str(write.file)).open("ab") as file:
                file.write(new)

    def publish(self, *, verify):
        assert verify

    def abort(self, *, keep):
        assert keep

    def _size(self, number):
        path = self.directory / str(number)
        return path.stat().st_size if path.exists() else 0


def test_files_can_be_written_front_to_back_and_gone_on_with(tmp_path):
    saved(
        tmp_path / "c",
        {"w": random((600, 500)), "v": random((40, 7, 9), "float64"), "s": random(())},
        {"w": sharded("a", "b")},
    )
    checkpoint = shardckpt.open(tmp_path / "c")
    outputs = [identity(checkpoint.tensor(name)) for name in ("w", "v", "s")]
    files = [lay_out(outputs[:2]), lay_out(outputs[2:])]
    for stop_after in (100, 30_000, 1 << 62):
        place = FrontToBack(tmp_path / "out", stop_after)
        with pytest.raises(KeyboardInterrupt) if stop_after < 1 << 62 else nullcontext():
            write_safetensors(
                shardckpt.open(tmp_path / "c"), files, place, limit=64 << 20, last=INDEX
            )
    assert (tmp_path / "out" / "2").read_bytes() == INDEX
    for number, names in enumerate((["v", "w"], ["s"])):
        tensors = safetensors.torch.load((tmp_path / "out" / str(number)).read_bytes())
        assert sorted(tensors) == names
        assert all(
            t.numpy().tobytes() == checkpoint.read(name).tobytes() for name, t in tensors.items()
        )
