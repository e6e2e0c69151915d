"""Requests to Cloud Storage by its JSON API: urllib3 makes them, google-auth finds the credentials.

1. An object of up to `_SMALL` bytes, or one with a condition, is uploaded together with its CRC32C
   (`uploadType=multipart`), so that the service refuses damaged bytes and nothing is visible. A
   data file goes up as it is (`uploadType=media`), because nobody refers to it yet. Its CRC32C goes
   in the header `x-goog-hash`, and is compared with the one in the response.
2. Ranges are read with `alt=media`. The response has the object's generation and its size.
3. Preconditions are `ifGenerationMatch`; 0 means that there is no object.

https://cloud.google.com/storage/docs/json_api/v1/objects
"""

from __future__ import annotations

import datetime as dt
import json
import os
import secrets
import threading
import time
from functools import cache
from itertools import chain
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode

from google.auth import exceptions as auth_errors

from shardckpt.io.buckets import cloud
from shardckpt.io.buckets.bucket import (
    ABSENT,
    Body,
    Bucket,
    Content,
    Listed,
    Page,
    pieces,
    range_header,
)
from shardckpt.io.buckets.retry import NoBucketError, PassingError, Retry, note_answer
from shardckpt.io.buckets.web import body_of, is_passing, open_pool, origin_of, send

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import urllib3

    Response = urllib3.BaseHTTPResponse

_SERVICE = "https://storage.googleapis.com"
_SCOPE = "https://www.googleapis.com/auth/devstorage.read_write"
_SMALL = 1 << 20
"""Most bytes of an unconditional object that is uploaded with its checksum in one body."""
_NEW_SECONDS = 60
"""Seconds in which an access token does not expire."""
_LOOK_SECONDS = 300
"""Seconds after which credentials that were not found are looked for again: the machine's own
service may not have run yet."""


class GcsConnection:
    """Connections and credentials for one endpoint. Safe to use from several threads."""

    def __init__(self, endpoint: str | None, stalled: float) -> None:
        """Connect to an endpoint (None: Google's) when the first request is made.

        Give up a connection without traffic.
        """
        self.service = endpoint or _SERVICE
        self.origin = origin_of(self.service)
        self._http = open_pool(self.service)
        self._stalled = stalled
        self._lock = threading.Lock()
        self._credentials: Any = None
        self._lacking: str | None = None
        """The reason if there are no credentials; a public bucket needs none. An error would
        keep the frames that it was raised in."""
        self._renewed = "", 0.0
        """The access token that was made because another one was refused, and the time."""
        self._stamp: object = None
        """The stamp of the credentials that were found; a file that changes afterwards is read
        again."""
        self._looked = 0.0

    def once(
        self,
        method: str,
        url: str,
        *,
        query: Mapping[str, object] | None = None,
        headers: Mapping[str, str] | None = None,
        body: Iterable[bytes | memoryview] | bytes | None = None,
        stream: bool = False,
    ) -> Response:
        """The response to one attempt at a request.

        Args:
            method: HTTP method.
            url: without parameters, unless `query` is None.
            query: parameters.
            headers: headers; with an iterable body, `Content-Length` among them.
            body: the body.
            stream: leave the response's bytes to the caller.

        Raises:
            PassingError: there was no response, or a temporary refusal.
            OSError: there are no usable credentials.
        """
        given = dict(headers or {})
        self._authorize(method, url, given)
        target = url if query is None else f"{url}?{urlencode(query, quote_via=quote)}"
        answer = send(self._http, method, target, given, self._stalled, stream=stream, body=body)
        if stream and answer.status >= 400:
            answer.data  # noqa: B018  (read to its end, and the connection is given back)
        if answer.status == 401 and self._credentials is not None:
            self._renew(given["authorization"], refused(answer))
            raise PassingError(str(refused(answer)))
        if answer.status in cloud.PASSING:
            raise PassingError(str(refused(answer)))
        return answer

    def _authorize(self, method: str, url: str, headers: dict[str, str]) -> None:
        """Add the access token, if there are credentials."""
        with self._lock, _auth_errors():
            self._find_credentials()
            if self._lacking is not None and (
                method != "GET" or os.environ.get("GOOGLE_APPLICATION_CREDENTIALS")
            ):
                raise auth_errors.DefaultCredentialsError(self._lacking)  # type: ignore[no-untyped-call]
            if self._credentials is not None:
                self._credentials.before_request(self._transport(), method, url, headers)

    def require_credentials(self) -> None:
        """Raise OSError if there are no credentials.

        This happens before anything is asked of the service that only a public bucket would answer.
        """
        with self._lock, _auth_errors():
            self._find_credentials()
            if self._lacking is not None:
                raise auth_errors.DefaultCredentialsError(self._lacking)  # type: ignore[no-untyped-call]

    def _find_credentials(self) -> None:
        if self.service.startswith("http:"):  # an emulator: no credentials are sent
            return
        stamp = cloud.google_stamp()
        if self._stamp == stamp and (
            self._lacking is None or time.monotonic() - self._looked < _LOOK_SECONDS
        ):
            return
        self._credentials = self._lacking = None
        try:
            self._credentials = _default_credentials()
        except auth_errors.DefaultCredentialsError as e:
            self._lacking = str(e)
        self._stamp, self._looked = stamp, time.monotonic()

    def _renew(self, used: str, refusal: OSError) -> None:
        """Get a new access token, unless another thread has done so.

        Raise `refusal` if the one that was used is new itself.
        """
        with self._lock, _auth_errors():
            token, at = self._renewed
            if used == token and time.monotonic() - at < _NEW_SECONDS:
                raise refusal
            if used == self._token():
                self._credentials.refresh(self._transport())
                self._renewed = self._token(), time.monotonic()

    def _token(self) -> str:
        headers: dict[str, str] = {}
        self._credentials.apply(headers)
        return headers["authorization"]

    def _transport(self) -> Any:
        from google.auth.transport.urllib3 import Request

        return Request(self._http)  # type: ignore[no-untyped-call]


