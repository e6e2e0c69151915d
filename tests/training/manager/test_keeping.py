"""Steps that no rule keeps are deleted, and nothing else."""

import os
import subprocess
import sys
import threading
import time

import pytest
from paths import CHILDREN
from training_runs import state

import shardckpt
from shardckpt import errors
from shardckpt.format.documents import seal
from shardckpt.format.record import Tombstone
from shardckpt.io.store import Store
from shardckpt.runs import cleaning, collecting, pinning
from shardckpt.runs.retention import Best, EveryKth, Latest, Younger, any_of
from shardckpt.runs.steps import read_step, step_numbers


def test_the_latest_are_kept_and_the_others_deleted_behind_the_training(run):
    run.train(*range(1, 8), keep=3)
    assert run.manager().all_steps() == [5, 6, 7]
    assert [event.step for event in run.events_of("StepDeleted")] == [1, 2, 3, 4]
    with pytest.raises(errors.NotFoundError):
        shardckpt.open(run.root / "4")


def test_after_thirty_saves_of_which_three_are_kept_three_directories_are_there(run):
    run.train(*range(30), keep=3)
    assert {path.name for path in run.root.iterdir()} == {"27", "28", "29", "job.json"}
    assert {path.parent.name for path in run.root.glob("*/checkpoint.json")} == {"27", "28", "29"}


def test_what_earlier_versions_and_killed_deletions_have_left_of_a_step_goes(run):
    run.train(1)
    store = Store.open(run.root)
    store.sub("100").write("checkpoint.json", seal(Tombstone("not kept any more", "1").to_json()))
    (run.root / "101").mkdir()
    (run.root / "eval").mkdir()
    run.train(2)
    assert {path.name for path in run.root.iterdir()} == {"1", "2", "eval", "job.json"}


def test_without_a_rule_everything_is_kept(run):
    run.train(*range(1, 6))
    assert run.manager().all_steps() == [1, 2, 3, 4, 5]


def test_rules_see_the_metrics_of_earlier_runs(run):
    losses = dict(zip(range(1, 10), [9, 1, 8, 2, 7, 3, 6, 5, 4], strict=True))
    keep = any_of(Best(2, "loss"), EveryKth(5), 1)
    run.train(1, 2, 3, metrics=lambda step: {"loss": losses[step]}, keep=keep)
    run.train(4, 5, 6, 7, 8, 9, metrics=lambda step: {"loss": losses[step]}, keep=keep)
    assert run.manager().all_steps() == [2, 4, 5, 9]


def test_the_newest_step_stays_whatever_the_rule_says(run):
    run.train(1, 2, 3, keep=Best(1, "accuracy"))
    assert run.manager().all_steps() == [3]


def test_old_steps_go_by_their_age(run):
    run.train(1, 2, keep=Younger(3600))
    assert run.manager().all_steps() == [1, 2]
    run.train(3, keep=Younger(1e-9))
    assert run.manager().all_steps() == [3]


def test_a_clock_that_jumps_forward_makes_no_step_old(run, monkeypatch):
    with run.manager(keep=Younger(7 * 86400)) as manager:
        for step in (1, 2, 3):
            manager.save(step, state(step))
            manager.wait()
        now = time.time
        monkeypatch.setattr(time, "time", lambda: now() + 30 * 86400)
        manager.save(4, state(4))
        manager.wait()
        assert manager.all_steps() == [1, 2, 3, 4]
        for step in (1, 2):  # these have become old
            os.utime(run.root / f"{step}/checkpoint.json", (1, 1))
        manager.save(5, state(5))
        manager.wait()
        assert manager.all_steps() == [3, 4, 5]


def test_a_pinned_step_stays_until_it_is_unpinned(run):
    with run.manager(keep=1) as manager:
        manager.save(1, state(1))
        manager.wait()
        manager.pin(1)
        for step in (2, 3):
            manager.save(step, state(step))
        manager.wait()
        assert manager.all_steps() == [1, 3]
        assert [info.pinned for info in manager.steps()] == [True, False]
        manager.unpin(1)
        manager.save(4, state(4))
        manager.wait()
        assert manager.all_steps() == [4]


def test_a_tagged_step_stays_until_it_is_untagged(run):
    with run.manager(keep=1) as manager:
        manager.save(1, state(1))
        manager.wait()
        pinning.tag(manager.url(1), "best")
        for step in (2, 3):
            manager.save(step, state(step))
        manager.wait()
        assert [
            (info.step, info.pinned, info.tags, info.protected) for info in manager.steps()
        ] == [
            (1, False, ("best",), True),
            (3, False, (), False),
        ]
        pinning.untag(manager.url(1), "best")
        manager.save(4, state(4))
        manager.wait()
        assert manager.all_steps() == [4]


