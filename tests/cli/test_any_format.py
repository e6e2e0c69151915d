"""Commands that look at checkpoints of other formats where they lie."""

from __future__ import annotations

import json
import pickle
import zipfile

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import torch
import torch.distributed.checkpoint as dcp
import zarr
from safetensors.numpy import save_file
from web_server import web_server

import shardckpt
from shardckpt import errors

WEIGHT = np.arange(96, dtype=np.float32).reshape(8, 12)
TORCH = {"model": {"layer.weight": torch.arange(96, dtype=torch.float32).reshape(8, 12)}, "step": 3}


def _safetensors(place):
    place.mkdir()
    save_file({"layer.weight": WEIGHT}, place / "model.safetensors")


def _orbax(place):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(place, {"model": {"layer": {"weight": jnp.asarray(WEIGHT)}}})


def _zarr(place, version):
    group = zarr.open_group(place, mode="w", zarr_format=version)
    group.create_array("layer/weight", data=WEIGHT, chunks=(4, 6))


WRITERS = {
    "safetensors": _safetensors,
    "torch": lambda place: torch.save(TORCH, place),
    "dcp": lambda place: dcp.save(TORCH, checkpoint_id=place),
    "orbax": _orbax,
    "zarr2": lambda place: _zarr(place, 2),
    "zarr": lambda place: _zarr(place, 3),
}


# Warnings of torch about the storages that it writes.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


@pytest.fixture(params=WRITERS)
def foreign(request, tmp_path):
    """A checkpoint that another library has written, and the name of its format."""
    place = tmp_path / ("others.pt" if request.param == "torch" else "of others")
    WRITERS[request.param](place)
    return place, request.param.rstrip("2")


def test_info_shows_the_tree_of_every_format(run, foreign):
    place, name = foreign
    answer = run("info", place)
    assert (answer.status, answer.err) == (0, "")
    assert f"format      {name}, read in place" in answer.out
    assert "8×12" in answer.out
    assert "float32" in answer.out
    assert "host" not in answer.out
    doc = run("info", place, "--json").json
    assert (doc["format"], doc["parameters"]["model"]) == (name, 96)


def test_info_of_a_tensor_shows_its_facts(run, foreign):
    place, _ = foreign
    (tensor,) = run("info", place, "--json").json["tensors"]
    answer = run("info", place, tensor["name"])
    assert answer.status == 0
    assert "shape       8×12" in answer.out
    assert run("info", place, tensor["name"], "--json").json["tensorstore"] is None


def test_verify_reads_everything_and_never_says_ok(run, foreign):
    place, _ = foreign
    answer = run("verify", place)
    assert answer.status == 0
    assert answer.out.startswith("complete and readable; ")
    assert "checksums" in answer.out
    doc = run("verify", place, "--json").json
    assert (doc["ok"], doc["checked"], doc["complete"], doc["damage"]) == (False, False, True, [])


def test_diff_compares_formats_with_each_other(run, foreign, tmp_path):
    place, _ = foreign
    assert run("diff", place, place).status == 0
    save_file({"layer.weight": WEIGHT + (WEIGHT == 5)}, tmp_path / "other.safetensors")
    if place.is_dir() and (place / "model.safetensors").exists():
        answer = run("diff", place, tmp_path / "other.safetensors")
        assert answer.status == 1
        assert "1 of 96  by up to 1, first at [0, 5]" in answer.out


def test_stats_are_those_of_numpy(run, foreign):
    place, _ = foreign
    (one,) = run("stats", place, "--json").json["tensors"]
    assert (one["min"], one["max"], one["mean"], one["zeros"]) == (0, 95, 47.5, 1)
    assert one["std"] == pytest.approx(WEIGHT.std())
    assert one["norm"] == pytest.approx(np.linalg.norm(WEIGHT))
    assert "norm" in run("stats", place).out


