"""The catalogue shows what is in the roots within seconds, and can be lost at any time."""

import json
import os
import shutil
import sqlite3
import subprocess
import sys
import threading

import numpy as np
import pytest
from counting import steps
from safetensors.numpy import load
from serving import serving

import shardckpt
from shardckpt import SaveOptions
from shardckpt.errors import NotFoundError, OptionError, StorageError
from shardckpt.runs.collecting import delete
from shardckpt.runs.pinning import pin, tag, unpin, untag
from shardckpt.serve.catalogue.catalogue import Catalogue
from shardckpt.serve.catalogue.query import CheckpointQuery
from shardckpt.serve.opened import OpenCheckpoints
from shardckpt.serve.roots import Roots
from shardckpt.serve.scanner import Scanner

QUERY = CheckpointQuery()


def save(place):
    shardckpt.save(place, {"w": np.ones(3)})


@pytest.fixture
def scanned(tmp_path):
    """A root, its catalogue, and a function that scans and lists the ids."""
    root = tmp_path / "root"
    root.mkdir()
    roots, catalogue = Roots([f"lab={root}"]), Catalogue(tmp_path / "state")
    scanner = Scanner(roots, catalogue)

    def ids(state=None):
        scanner.scan()
        return [one["id"] for one in catalogue.checkpoints(CheckpointQuery(state=state))[0]]

    yield root, catalogue, scanner, ids
    catalogue.close()


def test_it_follows_the_storage(scanned):
    root, catalogue, _, ids = scanned
    assert ids() == []
    save(root / "a" / "1")
    save(root / "b" / "deep" / "2")
    assert ids() == ["lab/a/1", "lab/b/deep/2"]
    save(root / "a" / "10")
    assert ids() == ["lab/a/1", "lab/a/10", "lab/b/deep/2"]
    pin(root / "a" / "1")
    ids()
    assert [one["id"] for one in catalogue.checkpoints(CheckpointQuery(tag="pinned"))[0]] == [
        "lab/a/1"
    ]
    unpin(root / "a" / "1")
    ids()
    assert catalogue.checkpoints(CheckpointQuery(tag="pinned"))[0] == []
    shutil.rmtree(root / "a" / "1")
    assert ids() == ["lab/a/10", "lab/b/deep/2"]
    shutil.rmtree(root / "b")
    assert ids() == ["lab/a/10"]
    (root / "a" / "10" / "checkpoint.json").write_text("{}")
    assert ids("unreadable") == ["lab/a/10"]
    save(root / "other")
    save(root / "other" / "below")  # beside the attempt of a checkpoint
    assert ids("committed") == ["lab/other", "lab/other/below"]


def test_a_directory_that_is_removed_takes_what_is_below_it_and_no_look_at_the_others(scanned):
    root, _, scanner, ids = scanned
    save(root / "a" / "1")
    save(root / "gone" / "deep" / "2")
    save(root / "gone" / "3")
    for n in range(500):
        (root / "others" / str(n)).mkdir(parents=True)
    ids()
    before = steps(scanner.scan)
    shutil.rmtree(root / "gone")
    assert steps(scanner.scan) < before + 500
    assert ids() == ["lab/a/1"]
    save(root / "gone" / "deep" / "2")
    assert ids() == ["lab/a/1", "lab/gone/deep/2"]


def test_tags_are_seen_at_once_and_found(scanned):
    root, catalogue, _, ids = scanned
    for step in (1, 2):
        save(root / "a" / str(step))

    def tagged(name):
        ids()
        return [
            (one["id"], one["pinned"], one["tags"])
            for one in catalogue.checkpoints(CheckpointQuery(tag=name))[0]
        ]

    for _ in range(3):
        tag(root / "a" / "1", "best")
        assert tagged("best") == [("lab/a/1", False, ["best"])]
        assert tagged("pinned") == tagged("bes") == []
        untag(root / "a" / "1", "best")
        assert tagged("best") == []
    for step in (1, 2):
        tag(root / "a" / str(step), "best")
    pin(root / "a" / "2")
    assert tagged("best") == [("lab/a/1", False, ["best"]), ("lab/a/2", True, ["best"])]
    shutil.rmtree(root / "a" / "1")
    assert tagged("best") == [("lab/a/2", True, ["best"])]
    assert catalogue._read("SELECT * FROM tags", ()) == [("best", "lab/a/2")]


