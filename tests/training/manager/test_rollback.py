"""Training goes back to an earlier step; what came after it is superseded, and replaced when
training gets there again."""

import shutil

import numpy as np
import pytest
import torch
from counting import counted
from placeholders import undo_commit
from training_runs import state

import shardckpt
from shardckpt import SaveOptions, errors
from shardckpt.commit.markers import is_superseded
from shardckpt.frameworks.coordination.base import SingleProcess
from shardckpt.io.store import Store
from shardckpt.runs import collecting, pinning
from shardckpt.runs.rollback import supersede
from shardckpt.text import NamedOption
from shardckpt.training.policies import OnPreemption, any_of


@pytest.fixture
def rolled_back(run):
    """A run with steps 800, 900 and 1000, whose manager has gone back to 900."""
    run.train(800, 900, 1000)
    manager = run.manager(every=50)
    assert manager.restore(step=900).step == 900
    return manager


def test_after_a_rollback_later_steps_are_superseded(run, rolled_back):
    assert rolled_back.latest_step() == 900
    assert rolled_back.all_steps() == [800, 900]
    assert rolled_back.all_steps(superseded=True) == [800, 900, 1000]
    rolled_back.save(950, state(950))
    rolled_back.wait()
    for manager in (rolled_back, run.manager()):  # from the first save on, for everybody
        assert [(info.step, info.state) for info in manager.steps()] == [
            (800, "committed"),
            (900, "committed"),
            (950, "committed"),
            (1000, "superseded"),
        ]
        assert manager.latest_step() == 950
    assert run.manager().restore().step == 950


def test_only_the_steps_after_the_latest_one_are_read_to_find_it(run, rolled_back):
    rolled_back.save(950, state(950))
    rolled_back.wait()
    record = run.root / "800" / "checkpoint.json"
    record.unlink()
    record.mkdir()  # reading it would fail
    for manager in (rolled_back, run.manager()):
        assert manager.latest_step() == 950
        with pytest.raises(errors.StorageError):
            manager.all_steps()
    shutil.rmtree(run.root)
    assert run.manager().latest_step() is None


def test_reading_an_old_step_changes_nothing(run, rolled_back):
    rolled_back.close()
    assert run.manager().latest_step() == 1000
    assert run.manager().restore().step == 1000


def test_a_superseded_step_is_replaced_when_training_reaches_it_again(run, rolled_back):
    rolled_back.save(950, state(950))
    rolled_back.save(1000, {**state(1000), "again": True})
    rolled_back.save(1050, state(1050))
    rolled_back.wait()
    assert rolled_back.all_steps() == [800, 900, 950, 1000, 1050]
    assert shardckpt.restore(run.root / "1000")["again"]
    assert {path.name for path in (run.root / "1000").iterdir() if path.is_file()} == {
        "checkpoint.json"
    }


def test_a_later_step_that_is_deleted_meanwhile_leaves_nothing(run, rolled_back):
    collecting.delete(run.root / "1000")
    rolled_back.save(950, state(950))
    rolled_back.wait()
    assert not (run.root / "1000").exists()


def test_a_rollback_that_is_told_late_leaves_a_step_that_was_replaced_since_as_it_is(tmp_path):
    root, step, attempts = Store.open(tmp_path), tmp_path / "5", []
    for _ in range(2):
        shardckpt.save(step, {"w": 1}, options=SaveOptions(overwrite=True))
        attempts.append(shardckpt.open(step).record.attempt)
    supersede(root, {"5": attempts[0]})
    assert not (step / "superseded.json").exists()
    supersede(root, {"5": attempts[1]})
    supersede(root, {"5": attempts[0]})
    assert is_superseded(root.sub("5"), attempts[1])


