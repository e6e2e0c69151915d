"""Steps that leave tensors in another step of the run: what is kept for them."""

import json
import shutil
import threading

import numpy as np
import pytest

import shardckpt
from shardckpt import SaveOptions, errors

FROZEN = np.arange(20_000, dtype=np.float32)


def state(step):
    return {"frozen": FROZEN, "w": np.full(1000, step, np.float32), "step": step}


def options(run, base=0, **others):
    return {"options": SaveOptions(base=run.root / str(base), skip="frozen"), **others}


def holds(run, step):
    restored = shardckpt.restore(run.root / str(step))
    return np.array_equal(restored["frozen"], FROZEN) and set(restored["w"].tolist()) == {step}


def train(manager, *steps):
    for step in steps:
        manager.save(step, state(step), force=step == 0, skip=() if step == 0 else None)
        manager.wait()


def test_retention_keeps_the_base_as_long_as_a_step_needs_it(run):
    with run.manager(**options(run, keep=2)) as manager:
        train(manager, 0, 1, 2, 3)
        assert manager.all_steps() == [0, 2, 3]
        assert [sorted(info.bases) for info in manager.steps()] == [[], [0], [0]]
        assert manager.last_report.nbytes == 4000
    assert [event.step for event in run.events_of("StepDeleted")] == [1]
    assert all(holds(run, step) for step in (0, 2, 3))


def test_a_later_run_without_the_base_keeps_it_until_its_last_user_is_gone(run):
    """It knows of it from the records alone; and what names the base goes first, so that one round
    takes both."""
    with run.manager(**options(run)) as manager:
        train(manager, 0, 1, 2)
    with run.manager(keep=2) as manager:
        manager.restore()
        manager.save(3, state(3))
        manager.wait()
        assert manager.all_steps() == [0, 2, 3]
        manager.save(4, state(4))
        manager.wait()
        assert manager.all_steps() == [3, 4]


def test_a_pinned_step_keeps_its_base(run):
    with run.manager(**options(run)) as manager:
        train(manager, 0, 1)
        manager.pin(1)
    with run.manager(keep=1) as manager:
        manager.restore()
        for step in (2, 3):
            manager.save(step, state(step))
            manager.wait()
        assert manager.all_steps() == [0, 1, 3]
    assert holds(run, 1)


def test_the_base_of_the_saves_to_come_stays_before_any_names_it(run):
    """Also while the first that does is in flight."""
    with run.manager(**options(run, keep=1)) as manager:
        train(manager, 0)
        manager.save(1, state(1), skip=())
        manager.wait()
        assert manager.all_steps() == [0, 1]
        manager.save(2, state(2))
        manager.wait()
        assert manager.all_steps() == [0, 2]
    assert holds(run, 2)


@pytest.mark.parametrize("name", ["adapter", "100000"])
def test_a_step_that_a_checkpoint_beside_the_steps_needs_stays_until_that_is_gone(run, name):
    with run.manager(keep=1) as manager:
        train(manager, 1)
        base = SaveOptions(base=run.root / "1", skip="frozen")
        shardckpt.save(run.root / name, state(7), options=base)
        train(manager, 2)
        assert {*manager.all_steps()} - {100000} == {1, 2}
        assert np.array_equal(shardckpt.restore(run.root / name)["frozen"], FROZEN)
        shutil.rmtree(run.root / name)
        train(manager, 3)
        assert manager.all_steps() == [3]


def test_a_step_that_was_resharded_in_place_stays_while_a_checkpoint_beside_the_run_needs_it(run):
    with run.manager(keep=1) as manager:
        train(manager, 1)
        shardckpt.reshard(run.root / "1", run.root / "1", overwrite=True)
        base = SaveOptions(base=run.root / "1", skip="frozen")
        shardckpt.save(run.root / "adapter", state(7), options=base)
        train(manager, 2, 3)
        assert manager.all_steps() == [1, 3]
        assert np.array_equal(shardckpt.restore(run.root / "adapter")["frozen"], FROZEN)
        shutil.rmtree(run.root / "adapter")
        train(manager, 4)
        assert manager.all_steps() == [4]


@pytest.mark.parametrize("reason", ["damaged", "newer"])
def test_the_base_of_a_step_that_cannot_be_read_stays(run, reason):
    with run.manager(**options(run)) as manager:
        train(manager, 0, 1)
    file = run.root / "1" / "checkpoint.json"
    whole = file.read_bytes()
    broken = {"damaged": (b'"frozen"', b'"frozfn"'), "newer": (b'"version":[2', b'"version":[99')}
    file.write_bytes(whole.replace(*broken[reason]))
    with run.manager(keep=1) as manager:
        train(manager, 2, 3)
        assert [info.step for info in manager.steps()] == [0, 1, 3]
    file.write_bytes(whole)
    assert holds(run, 1)


