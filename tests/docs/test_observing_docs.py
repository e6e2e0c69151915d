"""The statements and the code of docs/observing.md hold."""

from __future__ import annotations

import re
import typing

import pytest
from paths import DOCS
from prometheus_client import CollectorRegistry, generate_latest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from shardckpt.training import events
from shardckpt.training.metrics import PHASES, Prometheus

DOCUMENT = (DOCS / "observing.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", DOCUMENT, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """The variables after all of its code has run, and where."""
    directory = tmp_path_factory.mktemp("observing")
    variables = {"__name__": "observing"}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        exec(compile("\n".join(BLOCKS), "docs/observing.md", "exec"), variables)
    return directory, variables


def test_its_code_runs_and_the_callback_is_told_of_every_save(ran):
    _, variables = ran
    assert len(variables["messages"]) == 3
    assert re.fullmatch(
        r"step 10: training waited \d+\.\d{3} s of \d+\.\d{3} s", variables["messages"][0]
    )
    assert variables["report"].url.endswith("runs/7b/30")


def test_its_metrics_are_counted(ran):
    _, variables = ran
    page = generate_latest(variables["registry"]).decode()
    assert 'shardckpt_saves_total{outcome="committed"} 3.0' in page
    assert "shardckpt_saved_bytes_total 3.145728e+06" in page
    assert "shardckpt_last_step 30.0" in page


def test_its_scalars_are_what_tensorboard_shows(ran):
    directory, variables = ran
    shown = EventAccumulator(str(directory / "runs" / "tensorboard"))
    shown.Reload()
    last = {name: shown.Scalars(name) for name in shown.Tags()["scalars"]}
    assert [event.step for event in last["checkpoint/stall_s"]] == [10, 20, 30]
    seconds = {name: scalars[-1].value for name, scalars in last.items()}
    assert seconds["checkpoint/total_s"] == pytest.approx(variables["report"].total_s, rel=1e-5)
    assert sum(seconds[f"checkpoint/{phase}_s"] for phase in PHASES) == pytest.approx(
        seconds["checkpoint/total_s"], rel=1e-4, abs=1e-6
    )


def test_its_logger_of_a_wandb_run_gives_each_commit_its_own_step_and_alerts_of_failures(ran):
    _, variables = ran

    class Run:
        """As much of a `wandb.Run` as the recipe uses."""

        def __init__(self):
            self.axes, self.logged, self.alerts = {}, [], []

        def define_metric(self, name, step_metric):
            self.axes[name] = step_metric

        def log(self, data):
            self.logged.append(data)

        def alert(self, title, text):
            self.alerts.append((title, text))

    run, report = Run(), variables["report"]
    log = variables["to_wandb"](run)
    log(events.SaveCommitted(url=report.url, step=30, report=report))
    log(events.SaveFailed(url=report.url, step=40, error=OSError("no room")))
    assert run.axes == {"checkpoint/*": "checkpoint/step"}
    assert run.logged == [{"checkpoint/step": 30, **variables["scalars"](report)}]
    assert run.alerts == [("step 40 was not saved", "no room")]


def test_every_event_is_in_its_table():
    table = DOCUMENT.split("## Logging")[0]
    for kind in typing.get_args(events.Event):
        assert f"`{kind.__name__}`" in table, kind


def test_every_metric_is_in_its_table_and_the_other_way_round():
    registry = CollectorRegistry()
    Prometheus(registry)
    counted = {
        family.name + ("_total" if family.type == "counter" else "")
        for family in registry.collect()
    }
    table = DOCUMENT.split("## Prometheus")[1].split("An alert")[0]
    assert set(re.findall(r"`(shardckpt_\w+)", table)) == counted
