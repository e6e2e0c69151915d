"""Announcements of committed steps to a service (`shardckpt serve`), so that it need not wait for its next look.

`SHARDCKPT_SERVER` has the service's url. An announcement is sent by a thread of its own, once, with a time limit. Training neither waits
for it nor learns whether it arrived. While one is on its way, only the last of those that follow is kept.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from typing import TYPE_CHECKING
from urllib.request import HTTPRedirectHandler, Request, build_opener

from shardckpt.training.events import SaveCommitted

if TYPE_CHECKING:
    from shardckpt.training.events import Event

VARIABLE = "SHARDCKPT_SERVER"
_SECONDS = 5.0
_log = logging.getLogger("shardckpt")


class _NoRedirects(HTTPRedirectHandler):
    def redirect_request(self, *_: object) -> None:
        """A token is for the service alone."""


class Announcer:
    """An event callback that announces committed steps."""

    def __init__(self, server: str) -> None:
        """Announce to the service at a url."""
        self._server = server.rstrip("/")
        self._next: str | None = None
        self._sending = False
        self._lock = threading.Lock()

    def __call__(self, event: Event) -> None:
        """Announce a committed step; returns at once."""
        if not isinstance(event, SaveCommitted):
            return
        with self._lock:
            self._next = event.url
            if self._sending:
                return
            self._sending = True
        try:
            threading.Thread(target=self._send_all, name="shardckpt-announcer", daemon=True).start()
        except RuntimeError:  # the interpreter is shutting down, or there are too many threads
            self._sending = False

    def _send_all(self) -> None:
        while True:
            with self._lock:
                url, self._next = self._next, None
                if url is None:
                    self._sending = False
                    return
            try:
                self._send(url)
            except Exception as e:  # noqa: BLE001  (whatever it is, training goes on)
                _log.debug("%s: not announced to %s: %s", url, self._server, e)

    def _send(self, url: str) -> None:
        from shardckpt.io.buckets.cloud import web_headers

        origin = "/".join(self._server.split("/")[:3])
        headers = {"Content-Type": "application/json", **web_headers(origin)}
        request = Request(f"{self._server}/v1/announcements", json.dumps({"url": url}).encode(), headers, method="POST")  # noqa: S310
        if request.type in ("http", "https"):
            build_opener(_NoRedirects).open(request, timeout=_SECONDS).close()


def announcer(*, leads: bool) -> Announcer | None:
    """The announcer for a run; None: the environment names no service, or another process announces."""
    server = os.environ.get(VARIABLE)
    return Announcer(server) if server and leads else None
