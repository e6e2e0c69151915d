"""Count what each host of a save asks of an object store, by saving for real.

    python -m tools.scale.counted --hosts 3 --layout packed

Every host is a process of its own, led to Cloud Storage's emulator through a proxy of its own
(`tools/fault_proxy.py`), so what the proxy has seen is what that host has asked. `bucket.py` makes
much larger jobs of it.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

import shardckpt
from shardckpt import Coordinator, SaveOptions

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

from emulators import gcs_emulator  # noqa: E402  (found by the path above)
from fault_proxy import FaultProxy  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Request", "emulated_save"]

MiB = 1 << 20
MEMORY = 16 * MiB
"""Limit of each host; data files are then a tenth of it."""
TIMEOUT = 100
"""Seconds."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request of one host, in the order in which they began."""

    kind: str
    """`read`, `stat`, `list` or `upload`."""
    key: str
    """The object, relative to the attempt, or `checkpoint.json`."""

    @property
    def writes(self) -> bool:
        """Whether it counts as a write."""
        return self.kind in ("upload", "delete")

    @property
    def what(self) -> str:
        """Kind of the object: `data` for chunks, else the key without numbers and digests.

        Files of chunks are `data`, too.

        >>> Request("upload", "hosts/00003/0/d/00001").what
        'data'
        >>> Request("read", "records/00012.json").what
        'records/#.json'
        """
        parts = self.key.split("/")
        if parts[0] == "zarr" or (
            parts[0] == "hosts" and parts[-2] == "d" and parts[-1].isdecimal()
        ):
            return "data"
        if parts[0] == "contents":
            return "contents/#"
        return "/".join(
            "#" if p.isdecimal() else "#.json" if p.removesuffix(".json").isdecimal() else p
            for p in parts
        )

    @property
    def host(self) -> int | None:
        """Host that the object belongs to; None: it belongs to no single host."""
        parts = self.key.removesuffix(".json").split("/")
        return (
            int(parts[1])
            if parts[0] in ("hosts", "records") and len(parts) > 1 and parts[1].isdecimal()
            else None
        )


def emulated_save(
    *, hosts: int = 3, tensors: int = 8, mebibytes: int = 3, layout: str = "packed"
) -> list[list[Request]]:
    """Save once from so many processes; what each has asked of Cloud Storage.

    Args:
        hosts: how many processes; the first one commits.
        tensors: how many, of `mebibytes` each, which the hosts write between them.
        mebibytes: per tensor.
        layout: "packed" or "zarr".
    """
    with ExitStack() as stack:
        emulator = stack.enter_context(gcs_emulator())
        url = emulator.url("run")
        keys = stack.enter_context(tempfile.TemporaryDirectory())
        proxies = [stack.enter_context(FaultProxy(emulator.endpoint)) for _ in range(hosts)]
        children = []
        for host, proxy in enumerate(proxies):
            described = [
                "--url",
                url,
                "--keys",
                keys,
                "--tensors",
                tensors,
                "--mebibytes",
                mebibytes,
                "--layout",
                layout,
            ]
            command = [
                sys.executable,
                "-m",
                "tools.scale.counted",
                "--host",
                host,
                "--hosts",
                hosts,
                *described,
            ]
            children.append(
                subprocess.Popen(
                    [*map(str, command)], cwd=ROOT, env={**os.environ, **emulator.env(proxy.url)}
                )
            )
            stack.callback(children[-1].kill)
        if sum(abs(child.wait(TIMEOUT)) for child in children):
            raise RuntimeError("a host could not save; its error is above")
        return [_seen(proxy, url) for proxy in proxies]


def _seen(proxy: FaultProxy, url: str) -> list[Request]:
    """Requests that have come to a place through a proxy."""
    requests = []
    for exchange in proxy.traffic.exchanges(f"{url.partition('://')[2]}/"):
        key = exchange.operation.object.removeprefix(f"{url.partition('://')[2]}/")
        requests.append(
            Request(
                exchange.operation.kind, key if key == "checkpoint.json" else key.partition("/")[2]
            )
        )
    return requests


class _Files(Coordinator):
    """Keys are files of a directory."""

    def __init__(self, directory: Path, process: int, processes: int) -> None:
        self._directory = directory
        super().__init__(process, processes, timeout=TIMEOUT)

    def _set(self, key: str, value: bytes) -> None:
        path = self._directory / key.replace("/", "!")
        new = path.with_name(f"{path.name}.{os.getpid()}")
        new.write_bytes(value)
        new.replace(path)

    def _get(self, key: str) -> bytes | None:
        path = self._directory / key.replace("/", "!")
        return path.read_bytes() if path.exists() else None


def _save(asked: argparse.Namespace) -> None:
    """Be one of the hosts."""
    elements = np.arange(asked.mebibytes * MiB // 4, dtype=np.uint32).reshape(-1, 1024)
    state = {f"w{i}": elements + np.uint32(i) for i in range(asked.tensors)}
    coordinator = _Files(Path(asked.keys), asked.host, asked.hosts)
    shardckpt.save(
        asked.url,
        state,
        options=SaveOptions(layout=asked.layout, memory_limit=MEMORY),
        coordinator=coordinator,
    )


def summary(requests: Sequence[Request]) -> str:
    """Requests by kind and object."""
    return ", ".join(
        f"{n} × {kind} {what}"
        for (kind, what), n in Counter((r.kind, r.what) for r in requests).items()
    )


def main() -> None:
    """Print what each host has asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--hosts", type=int, default=3)
    parser.add_argument("--tensors", type=int, default=8)
    parser.add_argument("--mebibytes", type=int, default=3, help="per tensor")
    parser.add_argument("--layout", choices=["packed", "zarr"], default="packed")
    for name, kind in {"--host": int, "--url": str, "--keys": str}.items():
        parser.add_argument(name, type=kind, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.host is not None:
        _save(asked)
        return
    by_host = emulated_save(
        hosts=asked.hosts, tensors=asked.tensors, mebibytes=asked.mebibytes, layout=asked.layout
    )
    for host, requests in enumerate(by_host):
        print(f"host {host}: {summary(requests)}")


if __name__ == "__main__":
    main()
