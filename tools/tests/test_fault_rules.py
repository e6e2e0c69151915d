"""Faults that requests meet, and the operations that requests ask for; the proxy itself is in
`test_fault_proxy`."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
from fault_requests import Operation, classify
from fault_rules import FAULTS, Link, Rule, RuleBook
from hypothesis import given
from hypothesis import strategies as st

UPLOAD = Operation("gcs", "POST", "upload", "bucket", "run/checkpoint.json")


@given(skip=st.integers(0, 5), times=st.none() | st.integers(0, 5), others=st.integers(0, 3))
def test_a_rule_fires_from_the_kth_matching_request_on_as_often_as_it_says(skip, times, others):
    book = RuleBook()
    book.add(Rule("reset", kinds=("upload",), objects="*/checkpoint.json", skip=skip, times=times))
    fired = []
    for _ in range(12):
        for _ in range(others):
            assert (
                book.decide(Operation("gcs", "GET", "read", "bucket", "run/checkpoint.json")).rule
                is None
            )
        fired.append(book.decide(UPLOAD).rule is not None)
    stop = 12 if times is None else skip + times
    assert fired == [skip <= i < stop for i in range(12)]


def test_a_rule_with_a_probability_fires_the_same_way_for_the_same_seed():
    def fired(seed):
        book = RuleBook()
        book.add(Rule("reset", probability=0.3, times=None, seed=seed))
        return [book.decide(UPLOAD).rule is not None for _ in range(1000)]

    assert fired(1) == fired(1) != fired(2)
    assert 230 < sum(fired(1)) < 370


def test_the_first_rule_that_breaks_a_request_decides_and_delays_add_up():
    book = RuleBook()
    first, second = Rule("status", status=429), Rule("reset")
    book.add(
        Rule("latency", seconds=1),
        first,
        Rule("latency", seconds=2),
        second,
        Rule("bandwidth", bytes_per_second=1),
    )
    fate = book.decide(UPLOAD)
    assert (fate.rule, fate.delay, len(fate.links)) == (first, 3, 1)
    assert book.decide(UPLOAD).rule is second, "which has not been used up by the first request"
    assert book.decide(UPLOAD).rule is None


def test_rules_hold_as_long_as_the_block_does():
    book = RuleBook()
    outage = Rule("status", times=None)
    with book.during(outage):
        assert all(book.decide(UPLOAD).rule is outage for _ in range(10))
        assert book.fired() == [(outage, 10)]
    assert book.decide(UPLOAD).rule is None


@given(
    st.sampled_from(sorted(FAULTS)),
    st.integers(0, 9),
    st.none() | st.integers(1, 9),
    st.sampled_from([(), ("read", "list")]),
)
def test_a_rule_is_the_same_after_json(fault, skip, times, kinds):
    rule = Rule(fault, skip=skip, times=times, kinds=kinds, bytes_per_second=1)
    assert Rule.from_json(json.loads(json.dumps(asdict(rule)))) == rule


@pytest.mark.parametrize(
    "doc",
    [
        [],
        {},
        {"fault": "gremlins"},
        {"fault": "reset", "kinds": ["write"]},
        {"fault": "reset", "when": 1},
        {"fault": "status", "status": 200},
        {"fault": "bandwidth"},
    ],
)
def test_a_rule_that_means_nothing_is_refused(doc):
    with pytest.raises(ValueError):
        Rule.from_json(doc)


def test_bytes_go_through_a_slow_line_one_after_another():
    line = Link(bytes_per_second=100)
    assert [line.reserve(50, now=0), line.reserve(50, now=0), line.reserve(50, now=10)] == [
        0.5,
        1.0,
        0.5,
    ]


def test_requests_of_s3_are_told_apart():
    assert classify("PUT", "/b/k%20y?partNumber=1&uploadId=x") == Operation(
        "s3", "PUT", "upload", "b", "k y", {"partNumber": "1", "uploadId": "x"}
    )
    kinds = {
        ("POST", "/b/k?uploads"): "upload",
        ("GET", "/b/k"): "read",
        ("HEAD", "/b/k"): "stat",
        ("DELETE", "/b/k"): "delete",
        ("POST", "/b?delete"): "delete",
        ("GET", "/b/?list-type=2&prefix=k"): "list",
        ("PUT", "/b"): "other",
        ("HEAD", "/b"): "other",
        ("GET", "/"): "other",
    }
    assert {request: classify(*request).kind for request in kinds} == kinds
