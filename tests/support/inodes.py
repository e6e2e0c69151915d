"""Inode numbers as file systems in user space make them up: `renumber` puts them into the answers
of the system."""

import os
import stat
from pathlib import Path


class Renumbered:
    """A status with another inode number."""

    def __init__(self, status, number):
        self._status = status
        self.st_ino = number

    def __getattr__(self, name):
        return getattr(self._status, name)


def renumber(monkeypatch, number):
    """Give each regular file the inode number that `number` makes of its real one."""

    def changed(status):
        return Renumbered(status, number(status.st_ino)) if stat.S_ISREG(status.st_mode) else status

    fstat, path_stat = os.fstat, Path.stat
    monkeypatch.setattr(os, "fstat", lambda fd: changed(fstat(fd)))
    monkeypatch.setattr(Path, "stat", lambda path, **how: changed(path_stat(path, **how)))
