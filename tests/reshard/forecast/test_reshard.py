"""The forecast of a reshard agrees with a real reshard, and with restores after it."""

import uuid
from itertools import count

import numpy as np
import pytest
from interrupting import interrupted
from simulated_readers import read_by_host

import shardckpt
from shardckpt import Mesh, PartitionSpec, SaveOptions, Sharding
from shardckpt.io.store import Store
from shardckpt.reshard.forecast import rates
from shardckpt.reshard.forecast.document import document
from shardckpt.reshard.forecast.forecast import forecast, known_places
from shardckpt.reshard.forecast.rates import Rates, given_rates
from shardckpt.reshard.job import Job
from shardckpt.reshard.options import ReshardOptions
from shardckpt.reshard.plan import plan_reshard
from shardckpt.reshard.rules import Rules
from shardckpt.reshard.task import _open, run_task

MESH = Mesh((4, 2), ("data", "model"))
TARGET = Mesh((2, 3), ("data", "model"))
RULES = Rules.parse(["**/w*=(model,data)", "embed=(None,model)", "**=replicated"])


def save(place, **options):
    rng = np.random.default_rng(0)
    state = {
        "layers": {f"w{i}": rng.integers(0, 9, (600, 512)).astype(np.float32) for i in range(3)},
        "embed": rng.standard_normal((1031, 256)).astype(np.float32),
        "norm": np.ones(256, np.float32),
    }
    shardings = {
        "**/w*": Sharding(MESH, PartitionSpec("data", "model")),
        "embed": Sharding(MESH, PartitionSpec("data")),
    }
    shardckpt.save(place, state, options=SaveOptions(shardings=shardings, **options))


def forecast_of(place, options, **more):
    checkpoint = shardckpt.open(place)
    plan = plan_reshard(checkpoint, options)
    return forecast(
        checkpoint, plan, Rates(), options=options, places=known_places(checkpoint), **more
    )


@pytest.mark.parametrize("compression", [None, "zstd"])
@pytest.mark.parametrize("memory_limit", ["512MiB", "24MiB"])
def test_a_reshard_reads_and_writes_what_was_forecast(tmp_path, compression, memory_limit):
    save(tmp_path / "a", compression=compression)
    options = ReshardOptions(
        mesh=TARGET, rules=RULES, memory_limit=memory_limit, workers=1, dtype={"embed": "bfloat16"}
    )
    prediction = forecast_of(tmp_path / "a", options)
    doc = document(prediction)["reshard"]

    job = Job(str(tmp_path / "a"), str(tmp_path / "b"), options)
    reports = [run_task(job, number) for number in range(doc["tasks"])]

    assert doc["bytes_read"] == sum(report.read_bytes for report in reports)
    assert doc["requests"] == _open(job).checkpoint.stats.reads
    assert doc["requests_counted_tasks"] == doc["tasks"]
    if compression is None:
        assert doc["bytes_written"] == sum(report.stored_bytes for report in reports)
    assert doc["peak_memory"] <= doc["memory_limit"] == options.budget


def test_a_version_that_is_stored_as_differences_is_read_with_all_its_elements(tmp_path):
    weights = {"w": np.random.default_rng(0).standard_normal((512, 4096)).astype(np.float32)}
    with shardckpt.Publisher(tmp_path / "policy") as publisher:
        publisher.publish(1, weights)
        weights["w"][0, 0] += 1
        publisher.publish(2, weights)
    source = tmp_path / "policy" / "2"
    assert shardckpt.open(source).record.compression == "difference"
    prediction = forecast_of(source, ReshardOptions(mesh=TARGET, rules=Rules.parse(["*=(model)"])))
    report = shardckpt.reshard(source, tmp_path / "b", mesh=TARGET, rules=["*=(model)"])
    for number, real in (
        (prediction.read_bytes, report.read_bytes),
        (prediction.written_bytes, report.stored_bytes),
        (prediction.before.read.sum(), weights["w"].nbytes),
    ):
        assert number == pytest.approx(real, rel=0.1)


