"""Requests to S3 that TensorStore does not make.

botocore is what s3fs signs its requests with. Here it is used directly: on the threads that send, without an event loop between, with
one try per request, which `Patience` repeats as often as the user wants.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError
from botocore.exceptions import ConnectionError as NoConnection
from botocore.parsers import ResponseParserError

from shardckpt.io.buckets import cloud
from shardckpt.io.buckets.patience import Patience

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardckpt.io.url import Location

__all__ = ["RefusedError", "ask", "create_anew"]

_PASSING = {408, 409, 429, 500, 502, 503, 504}
"""Statuses that may be over the next time; 409 is a conflict of two conditional writes."""
_PASSING_CODES = {"RequestTimeout", "BadDigest", "XAmzContentChecksumMismatch", "XAmzContentSHA256Mismatch", "SlowDown", "InternalError"}
"""Names of errors, some of which come with status 400."""


_EXISTS = 412


class RefusedError(OSError):
    """The service has said no."""

    def __init__(self, error: ClientError) -> None:
        super().__init__(str(error))
        self.status: int = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        self.code: str = error.response.get("Error", {}).get("Code", "")


def create_anew(location: Location, key: str, make: Callable[[], bytes]) -> bool:
    """Create an object that is another one with each try: what is removed between two tries does not come back.

    Args:
        location: the place in a bucket of S3.
        key: of the object, relative to it.
        make: the object; never the same twice.

    Returns:
        Whether this created it; False where there is one, which may be that of an earlier try whose answer was lost.

    Raises:
        OSError: the service failed or refused.
    """
    assert location.bucket is not None
    try:
        ask("put_object", location.bucket, location.object_prefix + key, kind="write", patience=Patience(), body=make, IfNoneMatch="*")
    except RefusedError as e:
        if e.status == _EXISTS:
            return False
        raise
    return True


def ask(
    operation: str,
    bucket: str,
    name: str,
    *,
    kind: Literal["read", "write"],
    patience: Patience,
    body: Callable[[], object] | None = None,
    **parameters: Any,
) -> dict[str, Any]:
    """The answer to one request about an object.

    Args:
        operation: as botocore calls it.
        bucket: the object's.
        name: the object's.
        kind: of request, for the limit of requests per second.
        patience: how often a request is made again that fails in passing.
        body: makes the object, for each try anew.
        **parameters: of the operation.

    Raises:
        RefusedError: the service has said no.
        OSError: no answer came.
    """

    def once() -> dict[str, Any]:
        cloud.pace(kind)
        made = {} if body is None else {"Body": body()}
        answer: dict[str, Any] = getattr(client, operation)(Bucket=bucket, Key=name, **made, **parameters)
        return answer

    try:
        client = _client(cloud.endpoint_of("s3"), cloud.region_of_s3(), cloud.is_anonymous(), cloud.stalled_seconds())
        return patience.ask(once, _is_passing)
    except ClientError as e:
        raise RefusedError(e) from e
    except BotoCoreError as e:  # no credentials, say; it is no OSError
        raise OSError(f"{type(e).__name__}: {e}") from e


@cache
def _client(endpoint: str | None, region: str | None, anonymous: bool, stalled: float) -> Any:
    """A client, which all threads may use. Credentials are found as AWS documents it."""
    from botocore import UNSIGNED
    from botocore.config import Config
    from botocore.session import Session as Botocore

    config = Config(
        connect_timeout=stalled,
        read_timeout=stalled,
        retries={"total_max_attempts": 1},
        # Checksums of parts are given; others are of no use.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        signature_version=UNSIGNED if anonymous else None,
        s3={"addressing_style": "path"} if endpoint else None,
    )
    return Botocore().create_client("s3", region_name=region, endpoint_url=endpoint, config=config)


def _is_passing(error: Exception) -> bool:
    if isinstance(error, ClientError):
        refused = RefusedError(error)
        return refused.status in _PASSING or refused.code in _PASSING_CODES
    return isinstance(error, (HTTPClientError, NoConnection, ResponseParserError))
