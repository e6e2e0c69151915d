"""Requests to Cloud Storage: TLS with an authority of one's own, proxies, a server that says
nothing, tokens, and damage on the way."""

from __future__ import annotations

import datetime as dt
import gc
import ipaddress
import json
import selectors
import socket
import ssl
import threading
import weakref
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
from crc32c import crc32c
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import NameOID
from emulators import environment
from fault_proxy import FaultProxy
from fault_rules import Rule

from shardckpt.errors import StorageError
from shardckpt.io.buckets import cloud as settings
from shardckpt.io.buckets.bucket import ABSENT
from shardckpt.io.buckets.gcs import GcsBucket
from shardckpt.io.store import Store

MiB = 1 << 20


@contextmanager
def serving(answer):
    """A port on which each connection is answered by a thread."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def accept():
            with suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    threading.Thread(target=answer, args=(connection,), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield server.getsockname()[1]


def join(one, other):
    """Hand on what comes from each of two connections to the other."""
    with one, other, selectors.DefaultSelector() as waiting, suppress(OSError, ssl.SSLError):
        waiting.register(one, selectors.EVENT_READ, other)
        waiting.register(other, selectors.EVENT_READ, one)
        while True:
            for key, _ in waiting.select():
                while True:
                    data = key.fileobj.recv(1 << 16)
                    if not data:
                        return
                    key.data.sendall(data)
                    if not getattr(key.fileobj, "pending", int)():
                        break


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """A file with a certificate of 127.0.0.1 that vouches for itself, and one with its key."""
    folder, key = tmp_path_factory.mktemp("tls"), ec.generate_private_key(ec.SECP256R1())
    name, now = (
        x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "ours")]),
        dt.datetime.now(dt.UTC),
    )
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
    )
    made = made.not_valid_before(now - dt.timedelta(1)).not_valid_after(now + dt.timedelta(1))
    made = made.add_extension(
        x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]),
        critical=False,
    )
    made = made.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    (folder / "cert.pem").write_bytes(
        made.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    )
    form = (
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    (folder / "key.pem").write_bytes(key.private_bytes(*form))
    return folder / "cert.pem", folder / "key.pem"


@pytest.fixture
def secure(gcs_server, certificate):
    """The url of the emulator behind TLS."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)

    def answer(connection):
        with suppress(ssl.SSLError, OSError):
            join(
                context.wrap_socket(connection, server_side=True),
                socket.create_connection(("127.0.0.1", gcs_server.port)),
            )

    with serving(answer) as port:
        yield f"https://127.0.0.1:{port}"


def test_an_authority_of_one_s_own_is_named_by_the_environment(gcs_server, secure, certificate):
    variables = {**gcs_server.env(secure), "SHARDCKPT_RETRY_SECONDS": "0.05"}
    data = np.random.default_rng(0).bytes(3 * MiB)
    with environment({**variables, "SSL_CERT_FILE": str(certificate[0])}):
        bucket = GcsBucket(gcs_server.bucket)
        bucket.write("tls", memoryview(data))
        assert bucket.read("tls")[0] == data
        assert bucket.read("tls", 5, 2 * MiB)[0] == data[5 : 2 * MiB]


def test_an_authority_that_nobody_named_is_not_trusted(gcs_server, secure):
    with (
        environment(gcs_server.env(secure)),
        pytest.raises(StorageError, match=r"CERTIFICATE_VERIFY_FAILED.*in SSL_CERT_FILE"),
    ):
        Store.open(gcs_server.url("untrusted")).exists("key")


def test_requests_go_through_the_proxy_that_the_environment_names(gcs_server, secure, certificate):
    asked = []

    def tunnel(connection):
        head = b""
        while b"\r\n\r\n" not in head:
            head += connection.recv(1 << 12)
        asked.append(head.split(b"\r\n")[0])
        host, port = head.split()[1].decode().split(":")
        connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        join(connection, socket.create_connection((host, int(port))))

    with serving(tunnel) as port:
        through = {"HTTPS_PROXY": f"http://127.0.0.1:{port}", "NO_PROXY": "", "no_proxy": ""}
        with environment(
            {**gcs_server.env(secure), "SSL_CERT_FILE": str(certificate[0]), **through}
        ):
            GcsBucket(gcs_server.bucket).write("proxied", memoryview(b"data"))
    assert [head.rpartition(b" ")[0].decode() for head in asked] == [
        f"CONNECT {secure.removeprefix('https://')}"
    ]


@pytest.mark.parametrize(
    "accepted",
    [
        pytest.param("Bearer token 2", id="the next one is good"),
        pytest.param("", id="all are refused"),
    ],
)
def test_a_token_that_is_refused_is_renewed_once(tmp_path, certificate, accepted):
    issued = []

    class Service(BaseHTTPRequestHandler):
        """Cloud Storage, and the service that issues tokens."""

        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            issued.append(f"token {len(issued) + 1}")
            self.answer(200, {"access_token": issued[-1], "expires_in": 3600})

        def do_GET(self):
            good = self.headers["Authorization"] == accepted
            self.answer(
                *(
                    (200, {"size": "5", "generation": "7"})
                    if good
                    else (401, {"error": {"message": "Invalid Credentials"}})
                )
            )

        def answer(self, status, document):
            body = json.dumps(document).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Service)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"https://127.0.0.1:{server.server_port}"
    key = rsa.generate_private_key(65537, 2048)
    text = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ).decode()
    account = {
        "type": "service_account",
        "client_email": "a@b.c",
        "private_key": text,
        "private_key_id": "1",
        "token_uri": f"{url}/token",
    }
    (tmp_path / "account.json").write_text(json.dumps({**account, "project_id": "p"}))
    authority = dict.fromkeys(("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE"), str(certificate[0]))
    named = {
        "GOOGLE_APPLICATION_CREDENTIALS": str(tmp_path / "account.json"),
        "GOOGLE_AUTH_TOKEN_FOR_TESTING": "none",
    }
    try:
        with environment(
            {"STORAGE_EMULATOR_HOST": url, "TENSORSTORE_GCS_HTTP_URL": url, **authority, **named}
        ):
            bucket = GcsBucket("bucket")
            if accepted:
                assert bucket.stat("object") == (5, b"7")
            else:
                with pytest.raises(OSError, match=r"401.*Invalid Credentials"):
                    bucket.stat("object")
    finally:
        server.shutdown()
        server.server_close()
    assert issued == ["token 1", "token 2"]


