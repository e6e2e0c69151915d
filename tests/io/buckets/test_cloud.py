"""Object stores by the environment: endpoints, credentials, retries and rates; whole checkpoints on
them."""

from __future__ import annotations

import hashlib
import itertools
import os
import subprocess
import sys
import tracemalloc
import uuid
from pathlib import Path

import numpy as np
import pytest
import tensorstore as ts
from emulators import environment

# Of gcsfs itself, importing it decides for the whole process whether it asks over gRPC.
from gcsfs.core import GCSFileSystem
from hypothesis import given
from hypothesis import strategies as st
from s3fs import S3FileSystem

import shardckpt
from shardckpt.errors import MissingExtraError, OptionError, StorageError
from shardckpt.io import extension
from shardckpt.io.buckets import cloud as settings
from shardckpt.io.store import Store
from shardckpt.writing import encoder

MiB = 1 << 20

STATE = {
    "w": np.random.default_rng(0).standard_normal((300, 500), np.float32),
    "block": {
        "o'clock ünï": np.arange(7),
        "scalar": np.array(3.5),
        "empty": np.zeros((0, 2)),
        "step": 7,
    },
}


@pytest.fixture(params=["packed", "zarr"])
def layout(request):
    return request.param


@pytest.fixture
def saved(cloud, layout):
    """The url of a checkpoint in that layout, at a place whose name is not plain."""
    url = cloud.url(uuid.uuid4().hex, "a%20b ü")
    shardckpt.save(url, STATE, options=shardckpt.SaveOptions(layout=layout))
    return url


def same(a, b):
    return a.keys() == b.keys() and all(
        same(a[k], b[k]) if isinstance(a[k], dict) else np.array_equal(a[k], b[k]) for k in a
    )


# --- whole checkpoints ----------------------------------------------------------------------------


def test_a_state_comes_back_from_an_object_store(saved):
    assert same(shardckpt.restore(saved), STATE)
    checkpoint = shardckpt.open(saved)
    assert checkpoint.verify().ok
    assert np.array_equal(
        checkpoint.read("w", shardckpt.Box((10, 20), (30, 40))), STATE["w"][10:30, 20:40]
    )


def test_a_checkpoint_is_replaced_and_nothing_of_it_is_left(saved, layout):
    before = shardckpt.open(saved).record.attempt
    state = {"w": STATE["w"] + 1}
    shardckpt.save(saved, state, options=shardckpt.SaveOptions(layout=layout, overwrite=True))
    assert same(shardckpt.restore(saved), state)
    assert Store.open(saved).list(f"{before}/") == []


def test_bytes_go_from_the_connection_to_their_place_without_a_copy(cloud):
    store, data = (
        Store.open(cloud.url(uuid.uuid4().hex)),
        np.random.default_rng(0).integers(0, 256, 8 * MiB, np.uint8),
    )
    store.write("object", data)
    into = np.zeros_like(data[: 7 * MiB])
    store.read_into("object", 5, [memoryview(into[:100])])  # what the client keeps is there now
    tracemalloc.start()
    try:
        store.read_into("object", 5, [memoryview(into[: 3 * MiB]), memoryview(into[3 * MiB :])])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < MiB // 2
    assert np.array_equal(into, data[5 : 7 * MiB + 5])


@pytest.mark.skipif(extension.moving is None, reason="the extension is off, or was not built")
def test_the_extension_lays_matrices_out_where_they_are_sent_from(cloud, monkeypatch):
    monkeypatch.setattr(encoder, "lay_out_all", lambda *_: pytest.fail("numpy laid chunks out"))
    state, url = (
        {"w": np.arange(3_000_000, dtype=np.float32).reshape(1500, 2000), "b": np.arange(7)},
        cloud.url(uuid.uuid4().hex),
    )
    shardckpt.save(url, state)
    assert same(shardckpt.restore(url), state)
    assert shardckpt.open(url).verify().ok


def test_stock_tensorstore_reads_it(saved):
    spec = shardckpt.open(saved).stock_spec("w")
    assert np.array_equal(ts.open(spec).result().read().result(), STATE["w"])


def test_stock_tensorstore_reads_it_by_a_url_where_one_can_say_it_all(gcs_server, layout):
    """A url has no place for an endpoint, which for S3 is a part of the spec."""
    with environment(gcs_server.env()):
        url = gcs_server.url(uuid.uuid4().hex)
        shardckpt.save(url, STATE, options=shardckpt.SaveOptions(layout=layout))
        assert np.array_equal(
            ts.open(shardckpt.open(url).stock_url("w")).result().read().result(), STATE["w"]
        )


