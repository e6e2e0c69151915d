"""Followers and the service: versions are heard of at once, readers that may not write get a lease,
and the page shows who follows."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from chromium import check_page, contrast
from job_services import operated
from serving import serving

import shardckpt
from shardckpt.io.store import Store
from shardckpt.runs.catalog import catalog
from shardckpt.runs.leases import HeldLease, held_leases, leased_steps, write_lease
from shardckpt.serve.versions.page import publishing_seconds, versions_section
from shardckpt.versions import finding


@pytest.fixture
def policy(tmp_path, monkeypatch):
    """A service over a root in which versions are published and followed, by a user with `read`."""
    (tmp_path / "runs").mkdir()
    with operated(tmp_path, ("lab", tmp_path / "runs")) as service:
        monkeypatch.setenv("SHARDCKPT_SERVER", service.service.url)
        monkeypatch.setenv(
            "SHARDCKPT_HTTP_HEADERS",
            f"{service.service.url} Authorization: Bearer {service.tokens['read']}",
        )
        service.root = tmp_path / "runs" / "policy"
        yield service


def publish(publisher, step):
    publisher.publish(step, {"w": np.arange(50_000.0) + (np.arange(50_000) % 997 == step)})
    publisher.wait()


def hear(follower, seen, count):
    for version in follower:
        seen.append(version.step)
        version.prepare().apply()
        if len(seen) == count:
            return


def test_a_follower_hears_of_versions_at_once(policy, monkeypatch):
    """It would look at the storage after ten minutes only."""
    monkeypatch.setattr(finding, "_FIRST_LOOK", 600.0)
    seen, like = [], {"w": np.zeros(50_000)}
    with (
        shardckpt.Publisher(policy.root) as publisher,
        shardckpt.follow(policy.root, like) as follower,
    ):
        thread = threading.Thread(target=hear, args=(follower, seen, 4), daemon=True)
        thread.start()
        policy.service.wait_until(lambda: follower._listener.connected)
        for step in range(4):
            publish(publisher, step)
            policy.service.wait_until(lambda step=step: seen == [*range(step + 1)])
        thread.join(60)
    assert seen == [0, 1, 2, 3]
    assert (like["w"] == np.arange(50_000.0) + (np.arange(50_000) % 997 == 3)).all()


@pytest.mark.parametrize(
    "server", ["http://127.0.0.1:9", "https://nobody.invalid", "ftp://x", "nonsense"]
)
def test_where_no_service_answers_followers_look_at_the_storage(tmp_path, monkeypatch, server):
    monkeypatch.setenv("SHARDCKPT_SERVER", server)
    seen = []
    with (
        shardckpt.Publisher(tmp_path) as publisher,
        shardckpt.follow(tmp_path, {"w": np.zeros(50_000)}, mode="each") as follower,
    ):
        for step in range(2):
            publish(publisher, step)
        hear(follower, seen, 2)
        assert seen == [0, 1]
        assert not follower._listener.connected
        assert held_leases(Store.open(tmp_path))[0].version == 1


def test_events_and_leases_are_for_runs_that_the_user_may_read(policy, tmp_path):
    for url in ("/etc", str(tmp_path), "", "://"):
        assert policy.ask(f"/v1/versions?url={url}").status in (400, 404)
        assert policy.ask(
            "/v1/leases", "POST", {"url": url, "id": "0" * 16, "lease": None}, "read"
        ).status in (400, 404)
    assert policy.ask("/v1/versions").status == 400
    good = {
        "url": str(policy.root),
        "id": "0123456789abcdef",
        "lease": {"steps": [3], "holder": "host", "version": None},
    }
    assert policy.ask("/v1/leases", "POST", good, "read").status == 404  # there is no run yet
    shardckpt.save(policy.root / "3", {"w": np.zeros(9)})
    for place in ("runs", "runs/new/place", "runs/policy/3", "runs/policy/leases"):
        assert (
            policy.ask("/v1/leases", "POST", {**good, "url": str(tmp_path / place)}, "read").status
            == 404
        )
    assert sorted(path.name for path in policy.root.iterdir()) == ["3"]
    for wrong in (
        {"id": "../../x"},
        {"id": "0" * 15},
        {"lease": {}},
        {"lease": {"steps": [True], "holder": "h", "version": None}},
        {"lease": {"steps": [4], "holder": "h", "version": None}},
        {"lease": {"steps": [10**400], "holder": "h", "version": None}},
        {"lease": {"steps": [1] * 1001, "holder": "h", "version": None}},
        {"lease": {"steps": [], "holder": "h" * 999, "version": None}},
        {"lease": {"steps": [], "holder": "h", "version": "7"}},
    ):
        assert policy.ask("/v1/leases", "POST", {**good, **wrong}, "read").status in (404, 422), (
            wrong
        )
    assert policy.ask("/v1/leases", "POST", {"url": 7}, "read").status == 400
    assert policy.ask("/v1/leases", "POST", good, "read").status == 202
    assert leased_steps(Store.open(policy.root)) == {3}
    assert policy.ask("/v1/leases", "POST", {**good, "lease": None}, "read").status == 202
    assert leased_steps(Store.open(policy.root)) == frozenset()


READER = """
import ctypes, sys, numpy as np, shardckpt
from shardckpt.io.store import Store
from shardckpt.commit.markers import read_sealed
url = sys.argv[1]
def leases():
    store = Store.open(url)
    found = [read_sealed(store, f"leases/{name}").doc for name in store.list_children("leases/")]
    return [(one["steps"], one["version"]) for one in found]
