"""Messages of a run to the service (`shardckpt serve`), and its answers.

There are messages only if `SHARDCKPT_SERVER` has the url of the service.

- `Announcer`: committed steps, so that the service need not wait for its next look. A thread of its
  own sends each once, with a time limit. Training neither waits for it nor learns whether it
  arrived. While one is on its way, only the last of those that follow is kept.
- `Listener`: a thread that hears at once of versions that were announced. Where there is no
  service, or it does not answer, nothing is heard, and its owner looks at the storage from time to
  time, as ever.
- `ask`: one request.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from urllib.parse import quote
from urllib.request import HTTPRedirectHandler, Request, build_opener

from shardckpt.errors import StorageError

if TYPE_CHECKING:
    from http.client import HTTPResponse

VARIABLE = "SHARDCKPT_SERVER"
_SECONDS = 5.0
SILENCE = 15.0
"""Seconds after which a stream of events without a sign of life has ended; the service sends one
every 10 s."""
_PAUSES = 1.0, 60.0
"""Seconds before the service is asked for events again: least and most; they double."""
_log = logging.getLogger("shardckpt")


class _NoRedirects(HTTPRedirectHandler):
    def redirect_request(self, *_: object) -> None:
        """A token is for the service alone."""


def server() -> str | None:
    """The service's url; None: the environment names none."""
    return os.environ.get(VARIABLE, "").rstrip("/") or None


def _request(service: str, path: str, document: Any = None, *, timeout: float) -> HTTPResponse:
    from shardckpt.io.buckets.cloud import web_headers

    origin = "/".join(service.split("/")[:3])
    headers = {"Content-Type": "application/json", **web_headers(origin)}
    data = None if document is None else json.dumps(document).encode()
    request = Request(f"{service}{path}", data, headers, method="GET" if data is None else "POST")  # noqa: S310
    if request.type not in ("http", "https"):
        raise StorageError(f"{VARIABLE}={service} is not a service; write https://host:port.")
    return build_opener(_NoRedirects).open(request, timeout=timeout)  # type: ignore[no-any-return]


def ask(service: str, path: str, document: Any) -> Any:
    """Send a document to the service, and return its answer.

    Raises:
        StorageError: the service does not answer, or refuses.
    """
    try:
        with _request(service, path, document, timeout=_SECONDS) as reply:
            return json.loads(reply.read())
    except (OSError, ValueError) as e:
        raise StorageError(f"{service}{path}: the service has not done it ({e}).") from e


class Announcer:
    """Announces committed steps."""

    def __init__(self, service: str) -> None:
        """Announce to the service at a url."""
        self._service = service
        self._next: str | None = None
        self._sending = False
        self._lock = threading.Lock()

    def announce(self, url: str) -> None:
        """Announce a committed step; returns at once."""
        with self._lock:
            self._next = url
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
                ask(self._service, "/v1/announcements", {"url": url})
            except Exception as e:  # noqa: BLE001  (whatever it is, training goes on)
                _log.debug("%s: not announced to %s: %s", url, self._service, e)


class Listener:
    """Hears of the versions of one place."""

    def __init__(self, service: str, url: str) -> None:
        """Begin to listen, on a thread of its own."""
        self.connected = False
        """Whether the service answers."""
        self._service, self._url = service, url
        self._news, self._over = threading.Event(), threading.Event()
        # The interpreter may be shutting down, or there may be too many threads.
        with suppress(RuntimeError):
            threading.Thread(target=self._run, name="shardckpt-listener", daemon=True).start()

    def wait(self, seconds: float) -> bool:
        """Wait for news; return whether there are some."""
        heard = self._news.wait(seconds)
        self._news.clear()
        return heard

    def close(self) -> None:
        """Stop listening; the thread ends with the next sign of life."""
        self._over.set()
        self._news.set()

    def _run(self) -> None:
        pause = _PAUSES[0]
        while not self._over.wait(pause if pause > _PAUSES[0] else 0):
            try:
                with _request(
                    self._service, f"/v1/versions?url={quote(self._url, safe='')}", timeout=SILENCE
                ) as reply:
                    self.connected, pause = True, _PAUSES[0]
                    self._news.set()  # there may be a version since the last look
                    for line in reply:
                        if self._over.is_set():
                            return
                        if line.startswith(b"data:"):
                            self._news.set()
                self._over.wait(_PAUSES[0])  # a stream ends after some minutes
            except Exception as e:  # noqa: BLE001  (its owner looks at the storage all the same)
                _log.debug("%s: no events of %s: %s", self._service, self._url, e)
                pause = min(2 * pause, _PAUSES[1])
            finally:
                self.connected = False
