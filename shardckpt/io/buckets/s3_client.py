"""Requests to S3 and compatible services, which botocore signs and makes.

Each request runs on the thread that asks, with one attempt.

Uploads have their CRC32C, so that the service refuses damaged bytes; one that does not know it gets
none. Conditions are `If-Match` with the object's ETag, and `If-None-Match: *` where there must be
no object.

S3 accepts `If-Match` on DeleteObject, too
(https://docs.aws.amazon.com/AmazonS3/latest/userguide/conditional-deletes.html). Some compatible
services ignore the header and delete the object all the same. So each bucket is tested once per
process: an object of our own is deleted with a condition that is false.

Keys in a file may be rotated by another program: each request goes by the file as it is now. A
request that was refused because its keys had expired is sent again if the file has changed since
(`_EXPIRED`).
"""

from __future__ import annotations

import base64
import hashlib
import secrets
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

import urllib3
from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError, IncompleteReadError
from botocore.exceptions import ConnectionError as NoConnection
from botocore.parsers import ResponseParserError
from urllib3.exceptions import HTTPError

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
from shardckpt.io.buckets.listing import PROBE
from shardckpt.io.buckets.retry import NoBucketError, PassingError, Retry, note_answer
from shardckpt.io.buckets.web import close_response, reader_of

if TYPE_CHECKING:
    from collections.abc import Callable


_PASSING = {*cloud.PASSING, 409}
"""Statuses of temporary refusals; 409 is a conflict of two conditional writes."""
_PASSING_CODES = {
    "RequestTimeout",
    "BadDigest",
    "XAmzContentChecksumMismatch",
    "XAmzContentSHA256Mismatch",
    "SlowDown",
    "InternalError",
}
"""Codes of temporary errors, some of which come with status 400."""
_EXPIRED = {
    "ExpiredToken",
    "ExpiredTokenException",
    "InvalidAccessKeyId",
    "InvalidToken",
    "SignatureDoesNotMatch",
    "400",
    "403",
}
"""Error codes of keys that are valid no longer; the response to a HEAD request has no code but its
status."""
_KNOWS_NO_CHECKSUM = {"NotImplemented", "XNotImplemented", "InvalidArgument", "InvalidRequest"}
"""Error codes of services that do not know a header."""
_CONNECTIONS = 64
"""Connections that are kept for the next requests."""
_CHANGED, _MISSING, _UNKNOWN = 412, 404, 501
_md5_only: set[str | None] = set()
"""Endpoints that refuse CRC32C."""
_OTHER = f'"{"0" * 32}"'
"""An ETag that no object of shardckpt has."""
_honours: dict[tuple[str, str | None], bool] = {}
"""Bucket and endpoint → whether the service there refuses a deletion whose condition is false."""


class RefusedError(OSError):
    """The service has refused a request."""

    def __init__(self, error: ClientError) -> None:
        super().__init__(str(error))
        self.status: int = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        self.code: str = error.response.get("Error", {}).get("Code", "")

    @property
    def knows_no_checksum(self) -> bool:
        """Whether the service may have refused because of a checksum's header."""
        return self.status == 501 or self.code in _KNOWS_NO_CHECKSUM


class DeniedError(RefusedError, PermissionError):
    """The service does not let this user do that.

    Without the right to list, it says the same of an object that is missing.
    """


