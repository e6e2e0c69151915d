"""A checkpoint that somebody relies on is not replaced: it is pinned, tagged, or the base of
checkpoints beside it."""

from __future__ import annotations

import threading
import uuid
from pathlib import Path

import numpy as np
import pytest
from failing import save_without_commit
from faults import faulty_cloud
from training_runs import state as state_of_step

import shardckpt
from shardckpt import Mesh, SaveOptions, errors
from shardckpt.commit.dependants import Dependants
from shardckpt.commit.markers import SUPERSEDED
from shardckpt.commit.publish import published_attempt
from shardckpt.format.documents import seal
from shardckpt.frameworks.coordination import Coordinator
from shardckpt.io.store import Store
from shardckpt.layout.world import World
from shardckpt.runs import pinning
from shardckpt.runs.collecting import delete
from shardckpt.writing.background import Saver

STATE = {"frozen": np.ones((100, 100), np.float32), "head": np.ones(3, np.float32)}


def contents(root):
    """All files below a directory."""
    return {
        path.relative_to(root): path.read_bytes()
        for path in Path(root).rglob("*")
        if path.is_file()
    }


def save_with_base(url, base):
    shardckpt.save(url, STATE, options=SaveOptions(base=str(base), skip="frozen"))


RELIED_ON = {
    "pinned": lambda root: pinning.pin(root / "c"),
    "tagged": lambda root: pinning.tag(root / "c", "best"),
    "a base": lambda root: save_with_base(root / "lora", root / "c"),
}


def save(root):
    shardckpt.save(root / "c", {"other": 1}, options=SaveOptions(overwrite=True))


def save_in_background(root):
    shardckpt.save_async(root / "c", {"other": 1}, options=SaveOptions(overwrite=True)).wait()


def reshard(root, **options):
    shardckpt.reshard(
        root / "other", root / "c", mesh=Mesh((2,), ("x",)), workers=1, overwrite=True, **options
    )


def import_file(root):
    shardckpt.import_checkpoint(root / "model.safetensors", root / "c", workers=1, overwrite=True)


@pytest.fixture
def root(tmp_path):
    """A checkpoint `c`, and others to replace it with."""
    shardckpt.save(tmp_path / "c", STATE)
    shardckpt.save(tmp_path / "other", STATE)
    shardckpt.export_safetensors(tmp_path / "other", tmp_path / "model.safetensors")
    return tmp_path


@pytest.mark.parametrize("relied_on", RELIED_ON)
@pytest.mark.parametrize("replace", [save, save_in_background, reshard, import_file])
def test_it_is_refused_with_the_sentence_of_rm_and_nothing_is_written(root, relied_on, replace):
    RELIED_ON[relied_on](root)
    with pytest.raises(errors.OptionError) as of_rm:
        delete(root / "c")
    before = contents(root)
    with pytest.raises(errors.OptionError) as refused:
        replace(root)
    assert str(refused.value) == str(of_rm.value).replace(
        "so it is not deleted", "so it is not replaced"
    )
    assert contents(root) == before


@pytest.mark.parametrize("relied_on", RELIED_ON)
def test_a_complete_save_that_would_replace_it_is_not_committed(root, relied_on):
    save_without_commit(root / "c", 2, overwrite=True)
    RELIED_ON[relied_on](root)
    (outcome,) = shardckpt.commit(root / "c")
    # A pin makes a new version of the record.
    assert outcome.state == ("refused" if relied_on == "a base" else "overtaken")
    np.testing.assert_array_equal(shardckpt.restore(root / "c")["head"], STATE["head"])


def test_a_base_that_is_needed_only_since_the_save_began_is_not_replaced_and_the_new_data_stays(
    root,
):
    saver = Saver(memory_limit=64 << 20)
    handle = saver.begin(
        root / "c",
        {"other": 1},
        SaveOptions(overwrite=True),
        before_publish=lambda: save_with_base(root / "lora", root / "c"),
    )
    with pytest.raises(
        errors.OptionError,
        match=r"is the base of checkpoints beside it.*: lora; so it is not replaced",
    ):
        handle.wait()
    saver.close()
    np.testing.assert_array_equal(shardckpt.restore(root / "lora")["frozen"], STATE["frozen"])
    delete(root / "lora")
    assert [outcome.state for outcome in shardckpt.commit(root / "c")] == ["committed"]
    assert shardckpt.restore(root / "c") == {"other": 1}


def test_a_base_that_is_needed_only_since_the_reshard_began_is_not_replaced_and_its_tasks_are_kept(
    root,
):
    def progress(done, total):
        if done == total and not (root / "lora").exists():
            save_with_base(root / "lora", root / "c")

    with pytest.raises(errors.OptionError, match="lora; so it is not replaced"):
        reshard(root, dtype="bfloat16", progress=progress)
    delete(root / "lora")
    report = shardckpt.reshard(
        root / "other",
        root / "c",
        mesh=Mesh((2,), ("x",)),
        workers=1,
        overwrite=True,
        dtype="bfloat16",
    )
    assert report.done_before == report.tasks


def test_a_checkpoint_with_an_unreadable_record_is_a_base_whatever_its_attempt(root):
    RELIED_ON["a base"](root)
    (root / "c" / "checkpoint.json").write_text("{")
    with pytest.raises(errors.OptionError, match="lora; so it is not replaced"):
        save(root)