def test_a_write_without_credentials_keeps_no_buffer(tmp_path, monkeypatch):
    """Credentials that are lacking are looked for once; each write says so by itself."""

    class Buffer(bytearray):
        pass

    for name in ("GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_AUTH_TOKEN_FOR_TESTING"):
        monkeypatch.delenv(name, raising=False)
    nobody = {"HOME": str(tmp_path), "CLOUDSDK_CONFIG": str(tmp_path), "NO_GCE_CHECK": "true"}
    url = "https://127.0.0.1:9"
    with environment({"STORAGE_EMULATOR_HOST": url, "TENSORSTORE_GCS_HTTP_URL": url, **nobody}):
        store = GcsBucket("bucket")
        buffers = []
        for _ in range(3):
            data = Buffer(b"bytes")
            buffers.append(weakref.ref(data))
            with pytest.raises(OSError, match="default credentials were not found") as error:
                store.write("object", memoryview(data))
            del data, error
    gc.collect()
    assert [one() for one in buffers] == [None] * 3


def test_a_server_that_says_nothing_is_given_up_at_the_deadline(gcs_server, monkeypatch):
    monkeypatch.setattr(settings, "LEAST_STALLED", 0.2)
    connections = []
    silent = {"SHARDCKPT_RETRY_SECONDS": "0.2", "TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS": ""}
    with (
        serving(connections.append) as port,
        environment({**gcs_server.env(f"http://127.0.0.1:{port}"), **silent}),
    ):
        store = Store.open(gcs_server.url("silent"))
        for use in (
            lambda: store.read("key"),
            lambda: store.write("key", bytes(2 * MiB)),
            store.list,
            lambda: store.exists("key"),
        ):
            with pytest.raises(
                StorageError,
                match=r"attempts failed, the last one because .*timed out.*SHARDCKPT_RETRY_SECONDS",
            ):
                use()
            assert len(connections) <= 2, "after the deadline nothing is tried again"
            while connections:
                connections.pop().close()


def test_bytes_that_arrive_changed_are_sent_again(gcs_server, monkeypatch):
    """The checksum of the answer says so for what goes up as it is; small objects are refused by
    the service itself."""
    sent = []
    once = GcsBucket(gcs_server.bucket)._http.once.__func__

    def damaging(http, method, url, *, body=None, **options):
        if method == "POST" and not sent:
            sent.append(url)
            body = [bytes(len(piece)) for piece in body]
        return once(http, method, url, body=body, **options)

    with environment({**gcs_server.env(), "SHARDCKPT_RETRY_SECONDS": "0.05"}):
        bucket = GcsBucket(gcs_server.bucket)
        monkeypatch.setattr(type(bucket._http), "once", damaging)
        data = np.random.default_rng(0).bytes(2 * MiB)
        bucket.write("damaged", memoryview(data))
        assert bucket.read("damaged")[0] == data
    assert sent


def test_bytes_that_changed_in_memory_are_not_sent_again(gcs_server):
    data = bytearray(2 * MiB)
    laid_out = crc32c(data)
    data[MiB] ^= 1
    with environment({**gcs_server.env(), "SHARDCKPT_RETRY_SECONDS": "3600"}):
        bucket = GcsBucket(gcs_server.bucket)
        with pytest.raises(OSError, match="its bytes changed in memory before they were sent"):
            bucket.write("changed", memoryview(data), crc=laid_out)


def test_a_body_that_ends_early_is_read_again_from_its_beginning(gcs_server):
    data = np.random.default_rng(0).bytes(2 * MiB)
    with (
        FaultProxy(gcs_server.endpoint) as proxy,
        environment({**gcs_server.env(proxy.url), "SHARDCKPT_RETRY_SECONDS": "0.05"}),
    ):
        bucket = GcsBucket(gcs_server.bucket)
        bucket.write("early", memoryview(data))
        for fault in ("truncate", "shorten", "reset"):
            first, second = bytearray(MiB), bytearray(MiB // 2)
            with proxy.rules.during(
                Rule(fault, kinds=("read",), after_bytes=MiB + 5 if fault != "reset" else None)
            ):
                bucket.read_into("early", 7, [memoryview(first), memoryview(second)])
            assert bytes(first + second) == data[7 : 7 + MiB + MiB // 2]


def test_generations_decide_who_may_write(gcs_server):
    with FaultProxy(gcs_server.endpoint) as proxy, environment(gcs_server.env(proxy.url)):
        bucket = GcsBucket(gcs_server.bucket)
        first = bucket.write("versions", memoryview(b"1"), generation=ABSENT)
        assert bucket.write("versions", memoryview(b"2"), generation=ABSENT) == b""
        assert bucket.stat("versions") == (1, first)
        second = bucket.write("versions", memoryview(b"22"), generation=first)
        assert bucket.read("versions") == (b"22", second)
        assert not bucket.delete_if("versions", first)
        assert bucket.delete_if("versions", second)
        assert bucket.stat("versions") == (None, ABSENT)
