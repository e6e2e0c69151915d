"""Odd checkpoints, directories that cannot be read, and roots that vanish: each is told, and the
others are served."""

import os
import shutil
import sqlite3
from urllib.parse import unquote

import numpy as np
import pytest
from job_services import operated
from serving import serving

import shardckpt
from shardckpt import SaveOptions
from shardckpt.format.documents import open_envelope, seal
from shardckpt.serve.access.tokens import add_token
from shardckpt.serve.vanished import MARKER

ODD_METRICS = (
    {"caf\udce9": 2.0},
    {"huge": 10**400, "least": -(10**400)},
    {"": 1.0},
    {"text": "nan"},
)


def save(place, **metrics):
    shardckpt.save(place, {"w": np.ones(3)}, options=SaveOptions(metadata={"metrics": metrics}))


def rewrite(place, **members):
    """Forge members of a record, whose digest is right."""
    file = place / "checkpoint.json"
    file.write_bytes(seal({**open_envelope(file.read_bytes(), str(file)), **members}))


def ids(service):
    return [one["id"] for one in service.get("/v1/checkpoints")["checkpoints"]]


def metric(service, name, **headers):
    lines = service.ask("/metrics", **headers).body.decode().splitlines()
    return [
        float(line.split()[-1]) for line in lines if line.startswith(f"shardckpt_serve_{name} ")
    ]


def test_names_with_line_breaks_are_other_names_at_every_address(tmp_path):
    for number, run in enumerate(("run", "run\n", "r\nun")):
        state = {"w": np.full(2, number), "w\n": np.full(3, number), "w\n\n": np.full(4, number)}
        shardckpt.save(tmp_path / run / "1", state)
        shardckpt.save(tmp_path / run / "last\n", state)
    with serving(("lab", tmp_path)) as service:
        for number, run in enumerate(("run", "run%0A", "r%0Aun")):
            assert service.ask(f"/ui/run/lab/{run}").status == 200, run
            for name in ("1", "last%0A"):
                ident = f"lab/{run}/{name}"
                url = service.get(f"/v1/checkpoints/{ident}")["url"]
                assert url == str(tmp_path / unquote(ident).removeprefix("lab/"))
                assert service.ask(f"/ui/checkpoint/{ident}").status == 200, ident
                for length, tensor in enumerate(("w", "w%0A", "w%0A%0A"), 2):
                    path = f"/v1/checkpoints/{ident}/tensors/{tensor}"
                    assert service.get(path)["shape"] == [length], path
                    elements = np.frombuffer(service.ask(f"{path}?format=raw").body, np.int64)
                    np.testing.assert_array_equal(elements, np.full(length, number), path)
                assert service.ask(f"/raw/{ident}/checkpoint.json").status == 200, ident
                assert service.ask(f"/raw/{ident}/checkpoint.json%0A").status == 404, ident


def test_odd_rows_hide_no_other_checkpoint_and_no_page_fails(tmp_path):
    for root in ("a", "b"):
        save(tmp_path / root / "good" / "1")
    for step, metrics in enumerate(ODD_METRICS):
        save(tmp_path / "a" / "odd" / str(step), **metrics)
    for step, members in enumerate(
        ({"created": "2026-99-99\udcff"}, {"created": "yesterday"}, {"attempt": "caf\udce9"}), 10
    ):
        save(tmp_path / "a" / "odd" / str(step))
        rewrite(tmp_path / "a" / "odd" / str(step), **members)
    for step in (20, 21, 22):  # together more than a column holds
        save(tmp_path / "a" / "odd" / str(step))
        rewrite(
            tmp_path / "a" / "odd" / str(step),
            totals={"tensors": 1, "bytes": 1 << 62, "stored_bytes": 1 << 62, "chunks": 1},
        )
    with serving(("a", tmp_path / "a"), ("b", tmp_path / "b")) as service:
        idents = ids(service)
        assert {"a/good/1", "b/good/1"} < set(idents)
        assert len(idents) == 2 + len(ODD_METRICS) + 3 + 3
        assert service.get("/v1/runs")["passed_over"] == {}
        for path in ("/ui/runs", "/ui/run/a/odd", "/ui/storage", "/metrics"):
            assert service.ask(path).status == 200, path
        listed = service.get("/v1/checkpoints?run=a/odd&metric=huge>1e300")["checkpoints"]
        assert [one["metrics"] for one in listed] == [{"huge": "inf", "least": "-inf"}]
        assert [
            one["state"] for one in service.get("/v1/checkpoints?state=unreadable")["checkpoints"]
        ] == ["unreadable"]
    with shardckpt.CheckpointManager(tmp_path / "a" / "odd") as manager:
        assert manager.best_step("huge") == 1


