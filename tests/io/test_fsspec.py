"""Places that fsspec reaches: what their clients do conditionally is proved here by two processes,
and nothing else is written."""

from __future__ import annotations

import re
import uuid
from contextlib import ExitStack, contextmanager
from typing import ClassVar

import fsspec
import numpy as np
import pytest
from emulators import environment
from fault_proxy import FaultProxy
from processes import Processes
from web_server import web_server

import shardckpt
from shardckpt import Mesh, SaveOptions, errors
from shardckpt.commit.base_places import base_location
from shardckpt.commit.publish import hold_place, read_prior
from shardckpt.convert.files.file_version import FileVersion
from shardckpt.format.structure import Base
from shardckpt.frameworks.coordination.base import SingleProcess
from shardckpt.io.doctor import PROMISES, examine
from shardckpt.io.store import Store, kind_of
from shardckpt.io.url import FSSPEC_WRITTEN, parse
from shardckpt.runs.collecting import collect, delete
from shardckpt.runs.ended import mark_ended
from shardckpt.runs.pinning import pin, tag, unpin
from shardckpt.writing.attempt import Attempt

# gcsfs gives large objects to aiohttp as bytes.
pytestmark = pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")
STATE = {"w": np.arange(4000, dtype=np.float32).reshape(40, 100), "step": 7}


@contextmanager
def opened(request, protocol):
    """The url of a bucket, without its scheme, on the emulator of a protocol's service, and the
    environment that leads there."""
    with ExitStack() as stack:
        if protocol == "s3":
            server = request.getfixturevalue("s3_server")
            stack.enter_context(environment(server.env()))
        else:
            server = request.getfixturevalue("gcs_server")
            proxy = stack.enter_context(FaultProxy(server.endpoint))  # it enforces preconditions
            stack.enter_context(environment(server.env(proxy.url)))
        yield server.new_bucket(f"b-{uuid.uuid4().hex}")


@pytest.fixture(params=FSSPEC_WRITTEN)
def written(request):
    """The url of a place of each protocol that is written to."""
    with opened(request, request.param) as bucket:
        yield f"fsspec+{request.param}://{bucket}/run"


@pytest.fixture
def gcs(request):
    """The urls of one place on Cloud Storage: by gcsfs, and by our own client."""
    with opened(request, "gs") as bucket:
        yield f"fsspec+gs://{bucket}/run", f"gs://{bucket}/run"


def assert_holds(url):
    assert shardckpt.open(url).verify().ok
    np.testing.assert_array_equal(shardckpt.restore(url)["w"], STATE["w"])


@pytest.mark.long
def test_of_two_processes_that_create_one_object_exactly_one_succeeds(written):
    """`examine` lets two processes race, ten times."""
    diagnosis = examine(written)
    outcomes = {trial.name: trial.outcome for trial in diagnosis.trials}
    lacks = {"replace", "remove", "clock", "copies", "exports", "driver"}
    assert {
        name: outcome for name, outcome in outcomes.items() if outcome != "works"
    } == dict.fromkeys(lacks, "lacks"), diagnosis.trials
    assert {promise.name for promise in PROMISES if diagnosis.holds(promise)} == {
        "restore",
        "save",
        "hosts",
        "durable",
    }
    assert Store.open(written).list() == []


@pytest.mark.long
@pytest.mark.parametrize("layout", ["packed", "zarr"])
def test_a_new_checkpoint_is_saved_restored_resharded_and_stays(written, layout):
    shardckpt.save(f"{written}/1", STATE, options=SaveOptions(layout=layout))
    assert_holds(f"{written}/1")
    shardckpt.save_async(
        f"{written}/2", STATE, options=SaveOptions(overwrite=True, layout=layout)
    ).wait()
    shardckpt.reshard(f"{written}/1", f"{written}/3", mesh=Mesh((4,), ("x",)))
    assert_holds(f"{written}/3")
    with pytest.raises(errors.AlreadyExistsError):
        shardckpt.save(f"{written}/1", STATE)
    assert sorted(Store.open(written).list_children()) == ["1/", "2/", "3/"]


def test_what_replaces_or_deletes_a_record_is_refused_by_name_before_anything_is_written(written):
    url = f"{written}/1"
    shardckpt.save(url, STATE)
    before = Store.open(written).list()
    refused = {
        "save over what is at": lambda: shardckpt.save(
            url, STATE, options=SaveOptions(overwrite=True)
        ),
        "delete": lambda: delete(url),
        "collect what unfinished saves left at": lambda: collect(written),
        "pin": lambda: pin(url),
        "unpin": lambda: unpin(url),
        "tag": lambda: tag(url, "best"),
        "end the run at": lambda: mark_ended(Store.open(written), "me"),
        "keep only some steps of": lambda: shardckpt.CheckpointManager(written, keep=2),
    }
    for action, use in refused.items():
        with pytest.raises(
            errors.StorageError,
            match=rf"cannot {action} {re.escape(written)}.* cannot replace an object only if it is "
            r"unchanged",
        ):
            use()
    assert Store.open(written).list() == before
    assert collect(written, dry_run=True) == []
    assert_holds(url)


