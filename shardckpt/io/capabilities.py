"""Capabilities of a kind of storage: what it can do, with the answers that most kinds give."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from shardckpt.errors import StorageError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path


class Capabilities:
    """The capabilities of a kind of storage.

    They are class attributes and cost no request. Other packages ask for a capability, and never
    for the kind itself. What only disks have to do is a method that does nothing elsewhere; what
    only buckets can do (`copy_from`) is refused elsewhere.
    """

    __slots__ = ()

    near: ClassVar[bool] = False
    """Requests take microseconds: they are repeated rather than avoided, and few threads make
    them."""
    has_paths: ClassVar[bool] = False
    """Keys are files of this machine (`local_path`): other programs open and link them, and
    directories are renamed."""
    appends: ClassVar[bool] = False
    """Data files grow in place, on several threads. Elsewhere the bytes of a file are collected in
    memory and sent as one object."""
    has_locks: ClassVar[bool] = False
    """Directories can be locked, and a killed process may leave the lock file of an object."""
    durable_when_visible: ClassVar[bool] = True
    """Every object that a reader sees survives a crash of the machine."""
    keeps_times: ClassVar[bool] = True
    """The time of an object's last write is kept (`modification_times`)."""
    lists: ClassVar[bool] = True
    """Keys can be listed."""
    writable: ClassVar[bool] = True
    """Objects are created conditionally: of several writers of a missing object, exactly one
    succeeds. Otherwise nothing is written."""
    replaces: ClassVar[bool] = True
    """Objects are replaced conditionally: only in the version that was read. Otherwise a record
    stays as it was created."""
    shared: ClassVar[bool] = True
    """Other processes reach the same objects by the same url."""
    sharing_advice: ClassVar[str] = "Give all processes the same endpoint, bucket and credentials."
    """The sentences that tell a person how processes come to reach the same objects."""
    has_driver: ClassVar[bool] = False
    """TensorStore opens the place itself (`kvstore`), to merge indexes and to read arrays of other
    formats."""
    uploads_in_parts: ClassVar[bool] = False
    """Objects larger than the memory are sent in parts, and a later process can resume that
    (`buckets.uploading`)."""
    uploads_on_threads: ClassVar[bool] = False
    """An upload goes on while its caller does something else."""

    def local_path(self, key: str) -> Path | None:
        """A key's path ("": the location itself) on this machine's file system.

        None if this kind of storage has no paths.
        """
        del key
        return None

    def has_directory(self) -> bool:
        """Whether keys may lie below the location: on a disk, whether a directory is there.

        Elsewhere always. Makes no request.
        """
        return True

    def check_replaces(self, action: str) -> None:
        """Refuse to replace or delete a record where no client can do that conditionally.

        Args:
            action: the action, up to the place.

        Raises:
            StorageError: records are not replaced here (`replaces`).
        """
        if not self.replaces:
            raise StorageError(
                f"cannot {action} {self}: its client cannot replace an object only if it is "
                "unchanged, and without that another process could lose a checkpoint. Use the "
                "storage's own url (gs://, s3://, az://), or save elsewhere."
            )

    def sync(self) -> None:
        """Make all files durable that were put off since `synced_later`, and later ones at once.

        Of stores made with `sub`, too.
        """

    def note_unsynced(self, path: Path) -> bool:
        """Note a written file, which `sync` makes durable; False: the caller must do it now."""
        del path
        return False

    def sync_name(self, path: Path) -> None:
        """Make the name of a file durable, or note it for `sync`."""

    def remove_empty(self) -> None:
        """On disk: remove the location's directory if it has no files but locks of killed writers.

        Object stores have no directories.
        """

    def make_parents(self, key: str) -> None:
        """On disk: create the parent directories of a key, durably. Object stores have none."""

    def copies_from(self, source: Any) -> bool:
        """Whether the storage itself copies objects from another place here (`copy_from`)."""
        del source
        return False

    def copy_from(self, source: Any, keys: Iterable[tuple[str, str]]) -> None:
        """Copy objects from another place, within the storage, and replace existing ones.

        All are durable when this returns.

        Args:
            source: a place for which `copies_from` says yes.
            keys: old key there, and new key here.

        Raises:
            NotImplementedError: the service cannot copy.
            StorageError: an object is missing, or the storage failed.
        """
        raise NotImplementedError(f"{self}: the storage cannot copy objects from {source}")