def test_a_checkpoint_below_another_is_reached_also_after_that_was_deleted(tmp_path):
    shardckpt.save(tmp_path / "runs" / "kept", {"w": np.zeros(1)})
    roots, catalogue = Roots([f"lab={tmp_path / 'runs'}"]), Catalogue(tmp_path / "state")
    scanner, checkpoints = Scanner(roots, catalogue), OpenCheckpoints(roots, catalogue)
    scanner.scan()
    ident, rest = checkpoints.resolve("lab/kept/tensors/w")
    assert (checkpoints.get(ident).ident, rest) == ("lab/kept", "tensors/w")
    for deleted in (False, True):
        if deleted:
            delete(str(tmp_path / "runs" / "kept"), reason="test")
        else:
            shardckpt.save(tmp_path / "runs" / "kept" / "100", {"w": np.zeros(1)})
        scanner.scan()
        assert checkpoints.resolve("lab/kept/100/tensors/w") == ("lab/kept/100", "tensors/w")
    catalogue.close()


def test_an_open_checkpoint_needs_no_look_at_the_storage_nor_a_readable_catalogue(
    tmp_path, monkeypatch
):
    place, failing = f"memory://{tmp_path.name}/runs", []

    class Unreadable(Catalogue):
        def _read(self, sql, values):
            if failing:
                raise StorageError("the catalogue cannot be read now")
            return super()._read(sql, values)

    for step in (1, 2):
        save(f"{place}/{step}")
    catalogue = Unreadable(tmp_path / "state")
    checkpoints = OpenCheckpoints(Roots([f"lab={place}"]), catalogue)
    asked, exists = [], shardckpt.io.store.Store.exists
    monkeypatch.setattr(
        shardckpt.io.store.Store, "exists", lambda *args: (asked.append(args), exists(*args))[1]
    )
    assert checkpoints.resolve("lab/1/w/c/0") == ("lab/1", "w/c/0")
    assert asked
    checkpoints.get("lab/1")
    del asked[:]
    for one in (False, True):
        failing += [one] * one
        assert checkpoints.resolve("lab/1/w/c/0") == ("lab/1", "w/c/0")
        assert not asked
    with pytest.raises(StorageError):
        checkpoints.resolve("lab/2/w/c/0")
    catalogue.close()


def test_an_open_checkpoint_that_is_gone_does_not_hide_a_new_one_below_it(tmp_path):
    save(tmp_path / "runs" / "kept")
    checkpoints = OpenCheckpoints(Roots([f"lab={tmp_path / 'runs'}"]))
    checkpoints.get("lab/kept")
    shutil.rmtree(tmp_path / "runs" / "kept")
    with pytest.raises(NotFoundError):
        checkpoints.get("lab/kept")
    save(tmp_path / "runs" / "kept" / "100")
    assert checkpoints.resolve("lab/kept/100/w") == ("lab/kept/100", "w")


def test_a_change_within_one_step_of_the_file_systems_clock_is_seen(scanned):
    root, catalogue, _, ids = scanned
    save(root / "1")
    ids()
    times = [
        (path, path.stat().st_mtime_ns) for path in (root / "1", root / "1" / "checkpoint.json")
    ]
    tag(root / "1", "best")
    for path, then in times:
        os.utime(path, ns=(then, then))
    ids()
    assert len(catalogue.checkpoints(CheckpointQuery(tag="best"))[0]) == 1


def test_on_an_object_store_a_tag_is_seen_when_it_is_announced(tmp_path):
    place = f"memory://{tmp_path.name}/tags/run"
    save(f"{place}/1")
    catalogue = Catalogue(tmp_path / "state")
    scanner = Scanner(Roots([f"lab={place}"]), catalogue)
    scanner.scan()
    tag(f"{place}/1", "best")
    scanner.scan()
    assert catalogue.checkpoints(CheckpointQuery(tag="best"))[0] == []
    scanner.announce("lab/1")
    scanner.scan()
    assert [one["id"] for one in catalogue.checkpoints(CheckpointQuery(tag="best"))[0]] == ["lab/1"]
    catalogue.close()


