"""Upload of a large object to Google Cloud Storage, as a resumable upload of its JSON API.

1. A POST begins a session, with `ifGenerationMatch=0` if nothing may be replaced. The session's URI is the upload's id. Cloud Storage
   keeps it for a week.
2. Each part is a PUT of a range, one after the other. The response 308 says how many bytes the session has. After a failure the
   session is queried (`Content-Range: bytes */*`), and only missing bytes are sent again.
3. The last PUT has the object's size and the CRC32C of the complete object (`x-goog-hash`). If the CRC32C does not match,
   nothing becomes visible. The metadata of the finished object is compared once more.
4. The CRC32C is updated with each part. To resume elsewhere, `UploadState` has the CRC32C and the number of bytes that it covers.
   Bytes after those that the session already has are added to the CRC32C, and not sent.

https://cloud.google.com/storage/docs/resumable-uploads, https://cloud.google.com/storage/docs/performing-resumable-uploads#json-api

gcsfs uses google-auth and requests to find credentials. Here they are used directly: on the thread that sends, without an event
loop, with one attempt per request; `Retry` makes as many attempts as the user wants.
"""

from __future__ import annotations

import base64
import dataclasses
import re
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import quote

import requests
from crc32c import crc32c
from google.auth import exceptions as auth_errors

from shardckpt.errors import CorruptionError
from shardckpt.io.buckets import cloud
from shardckpt.io.buckets.retry import Retry
from shardckpt.io.buckets.upload_session import TOKEN, UploadState, already_exists, bucket_and_name, new_token, vanished

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardckpt.io.url import Location

QUANTUM = 1 << 18
"""Bytes; the size of each part except the last is a multiple of this."""
_SERVICE = "https://storage.googleapis.com"
_SCOPE = "https://www.googleapis.com/auth/devstorage.read_write"
_PASSING = {408, 429, 500, 502, 503, 504}
_GONE = {404, 410, 499}
"""Response statuses of a session that has expired, or was ended."""
_PIECE = 1 << 18
"""Bytes that are handed to the connection at a time; the timeout restarts with each piece."""
_RANGE = re.compile(r"bytes=0-(\d+)")


