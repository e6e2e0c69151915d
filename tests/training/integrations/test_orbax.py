"""Orbax 0.12.8's programs with shardckpt's managers in the place of Orbax's: the same losses and
kept steps, also on another mesh."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from datetime import timedelta

import pytest
from paths import CHILDREN, DOCS
from placeholders import undo_commit

import shardckpt
from shardckpt.errors import AlreadyExistsError, NotFoundError, OptionError

STEPS, SAVED, DIES = 11, 6, 8


def program(who, api, place, mesh, dies_at=0):
    arguments = [
        sys.executable,
        CHILDREN / "integration_orbax.py",
        who,
        api,
        place,
        json.dumps(mesh),
        str(STEPS),
        str(dies_at),
    ]
    done = subprocess.run(
        [str(one) for one in arguments], capture_output=True, text=True, timeout=250
    )
    if dies_at:
        assert done.returncode == -9, done.stderr[-3000:]
        return None
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.long
@pytest.mark.parametrize("api", ["v0", "v1"])
def test_a_killed_training_resumes_on_another_mesh_with_the_losses_of_orbax(tmp_path, api):
    whole = program("orbax", api, tmp_path / "theirs", [4, 2])
    program("shardckpt", api, tmp_path / "ours", [4, 2], DIES)
    resumed = program("shardckpt", api, tmp_path / "ours", [2, 4])
    assert resumed["first"] == SAVED + 1
    expected = {step: value for step, value in whole["losses"].items() if int(step) > SAVED}
    # Another mesh may add in another order.
    assert resumed["losses"] == pytest.approx(expected, rel=1e-6)
    assert resumed["kept"] == whole["kept"] == [6, 9]
    assert resumed["shards"] == 8
    assert shardckpt.open(tmp_path / "ours" / "9").verify().ok


@pytest.fixture
def ours():
    pytest.importorskip("jax")
    from shardckpt.training.integrations import orbax

    return orbax


@pytest.fixture
def ocp():
    import orbax.checkpoint

    return orbax.checkpoint


def test_single_items_metrics_and_the_best_step(tmp_path, ours, ocp):
    import numpy as np

    options = ocp.CheckpointManagerOptions(
        max_to_keep=2, best_fn=lambda metrics: metrics["loss"], best_mode="min"
    )
    with ours.OrbaxCheckpointManager(tmp_path, options=options) as manager:
        for step, loss in enumerate([3.0, 1.0, 2.0, 4.0]):
            assert manager.save(
                step,
                args=ocp.args.StandardSave({"w": np.full(3, step)}),
                metrics={"loss": loss},
                custom_metadata={"n": step},
            )
        manager.wait_until_finished()
        assert manager.all_steps() == [1, 2, 3]  # the latest step always stays
        assert (manager.best_step(), manager.metrics(2)) == (1, {"loss": 2.0})
        assert manager.item_metadata(2)["w"].shape == (3,)
        assert (manager.restore(2)["w"] == 2).all()
        assert manager.latest_step() == 2  # training goes on from there


def test_states_by_name_and_their_metadata(tmp_path, ours):
    import numpy as np

    with ours.OrbaxCheckpointer(tmp_path) as manager:
        saved = manager.save_checkpointables(
            0,
            {"model": {"w": np.ones(2)}, "other": {"n": 5}},
            custom_metadata={"a": 1},
            metrics={"l": 2},
        )
        assert saved
        assert manager.load_checkpointables(0, {"other": None}) == {"other": {"n": 5}}
        metadata = manager.checkpointables_metadata()
        assert (metadata.step, metadata.custom_metadata, metadata.metrics) == (
            0,
            {"a": 1},
            {"l": 2.0},
        )
        assert metadata.metadata["model"]["w"].shape == (2,)
        assert manager.delete(0)
        assert manager.latest is None
        assert not manager.delete(0, missing_ok=True)


def test_a_step_whose_record_is_damaged_is_not_listed(tmp_path, ours):
    import numpy as np

    with ours.OrbaxCheckpointer(tmp_path) as manager:
        for step in range(2):
            manager.save(step, {"w": np.ones(2)}, force=True)
        (tmp_path / "1" / "checkpoint.json").write_bytes(b"{}")
        assert [checkpoint.step for checkpoint in manager.checkpoints] == [0]
        assert manager.latest.step == manager.checkpointables_metadata().step == 0
        with pytest.raises(NotFoundError):
            manager.checkpointables_metadata(1)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"step_prefix": "s"}, "step_prefix"),
        ({"should_save_fn": lambda _step, _last: True}, "should_save_fn"),
        ({"todelete_subdir": "d"}, "todelete_subdir"),
    ],
)
def test_options_that_are_not_supported_are_refused_by_name(tmp_path, ours, ocp, options, word):
    with pytest.raises(OptionError, match=word):
        ours.OrbaxCheckpointManager(tmp_path, options=ocp.CheckpointManagerOptions(**options))


def test_what_else_is_not_supported_is_refused_by_name(tmp_path, ours, ocp):
    import numpy as np
    from orbax.checkpoint import v1

    manager = ours.OrbaxCheckpointManager(tmp_path / "a")
    for args, word in [
        (ocp.args.NumpyRandomKeySave(()), "NumpyRandomKeySaveArgs"),
        (ocp.args.PyTreeSave({"w": 1}, save_args={"w": ocp.SaveArgs()}), "save_args"),
    ]:
        with pytest.raises(OptionError, match=word):
            manager.save(0, args=args)
    manager.save(0, args=ocp.args.StandardSave({"w": np.ones(1)}))
    with pytest.raises(OptionError, match="placeholders"):
        manager.restore(0, args=ocp.args.StandardRestore({"w": ...}))
    with pytest.raises(OptionError, match=r"CheckpointManager\.metadata"):
        manager.metadata()
    with pytest.raises(NotFoundError, match="has no 'model'"):
        manager.restore(0, args=ocp.args.Composite(model=ocp.args.JsonRestore()))
    manager.close()
    with pytest.raises(OptionError, match="minimum_interval_secs"):
        ours.OrbaxCheckpointer(
            tmp_path,
            save_decision_policy=v1.training.save_decision_policies.ContinuousCheckpointingPolicy(
                minimum_interval_secs=5
            ),
        )
    with pytest.raises(OptionError, match="logger"):
        ours.OrbaxCheckpointer(tmp_path, logger=None)
    with ours.OrbaxCheckpointer(tmp_path / "b") as other:
        with pytest.raises(OptionError, match="overwrite"):
            other.save(0, {"w": np.ones(1)}, overwrite=True)
        with pytest.raises(OptionError, match="'metrics' is a reserved name"):
            other.save_checkpointables(0, {"metrics": {"w": np.ones(1)}})
        with pytest.raises(OptionError, match=r"Checkpointer\.load_async"):
            other.load_async(0)
        with pytest.raises(NotFoundError, match="no checkpoint"):
            other.load()


def test_a_deleted_step_is_saved_again_and_a_saved_one_is_not(tmp_path, ours, ocp):
    import numpy as np

    def args(value):
        return ocp.args.StandardSave({"w": np.full(2, value)})

    with ours.OrbaxCheckpointManager(tmp_path / "a") as manager:
        for step in range(2):
            assert manager.save(step, args=args(step))
        manager.wait_until_finished()
        manager.delete(1)
        assert manager.save(1, args=args(5))
        manager.wait_until_finished()
        assert manager.all_steps() == [0, 1]
        assert not manager.save(1, args=args(6))
        assert not manager.save(0, args=args(6))
        assert not manager.should_save(0)
        with pytest.raises(AlreadyExistsError, match="saved already"):
            manager.save(1, args=args(6), force=True)
        assert (manager.restore(1)["w"] == 5).all()
    with ours.OrbaxCheckpointer(tmp_path / "b") as other:
        assert other.save(1, {"w": np.ones(1)})
        with pytest.raises(AlreadyExistsError, match="saved already"):
            other.save(1, {"w": np.ones(1)})
        assert other.delete(1)
        assert other.save(1, {"w": np.ones(1)})
        assert [one.step for one in other.checkpoints] == [1]


def test_random_keys_of_jax_come_back_as_keys(tmp_path, ours, ocp):
    import jax

    keys = {
        "k": jax.random.key(7, impl="rbg"),
        "more": [jax.random.split(jax.random.key(1), 3), "x", None],
    }
    with ours.OrbaxCheckpointManager(tmp_path) as manager:
        manager.save(
            0,
            args=ocp.args.Composite(
                one=ocp.args.JaxRandomKeySave(keys["k"]), all=ocp.args.PyTreeSave(keys)
            ),
        )
        manager.wait_until_finished()
        restored = manager.restore(
            0,
            args=ocp.args.Composite(
                one=ocp.args.JaxRandomKeyRestore(), all=ocp.args.PyTreeRestore()
            ),
        )
        assert manager.item_metadata(0)["one"].dtype == keys["k"].dtype
    assert (jax.random.normal(restored["one"], (2,)) == jax.random.normal(keys["k"], (2,))).all()
    assert restored["all"]["more"][1:] == ["x", None]
    again = restored["all"]["more"][0]
    assert again.dtype == keys["more"][0].dtype
    assert (jax.random.key_data(again) == jax.random.key_data(keys["more"][0])).all()


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:Sharding info not provided")
def test_restore_args_do_what_orbax_does_or_are_refused_by_name(tmp_path, ours, ocp):
    import jax
    import jax.numpy as jnp
    import numpy as np

    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    item = {
        "w": jax.ShapeDtypeStruct((8,), jnp.float32, sharding=sharding),
        "n": np.zeros(3, np.float32),
        "i": 0,
    }
    plain, of_array = ocp.RestoreArgs, ocp.ArrayRestoreArgs
    usual = {"w": of_array(sharding=sharding), "n": plain(), "i": plain()}
    managers = ocp.CheckpointManager, ours.OrbaxCheckpointManager
    for kind in managers:
        with kind(tmp_path / kind.__name__) as manager:
            saved = {"w": jnp.arange(8.0), "n": np.arange(3, dtype=np.float32), "i": 3}
            manager.save(0, args=ocp.args.PyTreeSave(saved))
            manager.wait_until_finished()

    def restore(kind, restore_args):
        with kind(tmp_path / kind.__name__) as manager:
            args = ocp.args.PyTreeRestore(item, restore_args={**usual, **restore_args})
            values = manager.restore(0, args=args)
        return [(type(one), getattr(one, "dtype", None), np.sum(one)) for one in values.values()]

    construct = ocp.checkpoint_utils.construct_restore_args
    for restore_args in (
        {"w": plain(dtype=jnp.bfloat16)},
        {"w": of_array(sharding=sharding, dtype=jnp.bfloat16)},
        {"w": plain(restore_type=np.ndarray)},
        {"w": of_array(sharding=sharding, global_shape=(8,))},
        {"n": of_array(sharding=sharding)},
        {"n": plain(dtype=np.float64)},
        construct(item),
        construct({**item, "w": jax.ShapeDtypeStruct((8,), jnp.float32)}),
    ):
        theirs, answer = (restore(kind, restore_args) for kind in managers)
        assert answer == theirs, restore_args
    for restore_args, word in [
        ({"w": of_array(sharding=sharding, global_shape=(4,), strict=False)}, "strict=False"),
        ({"w": of_array(sharding=sharding, global_shape=(4,))}, "global_shape"),
        ({"w": plain(restore_type=float)}, "restore_type"),
        ({"i": plain(dtype=np.float32)}, "dtype"),
        ({"i": of_array(sharding=sharding)}, "sharding"),
    ]:
        with pytest.raises(OptionError, match=word):
            restore(ours.OrbaxCheckpointManager, restore_args)
    with (
        ours.OrbaxCheckpointManager(tmp_path / "OrbaxCheckpointManager") as manager,
        pytest.raises(OptionError, match="strict"),
    ):
        manager.restore(0, args=ocp.args.StandardRestore(item, strict=False))


@pytest.mark.parametrize("steps", [[1, 2], [2]])
def test_a_complete_step_that_a_killed_run_has_not_published_is_the_latest(
    tmp_path, ours, ocp, steps
):
    import numpy as np

    def left(root):
        with ours.OrbaxCheckpointer(root) as manager:
            for step in steps:
                manager.save(step, {"w": np.full(2, step)}, force=True)
        undo_commit(root / "2")

    left(tmp_path / "load")
    with ours.OrbaxCheckpointer(tmp_path / "load") as manager:
        assert (manager.load()["w"] == 2).all()
        assert manager.save(3, {"w": np.full(2, 3)}, force=True)
        assert manager.all_steps() == [*steps, 3]
    left(tmp_path / "latest")
    with ours.OrbaxCheckpointer(tmp_path / "latest") as manager:
        assert manager.latest.step == 2
    left(tmp_path / "read")
    reading = ocp.CheckpointManagerOptions(read_only=True)
    with ours.OrbaxCheckpointManager(tmp_path / "read", options=reading) as manager:
        assert manager.all_steps() == steps[:-1]


def test_names_of_items_are_not_patterns(tmp_path, ours, ocp):
    import jax
    import numpy as np

    names = ["a*", "ab", "p[0]", "p/q", "p"]
    with ours.OrbaxCheckpointManager(tmp_path) as manager:
        manager.save(
            0,
            args=ocp.args.Composite(
                **{
                    name: ocp.args.StandardSave({"x": np.full(2, i)})
                    for i, name in enumerate(names)
                }
            ),
        )
        manager.wait_until_finished()
        # The dtype is another: values are cast.
        like = ocp.args.StandardRestore({"x": jax.ShapeDtypeStruct((2,), np.int32)})
        for i, name in enumerate(names):
            elements = manager.restore(0, args=ocp.args.Composite(**{name: like}))[name]["x"]
            assert (elements.dtype, list(elements)) == (np.int32, [i, i])


def test_json_is_what_json_has_and_what_cannot_be_restored_is_not_saved(tmp_path, ours, ocp):
    import numpy as np

    args = ocp.args
    with ours.OrbaxCheckpointManager(tmp_path) as manager:
        for odd, word in [
            (args.StandardSave({"a": 1, 3: 2}), "'i' has a dict whose keys"),
            (args.JsonSave({"a": np.ones(1)}), "'i' is a JsonSave"),
        ]:
            with pytest.raises(OptionError, match=word):
                manager.save(0, args=args.Composite(i=odd))
        manager.save(
            0,
            args=args.Composite(j=args.JsonSave({"a": (1, 2), 3: "x"}), e=args.StandardSave({})),
            custom_metadata={"q": 1},
        )
        manager.wait_until_finished()
        restored = manager.restore(
            0, args=args.Composite(j=args.JsonRestore(), e=args.StandardRestore({}))
        )
        assert dict(restored.items()) == {"j": {"a": [1, 2], "3": "x"}, "e": {}}
        assert manager.metadata(0).custom_metadata == {"q": 1}


def test_a_step_is_kept_by_the_time_of_its_commit(tmp_path, ours, ocp):
    import numpy as np

    options = ocp.CheckpointManagerOptions(max_to_keep=1, keep_time_interval=timedelta(hours=1))
    with ours.OrbaxCheckpointManager(tmp_path, options=options) as manager:
        for step in range(4):
            manager.save(step, args=ocp.args.StandardSave({"w": np.ones(1)}))
        manager.wait_until_finished()
        assert manager.all_steps() == [0, 3]


@pytest.mark.long
def test_the_program_of_the_page_runs(tmp_path):
    section = (DOCS / "integrations.md").read_text().split("## Orbax's managers")[1]
    (block,) = re.findall(
        r"^```python\n(.*?)^```", section.split("\n## ")[0], re.MULTILINE | re.DOTALL
    )
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", block],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert shardckpt.CheckpointManager(tmp_path / "runs" / "v1").all_steps() == [2, 4, 6]
