"""`shardckpt plan`."""

import re
import shutil

import numpy as np
import pytest

import shardckpt
from shardckpt import Mesh, PartitionSpec, SaveOptions, Sharding

MESH = Mesh((4, 2), ("data", "model"))
EVIL = "\x1b]0;owned\x07\n\u202eevil"


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    place = tmp_path_factory.mktemp("plan") / "a"
    state = {
        "embed": np.ones((1031, 256), np.float32),
        "layers": {"w": np.ones((600, 512), np.float32)},
        EVIL: np.ones(100, np.int32),
    }
    shardings = {
        "embed": Sharding(MESH, PartitionSpec("data")),
        "layers/w": Sharding(MESH, PartitionSpec("data", "model")),
    }
    shardckpt.save(place, state, options=SaveOptions(shardings=shardings))
    return place


OPTIONS = [
    "--mesh",
    "data=2,model=3",
    "--rule",
    "layers/*=(model,data)",
    "--rule",
    "embed=(None,model)",
    "--devices-per-host",
    "2",
]


def test_the_plan_says_what_is_read_and_written_and_what_it_rests_on(run, source):
    answer = run("plan", source, *OPTIONS, "--rate", "1GiB", width=110)
    assert answer.status == 0
    assert answer.err == ""
    costs = {line[:13].strip(): line.split() for line in answer.out.splitlines()}
    doc = run("plan", source, *OPTIONS, "--rate", "1GiB", "--json").json
    assert f"{doc['reshard']['requests']:,}" in costs["reshard"]
    assert f"{doc['restore']['requests']:,}" in costs["restore as is"]
    assert "6 devices on 3 hosts" in answer.out
    assert (
        "Each host is assumed to have 2 devices, in order of their ids (--devices-per-host)."
        in answer.out
    )
    assert "Reading at 1 GiB/s was given." in answer.out
    assert "dimension 0 is uneven" not in answer.out  # 600 rows in 3 parts
    assert "embed: dimension 1 is uneven: 256 in 3 parts (model=3)" in " ".join(answer.out.split())


@pytest.mark.parametrize(
    "options",
    [OPTIONS, ["--mesh", "x=2"], [*OPTIONS[:2], "--rule", "**=()", "--devices-per-host", "1"]],
)
def test_a_plan_fits_a_terminal_of_80_columns(run, source, options):
    lines = run("plan", source, *options).out.splitlines()
    assert max(len(line) for line in lines if not line.startswith("from ")) <= 80


def test_a_host_that_reads_nearly_nothing_as_stored_has_its_bar(run, tmp_path):
    zeros = {"w": np.zeros((2048, 2048), np.float32)}
    shardckpt.save(tmp_path / "a", zeros, options=SaveOptions(compression="zstd"))
    answer = run("plan", tmp_path / "a", "--compress", "none", "--rate", "1GiB")
    (bar,) = [line for line in answer.out.splitlines() if "host 0 " in line and "│" in line]
    assert bar.split("│")[0].strip() == "host 0"


def test_names_cannot_do_anything_to_the_terminal(run, source):
    answer = run("plan", source, *OPTIONS, "--rate", "1GiB")
    assert "\x1b" not in answer.out
    assert "\u202e" not in answer.out
    assert "\\x1b]0;owned\\x07\\n\\u202eevil" in answer.out


def test_a_destination_that_is_taken_is_told(run, source, tmp_path):
    answer = run("plan", source, source, *OPTIONS, "--rate", "1GiB")
    assert (
        "A checkpoint is there already; a reshard replaces it only with --overwrite."
        in " ".join(answer.out.split())
    )
    assert run("plan", source, source, *OPTIONS, "--rate", "1GiB", "--json").json["target"][
        "replaces"
    ]
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name, what in (("file", "a file is"), ("link", "a broken symbolic link is")):
        for command in ("plan", "reshard"):
            answer = run(command, source, tmp_path / name, "--mesh", "data=2")
            assert (
                answer.status,
                f"{tmp_path / name}: {what} at the place of the new checkpoint" in answer.err,
            ) == (6, True)
    assert "the source itself is there" in run("reshard", source, source, "--mesh", "data=2").err


