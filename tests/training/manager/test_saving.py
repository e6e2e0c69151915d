"""A training loop saves its steps in the background, and hears of what went wrong."""

import threading

import numpy as np
import pytest
from training_runs import state

import shardckpt
from shardckpt import errors
from shardckpt.runs.catalog import catalog
from shardckpt.runs.retention import Best
from shardckpt.training.background import Background
from shardckpt.training.policies import AtSteps, Continuous, EverySeconds, OnPreemption


class Gate:
    """Holds saves just before they are published."""

    def __init__(self, monkeypatch):
        self.reached, self.opened = threading.Event(), threading.Event()
        real = Background._before_publish

        def held(background, step):
            self.reached.set()
            assert self.opened.wait(60)
            return real(background, step)

        monkeypatch.setattr(Background, "_before_publish", held)


@pytest.fixture
def gate(monkeypatch):
    made = Gate(monkeypatch)
    yield made
    made.opened.set()


def test_steps_that_are_due_are_saved_and_a_later_run_goes_on_from_the_last(run):
    with run.manager(every=3) as manager:
        assert manager.restore() is None
        assert [step for step in range(11) if manager.save(step, state(step))] == [3, 6, 9]
        manager.wait()
        assert manager.all_steps() == [3, 6, 9]
        assert manager.latest_step() == 9
        assert manager.last_report.url == manager.url(9)
    with run.manager(every=3) as manager:
        restored = manager.restore()
        assert (restored.step, restored.state["step"], restored.metadata) == (
            9,
            9,
            {"run_id": restored.metadata["run_id"]},
        )
        np.testing.assert_array_equal(restored.state["w"], state(9)["w"])
        assert [step for step in range(9, 14) if manager.save(step, state(step))] == [12]


def test_leaving_the_context_finishes_what_is_in_flight(run):
    with run.manager() as manager:
        manager.save(1, state(1))
    assert run.holds(1)
    with pytest.raises(errors.OptionError, match="closed"):
        manager.save(2, state(2))
    manager.close()


def test_the_state_may_change_right_after_save(run):
    mine = state(1)
    with run.manager() as manager:
        manager.save(1, mine)
        mine["w"][:] = -1
    assert run.holds(1)


def test_a_step_is_saved_without_being_due_only_when_forced(run):
    with run.manager(every=None) as manager:
        assert not manager.save(1, state(1))
        assert manager.save(1, state(1), force=True)
        assert not manager.save(1, state(1), force=True)
        assert [(e.step, e.reason) for e in run.events_of("SaveSkipped")] == [
            (1, "it is saved already")
        ]
        assert not manager.should_save(2)
    assert run.holds(1)


def test_a_manager_that_is_not_told_when_saves_every_call_and_warns_once_where_it_keeps_every_step(
    run, caplog
):
    with shardckpt.CheckpointManager(run.root) as manager:
        assert [manager.save(step, state(step)) for step in range(3)] == [True] * 3
    assert [run.holds(step) for step in range(3)] == [True] * 3
    messages = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(messages) == 1
    assert "to change this, give every= or keep=" in messages[0]


def test_it_keeps_what_it_is_told_to_keep_and_says_nothing(run, caplog):
    with shardckpt.CheckpointManager(run.root, keep=2) as manager:
        assert all(manager.save(step, state(step)) for step in range(4))
        manager.wait()
        assert manager.all_steps() == [2, 3]
    assert not caplog.records


def test_it_saves_with_a_policy_of_preemption_alone_when_that_says_so(run):
    notices = []
    preemption = OnPreemption(signals=(), when=lambda: bool(notices))
    with shardckpt.CheckpointManager(run.root, preemption=preemption) as manager:
        assert not manager.save(1, state(1))
        notices.append(1)
        assert manager.save(2, state(2))


def test_a_loop_that_resumes_saves_every_call_after_the_step_that_it_resumed_from(run):
    run.train(3)
    with shardckpt.CheckpointManager(run.root, keep=9) as manager:
        assert manager.restore().step == 3
        assert [manager.save(step, state(step)) for step in (3, 4)] == [False, True]


