"""Number of files of the package that one save and one restore of one tensor enter."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from paths import CHILDREN

SAVE, RESTORE = 34, 27
"""Of the second save and the second restore in a process; the first ones also enter what finds
frameworks and opens the storage."""


@pytest.mark.long
@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_the_second_save_and_the_second_restore_of_one_tensor_enter_few_files(tmp_path, framework):
    command = [sys.executable, CHILDREN / "files_entered.py", tmp_path, framework]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=True)
    files = json.loads(done.stdout)
    assert len(files["save"][1]) <= SAVE, files["save"][1]
    assert len(files["restore"][1]) <= RESTORE, files["restore"][1]


def test_a_save_without_a_base_does_not_import_the_reading_of_checkpoints(tmp_path):
    code = f"""
import sys, numpy, shardckpt
shardckpt.save({str(tmp_path / "a")!r}, {{"w": numpy.zeros(9)}})
print([name for name in sys.modules if name.startswith("shardckpt.reading")])
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=250, check=True
    )
    assert done.stdout.strip() == "[]"
