"""Fixtures of the torture tests: jobs run several at a time, because most of the time they wait for
dead processes."""

from __future__ import annotations

import os
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from processes import Processes

AT_ONCE = 6
FULL = os.environ.get("SHARDCKPT_TORTURE") == "1"
"""Every kill point, and not a sample of them."""
OUTCOMES = "outcomes"
"""Property of a test: of so many tries the outcome was this."""


class Jobs:
    """Jobs whose processes are forked when they are run; each is for one thread at a time."""

    def __init__(self, stack):
        self._stack = stack
        self._free = []

    @contextmanager
    def one(self):
        """One of them, for as long as the block runs."""
        try:
            server = self._free.pop()
        except IndexError:
            server = self._stack.enter_context(Processes("torture_hosts"))
        try:
            yield server
        finally:
            self._free.append(server)

    def run(self, *arguments, **options):
        with self.one() as job:
            return job.run(*arguments, **options)

    def map(self, function, *arguments):
        """function(job, *arguments) for each row of arguments, several at once; what they return,
        or the first failure."""

        def call(*row):
            with self.one() as job:
                return function(job, *row)

        with ThreadPoolExecutor(AT_ONCE) as pool:
            return list(pool.map(call, *arguments))


@pytest.fixture(scope="session")
def jobs():
    with ExitStack() as stack:
        yield Jobs(stack)


@pytest.fixture(scope="session")
def full():
    return FULL


def pytest_terminal_summary(terminalreporter):
    """Say what became of the tortured: for each test a table of how often it tried, and of the
    outcomes."""
    tables = defaultdict(list)
    for report in [
        *terminalreporter.stats.get("passed", []),
        *terminalreporter.stats.get("failed", []),
    ]:
        outcomes = dict(report.user_properties).get(OUTCOMES)
        if report.when == "call" and outcomes is not None:
            test, _, case = report.nodeid.rpartition("::")[2].partition("[")
            tables[test].append((case.rstrip("]"), outcomes))
    for test, rows in tables.items():
        names = sorted({name for _, outcomes in rows for name in outcomes})
        total = {name: sum(outcomes.get(name, 0) for _, outcomes in rows) for name in names}
        width = max(len(case) for case, _ in rows)
        terminalreporter.section(test, sep="-")
        terminalreporter.write_line("  ".join([" " * width, "tries", *names]))
        for case, outcomes in [*rows, ("all", total)]:
            counts = [f"{outcomes.get(name, 0):{len(name)}}" for name in names]
            terminalreporter.write_line(
                "  ".join([f"{case:{width}}", f"{sum(outcomes.values()):5}", *counts])
            )


def pytest_collection_modifyitems(items):
    """In full these tests take long."""
    if FULL:
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.timeout(3600), append=False)
