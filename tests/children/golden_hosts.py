"""The three hosts that save a golden checkpoint together, for tools/make_golden.py."""

import sys
from pathlib import Path

import golden_held  # noqa: F401  (what the state has parts of)
import torch  # noqa: F401  (which the state has leaves of)

import shardckpt

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import make_golden


def save(coordinator, path, layout, compression):
    make_golden.make_small()
    state = make_golden.job_state(coordinator.world.process)
    shardckpt.save(path, state, options=make_golden.job_options(layout, compression), coordinator=coordinator)
    return "saved"
