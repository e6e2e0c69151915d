"""How many files of the package a reader has to open to follow one save and one restore of one tensor."""

from __future__ import annotations

import json
import subprocess
import sys

from paths import CHILDREN

SAVE, RESTORE = 30, 25
"""Of the second save and the second restore in a process; the first ones also enter what finds frameworks and opens the storage."""


def test_the_second_save_and_the_second_restore_of_one_tensor_enter_few_files(tmp_path):
    command = [sys.executable, CHILDREN / "files_entered.py", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    found = json.loads(done.stdout)
    assert len(found["save"][1]) <= SAVE, found["save"][1]
    assert len(found["restore"][1]) <= RESTORE, found["restore"][1]
