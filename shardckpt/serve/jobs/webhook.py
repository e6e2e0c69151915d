"""Notices to a webhook, which are kept in the journal until they have been received.

The address is an option of the service, which no request can set. Redirects are not followed. With
`SHARDCKPT_WEBHOOK_SECRET` each body is signed: `X-Shardckpt-Signature: sha256=HMAC`.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from shardckpt.errors import OptionError, StorageError
from shardckpt.serve.jobs.background import BackgroundWork

if TYPE_CHECKING:
    import httpx

    from shardckpt.serve.jobs.journal import Journal

_log = logging.getLogger("shardckpt.serve.webhook")
_SECRET = "SHARDCKPT_WEBHOOK_SECRET"  # noqa: S105  (the name of a variable)
_TIMEOUT = 10.0
_POLL, _LONGEST_PAUSE = 1.0, 600.0


class Webhook(BackgroundWork):
    """Sends notices in the background."""

    def __init__(self, journal: Journal, url: str) -> None:
        """Nothing is sent before `start`.

        Raises:
            OptionError: the address is not a web server's.
        """
        super().__init__(
            "webhook", _log, "the webhook could not be notified", first=_POLL, again=_POLL
        )
        self._pause, self._tried = _POLL, 0
        self._http: httpx.Client | None = None
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc:
            raise OptionError(
                "--webhook: give the url of a web server, http://… or https://…, without a "
                "password."
            )
        self._journal, self._url = journal, url

    def look(self) -> float:
        """Send what there is. Raises StorageError."""
        import httpx

        self._http = self._http or httpx.Client(timeout=_TIMEOUT, follow_redirects=False)
        try:
            for number, body in self._journal.notices(self._tried):
                self._tried = number  # if it is refused, the next look begins with the next one
                self._send(self._http, body)
                self._journal.drop_notice(number)
                self._pause = _POLL
                _log.info("told", extra={"fields": {"notice": number}})
        except (httpx.HTTPError, httpx.InvalidURL, StorageError) as e:
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)
            _log.warning(
                "the webhook could not be notified",
                extra={"fields": {"reason": str(e), "again_in": self._pause}},
            )
        return self._pause

    def _send(self, http: httpx.Client, body: str) -> None:
        reply = http.post(
            self._url,
            content=body,
            headers={"Content-Type": "application/json", **_signature(body)},
        )
        if not reply.is_success:
            raise StorageError(f"it answers {reply.status_code}")


def _signature(body: str) -> dict[str, str]:
    secret = os.environ.get(_SECRET)
    if not secret:
        return {}
    digest = hmac.new(secret.encode(), body.encode(), hashlib.sha256).hexdigest()
    return {"X-Shardckpt-Signature": f"sha256={digest}"}
