"""`doctor` says what works at a place, which promises hold there, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid

import pytest
import tensorstore
from emulators import environment
from fault_proxy import FaultProxy
from fault_rules import Rule
from latent_store import LatentStore
from typer.testing import CliRunner
from web_server import web_server

import shardckpt
from shardckpt.cli.app import app
from shardckpt.errors import StorageError
from shardckpt.io import trial_writers
from shardckpt.io.doctor import PROMISES, examine
from shardckpt.io.store import Store
from shardckpt.io.url import SCHEMES

LACKS = {
    "file": set(),
    "memory": {"clock", "copies", "exports", "processes"},
    "gs": set(),
    "s3": set(),
    "az": {"remove", "copies", "exports", "driver"},  # remove: the blank in its name
    "latent": {"copies", "exports", "driver", "processes"},
}


def outcomes(diagnosis):
    return {trial.name: trial.outcome for trial in diagnosis.trials}


def unkept(diagnosis):
    return {promise.name for promise in PROMISES if not diagnosis.holds(promise)}


@pytest.mark.long
@pytest.mark.parametrize("store", [*LACKS], indirect=True)
def test_each_kind_works_but_for_what_it_lacks_and_nothing_is_left(store):
    diagnosis = examine(store.location)
    lacks = LACKS[store.location.scheme]
    assert {
        name: outcome for name, outcome in outcomes(diagnosis).items() if outcome != "works"
    } == dict.fromkeys(lacks, "lacks")
    assert unkept(diagnosis) == {promise.name for promise in PROMISES if lacks & {*promise.needs}}
    assert diagnosis.ok == ("processes" not in lacks)
    assert diagnosis.left is None
    assert store.list() == []
    if store.location.local_path is not None:
        assert not store.location.local_path.exists()


def test_a_checkpoint_that_is_there_stays_as_it_is(tmp_path):
    shardckpt.save(tmp_path / "c", {"w": 1})
    before = Store.open(tmp_path).list()
    assert examine(tmp_path / "c").ok
    assert Store.open(tmp_path).list() == before


class Unconditional(LatentStore):
    """Accepts each write, whatever it depends on."""

    def _write(self, key, data, generation):
        return super()._write(key, data, None)


class Late(LatentStore):
    """Lists the objects of a directory without the newest one."""

    def _list(self, prefix):
        return super()._list(prefix)[:-1]


class Undeletable(LatentStore):
    """Forbids all deletions."""

    def _delete(self, key):
        raise PermissionError(f"{key}: forbidden")


class ReadOnly(LatentStore):
    """Forbids all writes."""

    def _write(self, key, data, generation, retry=None):
        raise PermissionError(f"{key}: forbidden")


class Driven(LatentStore):
    """TensorStore has a driver for it that cannot read."""

    has_driver = True

    def kvstore(self):
        context = tensorstore.Context()
        base = tensorstore.KvStore.open("memory://", context=context).result()
        base["manifest.ocdbt"] = b"no manifest"
        spec = {"driver": "ocdbt", "base": "memory://"}
        return tensorstore.KvStore.open(spec, context=context).result()


class Closed(LatentStore):
    """Forbids even looking."""

    def _size(self, key):
        raise PermissionError(f"{key}: forbidden")


class Careless(LatentStore):
    """Deletes an object, whatever version it is."""

    def _remove(self, key, generation):
        self._delete(key)
        return True


@pytest.mark.parametrize(
    ("kind", "fails", "broken", "text"),
    [
        (
            Unconditional,
            {"create", "replace"},
            {"save", "replace"},
            "2 of two writers of one missing object succeeded (round 1)",
        ),
        (Late, {"list"}, {"save"}, "a listing lacks an object that was written just before"),
        (
            Undeletable,
            {"delete", "clock", "create", "replace"},
            {"save", "replace", "clean", "grace"},
            "forbidden",
        ),
        (Careless, {"remove"}, {"replace", "clean"}, "an object that had changed was deleted"),
        (Driven, {"driver"}, set(), "DATA_LOSS"),
    ],
)
def test_an_ability_that_a_place_has_not_got_breaks_the_promises_that_need_it(
    latent, monkeypatch, kind, fails, broken, text
):
    monkeypatch.setitem(sys.modules, "doctor_kinds", sys.modules[__name__])
    monkeypatch.setitem(SCHEMES, "latent", ("doctor_kinds", kind.__name__))
    diagnosis = examine(latent)
    assert {name for name, outcome in outcomes(diagnosis).items() if outcome == "fails"} == fails
    assert unkept(diagnosis) == broken | {"hosts", "durable", "reuse", "exports", "stock"}
    assert any(text in trial.detail for trial in diagnosis.trials)
    assert (diagnosis.left is None) == (kind is not Undeletable)
    if kind is Undeletable:
        assert diagnosis.left.startswith(f"{latent}/.doctor-")


@pytest.mark.parametrize(("kind", "works"), [(ReadOnly, {"look"}), (Closed, set())])
def test_nothing_else_is_tried_where_nothing_can_be_written_or_looked_at(
    latent, monkeypatch, kind, works
):
    monkeypatch.setitem(sys.modules, "doctor_kinds", sys.modules[__name__])
    monkeypatch.setitem(SCHEMES, "latent", ("doctor_kinds", kind.__name__))
    diagnosis = examine(latent)
    assert {name for name, outcome in outcomes(diagnosis).items() if outcome == "works"} == works
    assert list(outcomes(diagnosis).values()).count("fails") == 1
    assert unkept(diagnosis) == {promise.name for promise in PROMISES} - (
        {"restore"} if works else set()
    )
    assert not diagnosis.ok


def test_at_a_web_server_nothing_is_written_and_nothing_left(tmp_path):
    with web_server(tmp_path) as server:
        diagnosis = examine(f"{server.url}/run")
    assert outcomes(diagnosis)["look"] == "works"
    assert outcomes(diagnosis)["write"] == "lacks"
    assert diagnosis.left is None


@pytest.mark.long
def test_an_upload_that_cannot_be_finished_is_ended(s3_server):
    """The first request begins the upload, the second sends its part, the third publishes it."""
    from boto3 import client

    bucket = s3_server.new_bucket(f"b-{uuid.uuid4().hex}")
    refusal = Rule("status", status=403, kinds=("upload",), objects="*/export", skip=2)
    with (
        FaultProxy(s3_server.endpoint) as proxy,
        environment(s3_server.env(proxy.url)),
        proxy.rules.during(refusal),
    ):
        diagnosis = examine(f"s3://{bucket}/run")
        listed = client("s3", endpoint_url=s3_server.endpoint).list_multipart_uploads(Bucket=bucket)
    assert outcomes(diagnosis)["exports"] == "fails"
    assert diagnosis.left is None
    assert not listed.get("Uploads")


def test_a_real_service_that_ignores_conditions_is_found_out(gcs_server):
    """fake-gcs-server without the proxy that enforces them: it deletes an object whose version has
    changed."""
    with environment(gcs_server.env()):
        diagnosis = examine(f"gs://{gcs_server.new_bucket(f'b-{uuid.uuid4().hex}')}/run")
    assert {name for name, outcome in outcomes(diagnosis).items() if outcome != "works"} == {
        "remove"
    }
    assert unkept(diagnosis) == {"replace", "clean"}
    assert not diagnosis.ok


def test_an_error_of_the_other_process_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(
        trial_writers,
        "_PEER",
        "import sys; sys.stdin.readline(); print('\"it has no rights\"', flush=True)",
    )
    diagnosis = examine(tmp_path)
    assert [trial.detail for trial in diagnosis.trials if trial.name == "create"] == [
        "in another process: it has no rights"
    ]
    monkeypatch.setattr(trial_writers, "_PEER", "raise SystemExit(1)")
    assert "the other process ended" in next(
        trial.detail for trial in examine(tmp_path).trials if trial.name == "create"
    )
    assert list(tmp_path.iterdir()) == []


def test_another_process_that_cannot_be_started_is_told(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(trial_writers.subprocess, "Popen", fail)
    with pytest.raises(StorageError, match=r"cannot be started .*ulimit -u"):
        examine(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
@pytest.mark.parametrize("seconds", [0.0, 0.3, 0.6])
@pytest.mark.parametrize("kind", ["file", "az"])
def test_ctrl_c_leaves_nothing_behind(azure_server, tmp_path, kind, seconds):
    """At three moments after its first object: at once, and while both processes write."""
    url = str(tmp_path / "new/run") if kind == "file" else azure_server.url(uuid.uuid4().hex)
    with environment(azure_server.env()):
        command = [sys.executable, "-m", "shardckpt", "doctor", url]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env={**os.environ}, text=True
        )
        store = Store.open(url)
        while process.poll() is None and not store.list_children():
            time.sleep(0.005)
        time.sleep(seconds)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=200)
        # The last: Python was about to end.
        assert process.returncode in {130, 0, -signal.SIGINT}, output
        assert store.list() == []
    assert list(tmp_path.iterdir()) == []


def test_the_command_has_text_json_and_a_status(tmp_path, latent):
    text = CliRunner().invoke(app, ["doctor", str(tmp_path)])
    assert text.exit_code == 0
    assert f"ok  {tmp_path}" in text.output
    answer = CliRunner().invoke(app, ["doctor", latent, "--json"])
    assert answer.exit_code == 1
    document = json.loads(answer.output)
    assert (document["url"], document["ok"], document["left"]) == (latent, False, None)
    assert {"name": "replace", "outcome": "works"}.items() <= next(
        one for one in document["trials"] if one["name"] == "replace"
    ).items()
    assert [one["name"] for one in document["promises"]] == [promise.name for promise in PROMISES]
    assert Store.open(latent).list() == []
