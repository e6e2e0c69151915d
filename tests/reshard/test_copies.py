"""If no chunk changes and both places are on one object store, the store copies: nothing is
uploaded."""

import uuid

import numpy as np
import pytest
from emulators import environment
from fault_proxy import FaultProxy
from fault_rules import Rule
from placeholders import put_placeholder

import shardckpt
from shardckpt import Mesh, PartitionSpec, SaveOptions, Sharding, errors
from shardckpt.io.store import Store
from shardckpt.reshard.forecast.document import document
from shardckpt.reshard.forecast.forecast import forecast, known_places
from shardckpt.reshard.forecast.rates import Rates
from shardckpt.reshard.options import ReshardOptions
from shardckpt.reshard.plan import plan_reshard

ROWS = Sharding(Mesh((4,), ("x",)), PartitionSpec("x"))
STATE = {
    "w": np.random.default_rng(0).random((600, 500)),
    "ü v": np.arange(300_000, dtype=np.int32),
    "lr": 0.5,
}
NBYTES = sum(STATE[name].nbytes for name in ("w", "ü v"))


class Cloud:
    """An emulator behind a proxy, to which this process is led."""

    def __init__(self, emulator, proxy):
        self.emulator, self.proxy = emulator, proxy

    def place(self):
        # TensorStore keeps to the way by which it first came to a bucket.
        return (
            self.emulator.scheme
            + "://"
            + self.emulator.new_bucket(f"b-{uuid.uuid4().hex}")
            + "/a b%23%3Fé"
        )

    def saved(self, layout="packed"):
        url = self.place()
        shardckpt.save(
            url, STATE, options=SaveOptions(layout=layout, shardings={"w": ROWS, "ü v": ROWS})
        )
        self.proxy.traffic.reset()
        return url

    def exchanges(self, url):
        return self.proxy.traffic.exchanges(url.partition("://")[2].partition("/")[0])


@pytest.fixture(scope="module", params=["gs", "s3"])
def cloud(request):
    emulator = request.getfixturevalue("gcs_server" if request.param == "gs" else "s3_server")
    with FaultProxy(emulator.endpoint) as proxy, environment(emulator.env(proxy.url)):
        yield Cloud(emulator, proxy)


def assert_holds(url):
    assert shardckpt.open(url).verify().ok
    got = shardckpt.restore(url)
    for name, expected in STATE.items():
        assert np.asarray(got[name]).tobytes() == np.asarray(expected).tobytes()


@pytest.mark.parametrize("layout", ["packed", "zarr"])
def test_nothing_is_uploaded_and_everything_is_read_back_once(cloud, layout):
    source, made = cloud.saved(layout), cloud.place()
    report = shardckpt.reshard(source, made, mesh=Mesh((4,), ("x",)))
    assert (report.committed, report.stored_bytes) == (True, 0)
    up = sum(e.bytes_up for e in cloud.exchanges(made))
    assert up < NBYTES / 20, "records, tables and indexes"
    assert NBYTES <= report.read_bytes < 1.05 * NBYTES
    down = sum(
        e.bytes_down
        for url in (source, made)
        for e in cloud.exchanges(url)
        if e.operation.kind == "read"
    )
    assert NBYTES < down < 1.2 * NBYTES
    Store.open(source).delete_prefix()
    assert_holds(made)


def test_an_interrupted_copy_goes_on_where_it_was(cloud):
    source, made = cloud.saved(), cloud.place()
    put_placeholder(made)
    first = shardckpt.reshard(source, made)
    put_placeholder(made)
    cloud.proxy.traffic.reset()
    again = shardckpt.reshard(source, made)
    assert (again.attempt, again.done_before, again.read_bytes) == (first.attempt, first.tasks, 0)
    assert not [
        e
        for e in cloud.exchanges(made)
        if "/hosts/" in e.operation.name and e.operation.mutates and e.bytes_up == 0
    ]
    assert_holds(made)


def test_a_service_that_cannot_copy_is_read_and_written(cloud):
    source, made = cloud.saved(), cloud.place()
    bucket = made.partition("://")[2].partition("/")[0]
    unknown = 405 if cloud.emulator.scheme == "gs" else 501
    with cloud.proxy.rules.during(
        Rule("status", status=unknown, kinds=("copy", "upload"), objects=f"{bucket}/*/d/*")
    ):
        report = shardckpt.reshard(source, made)
    assert report.stored_bytes > NBYTES
    assert_holds(made)


def test_a_copy_that_is_refused_is_an_error_in_words(cloud):
    source, made = cloud.saved(), cloud.place()
    bucket = made.partition("://")[2].partition("/")[0]
    refused = Rule(
        "status", status=403, kinds=("copy", "upload"), objects=f"{bucket}/*/d/*", times=None
    )
    with (
        cloud.proxy.rules.during(refused),
        pytest.raises(errors.StorageError, match=r"cannot copy .*/d/.* to .*/d/"),
    ):
        shardckpt.reshard(source, made)
    with pytest.raises(errors.NotFoundError):
        shardckpt.open(made)
    assert shardckpt.reshard(source, made).committed


def test_the_plan_says_that_the_store_copies(cloud):
    source, made = cloud.saved(), cloud.place()
    checkpoint, options = shardckpt.open(source), ReshardOptions()
    plan = plan_reshard(checkpoint, options)
    prediction = forecast(
        checkpoint,
        plan,
        Rates(),
        options=options,
        destination=made,
        places=known_places(checkpoint),
    )
    figures = document(prediction)["reshard"]
    assert figures["taken_over"] == "copies"
    assert (figures["bytes_read"], figures["bytes_written"]) == (0, 0)
    assert figures["bytes_read_back"] == shardckpt.reshard(source, made).read_bytes