def test_requests_are_counted_batch_by_batch_as_they_are_made(tmp_path):
    rows = Sharding(Mesh((8,), ("x",)), PartitionSpec("x"))
    # Two batches, and neighbours on either side of where they meet.
    state = {"w": np.zeros((2048, 8192), np.float32)}
    shardckpt.save(tmp_path / "a", state, options=SaveOptions(shardings={"w": rows}))
    options = ReshardOptions(compression="zstd", workers=1)
    doc = document(forecast_of(tmp_path / "a", options))["reshard"]
    job = Job(str(tmp_path / "a"), str(tmp_path / "b"), options)
    for number in range(doc["tasks"]):
        run_task(job, number)
    assert doc["requests"] == _open(job).checkpoint.stats.reads


def test_files_in_which_nothing_changes_are_linked_and_only_read_back(tmp_path):
    save(tmp_path / "a")
    doc = document(forecast_of(tmp_path / "a", ReshardOptions(), destination=str(tmp_path / "b")))[
        "reshard"
    ]

    report = shardckpt.reshard(tmp_path / "a", tmp_path / "b")

    assert doc["taken_over"] == "links"
    assert (doc["bytes_read"], doc["bytes_written"], doc["requests"]) == (0, report.stored_bytes, 0)
    assert doc["bytes_read_back"] == report.read_bytes
    assert not document(forecast_of(tmp_path / "a", ReshardOptions(), destination="memory://b"))[
        "reshard"
    ]["taken_over"]


def test_after_a_reshard_hosts_read_what_was_forecast(tmp_path):
    save(tmp_path / "a")
    options = ReshardOptions(mesh=TARGET, rules=RULES)
    prediction = forecast_of(tmp_path / "a", options, devices_per_host=2)

    shardckpt.reshard(tmp_path / "a", tmp_path / "b", mesh=TARGET, rules=RULES, workers=1)

    layouts = {name: decision.layout for name, decision in prediction.plan.decisions.items()}
    for url, expected in ((tmp_path / "a", prediction.before), (tmp_path / "b", prediction.after)):
        counted = read_by_host(url, layouts, prediction.hosts)
        assert expected.read.tolist() == [host.bytes_read for host in counted]
        assert expected.needed.tolist() == [host.bytes_needed for host in counted]


def test_a_reshard_pays_when_restores_have_saved_what_it_moves(tmp_path):
    save(tmp_path / "a")
    prediction = forecast_of(
        tmp_path / "a", ReshardOptions(mesh=TARGET, rules=RULES), devices_per_host=1
    )
    saved = int(prediction.before.read.sum() - prediction.after.read.sum())
    moved = prediction.read_bytes + prediction.written_bytes

    assert saved * (prediction.pays_after - 1) < moved <= saved * prediction.pays_after
    assert forecast_of(tmp_path / "a", ReshardOptions()).pays_after is None


def test_times_follow_from_the_rates(tmp_path):
    save(tmp_path / "a")
    checkpoint = shardckpt.open(tmp_path / "a")
    options = ReshardOptions(mesh=TARGET, rules=RULES, verify=False)
    plan = plan_reshard(checkpoint, options)

    doc = document(forecast(checkpoint, plan, given_rates("1MB,2MB"), options=options))

    assert doc["reshard"]["seconds"] == pytest.approx(
        doc["reshard"]["bytes_read"] / 1e6 + doc["reshard"]["bytes_written"] / 2e6, abs=0.01
    )
    assert doc["restore"]["seconds"] == pytest.approx(
        doc["restore"]["largest_host"] / 1e6, abs=0.01
    )
    assert (
        document(forecast(checkpoint, plan, Rates(), options=options))["reshard"]["seconds"] is None
    )


def test_a_measurement_that_is_interrupted_leaves_no_object():
    store = Store.open(f"memory://{uuid.uuid4().hex}")

    def left(at):
        """Objects that Ctrl-C at an instant leaves; None if the call was over before."""
        return interrupted(
            at,
            rates.__file__,
            lambda _code: False,
            lambda: rates.measure_write(str(store)),
            lambda: [*store.list()],
        )

    instants = [*iter(map(left, count()).__next__, None)]
    assert len(instants) > 5
    assert instants == [[]] * len(instants)