def test_a_step_that_has_its_marker_is_not_read_again(tmp_path):
    steps = {}
    for step in range(3):
        shardckpt.save(tmp_path / f"{step}", {f"w{i}": i for i in range(500)})
        steps[f"{step}"] = shardckpt.open(tmp_path / f"{step}").record.attempt
    root = Store.open(tmp_path)
    supersede(root, steps)
    assert all(is_superseded(root.sub(step), attempt) for step, attempt in steps.items())
    record = (tmp_path / "1" / "checkpoint.json").stat().st_size
    assert counted(lambda: supersede(root, steps)).read < record


def test_a_later_run_may_replace_it_as_well(run, rolled_back):
    rolled_back.save(950, state(950))
    rolled_back.close()
    with run.manager(every=50) as manager:
        assert manager.restore().step == 950
        manager.save(1000, {**state(1000), "again": True})
    assert shardckpt.restore(run.root / "1000")["again"]


def test_it_is_replaced_by_a_training_that_begins_anew_because_no_other_step_is_left(
    run, rolled_back
):
    rolled_back.save(950, state(950))
    rolled_back.close()
    for step in (800, 900, 950):
        shutil.rmtree(run.root / str(step))
    with run.manager(every=50) as manager:
        assert manager.restore() is None
        manager.save(1000, {**state(1000), "again": True})
    assert run.manager().all_steps() == [1000]
    assert shardckpt.restore(run.root / "1000")["again"]


def test_a_training_without_a_step_to_restore_begins_anew_though_it_has_gone_through_steps(run):
    with run.manager(every=5) as manager:
        assert not any(manager.save(step, state(step)) for step in range(4))
        assert manager.restore() is None
        assert [step for step in range(7) if manager.save(step, state(step))] == [5]
    assert run.holds(5)


def test_a_superseded_step_that_training_has_passed_is_not_kept(run):
    run.train(800, 900, 1000)
    with run.manager(every=60, keep=5) as manager:
        manager.restore(step=900)
        for step in (960, 1020):
            manager.save(step, state(step))
            manager.wait()
            assert manager.all_steps(superseded=True) == (
                [800, 900, 960, 1000] if step == 960 else [800, 900, 960, 1020]
            )


def test_a_rollback_can_be_taken_back(run, rolled_back):
    rolled_back.save(950, state(950))
    rolled_back.close()
    with run.manager(every=50) as manager:
        restored = manager.restore(step=1000)
        assert restored.step == 1000
        assert manager.latest_step() == 1000
        manager.save(1050, state(1050))
        manager.wait()
        assert run.manager().all_steps() == [800, 900, 950, 1000, 1050]


def test_without_a_rollback_a_step_that_is_there_is_not_replaced(run):
    run.train(100)
    manager = run.manager()
    manager.save(100, {**state(100), "again": True})
    with pytest.raises(errors.AlreadyExistsError, match="/100"):
        manager.close()
    assert "again" not in shardckpt.restore(run.root / "100")


@pytest.fixture
def before_a_pin(run):
    """A manager that saves every 50 steps, and has gone back from step 1000, which is pinned, to
    900."""
    run.train(900, 1000)
    run.manager().pin(1000)
    with run.manager(
        every=any_of(50, OnPreemption(signals=(), file=run.root / "notice"))
    ) as manager:
        manager.restore(step=900)
        yield manager
    assert run.holds(1000)
    assert "again" not in shardckpt.restore(run.root / "1000")


def saved(manager, steps):
    return [step for step in steps if manager.save(step, {**state(step), "again": True})]


def test_a_pinned_step_is_not_replaced_and_the_next_one_is_saved_in_its_place(run, before_a_pin):
    assert saved(before_a_pin, range(901, 1102)) == [950, 1001, 1050, 1100]
    assert [
        (e.step, "pinned" in e.reason, "next step" in e.reason)
        for e in run.events_of("SaveSkipped")
    ] == [(1000, True, True)]


def test_a_forced_save_does_not_replace_a_pinned_step_and_an_event_says_so(run, before_a_pin):
    assert not before_a_pin.save(1000, state(1000), force=True)
    assert [e.step for e in run.events_of("SaveSkipped")] == [1000]


