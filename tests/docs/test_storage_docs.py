"""The statements of docs/storage.md about object stores hold."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import uuid

import numpy as np
import pytest
from emulators import environment
from fault_proxy import FaultProxy
from paths import DOCS

import shardckpt
from shardckpt.io.buckets import cloud as settings
from shardckpt.io.store import Store

DOCUMENT = (DOCS / "storage.md").read_text()
VARIABLES = re.compile(r"\b(?:SHARDCKPT|AWS|AZURE|GOOGLE|TENSORSTORE|STORAGE)_[A-Z0-9_]+\b")
STATE = {"w": np.arange(100_000, dtype=np.float32), "step": 1}


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", DOCUMENT, re.MULTILINE | re.DOTALL)


def test_its_code_runs(gcs_server):
    (code,) = blocks("python")
    check = "assert state['step'] == 100 and state['model']['w'].sum() == 512 * 512"
    variables = {
        "STORAGE_EMULATOR_HOST": gcs_server.endpoint,
        "PATH": "",
        "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
    }
    run = subprocess.run(
        [sys.executable, "-c", f"{code}\n{check}"],
        env=variables,
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert run.returncode == 0, run.stderr


def test_every_variable_is_one_that_the_code_documents_and_the_other_way_round():
    internal = {"GOOGLE_AUTH_TOKEN_FOR_TESTING"}
    assert (
        set(VARIABLES.findall(DOCUMENT)) - {"SHARDCKPT_NO_EXTENSION"}
        == set(VARIABLES.findall(settings.__doc__)) - internal
    )


def test_the_defaults_are_those_of_the_code():
    assert f"| {settings.BUCKET['write']:g}; in a save, divided by its processes |" in DOCUMENT
    assert f"| {settings.BUCKET['read']:g}; in a save, divided by its processes |" in DOCUMENT
    assert f"`SHARDCKPT_RETRY_SECONDS` | {settings._RETRY_SECONDS:g} |" in DOCUMENT
    assert (
        f"`TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS` | {settings._STALLED_SECONDS:g}, or" in DOCUMENT
    )


def test_the_policy_names_the_actions_that_are_needed():
    (policy,) = blocks("json")
    objects, bucket = json.loads(policy)["Statement"]
    assert objects["Action"] == ["s3:GetObject", "s3:PutObject", "s3:DeleteObject"]
    assert bucket["Action"] == "s3:ListBucket"


READS = {"read"}


@pytest.mark.parametrize("layout", ["packed", "zarr"])
def test_requests_need_the_rights_in_the_table_and_no_others(cloud, layout):
    """Of S3: on GCS some of the uploads replace an object, which takes the right to delete."""
    with FaultProxy(cloud.endpoint) as proxy, environment(cloud.env(proxy.url)):
        url = f"{cloud.scheme}://{cloud.new_bucket(f'b-{uuid.uuid4().hex}')}/run"

        def kinds(use):
            proxy.traffic.reset()
            use()
            kinds = {e.operation.kind for e in proxy.traffic.exchanges()}
            return {"read" if kind == "stat" else kind for kind in kinds}  # one right

        def save(**options):
            shardckpt.save(url, STATE, options=shardckpt.SaveOptions(layout=layout, **options))

        # The committer lists the records of several processes, not its own.
        assert kinds(save) == READS | {"upload"}
        assert kinds(lambda: shardckpt.restore(url)) <= READS
        assert kinds(lambda: shardckpt.open(url).verify()) <= READS
        assert kinds(lambda: save(overwrite=True)) == READS | {"upload", "list", "delete"}
        assert len({key.partition("/")[0] for key in Store.open(url).list()}) == 2