class GcsSession:
    """A session of a resumable upload."""

    parallel = 1

    def __init__(self, place: Location, state: UploadState) -> None:
        self.published = False
        self.durable = 0
        self.state = state
        self._place = place
        bucket, self._name = bucket_and_name(place)
        self._service = cloud.endpoint_of("gs") or _SERVICE
        self._uploads = f"{self._service}/upload/storage/v1/b/{quote(bucket, safe='')}/o"
        self._object = f"{self._service}/storage/v1/b/{quote(bucket, safe='')}/o/{quote(self._name, safe='')}"
        self._http = _http(self._service)
        self._retry = Retry()
        self._unsure = False
        """Whether a request has failed since the session's last response."""

    @classmethod
    def begin(cls, place: Location, part_bytes: int, *, if_absent: bool) -> Self:
        """Begin an upload."""
        assert part_bytes % QUANTUM == 0, f"parts of {part_bytes} bytes"
        session = cls(place, UploadState("", new_token(), part_bytes, if_absent))
        if if_absent and session._look() is not None:
            raise already_exists(place)
        answer = session._ask(
            "POST",
            session._uploads,
            params={"uploadType": "resumable", "name": session._name, **({"ifGenerationMatch": "0"} if if_absent else {})},
            json={"metadata": {TOKEN: session.state.token}},
            headers={"X-Upload-Content-Type": "application/octet-stream"},
        )
        if answer.status_code == 412:
            raise already_exists(place)
        if answer.status_code == 404:
            raise OSError(f"there is no such bucket ({_refused(answer)})")
        if answer.status_code != 200:
            raise _refused(answer)
        session.state = dataclasses.replace(session.state, upload=answer.headers["Location"])
        return session

    @classmethod
    def resume(cls, place: Location, state: UploadState) -> Self | None:
        """Resume an upload; None if the service no longer knows it."""
        session = cls(place, state)
        there = session._look()
        session.published = _token_of(there) == state.token
        if session.published:
            return session
        if state.if_absent and there is not None:
            raise already_exists(place)
        if not session._is_ours_to_ask() or state.part_bytes % QUANTUM:
            return None
        answer = session._retry.call(session._query, _is_passing)
        if answer.status_code in _GONE:
            return None
        session._take(answer)
        if session.durable < state.summed and not session.published:
            session.abort()
            return None
        return session

    @property
    def resume_at(self) -> int:
        """Offset of the first part to send, or to add to the CRC32C."""
        return self.state.summed

    def send(self, offset: int, data: memoryview) -> None:
        """Send a part."""
        self._put(offset, data, last=False)
        self.state = dataclasses.replace(self.state, summed=offset + len(data), crc32c=self._sum(data))

    def publish(self, offset: int, data: memoryview) -> None:
        """Send the last part, and make the object visible."""
        checksum = base64.b64encode(self._sum(data).to_bytes(4)).decode()
        self._put(offset, data, last=True, headers={"x-goog-hash": f"crc32c={checksum}"})
        found = self._look()
        if found is None or _token_of(found) != self.state.token:
            return  # another writer has replaced it since, which is allowed
        if found.get("crc32c") != checksum or int(found["size"]) != offset + len(data):
            self._ask("DELETE", self._object, params={"ifGenerationMatch": found["generation"]})
            raise CorruptionError(
                f"{self._place}: {found['size']} bytes with CRC32C {found.get('crc32c')} have arrived, {offset + len(data)} with "
                f"{checksum} were sent; the object was deleted. Upload again."
            )

    def give_up(self) -> None:
        """Do not retry requests that fail from now on."""
        self._retry.give_up()

    def abort(self) -> None:
        """End the session. The service responds with 499 on success."""
        self._retry = Retry()
        if self._is_ours_to_ask():
            # The session's URI may contain the precondition, which applies to the object and not to the session.
            uri = self.state.upload.replace("&ifGenerationMatch=0", "")
            answer = self._ask("DELETE", uri, headers={"Content-Length": "0"})
            if answer.status_code in (401, 403):
                raise _refused(answer)

    def _is_ours_to_ask(self) -> bool:
        """Whether the session's URI belongs to the service; anyone who may write to the bucket may have written the state.

        Our bytes and credentials go only to the service.
        """
        return self.state.upload.startswith(f"{self._uploads}?")

    def _sum(self, data: memoryview) -> int:
        return int(crc32c(data, self.state.crc32c))

    def _put(self, offset: int, data: memoryview, *, last: bool, headers: dict[str, str] | None = None) -> None:
        """Send a part of the object until the session has all of it."""
        end = offset + len(data)
        size = str(end) if last else "*"

        def once() -> None:
            if self._unsure:
                self._take(self._query())
            if self.published or (self.durable >= end and not last):
                return
            before = self.durable
            begin = max(offset, before)
            span = f"{begin}-{end - 1}" if begin < end else "*"
            body = _Pieces(data[begin - offset :]) if begin < end else b""
            self._unsure = True
            self._take(
                self._once("PUT", self.state.upload, data=body, headers={"Content-Range": f"bytes {span}/{size}", **(headers or {})})
            )
            if not self.published and self.durable <= before:
                raise _PassingError(f"the service has confirmed {before} bytes, and does not take those that follow")

        while not self.published and (last or self.durable < end):
            self._retry.call(once, _is_passing)

    def _query(self) -> requests.Response:
        """Query how many bytes the session has."""
        return self._once("PUT", self.state.upload, headers={"Content-Range": "bytes */*", "Content-Length": "0"})

    def _take(self, answer: requests.Response) -> None:
        """Update the state from a response of the session."""
        status = answer.status_code
        if status == 308:
            found = _RANGE.fullmatch(answer.headers.get("Range", ""))
            self.durable = int(found[1]) + 1 if found else 0
        elif status in (200, 201):
            self.published = True
        elif status == 412 or status in _GONE:
            if not self._is_ours():
                raise already_exists(self._place) if status == 412 else vanished(self._place)
            self.published = True
        else:
            raise _refused(answer)
        self._unsure = False

    def _is_ours(self) -> bool:
        """Whether this upload made the object that is there."""
        return _token_of(self._look()) == self.state.token

    def _look(self) -> dict[str, Any] | None:
        """Metadata of the object that is there; None: there is none."""
        answer = self._ask("GET", self._object, params={"fields": "generation,size,crc32c,metadata"})
        if answer.status_code == 404:
            return None
        if not answer.ok:
            raise _refused(answer)
        return dict(answer.json())

    def _ask(self, method: str, url: str, **given: Any) -> requests.Response:
        """The response to a request, with retries."""
        return self._retry.call(lambda: self._once(method, url, **given), _is_passing)

    def _once(self, method: str, url: str, **given: Any) -> requests.Response:
        """The response to one attempt at a request, read to its end."""
        cloud.wait_for_rate("read" if method == "GET" else "write")
        try:
            answer: requests.Response = self._http.request(method, url, timeout=cloud.stalled_seconds(), allow_redirects=False, **given)
        except auth_errors.GoogleAuthError as e:
            passing = e.retryable or isinstance(e, auth_errors.TransportError)
            raise (_PassingError if passing else OSError)(f"{type(e).__name__}: {e}") from e
        if answer.status_code in _PASSING:
            raise _PassingError(str(_refused(answer)))
        return answer


class _PassingError(OSError):
    """A temporary refusal; a retry may succeed."""


class _Pieces:
    """Bytes that an HTTP client iterates over, repeatedly if needed; they are not copied."""

    def __init__(self, data: memoryview) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    def __iter__(self) -> Iterator[memoryview]:
        return (self._data[at : at + _PIECE] for at in range(0, len(self._data), _PIECE))


def _http(service: str) -> requests.Session:
    """The HTTP session: with the application default credentials, or without credentials over plain HTTP."""
    if service.startswith("http:"):
        return requests.Session()
    import google.auth
    from google.auth.transport.requests import AuthorizedSession

    try:
        credentials, _ = google.auth.default(scopes=[_SCOPE])
    except auth_errors.GoogleAuthError as e:
        raise OSError(f"{type(e).__name__}: {e}") from e
    return AuthorizedSession(credentials)  # type: ignore[no-untyped-call]


def _token_of(found: dict[str, Any] | None) -> str | None:
    """Token of the upload that made an object; None if there is no object, or it has no token of shardckpt."""
    token: str | None = (found or {}).get("metadata", {}).get(TOKEN)
    return token


def _refused(answer: requests.Response) -> OSError:
    """The service's error message as an OSError."""
    try:
        said = answer.json()["error"]["message"]
    except (ValueError, LookupError, TypeError):
        said = answer.text[:200]
    return OSError(f"{answer.status_code} {answer.reason}: {said}")


def _is_passing(error: Exception) -> bool:
    return isinstance(error, (_PassingError, requests.RequestException))
