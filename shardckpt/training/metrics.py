"""Prometheus metrics of saves and restores, as this process sees them.

    shardckpt_saves_total{outcome="committed|failed|skipped"}  saves that ended, or were not made
    shardckpt_saved_bytes_total              bytes of tensors that this process wrote
    shardckpt_stored_bytes_total             bytes that they take in the storage
    shardckpt_save_phase_seconds{phase="planning|copying|…"}
                                             a histogram of each phase; the phases add up to the
                                             whole
    shardckpt_save_seconds                   a histogram of whole saves, from the call to the commit
    shardckpt_stall_seconds                  a histogram of how long training waited
    shardckpt_last_step                      the step committed last
    shardckpt_last_commit_timestamp_seconds  when that was, in Unix time
    shardckpt_retries_total                  requests to an object store that were made again
    shardckpt_restores_total{outcome="finished|failed"}  how restores ended
    shardckpt_restore_seconds                a histogram of restores
    shardckpt_deleted_steps_total, shardckpt_preemptions_total

Needs `prometheus-client`, which the extra `metrics` brings.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardckpt.errors import MissingExtraError
from shardckpt.text import install_command
from shardckpt.training.events import (
    PreemptionNoticed,
    RestoreFailed,
    RestoreFinished,
    Retried,
    SaveCommitted,
    SaveFailed,
    SaveSkipped,
    StepDeleted,
)

try:
    from prometheus_client import REGISTRY, Counter, Gauge, Histogram
except ImportError:
    raise MissingExtraError(
        "shardckpt.training.metrics needs prometheus-client; install it with "
        f"`{install_command('metrics')}`."
    ) from None

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from shardckpt.training.events import Event

__all__ = ["PHASES", "Prometheus"]

PHASES = ("planning", "copying", "blocked", "writing", "waiting", "committing")
"""The phases of a save, in order; `SaveReport` describes each."""
_SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000)
"""Upper ends of the histograms' buckets: from a small model on a local disk to a large one in a
bucket."""


class Prometheus:
    """An event callback that counts saves and restores as Prometheus metrics."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        """Register the metrics; once per registry.

        Args:
            registry: a registry of prometheus_client; its global one by default.
        """
        where = REGISTRY if registry is None else registry

        def counter(name: str, help_text: str, *labels: str) -> Counter:
            return Counter(f"shardckpt_{name}", help_text, labels, registry=where)

        def gauge(name: str, help_text: str) -> Gauge:
            return Gauge(f"shardckpt_{name}", help_text, registry=where)

        def histogram(name: str, help_text: str, *labels: str) -> Histogram:
            return Histogram(
                f"shardckpt_{name}", help_text, labels, registry=where, buckets=_SECONDS
            )

        self._saves = counter("saves", "Saves that ended, or were not made.", "outcome")
        self._bytes = counter("saved_bytes", "Bytes of tensors that this process wrote.")
        self._stored = counter("stored_bytes", "Bytes of storage that they use.")
        self._phases = histogram("save_phase_seconds", "Seconds of each phase of a save.", "phase")
        self._save_seconds = histogram(
            "save_seconds", "Seconds of a save, from the call to the commit."
        )
        self._stalls = histogram("stall_seconds", "Seconds that training waited for a save.")
        self._last_step = gauge("last_step", "The step committed last.")
        self._last_commit = gauge(
            "last_commit_timestamp_seconds", "When the last commit was, in Unix time."
        )
        self._retries = counter("retries", "Requests to an object store that were made again.")
        self._restores = counter("restores", "How restores ended.", "outcome")
        self._restore_seconds = histogram("restore_seconds", "Seconds of a restore.")
        self._deleted = counter("deleted_steps", "Steps that were deleted.")
        self._preemptions = counter("preemptions", "Notices that the job is about to be stopped.")
        for outcome in ("committed", "failed", "skipped"):
            self._saves.labels(outcome)  # a rate needs the zero before the first one
        for outcome in ("finished", "failed"):
            self._restores.labels(outcome)

    def __call__(self, event: Event) -> None:
        """Count an event."""
        match event:
            case SaveCommitted():
                self._count_commit(event)
            case SaveFailed():
                self._saves.labels("failed").inc()
            case SaveSkipped():
                self._saves.labels("skipped").inc()
            case Retried(times=times):
                self._retries.inc(times)
            case RestoreFinished(seconds=seconds):
                self._restores.labels("finished").inc()
                self._restore_seconds.observe(seconds)
            case RestoreFailed():
                self._restores.labels("failed").inc()
            case StepDeleted():
                self._deleted.inc()
            case PreemptionNoticed():
                self._preemptions.inc()
            case _:
                pass

    def _count_commit(self, event: SaveCommitted) -> None:
        report = event.report
        self._saves.labels("committed").inc()
        self._bytes.inc(report.nbytes)
        self._stored.inc(report.stored_bytes)
        for phase in PHASES:
            self._phases.labels(phase).observe(getattr(report, f"{phase}_s"))
        self._save_seconds.observe(report.total_s)
        self._stalls.observe(report.stall_s)
        if event.step is not None:
            self._last_step.set(event.step)
        self._last_commit.set_to_current_time()
