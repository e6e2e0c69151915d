"""Targets under load, measured at the real service in a process of its own: memory, and the time
that other users wait.

`pytest -s -m slow tests/serve/test_load.py` prints the figures.
"""

import sqlite3
import threading
import time
from contextlib import suppress
from http.client import HTTPException
from statistics import median

import numpy as np
import pytest
from load import apart, bomb, memory_of_all, slow_clients

import shardckpt
from shardckpt.serve.access.tokens import add_token

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
MOST_MEMORY = 512 << 20
MOST_WAIT = 1.0
CLIENTS = 300
ATTACKERS = 16
HUGE = "/v1/checkpoints/lab/odd/1/plan?mesh=data=1000000&rule=**%3D(data)"
ENDPOINTS = (  # those whose answers may be large
    "/ui/runs",
    "/ui/diff?a=lab/a/1&b=lab/b/1",
    "/ui/run/lab/a",
    "/ui/checkpoint/lab/many/1",
    "/ui/tensor/lab/a/1?name=w",
    "/ui/plan/lab/many/1?mesh=model=8&rule=**%3D()",
    "/v1/checkpoints/lab/many/1",
    "/v1/checkpoints/lab/many/1?only=**",
    "/v1/checkpoints/lab/a/1/tensors/w?format=raw",
    "/v1/checkpoints/lab/a/1/statistics/w",
    "/v1/checkpoints/lab/many/1/plan?mesh=model=8&rule=**%3D()",
    "/v1/diff?a=lab/many/1&b=lab/many/1",
    "/v1/openapi.json",
    "/files/lab/a/1/model.safetensors",
    "/files/lab/many/1/model.safetensors",
    "/files/lab/many/1/?max_shard_size=1MiB",
    "/zarr/lab/many/1/zarr.json",
    "/zarr/lab/a/1/w/c/0",
    "/raw/lab/many/1/checkpoint.json",
    "/lab/a/resolve/main/tokenizer.json",
    "/lab/a/resolve/main/model.safetensors",
)
HOSTILE = (
    HUGE,
    HUGE.replace("/v1/checkpoints", "/ui/plan").replace("/plan?", "?"),
    "/v1/checkpoints/lab/many/1?only=" + "*a" * 60,
    "/v1/diff?a=lab/many/1&b=lab/a/1",
    "/v1/checkpoints/lab/a/1/statistics/w?budget=9999999999",
    "/v1/checkpoints/lab/many/1",
    "/ui/checkpoint/lab/many/1",
    "/ui/diff?a=lab/many/1&b=lab/a/1",
    "/files/lab/many/1/model.safetensors?include=" + "*a" * 60,
    "/files/lab/many/1/?max_shard_size=1",
    "/v1/checkpoints?text=" + "a" * 2000,
    "/v1/checkpoints?metric=loss<1&sort=metric:loss&limit=1000",
    "/zarr/lab/many/1/zarr.json",
    "/ui/runs?text=" + "%25" * 500,
    "/lab/many/resolve/main+bfloat16/model.safetensors",
    "/v1/checkpoints/lab/bomb/1/statistics/w",
)


@pytest.fixture(scope="module")
def top(tmp_path_factory):
    """Checkpoints with a large tensor, with many tensors, with a plan that takes minutes, and with
    a chunk of 1 GiB of zeros."""
    top = tmp_path_factory.mktemp("loaded") / "runs"
    rng = np.random.default_rng(1)
    large = {"w": rng.integers(0, 99, 12 << 20, np.uint8)}
    shardckpt.save(top / "a" / "1", large)
    shardckpt.save(top / "b" / "1", large)
    shardckpt.save(top / "many" / "1", {"many": [np.ones(1)] * 20_000})
    shardckpt.save(
        top / "odd" / "1",
        {"w": np.ones((8, 8), np.float32), "odd": np.zeros((1,) * 32, np.float32)},
    )
    bomb(top / "bomb" / "1")
    (top / "a" / "tokenizer.json").write_bytes(b"{" + b" " * (33 << 20) + b"}")
    return top


class Peak:
    """The most memory that a service and its processes held, beyond that of an idle one."""

    def __init__(self, process):
        self._process, self.nbytes = process, 0
        self._idle, self._over = memory_of_all(process), threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._over.set()
        self._thread.join()

    def _watch(self):
        while not self._over.wait(0.2):
            self.nbytes = max(self.nbytes, memory_of_all(self._process) - self._idle)


def slowest(service, paths, seconds, **headers):
    """The longest time of a request of a user, while something else goes on."""
    times, end = dict.fromkeys(paths, 0.0), time.monotonic() + seconds
    while not any(times.values()) or time.monotonic() < end:
        for path in paths:
            begun = time.monotonic()
            assert service.ask(path, **headers).status == 200, path
            times[path] = max(times[path], time.monotonic() - begun)
        time.sleep(0.1)
    return times


