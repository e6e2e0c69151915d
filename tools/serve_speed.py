"""Speed of `shardckpt serve`: a catalogue, one download, and clients of slices and streams.

The catalogue has 10,000 checkpoints. The download is measured beside raw sendfile. There are 64
clients of slices and 64 of streams.

    python tools/serve_speed.py [--checkpoints 10000] [--mebibytes 1024] [--folder /dev/shm]

Prints a table of figures and targets. All checkpoints are made in a folder that is removed at the
end; use a tmpfs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from http.client import HTTPConnection
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import crc32c
import numpy as np

import shardckpt

if TYPE_CHECKING:
    from collections.abc import Callable

SLICE = 64 << 10
CLIENTS = 64
SECONDS = 10.0


class Service:
    """A service in a process of its own."""

    def __init__(self, root: Path) -> None:
        command = [sys.executable, "-m", "shardckpt", "serve", f"bench={root}", "--port", "0"]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self.url = self.process.stdout.readline().split()[-1]
        self.address = urlsplit(self.url).hostname, urlsplit(self.url).port

    def get(self, path: str) -> bytes:
        """The body at a path."""
        connection = HTTPConnection(*self.address, timeout=120)
        connection.request("GET", path)
        body = connection.getresponse().read()
        connection.close()
        return body

    def wait(self) -> float:
        """Seconds until the first scan is complete."""
        begun = time.perf_counter()
        while self.get("/readyz") != b"ready\n":
            time.sleep(0.05)
        return time.perf_counter() - begun

    @property
    def peak(self) -> int:
        """Most resident memory so far, in bytes."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return 1024 * int(
            next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]
        )

    def close(self) -> None:
        """End it."""
        self.process.terminate()
        self.process.wait(30)


def many_checkpoints(top: Path, number: int) -> None:
    """Copies of one small checkpoint, in 200 runs."""
    shardckpt.save(
        top / "first",
        {"w": np.ones(16)},
        options=shardckpt.SaveOptions(metadata={"metrics": {"loss": 1.0}}),
    )
    files = [path for path in (top / "first").rglob("*") if path.is_file()]
    for i in range(number):
        place = top / f"run-{i % 200:03}" / str(i)
        for path in files:
            new = place / path.relative_to(top / "first")
            new.parent.mkdir(parents=True, exist_ok=True)
            os.link(path, new)


def catalogue(folder: Path, number: int) -> dict[str, float]:
    """Seconds of a scan, and the 95th percentile of requests that list, filter and page."""
    many_checkpoints(folder / "many", number)
    service = Service(folder / "many")
    try:
        built = service.wait()
        connection = HTTPConnection(*service.address, timeout=60)
        took, cursor = [], None
        rng = random.Random(0)
        for i in range(400):
            run = f"bench/run-{rng.randrange(200):03}"
            paths = [
                "/v1/runs?limit=200",
                f"/v1/checkpoints?run={run}",
                "/v1/checkpoints?metric=loss%3C2&limit=100",
                "/v1/checkpoints?text=77",
            ]
            path = paths[i % 4] + (f"&cursor={cursor}" if cursor and i % 4 == 2 else "")
            begun = time.perf_counter()
            connection.request("GET", path)
            body = connection.getresponse().read()
            took.append(time.perf_counter() - begun)
            cursor = json.loads(body).get("next") if i % 4 == 2 else cursor
        return {"built_s": built, "list_p95_ms": 1000 * sorted(took)[int(0.95 * len(took))]}
    finally:
        service.close()


SENDFILE = """
import os, socket, sys
server, file = socket.create_server(("127.0.0.1", 0)), open(sys.argv[1], "rb")
print(server.getsockname()[1], flush=True)
size = os.fstat(file.fileno()).st_size
while True:
    one, _ = server.accept()
    one.recv(65536)
    one.sendall(f"HTTP/1.1 200 OK\\r\\nContent-Length: {size}\\r\\n\\r\\n".encode())
    sent = 0
    while sent < size:
        sent += os.sendfile(one.fileno(), file.fileno(), sent, min(size - sent, 1 << 30))
    one.close()
"""
"""A server that answers each connection with a file, by sendfile alone."""


def download(address: tuple[str, int], path: str) -> tuple[float, int]:
    """Bytes per second of a body, and its CRC32C."""
    buffer = memoryview(bytearray(1 << 20))
    with socket.create_connection(address) as one:
        begun = time.perf_counter()
        one.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        head = b""
        while b"\r\n\r\n" not in head:
            head += one.recv(65536)
        head, _, body = head.partition(b"\r\n\r\n")
        digest, got = crc32c.crc32c(body), len(body)
        while n := one.recv_into(buffer):
            digest, got = crc32c.crc32c(buffer[:n], digest), got + n
        assert f"content-length: {got}" in head.decode().lower(), head
        return got / (time.perf_counter() - begun), digest