def test_a_job_that_is_stopped_at_a_pinned_step_ends_at_the_one_after_it_which_is_saved(
    run, before_a_pin
):
    (run.root / "notice").touch()
    assert saved(before_a_pin, [1000]) == []
    assert not before_a_pin.reached_preemption
    assert saved(before_a_pin, [1001]) == [1001]
    assert before_a_pin.reached_preemption
    before_a_pin.wait()
    assert before_a_pin.latest_step() == 1001


def test_a_step_that_is_pinned_just_before_its_replacement_stays(run, rolled_back):
    run.manager().pin(1000)
    rolled_back.save(1000, {**state(1000), "again": True})
    with pytest.raises(errors.OptionError, match="1000 is pinned, so it is not replaced"):
        rolled_back.wait()
    assert "again" not in shardckpt.restore(run.root / "1000")


def test_there_is_no_step_to_go_back_to(run):
    run.train(800)
    with pytest.raises(errors.NotFoundError, match="there is no step 900; there are: 800"):
        run.manager().restore(step=900)


def damage(run, step):
    (file, *_) = sorted(
        path
        for path in (run.root / str(step)).glob("*/hosts/**/*")
        if path.is_file() and path.stat().st_size > 3000
    )
    data = bytearray(file.read_bytes())
    data[100] ^= 1
    file.write_bytes(data)


def test_a_damaged_newest_step_is_an_error(run):
    run.train(900, 1000)
    damage(run, 1000)
    with pytest.raises(
        errors.CorruptionError,
        match=r"/1000/.*/hosts/.*Step 1000 .*restore\(fallback=True\) .* restore\(step=…\)",
    ):
        run.manager().restore()


def test_unless_falling_back_is_allowed_which_says_why(run):
    run.train(800, 900, 1000)
    damage(run, 1000)
    (run.root / "900" / "checkpoint.json").write_text("{}")
    with run.manager(fallback=True, every=100) as manager:
        assert manager.restore().step == 800
        assert [event.step for event in run.events_of("FellBack")] == [1000, 900]
        assert "checksum" in run.events_of("FellBack")[0].reason
        assert manager.latest_step() == 800
        for step in (900, 1000):
            manager.save(step, state(step))
        manager.wait()
        assert run.manager().all_steps() == [800, 900, 1000]
    assert run.holds(900)
    assert run.holds(1000)


def test_if_all_steps_are_damaged_the_error_is_that_of_the_newest(run):
    run.train(900, 1000)
    for step in (900, 1000):
        damage(run, step)
    with pytest.raises(errors.CorruptionError, match="1000") as caught:
        run.manager().restore(fallback=True)
    assert caught.value.__notes__ == ["No earlier step could be restored instead."]


def grown(run):
    """A run whose newest step has a tensor that step 900 lacks, and is damaged elsewhere."""
    run.train(900)
    with run.manager() as manager:
        manager.restore()
        manager.save(1000, {**state(1000), "anew": np.ones(10_000, np.float32)})
    damage(run, 1000)


@pytest.mark.parametrize("strict", [False, True, "like"])
def test_no_step_is_restored_that_leaves_elements_of_a_damaged_one(run, strict):
    grown(run)
    like = {**state(0), "anew": np.zeros(10_000, np.float32)}
    with pytest.raises(
        errors.NamesMismatchError, match=r"/900.*anew.*because of damage: .*/1000/.*checksum"
    ) as caught:
        run.manager(fallback=True).restore(like, strict=strict)
    assert "/1000/" in str(caught.value.__cause__)


def test_no_step_is_restored_that_leaves_a_number_of_a_damaged_one(run):
    run.train(900)
    with run.manager() as manager:
        manager.restore()
        manager.save(1000, {**state(1000), "count": 5})
    damage(run, 1000)
    like = {**state(0), "count": np.zeros(())}
    with pytest.raises(errors.NamesMismatchError, match=r"/900.*count.*because of damage"):
        run.manager(fallback=True).restore(like, strict=False)