def test_on_an_object_store_a_record_that_is_the_same_is_not_read_again(tmp_path, monkeypatch):
    root = f"memory://{tmp_path.name}/runs"
    save(f"{root}/1")
    roots, reads = Roots([f"lab={root}"]), []
    for name in ("read", "read_versioned"):
        original = getattr(shardckpt.io.store.Store, name)

        def counted(store, key, *args, original=original):
            reads.append(key)
            return original(store, key, *args)

        monkeypatch.setattr(shardckpt.io.store.Store, name, counted)
    catalogue = Catalogue(tmp_path / "state")
    scanner = Scanner(roots, catalogue)

    def entry():
        scanner.announce("lab/1")
        scanner.scan()
        return catalogue.checkpoints(QUERY)[0][0]

    first = entry()
    assert entry() == first
    reads.clear()
    assert entry() == first
    assert "checkpoint.json" not in reads
    pin(f"{root}/1")
    assert entry()["pinned"]
    unpin(f"{root}/1")
    assert not entry()["pinned"]
    opened = OpenCheckpoints(roots, catalogue)
    one = opened.get("lab/1")
    reads.clear()
    one.checked -= 60
    assert opened.get("lab/1") is one
    assert "checkpoint.json" not in reads
    shardckpt.save(f"{root}/1", {"w": np.ones(9)}, options=SaveOptions(overwrite=True))
    one.checked -= 60
    assert opened.get("lab/1").attempt == entry()["attempt"] != first["attempt"]
    catalogue.close()


def test_on_an_object_store_no_token_is_asked_for_of_a_record_that_is_read_anyway(
    tmp_path, monkeypatch
):
    root, asked = f"memory://{tmp_path.name}/runs", []
    save(f"{root}/1")
    shardckpt.io.store.Store.open(f"{root}/1").write("checkpoint.json", b"damaged")
    change_token = shardckpt.io.store.Store.change_token

    def counted(store, key):
        asked.append(key)
        return change_token(store, key)

    monkeypatch.setattr(shardckpt.io.store.Store, "change_token", counted)
    catalogue = Catalogue(tmp_path / "state")
    scanner = Scanner(Roots([f"lab={root}"]), catalogue)
    for _ in range(3):
        scanner.announce("lab/1")
        scanner.scan()
    assert [one["state"] for one in catalogue.checkpoints(QUERY)[0]] == ["unreadable"]
    assert not asked
    catalogue.close()


def test_saves_that_are_not_committed_are_shown_until_they_are(scanned):
    root, catalogue, _, ids = scanned
    save(root / "1")
    record = (root / "1" / "checkpoint.json").read_bytes()
    (root / "1" / "checkpoint.json").unlink()
    assert ids("uncommitted") == ["lab/1"]
    assert catalogue.find(["lab/1"])[0]["finished"] == 1
    (root / "1" / "checkpoint.json").write_bytes(record)
    assert ids("committed") == ["lab/1"]


def test_it_is_made_anew_where_it_was_deleted_damaged_or_is_old(scanned, tmp_path):
    root, catalogue, _, ids = scanned
    for i in range(3):
        save(root / str(i))
    assert len(ids()) == 3
    for path in (tmp_path / "state").glob("catalogue*"):
        path.unlink()
    assert len(ids()) == 3
    shutil.rmtree(root / "1")
    assert len(ids()) == 2

    database = tmp_path / "state" / "catalogue.sqlite"
    catalogue.close()
    database.write_bytes(b"no database" * 1000)
    other = Catalogue(tmp_path / "state")
    assert other.checkpoints(QUERY) == ([], None)
    other._writer.execute("PRAGMA user_version = 99")
    other.close()
    again = Catalogue(tmp_path / "state")
    assert again.totals() == {}
    scanned[2]._catalogue = again
    scanned[2]._seen.clear()
    scanned[2].scan()
    assert len(again.checkpoints(QUERY)[0]) == 2
    again.close()
    catalogue.__init__(tmp_path / "state")


