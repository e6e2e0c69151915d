"""The bench measures what it says, on a small state; that figures are good is not a test."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_bench_runs_all_subjects_in_turn_and_tells_rates_and_ratios(tmp_path):
    command = [sys.executable, "-m", "tools.bench", "--part", "64", "--rounds", "1", "--storage", "tmpfs", "--state", "llama"]
    some = ["--group", "torch", "--operation", "save", "--operation", "restore", "--operation", "columns"]
    child = subprocess.run([*command, *some, "--json", tmp_path / "found.json"], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert child.returncode == 0, child.stderr[-3000:]
    found = json.loads((tmp_path / "found.json").read_text())
    told = {(r["operation"], r["subject"]): r for r in found["results"]}
    nbytes = told["save", "shardckpt"]["nbytes"]
    assert {s for o, s in told if o == "save"} == {"write(2)", "shardckpt", "DCP", "DCP, at its best", "safetensors", "torch.save"}
    for who in ("shardckpt", "DCP"):
        assert nbytes <= told["save", who]["written_bytes"] <= 1.03 * nbytes + (1 << 20)
        assert told["restore", who]["read_bytes"] >= nbytes
    assert told["columns", "shardckpt"]["read_bytes"] <= nbytes / 2
    assert all(len(r["seconds"]) == 1 for r in told.values())
    again = subprocess.run(
        [sys.executable, "-m", "tools.bench", "--from", tmp_path / "found.json", "--compare", tmp_path / "found.json"],
        cwd=ROOT, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert again.returncode == 0, again.stderr
    assert "save ≥ 0.9 × write(2)" in again.stdout


def test_a_ratio_that_fell_is_told(tmp_path):
    sys.path.insert(0, str(ROOT))
    try:
        from tools.bench.baseline import worse
    finally:
        sys.path.remove(str(ROOT))

    def run(ours: float) -> dict:
        where = {"storage": "tmpfs", "state": "llama", "group": "torch", "operation": "save", "nbytes": 10}
        return {"results": [where | {"subject": "shardckpt", "median": ours}, where | {"subject": "DCP", "median": 1.0}]}

    assert worse(run(1.0), run(1.1)) == []
    assert worse(run(1.0), run(1.5)) == ["tmpfs, llama, torch, save: shardckpt / DCP was 1.00 and is 0.67"]
