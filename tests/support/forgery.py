"""A checkpoint as whoever forges one would make it, and what can be done with it.

Digests are not a defence against such a one: who makes a checkpoint makes its digests, and so do
these tests.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import hashlib
import json
import os
import resource
import shutil
from pathlib import Path

import numpy as np
import zarr
from placeholders import put_placeholder

import shardckpt
from shardckpt import SaveOptions, ShardckptError
from shardckpt.format.table import TableHeader
from shardckpt.runs.catalog import catalog
from shardckpt.state import iter_leaves

MIB = 1 << 20
LONGEST_MESSAGE = 2000
"""Characters, whatever a checkpoint holds; its names and its own place are in some."""


def make_state():
    rng = np.random.default_rng(0)
    return {
        "w": rng.integers(0, 256, (40, 60), np.uint8),
        "pair": (rng.standard_normal((6, 5)).astype(np.float32), [rng.standard_normal(7)]),
        "scalar": np.array(3.5),
        "empty": np.zeros((0, 4), np.int16),
        "leaves": [1, 2**60, -0.5, "text", b"bytes", None, {1: 2j}],
        "own": shardckpt.PerProcess([np.arange(3), "mine"]),
    }


TRUTH = make_state()
TENSORS = {
    "w": TRUTH["w"],
    "pair/0": TRUTH["pair"][0],
    "pair/1/0": TRUTH["pair"][1][0],
    "scalar": TRUTH["scalar"],
    "empty": TRUTH["empty"],
}


def seal(record, version=(1, 0)):
    """A record with a right digest, whatever is in it."""
    body = (
        record if isinstance(record, str) else json.dumps(record, separators=(",", ":"))
    ).encode("utf-8", "surrogatepass")
    head = (
        f'{{"format":"shardckpt","version":[{version[0]},{version[1]}],'
        f'"sha256":"{hashlib.sha256(body).hexdigest()}","record":'
    )
    return head.encode() + body + b"}\n"


def opened_envelope(path):
    return json.loads(path.read_bytes())["record"]


class Forgery:
    """A checkpoint that is written anew from its parts, each vouched for by the next."""

    def __init__(self, url):
        """Take a real one to pieces."""
        self.url = url
        self.commit = opened_envelope(url / "checkpoint.json")
        self.attempt = url / self.commit["attempt"]
        self.hosts = [
            opened_envelope(self.attempt / reference["key"]) for reference in self.commit["hosts"]
        ]
        self.tables = [(self.attempt / host["table"]["key"]).read_bytes() for host in self.hosts]
        self.table = (self.attempt / self.commit["table"]["key"]).read_bytes()
        self.values = [opened_envelope(self.attempt / host["values"]["key"]) for host in self.hosts]
        self.contents = [
            opened_envelope(self.attempt / host["contents"]["key"]) for host in self.hosts
        ]

    @classmethod
    def of_one_host(cls, url, layout="packed", compression=None, state=TRUTH):
        """Of that state, parts of which have shardings."""
        mesh = shardckpt.Mesh((2, 2), ("x", "y"), [3, 1, 0, 2])
        shardings = {
            "w": shardckpt.Sharding(mesh, shardckpt.PartitionSpec("x", "y")),
            "pair/0": shardckpt.OpSharding.replicated(4),
        }
        shardings = {
            name: sharding
            for name, sharding in shardings.items()
            if name.partition("/")[0] in state
        }
        options = SaveOptions(layout=layout, compression=compression, shardings=shardings)
        put_placeholder(url)
        shardckpt.save(url, {"own": shardckpt.PerProcess(None), **state}, options=options)
        return cls(url)

    def write(
        self,
        *,
        commit=None,
        host=None,
        hosts=None,
        tables=None,
        table=None,
        values=None,
        contents=None,
        of_all=True,
    ):
        """Write everything as it was but for the parts given, and what vouches for them.

        Args:
            commit: the commit record.
            host, hosts: host 0's record; or by host.
            tables, values, contents: the same of their chunk tables, values and contents.
            table: the chunk table of all.
            of_all: False: there is none, and readers need the hosts' own.
        """
        commit = copy.deepcopy(self.commit if commit is None else commit)
        hosts = {0: host} if host is not None else hosts or {}
        for n, record in enumerate(self.hosts):
            changed = copy.deepcopy(hosts.get(n, record))
            for member, parts, original in (
                ("table", tables, self.tables),
                (
                    "values",
                    values and {i: seal(v) for i, v in values.items()},
                    [seal(v) for v in self.values],
                ),
                (
                    "contents",
                    contents and {i: seal(c) for i, c in contents.items()},
                    [seal(c) for c in self.contents],
                ),
            ):
                given = (parts or {}).get(n)
                data = original[n] if given is None else given
                place = record[member]["key"]
                if given is not None:
                    if member == "contents":  # others may share the file
                        place = f"contents/{hashlib.sha256(data).hexdigest()}.json"
                        # The only host of an attempt has none.
                        (self.attempt / "contents").mkdir(exist_ok=True)
                    changed[member] = (table_reference if member == "table" else _reference)(
                        place, data
                    )
                (self.attempt / place).write_bytes(data)
            data, key = seal(changed), self.commit["hosts"][n]["key"]
            if changed != record:
                commit["hosts"][n] = _reference(key, data)
            (self.attempt / key).write_bytes(data)
        whole = self.table if table is None else table
        (self.attempt / "table").write_bytes(whole)
        if table is not None:
            commit["table"] = table_reference("table", table)
        if not of_all:
            del commit["table"]
        self.write_raw(seal(commit))

    def write_raw(self, data):
        """Write a commit record as it is."""
        (self.url / "checkpoint.json").write_bytes(data)

    def unpublish(self):
        """Leave the attempt as its hosts do, before anybody commits it."""
        put_placeholder(self.url)
        shutil.rmtree(self.attempt / "d", ignore_errors=True)
        for path in ("table", "small", "hosts/small/table", "manifest.ocdbt"):
            (self.attempt / path).unlink(missing_ok=True)


def _reference(key, data):
    return {"key": key, "size": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def table_reference(key, data):
    """Vouches for a chunk table, or for what is to pass for one."""
    try:
        header = TableHeader.decode(data, "").nbytes
    except ShardckptError:
        header = len(data)
    return {
        "key": key,
        "size": len(data),
        "header": header,
        "sha256": hashlib.sha256(data[:header]).hexdigest(),
    }


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


def attempted(action):
    """Result of an action, or None if it raises a ShardckptError: no other error, and none with an
    unreadable message."""
    try:
        return action()
    except ShardckptError as e:
        message = str(e)
    assert 0 < len(message) <= LONGEST_MESSAGE, f"{len(message)} characters: {message:.500}"
    return None


def use_in_every_way(url):
    """Do all that can be done with a checkpoint; only errors of ours may come of it. What was
    restored, or None."""
    attempted(lambda: catalog(url, everything=True))
    checkpoint = attempted(lambda: shardckpt.open(url))
    if checkpoint is None:
        return None
    for name in checkpoint.names():
        info = checkpoint.info(name)
        corner = shardckpt.Box((0,) * len(info.shape), tuple(min(1, n) for n in info.shape))
        elements = attempted(lambda name=name, corner=corner: checkpoint.read(name, corner))
        assert elements is None or (
            elements.shape == corner.shape and elements.dtype == info.dtype.numpy
        )
        attempted(lambda name=name: (checkpoint.stock_spec(name), checkpoint.stock_url(name)))
    attempted(lambda: list(iter_leaves(checkpoint.tree)))
    report = attempted(checkpoint.verify)
    assert report is None or all(len(damage.reason) <= LONGEST_MESSAGE for damage in report.damage)
    attempted(lambda: sorted(zarr.open_group(checkpoint.zarr_store(), mode="r")))
    return attempted(lambda: shardckpt.restore(url))


class Watch:
    """Says whether anybody opened the secrets in some directories, which it puts there."""

    def __init__(self, directories):
        self.libc = ctypes.CDLL(None, use_errno=True)
        self.watch = self.libc.inotify_init1(os.O_NONBLOCK)
        assert self.watch >= 0
        for directory in directories:
            directory.mkdir(exist_ok=True)
            (directory / "secret").write_bytes(b"secret" * 1000)
            # IN_OPEN | IN_ACCESS.
            assert self.libc.inotify_add_watch(self.watch, os.fsencode(directory), 0x21) >= 0
            (directory / "secret").read_bytes()
            assert self.opened(), "the watch sees nothing"

    def opened(self):
        """Whether anybody did since it was last asked."""
        try:
            return os.read(self.watch, 1 << 16) != b""
        except BlockingIOError:
            return False

    def __enter__(self):
        return self

    def __exit__(self, *_error):
        os.close(self.watch)
