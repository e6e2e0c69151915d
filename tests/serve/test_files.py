"""Files over HTTP, read by clients that know nothing of shardckpt."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from http.client import IncompleteRead
from urllib.request import Request, urlopen

import numpy as np
import pytest
import tensorstore as ts
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load
from serving import save_run, serving
from starlette.exceptions import HTTPException

import shardckpt
from shardckpt import SaveOptions
from shardckpt.errors import FormatError
from shardckpt.runs import pinning
from shardckpt.serve import hub, sources
from shardckpt.serve.options import ServeOptions
from shardckpt.serve.service import Service
from shardckpt.versions.folding import fold

FILE = "/files/lab/llama/10/model.safetensors"


@pytest.fixture(scope="module")
def exported(runs, tmp_path_factory):
    """The bytes of an export."""
    place = tmp_path_factory.mktemp("exported") / "model.safetensors"
    shardckpt.export_safetensors(runs / "llama" / "10", place)
    return place.read_bytes()


def test_a_file_has_the_bytes_of_an_export(service, exported):
    whole = service.ask(FILE)
    assert (whole.status, whole.body) == (200, exported)
    head = service.ask(FILE, "HEAD")
    assert (head.status, head.body, head.headers["content-length"]) == (
        200,
        b"",
        str(len(exported)),
    )
    assert head.headers["etag"] == whole.headers["etag"]
    assert head.headers["accept-ranges"] == "bytes"
    assert "/" not in head.headers["etag"]
    assert service.ask(FILE, If_None_Match=head.headers["etag"]).status == 304
    assert service.ask(FILE.replace("/10/", "/20/"), "HEAD").headers["etag"] != head.headers["etag"]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_ranges_are_those_of_the_file(service, exported, data):
    n = len(exported)
    first = data.draw(st.integers(0, n + 10))
    last = data.draw(
        st.none() | st.integers(0, n + 10) | st.sampled_from([2**63 - 1, 2**64, 10**30])
    )
    text = data.draw(
        st.sampled_from([f"bytes={first}-{'' if last is None else last}", f"bytes=-{first}"])
    )
    reply = service.ask(FILE, Range=text)
    if text.startswith("bytes=-"):
        begin, end = n - min(first, n), n
    elif last is not None and last < first:
        assert (reply.status, reply.body) == (200, exported)
        return
    else:
        begin, end = first, n if last is None else min(last + 1, n)
    if begin >= end:
        assert reply.status == 416
        assert reply.headers["content-range"] == f"bytes */{n}"
    else:
        assert (reply.status, reply.body) == (206, exported[begin:end])
        assert reply.headers["content-range"] == f"bytes {begin}-{end - 1}/{n}"


def test_a_range_is_of_the_file_that_was_begun(service, exported):
    tag = service.ask(FILE, "HEAD").headers["etag"]
    assert service.ask(FILE, Range="bytes=5-9", If_Range=tag).body == exported[5:10]
    for other in ('"other"', f"W/{tag}", "Mon, 23 Nov 2026 00:00:00 GMT"):
        assert service.ask(FILE, Range="bytes=5-9", If_Range=other).body == exported
    assert service.ask(FILE, If_Match=f'"other", {tag}', Range="bytes=5-9").body == exported[5:10]
    assert service.ask(FILE, If_Match="*", If_None_Match=tag).status == 304
    for other in ('"other"', f"W/{tag}", ""):
        for method in ("GET", "HEAD"):
            refused = service.ask(
                FILE, method, If_Match=other, Range="bytes=5-9", If_None_Match=tag
            )
            assert (refused.status, refused.headers["etag"]) == (412, tag)
    assert (
        service.ask(
            "/v1/checkpoints/lab/llama/10/tensors/model/head?format=raw", If_Match=tag
        ).status
        == 412
    )
    for odd in ("bytes=1-2,4-5", "lines=1-2", "bytes=a-b", "bytes=", "bytes=--1"):
        assert service.ask(FILE, Range=odd).status == 200


def test_options_split_convert_and_choose(service, runs, tmp_path):
    query = "?include=model/**&dtype=bfloat16&strip_prefix=model/"
    options = {"include": "model/**", "dtype": "bfloat16", "strip_prefix": "model/"}
    shardckpt.export_safetensors(runs / "llama" / "10", tmp_path / "m.safetensors", **options)
    assert service.ask(f"{FILE}{query}").body == (tmp_path / "m.safetensors").read_bytes()
    split = "?max_shard_size=8KiB"
    listed = [one["name"] for one in service.get(f"/files/lab/llama/10/{split}")["files"]]
    assert "model.safetensors.index.json" in listed
    assert len(listed) > 2
    index = service.get(f"/files/lab/llama/10/model.safetensors.index.json{split}")
    assert set(index["weight_map"].values()) == {
        name for name in listed if name.endswith(".safetensors")
    }
    for name in set(index["weight_map"].values()):
        assert service.ask(f"/files/lab/llama/10/{name}{split}").body[8:9] == b"{"
    assert service.get(f"{FILE}?include=nothing", 404)["code"] == "names"
    assert service.get(f"{FILE}?mapping=/etc/passwd", 400)["code"] == "option"
    assert service.get(f"{FILE}?rename=s/a/b/", 400)["code"] == "option"
    assert service.get(f"{FILE}?add_prefix=%ff", 400)["detail"].startswith(
        "the query is not valid UTF-8"
    )
    assert b'"\xc3\xbfmodel.head"' in service.ask(f"{FILE}?add_prefix=%c3%bf").body
    assert service.get("/files/lab/llama/10/other.bin", 404)["code"] == "not-found"


def test_curl_goes_on_where_it_was_cut_off(service, exported, tmp_path):
    curl = shutil.which("curl")
    if curl is None:  # the same by the standard library
        part = urlopen(Request(service.url + FILE, headers={"Range": "bytes=100-"})).read()
    else:
        (tmp_path / "m").write_bytes(exported[:100])
        subprocess.run(
            [curl, "-sf", "-C", "-", "-o", tmp_path / "m", service.url + FILE],
            check=True,
            timeout=200,
        )
        part = (tmp_path / "m").read_bytes()[100:]
    assert part == exported[100:]


def test_tensors_are_read_by_ranges_as_safetensors_describes_them(service, runs):
    def get(begin, end):
        return service.ask(FILE, Range=f"bytes={begin}-{end - 1}").body

    n = int.from_bytes(get(0, 8), "little")
    header = json.loads(get(8, 8 + n))
    begin, end = header["model.embed.weight"]["data_offsets"]
    expected = shardckpt.open(runs / "llama" / "10").read("model/embed.weight")
    assert get(8 + n + begin, 8 + n + end) == expected.tobytes()


def test_stock_zarr_and_tensorstore_open_the_arrays(service, runs):
    expected = shardckpt.open(runs / "llama" / "10").read("model/embed.weight")
    group = zarr.open_group(f"{service.url}/zarr/lab/llama/10", mode="r")
    assert np.array_equal(group["model/embed.weight"][:], expected)
    store = {
        "driver": "http",
        "base_url": f"{service.url}",
        "path": "/zarr/lab/llama/10/model/embed.weight/",
    }
    array = ts.open({"driver": "zarr3", "kvstore": store}, open=True, read=True).result()
    assert np.array_equal(array[3:40, 5:].read().result(), expected[3:40, 5:])
    assert service.ask("/zarr/lab/llama/10/model/embed.weight/c/9/9").status == 404


@pytest.mark.parametrize("layout", ["packed", "zarr"])
def test_the_library_restores_from_raw_files(tmp_path, layout):
    state = {"w": np.arange(5000, dtype=np.float32), "x": np.ones((3, 4)), "step": 7}
    shardckpt.save(
        tmp_path / "root" / "run" / "0",
        {"w": state["w"], "x": np.zeros((3, 4))},
        options=SaveOptions(layout=layout),
    )
    options = SaveOptions(layout=layout, base=tmp_path / "root" / "run" / "0", skip="w")
    shardckpt.save(tmp_path / "root" / "run" / "100", state, options=options)
    with serving(("lab", tmp_path / "root")) as service:
        like = {"w": np.zeros(5000, np.float32), "x": np.zeros((3, 4)), "step": 0}
        restored = shardckpt.restore(f"{service.url}/raw/lab/run/100", like)
        assert restored["w"] is like["w"]
        assert np.array_equal(like["w"], state["w"])
        assert np.array_equal(like["x"], state["x"])
        assert restored["step"] == 7
        assert shardckpt.open(f"{service.url}/raw/lab/run/100").verify().ok


def test_a_base_with_a_full_url_is_refused_by_the_reader_and_served_in_files(tmp_path):
    """A reader elsewhere cannot reach the path that the record names, and must not read its own
    disk at that path."""
    state = {"w": np.arange(5000, dtype=np.float32), "x": np.ones((3, 4))}
    shardckpt.save(tmp_path / "root" / "pretrained", state)
    options = SaveOptions(base=tmp_path / "root" / "pretrained", skip="w")
    shardckpt.save(tmp_path / "root" / "run" / "100", state, options=options)
    assert (
        shardckpt.open(tmp_path / "root" / "run" / "100")
        .record.structure.bases[0]
        .url.startswith("file://")
    )
    with serving(("lab", tmp_path / "root")) as service:
        url = f"{service.url}/raw/lab/run/100"
        with pytest.raises(
            FormatError,
            match=r"its base 'file:///.*' is in another kind of storage, and is therefore not read",
        ):
            shardckpt.restore(url)
        assert np.array_equal(shardckpt.restore(url, only="x")["x"], state["x"])
        assert [damage.tensor for damage in shardckpt.open(url).verify().damage] == ["w"]
        assert np.array_equal(
            load(service.ask("/files/lab/run/100/model.safetensors").body)["w"], state["w"]
        )


def test_a_checkpoint_that_is_replaced_is_served_anew(tmp_path):
    for i in range(2):
        shardckpt.save(tmp_path / "1", {"w": np.full(4, i)}, options=SaveOptions(overwrite=True))
        with serving(("lab", tmp_path)) as service:
            path = "/files/lab/1/model.safetensors"
            first = service.ask(path)
            shardckpt.save(
                tmp_path / "1", {"w": np.full(4, i + 10)}, options=SaveOptions(overwrite=True)
            )
            second = service.ask(path)
            assert load(second.body)["w"].tolist() == [i + 10] * 4
            assert first.headers["etag"] != second.headers["etag"]
            stale = service.ask(path, Range="bytes=0-7", If_Range=first.headers["etag"])
            assert (stale.status, stale.body) == (200, second.body)


def test_damage_is_an_error_and_never_a_complete_body(tmp_path):
    shardckpt.save(tmp_path / "1", {"w": np.arange(4 << 20)})
    attempt = shardckpt.open(tmp_path / "1").record.attempt
    data = max(
        (tmp_path / "1" / attempt / "hosts").rglob("*"),
        key=lambda path: path.stat().st_size if path.is_file() else 0,
    )
    contents = bytearray(data.read_bytes())
    contents[-5] ^= 1
    data.write_bytes(contents)
    with serving(("lab", tmp_path)) as service:
        assert (
            service.get(f"/v1/checkpoints/lab/1/tensors/w?format=raw&box={(4 << 20) - 9}:", 422)[
                "code"
            ]
            == "corrupt"
        )
        with pytest.raises((OSError, IncompleteRead)):
            service.ask("/files/lab/1/model.safetensors")


@pytest.mark.parametrize("block", [40 << 10, 16 << 20])
def test_a_slow_client_gets_the_bytes_that_were_read_for_it(tmp_path, monkeypatch, block):
    """Memory is used again only after the transport has sent what was in it, and it may hold
    several small blocks."""
    monkeypatch.setattr(sources, "_BLOCKS", ((1 << 30, block),))
    rng = np.random.default_rng(0)
    sizes = [5_000_000, 70_000, 3_000, 9_000_000, 100, 40_000, 6_000_000, 20_000, 8_000_000]
    shardckpt.save(
        tmp_path / "root" / "1",
        {f"w{i}": rng.integers(0, 255, n, np.uint8) for i, n in enumerate(sizes)},
    )
    shardckpt.export_safetensors(tmp_path / "root" / "1", tmp_path / "exported.safetensors")
    expected = (tmp_path / "exported.safetensors").read_bytes()
    with (
        serving(("lab", tmp_path / "root")) as service,
        socket.create_connection(service.address, timeout=60) as one,
    ):
        one.sendall(
            b"GET /files/lab/1/model.safetensors HTTP/1.1\r\n"
            b"Host: localhost\r\n"
            b"Connection: close\r\n"
            b"\r\n"
        )
        received, pauses = b"", 0
        while part := one.recv(1 << 18):
            received += part
            if len(received) > pauses * 2_000_000:
                pauses += 1
                time.sleep(0.03)
        assert received.partition(b"\r\n\r\n")[2] == expected


HUB = """
import sys
import torch
from huggingface_hub import HfApi, hf_hub_download, snapshot_download
from transformers import AutoModelForCausalLM

