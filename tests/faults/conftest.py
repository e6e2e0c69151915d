"""Buckets behind the fault proxy."""

from __future__ import annotations

import uuid
from contextlib import ExitStack
from dataclasses import replace

import pytest
from faults import faulty_cloud

from shardckpt.writing import packed


@pytest.fixture(scope="module")
def buckets():
    """For each object store that a test has asked for: a new bucket, behind a proxy of its own."""
    with ExitStack() as stack:
        made = {}

        def bucket_on(server):
            if server.scheme not in made:
                emulator = replace(server, bucket=server.new_bucket(f"faults-{uuid.uuid4().hex}"))
                made[server.scheme] = stack.enter_context(faulty_cloud(emulator))
            return made[server.scheme]

        yield bucket_on


@pytest.fixture(params=["gs", "s3"])
def bucket(request, buckets):
    """That on one of them; a test may say on which."""
    return buckets(request.getfixturevalue("gcs_server" if request.param == "gs" else "s3_server"))


@pytest.fixture
def cloud(bucket, monkeypatch):
    """The same, and a small state has several data files."""
    monkeypatch.setattr(packed, "OBJECT_BYTES", 40_000)
    return bucket
