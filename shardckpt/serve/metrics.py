"""The service's own metrics, for Prometheus."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardckpt.errors import MissingExtraError
from shardckpt.text import install_command

try:
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
except ImportError:
    raise MissingExtraError(
        f"shardckpt serve needs prometheus-client; install it with `{install_command('serve')}`."
    ) from None

if TYPE_CHECKING:
    from collections.abc import Mapping

_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)
_AREAS = frozenset(
    {"api", "files", "healthz", "metrics", "raw", "readyz", "static", "ui", "v1", "zarr"}
)
_METHODS = frozenset({"GET", "HEAD", "POST"})
_GAUGES = {
    "checkpoints": ("Checkpoints in the catalogue.", "state"),
    "unreachable_roots": ("Roots that the last scan could not list.",),
    "vanished_roots": ("Roots that have vanished, as an unmounted disk.",),
    "passed_over_directories": ("Directories that scans could not read.",),
    "jobs": ("Jobs in the journal.", "state"),
    "damaged_checkpoints": ("Checkpoints with damage in their last verification.",),
    "scrub_due_bytes": ("Stored bytes that were not verified within the period.",),
}


class ServeMetrics:
    """Counts requests and scans, in a registry of its own."""

    def __init__(self) -> None:
        """Start at zero."""
        registry = self._registry = CollectorRegistry()
        self.requests = Counter(
            "shardckpt_serve_requests", "Requests.", ("area", "method", "status"), registry=registry
        )
        self.seconds = Histogram(
            "shardckpt_serve_request_seconds",
            "Seconds of requests, to the last byte.",
            ("area",),
            registry=registry,
            buckets=_SECONDS,
        )
        self.sent = Counter(
            "shardckpt_serve_sent_bytes",
            "Bytes of bodies that were sent.",
            ("area",),
            registry=registry,
        )
        self.in_flight = Gauge(
            "shardckpt_serve_requests_in_flight", "Requests at work.", registry=registry
        )
        self.wrong_tokens = Counter(
            "shardckpt_serve_wrong_tokens", "Tokens that nobody has.", registry=registry
        )
        self.bad_token_lines = Gauge(
            "shardckpt_serve_bad_token_lines",
            "Lines of the token file that are none of a token.",
            registry=registry,
        )
        self.scans = Counter("shardckpt_serve_scans", "Scans of the roots.", registry=registry)
        self.scan_seconds = Gauge(
            "shardckpt_serve_last_scan_seconds", "Seconds of the last scan.", registry=registry
        )

    def note(self, method: str, path: str, status: int, sent: int, seconds: float) -> None:
        """Count a request."""
        first = path.split("/", 2)[1] if path.count("/") else ""
        area = first if first in _AREAS else "hub" if first else "ui"
        self.requests.labels(area, method if method in _METHODS else "other", str(status)).inc()
        self.seconds.labels(area).observe(seconds)
        self.sent.labels(area).inc(sent)

    def note_scan(self, seconds: float) -> None:
        """Count a scan."""
        self.scans.inc()
        self.scan_seconds.set(seconds)

    def text(self, numbers: Mapping[str, int | Mapping[str, int]], *, traffic: bool) -> bytes:
        """Metrics in Prometheus's text format.

        Args:
            numbers: numbers that one user may know, by the name in `_GAUGES`; those with a label by
                its values.
            traffic: whether the user may know what the service does for all users.
        """
        registry = CollectorRegistry()
        for name, value in numbers.items():
            about, *label = _GAUGES[name]
            gauge = Gauge(f"shardckpt_serve_{name}", about, label, registry=registry)
            if isinstance(value, int):
                gauge.set(value)
            else:
                for text, number in value.items():
                    gauge.labels(text).set(number)
        return generate_latest(registry) + (generate_latest(self._registry) if traffic else b"")
