"""A checkpoint that somebody else made can be wrong in any way: it is refused, within bounded memory, and nothing is run or opened.

Digests are no defence here: whoever makes a checkpoint makes its digests, and so do these tests.
"""

import ast
import contextlib
import ctypes
import hashlib
import json
import math
import os
import pickle
import resource
import shutil
import struct
from pathlib import Path
from random import Random

import crc32c
import numpy as np
import pytest
import zarr
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st
from numcodecs.zstd import Zstd

import shardckpt
from shardckpt import SaveOptions, ShardckptError, errors
from shardckpt.io import ocdbt
from shardckpt.io.table import decode_table, encode_table
from shardckpt.tree import iter_leaves

LAYOUTS = ["packed", "zarr"]
MIB = 1 << 20


def make_state():
    rng = np.random.default_rng(0)
    return {
        "w": rng.integers(0, 256, (40, 60), np.uint8),
        "pair": (rng.standard_normal((6, 5)).astype(np.float32), [rng.standard_normal(7)]),
        "scalar": np.array(3.5),
        "empty": np.zeros((0, 4), np.int16),
        "leaves": [1, 2**60, -0.5, "text", b"bytes", None, {1: 2j}],
    }


TRUTH = make_state()
TENSORS = {"w": TRUTH["w"], "pair/0": TRUTH["pair"][0], "pair/1/0": TRUTH["pair"][1][0], "scalar": TRUTH["scalar"], "empty": TRUTH["empty"]}


def seal(record, version=(1, 0)):
    """A record with a right digest, whatever is in it."""
    body = (record if isinstance(record, str) else json.dumps(record, separators=(",", ":"))).encode("utf-8", "surrogatepass")
    head = f'{{"format":"shardckpt","version":[{version[0]},{version[1]}],"sha256":"{hashlib.sha256(body).hexdigest()}","record":'
    return head.encode() + body + b"}\n"


def opened_envelope(path):
    return json.loads(path.read_bytes())["record"]


