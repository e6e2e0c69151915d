"""Upload of a large object to S3, as a multipart upload.

1. `CreateMultipartUpload` requests CRC32C for every part; a service that refuses that gets MD5.
2. `UploadPart` has the part's checksum, so that the service refuses damaged parts. A part's number
   follows from its offset, so a part that is sent again replaces itself.
3. `CompleteMultipartUpload` has every part's checksum and ETag, and `If-None-Match: *` if nothing
   may be replaced.
4. To resume, `ListParts` lists the existing parts. Consecutive full-size parts from the first one
   on are kept.
https://docs.aws.amazon.com/AmazonS3/latest/userguide/mpuoverview.html, and for the conditional
completion https://docs.aws.amazon.com/AmazonS3/latest/userguide/conditional-writes.html
"""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Self

from shardckpt.io.buckets.bucket import Content
from shardckpt.io.buckets.retry import Retry
from shardckpt.io.buckets.s3_client import RefusedError, RequestBody, S3Bucket, checksum_of
from shardckpt.io.buckets.upload_session import (
    TOKEN,
    UploadState,
    already_exists,
    bucket_and_name,
    new_token,
    vanished,
)

if TYPE_CHECKING:
    from shardckpt.io.url import Location

PARALLEL = 3
"""Parts that are sent at a time."""


class S3Session:
    """A multipart upload."""

    parallel = PARALLEL

    def __init__(self, place: Location, state: UploadState) -> None:
        self.published = False
        self.state = state
        self._place = place
        bucket, self._name = bucket_and_name(place)
        self._bucket = S3Bucket(bucket)
        self._retry = Retry()
        self._parts: dict[int, dict[str, Any]] = {}
        """Part number → its entry in `CompleteMultipartUpload`."""
        self._sizes: dict[int, int] = {}
        """Part number → bytes."""
        self._together = 0
        """Number of consecutive parts from the first one on."""
        self._durable = 0
        self._lock = threading.Lock()

    @classmethod
    def begin(cls, place: Location, part_bytes: int, *, if_absent: bool) -> Self:
        """Begin an upload."""
        session = cls(place, UploadState("", new_token(), part_bytes, if_absent))
        if if_absent and session._owner() is not None:
            raise already_exists(place)
        begin: dict[str, Any] = {
            "Metadata": {TOKEN: session.state.token},
            "ContentType": "application/octet-stream",
        }
        try:
            answer = session._ask("create_multipart_upload", ChecksumAlgorithm="CRC32C", **begin)
        except RefusedError as refused:
            if not refused.knows_no_checksum:
                raise
            answer = session._ask("create_multipart_upload", **begin)
        checksum = "crc32c" if answer.get("ChecksumAlgorithm") == "CRC32C" else "md5"
        session.state = UploadState(
            answer["UploadId"], session.state.token, part_bytes, if_absent, checksum
        )
        return session

    @classmethod
    def resume(cls, place: Location, state: UploadState, *, if_absent: bool) -> Self | None:
        """Resume an upload; None if the service no longer knows it."""
        session = cls(place, state)
        owner = session._owner()
        session.published = owner == state.token
        if session.published:
            return session
        if if_absent and owner is not None:
            raise already_exists(place)
        try:
            session._find_parts()
        except RefusedError as refused:
            if refused.status != 404:
                raise
            return None
        return session

    @property
    def durable(self) -> int:
        """Bytes from the beginning that the service has confirmed."""
        return self._durable

    @property
    def resume_at(self) -> int:
        """Offset of the first part to send."""
        return self._durable

    def send(self, offset: int, data: memoryview) -> None:
        """Send a part."""
        number = offset // self.state.part_bytes + 1
        checksum = checksum_of(Content(data), self.state.checksum)
        given = {"ChecksumAlgorithm": "CRC32C"} if self.state.checksum == "crc32c" else {}
        try:
            answer = self._ask(
                "upload_part",
                body=data,
                UploadId=self.state.upload,
                PartNumber=number,
                **given,
                **checksum,
            )
        except RefusedError as refused:
            self._handle_refusal(refused)
        else:
            known = checksum if self.state.checksum == "crc32c" else {}
            self._confirm(number, len(data), {"ETag": answer["ETag"], **known})

    def publish(self, offset: int, data: memoryview) -> None:
        """Send the last part, and make the object visible."""
        if len(data) or not offset:
            self.send(offset, data)
        if self.published:
            return
        parts = [{"PartNumber": number, **part} for number, part in sorted(self._parts.items())]
        condition: dict[str, Any] = {"IfNoneMatch": "*"} if self.state.if_absent else {}
        try:
            self._ask(
                "complete_multipart_upload",
                UploadId=self.state.upload,
                MultipartUpload={"Parts": parts},
                **condition,
            )
        except RefusedError as refused:
            if refused.status != 412:
                self._handle_refusal(refused)
            elif self._owner() != self.state.token:
                raise already_exists(self._place) from refused
        self.published = True

    def give_up(self) -> None:
        """Do not retry requests that fail from now on."""
        self._retry.give_up()

    def abort(self) -> None:
        """End the upload."""
        self._retry = Retry()
        try:
            self._ask("abort_multipart_upload", UploadId=self.state.upload)
        except RefusedError as refused:
            if refused.status != 404:
                raise

    def _find_parts(self) -> None:
        """List the parts that the service has."""
        marker = 0
        while True:
            answer = self._ask("list_parts", UploadId=self.state.upload, PartNumberMarker=marker)
            for part in answer.get("Parts", ()):
                if (
                    part["PartNumber"] != len(self._parts) + 1
                    or part["Size"] != self.state.part_bytes
                ):
                    return
                known = {key: part[key] for key in ("ETag", "ChecksumCRC32C") if key in part}
                self._confirm(part["PartNumber"], part["Size"], known)
            if not answer.get("IsTruncated"):
                return
            marker = answer["NextPartNumberMarker"]

    def _confirm(self, number: int, nbytes: int, part: dict[str, Any]) -> None:
        """Note that the service has a part."""
        with self._lock:
            self._parts[number] = part
            self._sizes[number] = nbytes
            while self._together + 1 in self._parts:
                self._together += 1
                self._durable += self._sizes[self._together]

    def _handle_refusal(self, refused: RefusedError) -> None:
        """Handle a refusal: raise it, unless the upload has already become the object."""
        if refused.status != 404 or refused.code == "NoSuchBucket":
            raise refused
        if self._owner() != self.state.token:
            raise vanished(self._place) from refused
        self.published = True

    def _owner(self) -> str | None:
        """The token of the upload that made the object; None: there is no object."""
        try:
            answer = self._ask("head_object")
        except RefusedError as refused:
            if refused.status != 404:
                raise
            return None
        return str(answer["Metadata"].get(TOKEN, ""))

    def _ask(
        self, operation: str, body: memoryview | None = None, **parameters: Any
    ) -> dict[str, Any]:
        """The response to one request about the object."""
        kind: Literal["read", "write"] = (
            "read" if operation in ("head_object", "list_parts") else "write"
        )
        send = None if body is None else partial(RequestBody, body)
        return self._bucket.ask(
            operation, self._name, kind=kind, retry=self._retry, body=send, **parameters
        )
