"""docs/format.md is right: its reader, docs/format_reader.py, reads real checkpoints, and its
snippets run as they stand."""

import base64
import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from paths import DOCS
from processes import Processes

import shardckpt
from shardckpt.layout.dtypes import DTYPES
from shardckpt.plan import chunks
from shardckpt.state.names import array_path

SNIPPETS = re.findall(
    r"^```python\n(.*?)^```$", (DOCS / "format.md").read_text(), re.DOTALL | re.MULTILINE
)
READER = DOCS / "format_reader.py"
ODD_KEYS = ["a/b", "~", "é", "zarr.json", "..", "__x", "x" * 400, 7, "7", None, "c", "w.__lock"]


@pytest.fixture(params=[("packed", None), ("packed", "zstd"), ("zarr", None)], ids=str)
def checkpoint(request, tmp_path, monkeypatch):
    """One with names, shapes and dtypes of every kind, and a tensor in pieces."""
    monkeypatch.setattr(chunks, "LARGEST_COMMON_CHUNK", 64)
    layout, compression = request.param
    state = {
        "keys": {key: np.arange(i, dtype=np.int16) for i, key in enumerate(ODD_KEYS)},
        "shapes": {
            "scalar": np.array(1.5),
            "empty": np.zeros((3, 0)),
            "many": np.arange(600_000, dtype=np.int32).reshape(600, 1000),
        },
        "dtypes": {
            name: np.arange(-3, 3, dtype=np.float32).astype(d.numpy).reshape(2, 3)
            for name, d in DTYPES.items()
            if "uint" not in name
        },
        "pieces": np.arange(5 * 97, dtype=np.float32).reshape(5, 97),
    }
    layouts = {
        "pieces": shardckpt.Sharding(
            shardckpt.Mesh((4,), ("x",)), shardckpt.PartitionSpec(None, "x")
        )
    }
    shardckpt.save(
        tmp_path / "ckpt",
        state,
        options=shardckpt.SaveOptions(layout=layout, compression=compression, shardings=layouts),
    )
    return shardckpt.open(tmp_path / "ckpt")