def fsspec_files(cloud):
    """The bucket, as gcsfs or s3fs sees it."""
    options = {
        "endpoint_url": cloud.endpoint,
        "skip_instance_cache": True,
        "use_listings_cache": False,
    }
    return (
        GCSFileSystem(token="anon", **options) if cloud.scheme == "gs" else S3FileSystem(**options)
    )


def test_fsspec_reads_the_same_objects(cloud, saved):
    files, store = fsspec_files(cloud), Store.open(saved)
    root, keys = store.location.path, store.list()
    assert sorted(files.find(root)) == [f"{root}/{key}" for key in keys]
    assert {key: files.cat_file(f"{root}/{key}") for key in keys} == {
        key: store.read(key) for key in keys
    }


ZARR = """
import hashlib, sys, zarr
group = zarr.open_group(sys.argv[1], mode="r")
print(hashlib.sha256(group["w"][:]).hexdigest(), group["block/scalar"][...], sorted(group))
"""


def test_zarr_reads_arrays_of_the_plain_layout_through_fsspec(cloud, tmp_path):
    url = cloud.url(uuid.uuid4().hex)
    shardckpt.save(url, STATE, options=shardckpt.SaveOptions(layout="zarr"))
    run = use(f"{url}/{shardckpt.open(url).record.attempt}/zarr", cloud.env(), tmp_path, ZARR)
    assert run.stdout == f"{hashlib.sha256(STATE['w']).hexdigest()} 3.5 ['block', 'w']\n", (
        run.stderr
    )


@pytest.mark.long
def test_the_command_line_knows_object_stores(cloud, saved):
    command = [Path(sys.executable).parent / "shardckpt", "verify", saved]
    run = subprocess.run(
        command, env={**os.environ, **cloud.env()}, capture_output=True, text=True, timeout=250
    )
    assert run.returncode == 0, run.stdout + run.stderr


# --- the environment ------------------------------------------------------------------------------

USE = """
import sys
from shardckpt.io.store import Store
store = Store.open(sys.argv[1])
store.write("key", b"value")
assert store.read("key") == b"value"
print(store.list_children())
"""


LOADED = """
import sys
from shardckpt.io.store import Store
Store.open(sys.argv[1]).list()
print(sorted({"botocore", "google.auth", "urllib3"} & {*sys.modules}))
"""


def use(url, variables, home, program=USE):
    """Run it in a process that has those variables, and no others that object stores go by."""
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("AWS_", "GOOGLE_", "TENSORSTORE_", "STORAGE_"))
    }
    variables = {**clean, "HOME": str(home), "AWS_EC2_METADATA_DISABLED": "true", **variables}
    return subprocess.run(
        [sys.executable, "-c", program, url],
        env=variables,
        capture_output=True,
        text=True,
        timeout=250,
    )


@pytest.mark.parametrize(
    "variable",
    ["TENSORSTORE_GCS_HTTP_URL", "STORAGE_EMULATOR_HOST", "STORAGE_EMULATOR_HOST without a scheme"],
)
def test_one_variable_is_enough_to_name_an_emulator_of_gcs(gcs_server, tmp_path, variable):
    endpoint = (
        gcs_server.endpoint.removeprefix("http://")
        if " " in variable
        else f"{gcs_server.endpoint}/"
    )
    run = use(gcs_server.url(uuid.uuid4().hex), {variable.partition(" ")[0]: endpoint}, tmp_path)
    assert run.stdout == "['key']\n", run.stderr


@pytest.fixture
def profiles(tmp_path):
    """Files with a profile `ours` and no default."""
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws" / "credentials").write_text(
        "[ours]\naws_access_key_id = test\naws_secret_access_key = test\n"
    )
    (tmp_path / ".aws" / "config").write_text("[profile ours]\n")
    return tmp_path


