"""Processes of every framework, imported once for all tests here and forked for each job."""

from __future__ import annotations

import os
from contextlib import ExitStack

import pytest
from faults import TORTURE
from processes import Processes

SECONDS = 1200 if TORTURE else 240
"""For one job, imports included."""
QUIET = {"PYTHONWARNINGS": "ignore", "TF_CPP_MIN_LOG_LEVEL": "3"}
FLAGS = {
    "JAX training": {
        "XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    }
}
"""Compiling takes longer than running what is compiled."""
MODULES = {
    "torch_xla": ["e2e_torch_xla", "e2e_cooperative_xla"],
    "DTensor": ["e2e_dtensor", "e2e_cooperative"],
    "JAX": ["e2e_jax", "e2e_cooperative_jax"],
    "numpy": ["e2e_numpy"],
    "torch training": ["e2e_training"],
    "JAX training": ["e2e_training_jax"],
}


@pytest.fixture(scope="session")
def run_job():
    """A function that runs a function in each process of a job, given as `module:function`; what
    they returned."""
    with ExitStack() as stack:
        running = {}

        def run(framework, function, processes, *arguments, expect=None):
            if framework not in running:
                running[framework] = stack.enter_context(
                    Processes(*MODULES[framework], env=QUIET | FLAGS.get(framework, {}))
                )
            answers = running[framework].run(function, processes, *arguments, timeout=SECONDS)
            failed = [
                a
                for a in answers
                if isinstance(a, dict) and {"error", "signal"} - {expect} & set(a)
            ]
            assert not failed, f"{framework} in {processes} processes, {function}: {failed}"
            return answers

        yield run


@pytest.fixture(scope="session")
def torture():
    """Whether to try what takes minutes, too."""
    return os.environ.get("SHARDCKPT_TORTURE") == "1"
