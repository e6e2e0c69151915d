"""The three hosts that save a golden checkpoint together, for tools/make_golden.py."""

import golden_held  # noqa: F401  (what the state has parts of)
import make_golden
import torch  # noqa: F401  (which the state has leaves of)

import shardckpt


def save(coordinator, path, layout, compression):
    make_golden.make_small()
    state = make_golden.job_state(coordinator.world.process)
    shardckpt.save(path, state, options=make_golden.job_options(layout, compression), coordinator=coordinator)
    return "saved"