@pytest.mark.parametrize("part", [b'"version":[2,', b'"created":"2'])
def test_a_neighbour_that_cannot_be_read_is_believed_to_need_the_base_that_it_names(root, part):
    """Because it is of a newer version, or damaged."""
    save_with_base(root / "lora", root / "c")
    record = root / "lora" / "checkpoint.json"
    record.write_bytes(record.read_bytes().replace(part, part.replace(b"2", b"99"), 1))
    with pytest.raises(
        errors.OptionError,
        match=r"/c is the base of checkpoints beside it, .*: lora; so it is not deleted",
    ):
        delete(root / "c")
    with pytest.raises(errors.OptionError, match="so it is not replaced"):
        save(root)
    shardckpt.save(root / "alone", STATE)
    assert delete(root / "alone") == []


def test_a_neighbour_that_is_superseded_does_not_count(root):
    RELIED_ON["a base"](root)
    lora = Store.open(root / "lora")
    lora.write(SUPERSEDED, seal({"attempt": published_attempt(lora)}))
    save(root)
    assert shardckpt.restore(root / "c") == {"other": 1}


def test_where_nothing_is_replaced_no_neighbour_is_read(root, monkeypatch):
    RELIED_ON["a base"](root)
    monkeypatch.setattr(
        Dependants, "check_replaceable", lambda *_: pytest.fail("there is nothing to replace")
    )
    shardckpt.save(root / "new", STATE, options=SaveOptions(overwrite=True))


# --- requests -------------------------------------------------------------------------------------

NEIGHBOURS = 4


@pytest.fixture(params=["gs", "s3"])
def cloud(request):
    with faulty_cloud(
        request.getfixturevalue("gcs_server" if request.param == "gs" else "s3_server"),
        retry_seconds="60",
    ) as cloud:
        yield cloud


@pytest.mark.long
def test_the_second_check_reads_only_records_that_are_new_or_have_changed(cloud):
    root = Store.open(f"{cloud.place()}/{uuid.uuid4().hex}")
    shardckpt.save(str(root), STATE)  # a checkpoint in the root itself is not a neighbour
    for name in ("c", *map(str, range(NEIGHBOURS))):
        shardckpt.save(str(root.sub(name)), STATE)
    named, dependants = published_attempt(root.sub("c")), Dependants(root.sub("c"))

    def look():
        cloud.proxy.traffic.reset()
        dependants.check_replaceable(named)
        return cloud.proxy.traffic.summary()["kinds"]

    own = {"list": 1, "read": 1}  # the neighbours' names, and the marker of pins
    assert look() == {**own, "read": 1 + NEIGHBOURS}
    assert look() == {**own, "stat": NEIGHBOURS}
    shardckpt.save(str(root.sub("new")), STATE)
    shardckpt.save(str(root.sub("1")), STATE, options=SaveOptions(overwrite=True))
    assert look() == {**own, "stat": NEIGHBOURS, "read": 1 + 2}


class _Words(Coordinator):
    """Two threads that take themselves for the processes of a job."""

    def __init__(self, words, process):
        self.world, self.run_id, self._words = World(process, 2), "20261121T115800-1f2e3d4c", words

    def _set(self, key, value):
        self._words[key] = value

    def _get(self, key):
        return self._words.get(key)


def test_one_process_of_a_job_looks_beside_it_and_the_others_learn_the_outcome(root, monkeypatch):
    RELIED_ON["a base"](root)
    looked, check, raised, words = [], Dependants.check_replaceable, {}, {}
    monkeypatch.setattr(
        Dependants,
        "check_replaceable",
        lambda self, named: (looked.append(threading.get_ident()), check(self, named)),
    )

    def one(process):
        try:
            shardckpt.save(
                root / "c",
                {"other": 1},
                options=SaveOptions(overwrite=True),
                coordinator=_Words(words, process),
            )
        except errors.ShardckptError as e:
            raised[process] = e

    threads = [threading.Thread(target=one, args=(process,)) for process in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(looked) == 1
    assert all(isinstance(raised[process], errors.OptionError) for process in range(2)), raised
    assert "lora; so it is not replaced" in str(raised[1])


# --- managers -------------------------------------------------------------------------------------


def test_after_a_rollback_a_base_of_other_checkpoints_stays_and_the_next_step_is_saved(tmp_path):
    run = tmp_path / "run"
    with shardckpt.CheckpointManager(run, every=1) as manager:
        for step in (1, 2):
            manager.save(step, {**STATE, **state_of_step(step)})
    save_with_base(run / "lora", run / "2")
    with shardckpt.CheckpointManager(run, every=1) as manager:
        manager.restore(step=1)
        assert not manager.save(2, {**STATE, **state_of_step(2)})
        assert manager.save(3, {**STATE, **state_of_step(3)})
    np.testing.assert_array_equal(shardckpt.restore(run / "lora")["frozen"], STATE["frozen"])


def test_after_a_rollback_a_base_of_steps_that_are_superseded_too_is_replaced(tmp_path):
    run = tmp_path / "run"
    options = SaveOptions(base=str(run / "2"), skip="frozen")
    with shardckpt.CheckpointManager(run, every=1, options=options) as manager:
        for step in (1, 2, 3):
            manager.save(
                step,
                {**STATE, "head": np.full(3, step, np.float32)},
                skip=None if step == 3 else (),
            )
    with shardckpt.CheckpointManager(run, every=1) as manager:
        manager.restore(step=1)
        assert manager.save(2, {**STATE, "head": np.full(3, 20, np.float32)})
    assert shardckpt.restore(run / "2")["head"].tolist() == [20, 20, 20]
