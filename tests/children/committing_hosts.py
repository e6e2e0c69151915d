"""Hosts of a job whose committer copies the files, or dies, when all hosts have finished."""

import os
import shutil
import signal

from many_hosts import save

from shardckpt.writing import attempt


def save_and_copy(coordinator, url, copy, options=None):
    """The committer copies what the hosts have left before it commits."""
    assemble = attempt.assemble

    def copy_first(place, *known):
        shutil.copytree(url, copy)
        return assemble(place, *known)

    attempt.assemble = copy_first
    return save(coordinator, url, options)


def save_and_be_killed(coordinator, url, options=None):
    """The committer is killed as soon as all hosts have finished; the others do not wait for it for long."""
    attempt.assemble = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    attempt._COMMITTING = 0.2
    return save(coordinator, url, {"commit_timeout": 5.0, **(options or {})})