class GcsBucket(Bucket):
    """The objects of a bucket of Cloud Storage."""

    is_passing = staticmethod(is_passing)

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._http = connection()
        self._objects = f"{self._http.service}/storage/v1/b/{quote(name, safe='')}/o"
        self.uploads = f"{self._http.service}/upload/storage/v1/b/{quote(name, safe='')}/o"

    @property
    def service(self) -> str:
        """The origin of the service's urls."""
        return self._http.origin

    def delete_if(self, name: str, generation: bytes) -> bool:
        """Delete an object if it has this generation; whether this call did."""
        status = self._call(
            "write", lambda: self._delete(name, {"ifGenerationMatch": generation.decode()})
        )
        return status not in (404, 412)

    def url_of(self, name: str) -> str:
        """The url of an object."""
        return f"{self._objects}/{quote(name, safe='')}"

    def _get(self, name: str, start: int, stop: int | None) -> Body | None:
        answer = self._http.once(
            "GET",
            self.url_of(name),
            query={"alt": "media"},
            headers=range_header(start, stop),
            stream=True,
        )
        if answer.status == 404:
            return None
        if answer.status == 416:
            raise EOFError("the object is shorter than that")
        if answer.status not in (200, 206):
            raise refused(answer)
        return body_of(answer, answer.headers["x-goog-generation"].encode())

    def _stat(self, name: str) -> tuple[int | None, bytes]:
        answer = self._http.once("GET", self.url_of(name), query={"fields": "generation,size"})
        if answer.status == 404:
            return None, ABSENT
        document = checked(answer)
        return int(document["size"]), document["generation"].encode()

    def _put(self, name: str, content: Content, generation: bytes | None, retry: Retry) -> bytes:
        checksum, nbytes = content.crc32c, len(content.data)
        query: dict[str, object] = {"fields": "generation,crc32c,size"}
        headers = {"Content-Type": "application/octet-stream"}
        framed: Iterable[bytes | memoryview]
        if generation is None and nbytes > _SMALL:
            query |= {"uploadType": "media", "name": name}
            headers["x-goog-hash"] = f"crc32c={checksum}"
            framed = pieces(content.data, retry)
        else:
            boundary = secrets.token_hex(16)
            about = json.dumps({"name": name, "crc32c": checksum})
            head = (
                f"--{boundary}\r\nContent-Type: application/json\r\n\r\n{about}\r\n"
                f"--{boundary}\r\nContent-Type: application/octet-stream\r\n\r\n"
            ).encode()
            tail = f"\r\n--{boundary}--\r\n".encode()
            query |= {
                "uploadType": "multipart",
                **({} if generation is None else {"ifGenerationMatch": generation.decode()}),
            }
            headers["Content-Type"] = f"multipart/related; boundary={boundary}"
            framed = chain([head], pieces(content.data, retry), [tail])
            nbytes += len(head) + len(tail)
        answer = self._http.once(
            "POST",
            self.uploads,
            query=query,
            headers={**headers, "Content-Length": str(nbytes)},
            body=framed,
        )
        if answer.status == 412:
            return b""
        if answer.status == 404:
            raise NoBucketError(self._objects, refused(answer))
        made = checked(answer)
        note_answer(self._objects)
        if made["crc32c"] != checksum:
            raise PassingError(
                f"the service received bytes with CRC32C {made['crc32c']}, but {checksum} were sent"
            )
        return str(made["generation"]).encode()

    def _delete(self, name: str, query: Mapping[str, object] | None = None) -> int:  # type: ignore[override]
        answer = self._http.once("DELETE", self.url_of(name), query=query or {})
        if answer.status not in (200, 204, 404, 412):
            raise refused(answer)
        return answer.status

    def _list(self, prefix: str, delimiter: str, token: str | None) -> Page:
        options = {
            "prefix": prefix,
            "delimiter": delimiter,
            "pageToken": token,
            "maxResults": self.page,
        }
        query = {key: value for key, value in options.items() if value}
        answer = self._http.once(
            "GET",
            self._objects,
            query={**query, "fields": "items(name,updated,size),prefixes,nextPageToken"},
        )
        if answer.status == 404:
            raise NoBucketError(self._objects, refused(answer))
        page = checked(answer)
        note_answer(self._objects)
        objects = [
            Listed(
                item["name"],
                dt.datetime.fromisoformat(item["updated"]).timestamp(),
                int(item["size"]),
            )
            for item in page.get("items", ())
        ]
        return Page(objects, page.get("prefixes", []), page.get("nextPageToken") or None)

    def _copy(self, name: str, bucket: str, new: str) -> None:
        """https://cloud.google.com/storage/docs/json_api/v1/objects/rewrite."""
        target = f"{self.url_of(name)}/rewriteTo/b/{quote(bucket, safe='')}/o/{quote(new, safe='')}"
        query: dict[str, object] = {}
        while True:
            answer = self._http.once(
                "POST",
                target,
                query=query,
                headers={"Content-Type": "application/json"},
                body=b"{}",
            )
            if answer.status in cloud.UNKNOWN:
                raise NotImplementedError(str(refused(answer)))
            state = checked(answer)
            if state["done"]:
                return
            query = {"rewriteToken": state["rewriteToken"]}