@pytest.mark.long
@pytest.mark.parametrize(
    "region", [{}, {"AWS_REGION": "eu-west-1"}, {"AWS_DEFAULT_REGION": "us-east-1"}]
)
@pytest.mark.parametrize("credentials", ["AWS_PROFILE", "AWS_ACCESS_KEY_ID"])
def test_s3_goes_by_the_variables_that_aws_documents(s3_server, profiles, credentials, region):
    given = (
        {"AWS_PROFILE": "ours"}
        if credentials == "AWS_PROFILE"
        else {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
    )
    endpoint = {"AWS_ENDPOINT_URL_S3": s3_server.endpoint, "AWS_ENDPOINT_URL": "http://127.0.0.1:1"}
    run = use(s3_server.url(uuid.uuid4().hex), {**endpoint, **given, **region}, profiles)
    assert run.stdout == "['key']\n", run.stderr


@pytest.mark.long
def test_s3_goes_by_the_files_that_aws_s_variables_name(s3_server, profiles, tmp_path):
    """Keys may be in either file; a profile that is called default needs not to be named."""
    for keys, others in itertools.permutations(["AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"]):
        (tmp_path / keys).write_text(
            "[default]\naws_access_key_id = test\naws_secret_access_key = a%%b=\n"
        )
        given = {keys: str(tmp_path / keys), others: str(tmp_path / "none")}
        run = use(
            s3_server.url(uuid.uuid4().hex),
            {"AWS_ENDPOINT_URL": s3_server.endpoint, **given},
            tmp_path,
        )
        assert run.stdout == "['key']\n", run.stderr


def test_a_profile_that_nobody_has_is_refused_by_name(s3_server, profiles):
    run = use(
        s3_server.url("x"),
        {"AWS_ENDPOINT_URL": s3_server.endpoint, "AWS_PROFILE": "theirs"},
        profiles,
    )
    assert "OptionError: AWS_PROFILE=theirs: neither" in run.stderr.splitlines()[-1]


@pytest.mark.long
def test_requests_to_s3_go_unsigned_if_that_is_asked_for(s3_server, profiles):
    """moto lets anybody write, and does not let the nameless read what they have written."""
    variables = {
        "AWS_ENDPOINT_URL": s3_server.endpoint,
        "AWS_PROFILE": "ours",
        "AWS_NO_SIGN_REQUEST": "1",
    }
    run = use(s3_server.url(uuid.uuid4().hex), variables, profiles)
    assert "(403)" in run.stderr.splitlines()[-1]
    assert "give these credentials permission" in run.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("scheme", "module", "extra"), [("gs", "google.auth", "gcs"), ("s3", "botocore", "s3")]
)
def test_what_is_not_installed_is_named_before_anything_is_done(monkeypatch, scheme, module, extra):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(
        MissingExtraError,
        match=rf"{scheme}:// needs {module.replace('.', '-')}; .*shardckpt\[{extra}\]",
    ):
        Store.open(f"{scheme}://bucket/run")


def test_opening_a_local_place_loads_no_client_of_an_object_store(tmp_path):
    assert use(str(tmp_path), {}, tmp_path, LOADED).stdout == "[]\n"


@pytest.mark.parametrize("value", ["soon", "0", "-1", "inf", "nan"])
@pytest.mark.parametrize(
    "variable",
    ["SHARDCKPT_RETRY_SECONDS", "SHARDCKPT_READS_PER_SECOND", "SHARDCKPT_WRITES_PER_SECOND"],
)
def test_a_number_that_is_none_is_refused_by_name(variable, value):
    with environment({variable: value, "TENSORSTORE_GCS_HTTP_URL": "http://127.0.0.1:1"}):
        settings._limiter.cache_clear()
        with pytest.raises(OptionError, match=f"{variable}={value}"):
            Store.open("gs://bucket/run")
    settings._limiter.cache_clear()


# --- retries and rates ----------------------------------------------------------------------------


@given(st.floats(0.1, 3600))
def test_pauses_between_tries_take_as_long_as_was_asked_for(seconds):
    with environment({"SHARDCKPT_RETRY_SECONDS": str(seconds)}):
        retries = settings.context()["gcs_request_retries"]
    first, longest = (
        float(retries[name].removesuffix("s")) for name in ("initial_delay", "max_delay")
    )
    pauses = [min(longest, first * 2**i) for i in range(retries["max_retries"])]
    assert seconds <= sum(pauses) <= seconds + longest
    assert len(pauses) >= 4
    ts.Context(settings.context())


def test_only_the_pauses_that_are_made_are_counted():
    with environment({"SHARDCKPT_RETRY_SECONDS": "1e15"}):
        assert [*itertools.islice(settings.pauses(), 8)] == [0.5, 1, 2, 4, 8, 16, 16, 16]
        ts.Context(settings.context())


def test_a_store_keeps_to_the_rate(cloud, monkeypatch):
    counts = {"read": 0, "write": 0}

    class Counted:
        def __init__(self, kind):
            self.kind = kind

        def wait(self):
            counts[self.kind] += 1

    store = Store.open(cloud.url(uuid.uuid4().hex))
    monkeypatch.setattr(settings, "_limiter", lambda kind, _share: Counted(kind))
    store.write("a", b"")
    store.upload("b", b"").wait()
    store.create("c", b"")
    assert counts == {"read": 1, "write": 3}
    store.read("a")
    store.exists("a")
    store.list()
    assert counts == {"read": 4, "write": 3}
    store.delete("a")
    store.delete_prefix()
    assert counts == {"read": 5, "write": 6}


def test_a_request_that_is_refused_is_not_repeated(cloud):
    with environment(cloud.env()), pytest.raises(StorageError, match="no-such-bucket"):
        Store.open(f"{cloud.scheme}://no-such-bucket/run").write("key", b"")