def test_a_tensor_that_is_left_out_cannot_be_explained(run, source):
    answer = run("plan", source, "--mesh", "data=2", "--only", "layers/*", "--explain", "embed")
    assert answer.status == 5
    assert "--only does not select 'embed'" in answer.err


def test_the_document_has_everything_and_adds_up(run, source):
    doc = run("plan", source, *OPTIONS, "--rate", "1GiB,512MiB", "--json").json
    assert list(doc) == [
        "source",
        "target",
        "reshard",
        "restore",
        "restore_after",
        "pays_after_restores",
        "rates",
        "flow",
        "tensors",
        "conversions",
        "notices",
    ]
    assert (
        doc["target"]["hosts"],
        doc["target"]["devices_per_host"],
        doc["target"]["devices"],
    ) == (3, 2, 6)
    for key in ("restore", "restore_after"):
        assert sum(doc[key]["bytes_by_host"]) == doc[key]["bytes_read"]
        assert max(doc[key]["bytes_by_host"]) == doc[key]["largest_host"]
    assert sum(tensor["restore_bytes"] for tensor in doc["tensors"]) == doc["restore"]["bytes_read"]
    assert [sum(column) for column in zip(*doc["flow"]["bytes"], strict=True)] == doc["restore"][
        "bytes_by_host"
    ]
    assert doc["rates"]["write"] == {
        "bytes_per_second": 512 << 20,
        "sample_bytes": None,
        "sample_seconds": None,
    }
    costs = [tensor["restore_bytes"] for tensor in doc["tensors"]]
    assert costs == sorted(costs, reverse=True)
    assert {tensor["name"]: tensor["rule"] for tensor in doc["tensors"]}[
        "embed"
    ] == "embed=(None,model)"


def test_rates_are_measured_and_nothing_is_left_behind(run, source, tmp_path):
    before = sorted(path for path in source.rglob("*"))
    answer = run("plan", source, tmp_path / "new" / "b", *OPTIONS, "--json")
    rates = answer.json["rates"]
    assert rates["read"] is None  # too little to say anything about more
    assert rates["write"]["sample_bytes"] == 32 << 20
    assert answer.json["reshard"]["seconds"] is None
    out = " ".join(run("plan", source, *OPTIONS).out.split())
    assert (
        "The rates were not measured: there is too little to read, and no destination is named. "
        "Give --rate" in out
    )
    assert out.count("not measured") == 1
    assert list(tmp_path.iterdir()) == []
    assert sorted(path for path in source.rglob("*")) == before


def test_a_rate_that_cannot_be_measured_may_be_given(run, source, tmp_path):
    nowhere = "https://127.0.0.1:1/a"
    answer = run("plan", source, nowhere, *OPTIONS)
    assert answer.status == 6
    assert "cannot write" in answer.err
    assert "cannot delete" not in answer.err
    assert "To plan without a measurement, give --rate." in answer.err
    shutil.copytree(source, tmp_path / "damaged")
    for path in (tmp_path / "damaged").rglob("*"):
        if path.is_file() and path.stat().st_size > 200_000:
            path.write_bytes(bytes(path.stat().st_size))
    answer = run("plan", tmp_path / "damaged", *OPTIONS)
    assert answer.status == 4
    assert "To plan without a measurement, give --rate." in answer.err
    assert run("plan", tmp_path / "damaged", *OPTIONS, "--rate", "1GiB").status == 0


