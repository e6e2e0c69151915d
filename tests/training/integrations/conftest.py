"""Jobs of several processes that run the functions of one module of `tests/children`."""

from __future__ import annotations

import pytest
from processes import Processes

ENVIRONMENT = {"PYTHONWARNINGS": "ignore", "USE_TORCH_XLA": "0"}


@pytest.fixture(scope="module")
def job(request):
    """Runs a function of the children's module that the tests' module names, in each process of a
    job; what they returned."""
    with Processes(request.module.CHILDREN, env=ENVIRONMENT) as processes:

        def run(function, ranks, *arguments):
            answers = processes.run(function, ranks, *arguments, timeout=250)
            assert not [a for a in answers if "error" in a], answers
            return answers

        yield run
