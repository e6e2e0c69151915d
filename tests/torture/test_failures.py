"""Each operation of saves, commits, collections, deletions, managers and reshards fails once, on a
disk and in buckets.

Data that was complete is never lost by it: the same call, the next commit or the next save
publishes it.
"""

from __future__ import annotations

import shutil
import uuid
from collections import Counter
from itertools import count

import pytest
from failing import SCENARIOS, Fault, failing
from faults import Rule, faulty_cloud

from shardckpt.io.store import Store

pytestmark = pytest.mark.slow
STRIDE = 7
"""Unless in full, every so many-th operation, with another beginning in each scenario."""
STRIDE_OF_REQUESTS = 5


def begins(name, stride):
    return [*SCENARIOS].index(name) * 3 % stride


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", SCENARIOS)
def test_an_operation_on_a_disk_that_fails_loses_nothing(tmp_path, full, name, record_property):
    scenario, outcomes, stride = SCENARIOS[name], Counter(), 1 if full else STRIDE
    base = tmp_path / "base"
    base.mkdir()
    scenario.prepare(str(base / "place"))
    for k in count(0 if full else begins(name, STRIDE), stride):
        root = tmp_path / str(k)
        shutil.copytree(base, root)
        with failing(root, k) as fault:
            error = scenario.run(str(root / "place"))
        outcomes[scenario.check(str(root / "place"), fault, error)] += bool(fault.operation)
        shutil.rmtree(root)
        if not fault.operation:
            break
    record_property("outcomes", dict(outcomes))
    assert sum(outcomes.values()) > 30 / stride


@pytest.fixture(scope="module", params=["gs", "s3"])
def cloud(request):
    server = request.getfixturevalue("gcs_server" if request.param == "gs" else "s3_server")
    with faulty_cloud(server) as faulty:
        yield faulty


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.parametrize("fault", ["refused", "lost answer"])
def test_a_request_to_a_bucket_that_fails_loses_nothing(cloud, full, name, fault, record_property):
    """A refused request is not repeated; one whose answer is lost is, and has had its effect."""
    scenario, outcomes, stride = SCENARIOS[name], Counter(), 1 if full else STRIDE_OF_REQUESTS
    breaking = (
        {"fault": "status", "status": 403} if fault == "refused" else {"fault": "lost-answer"}
    )
    bucket = cloud.place()
    base = Store.open(f"{bucket}/base/place")
    scenario.prepare(str(base))
    prepared = [(key, key) for key in base.list()]
    for k in count(0 if full else begins(name, stride), stride):
        # alone: a check of neighbours would read one more each time, without end.
        url = f"{bucket}/{uuid.uuid4().hex}/place"
        Store.open(url).copy_from(base, prepared)
        with cloud.breaking(Rule(**breaking, skip=k)):
            error = scenario.run(url)
            broken = cloud.injected()
        outcomes[scenario.check(url, Fault(), error)] += broken
        if not broken:
            break
    record_property("outcomes", dict(outcomes))
    assert sum(outcomes.values()) > 10 / stride