@pytest.mark.parametrize("step", [10**18, 1_795_384_286_216_785_509, 2**63 - 1])
def test_steps_of_up_to_63_bits_are_found_again(run, step):
    run.train(step - 1, step, keep=1)
    with run.manager() as manager:
        assert manager.all_steps() == [step]
        assert manager.restore().step == step
        assert manager.restore(step=step).step == step
    assert [entry.step for entry in catalog(run.root)] == [step]


@pytest.mark.parametrize(
    "step",
    [2**63, 10**5000, -1, 1.5, True, "1"],
    ids=["64 bits", "5001 digits", "negative", "float", "bool", "text"],
)
def test_other_steps_are_refused(run, step):
    with run.manager() as manager:
        of_steps = (manager.url, manager.pin, manager.unpin)
        for asks in (
            *of_steps,
            manager.should_save,
            lambda step: manager.save(step, state(1)),
            lambda step: manager.restore(step=step),
        ):
            with pytest.raises(errors.OptionError, match="2\\*\\*63 - 1"):
                asks(step)


def test_steps_ascend(run):
    with run.manager(every=np.int64(5)) as manager:
        manager.save(5, state(5))
        for asks in (
            manager.should_save,
            lambda step: manager.save(step, state(step)),
            lambda step: manager.save(step, state(step), force=True),
        ):
            with pytest.raises(
                errors.OptionError, match=r"step 4 is less than step 5, .* steps must ascend"
            ):
                asks(4)
        for bad in (-1, True, 2.0, "7", np.float32(7), np.array([7, 8]), None):
            with pytest.raises(errors.OptionError, match="step="):
                manager.save(bad, state(1))
        assert manager.save(np.int64(10), state(10))
        assert manager.restore(state(0), step=np.uint8(10)).step == 10


def test_a_loop_that_begins_anew_after_a_restore_is_told_at_once(run):
    run.train(5)
    with run.manager() as manager:
        assert manager.restore().step == 5
        with pytest.raises(
            errors.OptionError,
            match=r"step 0 is less than step 5, .* go back with restore\(step=…\)",
        ):
            manager.save(0, state(0))


def test_should_save_says_what_save_will_do(run):
    with run.manager(every=AtSteps([2, 5])) as manager:
        for step in range(8):
            assert manager.should_save(step) == manager.save(step, state(step)) == (step in (2, 5))


def test_a_second_save_waits_for_the_one_in_flight(run, gate):
    with run.manager() as manager:
        manager.save(1, state(1))
        assert gate.reached.wait(60)
        second = threading.Thread(target=manager.save, args=(2, state(2)))
        second.start()
        assert not run.holds(1)
        assert len(run.events_of("SaveStarted")) == 1
        gate.opened.set()
        second.join(60)
        assert run.holds(1)
    assert run.holds(2)


def test_or_is_skipped_with_an_event_by_choice(run, gate):
    with run.manager(in_flight="skip") as manager:
        assert manager.save(1, state(1))
        assert gate.reached.wait(60)
        assert not manager.save(2, state(2))
        gate.opened.set()
        manager.wait()
        assert manager.save(3, state(3))
    assert [(e.step, e.reason) for e in run.events_of("SaveSkipped")] == [
        (2, "the save before it is still in flight")
    ]
    assert [run.holds(step) for step in (1, 2, 3)] == [True, False, True]


def test_continuous_saves_again_when_the_last_is_done(run, gate):
    with run.manager(every=Continuous()) as manager:
        assert manager.save(1, state(1))
        assert gate.reached.wait(60)
        assert not any(manager.save(step, state(step)) for step in range(2, 50))
        gate.opened.set()
        manager.wait()
        assert manager.save(50, state(50))


