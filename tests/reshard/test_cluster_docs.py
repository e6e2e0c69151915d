"""The recipes of docs/clusters.md do what they say, as they stand there."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from clusters import dask_cluster, ray_cluster
from paths import DOCS

import shardckpt

DOCUMENT = (DOCS / "clusters.md").read_text()
PATIENCE = 120
SOURCE, TARGET = "runs/7b/step_1000", "serving/7b"


def section(title):
    (text,) = re.findall(rf"^## {title}\n(.*?)(?=^## |\Z)", DOCUMENT, re.MULTILINE | re.DOTALL)
    return text


def block(title, language):
    (text,) = re.findall(rf"^```{language}\n(.*?)^```", section(title), re.MULTILINE | re.DOTALL)
    return text


def commands(title):
    """Commands typed at a prompt."""
    return [line[2:] for line in block(title, "console").splitlines() if line.startswith("$ ")]


@pytest.fixture
def place(tmp_path):
    """A directory to work in, with a checkpoint that a preset is for."""
    model = {
        "model.layers.0.self_attn.q_proj.weight": np.random.default_rng(0).random((64, 32)),
        "model.norm.weight": np.ones(64),
    }
    shardckpt.save(tmp_path / SOURCE, {"model": model, "step": 1000})
    return tmp_path


def run(command, place, **env):
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=place,
        env={**os.environ, "PATH": path, **env},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def check(place):
    made = shardckpt.open(place / TARGET)
    assert made.verify().ok
    weight = "model/model.layers.0.self_attn.q_proj.weight"
    assert made.info(weight).layout.mesh.shape == (4,)
    assert made.read(weight).tobytes() == shardckpt.open(place / SOURCE).read(weight).tobytes()


SBATCH = """#!/bin/bash
# Does what SLURM does, here and now: an array one after the other; --wrap; --parsable.
for word; do
  case $word in
    --dependency=afterok:42 | --parsable) ;;
    --wrap) wrapped=1 ;;
    *) if [ "$wrapped" ]; then exec bash -c "$word"; fi; script=$word ;;
  esac
done
last=$(sed -n 's/^#SBATCH --array=0-//p' "$script")
for k in $(seq 0 "$last"); do
  SLURM_ARRAY_TASK_ID=$k SLURM_ARRAY_TASK_COUNT=$((last + 1)) bash "$script" >> log || exit 1
done
echo 42
"""


@pytest.mark.slow
def test_a_slurm_array_and_the_job_after_it(place, tmp_path_factory):
    (place / "reshard.sbatch").write_text(block("SLURM", "sh"))
    programs = tmp_path_factory.mktemp("bin")
    (programs / "sbatch").write_text(SBATCH)
    (programs / "sbatch").chmod(0o755)
    path = os.pathsep.join([str(programs), str(Path(sys.executable).parent), os.environ["PATH"]])
    run("\n".join(["set -e", *commands("SLURM")]), place, PATH=path)
    assert (place / "log").read_text().count("written") == 4
    check(place)


@pytest.mark.slow
def test_an_indexed_job_of_kubernetes(place):
    spec = yaml.safe_load(block("Kubernetes", "yaml"))["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    assert container["command"] == ["sh", "-c"]
    (command,) = container["args"]
    assert f"/{spec['completions']}" in command
    for index in range(spec["completions"]):
        run(command, place, JOB_COMPLETION_INDEX=str(index))
    (commit,) = commands("Kubernetes")
    run(commit, place)
    check(place)


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("title", "start", "address"),
    [
        pytest.param("Ray", ray_cluster, "127.0.0.1:10001", marks=pytest.mark.ray),
        pytest.param("Dask", dask_cluster, "127.0.0.1:8786", marks=pytest.mark.slow),
    ],
)
def test_a_command_for_a_cluster(place, title, start, address):
    (command,) = commands(title)
    with start() as cluster:
        assert address in command, "the port that such a cluster has unless it is told otherwise"
        out = run(f"{command.replace(address, cluster.url.partition('://')[2])} --json", place)
    assert json.loads(out)["committed"]
    check(place)


def test_figures_are_those_of_the_code():
    from shardckpt.cli.exits import STATUS
    from shardckpt.reshard import clusters, execute, options
    from shardckpt.streaming import memory

    assert f"waits {clusters.WORKER_TIMEOUT // 60} minutes" in DOCUMENT
    assert f"status {STATUS['coordination']} " in DOCUMENT
    assert execute.MOST_LOSSES == 3
    assert "three workers die during the same task" in DOCUMENT
    assert f"{memory.PROCESS_BYTES >> 20} MiB for Python" in DOCUMENT
    assert f"default: {options.DEFAULT_MEMORY_LIMIT >> 20} MiB" in DOCUMENT
    assert f"about {options.DEFAULT_TASK_BYTES >> 20} MiB" in DOCUMENT