def test_an_object_is_never_replaced_and_never_deleted_by_its_version(written):
    store = Store.open(written)
    assert store.create("key", b"first")
    assert not store.create("key", b"second")
    _, generation = store.read_versioned("key")
    with pytest.raises(errors.StorageError, match="cannot replace key at"):
        store.replace("key", b"second", generation)
    assert not store.remove("key", generation)
    assert store.read("key") == b"first"


@pytest.mark.long
def test_a_run_keeps_all_its_steps(written):
    with shardckpt.CheckpointManager(written, every=1, coordinator=SingleProcess()) as manager:
        for step in range(1, 4):
            manager.save(step, {**STATE, "step": step})
        manager.wait()
    again = shardckpt.CheckpointManager(written, coordinator=SingleProcess())
    assert again.all_steps() == [1, 2, 3]
    assert again.latest_step() == 3


@pytest.mark.long
@pytest.mark.parametrize("protocol", ["gs", "s3"])
def test_several_processes_save_and_of_two_jobs_one_commits(request, protocol):
    with opened(request, protocol) as bucket, Processes("many_hosts", "fsspec_clients") as job:
        url = f"fsspec+{protocol}://{bucket}"
        assert job.run("save", 3, f"{url}/1", timeout=250) == ["saved"] * 3
        assert shardckpt.open(f"{url}/1").verify().ok
        for pair in zip(*job.run("race", 2, f"{url}/race", 5, timeout=250), strict=True):
            assert sorted(pair) == ["AlreadyExistsError", "saved"]
        job.run("save_without_committing", 3, f"{url}/2", {})
        (outcome,) = shardckpt.commit(f"{url}/2")
        assert outcome.state == "committed"
        assert shardckpt.open(f"{url}/2").verify().ok


def test_a_place_that_another_client_holds_is_refused(gcs):
    by_gcsfs, own = gcs
    Attempt.at(f"{own}/1", SingleProcess(), SaveOptions()).place.write(
        "hosts/00000/0/d/00000", b"data of a save that was killed"
    )
    hold_place(
        Store.open(f"{own}/1"), read_prior(Store.open(f"{own}/1"), overwrite=False), overwrite=False
    )
    before = Store.open(f"{own}/1").list()
    with pytest.raises(errors.StorageError, match="cannot save over what is at"):
        shardckpt.save(f"{by_gcsfs}/1", STATE)
    assert Store.open(f"{own}/1").list() == before


def test_two_urls_of_one_place_lead_to_one_checkpoint(gcs):
    by_gcsfs, own = gcs
    shardckpt.save(f"{own}/1", STATE)
    assert_holds(f"{by_gcsfs}/1")
    shardckpt.save(f"{by_gcsfs}/2", STATE)
    assert_holds(f"{own}/2")
    assert Store.open(own).list() == Store.open(by_gcsfs).list()
    with pytest.raises(errors.AlreadyExistsError):
        shardckpt.save(f"{by_gcsfs}/1", STATE)
    assert delete(f"{own}/2") == []
    with pytest.raises(errors.NotFoundError):
        shardckpt.open(f"{by_gcsfs}/2")


def test_a_base_by_another_protocol_is_refused(gcs):
    by_gcsfs, own = gcs
    shardckpt.save(f"{own}/1", STATE)
    with pytest.raises(errors.OptionError, match="is in another kind of storage"):
        shardckpt.save(f"{by_gcsfs}/2", STATE, options=SaveOptions(base=f"{own}/1", skip="w"))
    shardckpt.save(f"{by_gcsfs}/3", STATE, options=SaveOptions(base=f"{by_gcsfs}/1", skip="w"))
    assert_holds(f"{own}/3")  # the base is beside it, whichever url leads there


@pytest.mark.parametrize(
    ("checkpoint", "base"),
    [
        ("gs://b-1/2", "fsspec+gs://b-1/1"),
        ("fsspec+gs://b-1/2", "gs://b-1/1"),
        ("fsspec+gs://b-1/2", "fsspec+gcs://b-1/1"),
        ("/data/2", "fsspec+sftp://host/1"),
        ("fsspec+gs://b-1/2", "fsspec+memory://1"),
    ],
)
def test_a_base_that_a_record_names_by_another_protocol_is_not_read(checkpoint, base):
    with pytest.raises(
        errors.FormatError, match=r"is in another kind of storage|which is not valid"
    ):
        base_location(parse(checkpoint), Base("attempt", "packed", None, base))