class Forgery:
    """A checkpoint that is written anew from its parts, each vouched for by the next, as whoever forges one would."""

    def __init__(self, root, layout="packed", compression=None, state=TRUTH):
        self.url = root / "checkpoint"
        mesh = shardckpt.Mesh((2, 2), ("x", "y"), [3, 1, 0, 2])
        shardings = {"w": shardckpt.Sharding(mesh, shardckpt.PartitionSpec("x", "y")), "pair/0": shardckpt.OpSharding.replicated(4)}
        shardings = {name: sharding for name, sharding in shardings.items() if name.partition("/")[0] in state}
        shardckpt.save(self.url, state, options=SaveOptions(layout=layout, compression=compression, shardings=shardings))
        self.commit = opened_envelope(self.url / "checkpoint.json")
        self.attempt = self.url / self.commit["attempt"]
        self.host = opened_envelope(self.attempt / "records" / "00000.json")
        self.table = (self.attempt / "hosts" / "00000" / "table").read_bytes()

    def write(self, *, commit=None, host=None, table=None):
        """Write the parts given, and what vouches for them."""
        commit, host = commit or json.loads(json.dumps(self.commit)), host or json.loads(json.dumps(self.host))
        table = self.table if table is None else table
        if table is not self.table:
            host["table"] |= {"size": len(table), "sha256": hashlib.sha256(table).hexdigest()}
        data = seal(host)
        if host != self.host:
            commit["hosts"][0] |= {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        (self.attempt / "hosts" / "00000" / "table").write_bytes(table)
        (self.attempt / "records" / "00000.json").write_bytes(data)
        (self.url / "checkpoint.json").write_bytes(seal(commit))

    def write_raw(self, data):
        """Write a commit record as it is."""
        (self.url / "checkpoint.json").write_bytes(data)


@pytest.fixture
def forgery(tmp_path):
    return Forgery(tmp_path)


@contextlib.contextmanager
def at_most(nbytes):
    """No more than that many bytes of address space beyond what is used already."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def use_in_every_way(url):
    """Do all that can be done with a checkpoint; only errors of ours may come of it. What was restored, or None."""

    def attempted(action):
        with contextlib.suppress(ShardckptError):
            return action()
        return None

    checkpoint = attempted(lambda: shardckpt.open(url))
    if checkpoint is None:
        return None
    for name in checkpoint.names():
        info = checkpoint.info(name)
        corner = shardckpt.Box((0,) * len(info.shape), tuple(min(1, n) for n in info.shape))
        found = attempted(lambda name=name, corner=corner: checkpoint.read(name, corner))
        assert found is None or (found.shape == corner.shape and found.dtype == info.dtype.numpy)
        attempted(lambda name=name: (checkpoint.stock_spec(name), checkpoint.stock_url(name)))
    attempted(lambda: list(iter_leaves(checkpoint.tree)))
    attempted(checkpoint.verify)
    attempted(lambda: sorted(zarr.open_group(checkpoint.zarr_store(), mode="r")))
    return attempted(lambda: shardckpt.restore(url))


# --- mutations ------------------------------------------------------------------------------------------------------

NASTY = [
    *(
        None,
        True,
        False,
        0,
        1,
        -1,
        7,
        2**31,
        2**32,
        2**40,
        2**61,
        2**62,
        2**62 + 1,
        2**63 - 1,
        2**64,
        10**40,
        0.5,
        -0.0,
        1e300,
        math.nan,
        math.inf,
    ),
    *(
        "",
        ".",
        "..",
        "../outside/secret",
        "/",
        "a/../../outside/secret",
        "a//b",
        "a\\b",
        "\0",
        "\ud800",
        "é",
        "x" * 5000,
        "zarr",
        "hosts",
        "records",
    ),
    *(
        "float32",
        "float64",
        "bfloat16",
        "object",
        "float128",
        "V8",
        "bool",
        "int4",
        "packed",
        "zstd",
        "blosc",
        "$tensor",
        "$",
        "$$",
        "w",
        "0",
    ),
    *(
        [],
        {},
        [[]],
        [None],
        [0],
        [1],
        [-1],
        [1] * 33,
        [2**40],
        [2**31, 2**31],
        [2**62],
        [2**20, 2**20, 2**20],
        [0, 2**61],
        [1, 1],
        [[1]] * 300,
        ["a"] * 50,
    ),
    *({"$tensor": 1}, {"$tied": "w"}, {"$tuple": []}, {"$dict": [[1, "$tensor"]]}, {"$leaf": ["os.system", "true"]}, {"$bytes": "@@"}),
    *(
        {"$numpy": ["object", "00"]},
        {"$numpy": ["float32", "00"]},
        {"$int": "f" * 5000},
        {"$float": "7ff0"},
        {"$complex": [1, 2]},
        {"$str": "zz"},
    ),
    *({"$torch.dtype": "load"}, {"$torch.device": "cuda:9999"}, {"$torch.Size": [-1, 2**70]}),
    *("{replicated}", "{manual}", "{devices=[2,2]<=[4]}", "{devices=[1048576]<=[1048576]}", "{devices=[4]0,0,0,0}", "{maximal device=3}"),
    *({"shape": [1 << 20], "axes": ["x"], "devices": None}, {"shape": [4], "axes": ["x"], "devices": [0, 1, 2, 3]}),
    *(
        {"op_sharding": "{replicated}", "devices": 1 << 20},
        {"mesh": 0, "spec": [["x"], "x"]},
        {"start": [0, 0], "shape": [40, 60], "chunks": [1, 1]},
    ),
]


def paths_in(document, path=()):
    """The path of every node of a JSON document."""
    yield path
    if isinstance(document, dict | list):
        for key, child in document.items() if isinstance(document, dict) else enumerate(document):
            yield from paths_in(child, (*path, key))


def parent_of(document, path):
    for key in path[:-1]:
        document = document[key]
    return document


def deep(levels, kind):
    node = "$tensor"
    for _ in range(levels):
        node = [node] if kind == "list" else {"k": node}
    return node


def mutated(random, document):
    """A JSON document with one to three things changed."""
    for _ in range(random.randint(1, 3)):
        document = json.loads(json.dumps(document))  # no part of it is in two places
        # Short paths are few and interesting: choose how deep first.
        by_depth = {}
        for path in paths_in(document):
            by_depth.setdefault(len(path), []).append(path)
        path = random.choice(by_depth[random.choice(sorted(by_depth))])
        if not path:
            continue
        parent, key = parent_of(document, path), path[-1]
        value = parent[key]
        change = random.choice(["replace", "replace", "replace", "number", "delete", "move", "repeat", "rename", "deepen"])
        note(f"{change} {'/'.join(map(str, path))[:200]}")
        if change == "replace":
            parent[key] = random.choice(NASTY)
        elif change == "number" and type(value) is int:
            parent[key] = value + random.choice([-1, 1, 2, 100, -value, value, 2**62])
        elif change == "delete":
            del parent[key]
        elif change == "move":
            other = random.choice(random.choice(list(by_depth.values())))
            parent[key] = json.loads(json.dumps(parent_of(document, other)[other[-1]] if other else 0))
        elif change == "repeat" and isinstance(parent, list):
            most = 4 * MIB // len(json.dumps(value))  # memory is bounded by the record's own size
            parent.extend([value] * random.choice([1, min(1000, most)]))
        elif change == "rename" and isinstance(parent, dict):
            parent[random.choice([n for n in NASTY if isinstance(n, str)])] = parent.pop(key)
        elif change == "deepen":
            parent[key] = deep(random.choice([1, 199, 201, 300]), random.choice(["list", "dict"]))
        note(f"  now {str(parent.get(key) if isinstance(parent, dict) else parent)[:200]}")
    return document


def mutated_table(random, table):
    """A chunk table with a few of its numbers, its header or its bytes changed."""
    kind = random.choice(["columns", "columns", "header", "bytes"])
    begin = 12 + int.from_bytes(table[8:12], "little")
    if kind == "header":
        header = json.dumps(mutated(random, json.loads(table[12:begin]))).encode()
        return table[:8] + struct.pack("<I", len(header)) + header + table[begin:]
    if kind == "bytes":
        changed = bytearray(table)
        for _ in range(random.randint(1, 4)):
            changed[random.randrange(len(table))] = random.randrange(256)
        return bytes(changed[: random.choice([len(table), len(table) - 1, 13, 12, 8, 0])])
    files, arrays = decode_table(table, "")
    changed = {}
    for path, rows in arrays.items():
        columns = {name: getattr(rows, name).copy() for name in ("chunk", "file", "offset", "length", "crc")}
        for name, column in columns.items():
            if random.random() < 0.2:
                most = np.iinfo(column.dtype).max
                at, value = random.randrange(len(column)), random.choice([0, 1, 3, 4, 100, most // 2, most - 1, most])
                note(f"{path} {name}[{at}] = {value}")
                column[at] = value
        changed[path] = type(rows)(**columns)
    return encode_table(files, changed)


@pytest.fixture(scope="module")
def forgeries(tmp_path_factory):
    """Layout → a forgery; beside each lies outside/secret, and the function that says whether anybody opened that."""
    made = {}
    for layout in LAYOUTS:
        root = tmp_path_factory.mktemp(layout)
        made[layout] = Forgery(root, layout, None if layout == "packed" else "zstd")
        (root / "outside").mkdir()
        (root / "outside" / "secret").write_bytes(b"secret" * 1000)
    libc = ctypes.CDLL(None, use_errno=True)
    watch = libc.inotify_init1(os.O_NONBLOCK)
    assert watch >= 0
    for forgery in made.values():
        assert libc.inotify_add_watch(watch, os.fsencode(forgery.url.parent / "outside"), 0x21) >= 0  # IN_OPEN | IN_ACCESS

    def opened_outside():
        try:
            return os.read(watch, 4096) != b""
        except BlockingIOError:
            return False

    (made["packed"].url.parent / "outside" / "secret").read_bytes()
    assert opened_outside(), "the watch sees nothing"
    yield made, opened_outside
    os.close(watch)


FUZZ = settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck), database=None)


@given(seed=st.integers(0, 2**64 - 1), layout=st.sampled_from(LAYOUTS))
@FUZZ
def test_a_commit_record_with_anything_in_it_is_refused_or_read_right(forgeries, seed, layout):
    made, opened_outside = forgeries
    forgery = made[layout]
    commit = mutated(Random(seed), forgery.commit)
    forgery.write()
    forgery.write_raw(seal(commit))
    with at_most(1024 * MIB):
        restored = use_in_every_way(forgery.url)
    assert not opened_outside()
    if restored is None:
        return
    # What the record says of a tensor as the original did is that tensor.
    for name, array in TENSORS.items():
        if commit["tensors"].get(name) == forgery.commit["tensors"][name]:
            np.testing.assert_array_equal(shardckpt.open(forgery.url).read(name), array)


@given(seed=st.integers(0, 2**64 - 1), layout=st.sampled_from(LAYOUTS))
@FUZZ
def test_a_host_record_or_table_with_anything_in_it_is_refused_or_read_right(forgeries, seed, layout):
    made, opened_outside = forgeries
    forgery, random = made[layout], Random(seed)
    if random.random() < 0.5:
        forgery.write(host=mutated(random, forgery.host))
    else:
        forgery.write(table=mutated_table(random, forgery.table))
    with at_most(1024 * MIB):
        restored = use_in_every_way(forgery.url)
    assert not opened_outside()
    # The commit record is whole: whatever other parts say, what is restored has the names and shapes that it says.
    if restored is not None:
        assert restored["w"].shape == TRUTH["w"].shape


# --- records that claim too much ------------------------------------------------------------------------------------


def with_tensor(forgery, **entry):
    """The commit record with another entry for w."""
    commit = json.loads(json.dumps(forgery.commit))
    commit["tensors"]["w"] = {k: v for k, v in {**commit["tensors"]["w"], **entry}.items() if v is not None}
    return commit


@pytest.mark.parametrize("chunks", [[1, 1], [1, 2**30], [2**30, 2**30]])
def test_a_giant_tensor_is_looked_at_without_counting_its_chunks(forgery, chunks):
    forgery.write(commit=with_tensor(forgery, shape=[2**30, 2**30], chunks=chunks))

    with at_most(256 * MIB):
        checkpoint = shardckpt.open(forgery.url)
        assert checkpoint.info("w").num_chunks == math.prod(2**30 // c for c in chunks)
        assert checkpoint.info("w").nbytes == 2**60
        for box in (None, shardckpt.Box((5, 5), (6, 6))):
            with pytest.raises(ShardckptError, match="w"):
                checkpoint.read("w", box)
        report = checkpoint.verify()
        assert {d.tensor for d in report.damage} >= {"w"}
        assert any("more of its chunks" in d.reason for d in report.damage) == (checkpoint.info("w").num_chunks > 20_000)
        with pytest.raises(errors.BudgetError, match="only="):
            shardckpt.restore(forgery.url)
        assert set(shardckpt.restore(forgery.url, only="pair/**")) == {"pair"}


def test_a_large_tensor_of_tiny_chunks_that_are_not_there_is_refused_before_they_are_planned(forgery):
    forgery.write(commit=with_tensor(forgery, shape=[4000, 4000], chunks=[1, 1]))
    with at_most(512 * MIB), pytest.raises(errors.MissingDataError, match=r"w\[0:1, 4:5\]|w\[0:1, "):
        shardckpt.open(forgery.url).read("w")


@pytest.mark.parametrize(
    "entry",
    [
        {"shape": [2**61, 4], "dtype": "complex128", "chunks": [1, 1]},  # 2^67 bytes
        {"shape": [0, 2**61], "dtype": "complex128", "chunks": [1, 1]},  # numpy has no such shape, though it is empty
        {"shape": [2], "chunks": [2**60], "dtype": "float64"},  # the padded chunk
        {"shape": [2**63], "chunks": [1]},
        {"shape": [1] * 33, "chunks": [1] * 33},
        {"shape": [-1, 2], "chunks": [1, 1]},
        {"shape": [2.0, 2], "chunks": [1, 1]},
        {"shape": [True, 2], "chunks": [1, 1]},
        {"shape": [4, 4], "chunks": [0, 4]},
        {"shape": [0, 4], "chunks": None, "pieces": []},
        {"shape": [4, 4], "sharding": 2},
        {"shape": [4, 4], "sharding": -1},
        {"shape": [4], "chunks": [4], "sharding": 0},  # a spec for two dimensions
        {"dtype": "object"},
        {"dtype": "float128"},
        {"dtype": ["u1"]},
    ],
)
def test_a_tensor_that_cannot_be_is_refused_when_the_checkpoint_is_opened(forgery, entry):
    forgery.write(commit=with_tensor(forgery, **entry))
    with at_most(512 * MIB), pytest.raises(errors.FormatError, match="'w'"):
        shardckpt.open(forgery.url)


def test_a_short_record_cannot_ask_for_the_devices_of_a_thousand_large_meshes(forgery):
    large = {"shape": [1 << 20], "axes": ["x"], "devices": None}
    for change in (
        {"meshes": [large] * 1000},
        {"shardings": [{"op_sharding": "{replicated}", "devices": 1 << 20}] * 1000},
        {"shardings": [{"op_sharding": "{devices=[1048576]<=[1048576]}"}] * 1000},
        {"meshes": [large], "shardings": [{"mesh": 0, "spec": ["x"], "op_sharding": ""}] * 1000},
        {"shardings": [{"mesh": large, "spec": ["x"], "op_sharding": ""}] * 1000},
    ):
        forgery.write_raw(seal({**forgery.commit, **change}))
        with at_most(1024 * MIB), pytest.raises(errors.FormatError, match="devices together"):
            shardckpt.open(forgery.url)


def pieces(*boxes):
    return [{"start": [a, c], "shape": [b - a, d - c], "chunks": [1, 1]} for a, b, c, d in boxes]


def test_pieces_that_overlap_or_leave_gaps_are_refused_however_many_they_are(forgery):
    """Comparing each with each other would take minutes: these all have the same rows."""
    n = 20_000
    columns = [(0, 2, i, i + 1) for i in range(n)]
    twice = [*columns[:-1], columns[0]]  # one column is missing, another one there twice: the sizes add up
    for boxes, why in ((columns, None), (twice, "same elements"), (columns[:-1], "hold"), ([*columns[:-1], (0, 2, n, n + 1)], "outside")):
        commit = with_tensor(forgery, shape=[2, n], chunks=None, sharding=None, pieces=pieces(*boxes))
        forgery.write(commit=commit)
        if why is None:
            assert len(shardckpt.open(forgery.url).tensor("w").pieces) == n
        else:
            with pytest.raises(errors.FormatError, match=why):
                shardckpt.open(forgery.url)


# --- JSON -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[" * 100_000 + "]" * 100_000, "JSON"),
        ('{"a":' * 100_000 + "1" + "}" * 100_000, "JSON"),
        ('{"tombstone":"a","tombstone":"b"}', "same key twice"),
        ('{"totals":' + "9" * 10_000 + "}", "JSON"),
        ('{"metadata":NaN}', "NaN"),
        ('{"metadata":[-Infinity]}', "Infinity"),
        ("null", "NoneType"),
        ('"text"', "str"),
        ("{", "JSON"),
        ("", "JSON"),
        ('{"tombstone":1}', "string is expected"),
        ("{}", "is missing"),
    ],
)
def test_a_record_that_is_not_json_or_no_record_is_refused(forgery, text, why):
    forgery.write_raw(seal(text))
    with pytest.raises(errors.FormatError, match=why) as raised:
        shardckpt.open(forgery.url)
    assert len(str(raised.value)) < 1000


def test_a_tree_that_is_too_deep_is_refused(forgery):
    for levels, kind in ((201, "list"), (201, "dict"), (450, "list")):
        forgery.write_raw(seal({**forgery.commit, "tree": deep(levels, kind)}))
        with pytest.raises(errors.FormatError, match="more than 200 containers"):
            shardckpt.open(forgery.url)


def test_a_newer_major_version_is_refused_by_name_and_a_newer_minor_one_is_read(forgery):
    forgery.write_raw(seal(forgery.commit, version=(2, 0)))
    with pytest.raises(errors.VersionError, match=r"format version 2\.0 is newer than this shardckpt reads \(1\.0\); upgrade"):
        shardckpt.open(forgery.url)
    forgery.write_raw(seal({**forgery.commit, "in a minor version to come": [1]}, version=(1, 7)))
    assert sorted(shardckpt.restore(forgery.url)) == sorted(TRUTH)


# --- paths ----------------------------------------------------------------------------------------------------------

ESCAPES = [
    "../outside/secret",
    "a/../../outside/secret",
    "/etc/passwd",
    "..",
    ".",
    "",
    "a//b",
    "a\\..\\b",
    "a\0b",
    "\ud800",
    "x.__lock",
    "a/",
    1,
    None,
]


@pytest.mark.parametrize("path", ESCAPES)
def test_no_path_leads_out_of_the_checkpoint(tmp_path, path):
    """Wherever a record or a table has one."""
    forgery = Forgery(tmp_path)
    (tmp_path / "outside").mkdir()
    secret = tmp_path / "outside" / "secret"
    secret.write_bytes(b"secret")

    commit = json.loads(json.dumps(forgery.commit))
    for change in ({"attempt": path}, {"hosts": [{**commit["hosts"][0], "key": path}]}):
        forgery.write_raw(seal({**commit, **change}))
        with pytest.raises(ShardckptError):
            shardckpt.restore(forgery.url)

    forgery.write(host={**forgery.host, "table": {**forgery.host["table"], "key": path}})
    with pytest.raises(ShardckptError):
        shardckpt.restore(forgery.url)
    assert not shardckpt.open(forgery.url).verify().ok

    forgery.write(host={**forgery.host, "lanes": [path]})
    try:
        assert not shardckpt.open(forgery.url).verify().ok
    except ShardckptError as e:
        assert "lanes" in str(e)  # noqa: PT017  (either will do)

    files, arrays = decode_table(forgery.table, "")
    with contextlib.suppress(UnicodeEncodeError):
        forgery.write(table=encode_table([path] * len(files), arrays))
        with pytest.raises(ShardckptError):
            shardckpt.restore(forgery.url)
        assert not shardckpt.open(forgery.url).verify().ok
    # Deleting goes by the record, too.
    with contextlib.suppress(ShardckptError):
        forgery.write_raw(seal({**commit, "attempt": path}))
        shardckpt.save(forgery.url, {"a": 1}, options=SaveOptions(overwrite=True))
    assert secret.read_bytes() == b"secret"


def test_an_index_cannot_lead_out_of_the_checkpoint_either(forgery, tmp_path):
    """TensorStore itself refuses the keys; a node elsewhere is not even asked for."""
    (tmp_path / "outside").mkdir()
    node = ocdbt.leaf_node([b"w/c/0/0"], ["../../checkpoint.json"], [0], [0], [10])
    (tmp_path / "outside" / "node").write_bytes(node)
    for place in ("../../outside/node", "d/../../../outside/node"):
        (forgery.attempt / "manifest.ocdbt").write_bytes(ocdbt.manifest(place, len(node), 1, 10))
        damage = shardckpt.open(forgery.url).verify().damage
        assert damage
        assert all(d.file == f"{forgery.attempt.name}/manifest.ocdbt" for d in damage)


def test_a_link_to_a_checkpoint_and_links_within_it_are_followed(tmp_path):
    """Model hubs hand out directories of links. What is reached so passes the same checks."""
    forgery = Forgery(tmp_path)
    farm = tmp_path / "farm"
    for path in sorted(forgery.url.rglob("*")):
        if path.is_file():
            link = farm / path.relative_to(forgery.url)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(path)
    (tmp_path / "link").symlink_to(farm, target_is_directory=True)
    for url in (farm, tmp_path / "link"):
        np.testing.assert_array_equal(shardckpt.restore(url)["w"], TRUTH["w"])
        assert shardckpt.open(url).verify().ok


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("special", ["a pipe", "a device", "a directory"])
def test_a_pipe_device_or_directory_in_place_of_a_file_is_an_error_and_not_waited_for(tmp_path, layout, special):
    original = Forgery(tmp_path, layout).url
    for i, path in enumerate(sorted(p.relative_to(original) for p in original.rglob("*") if p.is_file())):
        copy = tmp_path / str(i)
        shutil.copytree(original, copy)
        (copy / path).unlink()
        if special == "a pipe":
            os.mkfifo(copy / path)
        elif special == "a device":
            (copy / path).symlink_to("/dev/zero")
        else:
            (copy / path).mkdir()
        try:
            assert not shardckpt.open(copy).verify().ok, path
        except ShardckptError:
            assert path.name == "checkpoint.json"
        use_in_every_way(copy)


# --- stored bytes ---------------------------------------------------------------------------------------------------


def test_a_frame_that_unpacks_to_more_than_its_chunk_is_refused_without_unpacking_it(tmp_path):
    forgery = Forgery(tmp_path, "zarr", "zstd", {"w": np.zeros((100, 100), np.uint8)})
    for bomb in (Zstd().encode(bytes(300 * MIB)), Zstd().encode(bytes(10)), b"", b"no frame"):
        stored = bomb + crc32c.crc32c(bomb).to_bytes(4, "little")
        (forgery.attempt / "zarr" / "w" / "c" / "0" / "0").write_bytes(stored)
        files, arrays = decode_table(forgery.table, "")
        columns = {
            **{n: getattr(arrays["w"], n) for n in ("chunk", "file", "offset")},
            "length": np.array([len(stored)]),
            "crc": np.array([crc32c.crc32c(bomb)]),
        }
        forgery.write(table=encode_table(files, {"w": type(arrays["w"])(**columns)}))
        with at_most(256 * MIB), pytest.raises(ShardckptError, match="w"):
            shardckpt.restore(forgery.url)


def test_a_table_that_gives_a_chunk_gigabytes_is_refused_before_they_are_allocated(forgery):
    files, arrays = decode_table(forgery.table, "")
    changed = {
        path: type(rows)(rows.chunk, rows.file, rows.offset, np.full(len(rows), 2**32 - 1, np.uint32), rows.crc)
        for path, rows in arrays.items()
    }
    forgery.write(table=encode_table(files, changed))
    with at_most(512 * MIB):
        with pytest.raises(errors.FormatError, match="possible"):
            shardckpt.restore(forgery.url)
        damaged = {d.tensor for d in shardckpt.open(forgery.url).verify().damage}
    assert damaged >= {"w", "pair/0", "pair/1/0", "scalar"}


# --- code -----------------------------------------------------------------------------------------------------------

PACKAGE = Path(shardckpt.__file__).parent
FORBIDDEN_MODULES = {
    "pickle",
    "cPickle",
    "_pickle",
    "dill",
    "cloudpickle",
    "joblib",
    "marshal",
    "shelve",
    "code",
    "codeop",
    "runpy",
    "yaml",
}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__", "load", "loads", "system", "popen", "allow_pickle", "execfile"}
HARMLESS = {"json.loads", "re.compile"}


def test_the_package_neither_unpickles_nor_evaluates_anything():
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                assert not {alias.name.partition(".")[0] for alias in node.names} & FORBIDDEN_MODULES, path
            elif isinstance(node, ast.ImportFrom):
                assert (node.module or "").partition(".")[0] not in FORBIDDEN_MODULES, path
            elif isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert called in HARMLESS or called.rpartition(".")[2] not in FORBIDDEN_CALLS, f"{path}: {called}"
                assert "allow_pickle" not in {keyword.arg for keyword in node.keywords}, path


class Bomb:
    def __reduce__(self):
        return os.mkdir, (Bomb.proof,)


@pytest.mark.parametrize("part", ["checkpoint.json", "records/00000.json", "hosts/00000/table", "hosts/00000/0/d/00000", "manifest.ocdbt"])
def test_a_pickle_in_place_of_any_file_is_not_opened(tmp_path, part):
    forgery = Forgery(tmp_path)
    Bomb.proof = str(tmp_path / "exploded")
    path = (forgery.url if part == "checkpoint.json" else forgery.attempt) / part
    path.write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(ShardckptError) if part != "manifest.ocdbt" else contextlib.nullcontext():
        shardckpt.restore(forgery.url)
    use_in_every_way(forgery.url)
    assert not Path(Bomb.proof).exists()
    pickle.loads(path.read_bytes())
    assert Path(Bomb.proof).exists(), "it would not have exploded anyway"


@pytest.mark.parametrize(
    "leaf",
    [
        {"$leaf": ["os.system", "true"]},
        {"$leaf": ["builtins.eval", "1"]},
        {"$object": "os"},
        {"$numpy": ["object", "00"]},
        {"$numpy": ["float32", "00"]},
        {"$torch.dtype": "load"},
        {"$torch.dtype": "onnx"},
        {"$torch.device": "cuda:0; true"},
        {"$tied": "no such tensor"},
        {"$bytes": "%%"},
        "$unknown",
    ],
)
def test_a_leaf_that_is_none_is_refused(forgery, leaf):
    tree = {**forgery.commit["tree"], "leaves": [leaf]}
    forgery.write_raw(seal({**forgery.commit, "tree": tree}))
    with pytest.raises(errors.FormatError):
        shardckpt.restore(forgery.url)
