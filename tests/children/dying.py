"""Something is done over and over, each time in a fork that dies one storage operation later than the last."""

import functools
import json
import os
import shutil
import signal

LATER_THAN_ANY = 10_000


def in_a_fork(action):
    """The status of a child that does this."""
    pid = os.fork()
    if pid == 0:
        action()
        os._exit(0)
    return os.waitpid(pid, 0)[1]


def tell_deaths(root, killer, act):
    """Print, as JSON, the operation that each fork died before; the last fork gets through.

    Args:
        root: fork k finds a copy of <root>/base in <root>/<k>.
        killer: called with k and a file to report to; what it returns is armed before the fork acts.
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