api = HfApi()
info = api.model_info("lab/tiny", revision="step-100")
assert len(info.sha) == 40 and "model.safetensors" in {one.rfilename for one in info.siblings}, info
assert "config.json" in api.list_repo_files("lab/tiny", revision=info.sha)
path = hf_hub_download("lab/tiny", "model.safetensors", revision="step-100")
assert open(path, "rb").read(8)
assert snapshot_download("lab/tiny", revision="step-100") in path
model = AutoModelForCausalLM.from_pretrained("lab/tiny", revision="step-100")
torch.save(model.state_dict(), sys.argv[1])
half = AutoModelForCausalLM.from_pretrained("lab/tiny", revision="main+bfloat16", dtype="auto")
assert next(half.parameters()).dtype == torch.bfloat16, half.dtype
assert (
    info.sha
    == api.model_info("lab/tiny", revision="step-100").sha
    != api.model_info("lab/tiny", revision="step-100+bfloat16").sha
)
assert info.sha == api.model_info("lab/tiny", revision="best").sha
assert (
    api.model_info("lab/tiny", revision="best+bfloat16").sha
    == api.model_info("lab/tiny", revision="main+bfloat16").sha
)
from huggingface_hub.errors import (
    EntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
for error, call in (
    (RepositoryNotFoundError, lambda: api.model_info("lab/none")),
    (RevisionNotFoundError, lambda: api.model_info("lab/tiny", revision="step-7")),
    (RevisionNotFoundError, lambda: api.model_info("lab/tiny", revision="pinned")),
    (EntryNotFoundError, lambda: hf_hub_download("lab/tiny", "none.bin", revision="step-100")),
):
    try:
        call()
    except error:
        continue
    raise SystemExit(f"no {error}")
"""


def test_a_file_beside_a_run_is_listed_if_it_is_served(tmp_path):
    save_run(tmp_path / "run", (1,))
    for name, size in (("config.json", 64 << 20), ("tokenizer.json", (64 << 20) + 1)):
        with (tmp_path / "run" / name).open("wb") as file:
            file.truncate(size)
    with serving(("lab", tmp_path)) as service:
        listed = {one["path"] for one in service.get("/api/models/lab/run/tree/main")}
        assert {"config.json", "tokenizer.json"} & listed == {"config.json"}
        for name, status in (("config.json", 200), ("tokenizer.json", 404)):
            assert service.ask(f"/lab/run/resolve/main/{name}").status == status


def test_a_file_by_commit_is_looked_for_among_all_steps_once(tmp_path, monkeypatch):
    save_run(tmp_path / "lab" / "run", (1, 2, 3))
    service = Service(ServeOptions(roots=(f"lab={tmp_path / 'lab'}",)))
    service.scanner.scan()
    commit = hub.api(service, "lab/run/revision/step-2")["sha"]
    pages, checkpoints = [], service.catalogue.checkpoints

    def counted(query):
        pages.append(query)
        return checkpoints(query)

    monkeypatch.setattr(service.catalogue, "checkpoints", counted)
    assert hub.resolve(service, "lab/run", f"{commit}/model.safetensors").size > 0
    assert not pages
    # Its replacement has another commit.
    again = SaveOptions(overwrite=True)
    shardckpt.save(tmp_path / "lab" / "run" / "2", {"w": np.ones(3)}, options=again)
    service.scanner.scan()
    with pytest.raises(HTTPException, match="no revision"):
        hub.resolve(service, "lab/run", f"{commit}/model.safetensors")
    service.close()


@pytest.mark.long
def test_commits_and_tags_of_a_version_are_the_same_after_it_is_folded(tmp_path):
    run = tmp_path / "run"
    with shardckpt.Publisher(run, keep=None, anchor_every=64, catch_up=None) as publisher:
        for step in range(10):
            publisher.publish(step, {"model": {"w": np.arange(999.0) + (np.arange(999) < step)}})
            publisher.wait()
    with serving(("lab", tmp_path)) as service:
        commit = service.get("/api/models/lab/run/revision/step-3")["sha"]
        paths = (
            f"/lab/run/resolve/{commit}/model.safetensors",
            "/files/lab/run/3/model.safetensors",
            "/zarr/lab/run/3/zarr.json",
            "/zarr/lab/run/3/model/w/c/0",
        )
        before = [service.ask(path) for path in paths]
        assert 3 in [one.step for one in fold(run)]
        for path, old in zip(paths, before, strict=True):
            new = service.ask(path)
            assert (new.status, new.body) == (old.status, old.body) == (200, old.body)
            assert new.headers["etag"] == old.headers["etag"], path


@pytest.mark.long
def test_from_pretrained_loads_a_training_checkpoint_over_the_hub(tmp_path):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=64,
    )
    model = LlamaForCausalLM(config)
    state = {"model": model.state_dict(), "optimizer": {"count": torch.ones(5)}, "step": 100}
    shardckpt.save(tmp_path / "root" / "tiny" / "100", state)
    shardckpt.save(tmp_path / "root" / "tiny" / "99", {"model": {"w": torch.ones(3)}})
    for step in (99, 100):
        pinning.tag(tmp_path / "root" / "tiny" / str(step), "best")
    pinning.pin(tmp_path / "root" / "tiny" / "100")
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path / "root" / "tiny")
    with serving(("lab", tmp_path / "root")) as service:
        environment = {
            **os.environ,
            "HF_ENDPOINT": service.url,
            "HF_HOME": str(tmp_path / "hf"),
            "HF_TOKEN": "hf_secret",
        }
        environment |= dict.fromkeys(("HF_HUB_ETAG_TIMEOUT", "HF_HUB_DOWNLOAD_TIMEOUT"), "60")
        program = [sys.executable, "-c", HUB, tmp_path / "loaded.pt"]
        done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=250)
        assert done.returncode == 0, done.stderr[-3000:]
    loaded = torch.load(tmp_path / "loaded.pt")
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded[name], tensor), name