class S3Bucket(Bucket):
    """The objects of a bucket of S3."""

    @staticmethod
    def is_passing(error: Exception) -> bool:
        """Whether an error of an attempt is temporary."""
        if isinstance(error, RefusedError):
            return error.status in _PASSING or error.code in _PASSING_CODES
        return isinstance(
            error,
            (
                PassingError,
                HTTPError,
                HTTPClientError,
                NoConnection,
                ResponseParserError,
                IncompleteReadError,
            ),
        )

    @property
    def service(self) -> str:
        """The endpoint; AWS has one for each region."""
        return cloud.endpoint_of("s3") or "https://s3.amazonaws.com"

    def create_anew(self, name: str, make: Callable[[], bytes]) -> bool:
        """See `Bucket`: an ETag is a digest, so the same bytes would have the same one."""
        try:
            self.ask("put_object", name, kind="write", retry=Retry(), body=make, IfNoneMatch="*")
        except RefusedError as e:
            if e.status == _CHANGED:
                return False
            raise
        return True

    def delete_if(self, name: str, generation: bytes) -> bool:
        """Delete an object if it has this ETag; whether this call did.

        False also where the service ignores the condition.
        """
        return self._honours_conditions(name.rpartition("/")[0]) and self._delete_if_match(
            name, generation.decode()
        )

    def _honours_conditions(self, folder: str) -> bool:
        """Whether the service refuses a deletion whose condition is false.

        Tested once per process, with an object in this folder.
        """
        service = self.name, cloud.endpoint_of("s3")
        if service not in _honours:
            probe = f"{folder}/{PROBE}{secrets.token_hex(8)}".removeprefix("/")
            self.write(probe, memoryview(b""))
            try:
                _honours[service] = not self._delete_if_match(probe, _OTHER)
            except RefusedError as e:
                if e.status != _UNKNOWN:
                    raise
                _honours[service] = False
            finally:
                self.delete(probe)
        return _honours[service]

    def _delete_if_match(self, name: str, etag: str) -> bool:
        try:
            self.ask("delete_object", name, kind="write", retry=Retry(), IfMatch=etag)
        except RefusedError as e:
            if e.status in (_CHANGED, _MISSING):
                return False
            raise
        return True

    def _get(self, name: str, start: int, stop: int | None) -> Body | None:
        try:
            answer = self.once("get_object", name, **range_header(start, stop))
        except RefusedError as e:
            if e.status == _MISSING:
                return None
            if e.status == 416:
                raise EOFError("the object is shorter than that") from e
            raise
        body, nbytes = answer["Body"], int(answer["ContentLength"])
        size = (
            int(answer["ContentRange"].rpartition("/")[2]) if "ContentRange" in answer else nbytes
        )
        stream = getattr(body, "_raw_stream", None)
        # Botocore's own `readinto` copies what urllib3 has copied.
        if isinstance(stream, urllib3.HTTPResponse):
            return Body(
                reader_of(stream),
                lambda: close_response(stream),
                nbytes,
                size,
                answer["ETag"].encode(),
            )
        return Body(body.readinto, body.close, nbytes, size, answer["ETag"].encode())

    def _stat(self, name: str) -> tuple[int | None, bytes]:
        try:
            answer = self.once("head_object", name)
        except RefusedError as e:
            if e.status != _MISSING:
                raise
            return None, ABSENT
        return int(answer["ContentLength"]), answer["ETag"].encode()

    def _put(self, name: str, content: Content, generation: bytes | None, retry: Retry) -> bytes:
        condition = (
            {}
            if generation is None
            else {"IfNoneMatch": "*"}
            if generation == ABSENT
            else {"IfMatch": generation.decode()}
        )
        endpoint = cloud.endpoint_of("s3")
        try:
            checksum = checksum_of(content, "md5" if endpoint in _md5_only else "crc32c")
            answer = self.once(
                "put_object", name, Body=RequestBody(content.data, retry), **checksum, **condition
            )
        except RefusedError as e:
            if e.status == _CHANGED or (generation is not None and e.code == "NoSuchKey"):
                return b""
            if e.code == "NoSuchBucket":
                raise NoBucketError(f"{self.service}/{self.name}", e) from e
            if endpoint in _md5_only or not e.knows_no_checksum:
                raise
            _md5_only.add(endpoint)
            return self._put(name, content, generation, retry)
        return str(answer["ETag"]).encode()

    def _delete(self, name: str) -> None:
        self.once("delete_object", name)

    def _list(self, prefix: str, delimiter: str, token: str | None) -> Page:
        """https://docs.aws.amazon.com/AmazonS3/latest/API/API_ListObjectsV2.html."""
        options = {"Prefix": prefix, "Delimiter": delimiter, "ContinuationToken": token}
        try:
            page = self.once(
                "list_objects_v2",
                None,
                MaxKeys=self.page,
                **{key: value for key, value in options.items() if value},
            )
        except RefusedError as e:
            if e.status == _MISSING:
                raise NoBucketError(f"{self.service}/{self.name}", e) from e
            raise
        objects = [
            Listed(item["Key"], item["LastModified"].timestamp(), item["Size"])
            for item in page.get("Contents", ())
        ]
        prefixes = [item["Prefix"] for item in page.get("CommonPrefixes", ())]
        return Page(
            objects,
            prefixes,
            page.get("NextContinuationToken") if page.get("IsTruncated") else None,
        )

    def _copy(self, name: str, bucket: str, new: str) -> None:
        """https://docs.aws.amazon.com/AmazonS3/latest/API/API_CopyObject.html."""
        try:
            S3Bucket(bucket).once("copy_object", new, CopySource={"Bucket": self.name, "Key": name})
        except RefusedError as e:
            if e.status in cloud.UNKNOWN:
                raise NotImplementedError(str(e)) from e
            raise

    def ask(
        self,
        operation: str,
        name: str,
        *,
        kind: Literal["read", "write"],
        retry: Retry,
        body: Callable[[], object] | None = None,
        **parameters: Any,
    ) -> dict[str, Any]:
        """The response to a request about an object, with retries.

        Args:
            operation: botocore's name of it.
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
            return self.once(
                operation, name, **({} if body is None else {"Body": body()}), **parameters
            )

        cloud.wait_for_rate(kind)
        return retry.call(once, self.is_passing, self.service)

    def once(self, operation: str, name: str | None, **parameters: Any) -> dict[str, Any]:
        """The response to one attempt at a request."""
        stamp = cloud.aws_stamp()
        client = _client(
            cloud.endpoint_of("s3"),
            cloud.region_of_s3(),
            cloud.is_anonymous(),
            cloud.stalled_seconds(),
            stamp,
        )
        named = {} if name is None else {"Key": name}
        if cloud.requester_pays():
            named["RequestPayer"] = "requester"
        try:
            answer: dict[str, Any] = getattr(client, operation)(
                Bucket=self.name, **named, **parameters
            )
        except ClientError as e:
            note_answer(self.service)
            refused = RefusedError(e)
            if refused.status in cloud.DENIED:
                refused = DeniedError(e)
            if refused.code in _EXPIRED and cloud.aws_stamp() != stamp:
                raise PassingError(f"the keys were rotated meanwhile ({e})") from e
            raise refused from e
        except (HTTPClientError, NoConnection, ResponseParserError) as e:
            final = "CERTIFICATE_VERIFY_FAILED" in str(e)
            raise (OSError if final else PassingError)(f"{type(e).__name__}: {e}") from e
        except BotoCoreError as e:  # for example no credentials; it is not an OSError
            raise OSError(f"{type(e).__name__}: {e}") from e
        note_answer(self.service)
        note_answer(f"{self.service}/{self.name}")
        return answer


def checksum_of(content: Content, algorithm: str) -> dict[str, str]:
    """Parameters of an upload with the checksum of its bytes.

    The checksum is `crc32c`, or `md5` if a service has nothing else.
    """
    if algorithm == "crc32c":
        return {"ChecksumCRC32C": content.crc32c}
    digest = hashlib.md5(content.data, usedforsecurity=False)
    return {"ContentMD5": base64.b64encode(digest.digest()).decode()}


class RequestBody:
    """The bytes of a buffer as a file for botocore and urllib3.

    These read the file, repeatedly if needed, and the bytes are not copied.
    """

    def __init__(self, data: memoryview, retry: Retry | None = None) -> None:
        """Read from the beginning; OSError as soon as `retry` is given up."""
        self._data = data
        self._retry = retry
        self.seek(0)

    def __len__(self) -> int:
        return len(self._data)

    def read(self, _nbytes: int | None = -1) -> memoryview | bytes:
        """The next bytes: as many as a connection is given at a time, however few are asked for."""
        piece = next(self._pieces, b"")
        self._at += len(piece)
        return piece

    def tell(self) -> int:
        """Offset of the next byte."""
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        """Go to the beginning, or to the end, after which nothing is read."""
        assert offset == 0, "clients measure a body, and read it from its beginning"
        if whence == 0:
            self._at, self._pieces = 0, pieces(self._data, self._retry)
        elif whence == 2:
            self._at, self._pieces = len(self._data), iter(())
        return self._at


@lru_cache(maxsize=4)
def _client(
    endpoint: str | None, region: str | None, anonymous: bool, stalled: float, _stamp: object
) -> Any:
    """A client for all threads.

    Credentials are found as AWS documents it; keys are read once for each stamp.
    """
    from botocore import UNSIGNED
    from botocore.config import Config
    from botocore.session import Session as Botocore

    config = Config(
        connect_timeout=stalled,
        read_timeout=stalled,
        max_pool_connections=_CONNECTIONS,
        retries={"total_max_attempts": 1},
        # Uploads have checksums of their own, so botocore's are not needed.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        signature_version=UNSIGNED if anonymous else None,
        s3={"addressing_style": "path"} if endpoint else None,
    )
    return Botocore().create_client("s3", region_name=region, endpoint_url=endpoint, config=config)
