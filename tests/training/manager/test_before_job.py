"""Managers that were made before the processes of their job met."""

import json
import subprocess
import sys
from datetime import timedelta

import pytest
import torch.distributed as dist
from forks import Forked
from paths import CHILDREN


@pytest.mark.long
def test_a_manager_joins_processes_that_meet_before_its_first_save_and_says_it_if_they_meet_later(
    tmp_path,
):
    server = dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
    )
    command = [sys.executable, "-W", "ignore", CHILDREN / "manager_before_job.py", str(server.port)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    ranks = [Forked([*command, str(rank), tmp_path], **pipes, text=True) for rank in range(2)]
    for rank in ranks:
        out, err = rank.communicate(timeout=250)
        assert rank.returncode == 0, err
        answer = json.loads(out.splitlines()[-1])
        assert (
            "made before the processes of the job met, and has gone through step 1 by itself"
            in answer.pop("refused")
        )
        assert answer == {"early": [1], "plain": [2], "chosen": [3], "hosts": [2, 2, 1]}
