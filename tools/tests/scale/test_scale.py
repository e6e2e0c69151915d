"""`python -m tools.scale` measures what it says, at its smallest; that figures are good is not a
test."""

import json
import subprocess
import sys
from xml.etree import ElementTree as ET

import pytest
from paths import ROOT

from tools.scale.chart import chart
from tools.scale.growth import exponent, per_each
from tools.scale.lab import tables
from tools.scale.points import FULL, QUICK
from tools.scale.report import page

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def figures(tmp_path_factory):
    to = tmp_path_factory.mktemp("scale") / "found.json"
    child = subprocess.run(
        [sys.executable, "-m", "tools.scale", "--smallest", "--json", to],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert child.returncode == 0, child.stderr[-3000:]
    assert "plan of the first save, 1,024 tensors" in child.stdout
    return json.loads(to.read_text())


def test_every_measurement_has_time_memory_and_counts(figures):
    whats = {r["what"] for r in figures["results"]}
    assert whats == {"save", "restore", "metadata", "requests", "commit", "dcp save", "dcp restore"}
    for result in figures["results"]:
        assert result["cpu"] > 0
        assert result["peak"] >= result["above"] >= 0
    (save,) = (r for r in figures["results"] if r["what"] == "save" and r["devices"] == 1024)
    assert save["boxes"] == 8 * 1024


def test_dcp_plans_an_item_for_each_rank_and_tensor(figures):
    (save,) = (r for r in figures["results"] if r["what"] == "dcp save")
    assert save["items"] == 8 * 1000
    assert not save.get("cut")


def test_the_page_and_the_chart_are_made_of_them(figures):
    text = page(figures)
    assert "| plan of the first save, s | 0." in text
    assert "| save, FSDP | 0." in text
    assert text.count("\n## ") >= 5
    assert "| 8B, FSDP |" in tables(figures)
    assert tables(figures).count("\n## ") >= 6
    picture = ET.fromstring(chart(figures))
    names = [element.text for element in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert "A save's plan: one host's; DCP: the coordinator's" in names


def test_each_point_of_dcp_has_ours_beside_it_and_what_was_cut_off_says_so(figures):
    assert "| 8B, FSDP: a host of shardckpt | 0." in tables(figures)
    cut = [r | {"cut": 20.0} if r["what"] == "dcp save" else r for r in figures["results"]]
    assert "| 8B, FSDP: DCP's coordinator | > 0." in tables(figures | {"results": cut})
    assert "| save, FSDP | > 0." in page(figures | {"results": cut})


def test_ours_is_asked_wherever_dcp_is():
    for points in (FULL, QUICK):
        ours = {
            (job["what"], job.get("tree"), job.get("kind"), job.get("devices"))
            for job in points.jobs()
        }
        asked = [job for jobs in points.dcp() for job in jobs]
        assert len(asked) >= 8
        assert {
            (job["what"].removeprefix("dcp "), job["tree"], job["kind"], job["devices"])
            for job in asked
        } <= ours


def test_growth_is_told_by_its_exponent_and_by_what_each_host_and_chunk_adds():
    assert exponent([1, 10, 1000], [5, 5, 5]) == pytest.approx(0)
    assert exponent([2, 4, 8], [4, 16, 64]) == pytest.approx(2)
    counts = [(8, 320), (64, 2560), (64, 64000)]
    assert per_each(counts, [0.1 + 0.002 * h + 1e-6 * c for h, c in counts]) == pytest.approx(
        [0.1, 0.002, 1e-6]
    )
    assert min(per_each([(1, 1), (2, 2), (3, 9)], [1.0, 2.0, 1.0])) >= 0
