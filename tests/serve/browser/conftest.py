"""A service over runs with hostile names."""

from dataclasses import replace

import numpy as np
import pytest
from serving import serving

import shardckpt
from shardckpt import Mesh, PartitionSpec, SaveOptions, Sharding
from shardckpt.runs.pinning import pin, tag
from shardckpt.serve.access.tokens import add_token
from shardckpt.serve.jobs.journal import Journal

EVIL = [
    "</script><img src=x onerror=alert(1)>",
    "\"'><svg onload=alert(2)>",
    "&lt;b&gt;\u202e{{7*7}}",
    "a" * 300,
    "\ud800",
]


@pytest.fixture(scope="session")
def shown(tmp_path_factory):
    """A service over a run with metrics and steps in every state."""
    top = tmp_path_factory.mktemp("shown")
    rng = np.random.default_rng(0)
    shardings = {
        "model/w*": Sharding(Mesh((4, 2), ("data", "model")), PartitionSpec("data", "model"))
    }
    for step in range(100, 900, 100):
        state = {
            "model": {f"w{i}": rng.normal(size=(64, 32)).astype(np.float32) for i in range(3)},
            "step": step,
        }
        state["odd"] = {name: np.ones(3) for name in EVIL}
        metrics = {"loss": 300 / step, "</title><b>": step, "worst": "nan"}
        shardckpt.save(
            top / "llama" / str(step),
            state,
            options=SaveOptions(shardings=shardings, metadata={"metrics": metrics}),
        )
    shardckpt.save(top / "<img src=x onerror=alert(5)>" / "1", {"w": np.ones(2)})
    pin(top / "llama" / "300")
    tag(top / "llama" / "200", "best")
    (top / "llama" / "500" / "checkpoint.json").write_text("{}")
    (top / "llama" / "800" / "checkpoint.json").unlink()
    with serving(("lab", top)) as service:
        yield service


@pytest.fixture(scope="session")
def upkeep(tmp_path_factory):
    """A service that runs jobs, with hostile names, damage and jobs that have ended; and a token
    with the scope `admin`."""
    top = tmp_path_factory.mktemp("upkeep")
    rng = np.random.default_rng(0)
    shardings = {
        "model/w*": Sharding(Mesh((4, 2), ("data", "model")), PartitionSpec("data", "model"))
    }
    options = SaveOptions(shardings=shardings, metadata={"metrics": {"loss": 2.5}})
    for step in range(100, 700, 100):
        state = {
            "model": {f"w{i}": rng.normal(size=(256, 128)).astype(np.float32) for i in range(8)},
            "step": step,
        }
        shardckpt.save(top / "lab" / "llama" / str(step), state, options=options)
    shardckpt.save(top / "lab" / EVIL[0] / "1", {"w": np.ones(2)})
    tag(top / "lab" / "llama" / "200", "best")
    (top / "lab" / "llama" / "500" / "checkpoint.json").write_text("{}")
    (top / "state").mkdir()
    journal = Journal(top / "state")
    damage = [
        {
            "file": f"d/{i}",
            "tensor": f"model/{name}",
            "box": "[0:128, 0:64]",
            "reason": "crc32c differs",
        }
        for i, name in enumerate(EVIL)
    ]
    numbers = []
    for step, damaged in ((100, 0), (300, len(EVIL)), (400, 0)):
        ident = f"lab/llama/{step}"
        job = None
        if step != 100:
            asked = {"checkpoint": ident}
            job = journal.add(
                "verify", asked, asked, subject=ident, destination=None, who=EVIL[1], key=None
            )[0].number
            numbers.append(job)
        begun = journal.begin_verification(ident, shardckpt.open(top / ident).record.attempt, job)
        over = replace(
            begun, chunks=96, total=96, bytes=1 << 30, damaged=damaged, damage=damage[:damaged]
        )
        journal.update_verification(over, over=True)
        if job is not None:
            journal.begin(job)
            result = {
                "ok": not damaged,
                "chunks": 96,
                "bytes": 1 << 30,
                "damaged": damaged,
                "damage": damage[:damaged],
            }
            journal.end(job, "done", result=result)
    for asked in (
        {"checkpoint": f"lab/{EVIL[0]}/1", "to": f"lab/{EVIL[1]}", "reason": EVIL[2]},
        {"checkpoint": "lab/llama/100", "to": "lab/x"},
    ):
        job = journal.add(
            "copy",
            asked,
            asked,
            subject=asked["checkpoint"],
            destination=asked["to"],
            who="ann",
            key=None,
        )[0].number
        numbers.append(job)
        journal.begin(job)
        journal.note_progress(job, 37, 100)
        journal.end(job, "failed", error={"code": "storage", "message": f"cannot write {EVIL[0]}."})
    journal.close()
    token = add_token(top / "tokens", "ann", "admin")
    with serving(("lab", top / "lab"), token_file=top / "tokens", state=top / "state") as service:
        service.jobs = numbers
        yield service, token
