"""A job whose process group has NCCL alone: its store connects the processes, and nothing of
shardckpt runs on the group."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import timedelta

import torch.distributed as dist
from forks import Forked
from paths import CHILDREN


def test_managers_save_and_restore_without_a_collective(tmp_path):
    server = dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
    )
    command = [sys.executable, CHILDREN / "cuda_only_group.py", str(server.port), tmp_path / "run"]
    ranks = [
        Forked(
            [*command, str(rank), "2"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    answers = []
    for rank in ranks:
        out, err = rank.communicate(timeout=250)
        assert rank.returncode == 0, err
        answers.append(json.loads(out.splitlines()[-1]))
    for rank, answer in enumerate(answers):
        assert answer["backends"] == "cuda:only_cuda"
        assert answer["coordinator"] == ["TorchStore", rank, 2]
        assert answer["collectives"] == ["a collective of the program's own"]
        assert answer["local"] == [rank + 4]
        assert (answer["step"], answer["own"]) == (2, rank)
        assert any("has no backend for CPU tensors" in line for line in answer["logged"])
