"""The statements of docs/ about training loops hold."""

import json
import re
import subprocess
import sys

import jsonschema
import pytest
from paths import DOCS
from training_runs import state

from shardckpt.runs.pinning import tag


@pytest.mark.long
def test_the_code_of_the_guide_runs_and_does_what_it_says(tmp_path):
    blocks = re.findall(
        r"^```python\n(.*?)^```", (DOCS / "training.md").read_text(), re.MULTILINE | re.DOTALL
    )
    assert len(blocks) == 7
    after = """
        mgr = shardckpt.CheckpointManager("runs/7b")
        assert mgr.all_steps(superseded=True) == [100, 110, 120, 130, 140, 150], mgr.steps()
    """
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "\n".join([*blocks, *(line.strip() for line in after.splitlines())]),
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr


def validate(document, kind):
    schema = json.loads((DOCS / "format.schema.json").read_text())
    jsonschema.Draft202012Validator({**schema, "$ref": f"#/$defs/{kind}"}).validate(document)


def test_markers_and_the_file_of_the_job_conform_to_the_schema(run):
    run.train(1, 2)
    with run.manager() as manager:
        manager.pin(1)
        tag(manager.url(1), "best")
        manager.restore(step=1)
        manager.save(3, state(3))
    for file, kind in (
        ("1/pinned.json", "markerFile"),
        ("2/superseded.json", "markerFile"),
        ("job.json", "jobFile"),
    ):
        document = json.loads((run.root / file).read_text())
        validate(document, kind)
        assert (
            kind == "jobFile" or (run.root / file).with_name(document["record"]["attempt"]).is_dir()
        )