def test_plan_shows_what_an_import_would_do(run, foreign):
    place, name = foreign
    answer = run("plan", place, "--mesh", "x=2", "--rule", "**=(x)", "--rate", "1GiB", width=120)
    assert answer.status == 0
    assert f"1 tensor, 384 B, in the format {name}" in answer.out
    assert (
        run("plan", place, "--mesh", "x=2", "--rule", "**=(x)", "--json").json["source"]["format"]
        == name
    )


def test_ls_names_the_format_and_its_signs(run, foreign):
    place, name = foreign
    (entry,) = run("ls", place.parent, "--json").json["foreign"]
    assert (entry["name"], entry["format"]) == (place.name, name)
    assert name in run("ls", place).out


def test_a_directory_of_steps_says_which_to_give_and_ls_lists_them(run, tmp_path):
    for step in (100, 200):
        _orbax(tmp_path / "orbax" / f"{step}")
        dcp.save(TORCH, checkpoint_id=tmp_path / "dcp" / f"{step}")
    answer = run("info", tmp_path / "orbax")
    assert (answer.status, answer.out) == (3, "")
    assert (
        "steps of a CheckpointManager: 100, 200. Give one of them, for example "
        f"{tmp_path}/orbax/200." in answer.err
    )
    names = {"orbax": [".", "100", "200"], "dcp": ["100", "200"]}
    assert {
        name: [one["name"] for one in run("ls", tmp_path / name, "--json").json["foreign"]]
        for name in names
    } == names
    answer = run("info", tmp_path / "dcp")
    assert (answer.status, answer.out) == (3, "")
    assert f"`shardckpt ls {tmp_path}/dcp` lists what is directly below it." in answer.err


def test_looking_at_a_pickle_calls_nothing_in_it(run, tmp_path):
    class Evil:
        def __reduce__(self):
            return exec, (f"open({str(tmp_path / 'ran')!r}, 'w')",)

    with zipfile.ZipFile(tmp_path / "evil.pt", "w") as archive:
        archive.writestr("evil/data.pkl", pickle.dumps({"w": Evil()}, 2))
        archive.writestr("evil/version", "3\n")
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(Evil()))
    (tmp_path / "dcp" / "__0_0.distcp").write_bytes(b"x")
    for command in ("info", "verify", "stats"):
        assert run(command, tmp_path / "dcp").status == 4
        assert run(command, tmp_path / "evil.pt").status == 0
    assert "__reduce__" not in run("info", tmp_path / "evil.pt").out
    assert "notes       " in run("info", tmp_path / "evil.pt").out
    assert not (tmp_path / "ran").exists()


