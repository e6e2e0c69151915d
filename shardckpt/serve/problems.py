"""Errors as `application/problem+json` (RFC 9457), with the codes of `shardckpt.errors`."""

from __future__ import annotations

import json
from http import HTTPStatus
from typing import TYPE_CHECKING

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from shardckpt.errors import ShardckptError, StorageError
from shardckpt.text import visible

if TYPE_CHECKING:
    from collections.abc import Iterator

    from starlette.requests import Request

    from shardckpt.serve.roots import Roots
    from shardckpt.serve.vanished import RootWatch

STATUS = {
    "url": 400,
    "option": 400,
    "sharding": 400,
    "shape": 400,
    "dtype": 400,
    "structure": 400,
    "mismatch": 400,
    "names": 404,
    "not-found": 404,
    "uncommitted": 404,
    "replaced": 409,
    "exists": 409,
    "commit": 409,
    "other-job": 409,
    "memory": 413,
    "leaf": 422,
    "unsupported-dtype": 422,
    "extra": 501,
    "corrupt": 422,
    "missing-data": 422,
    "format": 422,
    "version": 422,
    "storage": 502,
    "coordination": 503,
}
"""HTTP status of each error code; 500 for others. 422: what is stored is at fault; 502: the
storage."""
_TITLES = {
    "corrupt": "Damaged",
    "missing-data": "Incomplete",
    "format": "Unreadable",
    "version": "Of another version",
}
"""Titles for what HTTP has no words."""
RETRY = {"Retry-After": "5"}
_CODES = {400: "option", 404: "not-found", 405: "method", 413: "memory"}
LONGEST = 2000
_PART = 500
"""Most entries of a list that are encoded at a time."""


class DocumentResponse(JSONResponse):
    """A JSON document in ASCII: names of tensors may have lone surrogates, which UTF-8 has not."""

    def render(self, content: object) -> bytes:
        """The document as bytes.

        A long list is encoded in parts: no other thread runs while `json` encodes one.
        """
        if not isinstance(content, dict) or all(
            len(one) <= _PART for one in content.values() if isinstance(one, list)
        ):
            return _encode(content)
        fields = (
            _encode(str(name)) + b":" + b"".join(_list_parts(one)) for name, one in content.items()
        )
        return b"{" + b",".join(fields) + b"}"


def _encode(content: object) -> bytes:
    return json.dumps(content, allow_nan=False, separators=(",", ":")).encode("ascii")


def _list_parts(content: object) -> Iterator[bytes]:
    if not isinstance(content, list) or len(content) <= _PART:
        yield _encode(content)
        return
    for first in range(0, len(content), _PART):
        yield (b"," if first else b"[") + _encode(content[first : first + _PART])[1:-1]
    yield b"]"


def check_type(request: Request, body: str, kind: str) -> None:
    """Refuse, by an HTTPException, a request whose body is of another media type."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != kind:
        raise HTTPException(415, f"send {body}, as {kind}.")


def problem(
    status: int, code: str, detail: str, headers: dict[str, str] | None = None
) -> JSONResponse:
    """A problem as a response."""
    body = {
        "type": f"urn:shardckpt:error:{code}",
        "title": _TITLES.get(code, HTTPStatus(status).phrase),
        "status": status,
        "code": code,
        "detail": detail,
    }
    return DocumentResponse(body, status, headers, "application/problem+json")


def text_of(error: ShardckptError) -> str:
    """An error's message, with the service's parameters instead of Python's arguments."""
    return error.message.worded(
        lambda option: str(
            option._replace(field={"rules": "rule"}.get(option.field, option.field.strip("_")))
        )
    )


def of_error(error: Exception, roots: Roots) -> JSONResponse:
    """The response for an error of the library, or one that an endpoint raised."""
    if isinstance(error, ShardckptError):
        return problem(
            STATUS.get(error.code, 500),
            error.code,
            visible(roots.without_places(text_of(error)))[:LONGEST],
        )
    assert isinstance(error, HTTPException)
    headers = dict(error.headers) if error.headers else None
    return problem(
        error.status_code,
        _CODES.get(error.status_code, f"http-{error.status_code}"),
        error.detail,
        headers,
    )


def of_request(roots: Roots, watch: RootWatch, request: Request, error: Exception) -> JSONResponse:
    """The response for an error of a request: 503 instead of 404 if the root has vanished.

    The requested checkpoint may still be there.
    """
    response = of_error(error, roots)
    try:
        if response.status_code == 404:
            watch.check(*request.path_params.values(), *request.query_params.values())
    except (HTTPException, StorageError) as e:
        response = of_error(e, roots)
    return response


def words(response: JSONResponse) -> tuple[str, str]:
    """Title and detail of a problem, for people."""
    document = json.loads(bytes(response.body))
    return document["title"], document["detail"]