def test_a_protocol_that_is_not_proved_is_read_only(tmp_path):
    shardckpt.save(tmp_path / "1", STATE)
    with served(tmp_path) as host:
        url = f"fsspec+http://{host}/1"
        store = Store.open(url)
        assert not store.writable
        np.testing.assert_array_equal(shardckpt.restore(url)["w"], STATE["w"])
        for use in (
            lambda: shardckpt.save(f"fsspec+http://{host}/2", STATE),
            lambda: shardckpt.reshard(url, f"fsspec+http://{host}/2"),
        ):
            with pytest.raises(
                errors.StorageError,
                match=f"cannot save to fsspec\\+http://{host}/2: the place is read only",
            ):
                use()
        with pytest.raises(
            errors.StorageError, match=r"it is not proved that its client creates .*fsspec\+gs://"
        ):
            store.write("key", b"")
        assert not examine(url).ok


def test_a_file_of_another_program_is_imported_and_one_that_was_replaced_is_refused(
    written, tmp_path
):
    shardckpt.save(tmp_path / "1", {"w": STATE["w"]})
    shardckpt.export_safetensors(tmp_path / "1", tmp_path / "model.safetensors")
    store = Store.open(written)
    store.write("model.safetensors", (tmp_path / "model.safetensors").read_bytes())
    shardckpt.import_checkpoint(f"{written}/model.safetensors", tmp_path / "2")
    np.testing.assert_array_equal(shardckpt.restore(tmp_path / "2")["w"], STATE["w"])
    file = FileVersion(store, "model.safetensors")
    store.write("model.safetensors", bytes(len(file.read_whole(1 << 20))))
    for use in (lambda: file.read(10, 20), lambda: file.read_whole(1 << 20)):
        with pytest.raises(errors.ReplacedError):
            use()


def test_the_root_of_a_file_system_has_objects_too():
    """As of a repository: the path of `github://org:repo@main` is empty."""

    class Archive(fsspec.AbstractFileSystem):
        protocol = "testarchive"
        files: ClassVar = {"a.bin": b"1", "folder/b.bin": b"22"}

        @classmethod
        def _strip_protocol(cls, path):
            return re.sub("^testarchive://[^/]*/?", "", path).strip("/")

        def ls(self, path, detail=True, **_):
            inside = [name for name in self.files if not path or f"{name}/".startswith(f"{path}/")]
            depth = path.count("/") + 1 if path else 0
            names = {"/".join(name.split("/")[: depth + 1]) for name in inside}
            return [
                {"name": name, "type": "file", "size": len(self.files[name])}
                if name in self.files
                else {"name": name, "type": "directory", "size": 0}
                for name in sorted(names)
            ]

        def cat_file(self, path, start=None, end=None, **_):
            return self.files[path][start:end]

    fsspec.register_implementation("testarchive", Archive, clobber=True)
    root, folder = (Store.open(f"fsspec+testarchive://host{path}") for path in ("", "/folder"))
    assert root.list_children() == ["a.bin", "folder/"]
    assert sorted(root.list()) == ["a.bin", "folder/b.bin"]
    assert (root.size("folder/b.bin"), root.read("a.bin")) == (2, b"1")
    assert (folder.list_children(), folder.read("b.bin")) == (["b.bin"], b"22")


def test_without_a_length_an_object_is_there_and_its_size_is_an_error_that_says_so(tmp_path):
    (tmp_path / "key").write_bytes(b"bytes")
    with web_server(tmp_path) as server:
        server.open_end = True
        store = Store.open(f"fsspec+{server.url}")
        assert store.exists("key")
        assert store.read("key") == b"bytes"
        with pytest.raises(errors.StorageError, match="does not say how long the object is"):
            store.size("key")


@contextmanager
def served(folder):
    """A web server for a folder, on a free port; its host."""
    import functools
    import threading
    from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder))
    ) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("fsspec+file:///data", "give a path on a disk as it is"),
        ("fsspec+local:///data", "give a path on a disk as it is"),
        ("fsspec+memory://a", "write memory://"),
        ("fsspec+shardckpt://a", "give the url of that checkpoint"),
        ("fsspec+zip://a::gs://bucket/b.zip", "chained urls"),
        ("fsspec+://a", "unknown scheme"),
        ("fsspec+gs://a/b?c", "write %3F"),
    ],
)
def test_places_that_have_a_url_of_their_own_and_chains_are_refused(url, message):
    with pytest.raises(errors.UrlError, match=message):
        parse(url)


def test_a_protocol_that_fsspec_does_not_know_is_refused():
    with pytest.raises(
        errors.UrlError, match=r"fsspec knows no protocol 'nowhere'.* to no other process"
    ):
        Store.open("fsspec+nowhere://a/b")
    assert kind_of(parse("fsspec+nowhere://a/b")).writable is False
