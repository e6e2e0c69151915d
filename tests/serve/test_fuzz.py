"""Requests that nobody would make: made from the OpenAPI document, and of raw bytes."""

import random
import socket
from contextlib import suppress
from urllib.parse import quote, urlencode

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from job_services import operated
from schemathesis.specs.openapi.checks import ignored_auth, positive_data_acceptance
from serving import save_run

from shardckpt.serve.jobs import journal
from shardckpt.serve.jobs.runner import JobRunner


def operations(schema):
    return [result.ok() for result in schema.get_all_operations()]


@pytest.fixture(scope="module")
def described(service):
    return schemathesis.openapi.from_url(f"{service.url}/v1/openapi.json")


@pytest.mark.long
def test_answers_conform_to_the_openapi_document(service, described):
    checked = 0
    for operation in operations(described):

        @settings(
            max_examples=30, deadline=None, suppress_health_check=list(HealthCheck), database=None
        )
        @given(case=operation.as_strategy())
        def answers(case):
            reply = case.call()
            assert reply.status_code < 500, (case.as_curl_command(), reply.text)
            # Most ids that fit the schema are those of no checkpoint.
            case.validate_response(reply, excluded_checks=[positive_data_acceptance])

        answers()
        checked += 1
    assert checked > 10


@pytest.mark.long
def test_requests_for_jobs_conform_to_the_openapi_document(tmp_path, monkeypatch):
    # The requests are tested, not the thousand jobs.
    monkeypatch.setattr(JobRunner, "start", lambda _: None)
    monkeypatch.setattr(journal, "MOST_QUEUED", 100_000)
    save_run(tmp_path / "runs" / "llama", (10,))
    with operated(tmp_path, ("lab", tmp_path / "runs")) as lab:
        headers = {"Authorization": f"Bearer {lab.tokens['admin']}"}
        described = schemathesis.openapi.from_url(
            f"{lab.service.url}/v1/openapi.json", headers=headers
        )
        posts = [one for one in operations(described) if one.method == "post"]
        for operation in posts:

            @settings(
                max_examples=20,
                deadline=None,
                suppress_health_check=list(HealthCheck),
                database=None,
            )
            @given(case=operation.as_strategy())
            def answers(case):
                reply = case.call(headers=headers)
                assert reply.status_code < 500, (case.as_curl_command(), reply.text)
                case.validate_response(
                    reply, excluded_checks=[positive_data_acceptance, ignored_auth]
                )

            answers()
        assert len(posts) >= 14
        assert [one.name for one in (tmp_path / "runs").iterdir()] == ["llama"]
        for number in [one["number"] for one in lab.ask("/v1/jobs?limit=5").json["jobs"]]:
            assert lab.ask(f"/v1/jobs/{number}/cancel", "POST").json["state"] == "cancelled"


IDS = st.sampled_from(
    [
        *("lab/llama/10", "lab/llama", "lab", "", "lab/llama/10/x", "lab/../lab/llama/10"),
        *("%", "\ud800", "\x00", "é", "a" * 3000, "//", "lab//llama"),
    ]
)
WORDS = st.sampled_from(
    [
        *("", "tensors/model/head", "layouts/model/none", "statistics/model/scale", "plan"),
        *(
            "tensors/",
            "tensors/\x00",
            "nothing",
            "tensors/\ud800",
            "model.safetensors",
            "zarr.json",
        ),
    ]
)
ODD = [
    "0:1",
    "0:8,0:8",
    "-1",
    ":,:",
    "1e9",
    "9" * 30,
    "model=2",
    "data=1x2",
    "**=(model)",
    "(((",
    "[",
    "*" * 200,
    "inf",
    "true",
    "\ud800",
]
TEXTS = st.text(max_size=30) | st.sampled_from(ODD)
NAMES = st.sampled_from(
    [
        *(
            "box",
            "format",
            "budget",
            "mesh",
            "rule",
            "preset",
            "dtype",
            "only",
            "rate",
            "memory_limit",
            "metric",
            "step",
        ),
        *(
            "cursor",
            "limit",
            "before",
            "subject",
            "checkpoint",
            "a",
            "b",
            "include",
            "max_shard_size",
            "ties",
            "under",
            "text",
            "name",
            "values",
        ),
    ]
)
AREAS = st.sampled_from(
    [
        "v1/checkpoints",
        "files",
        "zarr",
        "raw",
        "ui/run",
        "ui/checkpoint",
        "ui/tensor",
        "ui/plan",
        "ui/job",
        "ui/jobs",
        "ui/health",
        "v1/jobs",
        "v1/verifications",
        "api/models",
    ]
)


@settings(max_examples=400, deadline=None)
@given(ident=IDS, word=WORDS, query=st.lists(st.tuples(NAMES, TEXTS), max_size=3), area=AREAS)
def test_no_text_makes_the_service_fail(service, ident, word, query, area):
    path = quote(f"/{area}/{ident}/{word}".rstrip("/"), errors="surrogatepass")
    reply = service.ask(f"{path}?{urlencode(query, errors='surrogatepass')}")
    assert reply.status < 500, (path, query, reply)


def test_random_bytes_leave_the_service_as_it_was(service):
    rng = random.Random(0)
    start = (
        b"GET /v1/runs?limit=5 HTTP/1.1\r\n"
        b"Host: localhost\r\n"
        b"Range: bytes=0-5\r\n"
        b"Connection: close\r\n"
        b"\r\n"
    )
    for _ in range(150):
        data = bytearray(start)
        for _ in range(rng.randrange(1, 8)):
            at = rng.randrange(len(data))
            data[at : at + rng.randrange(2)] = rng.randbytes(rng.randrange(3))
        with (
            socket.create_connection(service.address, timeout=60) as one,
            suppress(ConnectionError),
        ):
            one.sendall(data)
            one.shutdown(socket.SHUT_WR)
            while part := one.recv(65536):
                assert b" 500 " not in part[:20], bytes(data)
    assert service.get("/v1/runs?limit=5")["complete"]
