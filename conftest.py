"""Fixtures for tests of several packages: emulators of the clouds, which start with their first
use, stores, and encoded chunks.

`pythonpath` in pyproject.toml says where the tests' helpers are found; the programs that tests
start find them by `PYTHONPATH`.
"""

from __future__ import annotations

import gc
import itertools
import os
import signal
import tempfile
import uuid

import crc32c
import ml_dtypes
import numpy as np
import pytest
from azurite import UnreachableError, azurite
from emulators import azure_emulator, environment, gcs_emulator, s3_emulator
from fault_proxy import FaultProxy
from hypothesis import HealthCheck, settings

from shardckpt.io.store import Store
from shardckpt.io.url import SCHEMES

# How long an example takes says how busy the machine is.
settings.register_profile("shardckpt", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shardckpt")


def pytest_configure(config):
    """Let programs that tests start be interrupted, and import what tests do."""
    # As under nohup: programs that tests interrupt would inherit that.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ["PYTHONPATH"] = os.pathsep.join(
        str(config.rootpath / folder) for folder in config.getini("pythonpath")
    )
    # A training that resumes compiles what it compiled before. One directory for each worker, as
    # JAX may read a program while another process writes it.
    compiled = tempfile.TemporaryDirectory(prefix="shardckpt-jax-")
    config.add_cleanup(compiled.cleanup)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = compiled.name
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Keep the garbage collector from what all tests import, a million objects: going through them
    once takes more than half a second."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_runtest_setup():
    """Keep JAX's import from deciding for programs that tests start: where it finds no TPU,
    Lightning's look for one then fails."""
    os.environ.pop("TPU_SKIP_MDS_QUERY", None)


@pytest.fixture(scope="session")
def gcs_server():
    """A fake-gcs-server for this worker's whole run; its environment variables are not set."""
    with gcs_emulator() as emulator:
        yield emulator


@pytest.fixture(scope="session")
def s3_server():
    """A moto server for this worker's whole run; its environment variables are not set."""
    with s3_emulator() as emulator:
        yield emulator


@pytest.fixture(scope="session")
def azure_server():
    """An Azurite for this worker's whole run; its environment variables are not set."""
    try:
        azurite()
    except UnreachableError as e:
        pytest.skip(str(e))
    with azure_emulator() as emulator:
        yield emulator


@pytest.fixture(scope="session")
def chromium():
    """One browser for all tests."""
    from chromium import Chromium

    browser = Chromium()
    yield browser
    browser.close()


@pytest.fixture(params=["gs", "s3"])
def cloud(request):
    """An emulator of each kind, with this process's environment set for it."""
    emulator = request.getfixturevalue("gcs_server" if request.param == "gs" else "s3_server")
    with environment(emulator.env()):
        yield emulator


@pytest.fixture(scope="session")
def strict_gcs(gcs_server):
    """A url prefix on a Cloud Storage that enforces preconditions, and the environment that leads
    there."""
    with FaultProxy(gcs_server.endpoint) as proxy:
        # TensorStore keeps a bucket's endpoint: this one is known by the proxy's alone.
        yield f"gs://{gcs_server.new_bucket('strict')}", gcs_server.env(proxy.url)


@pytest.fixture
def latent(monkeypatch):
    """The url of a place where nothing is yet, of a kind of storage that is not ours
    (`latent_store`)."""
    monkeypatch.setitem(SCHEMES, "latent", ("latent_store", "LatentStore"))
    return f"latent://{uuid.uuid4().hex}"


@pytest.fixture(params=["file", "memory", "gs", "s3"])
def store(request, tmp_path):
    """A store of each kind, at a place that does not exist yet; and of the kinds `az`, `fsspec` and
    `latent` where a test names them."""
    name = f"{uuid.uuid4().hex}/a b"
    if request.param == "file":
        yield Store.open(tmp_path / "a b")
    elif request.param == "memory":
        yield Store.open(f"memory://{name}")
    elif request.param == "latent":
        yield Store.open(f"{request.getfixturevalue('latent')}/a b")
    elif request.param in ("gs", "fsspec"):
        bucket, variables = request.getfixturevalue("strict_gcs")
        with environment(variables):
            yield Store.open(f"{'fsspec+' if request.param == 'fsspec' else ''}{bucket}/{name}")
    else:
        server = request.getfixturevalue("s3_server" if request.param == "s3" else "azure_server")
        with environment(server.env()):
            yield Store.open(server.url(name))


@pytest.fixture
def cloud_store(cloud):
    """A store on each object store, at a place where nothing is yet."""
    return Store.open(cloud.url(uuid.uuid4().hex))


@pytest.fixture
def encoded_chunks():
    """Yields (index, stored bytes) of an array's chunks: little-endian, padded with zeros, crc32c
    at the end."""

    def chunks(array, chunk_shape):
        array = np.asarray(array)
        grid = [range(-(-n // c)) for n, c in zip(array.shape, chunk_shape, strict=True)]
        for index in itertools.product(*grid):
            part = array[
                tuple(slice(i * c, (i + 1) * c) for i, c in zip(index, chunk_shape, strict=True))
            ]
            whole = np.zeros(chunk_shape, array.dtype)
            whole[tuple(slice(n) for n in part.shape)] = part
            raw = whole.tobytes()
            yield index, raw + crc32c.crc32c(raw).to_bytes(4, "little")

    return chunks


@pytest.fixture
def random_array():
    """Makes an array of any dtype with reproducible, mostly arbitrary bits."""

    def make(shape, dtype, seed=0):
        rng = np.random.default_rng(seed)
        dtype = np.dtype(dtype)
        if dtype.kind == "b":
            return rng.integers(0, 2, shape).astype(bool)
        if dtype in (np.dtype(ml_dtypes.int4), np.dtype(ml_dtypes.int2)):
            return rng.integers(-2, 2, shape).astype(np.int8).astype(dtype)
        if dtype == np.dtype(ml_dtypes.float4_e2m1fn):
            return rng.integers(-2, 3, shape).astype(np.float32).astype(dtype)
        size = int(np.prod(shape)) * dtype.itemsize
        return rng.integers(0, 256, size, dtype=np.uint8).view(dtype).reshape(shape)

    return make
