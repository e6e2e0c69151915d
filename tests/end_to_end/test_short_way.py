"""How many files of the package a reader has to open to follow one save and one restore of one tensor."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import numpy as np

import shardckpt

PACKAGE = Path(shardckpt.__file__).parent
SAVE, RESTORE = 30, 29


def files_entered(call):
    """Those of the package in which a function was called."""
    found = set()

    def enter(frame, event, _arg):
        if event == "call" and frame.f_code.co_filename.startswith(str(PACKAGE)) and frame.f_code.co_name != "<module>":
            found.add(str(Path(frame.f_code.co_filename).relative_to(PACKAGE)))

    before = sys.getprofile()
    threading.setprofile(enter)
    sys.setprofile(enter)
    try:
        call()
    finally:
        sys.setprofile(before)
        threading.setprofile(None)
    return sorted(found)


def test_the_second_save_and_the_second_restore_of_one_tensor_enter_few_files(tmp_path):
    state = {"w": np.ones((64, 64), np.float32)}
    shardckpt.save(tmp_path / "cold", state)
    saved = files_entered(lambda: shardckpt.save(tmp_path / "warm", state))
    assert len(saved) <= SAVE, saved
    targets = {"w": np.zeros((64, 64), np.float32)}
    shardckpt.restore(tmp_path / "cold", targets)
    restored = files_entered(lambda: shardckpt.restore(tmp_path / "warm", targets))
    assert len(restored) <= RESTORE, restored
    assert (targets["w"] == 1).all()
