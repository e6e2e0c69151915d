"""The interface of an upload to an object store.

A service gives a large object that comes in parts an id, keeps the parts that it has confirmed, and makes the object visible when it
is told that all are there. A `Session` is that, for S3 (`upload_s3`) and Cloud Storage (`upload_gcs`); `UploadState` is what
another process needs in order to go on with it.

Whose an object is: each upload draws a token and gives it to the service, which shows it in the object's metadata. Who loses
the answer to the request that publishes looks there.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, Self

from shardckpt.errors import AlreadyExistsError, StorageError

if TYPE_CHECKING:
    from shardckpt.format.documents import Fields
    from shardckpt.io.url import Location

__all__ = ["TOKEN", "Session", "UploadState", "already_exists", "bucket_and_name", "new_token", "vanished"]

TOKEN = "shardckpt-upload"  # noqa: S105  (no secret)
"""Name of the object's metadata that says which upload made it."""


@dataclass(frozen=True, slots=True)
class UploadState:
    """What another process needs in order to go on with an upload. Whoever has it can write to the upload, or end it."""

    upload: str = field(repr=False)
    """The service's id: of S3's multipart upload, or the URI of Cloud Storage's session."""
    token: str
    """That the object will show."""
    part_bytes: int
    """Of each part but the last."""
    if_absent: bool
    """Whether it will publish only where no object is."""
    checksum: str = "crc32c"
    """Of each part (S3) or of all (Cloud Storage): `crc32c`, or `md5` where a service knows nothing else."""
    summed: int = 0
    """Bytes from the beginning that `crc32c` is about. 0 on S3, which keeps the checksums of parts itself."""
    crc32c: int = 0

    def __post_init__(self) -> None:
        """Refuse what no upload of ours has."""
        assert self.part_bytes > 0
        assert self.checksum in ("crc32c", "md5")

    def to_json(self) -> dict[str, str | int]:
        """As `from_json` reads it."""
        numbers = {"part_bytes": self.part_bytes, "if_absent": int(self.if_absent), "summed": self.summed, "crc32c": self.crc32c}
        return {"upload": self.upload, "token": self.token, "checksum": self.checksum, **numbers}

    @classmethod
    def from_json(cls, doc: Fields) -> Self:
        """The state that was written.

        Raises:
            FormatError: it is none.
        """
        part_bytes, summed, sum_ = (doc.integer(key) for key in ("part_bytes", "summed", "crc32c"))
        if not part_bytes or summed % part_bytes or sum_ >= 1 << 32:
            doc.fail(f"a checksum {sum_} of {summed} bytes in parts of {part_bytes} cannot be")
        checksum = str(doc.one_of("checksum", ("crc32c", "md5")))
        return cls(doc.string("upload"), doc.string("token"), part_bytes, bool(doc.integer("if_absent")), checksum, summed, sum_)


class Session(Protocol):
    """An upload that a service has begun. What it raises is a ShardckptError or an OSError without the object's name."""

    parallel: int
    """Parts that may be sent at a time."""
    published: bool
    """Whether the object is visible, and is this upload's."""

    @property
    def state(self) -> UploadState:
        """What another process needs now."""
        ...

    @property
    def durable(self) -> int:
        """Bytes from the beginning that the service has confirmed."""
        ...

    @property
    def resume_at(self) -> int:
        """The offset of the first part to send, which is 0 or where another process had come to."""
        ...

    def send(self, offset: int, data: memoryview) -> None:
        """Send a part; confirmed when it returns. `offset` is a multiple of the part's size.

        Raises:
            StorageError: the service knows the upload no more.
        """
        ...

    def publish(self, offset: int, data: memoryview) -> None:
        """Send the last part, which may be empty, and make the object visible. All parts before are confirmed.

        Raises:
            AlreadyExistsError: it was to be published only where no object is, and there is one.
            CorruptionError: what has arrived is not what was sent.
            StorageError: the service knows the upload no more.
        """
        ...

    def give_up(self) -> None:
        """Make no request again that fails."""
        ...

    def abort(self) -> None:
        """End the upload, and remove what was sent. No part is being sent."""
        ...


def bucket_and_name(place: Location) -> tuple[str, str]:
    """Of an object."""
    bucket, _, name = place.path.partition("/")
    assert place.bucket == bucket, f"{place} is on no object store"
    assert name, f"{place} names a bucket and no object"
    return bucket, name


def new_token() -> str:
    """That no other upload has."""
    return secrets.token_hex(16)


def already_exists(place: Location) -> AlreadyExistsError:
    """There is an object, where none was to be."""
    return AlreadyExistsError(f"{place} exists already and stays as it is; to replace it, pass overwrite=True, or write to another place.")


def vanished(place: Location) -> StorageError:
    """The service does not know the upload any more."""
    return StorageError(
        f"cannot upload {place}: the service does not know this upload any more; another process has ended it or taken its place, "
        "or a rule of the bucket has; begin again."
    )
