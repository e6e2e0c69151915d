"""A bucket to measure on, and its floors.

The server is fake-gcs-server in memory, reached directly, or like a Cloud Storage over TLS or some
way off. The module has the floors of both.

The emulator shares the cores with those that are measured, and takes no more than some hundred MB/s
of puts: so the own processor time of each subject is told beside its rate. Over TLS the emulator
has a certificate of the bench's own, which all clients are led to by environment variables;
`tools.bench.delay` makes the way longer.
"""

from __future__ import annotations

import json
import ssl
import subprocess
import sys
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from http.client import HTTPConnection, HTTPSConnection
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

from tools.bench.measure import GETS, PUTS, TENSORSTORE, Run, Subject
from tools.bench.pieces import pieces_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from typing import Self

    from tools.bench.pieces import Bytes, Piece

__all__ = ["DELAYS", "Folder", "HttpClient", "Server", "http_floors", "serve"]

OBJECT_BYTES, RANGE_BYTES = 64 << 20, 4 << 20
"""Most bytes of an object that is put, and bytes of a range that is got. Objects are smaller if
streams would have none."""
DELAYS = {"gs": 0, "gs-tls": 0, "gs-20ms": 20, "gs-100ms": 100}
"""Storage → milliseconds that a request is longer on its way."""
STREAMS, FAR_STREAMS = (4,), (16, 32)
"""Requests at a time that the floors have; the second where the way is long. Of a state of 256 MiB,
shardckpt has at most 4 puts of data under way, one for each data file of 64 MiB, and 4 gets where
the way is short, 25 where it is long."""


@dataclass(frozen=True, slots=True)
class Server:
    """A running server with one bucket."""

    bucket: str
    endpoint: str
    """Address to which measured subjects send their requests."""
    beside: str
    """Address for the bench's own look-ups and for removing what was written: the emulator itself,
    without TLS and without delay."""
    streams: list[int]
    """Requests at a time: floors for each of them."""
    peers: bool
    """Whether peers are measured there, or shardckpt and floors alone."""

    def to_json(self) -> dict[str, Any]:
        """Description of the server for a process that measures."""
        return asdict(self)


@contextmanager
def serve(
    storage: str, directory: Path, streams: list[int]
) -> Iterator[tuple[Server, dict[str, str]]]:
    """The server of a storage, and the environment variables that lead a process to it.

    Args:
        storage: one of `DELAYS`.
        directory: where a certificate goes.
        streams: requests at a time that floors have; empty: those of the storage.
    """
    from tools.emulators import child_server, gcs_emulator

    delay = DELAYS[storage]
    streams = streams or list(FAR_STREAMS if delay else STREAMS)
    with ExitStack() as stack:
        certificate = _certificate(directory) if storage == "gs-tls" else None
        emulator = stack.enter_context(gcs_emulator(certificate=certificate))
        endpoint, variables = emulator.endpoint, {}
        if certificate is not None:
            endpoint = f"https://127.0.0.1:{emulator.tls_port}"
            names = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "TENSORSTORE_CA_BUNDLE")
            variables = dict.fromkeys(names, str(certificate[0])) | {"NO_GCE_CHECK": "true"}
        if delay:
            command = [sys.executable, "-m", "tools.bench.delay"]
            port = stack.enter_context(
                child_server(lambda port: [*command, str(port), str(emulator.port), str(delay)])
            )
            endpoint = f"http://127.0.0.1:{port}"
        yield (
            Server(emulator.bucket, endpoint, emulator.endpoint, streams, storage == "gs"),
            emulator.env(endpoint) | variables,
        )