follower = shardckpt.follow(url, like={"w": np.zeros(50_000)})
header, nothing = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
assert ctypes.CDLL(None).capset(header, nothing) == 0  # root without its rights
version = follower.poll()
update, held = follower.cache.update, []
follower.cache.update = lambda *a: (held.append(leases()), update(*a))[1]
version.prepare().apply()
print(held[0], leases())
follower.close()
print(leases())
"""


@pytest.mark.long
@pytest.mark.skipif(
    os.geteuid() != 0,
    reason="the service may write, and the reader may not: it gives up the rights of root",
)
def test_a_reader_that_may_not_write_gets_its_lease_from_the_service_or_is_told_that_it_has_none(
    policy,
):
    with shardckpt.Publisher(policy.root) as publisher:
        for step in range(3):
            publish(publisher, step)
    policy.root.chmod(0o555)

    def run(**env):
        command = [sys.executable, "-c", READER, str(policy.root)]
        done = subprocess.run(
            command,
            env={**os.environ, **env},
            capture_output=True,
            text=True,
            timeout=250,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done

    done = run()
    assert done.stdout.splitlines() == ["[([0, 1, 2], None)] [([], 2)]", "[]"], done.stderr
    assert "no lease" not in done.stderr
    (policy.root / "leases").chmod(0o555)
    alone = run(SHARDCKPT_SERVER="")
    assert alone.stdout.splitlines() == ["[] []", "[]"]
    assert (
        "no lease can be written there, so what this process reads may be pruned while it reads"
        in alone.stderr
    )


def test_a_service_that_only_reads_writes_no_lease(tmp_path):
    (tmp_path / "policy").mkdir()
    with serving(("lab", tmp_path)) as service:
        reply = service.ask(
            "/v1/leases",
            "POST",
            b'{"url": "/x", "id": "0", "lease": null}',
            Content_Type="application/json",
        )
        assert (reply.status, reply.json["detail"]) == (
            403,
            (
                "this service only reads; for leases it is started with --state DIR and "
                "--token-file FILE."
            ),
        )


def test_lists_have_what_the_page_of_a_run_shows_of_its_versions(tmp_path):
    with shardckpt.Publisher(tmp_path / "policy") as publisher:
        publish(publisher, 0)
    shardckpt.save(tmp_path / "saved" / "1", {"w": np.ones(3)})
    (published,), (saved,) = (
        [entry.to_json() for entry in catalog(tmp_path / name)] for name in ("policy", "saved")
    )
    assert 0 <= publishing_seconds(published["began"], published["created"]) < 100
    assert " s<" in str(versions_section([{**published, "id": "lab/policy/0"}], []))
    assert saved["began"] is None
    assert versions_section([{**saved, "id": "lab/saved/1"}], []) is None


@pytest.mark.browser
@pytest.mark.parametrize("dark", [False, True])
def test_the_page_of_a_run_shows_its_versions_and_who_follows(chromium, tmp_path, dark):
    with shardckpt.Publisher(tmp_path / "policy", anchor_every=3) as publisher:
        for step in range(5):
            publish(publisher, step)
    root = Store.open(tmp_path / "policy")
    for n, version in enumerate((4, 4, 3, None)):
        write_lease(root, f"{n:016x}", {"steps": [], "holder": "sampler-<b>", "version": version})
    assert len(held_leases(root)) == 4
    assert HeldLease("sampler-<b>", None, ()) in held_leases(root)
    with serving(("lab", tmp_path)) as service:
        service.wait_until(
            lambda: len(service.get("/v1/checkpoints?run=lab/policy")["checkpoints"]) == 5
        )
        for width in (360, 1200):
            with chromium.page(service.url + "/ui/run/lab/policy", width=width, dark=dark) as page:
                check_page(page, service.url)
                rows = page.run(
                    "[...document.querySelectorAll('#versions tbody tr')].map((r) => "
                    "[...r.cells].map((c) => c.textContent))"
                )
                assert [row[0] for row in rows] == ["4", "3", "2", "1", "0"]
                assert [row[1] for row in rows] == [
                    "3",
                    "– (all elements)",
                    "1",
                    "0",
                    "– (all elements)",
                ]
                assert [row[2] == "–" or 0 < float(row[2][:-1]) < 2 for row in rows] == [True] * 5
                assert [row[2] == "–" for row in rows] == [False, True, False, False, True]
                assert [float(row[4][:-1]) < 2 for row in rows] == [True, False, True, True, False]
                assert all(row[5].endswith(" s") for row in rows)
                assert [row[6] for row in rows] == ["sampler-<b> ×2", "sampler-<b>", "–", "–", "–"]
                assert "1 reader with an older version, or with none yet." in page.run(
                    "document.body.textContent"
                )
                background = page.run(
                    "getComputedStyle(document.querySelector('#versions').closest('section')).backgroundColor"
                )
                for selector in ("#versions td", "#versions th button", "#versions a"):
                    color = page.run(
                        f"getComputedStyle(document.querySelector('{selector}')).color"
                    )
                    assert contrast(color, background) > 4.5, selector
                if os.environ.get("PICTURES"):
                    page.screenshot(Path(os.environ["PICTURES"]) / f"versions-{width}-{dark}.png")