def test_directories_that_cannot_be_read_are_told_and_the_others_listed(tmp_path):
    save(tmp_path / "runs" / "a" / "1")
    (tmp_path / "runs" / "z" / "1").mkdir(parents=True)
    os.mkfifo(tmp_path / "runs" / "z" / "1" / "checkpoint.json")
    (tmp_path / "runs" / "loop").symlink_to("loop")
    (tmp_path / "runs" / "round").symlink_to("../runs")
    (tmp_path / "runs" / "dir" / "1" / "checkpoint.json").mkdir(parents=True)
    if os.getuid():
        (tmp_path / "runs" / "lost+found").mkdir(mode=0)
    with serving(("lab", tmp_path / "runs")) as service:
        save(tmp_path / "runs" / "a" / "2")
        service.wait_until(lambda: {"lab/a/1", "lab/a/2"} <= set(ids(service)))
        doc = service.get("/v1/runs")
        assert doc["unreachable"] == {}
        assert "lab/z/1" in doc["passed_over"]
        assert "not a regular file" in doc["passed_over"]["lab/z/1"]
        assert str(tmp_path) not in str(doc["passed_over"])
        assert b"not a regular file" in service.ask("/ui/runs").body
        service.wait_until(
            lambda: metric(service, "passed_over_directories") == [float(len(doc["passed_over"]))]
        )
        shutil.rmtree(tmp_path / "runs" / "z")
        service.wait_until(lambda: "lab/z/1" not in service.get("/v1/runs")["passed_over"])


@pytest.mark.long
@pytest.mark.parametrize("written", [False, True])
def test_a_root_that_vanishes_keeps_its_rows_and_nothing_is_written_there(
    tmp_path, webhook_receiver, written
):
    bodies, webhook = webhook_receiver
    for step in (1, 2):
        save(tmp_path / "mnt" / "a" / str(step))
    save(tmp_path / "other" / "b" / "1")
    roots = [("mnt", tmp_path / "mnt"), ("other", tmp_path / "other")]
    with operated(tmp_path, *roots, webhook=webhook) as lab:
        if written:
            lab.done("pin", checkpoint="mnt/a/1")
        assert (tmp_path / "mnt" / MARKER).exists() == written
        (tmp_path / "mnt").rename(tmp_path / "away")
        (tmp_path / "mnt").mkdir()  # the mount point
        lab.service.wait_until(lambda: "mnt" in lab.ask("/v1/runs").json["unreachable"])
        assert "has vanished" in lab.ask("/v1/runs").json["unreachable"]["mnt"]
    with operated(tmp_path, *roots, webhook=webhook) as lab:  # the state directory remembers it
        lab.service.wait_until(lambda: "mnt" in lab.ask("/v1/runs").json["unreachable"])
        vanished = {
            one["id"]: one["vanished"] for one in lab.ask("/v1/checkpoints").json["checkpoints"]
        }
        assert vanished == {"mnt/a/1": True, "mnt/a/2": True, "other/b/1": False}
        ready = lab.ask("/readyz")
        assert (ready.status, b"root mnt has vanished" in ready.body) == (200, True)
        # Strangers learn no names.
        assert lab.service.ask("/readyz").body == b"ready\n1 other root has vanished\n"
        lab.service.wait_until(
            lambda: (
                metric(lab.service, "vanished_roots", Authorization=f"Bearer {lab.tokens['read']}")
                == [1.0]
            )
        )
        for page in ("/ui/runs", "/ui/health", "/ui/run/mnt/a"):
            assert b"Root mnt: it has vanished" in lab.ask(page).body, page
        lab.service.wait_until(lambda: bodies and bodies[0]["event"] == "vanished")
        assert bodies[0]["root"] == "mnt"
        number = lab.post("copy", checkpoint="other/b/1", to="mnt/b/1").json["number"]
        waiting = lab.wait(number, "queued", "failed")
        lab.service.wait_until(
            lambda: lab.job(number)["tries"] >= 1 and lab.job(number)["state"] == "queued"
        )
        assert waiting["state"] == "queued"
        assert "has vanished" in lab.job(number)["error"]["message"]
        assert list((tmp_path / "mnt").iterdir()) == []
        (tmp_path / "mnt").rmdir()
        (tmp_path / "away").rename(tmp_path / "mnt")
        lab.service.wait_until(lambda: lab.ask("/v1/runs").json["unreachable"] == {})
        assert lab.wait(number, seconds=200)["state"] == "done"
        assert (tmp_path / "mnt" / "b" / "1" / "checkpoint.json").exists()
        assert lab.service.ask("/readyz").body == b"ready\n"