def test_seconds_go_by_the_time_since_the_last_save(run, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("shardckpt.training.decisions.time.monotonic", lambda: now[0])
    with run.manager(every=EverySeconds(60)) as manager:
        saved = []
        for step in range(12):
            now[0] += 25
            if manager.should_save(step):
                saved.append(step)
        assert saved == [2, 5, 8, 11]


def test_a_failure_in_the_background_is_raised_once_by_the_next_save_with_its_step(run):
    run.root.mkdir()
    (run.root / "1").write_text("in the way")
    with run.manager() as manager:
        assert manager.save(1, state(1))
        with pytest.raises(errors.StorageError, match="/run/1") as caught:
            manager.save(2, state(2))
        assert caught.value.__notes__ == ["Step 1 was being saved in the background."]
        assert manager.save(3, state(3))
    assert [e.step for e in run.events_of("SaveFailed")] == [1]
    assert run.events_of("SaveFailed")[0].error is caught.value
    assert not (run.root / "1").is_dir()
    assert run.holds(2)  # all processes save the same steps, whether one of them raises or not
    assert run.holds(3)


@pytest.mark.parametrize("where", ["wait", "close", "__exit__"])
def test_or_by_wait_or_close(run, where):
    run.root.mkdir()
    (run.root / "1").write_text("in the way")
    manager = run.manager()
    manager.save(1, state(1))
    with pytest.raises(errors.StorageError):
        getattr(manager, where)(*[None] * (3 if where == "__exit__" else 0))
    manager.close()


def test_an_error_on_its_way_is_not_hidden_by_a_save_that_failed(run):
    run.root.mkdir()
    (run.root / "1").write_text("in the way")
    manager = run.manager()
    manager.save(1, state(1))
    with pytest.raises(ZeroDivisionError) as caught, manager:
        1 / 0
    assert "a checkpoint was not saved" in caught.value.__notes__[0]


def test_on_failure_decides_whether_training_goes_on(run):
    run.root.mkdir()
    for step in (1, 3):
        (run.root / str(step)).write_text("in the way")
    asked = []

    def on_failure(error, step):
        asked.append((type(error), step))
        return "continue" if step == 1 else "raise"

    with run.manager(on_failure=on_failure) as manager:
        for step in (1, 2, 3):
            manager.save(step, state(step))
        with pytest.raises(errors.StorageError):
            manager.wait()
    assert asked == [(errors.StorageError, 1), (errors.StorageError, 3)]


def test_a_step_whose_save_failed_may_be_saved_again(run):
    run.root.mkdir()
    (run.root / "1").write_text("in the way")
    with run.manager() as manager:
        manager.save(1, state(1))
        with pytest.raises(errors.StorageError):
            manager.wait()
        (run.root / "1").unlink()
        assert manager.save(1, state(1))
    assert run.holds(1)


def test_a_forced_save_again_waits_for_the_save_in_flight_which_may_fail(run):
    run.root.mkdir()
    (run.root / "1").write_text("in the way")

    def clear(event):
        if type(event).__name__ == "SaveFailed":
            (run.root / "1").unlink()

    with run.manager(on_event=clear, on_failure=lambda *_: "continue") as manager:
        manager.save(1, state(1))
        assert manager.save(1, state(1), force=True)
    assert run.holds(1)


@pytest.mark.parametrize("in_flight", ["wait", "skip"])
def test_a_repeated_save_does_not_wait_for_the_save_in_flight(run, in_flight):
    repeated = threading.Event()
    ends = []

    def hold(event):
        if type(event).__name__ == "SaveCommitted":
            ends.append(repeated.wait(20))

    with run.manager(on_event=hold, in_flight=in_flight) as manager:
        manager.save(1, state(1))
        assert not manager.save(1, state(1))
        repeated.set()
    assert ends == [True]


def test_a_leaf_that_cannot_be_stored_is_raised_at_once_and_disturbs_nothing(run):
    with run.manager() as manager:
        with pytest.raises(errors.LeafError, match="thing"):
            manager.save(1, {"thing": object()})
        manager.save(2, state(2))
    assert run.holds(2)
    assert not run.holds(1)


def test_a_callback_that_raises_costs_no_checkpoint(run):
    def broken(_event):
        raise ValueError("mine")

    with run.manager(on_event=broken) as manager:
        manager.save(1, state(1))
    assert run.holds(1)


def test_a_callback_that_exits_in_the_background_costs_no_checkpoint_either(run):
    def exits(event):
        if type(event).__name__ == "SaveCommitted":
            raise SystemExit(3)

    with run.manager(on_event=exits) as manager:
        manager.save(1, state(1))
        manager.wait()
        assert not manager.save(1, state(1))
    assert run.holds(1)


def test_events_tell_what_happens_in_order(run):
    run.train(1, 2, keep=1)
    kinds = [(type(e).__name__, e.step) for e in run.events if type(e).__name__ != "Progressed"]
    assert kinds == [
        *[(kind, 1) for kind in ("SaveStarted", "SaveStaged", "SaveCommitted")],
        *[(kind, 2) for kind in ("SaveStarted", "SaveStaged", "SaveCommitted")],
        ("StepDeleted", 1),
    ]
    assert run.events_of("SaveStaged")[0].nbytes == 4000


def test_metrics_are_kept_and_the_best_step_is_found_by_them(run):
    losses = {1: 3.0, 2: np.float32(0.5), 3: float("nan"), 4: float("inf")}
    run.train(*losses, metrics=lambda step: {"loss": losses[step]}, keep=Best(9, "loss"))
    manager = run.manager(keep=Best(9, "loss"))
    assert manager.best_step() == 2
    assert manager.best_step("loss", "max") == 4
    assert manager.best_step("accuracy") is None
    assert shardckpt.open(run.root / "2").metadata["metrics"] == {"loss": 0.5}
    with pytest.raises(errors.OptionError, match="no metric is known"):
        run.manager().best_step()
    with pytest.raises(errors.OptionError, match="no number"):
        manager.save(9, state(9), {"loss": "low"})


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"in_flight": "drop"}, "in_flight"),
        ({"fallback": "yes"}, "fallback"),
        ({"lead_time": -1}, "lead_time"),
        ({"lead_time": float("inf")}, "lead_time"),
        ({"progress": 1}, "progress"),
        ({"options": {"layout": "zarr"}}, "options"),
        ({"options": shardckpt.SaveOptions(metadata={"metrics": 1})}, "metrics"),
        ({"every": 0}, "EverySteps"),
        ({"keep": 0}, "Latest"),
        ({"coordinator": "me"}, "coordinator"),
    ],
)
def test_options_that_cannot_be_are_refused_by_name(run, options, match):
    with pytest.raises(errors.OptionError, match=match):
        run.manager(**options)