def test_pinning_a_step_while_it_is_deleted_either_fails_or_keeps_it(run):
    """Both at once, over and over: a pin that was put in place holds."""
    run.train(*range(1, 21))
    outcomes = set()
    for step in range(1, 20):
        barrier, answer = threading.Barrier(2), []

        def pin(step=step, barrier=barrier, answer=answer):
            barrier.wait()
            try:
                pinning.pin(run.root / str(step))
                answer.append("pinned")
            except errors.NotFoundError:
                answer.append("too late")

        thread = threading.Thread(target=pin)
        thread.start()
        barrier.wait()
        try:
            collecting.delete(run.root / str(step))
            deleted = True
        except errors.OptionError:
            deleted = False
        thread.join(60)
        assert run.holds(step) is not deleted
        assert answer == ["too late" if deleted else "pinned"]
        outcomes.add(deleted)


def test_what_is_not_there_cannot_be_pinned(run):
    run.train(1, 2, keep=1)
    for step in (1, 7):
        with pytest.raises(errors.NotFoundError, match="there is no checkpoint to pin"):
            run.manager().pin(step)
    assert not (run.root / "1" / "pinned.json").exists()


def test_a_pin_says_nothing_of_the_checkpoint_that_takes_the_place(run):
    run.train(1)
    run.manager().pin(1)
    marker = (run.root / "1" / "pinned.json").read_bytes()
    run.manager().unpin(1)
    shardckpt.save(run.root / "1", state(1), options=shardckpt.SaveOptions(overwrite=True))
    (run.root / "1" / "pinned.json").write_bytes(marker)
    assert [info.pinned for info in run.manager().steps()] == [False]


def test_a_step_that_this_process_has_open_stays_while_it_is(run):
    with run.manager(keep=1) as manager:
        manager.save(1, state(1))
        manager.wait()
        reader = shardckpt.open(manager.url(1))
        for step in (2, 3):
            manager.save(step, state(step))
        manager.wait()
        assert manager.all_steps() == [1, 3]
        assert int(reader.read("w")[0]) == 1
        del reader
        manager.save(4, state(4))
        manager.wait()
        assert manager.all_steps() == [4]


def test_a_reader_elsewhere_is_told_that_the_step_was_deleted(run):
    with run.manager(keep=1) as manager:
        manager.save(1, state(1))
        manager.wait()
        command = [sys.executable, CHILDREN / "manager_reader.py", manager.url(1)]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as reader:
            assert reader.stdout.readline() == "open\n"
            manager.save(2, state(2))
            manager.wait()
            assert manager.all_steps() == [2]
            output, _ = reader.communicate("go on\n", timeout=60)
        assert output.startswith("ReplacedError: ")
        assert "was deleted while it was being read" in output


def test_what_a_killed_deletion_or_save_has_left_is_removed_later(run):
    run.train(1, 2)
    (attempt,) = (p for p in (run.root / "1").iterdir() if p.is_dir())
    collecting.delete(run.root / "1")
    left = run.root / "1" / attempt.name / "hosts"
    left.mkdir(parents=True)
    (left / "data").write_bytes(b"some of it")
    begun = run.root / "7" / "20200101T000000-00000000" / "hosts"
    begun.mkdir(parents=True)
    (begun / "data").write_bytes(b"some of it")
    long_ago(run.root)
    run.train(3, keep=2)
    assert not left.exists()
    assert not begun.exists()
    assert run.manager().all_steps() == [2, 3]


def test_checkpoints_whose_names_are_no_steps_are_left_alone(run):
    run.train(1)
    for name in ("latest", "007", "-3", "eval", "²"):
        shardckpt.save(run.root / name, {"other": 1})
    run.train(2, 3, keep=1)
    assert run.manager().all_steps() == [3]
    for name in ("latest", "007", "-3", "eval", "²"):
        assert shardckpt.restore(run.root / name) == {"other": 1}


def long_ago(directory):
    """Nothing below it was written lately."""
    for path in [*directory.rglob("*"), directory]:
        os.utime(path, (1e9, 1e9))


def test_a_run_that_begins_anew_beside_later_steps_keeps_what_it_saves_and_says_so(run, caplog):
    run.train(900, 1000, keep=2)
    with run.manager(keep=2) as manager:
        for step in (1, 2, 3):
            manager.save(step, state(step))
            manager.wait()
            assert manager.all_steps() == [step, 900, 1000]
    (warning,) = [record for record in caplog.records if "another root" in record.message]
    assert "step 1 is saved, but a restart would resume from the later step 1000" in warning.message


