"""Hosts of a job whose committer copies the files, or dies, when all hosts have finished."""

import os
import shutil
import signal

from many_hosts import save

from shardckpt.writing import attempt, committer


def save_and_copy(coordinator, url, copy, options=None):
    """The committer copies what the hosts have left before it commits."""
    assemble = attempt.assemble

    def copy_first(place, *known):
        shutil.copytree(url, copy)
        return assemble(place, *known)

    attempt.assemble = copy_first
    return save(coordinator, url, options)


def save_and_be_killed(coordinator, url, options=None):
    """The committer is killed as soon as all hosts have finished; then the time for which the
    others wait for it is over."""
    heard = committer.CommitterWord.heard

    def die(*_arguments):
        coordinator.announce("killed", True)
        os.kill(os.getpid(), signal.SIGKILL)

    def listen(ours, name):
        if coordinator.peek("killed"):
            committer._COMMITTING = -ours.timeout
        return heard(ours, name)

    attempt.assemble, committer.CommitterWord.heard = die, listen
    return save(coordinator, url, options)
