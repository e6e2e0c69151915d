"""Keys that another program rotates in their file while this process runs."""

import io
import threading
import uuid

import botocore.session
import numpy as np
import pytest
from emulators import environment
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

import shardckpt
from shardckpt.errors import StorageError
from shardckpt.io.failures import storage_errors
from shardckpt.io.store import Store

_EXPIRED = (
    b"<Error><Code>ExpiredToken</Code><Message>The provided token has expired.</Message></Error>"
)


class Quiet(WSGIRequestHandler):
    """Logs no requests."""

    def log(self, *_):
        """Log nothing."""


class Sidecar:
    """A service that accepts one key at a time, and the file with that key."""

    def __init__(self, folder):
        self.file, self._service = (
            folder / "credentials",
            DomainDispatcherApplication(create_backend_app),
        )
        self.url = f"s3://bucket/{uuid.uuid4().hex}"
        self.keys_of_requests = []
        self.key = ""
        self.before = {}
        """Number of a request → what happens before it is looked at."""
        self.server = make_server("127.0.0.1", 0, self, threaded=True, request_handler=Quiet)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def rotate(self, key, *, in_file=True):
        """Accept another key from now on."""
        self.key = key
        if in_file:
            new = self.file.with_suffix(".new")
            new.write_text(
                "[default]\n"
                f"aws_access_key_id={key}\n"
                "aws_secret_access_key=s\n"
                f"aws_session_token={key}\n"
            )
            new.rename(self.file)

    def __call__(self, request, start):
        """Answer a request."""
        used = (
            request.get("HTTP_AUTHORIZATION", "Credential=none/")
            .split("Credential=")[1]
            .split("/")[0]
        )
        request["wsgi.input"] = io.BytesIO(
            request["wsgi.input"].read(int(request.get("CONTENT_LENGTH") or 0))
        )
        self.keys_of_requests.append(used)
        self.before.pop(len(self.keys_of_requests), lambda: None)()
        if used == self.key:
            return self._service(request, start)
        start("400 Bad Request", [("Content-Type", "application/xml")])
        return [_EXPIRED]


@pytest.fixture
def sidecar(tmp_path, monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    running = Sidecar(tmp_path)
    settings = {
        "AWS_SHARED_CREDENTIALS_FILE": str(running.file),
        "AWS_CONFIG_FILE": str(tmp_path / "none"),
    }
    with environment(
        {
            **settings,
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{running.server.port}",
            "AWS_REGION": "us-east-1",
        }
    ):
        running.rotate("AKIAFIRST")
        botocore.session.get_session().create_client("s3").create_bucket(Bucket="bucket")
        yield running
    running.server.shutdown()


def test_saves_go_on_with_the_keys_that_are_in_the_file_now(sidecar):
    for step in range(3):
        sidecar.rotate(f"AKIA{step}")
        shardckpt.save(f"{sidecar.url}/{step}", {"w": np.full(3, step)})
        assert set(sidecar.keys_of_requests[-5:]) == {f"AKIA{step}"}
    assert shardckpt.restore(f"{sidecar.url}/1")["w"].tolist() == [1, 1, 1]


@pytest.mark.long
@pytest.mark.parametrize("number", range(1, 20, 3))
def test_a_request_that_is_refused_while_the_keys_are_rotated_is_sent_again(sidecar, number):
    sidecar.before[len(sidecar.keys_of_requests) + number] = lambda: sidecar.rotate("AKIASECOND")
    shardckpt.save(f"{sidecar.url}/1", {"w": np.ones(3)})
    shardckpt.open(f"{sidecar.url}/1").verify()


def test_expired_keys_that_nobody_rotates_are_an_error(sidecar):
    sidecar.rotate("AKIASECOND", in_file=False)
    before = len(sidecar.keys_of_requests)
    with pytest.raises(StorageError, match="ExpiredToken"):
        shardckpt.save(f"{sidecar.url}/1", {"w": np.ones(3)})
    assert len(sidecar.keys_of_requests) - before <= 8


def test_tensorstore_repeats_an_operation_whose_keys_were_rotated(sidecar):
    store = Store.open(sidecar.url)
    store.write("x", b"value")

    def read():
        with storage_errors("read", store):
            return bytes(store.kvstore().read("x").result().value)

    sidecar.before[len(sidecar.keys_of_requests) + 1] = lambda: sidecar.rotate("AKIASECOND")
    assert store.with_new_keys(read) == b"value"


def test_the_account_that_reads_pays_if_the_environment_says_so(sidecar, monkeypatch):
    shardckpt.save(f"{sidecar.url}/1", {"w": np.ones(3)})
    payers, service = [], sidecar._service

    def noting(request, start):
        payers.append(request.get("HTTP_X_AMZ_REQUEST_PAYER"))
        return service(request, start)

    monkeypatch.setattr(sidecar, "_service", noting)
    monkeypatch.setenv("AWS_REQUEST_PAYER", "requester")
    shardckpt.restore(f"{sidecar.url}/1")
    assert set(payers) == {"requester"}
