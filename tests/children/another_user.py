"""Commands of a user who may not enter each directory, or calls of one without a home.

    python another_user.py <directory> < JSON

The JSON is a list: for each entry, the arguments of a `shardckpt` command, or Python source. JSON
on stdout: for each entry, the exit status and what was written to standard error; for source, the
error's name and text, or null. If root runs this, commands run without the rights of root, and
source runs as a user who is not in the list of users.
"""

import ctypes
import json
import os
import sys

from typer.testing import CliRunner

import shardckpt
from shardckpt.cli.app import app

USER = 12345
_CAPABILITIES_3 = 0x20080522


def give_up_rights():
    """Keep the user, and give up what makes root enter each directory; so Python's own files stay
    readable."""
    header, nothing = (ctypes.c_uint32 * 2)(_CAPABILITIES_3, 0), (ctypes.c_uint32 * 6)()
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.capset(header, nothing) == 0, os.strerror(ctypes.get_errno())


def become_nobody():
    """Become a user without a home. Python's own files may be unreadable then, so everything is
    imported before."""
    import numpy as np

    shardckpt.save("warm", {"w": np.ones(3)}, options=shardckpt.SaveOptions(overwrite=True))
    shardckpt.restore("warm")
    run = f"run {os.getpid()}"
    with shardckpt.CheckpointManager(run, every=1, keep=1) as manager:
        for step in (1, 2):
            manager.save(step, {"w": np.ones(3)})
    del os.environ["HOME"]
    os.setgroups([])
    os.setgid(USER)
    os.setuid(USER)


def main():
    os.chdir(sys.argv[1])
    entries, answers = json.load(sys.stdin), []
    if os.geteuid() == 0:
        become_nobody() if isinstance(entries[0], str) else give_up_rights()
    for entry in entries:
        if isinstance(entry, list):
            result = CliRunner().invoke(app, entry)
            answers.append([result.exit_code, result.stderr])
            continue
        try:
            exec(entry, {"shardckpt": shardckpt})
            answers.append(None)
        except Exception as e:
            answers.append([type(e).__name__, str(e)])
    print(json.dumps(answers))


main()
