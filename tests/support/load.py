"""A service in a process of its own, how much memory it takes, and requests that would harm it."""

from __future__ import annotations

import hashlib
import socket
import struct
import subprocess
import sys
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

from crc32c import crc32c
from numcodecs.zstd import compress
from serving import Running

from shardckpt.format.documents import seal
from shardckpt.serve.options import ServeOptions

SLOW = 60


@contextmanager
def apart(*roots, flags=()):
    """A service in a process of its own, and that process; `flags` are further arguments."""
    given = [f"{name}={place}" for name, place in roots]
    command = [sys.executable, "-m", "shardckpt", "serve", *given, "--port", "0", *map(str, flags)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        try:
            service = Running(
                process.stdout.readline().split()[-1], ServeOptions(roots=tuple(given), port=0)
            )
            service.wait_until(lambda: service.ask("/readyz").status == 200)
            yield service, process
        finally:
            process.kill()


def resident(process):
    """Bytes of memory of a process."""
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmRSS"))


def family(process):
    """Ids of a process and of all its descendants."""
    pids = [process.pid]
    for pid in pids:
        for tasks in Path(f"/proc/{pid}/task").glob("*/children"):
            with suppress(OSError):
                pids += map(int, tasks.read_text().split())
    return pids


def memory_of_all(process):
    """Bytes that a process and its descendants hold; pages that several share count once."""
    total = 0
    for pid in family(process):
        with suppress(OSError):
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            # No line, if it has ended meanwhile.
            total += sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))
    return total


def slow_clients(service, path, count=SLOW, room=4096, **headers):
    """Connections that have asked and do not read."""
    more = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
    sockets = []
    for _ in range(count):
        one = socket.socket()
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, room)
        one.connect(("127.0.0.1", urlsplit(service.url).port))
        one.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n{more}\r\n".encode())
        sockets.append(one)
    return sockets


def bomb(place, dtype="float32"):
    """A checkpoint of some KiB whose only chunk has 1 GiB of zeros."""
    n, attempt = 1 << 28, "20261126T105723-aaaaaaaa"
    at = place / attempt
    (at / "d0").mkdir(parents=True)
    (at / "records").mkdir()
    body = compress(bytes(4 * n), 3)
    stored = body + struct.pack("<I", crc32c(body))
    (at / "d0" / "0").write_bytes(stored)
    (at / "records" / "00000.json").write_bytes(b"{}")
    row, listed = (
        struct.pack("<QIQII", 0, 0, 0, len(stored), crc32c(body)),
        b'{"files":["d0/0"],"arrays":[["w",1]],"block":128}',
    )
    head = b"SHCKTAB2" + struct.pack("<I", len(listed)) + listed + hashlib.sha256(row).digest()[:16]
    (at / "table").write_bytes(head + row)
    digest = [hashlib.sha256(data).hexdigest() for data in (b"{}", head)]
    (place / "checkpoint.json").write_bytes(
        seal(
            {
                "attempt": attempt,
                "created": "2026-11-26T10:57:23+00:00",
                "writer": "x",
                "layout": "packed",
                "compression": "zstd",
                "hosts": [{"key": "records/00000.json", "size": 2, "sha256": digest[0]}],
                "table": {
                    "key": "table",
                    "size": len(head + row),
                    "header": len(head),
                    "sha256": digest[1],
                },
                "totals": {"tensors": 1, "bytes": 4 * n, "stored_bytes": len(stored), "chunks": 1},
                "metadata": {},
                "shardings": [],
                "meshes": [],
                "tensors": {"w": {"shape": [n], "dtype": dtype, "chunks": [n]}},
                "tree": {"w": "$tensor"},
            }
        )
    )