def test_rows_of_an_earlier_process_go_when_their_checkpoints_have_gone(tmp_path):
    save(tmp_path / "root" / "1")
    save(tmp_path / "root" / "2")
    for expected in (["lab/1", "lab/2"], ["lab/2"]):
        catalogue = Catalogue(tmp_path / "state")
        Scanner(Roots([f"lab={tmp_path / 'root'}"]), catalogue).scan()
        assert [one["id"] for one in catalogue.checkpoints(QUERY)[0]] == expected
        catalogue.close()
        shutil.rmtree(tmp_path / "root" / "1", ignore_errors=True)


def test_a_storage_that_vanishes_keeps_its_rows_and_returns(tmp_path, monkeypatch):
    save(tmp_path / "root" / "1")
    catalogue = Catalogue(tmp_path / "state")
    scanner = Scanner(Roots([f"lab={tmp_path / 'root'}"]), catalogue)
    scanner.scan()
    (tmp_path / "root").chmod(0)
    list_children = shardckpt.io.store.Store.list_children

    def fails(store, prefix=""):
        raise StorageError("the bucket is away")

    monkeypatch.setattr(shardckpt.io.store.Store, "list_children", fails)
    scanner.scan()
    assert scanner.problems == {"lab": "the bucket is away"}
    assert len(catalogue.checkpoints(QUERY)[0]) == 1
    monkeypatch.setattr(shardckpt.io.store.Store, "list_children", list_children)
    (tmp_path / "root").chmod(0o755)
    scanner.scan()
    assert scanner.problems == {}
    catalogue.close()


def test_a_disk_that_is_full_is_told_and_gets_over(scanned):
    root, catalogue, scanner, ids = scanned
    save(root / "1")
    save(root / "2")
    pages = catalogue._writer.execute("PRAGMA page_count").fetchone()[0]
    catalogue._writer.execute(f"PRAGMA max_page_count = {pages}")
    for name in ("1", "2"):
        for i in range(20):
            (root / f"{name}-{i}" / "checkpoint.json").parent.mkdir()
            (root / f"{name}-{i}" / "checkpoint.json").write_bytes(
                (root / name / "checkpoint.json").read_bytes()
            )
    scanner.scan()
    assert "cannot be written" in scanner.problems["lab"]
    catalogue._writer.execute("PRAGMA max_page_count = 1000000")
    assert len(ids()) == 42
    assert not scanner.problems


def test_a_state_directory_has_one_writer(tmp_path):
    catalogue = Catalogue(tmp_path)
    with pytest.raises(OptionError, match="another server"):
        Catalogue(tmp_path)
    catalogue.close()
    Catalogue(tmp_path).close()


def test_a_catalogue_that_could_not_be_made_anew_is_made_at_the_next_scan(tmp_path):
    state = tmp_path / "state"
    catalogue = Catalogue(state)
    for file in state.glob("catalogue*"):
        file.unlink()
    state.rename(tmp_path / "away")
    for _ in range(2):
        with pytest.raises(StorageError, match="cannot be made"):
            catalogue.renewed()
    (tmp_path / "away").rename(state)
    assert catalogue.renewed()
    assert not catalogue.renewed()
    catalogue.close()


def test_what_is_read_while_a_catalogue_is_made_anew_leaves_no_connection_to_the_old_one(scanned):
    root, catalogue, _, ids = scanned
    popped, made_anew = threading.Event(), threading.Event()

    class Busy(Catalogue):
        def _make(self):
            database = super()._make()
            if reader.ident is None:
                reader.start()
                assert popped.wait(10)
            return database

        def _connection(self, *args):
            connection = super()._connection(*args)
            if threading.current_thread() is reader:
                popped.set()
                assert made_anew.wait(10)
            return connection

    save(root / "1")
    assert len(ids()) == 1
    reader = threading.Thread(target=catalogue.totals)
    catalogue.__class__ = Busy
    for file in catalogue._path.parent.glob("catalogue*"):
        file.unlink()
    assert catalogue.renewed()
    made_anew.set()
    reader.join()
    assert catalogue.totals() == {}