def test_damage_in_a_torch_file_is_found_by_its_crc(run, tmp_path):
    place = tmp_path / "model.pt"
    torch.save({"w": torch.ones(5_000_000), "b": torch.zeros(3)}, place)
    data = bytearray(place.read_bytes())
    data[len(data) // 2] ^= 1
    place.write_bytes(data)
    answer = run("verify", place)
    assert answer.status == 1
    assert "CRC-32" in answer.out
    (damage,) = run("verify", place, "--json").json["damage"]
    assert damage["tensor"] == "w"


def test_the_progress_of_a_verification_counts_tensors_that_are_compared_with_their_crc(tmp_path):
    tensors = {f"w{i}": torch.full((1000,), float(i)) for i in range(4)}
    torch.save(tensors, tmp_path / "model.pt")
    calls = []
    checkpoint = shardckpt.open(tmp_path / "model.pt")
    report = checkpoint.verify(progress=lambda done, total: calls.append((done, total)))
    assert report.compared == len(tensors)
    assert calls == [(i, 4) for i in range(5)]


def test_a_part_that_is_missing_is_damage(run, tmp_path):
    group = zarr.open_group(tmp_path / "z", mode="w")
    group.create_array("w", data=np.ones((40, 40)), chunks=(10, 10), compressors=None)
    (chunk, *_) = sorted(path for path in (tmp_path / "z" / "w" / "c").rglob("*") if path.is_file())
    chunk.write_bytes(chunk.read_bytes()[:100])
    answer = run("verify", tmp_path / "z")
    assert answer.status == 1
    assert answer.out.startswith("damaged")


def test_a_model_of_the_hub_cache_is_its_main_snapshot(run, tmp_path):
    model = tmp_path / "models--lab--tiny"
    for revision, value in (("aaaa", 1), ("bbbb", 2)):
        (model / "snapshots" / revision).mkdir(parents=True)
        save_file({"w": np.full(3, value)}, model / "snapshots" / revision / "model.safetensors")
    (model / "refs").mkdir()
    answer = run("info", model)
    assert answer.status == 4
    assert "holds 2 snapshots of a model (aaaa, bbbb); give the path of one of them" in answer.err
    with pytest.raises(errors.FormatError, match="give the path of one of them"):
        shardckpt.import_checkpoint(model, tmp_path / "new", workers=1)
    (model / "refs" / "main").write_text("bbbb\n")
    shardckpt.import_checkpoint(model, tmp_path / "new", workers=1)
    assert (shardckpt.restore(tmp_path / "new")["w"] == 2).all()
    assert run("info", model, "--json").json["url"].endswith("/snapshots/bbbb")
    assert run("stats", model, "--json").json["all"]["max"] == 2


def test_runs_are_listed_with_their_newest_steps(run, saver, tmp_path):
    for name, steps in (("run-10", (1, 12)), ("run-9", (3,))):
        for step in steps:
            saver(tmp_path / name / f"step_{step}")
    (tmp_path / "start").mkdir()
    save_file({"w": np.ones(3)}, tmp_path / "start" / "model.safetensors")
    (tmp_path / "notes").mkdir()
    doc = run("ls", tmp_path, "--json").json
    assert [(one["run"], one["checkpoints"], one["last_step"]) for one in doc["runs"]] == [
        ("run-9", 1, 3),
        ("run-10", 2, 12),
    ]
    assert [(one["name"], one["format"]) for one in doc["foreign"]] == [("start", "safetensors")]
    lines = [line.split() for line in run("ls", tmp_path, width=100).out.splitlines()]
    assert lines[0] == ["run", "checkpoints", "last", "step", "stored", "last", "commit"]
    assert [line[:3] for line in lines[1:3]] == [["run-9", "1", "3"], ["run-10", "2", "12"]]
    assert lines[-1][:2] == ["start", "safetensors"]
    saver(tmp_path / "7")
    doc = run("ls", tmp_path, "--json").json
    assert [one["name"] for one in doc["checkpoints"]] == ["7"]
    assert [one["run"] for one in doc["runs"]] == ["run-9", "run-10"]


def test_hosts_are_hosts_after_a_reshard(run, saver, tmp_path):
    saver(tmp_path / "a", {f"w{i}": np.ones((1024, 512), np.float32) for i in range(8)})
    shardckpt.reshard(
        tmp_path / "a",
        tmp_path / "b",
        mesh=shardckpt.Mesh((2,), ("x",)),
        rules=["**=(x)"],
        dtype="float16",
        task_bytes="2MiB",
    )
    heading = run("info", tmp_path / "b").out
    assert "1 host, " in heading
    assert " parts, " in heading
    doc = run("info", tmp_path / "b", "--json").json
    assert doc["processes"] == 1
    assert doc["hosts"] > 1


def test_a_tokenizer_is_named_and_not_printed_in_base64(run, tmp_path):
    (tmp_path / "hf").mkdir()
    save_file({"w": np.ones(3)}, tmp_path / "hf" / "model.safetensors")
    (tmp_path / "hf" / "tokenizer.json").write_text(json.dumps({"vocab": list(range(500))}))
    out = run("info", tmp_path / "hf").out
    assert "hf_files = tokenizer.json\n" in out


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "{",
        '{"node_type": "thing"}',
        '{"node_type": "group", "consolidated_metadata": {"metadata": {"a": 3}}}',
        "1" * 5000,
    ],
)
def test_zarr_metadata_that_is_no_metadata_is_an_error(run, tmp_path, text):
    (tmp_path / "z").mkdir()
    (tmp_path / "z" / "zarr.json").write_text(text)
    answer = run("info", tmp_path / "z")
    assert answer.status == 4
    assert str(tmp_path) in answer.err


