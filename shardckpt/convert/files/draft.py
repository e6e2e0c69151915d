"""A file or directory on a local disk that takes its final name only when it is complete.

It is written beside its place, as `.<name>.<random>.partial`, made durable, and renamed;
`replacement` gives it the name of an old directory. Each writer holds a lock on its draft
(flock(2)), which ends with the process; so the next export to that place can settle and remove what
a killed export has left.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from shardckpt.convert.files.destination import OVERWRITE, already_exists
from shardckpt.convert.files.replacement import (
    COMPLETE,
    COPY,
    PARTIAL,
    REPLACED,
    SUFFIXES,
    neither_is_named,
    replace_directory,
    settle,
)
from shardckpt.errors import AlreadyExistsError, OptionError, StorageError
from shardckpt.io.datafile import lack_of_space
from shardckpt.io.deletion import remove_tree
from shardckpt.io.failures import storage_errors
from shardckpt.io.files import DurableDirectories, OpenFile, sync_directory, sync_open_directory
from shardckpt.io.locks import HIDDEN, is_at, lock_whole
from shardckpt.io.status import exists, is_directory, is_file, is_link
from shardckpt.io.store import Store
from shardckpt.state.names import shown
from shardckpt.text import Message, file_size

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator
    from pathlib import Path

    from shardckpt.io.url import Location

_RANDOM_BYTES = 4
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EIO)
"""Errors of file systems without hard links (EIO: of rclone). There, a file that another process
creates between the check and the rename may be replaced."""


class Draft:
    """A file or directory in progress; `publish` or `abandon` ends it."""

    fd: int
    """File descriptor of the file, open for reading and writing, or of the directory."""

    def __init__(
        self,
        location: Location,
        *,
        overwrite: bool,
        nbytes: int,
        marks: Collection[str] | None = None,
        foreign_name: Callable[[Path, list[str]], str | None] | None = None,
    ) -> None:
        """Make an empty draft.

        Args:
            location: the final place.
            overwrite: whether the draft may replace an existing file or directory.
            nbytes: approximate bytes of the finished draft.
            marks: None for a file. For a directory: names of files of which an existing directory
                must have one, or be empty, before `overwrite` replaces it.
            foreign_name: given with `marks`: finds, for such a directory and the names in it, the
                name of something that the format does not write. `overwrite` replaces no directory
                that has such.

        Raises:
            OptionError: the location is not on a local disk.
            AlreadyExistsError: something exists there, and may not be replaced.
            StorageError: there is no room, or no permission to write there.
        """
        final = location.local_path
        if final is None:
            raise OptionError(
                f"{location}: this format is written to a local disk only; export it there and "
                "upload the result, or export safetensors."
            )
        self.final: Path = final
        self._marks = None if marks is None else frozenset(marks)
        self._foreign_name = foreign_name
        self._overwrite = overwrite
        self._replacing = False
        """Whether the draft takes the name of an old directory: from then on both are complete."""
        leftovers = self._settle_leftovers()
        self._finished = [
            path
            for path in (draft.with_suffix(COMPLETE) for draft in leftovers)
            if exists(path, follow=False)
        ]
        """Finished directories of killed exports beside the final one; they stay until this draft
        has the name."""
        self._check_final()
        check_export_space(Store.open(location), self.final, nbytes)
        if marks is not None:  # a file takes the place of no directory
            for draft in leftovers:
                _remove(draft.with_suffix(REPLACED))
        with storage_errors("make a directory for", self.final):
            DurableDirectories(self.final.parent).make(self.final.parent)
        while not self._create():
            pass

    def _create(self) -> bool:
        """Make and lock a draft of a new name.

        False: another export, which removes leftovers, has met it before it was locked.
        """
        self.path: Path = self.final.with_name(
            f".{self.final.name}.{secrets.token_hex(_RANDOM_BYTES)}{PARTIAL}"
        )
        with storage_errors("create", self.path):
            if self._marks is None:
                self._open = OpenFile(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
            else:
                self.path.mkdir()
                try:
                    self._open = OpenFile(self.path, os.O_RDONLY | os.O_DIRECTORY)
                except FileNotFoundError:
                    return False
            self.fd = self._open.fileno()
            is_mine = False
            try:
                with suppress(BlockingIOError):
                    lock_whole(self.fd, self.path)
                    is_mine = is_at(self.fd, self.path) is not False
            finally:
                if not is_mine:
                    self.abandon()
        return is_mine

    def publish(self) -> None:
        """Give the draft its final name, after making it durable.

        The files inside a directory must be durable already.

        Raises:
            AlreadyExistsError: another process has published there first.
            StorageError: the rename failed.
        """
        with storage_errors("publish", self.final):
            if self._marks is None:
                os.fsync(self.fd)
            else:
                sync_open_directory(self.fd, self.path)
            self._check_final()
            if self._marks is not None and exists(self.final, follow=False):
                self._replacing = True
                old = replace_directory(self.path, self.final, self._marks)
                with suppress(OSError):
                    remove_tree(old)
            elif self._marks is not None:
                self.path.rename(self.final)
            elif self._overwrite:
                self.path.replace(self.final)
            else:
                link_or_rename(self.path, self.final)
                self.path.unlink(missing_ok=True)
            sync_directory(self.final.parent)
            self._open.close()
        if self._marks is not None:
            for finished in self._finished:
                _remove(finished)

    def abandon(self) -> None:
        """Remove the draft.

        If it could not take the name of an old directory, both stay, for the next export to settle.
        """
        if self._marks is not None and self._replacing:
            with suppress(OSError):
                settle(self.path, self.final, self._marks, (REPLACED, COMPLETE))
        else:
            _remove(self.path)
        with suppress(OSError):
            self._open.close()

    def _check_final(self) -> None:
        if not exists(self.final, follow=False):
            return
        is_kept_link = self._marks is not None and is_link(self.final)
        if not self._overwrite and not is_kept_link:
            if not self._finished:
                raise already_exists(self.final)
            killed = (
                " An export that was to replace it was killed just before that; it is finished, in "
            )
            raise AlreadyExistsError(
                Message(already_exists(self.final).message, killed, f"{self._finished[0]}.")
            )
        if self._marks is None:
            if not is_file(self.final):
                advice = " replaces files only; choose another place."
                raise AlreadyExistsError(
                    Message(f"{self.final} is not a file, and ", OVERWRITE, advice)
                )
            return
        reason = self._reason_to_keep(self._marks)
        if reason is not None:
            raise AlreadyExistsError(
                Message(
                    f"{self.final} {reason}, so ",
                    OVERWRITE,
                    " does not replace it; remove it, or choose another place.",
                )
            )

    def _reason_to_keep(self, marks: Collection[str]) -> str | None:
        """The reason, in words, that a directory is not replaced; None: there is none."""
        names: list[str] = []
        if is_link(self.final):
            return "is a symbolic link"
        if is_directory(self.final):
            with storage_errors("list", self.final):
                names = sorted(entry.name for entry in self.final.iterdir())
            if not names:
                return None
        if not any(name in marks for name in names):
            return f"is not an earlier export (it has no {' or '.join(sorted(marks))})"
        assert self._foreign_name is not None, "a format of directories knows its own names"
        name = self._foreign_name(
            self.final, [name for name in names if not HIDDEN.fullmatch(name)]
        )
        return None if name is None else f"holds {shown(name)} beside an earlier export"

    def _settle_leftovers(self) -> list[Path]:
        """The drafts of killed exports.

        If the final name is free, a finished directory among them gets it first.
        """
        named = re.compile(re.escape(f".{self.final.name}.") + f"[0-9a-f]{{{2 * _RANDOM_BYTES}}}")
        with storage_errors("look into", self.final.parent):
            try:
                entries = sorted(self.final.parent.iterdir())
            except (FileNotFoundError, NotADirectoryError):
                return []
        stems = dict.fromkeys(
            entry.stem
            for entry in entries
            if named.fullmatch(entry.stem) and entry.suffix in SUFFIXES
        )
        settled = []
        for draft in (self.final.with_name(stem + PARTIAL) for stem in stems):
            with _try_lock(draft) as one, _try_lock(draft.with_suffix(COMPLETE)) as other:
                if one and other:
                    self._settle(draft)
                    settled.append(draft)
        return settled

    def _settle(self, draft: Path) -> None:
        try:
            named = self._marks is not None and settle(draft, self.final, self._marks)
        except OSError as e:
            raise neither_is_named(draft, self.final, e) from e
        for suffix in (PARTIAL, COPY):
            _remove(draft.with_suffix(suffix))
        replaced = draft.with_suffix(REPLACED)
        if named and not self._overwrite and exists(replaced, follow=False):
            killed = (
                " was killed just before this finished directory had its name, and it has the "
                "name now. The directory that it "
            )
            raise AlreadyExistsError(
                Message(
                    f"{self.final} is there already: an export with ",
                    OVERWRITE,
                    f"{killed}replaces is {replaced}; the next export with ",
                    OVERWRITE,
                    " removes it. Choose another place, or replace both with ",
                    OVERWRITE,
                    ".",
                )
            )


def _remove(path: Path) -> None:
    """Remove a file or directory, if possible."""
    with suppress(OSError):
        if is_directory(path):
            remove_tree(path)
        else:
            path.unlink()


def check_export_space(store: Store, place: Path, nbytes: int) -> None:
    """Raise StorageError if the disk of `store` has less than `nbytes` free."""
    lack = lack_of_space(store, nbytes)
    if lack is not None:
        raise StorageError(
            f"{place}: the export needs {file_size(nbytes)} there, and {lack}; make room, or "
            "choose another place."
        )


def link_or_rename(draft: Path, path: Path) -> None:
    """Link a draft to its final name; rename it if the file system has no hard links.

    Raises:
        AlreadyExistsError: the name exists. (A plain rename would replace it.)
    """
    try:
        if _link(draft, path):
            return
    except FileExistsError:
        raise already_exists(path) from None
    if exists(path, follow=False):
        raise already_exists(path)
    draft.rename(path)


def link_over(draft: Path, path: Path) -> None:
    """Replace a file by a link to a draft.

    Rename the draft if the file system has no hard links.
    """
    new = draft.with_suffix(".new")
    new.unlink(missing_ok=True)
    (new if _link(draft, new) else draft).replace(path)


def _link(draft: Path, path: Path) -> bool:
    """Make a hard link; False if the file system has none."""
    try:
        os.link(draft, path)
    except OSError as e:
        if e.errno not in _NO_LINKS:
            raise
        return False
    return True


@contextmanager
def _try_lock(path: Path) -> Iterator[bool]:
    """Lock a draft, if it exists; False if a running writer has it locked."""
    try:
        try:
            # NFS locks no file that is open for reading only.
            opened = OpenFile(path, os.O_RDWR | os.O_NOFOLLOW)
        except IsADirectoryError:
            opened = OpenFile(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError as e:
        yield isinstance(e, FileNotFoundError)
        return
    with opened as fd:
        try:
            lock_whole(fd, path)
        except OSError:
            yield False
        else:
            yield True