def test_what_is_gone_while_the_catalogue_cannot_be_written_goes_later(scanned):
    root, catalogue, scanner, ids = scanned
    for name in ("1", "2"):
        save(root / name)
    assert len(ids()) == 2
    with sqlite3.connect(catalogue._path) as other:
        other.execute("BEGIN IMMEDIATE")
        catalogue._writer.execute("PRAGMA busy_timeout = 10")
        shutil.rmtree(root / "1")
        scanner.scan()
        assert "cannot be written" in scanner.problems["lab"]
    other.close()
    assert ids() == ["lab/2"]
    assert not scanner.problems


def test_new_checkpoints_are_seen_within_seconds_and_announced_ones_at_once(tmp_path, monkeypatch):
    root = tmp_path / "root"
    root.mkdir()
    with serving(("lab", root)) as service:

        def ids():
            return [one["id"] for one in service.get("/v1/checkpoints")["checkpoints"]]

        save(root / "run" / "1")
        service.wait_until(lambda: ids() == ["lab/run/1"])
        monkeypatch.setenv("SHARDCKPT_SERVER", service.url)
        with shardckpt.CheckpointManager(root / "run", every=1) as manager:
            manager.save(2, {"w": np.ones(3)})
        service.wait_until(lambda: ids() == ["lab/run/1", "lab/run/2"])
        asked = b'shardckpt_serve_requests_total{area="v1",method="POST",status="202"}'
        service.wait_until(lambda: asked in service.ask("/metrics").body)
        for body in (b"{", b"[]", b'{"url": 5}', b'{"url": "ftp://x"}', b"\xff", b"[" * 50_000):
            assert service.ask("/v1/announcements", "POST", body).status == 400
        assert service.ask("/v1/announcements", "POST", b'{"url": "/etc"}').json == {"id": None}


@pytest.mark.parametrize("server", ["http://127.0.0.1:9", "nonsense", "file:///etc", "http://"])
def test_training_does_not_notice_a_service_that_is_not_there(tmp_path, monkeypatch, server):
    monkeypatch.setenv("SHARDCKPT_SERVER", server)
    with shardckpt.CheckpointManager(tmp_path, every=1) as manager:
        for step in (1, 2):
            manager.save(step, {"w": np.ones(3)})
    assert manager.all_steps() == [1, 2]


@pytest.mark.long
def test_the_command_serves_until_it_is_told_to_end(tmp_path):
    save(tmp_path / "root" / "1")
    command = [
        sys.executable,
        "-m",
        "shardckpt",
        "serve",
        f"lab={tmp_path / 'root'}",
        f"new={tmp_path / 'none'}",
        "--port",
        "0",
        "--state",
        tmp_path / "state",
    ]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        try:
            assert process.stdout.readline().startswith("serving at http://127.0.0.1:")
            second = subprocess.run(command, capture_output=True, text=True, timeout=200)
            assert second.returncode == 2
            assert "another server" in second.stderr
            assert f"new: there is no directory {tmp_path / 'none'} yet" in second.stderr
            assert "lab: " not in second.stderr
        finally:
            process.terminate()
            assert process.wait(60) in (0, -15)
    assert (tmp_path / "state" / "catalogue.sqlite").exists()


def test_ten_thousand_rows_are_listed_by_index(tmp_path):
    from shardckpt.io.url import parse
    from shardckpt.runs.catalog import CatalogEntry

    catalogue = Catalogue(tmp_path)
    place = parse("/x")
    entries = {
        f"lab/run-{i % 200}/{i}": (
            f"lab/run-{i % 200}",
            CatalogEntry(str(i), place, "committed", metrics={"loss": float(i)}),
        )
        for i in range(10_000)
    }
    catalogue.replace(entries, [])
    assert len(catalogue.runs(limit=500)[0]) == 200
    page, following = catalogue.checkpoints(CheckpointQuery(metric=("loss", "<", 500.0), limit=400))
    assert len(page) == 400
    assert (
        len(
            catalogue.checkpoints(
                CheckpointQuery(metric=("loss", "<", 500.0), limit=400, cursor=following)
            )[0]
        )
        == 100
    )
    plan = catalogue._read(
        "EXPLAIN QUERY PLAN SELECT id FROM checkpoints WHERE run = ? ORDER BY run, step, id "
        "LIMIT 5",
        ("x",),
    )
    assert "in_order" in str(plan)
    catalogue.close()