@pytest.mark.parametrize("path", ENDPOINTS)
def test_slow_clients_of_an_endpoint_take_a_bounded_amount_of_memory(top, path):
    with apart(("lab", top)) as (service, process):
        service.ask(path)
        with Peak(process) as peak:
            clients = slow_clients(service, path, CLIENTS)
            slowest(service, ["/healthz"], 2)
            for one in clients:
                one.close()
        print(f"{CLIENTS} slow clients of {path}: {peak.nbytes >> 20} MiB over idle")
        assert peak.nbytes <= MOST_MEMORY


@pytest.mark.parametrize(
    "path",
    [
        "/v1/checkpoints/lab/bomb/1/tensors/w?format=raw&box=0:1",
        "/v1/checkpoints/lab/bomb/1/statistics/w",
        "/files/lab/bomb/1/model.safetensors",
        "/zarr/lab/bomb/1/w/c/0",
        HUGE,
        HUGE.replace("/v1/checkpoints", "/ui/plan").replace("/plan?", "?"),
    ],
)
def test_a_hundred_bombs_or_huge_plans_take_a_bounded_amount_of_memory(top, path):
    with apart(("lab", top)) as (service, process):
        with Peak(process) as peak:
            clients = slow_clients(service, path, 100)
            slowest(service, ["/healthz"], 5)
            for one in clients:
                one.close()
        print(f"100 x {path}: {peak.nbytes >> 20} MiB over idle")
        assert peak.nbytes <= MOST_MEMORY


@pytest.mark.parametrize(
    "paths",
    [HOSTILE, *((one,) for one in HOSTILE)],
    ids=lambda paths: "mixed" if len(paths) > 1 else paths[0][:40],
)
def test_hostile_requests_of_one_user_make_no_other_user_wait(top, tmp_path, paths):
    headers = {
        name: {"Authorization": f"Bearer {add_token(tmp_path / 'tokens', name, 'read')}"}
        for name in ("ann", "eve")
    }
    with apart(("lab", top), flags=("--token-file", tmp_path / "tokens")) as (service, _):
        over = threading.Event()

        def attack(number):
            at = number
            while not over.is_set():
                with suppress(OSError, HTTPException):
                    service.ask(paths[at % len(paths)], **headers["eve"])
                at += 1

        attackers = [
            threading.Thread(target=attack, args=(i,), daemon=True) for i in range(ATTACKERS)
        ]
        for one in attackers:
            one.start()
        time.sleep(1)
        times = slowest(
            service, ["/healthz", "/v1/runs"], 8 if len(paths) > 1 else 2, **headers["ann"]
        )
        over.set()
        print(
            f"{ATTACKERS} x {'all' if len(paths) > 1 else paths[0][:60]}: "
            f"{ ({name: round(took, 3) for name, took in times.items()}) }"
        )
        assert max(times.values()) <= MOST_WAIT


def test_a_journal_of_a_million_verifications_delays_neither_metrics_nor_pages(tmp_path):
    shardckpt.save(tmp_path / "runs" / "a" / "1", {"w": np.ones(3)})
    headers = {"Authorization": f"Bearer {add_token(tmp_path / 'tokens', 'ann', 'read')}"}
    flags = ("--token-file", tmp_path / "tokens", "--state", tmp_path / "state", "--scrub", "30d")
    paths = ("/metrics", "/ui/health") * 50
    with apart(("lab", tmp_path / "runs"), flags=flags) as (service, process):
        before = memory_of_all(process)
        quiet = [max(slowest(service, [path], 0.0, **headers).values()) for path in paths]
    with sqlite3.connect(tmp_path / "state" / "journal.sqlite") as db:
        rows = (
            (f"lab/r{i % 50}/{i}", "x", "2026-11-20T10:00:00+00:00", "2026-11-20T10:00:05+00:00")
            for i in range(1_000_000)
        )
        db.executemany(
            "INSERT INTO verifications (id, attempt, begun, ended) VALUES (?,?,?,?)", rows
        )
    with apart(("lab", tmp_path / "runs"), flags=flags) as (service, process):
        took = [max(slowest(service, [path], 0.0, **headers).values()) for path in paths]
        more = memory_of_all(process) - before
        print(
            f"a journal of 1,000,000 verifications: median {median(took):.3f} s, most "
            f"{max(took):.3f} s, {more >> 20} MiB more"
        )
        assert median(took) <= max(0.2, 3 * median(quiet))
        assert max(took) <= max(1, 3 * max(quiet))  # beside other programs
        assert more <= 64 << 20
