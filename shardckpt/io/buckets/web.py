"""Files of a web server, read by ranges: urllib3 makes the requests.

Nothing can be written or listed there.

1. A server must answer a request for a range with that range (nginx, a public bucket, a CDN; not
   Python's `http.server`).
2. Redirects are followed, at most `_REDIRECTS`, but not from https to http. Headers from the
   environment go to their own origin alone.
"""

from __future__ import annotations

import http.client
import os
import re
import ssl
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn
from urllib.parse import quote, urljoin, urlsplit
from urllib.request import getproxies, proxy_bypass

import certifi
import urllib3

from shardckpt.io.buckets import cloud
from shardckpt.io.buckets.bucket import ABSENT, Body, Bucket, range_header
from shardckpt.io.buckets.retry import PassingError, note_answer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Response = urllib3.BaseHTTPResponse
    Headers = Mapping[str, str]

_CONNECTIONS = 64
"""Connections that are kept for the next requests."""
_REDIRECTS = 5
_SHORT = 1 << 16
"""Most bytes that are read to use a connection again."""
_RANGE = re.compile(r"bytes \d+-\d+/(\d+)")


def is_passing(error: Exception) -> bool:
    """Whether an error of an attempt is temporary."""
    return isinstance(error, (PassingError, urllib3.exceptions.HTTPError))


class HttpServer(Bucket):
    """The files of a web server."""

    scheme: ClassVar = "http"
    is_passing = staticmethod(is_passing)

    def __init__(self, name: str) -> None:
        """Make requests to the host of that name, which may end in a port."""
        super().__init__(name)
        self._origin = f"{self.scheme}://{name}"

    @property
    def service(self) -> str:
        """The origin of the urls."""
        return self._origin

    def delete_if(self, name: str, generation: bytes) -> NoReturn:
        """Refuse."""
        del generation
        self._refuse(name)

    def _get(self, name: str, start: int, stop: int | None) -> Body | None:
        headers = range_header(start, stop)
        answer = self._request("GET", name, headers)
        if answer is None:
            return None
        if answer.status == 416:
            answer.close()
            raise EOFError("the file is shorter than that")
        if headers and answer.status != 206:
            answer.close()
            raise OSError(
                "the server does not send ranges of files; use one that does, such as nginx or a "
                "bucket"
            )
        if "Content-Length" not in answer.headers or (headers and _range_of(answer) is None):
            answer.close()
            raise OSError("the server does not say which bytes it sends")
        return body_of(answer, _generation(answer))

    def _stat(self, name: str) -> tuple[int | None, bytes]:
        answer = self._request("HEAD", name, {})
        if answer is None:
            return None, ABSENT
        close_response(answer)
        if "Content-Length" not in answer.headers:
            raise OSError("the server does not say how long the file is")
        return int(answer.headers["Content-Length"]), _generation(answer)

    def _request(self, method: str, name: str, headers: dict[str, str]) -> Response | None:
        """The response after redirects; None if there is no such file."""
        url = f"{self._origin}/{quote(name)}"
        for _ in range(_REDIRECTS + 1):
            origin = origin_of(url)
            given = {**headers, "Accept-Encoding": "identity", **cloud.web_headers(origin)}
            answer = send(
                _connections(origin), method, url, given, cloud.stalled_seconds(), stream=True
            )
            if answer.status in (404, 410):
                _give_back(answer)
                return None
            if answer.status in cloud.PASSING:
                answer.close()
                raise PassingError(f"{answer.status} {answer.reason}")
            target = answer.get_redirect_location()
            if not target:
                if answer.status not in (200, 206, 416):
                    answer.close()
                    kind = PermissionError if answer.status in cloud.DENIED else OSError
                    raise kind(f"{answer.status} {answer.reason}")
                return answer
            _give_back(answer)
            before, url = url, urljoin(url, target)
            if urlsplit(url).scheme not in ("https", urlsplit(before).scheme):
                raise OSError(f"{before} redirects to {url}, which is not encrypted")
        raise OSError(f"more than {_REDIRECTS} redirects, the last one to {url}")

    def _refuse(self, name: str) -> NoReturn:
        raise OSError(
            f"{self._origin}/{name}: web servers are read-only here; write to a disk, gs:// or "
            "s3://"
        )

    def _put(self, name: str, *_: object) -> NoReturn:
        self._refuse(name)

    def _delete(self, name: str) -> NoReturn:
        self._refuse(name)

    def _copy(self, name: str, *_: object) -> NoReturn:
        self._refuse(name)

    def _list(self, prefix: str, *_: object) -> NoReturn:
        raise OSError(f"{self._origin}/{prefix}: web servers do not list their files")