@pytest.mark.long
@pytest.mark.parametrize("written", [False, True])
def test_what_a_vanished_root_has_is_not_told_to_be_deleted(tmp_path, written):
    for name in ("b", "c"):
        save(tmp_path / name / "run" / "1")
    stranger = add_token(tmp_path / "tokens", "stranger", "c=read")
    with operated(tmp_path, ("b", tmp_path / "b"), ("c", tmp_path / "c")) as lab:
        if written:
            lab.done("pin", checkpoint="b/run/1")
        paths = [
            "/files/b/run/1",
            "/files/b/run/1/model.safetensors",
            "/zarr/b/run/1/zarr.json",
            "/raw/b/run/1/checkpoint.json",
        ]
        paths += [
            "/v1/checkpoints/b/run/1",
            "/v1/diff?a=c/run/1&b=b/run/1",
            "/b/run/resolve/main/model.safetensors",
            "/api/models/b/run",
        ]
        for path in paths:
            assert lab.ask(path).status == 200, path
            assert lab.ask(path.replace("run", "none")).status == 404, path
        (tmp_path / "b").rename(tmp_path / "b.gone")
        for looked in (False, True):  # before the scan has seen it, and after
            if looked:
                lab.service.wait_until(lambda: "b" in lab.ask("/v1/runs").json["unreachable"])
            for path in [*paths, "/files/b/none/1"]:
                reply = lab.ask(path)
                assert (reply.status, reply.headers.get("retry-after")) == (503, "30"), (
                    path,
                    reply,
                )
                assert "root b has vanished" in reply.json["detail"]
                hidden = lab.ask(path, Authorization=f"Bearer {stranger}")
                assert (hidden.status, b"vanished" in hidden.body) == (404, False), path
            for page in (
                "checkpoint/b/run/1",
                "tensor/b/run/1?name=w",
                "plan/b/run/1",
                "diff?a=c/run/1&b=b/run/1",
            ):
                reply, hidden = (
                    lab.ask(f"/ui/{page}"),
                    lab.ask(f"/ui/{page}", Authorization=f"Bearer {stranger}"),
                )
                assert (
                    reply.status,
                    b"root b has vanished" in reply.body,
                    reply.headers["retry-after"],
                ) == (503, True, "30"), (
                    page,
                    reply,
                )
                assert (hidden.status, b"vanished" in hidden.body) == (404, False), page
            assert lab.ask("/files/c/none/1").status == 404
            for operation in ("verify", "delete"):
                reply = lab.post(operation, checkpoint="b/run/1")
                assert (reply.status, reply.headers["retry-after"]) == (503, "30"), reply
            lease = {"url": str(tmp_path / "b" / "run"), "id": "0" * 16, "lease": {"steps": [1]}}
            assert lab.ask("/v1/leases", "POST", lease).status == 503
            assert not (tmp_path / "b").exists()
        (tmp_path / "b.gone").rename(tmp_path / "b")
        lab.service.wait_until(lambda: lab.ask("/v1/runs").json["unreachable"] == {})
        for path in paths:
            assert lab.ask(path).status == 200, path


@pytest.mark.long
def test_a_root_that_is_meant_to_be_empty_gets_the_marker(tmp_path):
    save(tmp_path / "runs" / "1")
    with operated(tmp_path, ("lab", tmp_path / "runs"), ("new", tmp_path / "new")) as lab:
        shutil.rmtree(tmp_path / "runs" / "1")
        lab.service.wait_until(lambda: "lab" in lab.ask("/v1/runs").json["unreachable"])
        (tmp_path / "runs" / MARKER).touch()
        lab.service.wait_until(lambda: lab.ask("/v1/runs").json["unreachable"] == {})
        assert lab.ask("/v1/checkpoints").json["checkpoints"] == []
        save(tmp_path / "runs" / "2")
        lab.service.wait_until(lambda: len(lab.ask("/v1/checkpoints").json["checkpoints"]) == 1)
        # A root never seen before may be absent.
        assert lab.run("copy", checkpoint="lab/2", to="new/2")["state"] == "done"
        assert (tmp_path / "new" / MARKER).exists()
    with sqlite3.connect(tmp_path / "state" / "journal.sqlite") as db:
        assert dict(db.execute("SELECT place, marked FROM roots")) == {
            str(tmp_path / "runs"): 1,
            str(tmp_path / "new"): 1,
        }