def test_a_base_outside_of_the_run_is_none_of_its_business(run, tmp_path):
    shardckpt.save(tmp_path / "pretrained", state(7))
    with run.manager(
        options=SaveOptions(base=tmp_path / "pretrained", skip=["frozen"]), keep=1
    ) as manager:
        train(manager, 1, 2)
        assert manager.all_steps() == [2]
        assert manager.steps()[0].bases == frozenset()
    assert json.loads((run.root / "2" / "checkpoint.json").read_bytes())["record"]["bases"][0][
        "url"
    ].startswith("file:///")
    assert holds(run, 2)


def test_after_a_rollback_the_base_of_a_pinned_step_is_not_replaced(run):
    with run.manager() as manager:
        train(manager, 0, 1)
    with run.manager(**options(run, base=1)) as manager:
        manager.restore()
        manager.save(2, state(2))
        manager.wait()
        manager.pin(2)
    with run.manager() as manager:
        manager.restore(step=0)
        assert [manager.save(step, state(step)) for step in (1, 2, 3)] == [False, False, True]
        manager.wait()
        assert manager.all_steps() == [0, 3]
    assert holds(run, 2)


@pytest.mark.parametrize("lost", ["moved", "replaced"])
def test_a_run_resumes_from_a_step_that_has_a_base_and_falls_back_where_that_is_gone(run, lost):
    with run.manager(**options(run)) as manager:
        train(manager, 0, 1)
    with run.manager(**options(run, base=2)) as manager:
        manager.restore()
        manager.save(2, state(2), skip=())
        manager.save(3, state(3))
    if lost == "moved":
        (run.root / "2").rename(run.root.parent / "gone")
    else:
        shutil.rmtree(run.root / "2")  # a save would be refused
        shardckpt.save(run.root / "2", state(2))
    restored = run.manager(fallback=True).restore()

    assert restored.step == (1 if lost == "moved" else 2)
    assert np.array_equal(restored.state["frozen"], FROZEN)
    assert [event.step for event in run.events_of("FellBack")] == [3]


def test_a_step_cannot_be_its_own_base_and_a_base_is_of_one_kind_of_storage(run):
    with run.manager(**options(run)) as manager:
        with pytest.raises(errors.OptionError, match="cannot be its own base; save it with skip="):
            manager.save(0, state(0), force=True)
        with pytest.raises(errors.OptionError, match="matches no tensor"):
            manager.save(0, state(0), force=True, skip="froozen")
        assert manager.save(0, state(0), force=True, skip=())
    with pytest.raises(errors.OptionError, match="another kind of storage"):
        run.manager(options=SaveOptions(base="memory://runs/0"))


def test_saves_and_deletions_at_once_leave_every_step_whole(run):
    """A reader in another thread, over and over, while steps come and go."""
    ended, seen = threading.Event(), []

    def read():
        while not ended.is_set():
            try:
                latest = max(
                    (
                        int(path.name)
                        for path in run.root.glob("[1-9]*")
                        if (path / "checkpoint.json").exists()
                    ),
                    default=None,
                )
                if latest is not None:
                    seen.append(holds(run, latest))
            except errors.NotFoundError:  # deleted meanwhile
                pass

    reader = threading.Thread(target=read)
    with run.manager(**options(run, keep=1)) as manager:
        train(manager, 0)
        reader.start()
        for step in range(1, 12):
            manager.save(step, state(step))
    ended.set()
    reader.join(60)
    assert seen
    assert all(seen)
    # Files that the reader had open may still be there.
    assert {0, 11} <= {*run.manager().all_steps()} <= {0, 10, 11}


@pytest.mark.parametrize("linked", [False, True])
def test_a_base_beside_the_steps_may_be_called_step(run, linked):
    shardckpt.save(run.root / ("0" if linked else "step"), state(7))
    if linked:
        (run.root / "step").symlink_to("0")
    base = SaveOptions(base=run.root / "step", skip=["frozen"])
    with run.manager(options=base, keep=1) as manager:
        train(manager, 1, 2)
        assert manager.all_steps() == ([0, 2] if linked else [2])
    assert holds(run, 2)