def test_steps_that_somebody_has_removed_do_not_count_any_more(run):
    run.train(500, 1000)
    with run.manager(keep=2) as manager:
        manager.save(10, state(10))
        manager.wait()
        for step in (500, 1000):
            collecting.delete(run.root / str(step))
        for step in (20, 30, 40):
            manager.save(step, state(step))
            manager.wait()
        assert manager.all_steps() == [30, 40]


@pytest.mark.parametrize("keep", [2, any_of(2, EveryKth(1000)), Best(2, "loss", "max")])
def test_a_removed_step_does_not_count_though_something_keeps_its_directory(run, keep):
    with run.manager(keep=keep) as manager:
        for step in (10, 20, 30):
            manager.save(step, state(step), metrics={"loss": step})
            manager.wait()
            if step == 20:
                (run.root / "20/notes.txt").write_text("the loss went up here")
                collecting.delete(run.root / "20")
        assert (run.root / "20/notes.txt").exists()
        assert manager.all_steps() == [10, 30]


def test_the_best_step_that_is_left_stays_after_somebody_has_removed_the_best_one(run):
    with run.manager(keep=Best(1, "loss")) as manager:
        for step, loss in ((10, 1.0), (20, 2.0), (30, 3.0)):
            manager.save(step, state(step), metrics={"loss": loss})
            manager.wait()
            if step == 20:
                collecting.delete(run.root / "10")
        assert manager.all_steps() == [20, 30]


def test_steps_are_listed_again_if_that_was_asked_for_while_others_were_being_deleted(tmp_path):
    root = Store.open(tmp_path)
    for step in (1, 2):
        shardckpt.save(tmp_path / str(step), state(step))
    cleaner = cleaning.Cleaner(root, Latest(1), grace=0, deleted=lambda _: cleaner.forget())
    cleaner.clean(read_step(root, 2))
    shardckpt.save(tmp_path / "1", state(1))
    cleaner.clean(read_step(root, 2))
    assert step_numbers(root) == [2]


def test_going_back_waits_for_deletions_that_know_nothing_of_it(run, monkeypatch):
    run.train(700, 800, 900)
    hold, begun = threading.Event(), threading.Event()

    def delete(place, **options):
        begun.set()
        assert hold.wait(60)
        return original(place, **options)

    original = cleaning.delete_place
    monkeypatch.setattr(cleaning, "delete_place", delete)
    with run.manager(keep=2) as manager:
        manager.restore()
        manager.save(1000, state(1000))
        assert begun.wait(60)
        back = threading.Thread(target=manager.restore, kwargs={"step": 900})
        back.start()
        hold.set()
        back.join(60)
        for step in (910, 920, 930):
            manager.save(step, state(step))
            manager.wait()
        assert manager.all_steps() == [920, 930]
        assert manager.restore().step == 930


def test_a_pinned_step_is_not_replaced_by_an_overwrite_either(run):
    run.train(5)
    pinning.pin(run.root / "5")
    manager = run.manager(options=shardckpt.SaveOptions(overwrite=True))
    manager.save(5, state(6))
    with pytest.raises(
        errors.OptionError, match="is pinned, so it is not replaced; `shardckpt unpin` it first"
    ):
        manager.wait()
    assert run.holds(5)


def test_a_rule_whose_metric_no_step_has_says_so_once(tmp_path, caplog):
    with shardckpt.CheckpointManager(
        tmp_path / "run", every=1, keep=Best(1, "val_loss")
    ) as manager:
        for step in range(1, 5):
            manager.save(step, {"w": 1.0}, metrics={"loss": 1.0})
    messages = [record.getMessage() for record in caplog.records if "metric" in record.getMessage()]
    assert len(messages) == 1
    assert (
        "keep= ranks steps by 'val_loss', and no step has that metric, only loss; pass "
        "save(metrics={'val_loss': …})" in messages[0]
    )


@pytest.mark.parametrize(
    ("file", "program"),
    [("_CHECKPOINT_METADATA", "Orbax"), (".metadata", "torch.distributed.checkpoint")],
)
def test_a_directory_with_steps_of_another_program_is_neither_begun_anew_nor_written_to(
    tmp_path, file, program
):
    root = tmp_path / "run"
    (root / "200").mkdir(parents=True)
    (root / "200" / file).write_bytes(b"{}")
    with shardckpt.CheckpointManager(root, every=1) as manager:
        with pytest.raises(
            errors.OptionError, match=f"step 200 there is one of {program}.*shardckpt import"
        ):
            manager.restore({"w": 1.0})
        manager.save(300, {"w": 1.0})
        with pytest.raises(errors.OptionError, match=f"step 200 there is one of {program}"):
            manager.wait()
        assert manager.all_steps() == []
    assert [path.name for path in (root / "200").iterdir()] == [file]