def equal(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


@pytest.fixture(scope="module")
def several_hosts(tmp_path_factory):
    """Layout → a checkpoint that three hosts have saved."""
    root = tmp_path_factory.mktemp("three")
    with Processes("golden_hosts") as processes:
        for layout, compression in (("packed", None), ("zarr", "zstd")):
            assert processes.run("save", 3, root / layout, layout, compression) == ["saved"] * 3
    return {layout: shardckpt.open(root / layout) for layout in ("packed", "zarr")}


@pytest.fixture
def described():
    """Names that the reader of the description defines."""
    return runpy.run_path(str(READER))


@pytest.mark.filterwarnings("ignore:invalid value encountered in cast:RuntimeWarning")
def test_the_reader_of_the_description_reads_every_tensor(checkpoint, described):
    for name in checkpoint.names():
        assert equal(described["read"](str(checkpoint.location), name), checkpoint.read(name)), name
    assert len(checkpoint.record.structure.tensors["pieces"].pieces) == 4


def test_the_reader_of_the_description_follows_bases(
    checkpoint, described, tmp_path, tmp_path_factory
):
    state = {
        "keys": {**shardckpt.restore(checkpoint, only="keys/**")["keys"], "more": np.arange(3)}
    }
    options = shardckpt.SaveOptions(base=tmp_path / "ckpt", skip=["keys/*~1*", "keys/c"])
    for path in (tmp_path / "beside", tmp_path_factory.mktemp("else where") / "é"):
        shardckpt.save(path, state, options=options)
        opened = shardckpt.open(path)
        assert [
            opened.info(name).base is not None for name in ("keys/a~1b", "keys/c", "keys/more")
        ] == [True, True, False]
        for name in opened.names():
            assert equal(described["read"](str(path), name), opened.read(name)), name


def test_the_reader_of_the_description_applies_differences(described, tmp_path):
    rng = np.random.default_rng(0)
    state = {
        "w": rng.random((600, 300)),
        "v": rng.random(7).astype(np.float32),
        "n": np.arange(5, dtype=np.int8),
    }
    with shardckpt.Publisher(tmp_path) as publisher:
        for step in range(4):
            chosen = rng.integers(0, 600 * 300, 40)
            state["w"] = state["w"].copy()
            state["w"].reshape(-1)[chosen] += 1
            state["v"] = state["v"] + 1
            publisher.publish(step, state)
            publisher.wait()
            for name, array in state.items():
                assert equal(described["read"](str(tmp_path / str(step)), name), array), name
    assert shardckpt.open(tmp_path / "3").record.compression == "difference"


def test_the_reader_of_the_description_runs_without_shardckpt(tmp_path):
    shardckpt.save(tmp_path / "ckpt", {"w": np.arange(3)})
    program = (
        f"import runpy, sys; runpy.run_path({str(READER)!r}, run_name='__main__'); assert "
        "'shardckpt' not in sys.modules"
    )
    child = subprocess.run(
        [sys.executable, "-c", program, tmp_path / "ckpt", "w"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert child.stdout == "[0 1 2]\n"


@pytest.mark.long
@pytest.mark.parametrize("table", ["the one table", "the hosts' own tables"])
@pytest.mark.parametrize("layout", ["packed", "zarr"])
def test_the_reader_of_the_description_reads_what_several_hosts_have_saved(
    several_hosts, described, layout, table, monkeypatch
):
    checkpoint = several_hosts[layout]
    if table != "the one table":
        referred = described["referred"]
        described["referred"] = lambda attempt, reference: referred(
            attempt, {**reference, **({"size": 0} if reference["key"] == "table" else {})}
        )
    for name in checkpoint.record.structure.tensors:
        assert equal(described["read"](str(checkpoint.location), name), checkpoint.read(name)), name


@pytest.mark.parametrize("layout", ["packed", "zarr"])
def test_values_and_contents_are_as_described(several_hosts, described, layout):
    """Every file lies where it is said to lie, and says what it is said to say."""
    checkpoint = several_hosts[layout]
    path = Path(str(checkpoint.location))
    commit = described["record"]((path / "checkpoint.json").read_bytes())
    attempt = path / commit["attempt"]
    restored = shardckpt.restore(checkpoint, only="rng")
    assert re.fullmatch(r"\d{8}T\d{6}-[0-9a-f]{8}-[0-9a-f]{12}-1", attempt.name)
    assert [host["key"] for host in commit["hosts"]] == [f"records/{n:05d}.json" for n in range(3)]
    for n, reference in enumerate(commit["hosts"]):
        host = described["record"](described["referred"](attempt, reference))
        assert (host["host"], host["hosts"]) == (n, 3)
        assert re.fullmatch("[0-9a-f]{64}", host["prior"])  # of the placeholder
        assert host["contents"]["key"] == f"contents/{host['contents']['sha256']}.json"
        contents = described["record"](described["referred"](attempt, host["contents"]))
        for name, elements in contents["small"].items():
            assert base64.b64decode(elements) == checkpoint.read(name).tobytes(), name
        assert set(contents["small"]) == {
            name for name in commit["tensors"] if name.startswith("plain/")
        } - {"plain/large", "plain/pieces"}
        value = described["record"](described["referred"](attempt, host["values"]))["values"]["rng"]
        assert value["tree"]["seen"] == [n, {"$int": f"{2**70 + n:x}"}]
        words = value["arrays"]["rng/words"]
        assert base64.b64decode(words["data"]) == restored["rng"][n]["words"].tobytes()
        assert (words["kind"], words["dtype"], words["shape"]) == ("numpy", "uint32", [5])


def test_small_tensors_lie_one_after_another_in_order_of_their_names(several_hosts, described):
    checkpoint = several_hosts["packed"]
    path = Path(str(checkpoint.location)) / checkpoint.record.attempt
    commit = json.loads((path.parent / "checkpoint.json").read_bytes())["record"]
    places = described["places"](described["referred"](path, commit["small_table"]))
    assert commit["small_table"]["key"] == "hosts/small/table"
    assert {file for file, *_ in places.values()} == {"small"}
    data = b"".join(
        checkpoint.read(name).tobytes() + crc.to_bytes(4, "little")
        for (name, _, _), (*_, crc) in sorted(places.items())
    )
    assert (path / "small").read_bytes() == data


@pytest.mark.filterwarnings("ignore:invalid value encountered in cast:RuntimeWarning")
@pytest.mark.parametrize("snippet", SNIPPETS)
def test_the_snippets_for_stock_tools_give_the_values(checkpoint, snippet):
    path = str(checkpoint.location)
    for name in ("shapes/many", "shapes/scalar", "dtypes/bfloat16", "keys/~0"):
        given = {
            "path": path,
            "attempt": checkpoint.record.attempt,
            "layout": checkpoint.record.layout,
            "array_path": array_path(name),
        }
        exec(compile(snippet, "format.md", "exec"), given)
        if "values" in given:
            assert equal(given["values"], checkpoint.read(name)), name


def test_there_are_snippets_for_tensorstore_and_for_zarr_python():
    assert [("tensorstore" in s, "zarr_store" in s) for s in SNIPPETS] == [
        (True, False),
        (False, True),
        (False, False),
    ]