def test_an_error_after_a_damaged_step_keeps_what_it_knows(run):
    grown(run)
    like = {"w": state(0)["w"], "step": 0, "mine": np.zeros(10_000, np.float32)}
    with pytest.raises(errors.OptionError, match=r"/anew/.*because of damage: .*/1000/") as caught:
        run.manager(fallback=True).restore(like, rename="s/anew/mine/")
    assert any(isinstance(part, NamedOption) for part in caught.value.message.parts)
    assert "/1000/" in str(caught.value.__cause__)


def test_no_step_is_restored_into_objects_that_have_elements_of_a_damaged_one(run):
    def module(*names):
        return torch.nn.ParameterDict({name: torch.zeros(10_000) for name in names})

    with run.manager() as manager:
        for step, names in (900, ["w"]), (1000, ["w", "anew"]):
            manager.save(step, shardckpt.train_state(model=module(*names), step=step))
            manager.wait()
    damage(run, 1000)
    like = shardckpt.train_state(model=module("w", "anew"), step=0)
    with pytest.raises(errors.NamesMismatchError, match=r"model/anew.*because of damage"):
        run.manager(fallback=True).restore(like, strict=False)


def test_a_tensor_of_a_damaged_step_that_was_not_asked_for_is_no_hindrance(run):
    grown(run)
    for options in ({"strict": "like"}, {"strict": False}, {"only": ["w", "step"]}):
        like = state(0)
        restored = run.manager(fallback=True).restore(like, **options)
        assert restored.step == 900
        assert like["w"][0] == 900


def test_a_step_without_a_fingerprint_is_not_read_to_be_checked(run):
    run.train(900)
    like = state(0)
    with pytest.raises(errors.OptionError, match="/900 has no fingerprint"):
        run.manager().restore(like, check=True)
    assert not like["w"].any()


def test_a_caller_s_error_is_not_reported_as_damage(run):
    run.train(900, 1000)
    with pytest.raises(errors.MismatchError):
        run.manager().restore({"other": 1}, fallback=True)


def test_a_part_of_a_training_checkpoint_is_restored_by_itself(run):
    with run.manager() as manager:
        manager.save(1, {"model": state(1), "optimizer": {"lr": 0.1}})
    restored = run.manager().restore(only="model/**")
    assert restored.state.keys() == {"model"}


def test_what_an_earlier_run_left_complete_is_committed_and_resumed_from(run):
    run.train(1, 2)
    undo_commit(run.root / "2")
    assert run.manager().all_steps() == [1]
    assert run.manager().restore().step == 2


def test_a_complete_attempt_of_a_run_that_another_has_taken_over_from_is_not_committed(run):
    run.train(1, 2)
    run.train(3, coordinator=SingleProcess())
    undo_commit(run.root / "2")  # complete, and of the run before the last
    assert run.manager(coordinator=SingleProcess()).restore().step == 3
    assert run.manager().all_steps() == [1, 3]
    (outcome,) = shardckpt.commit(run.root)
    assert (outcome.state, "saves there now" in outcome.reason) == ("refused", True)


def test_a_save_that_would_replace_a_pinned_step_is_not_committed(run, rolled_back):
    run.manager().pin(1000)
    rolled_back.save(1000, {**state(1000), "again": True})
    with pytest.raises(errors.OptionError):
        rolled_back.wait()
    assert run.manager().restore().step == 1000
    assert "again" not in shardckpt.restore(run.root / "1000")


def test_a_tagged_step_is_not_replaced_either(run, rolled_back):
    pinning.tag(run.root / "1000", "best")
    rolled_back.save(1000, {**state(1000), "again": True})
    with pytest.raises(
        errors.OptionError,
        match="is tagged best, so it is not replaced; `shardckpt untag best` it first",
    ):
        rolled_back.wait()
    assert "again" not in shardckpt.restore(run.root / "1000")
