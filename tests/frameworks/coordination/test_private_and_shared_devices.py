"""Devices of frameworks that run in each rank of a torch.distributed job for itself."""

import pytest

SCRIPT = "coordination_torch.py"


def job(scenario, place):
    return [(scenario, place, rank, 2) for rank in range(2)]


def test_jax_devices_that_every_rank_has_for_itself_are_private_and_asking_sets_up_no_backend(
    run_job, tmp_path
):
    for answer in run_job(SCRIPT, job("jax_beside", tmp_path), JAX_PLATFORMS="cpu"):
        assert answer == {"devices": [{}, {}], "set up by asking": False, "ids": [0]}


@pytest.mark.slow
def test_torch_xla_devices_are_shared_out_as_the_ranks_are_told(run_job, tmp_path):
    for rank, answer in enumerate(
        run_job(SCRIPT, job("torch_xla_beside", tmp_path), PJRT_DEVICE="CPU", CPU_NUM_DEVICES="8")
    ):
        own = [4 * rank + i for i in range(4)]
        assert answer == {
            "private": {},
            "told": [0, 0, 0, 0, 1, 1, 1, 1],
            "again": True,
            "otherwise": (
                f"OptionError: this process owns the devices {{'torch_xla': {own}}}, as agreed "
                "when the job started, and not {'torch_xla': [0]}; give devices= with the "
                "first call that coordinates."
            ),
            "twice": "OptionError: torch_xla device 5 is owned by process 0 and by process 1, "
            "according to devices= and the processes; give every process "
            "devices={'torch_xla': …} with ids that no other has.",
        }