def test_zarr_groups_in_a_circle_end(run, tmp_path):
    (tmp_path / "z").mkdir()
    (tmp_path / "z" / "zarr.json").write_text('{"node_type": "group", "zarr_format": 3}')
    (tmp_path / "z" / "again").symlink_to(tmp_path / "z")
    answer = run("info", tmp_path / "z")
    assert (answer.status, answer.out.splitlines()[2]) == (0, "holds       0 tensors, 0 B")


def test_zarr_groups_that_are_nested_without_end_are_an_error(run, tmp_path):
    member = {"node_type": "group", "zarr_format": 3}
    members = {"/".join(["g"] * depth): member for depth in range(1, 80)}
    (tmp_path / "z").mkdir()
    (tmp_path / "z" / "zarr.json").write_text(
        json.dumps(member | {"consolidated_metadata": {"metadata": members}})
    )
    answer = run("info", tmp_path / "z")
    assert answer.status == 4
    assert "64 groups in each other" in answer.err


def test_a_zarr_chunk_that_fits_no_memory_is_an_error(run, tmp_path):
    zarr.create_array(tmp_path / "z", shape=(1 << 36,), chunks=(1 << 36,), dtype="int8")
    (tmp_path / "z" / "c").mkdir()
    (tmp_path / "z" / "c" / "0").write_bytes(b"short")
    shown = run("verify", tmp_path / "z")
    assert shown.status in (1, 8)
    assert "a chunk has 64 GiB, and" in shown.out + shown.err


def test_zarr_arrays_of_texts_are_left_behind_with_a_note(tmp_path):
    group = zarr.open_group(tmp_path / "z", mode="w")
    group.create_array("w", data=np.ones(3))
    group.create_array("names", shape=(2,), dtype="str")
    report = shardckpt.import_checkpoint(tmp_path / "z", tmp_path / "c")
    assert any("left behind: names" in note for note in report.notes)
    assert (shardckpt.restore(tmp_path / "c")["w"] == 1).all()


def test_a_save_that_was_never_committed_and_a_deleted_checkpoint_are_no_other_format(
    run, saver, tmp_path
):
    saver(tmp_path / "1")
    assert run("rm", tmp_path / "1", "--yes").status == 0
    answer = run("info", tmp_path / "1")
    assert answer.status == 3
    assert "import" not in answer.err


def test_a_web_server_that_lists_nothing_is_asked_for_files_and_zarr(run, tmp_path):
    save_file({"w": np.ones(3)}, tmp_path / "model.safetensors")
    _zarr(tmp_path / "z", 3)
    zarr.consolidate_metadata(tmp_path / "z")
    (tmp_path / "empty").mkdir()
    with web_server(tmp_path) as server:
        assert (
            run("info", f"{server.url}/model.safetensors", "--json").json["format"] == "safetensors"
        )
        assert run("verify", f"{server.url}/z", "--json").json["complete"]
        answer = run("info", f"{server.url}/empty")
        for from_ in ("zarr", "auto"):
            to = tmp_path / f"from_{from_}"
            shardckpt.import_checkpoint(f"{server.url}/z", to, from_=from_, workers=1)
            assert np.array_equal(shardckpt.restore(to)["layer"]["weight"], WEIGHT)
    assert answer.status == 3
    assert "give the url of a file" in answer.err


def test_a_directory_of_loose_files_lists_what_lies_below_it_too(run, tmp_path):
    save_file({"w": np.ones(3)}, tmp_path / "model.safetensors")
    torch.save({"w": torch.ones(2)}, tmp_path / "state.pt")
    (tmp_path / "older").mkdir()
    save_file({"w": np.ones(3)}, tmp_path / "older" / "model.safetensors")
    entries = run("ls", tmp_path, "--json").json["foreign"]
    assert [(one["name"], one["format"]) for one in entries] == [
        (".", "safetensors"),
        ("older", "safetensors"),
        ("state.pt", "torch"),
    ]