class HttpsServer(HttpServer):
    """The files of a web server, over TLS."""

    scheme: ClassVar = "https"


@cache
def _connections(origin: str) -> urllib3.PoolManager:
    return open_pool(origin)


def origin_of(url: str) -> str:
    """The scheme, host and port of a url."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}"


def _range_of(answer: Response) -> re.Match[str] | None:
    return _RANGE.fullmatch(answer.headers.get("Content-Range", ""))


def _generation(answer: Response) -> bytes:
    """The version of a file, or its length if the server does not say more."""
    headers, span = answer.headers, _range_of(answer)
    version = headers.get("ETag") or headers.get("Last-Modified")
    return (version or f"{headers['Content-Length'] if span is None else span[1]} bytes").encode()


def close_response(answer: Response) -> None:
    """End a response: its connection is used again if all bytes were read, and closed otherwise."""
    if answer.length_remaining == 0:
        answer.drain_conn()
        answer.release_conn()
    else:
        answer.close()


def _give_back(answer: Response) -> None:
    """End a response without use: a short one is read, so that its connection is used again."""
    if answer.length_remaining is not None and answer.length_remaining <= _SHORT:
        answer.drain_conn()
        answer.release_conn()
    else:
        answer.close()


def open_pool(service: str) -> urllib3.PoolManager:
    """Connections, through the proxy that the environment names for the service."""
    url = urlsplit(service)
    proxy = None if proxy_bypass(url.hostname or "") else getproxies().get(url.scheme)
    context = ssl.create_default_context()  # it goes by SSL_CERT_FILE
    context.load_verify_locations(os.environ.get("REQUESTS_CA_BUNDLE") or certifi.where())
    if proxy is None:
        return urllib3.PoolManager(maxsize=_CONNECTIONS, ssl_context=context)
    return urllib3.ProxyManager(proxy, maxsize=_CONNECTIONS, ssl_context=context)


def send(
    pool: urllib3.PoolManager,
    method: str,
    url: str,
    headers: Headers,
    stalled: float,
    *,
    stream: bool,
    body: Any = None,
) -> Response:
    """The response to one attempt at a request; redirects are not followed.

    `stream` leaves the response's bytes to the caller.

    A connection is given up after `stalled` seconds without traffic. With an iterable `body`, the
    headers include `Content-Length`.

    Raises:
        PassingError: there was no response.
        OSError: the server's certificate is not valid.
    """
    try:
        answer = pool.urlopen(
            method,
            url,
            body=body,
            headers=headers,
            retries=False,
            redirect=False,
            timeout=urllib3.Timeout(connect=stalled, read=stalled),
            preload_content=not stream,
            decode_content=False,
        )
    except urllib3.exceptions.HTTPError as e:
        final = "CERTIFICATE_VERIFY_FAILED" in str(e)
        raise (OSError if final else PassingError)(f"{type(e).__name__}: {e}") from e
    note_answer(origin_of(url))
    return answer


def body_of(answer: Response, generation: bytes) -> Body:
    """The bytes of a streamed response: an object, or a range of it."""
    nbytes, span = int(answer.headers["Content-Length"]), _range_of(answer)
    return Body(
        reader_of(answer),
        lambda: close_response(answer),
        nbytes,
        nbytes if span is None else int(span[1]),
        generation,
    )


def reader_of(answer: Response) -> Callable[[memoryview], int]:
    """A function that fills the start of a buffer with the next bytes of a streamed response.

    The bytes come from the connection, without a copy.

    urllib3's own `readinto` (2.8) reads into new memory, and copies that.
    """
    source = getattr(answer, "_fp", None)
    if not isinstance(source, http.client.HTTPResponse) or answer.length_remaining is None:
        return answer.readinto

    def readinto(into: memoryview) -> int:
        try:
            got = source.readinto(into)
        except (OSError, http.client.HTTPException) as e:
            raise PassingError(f"{type(e).__name__}: {e}") from e
        answer.length_remaining = (
            answer.length_remaining or 0
        ) - got  # by which `close_response` goes
        return got

    return readinto
