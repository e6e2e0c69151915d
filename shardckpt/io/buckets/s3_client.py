"""Requests to S3 that TensorStore does not make.

s3fs signs its requests with botocore. Here botocore is used directly: on the threads that send, without an event loop, with
one attempt per request; `Retry` makes as many attempts as the user wants.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError
from botocore.exceptions import ConnectionError as NoConnection
from botocore.parsers import ResponseParserError

from shardckpt.io.buckets import cloud
from shardckpt.io.buckets.retry import Retry

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardckpt.io.url import Location

_PASSING = {408, 409, 429, 500, 502, 503, 504}
"""Statuses of temporary refusals; 409 is a conflict of two conditional writes."""
_PASSING_CODES = {"RequestTimeout", "BadDigest", "XAmzContentChecksumMismatch", "XAmzContentSHA256Mismatch", "SlowDown", "InternalError"}
"""Codes of temporary errors, some of which come with status 400."""


_EXISTS = 412


class RefusedError(OSError):
    """The service has refused a request."""

    def __init__(self, error: ClientError) -> None:
        super().__init__(str(error))
        self.status: int = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        self.code: str = error.response.get("Error", {}).get("Code", "")


def create_anew(location: Location, key: str, make: Callable[[], bytes]) -> bool:
    """Create an object with new contents at each try, so that a version that was removed between two tries never comes back.

    Args:
        location: a location in a bucket of S3.
        key: key of the object, relative to it.
        make: makes the object's bytes; never the same twice.

    Returns:
        Whether this created it; False if an object exists, maybe from an earlier try whose response was lost.

    Raises:
        OSError: the service failed or refused.
    """
    assert location.bucket is not None
    try:
        ask("put_object", location.bucket, location.object_prefix + key, kind="write", retry=Retry(), body=make, IfNoneMatch="*")
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
    retry: Retry,
    body: Callable[[], object] | None = None,
    **parameters: Any,
) -> dict[str, Any]:
    """The response to one request about an object.

    Args:
        operation: botocore's name of it.
        bucket: the object's bucket.
        name: the object's name.
        kind: kind of request, for the rate limit.
        retry: repeats requests that fail temporarily.
        body: makes the object's bytes, once per try.
        **parameters: parameters of the operation.

    Raises:
        RefusedError: the service has refused the request.
        OSError: there was no response.
    """

    def once() -> dict[str, Any]:
        cloud.wait_for_rate(kind)
        made = {} if body is None else {"Body": body()}
        answer: dict[str, Any] = getattr(client, operation)(Bucket=bucket, Key=name, **made, **parameters)
        return answer

    try:
        client = _client(cloud.endpoint_of("s3"), cloud.region_of_s3(), cloud.is_anonymous(), cloud.stalled_seconds())
        return retry.call(once, _is_passing)
    except ClientError as e:
        raise RefusedError(e) from e
    except BotoCoreError as e:  # for example no credentials; it is not an OSError
        raise OSError(f"{type(e).__name__}: {e}") from e


@cache
def _client(endpoint: str | None, region: str | None, anonymous: bool, stalled: float) -> Any:
    """A client for all threads. Credentials are found as AWS documents it."""
    from botocore import UNSIGNED
    from botocore.config import Config
    from botocore.session import Session as Botocore

    config = Config(
        connect_timeout=stalled,
        read_timeout=stalled,
        retries={"total_max_attempts": 1},
        # Uploads have checksums of their own, so botocore's are not needed.
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