def connection() -> GcsConnection:
    """The connections of this process to the endpoint that the environment names."""
    return _connection(cloud.endpoint_of("gs"), cloud.stalled_seconds())


@cache
def _connection(endpoint: str | None, stalled: float) -> GcsConnection:
    return GcsConnection(endpoint, stalled)


def checked(answer: Response) -> dict[str, Any]:
    """The JSON document of a response; OSError for a refusal."""
    if answer.status not in (200, 201):
        raise refused(answer)
    try:
        return dict(json.loads(answer.data))
    except ValueError as e:
        raise PassingError(f"the service sends no JSON: {e}") from e


def refused(answer: Response) -> OSError:
    """The service's error message as an OSError."""
    text = answer.data.decode(errors="replace")
    try:
        text = json.loads(text)["error"]["message"]
    except (ValueError, LookupError, TypeError):
        text = text[:200]
    kind = PermissionError if answer.status in cloud.DENIED else OSError
    return kind(f"{answer.status} {answer.reason}: {text}")


def _default_credentials() -> Any:
    """The application default credentials, or the token that TensorStore uses in tests."""
    import google.auth
    import google.oauth2  # before a module of it, for other threads that import it
    from google.oauth2.credentials import Credentials

    token = os.environ.get("GOOGLE_AUTH_TOKEN_FOR_TESTING")
    if token and token != "none":  # noqa: S105  (what `cloud.prepare` sets)
        return Credentials(token)  # type: ignore[no-untyped-call]
    credentials, _ = google.auth.default(scopes=[_SCOPE])
    return credentials


class _auth_errors:  # noqa: N801  (used as a function)
    """Turn errors of google-auth into OSErrors."""

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        if isinstance(error, auth_errors.GoogleAuthError):
            passing = error.retryable or isinstance(error, auth_errors.TransportError)
            raise (PassingError if passing else OSError)(
                f"{type(error).__name__}: {error}"
            ) from error
