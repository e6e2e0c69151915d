"""A real service on a free port of loopback, and runs that it serves, for tests."""

from __future__ import annotations

import json
import socket
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import ml_dtypes
import numpy as np

import shardckpt
from shardckpt import Mesh, PartitionSpec, SaveOptions, Sharding
from shardckpt.serve.options import ServeOptions
from shardckpt.serve.server import make_server

if TYPE_CHECKING:
    from shardckpt.serve.jobs.upkeep import Upkeep

MESH = Mesh((4, 2), ("data", "model"))
SHARDINGS = {
    "model/embed.weight": Sharding(MESH, PartitionSpec("data", "model")),
    "model/head": Sharding(MESH, PartitionSpec("model")),
}


def state(step):
    """A state of several dtypes that differs for each step."""
    rng = np.random.default_rng(step)
    return {
        "model": {
            "embed.weight": rng.normal(size=(64, 48)).astype(np.float32),
            "head": rng.normal(size=(16, 8)).astype(ml_dtypes.bfloat16),
            "scale": np.full((), step, np.float32),
            "none": np.zeros((0, 4), np.float32),
        },
        "optimizer": {"count": np.arange(300, dtype=np.int64)},
        "step": step,
    }


def save_run(root, steps, **metrics):
    """Save steps of a run, with a loss that falls."""
    for step in steps:
        metadata = {"metrics": {"loss": 4 - step / 10, **metrics}}
        shardckpt.save(
            root / str(step),
            state(step),
            options=SaveOptions(shardings=SHARDINGS, metadata=metadata),
        )


@dataclass
class Reply:
    """An answer of the service."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self):
        return json.loads(self.body)


@dataclass
class Running:
    """A running service."""

    url: str
    options: ServeOptions
    upkeep: Upkeep | None = None
    routes: tuple = ()
    """The routes of its application."""

    @property
    def address(self):
        parts = urlsplit(self.url)
        return parts.hostname, parts.port

    def ask(self, path, method="GET", body=None, **headers):
        """One request on a connection of its own; underscores in names of headers are hyphens."""
        connection = self.connect()
        try:
            connection.request(
                method,
                path,
                body,
                {name.replace("_", "-"): value for name, value in headers.items()},
            )
            answer = connection.getresponse()
            return Reply(
                answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read()
            )
        finally:
            connection.close()

    def connect(self):
        """A connection."""
        return HTTPConnection(*self.address, timeout=60)

    def get(self, path, status=200, **headers):
        """The document at a path."""
        reply = self.ask(path, **headers)
        assert reply.status == status, reply
        return reply.json

    def send(self, data, seconds=60):
        """Bytes that come back for raw bytes, until the service closes the connection."""
        with socket.create_connection(self.address, timeout=seconds) as one:
            one.sendall(data)
            answer = b""
            while part := one.recv(65536):
                answer += part
            return answer

    def wait_until(self, holds, seconds=60):
        """Wait until a condition holds."""
        end = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < end, "it never held"
            time.sleep(0.02)


@dataclass
class RunningAtSocket(Running):
    """A running service at a unix socket."""

    def connect(self):
        connection = HTTPConnection("localhost", timeout=60)
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.connect(self.url.removeprefix("unix:"))
        return connection


@contextmanager
def serving(*roots, **options):
    """Serve roots; ends with the block."""
    chosen = ServeOptions(
        roots=tuple(f"{name}={place}" for name, place in roots), port=0, **options
    )
    begun, urls = threading.Event(), []
    server = make_server(chosen, lambda url: (urls.append(url), begun.set()))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        assert begun.wait(60)
        kind = RunningAtSocket if urls[0].startswith("unix:") else Running
        running = kind(urls[0], chosen, server.service.upkeep, tuple(server.config.app._app.routes))
        running.wait_until(lambda: running.ask("/readyz").status == 200)
        yield running
    finally:
        server.should_exit = True
        thread.join(60)
        assert not thread.is_alive()
