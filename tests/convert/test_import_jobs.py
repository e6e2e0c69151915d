"""An import is a job like a reshard: killed and resumed, by several workers, within its memory,
from any storage."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import zarr
from paths import CHILDREN
from safetensors.numpy import save, save_file
from web_server import web_server

import shardckpt
from shardckpt import Mesh, errors
from shardckpt.convert.files.file_version import FileVersion
from shardckpt.convert.formats.safetensors import source as from_safetensors
from shardckpt.io.store import Store
from shardckpt.reshard import job
from shardckpt.streaming.memory import PROCESS_BYTES

if TYPE_CHECKING:
    from pathlib import Path

    from emulators import Emulator
    from numpy.typing import NDArray

PATIENCE = 60
MiB = 1 << 20
JOB: dict[str, Any] = {
    "call": "import_checkpoint",
    "mesh": "x=3",
    "rules": ["*=(None,x)"],
    "task_bytes": "512KiB",
    "into": None,
}


def state() -> dict[str, NDArray[np.uint32]]:
    """8 MiB in two tensors; 16 tasks."""
    elements = np.random.default_rng(0).integers(0, 1 << 32, 1 << 21, np.uint32)
    return {
        "a": elements[: 1 << 20].reshape(1024, 1024),
        "b": elements[1 << 20 :].reshape(512, 2048),
    }


@pytest.fixture
def source(tmp_path: Path) -> Path:
    save_file(state(), tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def same(target: Path | str) -> None:
    restored = shardckpt.restore(target)
    assert {name: array.tobytes() for name, array in restored.items()} == {
        name: array.tobytes() for name, array in state().items()
    }
    assert shardckpt.open(target).verify().ok


def records(place: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in place.glob("*/records/*.json")}


def test_an_import_that_is_killed_goes_on_where_it_was(source: Path, tmp_path: Path) -> None:
    target, before = tmp_path / "out", (source.read_bytes(), source.stat().st_mtime_ns)
    arguments = json.dumps({"src": str(source), "dst": str(target), **JOB, "workers": 2})
    command = [sys.executable, CHILDREN / "reshard_job.py", arguments]
    job = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + PATIENCE
    while len(records(target)) < 3 and job.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.002)
    job.kill()
    job.communicate(timeout=PATIENCE)
    finished = records(target)
    assert finished
    if job.returncode:
        with pytest.raises(errors.UncommittedError):
            shardckpt.open(target)

    options = {name: value for name, value in JOB.items() if name not in ("call", "mesh")}
    report = shardckpt.import_checkpoint(
        source, target, mesh=Mesh((3,), ("x",)), workers=1, **options
    )

    assert len(finished) <= report.done_before <= report.tasks
    assert finished.items() <= records(target).items()
    same(target)
    assert (source.read_bytes(), source.stat().st_mtime_ns) == before


def test_one_process_opens_its_source_once_and_plans_once(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def counted(module: Any, name: str) -> None:
        function = getattr(module, name)
        monkeypatch.setattr(
            module, name, lambda *given, **named: calls.append(name) or function(*given, **named)
        )

    counted(from_safetensors, "open_foreign")
    counted(job, "plan_reshard")
    shardckpt.import_checkpoint(source, tmp_path / "out", workers=1)
    assert calls == ["open_foreign", "plan_reshard"]
    same(tmp_path / "out")


def test_workers_that_others_start_meet_in_one_attempt(source: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"task_bytes": "1MiB", "workers": 1}
    reports = [
        shardckpt.import_checkpoint(source, tmp_path / "out", worker=(k, 2), **options)
        for k in (1, 0)
    ]
    assert len({report.attempt for report in reports}) == 1
    (outcome,) = shardckpt.commit(tmp_path / "out")
    assert outcome.state == "committed"
    same(tmp_path / "out")


@pytest.mark.long
def test_a_tensor_much_larger_than_the_limit_is_imported_within_it(tmp_path: Path) -> None:
    # Primes: hardly a border of the new chunks is one of the rows that are read at once.
    shape = [8209, 8191]
    nbytes = 4 * shape[0] * shape[1]
    header = json.dumps(
        {"w": {"dtype": "F32", "shape": shape, "data_offsets": [0, nbytes]}}
    ).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + nbytes)
    options: dict[str, Any] = {
        "src": str(tmp_path),
        "dst": str(tmp_path / "out"),
        "mesh": "x=5",
        "rules": ["w=(None,x)"],
        "memory_limit": 64 * MiB,
    }
    command = [
        sys.executable,
        CHILDREN / "reshard_memory.py",
        json.dumps({"call": "import_checkpoint", **options}),
    ]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert finished.returncode == 0, finished.stderr
    took = json.loads(finished.stdout)
    assert took["bytes"] == nbytes > 64 * MiB + PROCESS_BYTES
    assert took["peak"] <= 64 * MiB + PROCESS_BYTES
    assert took["read"] == nbytes, "each byte is read once"


def test_a_limit_that_does_not_suffice_is_refused_with_both_numbers(
    source: Path, tmp_path: Path
) -> None:
    with pytest.raises(
        errors.BudgetError,
        match=r"memory_limit=4 MiB is too little for 1 worker: .* each needs .* "
        r"raise it to \d+ MiB",
    ):
        shardckpt.import_checkpoint(source, tmp_path / "out", memory_limit="4MiB")
    assert not (tmp_path / "out").exists()


def test_a_bucket_is_read_by_ranges_and_a_file_that_was_replaced_there_is_an_error(
    cloud: Emulator, tmp_path: Path
) -> None:
    bucket = Store.open(cloud.url("imports"))
    bucket.write("hf/model.safetensors", save(state()))
    bucket.write("hf/config.json", b'{"model_type": "llama"}')
    report = shardckpt.import_checkpoint(cloud.url("imports", "hf"), tmp_path / "out", workers=1)
    same(tmp_path / "out")
    assert shardckpt.open(tmp_path / "out").metadata == {"config.json": {"model_type": "llama"}}
    assert report.read_bytes == 8 * MiB
    one = shardckpt.import_checkpoint(
        cloud.url("imports", "hf", "model.safetensors"), cloud.url("imports", "out"), workers=1
    )
    assert one.committed
    same(cloud.url("imports", "out"))

    version = FileVersion(bucket, "hf/model.safetensors")
    version.require_length(len(save(state())))
    with pytest.raises(errors.FormatError, match="has more"):
        version.require_length(7)
    with pytest.raises(errors.FormatError, match="has fewer"):
        version.require_length(9 * MiB)
    assert version.read(0, 8).tobytes() == save(state())[:8]
    bucket.write("hf/model.safetensors", save({"a": np.zeros(9)}))
    for begin, end in ((0, 8), (8 * MiB, 8 * MiB + 1)):
        with pytest.raises(errors.ReplacedError, match="changed, replaced or deleted"):
            version.read(begin, end)


def zarr_group(place: Path, value: float) -> None:
    """Write all chunks of an array; after the first time, only chunks change."""
    exists = (place / "zarr.json").exists()
    group = zarr.open_group(place, mode="a")
    chunks = (128, 1024)
    array = (
        group["w"]
        if exists
        else group.create_array("w", shape=(1024, 1024), chunks=chunks, dtype="f4")
    )
    array[:] = value


class StoppedError(Exception):
    pass


def test_a_zarr_group_whose_chunks_changed_is_imported_anew(tmp_path: Path) -> None:
    group, target = tmp_path / "group", tmp_path / "out"
    zarr_group(group, 1.0)
    shardckpt.import_checkpoint(group, target, workers=1)
    again = shardckpt.import_checkpoint(group, target, workers=1)
    assert (again.done_before, again.read_bytes) == (again.tasks, 0)
    zarr_group(group, 2.0)
    with pytest.raises(errors.AlreadyExistsError, match="another checkpoint"):
        shardckpt.import_checkpoint(group, target, workers=1)
    shardckpt.import_checkpoint(group, target, workers=1, overwrite=True)
    assert (shardckpt.restore(target)["w"] == 2.0).all()


def test_a_stopped_import_of_a_zarr_group_that_changes_starts_again(tmp_path: Path) -> None:
    group, target = tmp_path / "group", tmp_path / "out"
    zarr_group(group, 1.0)

    def stop(done: int, total: int) -> None:
        if done >= total // 4:
            raise StoppedError

    options: dict[str, Any] = {"workers": 1, "task_bytes": "512KiB"}
    with pytest.raises(StoppedError):
        shardckpt.import_checkpoint(group, target, progress=stop, **options)
    assert records(target)
    zarr_group(group, 2.0)
    report = shardckpt.import_checkpoint(group, target, **options)
    assert report.done_before == 0
    assert (shardckpt.restore(target)["w"] == 2.0).all()


def test_a_zarr_group_that_changes_during_its_import_is_an_error(tmp_path: Path) -> None:
    group, target = tmp_path / "group", tmp_path / "out"
    zarr_group(group, 1.0)
    with pytest.raises(errors.ReplacedError, match="group was changed, replaced or deleted"):
        shardckpt.import_checkpoint(
            group, target, workers=1, progress=lambda done, total: zarr_group(group, 2.0)
        )
    with pytest.raises(errors.UncommittedError):
        shardckpt.open(target)


def test_an_import_may_lie_below_its_source_and_other_files_there_do_not_count(
    tmp_path: Path,
) -> None:
    group = tmp_path / "group"
    zarr_group(group, 1.0)
    target, log = group / "imported", group / "import.log"

    def progress(done: int, total: int) -> None:
        log.write_text(f"{done} of {total}")

    shardckpt.import_checkpoint(group, target, workers=1, progress=progress)
    again = shardckpt.import_checkpoint(group, target, workers=1)
    assert (again.done_before, again.read_bytes) == (again.tasks, 0)


def test_a_note_says_that_chunks_on_a_web_server_are_not_compared(tmp_path: Path) -> None:
    zarr_group(tmp_path / "group", 1.0)
    with web_server(tmp_path) as server:
        report = shardckpt.import_checkpoint(f"{server.url}/group/w", tmp_path / "out")
    assert "a change of them goes unnoticed" in report.notes[-1]
    assert (shardckpt.restore(tmp_path / "out") == 1.0).all()
