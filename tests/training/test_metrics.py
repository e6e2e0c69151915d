"""Prometheus metrics, scraped from the registry as a server would."""

from __future__ import annotations

import subprocess
import sys
import time

import numpy as np
import pytest
from emulators import gcs_emulator
from faults import TRANSIENT, Rule, faulty_cloud
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

import shardckpt
from shardckpt.text import install_command
from shardckpt.training.events import (
    Events,
    PreemptionNoticed,
    RestoreFailed,
    RestoreFinished,
    Retried,
    SaveCommitted,
    SaveFailed,
    SaveSkipped,
    SaveStarted,
    StepDeleted,
)
from shardckpt.training.metrics import PHASES, Prometheus


@pytest.fixture
def registry():
    return CollectorRegistry()


@pytest.fixture
def emit(registry):
    """A function that has an event counted."""
    return Events(Prometheus(registry)).emit


def scraped(registry):
    """Every sample of the page that Prometheus reads: (name, sorted labels) → value."""
    page = generate_latest(registry).decode()
    return {
        (sample.name.removeprefix("shardckpt_"), *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }


@pytest.fixture
def report(tmp_path):
    """Of a real save."""
    return shardckpt.save_async(tmp_path / "c", {"w": np.arange(100_000)}).wait()


def test_a_committed_save_counts_its_bytes_and_the_seconds_of_each_phase_which_add_up(
    registry, emit, report
):
    before = time.time()
    emit(SaveStarted(url="run/7", step=7))
    emit(SaveCommitted(url="run/7", step=7, report=report))
    metrics = scraped(registry)
    assert metrics["saves_total", ("outcome", "committed")] == 1
    assert metrics["saved_bytes_total",] == 800_000
    assert metrics["stored_bytes_total",] == report.stored_bytes > 800_000
    assert metrics["save_seconds_sum",] == pytest.approx(report.total_s)
    assert metrics["stall_seconds_sum",] == pytest.approx(report.stall_s)
    phases = [metrics["save_phase_seconds_sum", ("phase", phase)] for phase in PHASES]
    assert sum(phases) == pytest.approx(report.total_s)
    assert metrics["last_step",] == 7
    assert before <= metrics["last_commit_timestamp_seconds",] <= time.time()


@pytest.mark.parametrize(
    ("event", "sample"),
    [
        (
            SaveFailed(url="run/1", step=1, error=OSError("disk full")),
            ("saves_total", ("outcome", "failed")),
        ),
        (
            SaveSkipped(url="run/1", step=1, reason="in flight"),
            ("saves_total", ("outcome", "skipped")),
        ),
        (Retried(url="run/1", step=1, times=1), ("retries_total",)),
        (
            RestoreFinished(url="run/1", step=1, seconds=2.0, nbytes=1),
            ("restores_total", ("outcome", "finished")),
        ),
        (
            RestoreFailed(url="run/1", step=1, error=OSError("damaged")),
            ("restores_total", ("outcome", "failed")),
        ),
        (StepDeleted(url="run/1", step=1), ("deleted_steps_total",)),
        (PreemptionNoticed(url="run", step=1, source="SIGTERM"), ("preemptions_total",)),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, tuple) else value[0],
)
def test_counters_start_at_zero_and_count_each_event(registry, emit, event, sample):
    assert scraped(registry)[sample] == 0
    emit(event)
    emit(event)
    assert scraped(registry)[sample] == 2


def test_a_save_without_a_step_leaves_the_last_step_alone(registry, emit, report):
    emit(SaveCommitted(url="run/7", step=7, report=report))
    emit(SaveCommitted(url="elsewhere", report=report))
    assert scraped(registry)["last_step",] == 7
    assert scraped(registry)["saves_total", ("outcome", "committed")] == 2


def test_requests_that_a_bucket_answered_only_when_asked_again_are_counted(registry, emit):
    with (
        gcs_emulator("faults-metrics") as emulator,
        faulty_cloud(emulator) as cloud,
        cloud.breaking(Rule(**TRANSIENT["503"], times=3)),
    ):
        url = cloud.place()
        report = shardckpt.save_async(url, {"w": np.ones(1000)}).wait()
        emit(SaveCommitted(url=url, report=report))
        emit(SaveCommitted(url=url, report=report))
        assert cloud.injected() == 3
    assert scraped(registry)["retries_total",] == 3


def test_without_prometheus_client_the_error_says_what_to_install():
    code = "import sys; sys.modules['prometheus_client'] = None; import shardckpt.training.metrics"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    assert (
        "MissingExtraError: shardckpt.training.metrics needs prometheus-client; install it with "
        f"`{install_command('metrics')}`." in done.stderr
    )
