"""Checkpoints on web servers are read by ranges, and only read."""

from __future__ import annotations

import json

import numpy as np
import pytest
from emulators import environment
from typer.testing import CliRunner
from web_server import web_server

import shardckpt
from shardckpt.cli.app import app
from shardckpt.errors import (
    FormatError,
    NotFoundError,
    OptionError,
    ShardckptError,
    StorageError,
    UrlError,
)
from shardckpt.io.store import Store

STATE = {
    "model": {"w é": np.arange(1 << 18, dtype=np.float32).reshape(512, 512), "b": np.arange(7)},
    "step": 3,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Checkpoints, one on another as its base."""
    folder = tmp_path_factory.mktemp("web")
    shardckpt.save(folder / "runs/1", STATE)
    shardckpt.export_safetensors(folder / "runs/1", folder / "model/model.safetensors")
    return folder


@pytest.fixture
def server(folder):
    with web_server(folder) as server, environment({"SHARDCKPT_RETRY_SECONDS": "1"}):
        yield server


def test_everything_that_reads_works(server, folder, tmp_path):
    url = f"{server.url}/runs/1"
    like = {"model": {"w é": np.zeros((512, 512), np.float32), "b": np.zeros(7, int)}, "step": 0}
    restored = shardckpt.restore(url, like)
    assert restored["step"] == 3
    assert np.array_equal(like["model"]["w é"], STATE["model"]["w é"])
    opened = shardckpt.open(url)
    before = server.sent
    assert np.array_equal(opened["model/w é"][64:128], STATE["model"]["w é"][64:128])
    assert server.sent - before < 2 * 64 * 512 * 4
    assert opened.verify().ok
    assert shardckpt.reshard(url, tmp_path / "r").committed
    shardckpt.export_safetensors(url, tmp_path / "out.safetensors")
    assert (tmp_path / "out.safetensors").read_bytes() == (
        folder / "model/model.safetensors"
    ).read_bytes()
    assert (
        shardckpt.safetensors_view(url).read() == (folder / "model/model.safetensors").read_bytes()
    )
    shardckpt.import_checkpoint(f"{server.url}/model/model.safetensors", tmp_path / "i")
    assert np.array_equal(shardckpt.open(tmp_path / "i")["model.b"][...], STATE["model"]["b"])
    for command in (["info", url], ["verify", url], ["diff", url, str(folder / "runs/1")]):
        answer = CliRunner().invoke(app, command)
        assert answer.exit_code == 0, answer.output


def test_what_is_not_there_is_said(server):
    with pytest.raises(NotFoundError, match=r"http://127.*/runs/2: no checkpoint there"):
        shardckpt.open(f"{server.url}/runs/2")


def test_writing_is_refused(server, folder, tmp_path):
    with pytest.raises(StorageError, match="web servers are read-only"):
        shardckpt.save(f"{server.url}/runs/2", {"w": np.zeros(3)})
    with pytest.raises(ShardckptError, match="written to a local disk"):
        shardckpt.export_safetensors(folder / "runs/1", f"{server.url}/new/model.safetensors")
    with pytest.raises(StorageError, match="web server"):
        shardckpt.reshard(folder / "runs/1", f"{server.url}/runs/3")
    assert not [method for method, *_ in server.asked if method not in ("GET", "HEAD")]


def test_headers_go_to_their_origin_and_not_on_with_a_redirect(server, folder):
    server.authorization = "Bearer secret"
    with web_server(folder) as other:
        with pytest.raises(StorageError, match="401"):
            shardckpt.open(f"{server.url}/runs/1")
        with environment({"SHARDCKPT_HTTP_HEADERS": f"{server.url} Authorization: Bearer secret"}):
            assert shardckpt.open(f"{server.url}/runs/1").verify().ok
            server.moved["/runs/1/"] = f"{other.url}/runs/1/"
            assert shardckpt.restore(f"{server.url}/runs/1")["step"] == 3
        assert other.asked
        assert {authorization for *_, authorization in other.asked} == {None}
    with (
        environment({"SHARDCKPT_HTTP_HEADERS": "Authorization: Bearer secret"}),
        pytest.raises(OptionError, match="an origin and a header"),
    ):
        shardckpt.open(f"{server.url}/runs/1")


def test_redirects_have_an_end(server):
    server.moved["/runs/1/"] = f"{server.url}/runs/1/"
    with pytest.raises(StorageError, match="more than 5 redirects"):
        shardckpt.open(f"{server.url}/runs/1")


def test_reads_that_are_redirected_use_their_connections_again(server, tmp_path):
    (tmp_path / "file").write_bytes(b"bytes")
    server.folder, server.moved = tmp_path, {"/old": f"{server.url}/file"}
    store = Store.open(server.url)
    for _ in range(5):
        assert store.read("old") == b"bytes"
        assert store.size("old") == 5
        assert not store.exists("another")
    assert server.connections == 1


def test_a_server_that_fails_for_a_moment_is_asked_again(server):
    server.failures += [503, 500]
    assert shardckpt.restore(f"{server.url}/runs/1")["step"] == 3


def test_a_server_without_ranges_is_refused(server):
    server.ranges = False
    with pytest.raises(StorageError, match="does not send ranges"):
        shardckpt.restore(f"{server.url}/runs/1")


@pytest.mark.parametrize("by", ["", "fsspec+"])
def test_a_file_of_any_length_that_the_server_claims_is_refused_as_on_a_disk(server, by):
    server.length = 10**15
    with pytest.raises(FormatError, match=r"has 10{15} bytes, at most"):
        shardckpt.open(f"{by}{server.url}/runs/1")


def test_without_an_etag_a_file_of_another_length_is_another_version(server, tmp_path):
    server.folder, server.version = tmp_path, None
    (tmp_path / "file").write_bytes(b"before")
    store = Store.open(server.url)
    data, version = store.read_versioned("file")
    assert data == b"before"
    assert {
        store.read_versioned("file", 2, 4)[1],
        store.read_into("file", 1, [memoryview(bytearray(3))]),
        store.change_token("file"),
    } == {version}
    (tmp_path / "file").write_bytes(b"afterwards")
    assert store.change_token("file") != version


@pytest.mark.parametrize(
    "url",
    ["http://", "http:///a", "https://user:secret@host/a", "http://host:port/a", "http://ho st/a"],
)
def test_odd_hosts_are_errors(url):
    with pytest.raises(UrlError, match="names no host"):
        shardckpt.open(url)


def test_stock_tensorstore_opens_the_array_there(server):
    import tensorstore as ts

    array = ts.open(
        json.loads(json.dumps(shardckpt.open(f"{server.url}/runs/1").stock_spec("model/b")))
    ).result()
    assert array.read().result().tolist() == list(range(7))