async def slices(
    address: tuple[str, int], ask: Callable[[random.Random], str], name: str
) -> dict[str, float]:
    """Requests per second of 64 clients, and the 99th percentile of the time of one request.

    Each client asks for 64 KiB at random places.
    """
    took: list[float] = []
    end = time.perf_counter() + SECONDS

    async def client(seed: int) -> None:
        rng = random.Random(seed)
        reader, writer = await asyncio.open_connection(*address, limit=1 << 20)
        while time.perf_counter() < end:
            begun = time.perf_counter()
            writer.write(f"GET {ask(rng)}\r\n\r\n".encode())
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 20"), head
            await reader.readexactly(SLICE)
            took.append(time.perf_counter() - begun)
        writer.close()

    begun = time.perf_counter()
    await asyncio.gather(*(client(seed) for seed in range(CLIENTS)))
    rate, p99 = (
        len(took) / (time.perf_counter() - begun),
        1000 * sorted(took)[int(0.99 * len(took))],
    )
    return {f"{name}_per_s": rate, f"{name}_p99_ms": p99}


def a_range(path: str, size: int) -> Callable[[random.Random], str]:
    """Requests for ranges of a file."""

    def ask(rng: random.Random) -> str:
        first = rng.randrange(size - SLICE)
        return f"{path} HTTP/1.1\r\nHost: localhost\r\nRange: bytes={first}-{first + SLICE - 1}"

    return ask


def a_box(layers: int) -> Callable[[random.Random], str]:
    """Requests for boxes of tensors, anywhere."""

    def ask(rng: random.Random) -> str:
        i, row, column = rng.randrange(layers), rng.randrange(4096 - 128), rng.randrange(4096 - 128)
        box = f"{row}:{row + 128},{column}:{column + 128}"
        return (
            f"/v1/checkpoints/bench/1/tensors/layers.{i}.w?format=raw&box={box} HTTP/1.1\r\n"
            "Host: localhost"
        )

    return ask


def streaming(service: Service, path: str) -> int:
    """Peak memory of the service while 64 clients read a file, most of them slowly."""

    def client(number: int) -> None:
        end = time.perf_counter() + SECONDS
        with socket.create_connection(service.address) as one:
            one.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            while time.perf_counter() < end and one.recv(1 << 20):
                time.sleep(0 if number < 4 else 0.2)

    threads = [threading.Thread(target=client, args=(number,)) for number in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return service.peak


def files(folder: Path, mebibytes: int) -> dict[str, float]:
    """Downloads, slices and memory, of one checkpoint."""
    rng = np.random.default_rng(0)
    layers = max(1, mebibytes // 64)
    state = {
        f"layers.{i}.w": rng.integers(0, 255, (4096, 4096), np.uint32).view(np.float32)
        for i in range(layers)
    }
    shardckpt.save(folder / "one" / "1", state)
    shardckpt.export_safetensors(folder / "one" / "1", folder / "exported.safetensors")
    raw = subprocess.Popen(
        [sys.executable, "-c", SENDFILE, folder / "exported.safetensors"],
        stdout=subprocess.PIPE,
        text=True,
    )
    service = Service(folder / "one")
    path = "/files/bench/1/model.safetensors"
    try:
        service.wait()
        port = int(raw.stdout.readline())
        rates: dict[str, list[float]] = {"sendfile": [], "service": []}
        for _ in range(6):
            for name, at in (("sendfile", ("127.0.0.1", port)), ("service", service.address)):
                rate, digest = download(at, path)
                rates[name].append(rate)
                assert digest == download.__dict__.setdefault("digest", digest), "other bytes"
        figures = {
            f"{name}_gb_s": statistics.median(values) / 1e9 for name, values in rates.items()
        }
        figures["share"] = figures["service_gb_s"] / figures["sendfile_gb_s"]
        figures["peak_mib_one_client"] = service.peak / 2**20
        size = (folder / "exported.safetensors").stat().st_size
        figures |= asyncio.run(slices(service.address, a_box(layers), "boxes"))
        figures |= asyncio.run(slices(service.address, a_range(path, size), "ranges"))
        figures |= asyncio.run(slices(service.address, a_range(path, 48 << 20), "ranges_again"))
        figures["peak_mib_slices"] = service.peak / 2**20
        figures["peak_mib"] = streaming(service, path) / 2**20
        return figures
    finally:
        service.close()
        raw.kill()
        raw.wait()


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checkpoints", type=int, default=10_000)
    parser.add_argument("--mebibytes", type=int, default=1024)
    parser.add_argument("--folder", default="/dev/shm")
    chosen = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=chosen.folder, prefix="serve-speed-"))
    try:
        figures = (catalogue(folder, chosen.checkpoints) if chosen.checkpoints else {}) | (
            files(folder, chosen.mebibytes) if chosen.mebibytes else {}
        )
    finally:
        shutil.rmtree(folder)
    for name, value in figures.items():
        print(f"{name:22} {value:10.2f}")


if __name__ == "__main__":
    main()