def test_the_first_of_two_failures_is_raised_and_names_the_other(run, monkeypatch):
    manager = run.manager()
    manager.save(1, state(1))
    manager.wait()

    def refuse(_background, step):
        raise errors.StorageError(f"no room for step {step}.")

    monkeypatch.setattr(Background, "_before_publish", refuse)
    manager.save(2, state(2))
    manager._background.join()
    manager._background._failures.append((errors.StorageError("step 3 was lost."), 3))
    with pytest.raises(errors.StorageError, match="no room for step 2") as raised:
        manager.wait()
    assert any("step 3 was lost" in note for note in raised.value.__notes__)


def test_a_step_that_was_lost_and_then_saved_is_not_saved_a_third_time(run, monkeypatch):
    manager = run.manager(every=None)
    with monkeypatch.context() as patched:
        patched.setattr(Background, "_before_publish", lambda *_: 1 / 0)
        assert manager.save(5, state(5), force=True)
        with pytest.raises(ZeroDivisionError):
            manager.wait()
    assert manager.save(5, state(5), force=True)
    manager.wait()
    assert not manager.save(5, state(5), force=True)
    assert run.holds(5)


def test_a_step_that_was_lost_and_then_published_by_a_restore_is_not_saved_again(run, monkeypatch):
    manager = run.manager(every=None)
    with monkeypatch.context() as patched:
        patched.setattr(Background, "_before_publish", lambda *_: 1 / 0)
        manager.save(5, state(5), force=True)
        with pytest.raises(ZeroDivisionError):
            manager.wait()
    assert manager.restore().step == 5
    assert not manager.save(5, state(5), force=True)
    manager.close()


@pytest.mark.parametrize("metrics", [{"loss": 10**400}, {"loss": "small"}, {1: 2.0}, [1]])
def test_metrics_that_are_no_numbers_by_name_are_refused_before_anything_is_begun(run, metrics):
    manager = run.manager()
    with pytest.raises(errors.OptionError, match="metrics"):
        manager.save(1, state(1), metrics)
    assert manager.save(1, state(1))