def test_a_scan_of_a_bucket_makes_at_most_four_requests_per_checkpoint(tmp_path, monkeypatch):
    root = f"memory://{tmp_path.name}/runs"
    for step in range(5):
        save(f"{root}/run/{step}")
    pin(f"{root}/run/2")
    asked = []
    for name in ("list_children", "read_versioned", "exists"):
        original = getattr(shardckpt.io.store.Store, name)

        def counted(store, *args, original=original, **options):
            asked.append(str(store))
            return original(store, *args, **options)

        monkeypatch.setattr(shardckpt.io.store.Store, name, counted)
    catalogue = Catalogue(tmp_path / "state")
    scanner = Scanner(Roots([f"lab={root}"]), catalogue)
    scanner.scan()
    assert len(catalogue.checkpoints(QUERY)[0]) == 5
    assert max(asked.count(f"{root}/run/{step}") for step in range(5)) <= 4
    del asked[:]
    scanner.scan()  # the runs alone are listed again
    assert set(asked) == {root, f"{root}/run"}
    scanner.announce("lab/run/2")
    scanner.scan()
    assert asked.count(f"{root}/run/2") > 0
    catalogue.close()


def test_a_bucket_is_listed_read_and_followed(store, tmp_path):
    root = (
        f"{store.location}/runs"
        if store.location.local_path is None
        else str(store.location.local_path / "runs")
    )
    save(f"{root}/a/1")
    with serving(("lab", root), state=tmp_path / "state") as service:
        assert [one["id"] for one in service.get("/v1/checkpoints")["checkpoints"]] == ["lab/a/1"]
        assert (
            service.ask("/v1/checkpoints/lab/a/1/tensors/w?format=raw").body == np.ones(3).tobytes()
        )
        assert load(service.ask("/files/lab/a/1/model.safetensors").body)["w"].tolist() == [1, 1, 1]
        checkpoint = shardckpt.open(f"{service.url}/raw/lab/a/1")
        assert checkpoint.verify().ok
        save(f"{root}/a/2")
        service.ask("/v1/announcements", "POST", json.dumps({"url": f"{root}/a/2"}).encode())
        service.wait_until(lambda: len(service.get("/v1/checkpoints")["checkpoints"]) == 2)
        assert service.ask("/files/lab/a/2/model.safetensors", Range="bytes=0-7").status == 206


def test_pages_and_lists_show_tags(tmp_path):
    save(tmp_path / "run" / "1")
    tag(tmp_path / "run" / "1", "best")
    with serving(("lab", tmp_path)) as service:
        assert service.get("/v1/checkpoints?tag=best")["checkpoints"][0]["tags"] == ["best"]
        assert service.get("/v1/checkpoints?tag=other")["checkpoints"] == []
        page = service.ask("/ui/run/lab/run").body.decode()
        assert "step 1: 28 B, tagged best" in page
        assert ">committed, tagged best<" in page
        assert "<p>tagged best</p>" in service.ask("/ui/checkpoint/lab/run/1").body.decode()
        with shardckpt.Client(service.url) as client:
            assert [one["tags"] for one in client.checkpoints("lab/run", tag="best")] == [["best"]]


def test_a_root_that_cannot_be_listed_is_refused(tmp_path):
    (tmp_path / "notes").touch()
    with pytest.raises(
        OptionError, match=f"^lab: {tmp_path}/notes is a file; give a directory of runs"
    ):
        Roots([f"lab={tmp_path / 'notes'}"])
    with pytest.raises(OptionError, match="a web server does not list what it has"):
        Roots(["lab=http://127.0.0.1/runs"])