def _certificate(directory: Path) -> tuple[Path, Path]:
    """Files of a certificate for this machine that is its own authority, and of its private key."""
    certificate, key = directory / "certificate.pem", directory / "key.pem"
    options = [
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "2",
        "-subj",
        "/CN=127.0.0.1",
        "-addext",
        "subjectAltName=IP:127.0.0.1",
    ]
    command = ["openssl", "req", "-x509", *options, "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return certificate, key


class Folder(str):
    """The url of a folder of a bucket, with what the bench needs of a Path."""

    __slots__ = ("name", "server")
    server: Server
    name: str

    def __new__(cls, server: Server, name: str) -> Self:
        """The folder of that name."""
        folder = super().__new__(cls, f"gs://{server.bucket}/{name}")
        folder.server, folder.name = server, name
        return folder

    def __truediv__(self, name: str) -> Self:
        return type(self)(self.server, f"{self.name}/{name.replace(' ', '-')}")

    def exists(self) -> bool:
        """Whether there is an object below it."""
        return bool(self.objects())

    def objects(self) -> dict[str, int]:
        """Name → size, of the objects below it."""
        page = self._ask("GET", f"?prefix={quote(self.name, '')}/&maxResults=1000000")
        return {item["name"]: int(item["size"]) for item in json.loads(page).get("items", [])}

    def remove(self) -> None:
        """Remove all objects below it."""
        for name in self.objects():
            self._ask("DELETE", f"/{quote(name, '')}")

    def _ask(self, method: str, what: str) -> bytes:
        connection = HTTPConnection(urlsplit(self.server.beside).netloc)
        try:
            return _answer(connection, method, f"/storage/v1/b/{self.server.bucket}/o{what}")
        finally:
            connection.close()


def http_floors(sources: list[Bytes], places: list[Bytes], folder: Folder) -> list[Subject]:
    """Plain puts and gets, and TensorStore's puts and gets of the same sizes.

    Plain puts are from memory, and plain gets are of ranges into place.
    """
    return [
        subject
        for streams in folder.server.streams
        for subject in _with_streams(sources, places, folder, streams)
    ]


def _with_streams(
    sources: list[Bytes], places: list[Bytes], folder: Folder, streams: int
) -> list[Subject]:
    nbytes = sum(s.nbytes for s in sources)
    size = min(OBJECT_BYTES, -(-nbytes // streams))
    pieces, into = pieces_of(sources, size), pieces_of(places, size)
    out, kept = (folder / f"{name}-{streams}" for name in ("floor-out", "floor"))
    sent, stored = (
        {(path / f"{i:03d}").name: piece for i, piece in enumerate(pieces)} for path in (out, kept)
    )
    ranges = [
        (name, i * RANGE_BYTES, part)
        for name, piece in zip(stored, into, strict=True)
        for i, part in enumerate(pieces_of(piece, RANGE_BYTES))
    ]
    http, tensorstore = (
        HttpClient(folder.server, streams),
        _TensorStore(folder.server.bucket, streams),
    )

    def written() -> None:
        if not kept.exists():
            http.put(stored)

    def save(client: HttpClient | _TensorStore) -> dict[str, Run]:
        return {"save": Run(lambda: client.put(sent), nbytes, writes=out)}

    def restore(client: HttpClient | _TensorStore) -> dict[str, Run]:
        return {"restore": Run(lambda: client.get(ranges), nbytes, before=written)}

    return [
        Subject(f"{PUTS}, {streams} streams", save(http), floor=True),
        Subject(f"{GETS}, {streams} streams", restore(http), floor=True),
        Subject(
            f"{TENSORSTORE}, {streams} streams",
            save(tensorstore) | restore(tensorstore),
            floor=True,
        ),
    ]


class HttpClient:
    """Plain requests, at most so many at a time, on connections that are kept."""

    def __init__(self, server: Server, streams: int) -> None:
        place, context = urlsplit(server.endpoint), ssl.create_default_context()
        self._objects = f"/storage/v1/b/{server.bucket}/o"
        self._connections = [
            HTTPSConnection(place.netloc, context=context)
            if place.scheme == "https"
            else HTTPConnection(place.netloc)
            for _ in range(streams)
        ]
        self._idle: SimpleQueue[HTTPConnection] = SimpleQueue()
        for connection in self._connections:
            self._idle.put(connection)
        self._pool = ThreadPoolExecutor(streams)

    def put(self, objects: dict[str, Piece]) -> None:
        """Put objects."""
        list(self._pool.map(self._put, objects, objects.values()))

    def get(self, ranges: list[tuple[str, int, Piece]]) -> None:
        """Read ranges, each from an offset of an object, into place."""
        list(self._pool.map(self._get, *zip(*ranges, strict=True)))

    def close(self) -> None:
        """End all connections."""
        self._pool.shutdown()
        for connection in self._connections:
            connection.close()

    def _put(self, name: str, piece: Piece) -> None:
        connection = self._idle.get()
        headers = {
            "Content-Type": "application/octet-stream",
            "Content-Length": str(_nbytes(piece)),
        }
        path = f"/upload{self._objects}?uploadType=media&name={quote(name, '')}"
        _answer(connection, "POST", path, [memoryview(part) for part in piece], headers)
        self._idle.put(connection)

    def _get(self, name: str, offset: int, piece: Piece) -> None:
        connection, length = self._idle.get(), _nbytes(piece)
        path = f"{self._objects}/{quote(name, '')}?alt=media"
        connection.request("GET", path, headers={"Range": f"bytes={offset}-{offset + length - 1}"})
        with connection.getresponse() as response:
            if response.status != 206 or response.length != length:
                raise OSError(
                    f"GET {path}: {response.status}, {response.length} bytes instead of {length}"
                )
            for part in piece:
                view = memoryview(part)
                while view:
                    got = response.readinto(view)
                    if not got:
                        raise OSError(f"GET {path}: the answer ended early")
                    view = view[got:]
            response.read()  # the end, after which the connection can be used again
        self._idle.put(connection)


def _answer(
    connection: HTTPConnection,
    method: str,
    path: str,
    body: list[memoryview] | None = None,
    headers: dict[str, str] | None = None,
) -> bytes:
    connection.request(method, path, body, headers or {})
    with connection.getresponse() as response:
        content = response.read()
        if response.status >= 300:
            raise OSError(f"{method} {path}: {response.status} {content[:200]!r}")
        return content


def _nbytes(piece: Piece) -> int:
    return sum(part.nbytes for part in piece)


class _TensorStore:
    """TensorStore's requests, at most so many at a time.

    It takes and gives bytes, which are copied from and to the arrays.
    """

    def __init__(self, bucket: str, streams: int) -> None:
        import tensorstore as ts

        context = {"gcs_request_concurrency": {"limit": streams}}
        self._store = ts.KvStore.open(
            {"driver": "gcs", "bucket": bucket, "context": context}
        ).result()
        self._most_waiting = 2 * streams

    def put(self, objects: dict[str, Piece]) -> None:
        """Put objects."""
        written = [
            self._store.write(name, b"".join(map(memoryview, piece)))
            for name, piece in objects.items()
        ]
        for future in written:
            future.result()

    def get(self, ranges: list[tuple[str, int, Piece]]) -> None:
        """Get ranges, and copy them into place."""
        coming: deque[tuple[Any, Piece]] = deque()
        for name, begin, piece in ranges:
            if len(coming) == self._most_waiting:
                self._place(*coming.popleft())
            end = begin + _nbytes(piece)
            coming.append((self._store.read(name, byte_range=slice(begin, end)), piece))
        while coming:
            self._place(*coming.popleft())

    @staticmethod
    def _place(future: Any, piece: Piece) -> None:
        value, begin = memoryview(future.result().value), 0
        for part in piece:
            memoryview(part)[:] = value[begin : begin + part.nbytes]
            begin += part.nbytes
