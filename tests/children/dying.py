"""Something is done over and over, each time in a fork that dies one storage operation later than
the last."""

import functools
import json
import os
import shutil
import signal
import threading

from below_python import lead_through_os

LATER_THAN_ANY = 10_000
_tell = os.pwrite
"""Not counted."""


def in_a_fork(action):
    """The status of a child that does this."""
    pid = os.fork()
    if pid == 0:
        action()
        os._exit(0)
    return os.waitpid(pid, 0)[1]


class Killer:
    """Counts operations on the storage, and dies before the k-th; of a write also in its middle,
    which counts as one more."""

    def __init__(self, files, tensorstore, k, report):
        """Die before operation k, and write into the file `report` which it was.

        Args:
            files: names of functions of `os`.
            tensorstore: classes, and names of methods of each.
            k: counted from 0.
            report: an open file's number.
        """
        self.files, self.tensorstore = files, tensorstore
        self.left, self.report, self.lock = k, report, threading.RLock()

    def arm(self):
        lead_through_os()
        for name in self.files:
            setattr(os, name, self.file_operation(name, getattr(os, name)))
        for kind, names in self.tensorstore.items():
            for name in names:
                setattr(kind, name, self.tensorstore_operation(name, getattr(kind, name)))

    def before(self, operation, *, then=lambda: None):
        """One more operation; `then` is what is done of it before the next one, which is in the
        middle of it."""
        with self.lock:
            if self.left == 0:
                then()
                _tell(self.report, operation.encode(), 0)
                os.kill(os.getpid(), signal.SIGKILL)
            self.left -= 1

    def file_operation(self, name, function):
        @functools.wraps(function)
        def wrapped(*arguments, **options):
            if name == "open" and not arguments[1] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                return function(*arguments, **options)
            self.before(name)
            if name in ("write", "pwrite", "pwritev"):
                file, data, *offset = arguments
                half = (
                    data[: len(data) // 2]
                    if name != "pwritev"
                    else [*data[:-1], data[-1][: len(data[-1]) // 2]]
                )
                self.before(
                    f"the second half of a {name}", then=lambda: function(file, half, *offset)
                )
            return function(*arguments, **options)

        return wrapped

    def tensorstore_operation(self, name, function):
        def wrapped(*arguments, **options):
            self.before(f"tensorstore {name}")
            return function(*arguments, **options)

        return wrapped


def tell_deaths(root, killer, act):
    """Print, as JSON, the operation that each fork died before; the last fork gets through.

    Args:
        root: fork k finds a copy of <root>/base in <root>/<k>.
        killer: called with k and a file to report to; what it returns is armed before the fork
            acts.
        act: what to do, with <root>/<k>.
    """

    def act_and_die(k):
        killer(k, report.fileno()).arm()
        act(root / str(k))

    died_before = []
    with (root / "report").open("wb+", buffering=0) as report:
        for k in range(LATER_THAN_ANY):
            report.truncate(0)
            shutil.copytree(root / "base", root / str(k))
            status = in_a_fork(functools.partial(act_and_die, k))
            if status == 0:
                break
            assert os.WIFSIGNALED(status)
            assert os.WTERMSIG(status) == signal.SIGKILL
            died_before.append((root / "report").read_text())
    print(json.dumps(died_before))
