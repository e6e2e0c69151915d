"""The service's own metrics, for Prometheus."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardckpt.errors import MissingExtraError
from shardckpt.serve.jobs.rows import STATES

try:
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
except ImportError:
    raise MissingExtraError('shardckpt serve needs prometheus-client; install it with `pip install "shardckpt[serve]"`.') from None

if TYPE_CHECKING:
    from collections.abc import Mapping

_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)
_AREAS = frozenset({"api", "files", "healthz", "metrics", "raw", "readyz", "static", "ui", "v1", "zarr"})
_METHODS = frozenset({"GET", "HEAD", "POST"})


class ServeMetrics:
    """Counts requests and scans, in a registry of its own."""

    def __init__(self) -> None:
        """Start at zero."""
        registry = self._registry = CollectorRegistry()
        self.requests = Counter("shardckpt_serve_requests", "Requests.", ("area", "method", "status"), registry=registry)
        self.seconds = Histogram(
            "shardckpt_serve_request_seconds", "Seconds of requests, to the last byte.", ("area",), registry=registry, buckets=_SECONDS
        )
        self.sent = Counter("shardckpt_serve_sent_bytes", "Bytes of bodies that were sent.", ("area",), registry=registry)
        self.in_flight = Gauge("shardckpt_serve_requests_in_flight", "Requests at work.", registry=registry)
        self.wrong_tokens = Counter("shardckpt_serve_wrong_tokens", "Tokens that nobody has.", registry=registry)
        self.scans = Counter("shardckpt_serve_scans", "Scans of the roots.", registry=registry)
        self.scan_seconds = Gauge("shardckpt_serve_last_scan_seconds", "Seconds of the last scan.", registry=registry)
        self.problems = Gauge("shardckpt_serve_unreachable_roots", "Roots that the last scan could not list.", registry=registry)
        self.damaged = Gauge(
            "shardckpt_serve_damaged_checkpoints", "Checkpoints with damage in their last verification.", registry=registry
        )
        self.jobs = Gauge("shardckpt_serve_jobs", "Jobs in the journal.", ("state",), registry=registry)
        self.due = Gauge("shardckpt_serve_scrub_due_bytes", "Stored bytes that were not verified within the period.", registry=registry)
        self.checkpoints = Gauge("shardckpt_serve_checkpoints", "Checkpoints in the catalogue.", ("state",), registry=registry)

    def note(self, method: str, path: str, status: int, sent: int, seconds: float) -> None:
        """Count a request."""
        first = path.split("/", 2)[1] if path.count("/") else ""
        area = first if first in _AREAS else "hub" if first else "ui"
        self.requests.labels(area, method if method in _METHODS else "other", str(status)).inc()
        self.seconds.labels(area).observe(seconds)
        self.sent.labels(area).inc(sent)

    def note_scan(self, seconds: float, problems: int) -> None:
        """Count a scan."""
        self.scans.inc()
        self.scan_seconds.set(seconds)
        self.problems.set(problems)

    def note_upkeep(self, jobs: Mapping[str, int], damaged: int, due_bytes: int | None) -> None:
        """Set the number of jobs by state, the number of damaged checkpoints, and the bytes that a scrub is still to verify."""
        for state in STATES:
            self.jobs.labels(state).set(jobs.get(state, 0))
        self.damaged.set(damaged)
        if due_bytes is not None:
            self.due.set(due_bytes)

    def text(self, totals: Mapping[str, int]) -> bytes:
        """All metrics in Prometheus's text format."""
        for state in ("committed", "uncommitted", "unreadable", "deleted"):
            self.checkpoints.labels(state).set(totals.get(state, 0))
        return generate_latest(self._registry)