def test_explain_says_which_rule_decides_and_why(run, source):
    answer = run("plan", source, *OPTIONS, "--explain", "embed", width=100)
    lines = [" ".join(line.split()) for line in answer.out.splitlines()]
    assert "→ rule 2 embed=(None,model) matches its name" in lines
    assert lines[-2:] == ["now data", "then –, model"]
    doc = run("plan", source, *OPTIONS, "--explain", "embed", "--json").json
    assert doc["rule"] == "embed=(None,model)"
    assert doc["target_layout"] == {"axes": {"data": 2, "model": 3}, "spec": [None, "model"]}
    assert run("plan", source, *OPTIONS, "--explain", "embod").status == 5
    assert run("plan", source, *OPTIONS, "--explain", "embed", "--html", "x.html").status == 2
    assert "its recorded spec" in run("plan", source, "--mesh", "data=2", "--explain", "embed").out


def test_what_does_not_fit_in_memory_is_refused_with_both_numbers(run, source):
    answer = run("plan", source, *OPTIONS, "--memory-limit", "1MiB", "--json")
    assert answer.status == 8
    error = answer.json["error"]
    assert error["code"] == "memory"
    assert "--memory-limit 1MiB is too little" in error["message"]
    limit = re.search(r"raise it to (\d+) MiB", error["message"])[1]
    assert int(limit) > 1
    enough = run(
        "plan",
        source,
        *OPTIONS,
        "--memory-limit",
        f"{limit}MiB",
        "--workers",
        "1",
        "--rate",
        "1GiB",
        "--json",
    ).json
    assert enough["reshard"]["peak_memory"] <= int(limit) << 20


def test_the_page_is_written_where_it_is_asked_for(run, source, tmp_path):
    assert (
        run("plan", source, *OPTIONS, "--rate", "1GiB", "--html", tmp_path / "plan.html").status
        == 0
    )
    text = (tmp_path / "plan.html").read_text("utf-8")
    assert text.startswith("<!DOCTYPE html>")
    assert "http://" not in text
    assert "https://" not in text
    answer = run(
        "plan", source, *OPTIONS, "--rate", "1GiB", "--html", tmp_path / "missing" / "plan.html"
    )
    assert answer.status == 6
    assert "missing/plan.html" in answer.err


@pytest.mark.parametrize("rate", ["fast", "0", "1GiB,2GiB,3GiB", "-1"])
def test_a_rate_that_is_none_is_refused(run, source, rate):
    answer = run("plan", source, *OPTIONS, f"--rate={rate}")
    assert answer.status == 2
    assert "--rate" in answer.err


def test_a_plan_without_a_mesh_keeps_layouts(run, source):
    doc = run("plan", source, "--layout", "zarr", "--rate", "1GiB", "--json").json
    assert all(tensor["source_layout"] == tensor["target_layout"] for tensor in doc["tensors"])
    assert doc["target"]["layout"] == "zarr"
    assert doc["reshard"]["files"] == doc["reshard"]["chunks"]


def test_checkpoints_without_elements_or_tensors_have_a_plan(run, tmp_path):
    for name, state in {
        "none": {"step": 1},
        "empty": {"w": np.zeros((0, 4), np.float32), "s": np.array(1.5)},
    }.items():
        shardckpt.save(tmp_path / name, state)
        html = tmp_path / f"{name}.html"
        answer = run("plan", tmp_path / name, "--mesh", "x=2", "--html", html)
        assert (answer.status, answer.err) == (0, "")
        assert html.stat().st_size > 1000


def test_tensors_of_which_nobody_says_where_they_are_have_a_plan(run, tmp_path):
    replicated = shardckpt.OpSharding.parse("{replicated}")
    shardckpt.save(
        tmp_path / "a",
        {"w": np.ones((64, 64), np.float32)},
        options=SaveOptions(shardings={"w": replicated}),
    )
    answer = run("plan", tmp_path / "a", "--rate", "1GiB", "--html", tmp_path / "plan.html")
    assert (answer.status, answer.err) == (0, "")
    assert "1 device on 1 host" in answer.out
