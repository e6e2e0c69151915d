"""The interface of an upload to an object store.

A service gives an id to a large object that comes in parts, keeps the parts that it has confirmed,
and makes the object visible on request. A `Session` is such an upload, for S3 (`upload_s3`) and
Cloud Storage (`upload_gcs`). `UploadState` is what another process needs to resume it.

Each upload draws a token and gives it to the service, which shows it in the object's metadata. A
process that loses the response to the publishing request compares the token to see whether the
object comes from its own upload.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, Self

from shardckpt.errors import AlreadyExistsError, StorageError
from shardckpt.text import Message, named

if TYPE_CHECKING:
    from shardckpt.format.documents import Fields
    from shardckpt.io.url import Location

TOKEN = "shardckpt-upload"  # noqa: S105  (no secret)
"""Name of the object metadata that holds the token of the upload."""


@dataclass(frozen=True, slots=True)
class UploadState:
    """The state that another process needs to resume an upload.

    Any process that has it can write to the upload, or end it.
    """

    upload: str = field(repr=False)
    """The service's id: the id of S3's multipart upload, or the URI of Cloud Storage's session."""
    token: str
    """The token in the object's metadata."""
    part_bytes: int
    """Bytes of each part except the last."""
    if_absent: bool
    """Whether the upload publishes only if the object does not exist."""
    checksum: str = "crc32c"
    """Checksum of each part (S3) or of all bytes (Cloud Storage): `crc32c`, or `md5` if a service
    has nothing else."""
    summed: int = 0
    """Bytes from the beginning that `crc32c` covers. 0 on S3, which keeps the checksums of parts
    itself."""
    crc32c: int = 0

    def __post_init__(self) -> None:
        """Refuse values that no upload of shardckpt has."""
        assert self.part_bytes > 0
        assert self.checksum in ("crc32c", "md5")

    def to_json(self) -> dict[str, str | int]:
        """The JSON object that `from_json` reads."""
        numbers = {
            "part_bytes": self.part_bytes,
            "if_absent": int(self.if_absent),
            "summed": self.summed,
            "crc32c": self.crc32c,
        }
        return {"upload": self.upload, "token": self.token, "checksum": self.checksum, **numbers}

    @classmethod
    def from_json(cls, doc: Fields) -> Self:
        """Read the state that `to_json` wrote.

        Raises:
            FormatError: the document is not such a state.
        """
        part_bytes, summed, sum_ = (doc.integer(key) for key in ("part_bytes", "summed", "crc32c"))
        if not part_bytes or summed % part_bytes or sum_ >= 1 << 32:
            doc.fail(f"a checksum {sum_} of {summed} bytes in parts of {part_bytes} cannot be")
        checksum = str(doc.one_of("checksum", ("crc32c", "md5")))
        return cls(
            doc.string("upload"),
            doc.string("token"),
            part_bytes,
            bool(doc.integer("if_absent")),
            checksum,
            summed,
            sum_,
        )


class Session(Protocol):
    """An upload that a service has begun.

    Methods raise a ShardckptError, or an OSError without the object's name.
    """

    parallel: int
    """Number of parts that may be sent at a time."""
    published: bool
    """Whether the object is visible and comes from this upload."""

    @property
    def state(self) -> UploadState:
        """The state that another process needs now."""
        ...

    @property
    def durable(self) -> int:
        """Bytes from the beginning that the service has confirmed."""
        ...

    @property
    def resume_at(self) -> int:
        """Offset of the first part to send: 0, or the point that another process reached."""
        ...

    def send(self, offset: int, data: memoryview) -> None:
        """Send a part; it is confirmed when this returns. `offset` is a multiple of the part size.

        Raises:
            StorageError: the service no longer knows the upload.
        """
        ...

    def publish(self, offset: int, data: memoryview) -> None:
        """Send the last part, which may be empty, and make the object visible.

        All earlier parts are confirmed.

        Raises:
            AlreadyExistsError: `if_absent` is set, and the object exists.
            CorruptionError: the received bytes differ from the sent ones.
            StorageError: the service no longer knows the upload.
        """
        ...

    def give_up(self) -> None:
        """Do not retry requests that fail from now on."""
        ...

    def abort(self) -> None:
        """End the upload, and remove its parts. No part may be in the process of being sent."""
        ...


def bucket_and_name(place: Location) -> tuple[str, str]:
    """Bucket and name of an object."""
    bucket, _, name = place.path.partition("/")
    assert place.bucket == bucket, f"{place} is on no object store"
    assert name, f"{place} names a bucket and no object"
    return bucket, name


def new_token() -> str:
    """A token that no other upload has."""
    return secrets.token_hex(16)


def already_exists(place: Location) -> AlreadyExistsError:
    """The error for an object that exists and must not be replaced."""
    advice = f"{place} exists already and stays as it is; to replace it, pass "
    return AlreadyExistsError(
        Message(advice, named("overwrite", True), ", or write to another place.")
    )


def vanished(place: Location) -> StorageError:
    """The error for an upload that the service no longer knows."""
    return StorageError(
        f"cannot upload {place}: the service does not know this upload any more: another process "
        "or a rule of the bucket has ended it; upload again."
    )
