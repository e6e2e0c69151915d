"""The client, and the commands that read through a service."""

import json

import ml_dtypes
import numpy as np
import pytest
from serving import serving
from typer.testing import CliRunner

import shardckpt
from shardckpt import Box, Client
from shardckpt.cli.app import app
from shardckpt.errors import (
    NamesMismatchError,
    NotFoundError,
    OptionError,
    ShapeMismatchError,
    StorageError,
    UrlError,
)
from shardckpt.serve import client as module
from shardckpt.serve.access.tokens import add_token


@pytest.fixture
def client(service):
    with Client(service.url) as opened:
        yield opened


def run(*args, status=0):
    result = CliRunner().invoke(app, [str(arg) for arg in args])
    assert result.exit_code == status, result.output
    return result.stdout + result.stderr


def test_it_asks_for_everything(client, runs, monkeypatch):
    monkeypatch.setattr(module, "_PAGE", 2)
    assert [one["run"] for one in client.runs()] == ["lab/llama", "lab/tiny-gpt"]
    assert [one["id"] for one in client.checkpoints()] == [
        "lab/llama/10",
        "lab/llama/20",
        "lab/llama/30",
        "lab/tiny-gpt/10",
    ]
    assert [
        one["step"]
        for one in client.checkpoints("lab/llama", metric="loss<2.5", order="descending")
    ] == [30, 20]
    assert client.checkpoint("lab/llama/10")["layout"] == "packed"
    local = shardckpt.open(runs / "llama" / "10")
    for box in (None, Box((1, 2), (5, 7))):
        elements = client.read("lab/llama/10", "model/head", box)
        assert elements.dtype == ml_dtypes.bfloat16
        assert np.array_equal(elements, local.read("model/head", box))
    assert client.read("lab/llama/10", "model/scale") == 10
    assert client.layout("lab/llama/10", "model/head")["text"] == "model over data=4 × model=2"
    assert client.statistics("lab/llama/10", "optimizer/count")["max"] == 299
    assert not client.diff("lab/llama/10", "lab/llama/20")["equal"]
    assert (
        client.plan("lab/llama/10", mesh="model=2", rule=["model/head=(model)"])["target"][
            "devices"
        ]
        == 2
    )
    assert np.array_equal(client.open("lab/llama/10").read("optimizer/count"), np.arange(300))


def test_keys_that_a_url_loses_name_the_tensor_that_was_asked_for(tmp_path):
    keys = (".", "..", "...", "a.", "~.", "~..", "")
    below = {key: {"w": np.full(1, n), ".": np.full(1, -n)} for n, key in enumerate(keys, 1)}
    state = {"w": np.zeros(1), "..": np.full(1, 9), "model": {"w": np.zeros(1), **below}}
    shardckpt.save(tmp_path / "run" / "1", state)
    opened = shardckpt.open(tmp_path / "run" / "1")
    with serving(("lab", tmp_path)) as service, Client(service.url) as client:
        for name in opened.names():
            assert client.read("lab/run/1", name) == opened.read(name), name
            assert client.layout("lab/run/1", name)["name"] == name
            assert client.statistics("lab/run/1", name)["max"] == opened.read(name)[0]


def test_errors_are_those_of_the_library(client, tmp_path, runs, monkeypatch):
    with pytest.raises(NotFoundError):
        client.checkpoint("lab/none")
    with pytest.raises(NamesMismatchError, match="did you mean"):
        client.layout("lab/llama/10", "model/haed")
    with pytest.raises(ShapeMismatchError):
        client.read("lab/llama/10", "model/head", Box((0, 0), (99, 1)))
    with pytest.raises(OptionError):
        list(client.checkpoints(metric="loss"))
    with (
        pytest.raises(StorageError, match="does not answer"),
        Client("http://127.0.0.1:9") as nobody,
    ):
        nobody.checkpoint("a")
    for url in ("ftp://x", "host", "http://", "http://user@host", "http://host/path"):
        with pytest.raises(UrlError):
            Client(url)
    token = add_token(tmp_path / "tokens", "ann", "read")
    with serving(("lab", runs), token_file=tmp_path / "tokens") as service:
        with (
            Client(service.url) as stranger,
            pytest.raises(StorageError, match="valid bearer token"),
        ):
            list(stranger.runs())
        with Client(service.url, token=token) as known:
            assert len(list(known.runs())) == 2
        monkeypatch.setenv("SHARDCKPT_HTTP_HEADERS", f"{service.url} Authorization: Bearer {token}")
        with Client(service.url) as known:
            assert len(list(known.runs())) == 2
            assert known.open("lab/llama/10").verify().ok
        for more in ((), ("--json",)):
            shown = run(
                "--server", service.url, "info", "lab/llama/10", "model/embed.weight", *more
            )
            assert "Authorization: …" in shown or "Authorization: \\u2026" in shown
            assert token not in shown


def test_a_list_of_runs_has_all_its_parts_and_none_is_said(service, tmp_path):
    document = json.loads(run("--server", service.url, "ls", "--json"))
    assert [one["run"] for one in document.pop("runs")] == ["lab/llama", "lab/tiny-gpt"]
    assert document == {"checkpoints": [], "foreign": []}
    with serving(("lab", tmp_path / "empty")) as other:
        assert run("--server", other.url, "ls") == f"no runs at {other.url}\n"


def test_commands_read_through_a_service(service, runs):
    at = ("--server", service.url)
    assert "lab/llama" in run(*at, "ls")
    assert "loss=3" in run(*at, "ls", "lab/llama")
    assert run(*at, "ls", "lab/llama", "--json") == run("ls", runs / "llama", "--json")
    assert "model" in run(*at, "info", "lab/llama/10")
    assert "64×48" in run(*at, "info", "lab/llama/10", "model/embed.weight")
    assert "chunks" in run(*at, "verify", "lab/llama/10")
    by_service, by_hand = (
        run(*args, status=1)
        for args in (
            (*at, "diff", "lab/llama/10", "lab/llama/20"),
            ("diff", runs / "llama" / "10", runs / "llama" / "20"),
        )
    )
    assert by_service == by_hand
    assert (
        run(*at, "fingerprint", "lab/llama/10").split()[0]
        == run("fingerprint", runs / "llama" / "10").split()[0]
    )
    assert "reshard" in run(
        *at,
        "plan",
        "lab/llama/10",
        "--mesh",
        "model=2",
        "--rule",
        "model/head=(model)",
        "--rate",
        "1GiB",
    )
    assert "did you mean" in run(*at, "info", "lab/llama/10", "model/haed", status=5)
    assert "the service has no such checkpoint, or your token may not read its root" in run(
        *at, "info", "lab/none", status=3
    )
    assert "there is no run 'nope'; `shardckpt --server" in run(*at, "ls", "nope", status=3)
    assert "/raw/ID" in run(*at, "rm", "lab/llama/10", status=2)
    with_limit = (*at, "diff", "lab/llama/10", "lab/llama/20", "--memory-limit", "1GiB")
    assert "has a limit of its own" in run(*with_limit, status=2)
    run(*at, "plan", "lab/llama/10", "--like", "lab/llama/20", "--rate", "1GiB")
