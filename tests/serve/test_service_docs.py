"""The commands of docs/service.md run: first by a reader on the same machine, then over TLS by an
operator with a token."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from paths import DOCS
from safetensors.numpy import load_file
from serving import save_run

import shardckpt

PAGE = (DOCS / "service.md").read_text()
START, READ, TOKENS, CLIENT, HUB, JOBS, PROXIED = re.findall(
    r"^```sh\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL
)


def commands(block):
    """The commands of a block, with continued lines joined."""
    return block.replace("\\\n", " ").splitlines()


@pytest.fixture
def place(tmp_path):
    """The directories that the page names, and a certificate for this machine."""
    save_run(tmp_path / "runs" / "run-7", (10, 100))
    save_run(tmp_path / "llama" / "run-7", (100,))
    make = (
        "openssl req -x509 -newkey rsa:2048 -nodes -keyout key.pem -out cert.pem -subj "
        "/CN=localhost -addext subjectAltName=DNS:localhost"
    )
    subprocess.run(make.split(), cwd=tmp_path, check=True, capture_output=True)
    return tmp_path


def environment(place, **more):
    here = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "SSL_CERT_FILE": f"{place}/cert.pem",
    }
    return {**os.environ, **here, "CURL_CA_BUNDLE": f"{place}/cert.pem", **more}


def on_this_machine(command, place):
    """The command with this machine's directories in place of the page's."""
    words = {
        "gs://bucket/llama": f"{place}/llama",
        "/data/runs": f"{place}/runs",
        "/var/lib/shardckpt": f"{place}/state",
        "0.0.0.0": "127.0.0.1",
    }
    for theirs, ours in words.items():
        command = command.replace(theirs, ours)
    return command


@contextmanager
def served(command, place):
    """The service that a command starts, on a free port, until the end of the block; its
    address."""
    words = [*shlex.split(on_this_machine(command, place)), "--port", "0"]
    log = place / "log"
    with log.open("wb") as file:
        service = subprocess.Popen(
            words, cwd=place, env=environment(place), stdout=file, stderr=file
        )
    try:
        end = time.monotonic() + 60
        while not (match := re.search(r"(https?)://127\.0\.0\.1:(\d+)", log.read_text())):
            assert service.poll() is None, log.read_text()
            assert time.monotonic() < end, log.read_text()
            time.sleep(0.05)
        yield f"localhost:{match[2]}"
    finally:
        service.terminate()
        service.wait(60)


def run(command, place, **environ):
    """Output of a command. It succeeds; only a job may end before it is cancelled."""
    done = subprocess.run(
        ["sh", "-c", command],
        cwd=place,
        env=environment(place, **environ),
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0 or "only one that waits or runs can be cancelled" in done.stderr, (
        command,
        done.stdout,
        done.stderr,
    )
    return done.stdout


@pytest.mark.long
def test_a_reader_lists_runs_and_downloads_a_file(place):
    _, start = commands(START)
    with served(start, place) as address:
        runs, checkpoints, _ = (
            run(line.replace("localhost:8470", address).replace("curl", "curl --fail -s"), place)
            for line in commands(READ)
        )
        hub = (
            HUB.replace("localhost:8470", address)
            .replace("AutoModelForCausalLM", "AutoConfig")
            .replace("shardckpt_…", "none")
        )
        run('echo \'{"model_type": "llama"}\' > runs/run-7/config.json', place)
        run(hub, place, HF_HOME=str(place / "hf"))
    assert {one["run"] for one in json.loads(runs)["runs"]} == {"llama/run-7", "scratch/run-7"}
    # Its loss is -6.
    assert [one["id"] for one in json.loads(checkpoints)["checkpoints"]] == ["scratch/run-7/100"]
    assert sorted(load_file(place / "model.safetensors")) == [
        "embed.weight",
        "head",
        "none",
        "scale",
    ]


@pytest.mark.long
def test_an_operator_starts_jobs_over_tls(place):
    token, start, ask = commands(TOKENS)
    (secret,) = re.findall(r"shardckpt_[\w-]+", run(token, place))
    with served(start, place) as address:

        def here(command):
            return (
                command.replace("host:8470", address)
                .replace("shardckpt_…", secret)
                .replace("curl", "curl --fail -s")
            )

        headers = {"SHARDCKPT_HTTP_HEADERS": f"https://{address} Authorization: Bearer {secret}"}
        assert "llama/run-7" in run(here(ask), place)
        assert "llama/run-7" in run(here(CLIENT), place, **headers)
        copy, jobs, reshard, cancel = commands(JOBS)
        run(here(copy), place, **headers)
        number = json.loads(run(here(reshard).replace("**/w1", "**/embed.weight"), place))["number"]
        run(here(jobs), place, **headers)
        run(here(cancel.replace("2851304417", str(number))), place, **headers)
    assert shardckpt.open(place / "llama/kept/100").verify().ok
