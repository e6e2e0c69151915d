"""Versions published by one process: every version reads as what was published, by every reader;
followers get the same."""

from __future__ import annotations

import json
import shutil
import signal
import threading
import uuid

import ml_dtypes
import numpy as np
import pytest
import torch
import zarr
from failing import removal_refused
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import shardckpt
from shardckpt import Box
from shardckpt.errors import (
    CorruptionError,
    FormatError,
    LeafError,
    MismatchError,
    MissingDataError,
    NamesMismatchError,
    OptionError,
    OtherJobError,
    StorageError,
)
from shardckpt.io.store import Store
from shardckpt.runs import committing
from shardckpt.runs.catalog import catalog
from shardckpt.runs.pinning import pin
from shardckpt.runs.steps import list_steps
from shardckpt.writing import attempt


def some_changed(array, count, rng):
    """A copy of which some elements have other bits."""
    copy = np.ascontiguousarray(array).copy()
    rows = copy.reshape(-1).view(np.uint8).reshape(copy.size, -1)
    chosen = rng.choice(copy.size, min(count, copy.size), replace=False)
    rows[chosen, rng.integers(0, copy.itemsize)] ^= np.uint8(1)
    return copy


def of_many_kinds(rng):
    return {
        "model": {
            "w": rng.standard_normal((70, 333)).astype(ml_dtypes.bfloat16),
            "experts": rng.standard_normal((4, 32, 128)).astype(np.float32),
            "fp8": rng.standard_normal((64, 64)).astype(ml_dtypes.float8_e4m3fn),
            "scale": np.array(3.0, np.float32),
            "complex": rng.standard_normal(20).astype(np.complex128),
            "mask": rng.random(100) < 0.5,
            "steps": np.arange(10),
            "nothing": np.zeros((0, 3), np.float32),
        },
        "step": 0,
    }


def bits(state):
    return {
        name: (array.dtype, array.shape, array.tobytes()) for name, array in state["model"].items()
    }


def published(url):
    return {int(entry.name): shardckpt.open(str(entry.location)).record for entry in catalog(url)}


@pytest.fixture
def run(store):
    """Five versions of one state, and what each of them has."""
    rng, url, states = np.random.default_rng(0), str(store), []
    state = of_many_kinds(rng)
    with shardckpt.Publisher(url, anchor_every=4, keep=None) as publisher:
        for step in range(6):
            changed = {
                name: some_changed(array, 5, rng) if array.size > 10 else array
                for name, array in state["model"].items()
            }
            changed["mask"] = changed["mask"].view(np.uint8).clip(0, 1).view(bool)
            state = {"model": changed, "step": step}
            publisher.publish(step, state)
            assert publisher.wait().step == step
            states.append(state)
    return url, states


@pytest.mark.long
def test_each_version_is_read_verified_and_restored_like_any_checkpoint(run):
    url, states = run
    for step, (state, record) in enumerate(zip(states, published(url).values(), strict=True)):
        assert record.compression == (None if step in (0, 4) else "difference")
        checkpoint = shardckpt.open(f"{url}/{step}")
        assert bits(shardckpt.restore(checkpoint)) == bits(state)
        assert (
            checkpoint.read("model/w", Box((3, 100), (60, 300))).tobytes()
            == state["model"]["w"][3:60, 100:300].tobytes()
        )
        assert checkpoint.verify().ok
        assert (
            checkpoint.fingerprint()
            == checkpoint.fingerprint(recorded=False)
            == shardckpt.fingerprint(state)
        )
        if step not in (0, 4):
            assert record.totals["stored_bytes"] < 5000


@pytest.mark.long
def test_a_follower_gets_each_version_and_reads_only_differences(run):
    url, states = run
    like = {name: np.zeros_like(array) for name, array in states[0]["model"].items()}
    with shardckpt.follow(url, {"model": like, "step": 0}, mode="each") as follower:
        for step, state in enumerate(states):
            version = follower.poll()
            version.prepare()
            applied = version.apply()
            assert applied["step"] == version.step == step
            assert bits(applied) == bits(state)
            assert applied["model"]["w"] is like["w"]
            assert set(version.prove()) == {f"model/{name}" for name in like}
            assert (version.base is None) == (step in (0, 4))
            if version.base is not None:
                assert version.changed == {
                    f"model/{name}" for name, array in like.items() if array.size > 10
                }
                assert version.checkpoint.stats.bytes_read == 0, (
                    "the elements were read, and not the differences"
                )
        assert follower.poll() is None


def test_other_tools_see_the_elements_or_fail(tmp_path):
    rng = np.random.default_rng(0)
    state = {"w": rng.standard_normal((300, 200)).astype(np.float32)}
    with shardckpt.Publisher(tmp_path / "p") as publisher:
        for step in range(3):
            state = {"w": some_changed(state["w"], 100, rng)}
            publisher.publish(step, state)
            publisher.wait()
    last = shardckpt.open(tmp_path / "p" / "2")
    np.testing.assert_array_equal(
        zarr.open_group(last.zarr_store(), mode="r")["w"][...], state["w"]
    )
    with pytest.raises(FormatError, match="differences from those of another version"):
        last.stock_spec("w")
    assert not [*(tmp_path / "p" / "2").rglob("manifest.ocdbt")], (
        "an index would show differences for elements"
    )
    shardckpt.reshard(tmp_path / "p" / "2", tmp_path / "alone", mesh=shardckpt.Mesh((2,), ("x",)))
    shutil.rmtree(tmp_path / "p" / "1")
    np.testing.assert_array_equal(shardckpt.restore(tmp_path / "alone")["w"], state["w"])
    assert shardckpt.open(tmp_path / "alone").verify().ok
    with pytest.raises(
        MissingDataError, match=r"w.*differences from .*/p/1 .*no checkpoint is there"
    ):
        shardckpt.restore(tmp_path / "p" / "2")
    with pytest.raises(OptionError, match=r"/p/0 is the base of checkpoints beside it.*2"):
        shardckpt.save(tmp_path / "p" / "0", state, options=shardckpt.SaveOptions(overwrite=True))


@pytest.mark.parametrize("kind", [torch.float32, torch.float16])
def test_tensors_are_published_in_another_dtype_rounded_as_torch_rounds(tmp_path, kind):
    model = {"w": torch.randn(300, 100).to(kind), "n": torch.arange(5)}
    model["tied"] = model["w"]
    with shardckpt.Publisher(tmp_path, dtype=torch.bfloat16, exclude="**/n") as publisher:
        for step in range(3):
            model["w"].add_(1e-3 * torch.randn(300, 100).to(kind))
            publisher.publish(step, {"model": model})
            publisher.wait()
            version = shardckpt.open(tmp_path / str(step))
            assert version.names() == ["model/w", "model/tied"]
            assert version.record.totals["tensors"] == 1
            expected = model["w"].to(torch.bfloat16)
            assert torch.equal(
                torch.from_numpy(version.read("model/w").view(np.int16)), expected.view(torch.int16)
            )
            assert version.verify().ok


def test_a_first_version_refuses_patterns_that_leave_nothing_out(tmp_path):
    state = {"w": np.zeros(3), "n": np.zeros(3)}
    with shardckpt.Publisher(tmp_path, exclude=["n", "m"]) as publisher:
        for step in range(2):
            with pytest.raises(NamesMismatchError, match=r"exclude=\['m'\] selects none of its"):
                publisher.publish(step, state)
    for nothing in ([], lambda _name: False):
        with shardckpt.Publisher(tmp_path, exclude=nothing) as publisher:
            publisher.publish(0, state)
    with shardckpt.Publisher(tmp_path, exclude="n") as publisher:
        publisher.publish(1, state)
        publisher.publish(2, {"w": state["w"]})
    assert shardckpt.open(tmp_path / "2").names() == ["w"]


def test_arrays_that_torch_cannot_share_are_published_in_another_dtype(tmp_path):
    """Strides that are negative, or not a multiple of an element's bytes; another byte order."""
    rows = np.zeros(100, np.dtype([("flag", "u1"), ("w", "f4")]))
    rows["w"] = np.arange(100)
    reverse = np.arange(300, dtype=np.float32)[::-1]
    state = {"reverse": reverse, "rows": rows["w"], "big": reverse.astype(">f4")}
    with shardckpt.Publisher(tmp_path, dtype="bfloat16") as publisher:
        publisher.publish(0, state)
    restored = shardckpt.restore(tmp_path / "0")
    for name, array in state.items():
        assert (restored[name] == array.astype(ml_dtypes.bfloat16)).all()


def test_tensors_that_come_go_or_change_their_form_are_stored_whole(tmp_path):
    rng = np.random.default_rng(1)
    a = {"w": rng.random((64, 64)), "v": rng.random(100)}
    b = {"w": rng.random((64, 65)), "v": a["v"].astype(np.float32), "new": rng.random(9)}
    like = {name: np.zeros_like(array) for name, array in a.items()}
    with shardckpt.Publisher(tmp_path) as publisher, shardckpt.follow(tmp_path, like) as follower:
        for step, state in enumerate([a, b, a, {"v": a["v"]}]):
            publisher.publish(step, state)
            publisher.wait()
            restored = shardckpt.restore(tmp_path / str(step))
            assert {name: array.tobytes() for name, array in restored.items()} == {
                name: array.tobytes() for name, array in state.items()
            }
            assert shardckpt.open(tmp_path / str(step)).record.compression == (
                "difference" if step else None
            )
            version = follower.poll()
            if state is a:
                version.prepare().apply()
                assert all((like[name] == a[name]).all() for name in a)
                version.prove()
            else:
                with pytest.raises(MismatchError):
                    version.prepare()


def test_an_expert_without_a_change_costs_no_bytes(tmp_path):
    rng = np.random.default_rng(0)
    experts = rng.random((16, 256, 256)).astype(np.float32)
    with shardckpt.Publisher(tmp_path) as publisher:
        publisher.publish(0, {"experts": experts})
        experts[3, 100:105, 7] += 1
        publisher.wait()
        publisher.publish(1, {"experts": experts})
        publisher.wait()
    totals = shardckpt.open(tmp_path / "1").record.totals
    assert totals["stored_bytes"] <= 4 * totals["chunks"] + 100


def test_a_step_that_is_not_newer_supersedes_the_later_ones_and_begins_with_all_elements(tmp_path):
    state = {"w": np.arange(1000.0)}
    like = {"w": np.zeros(1000)}
    follower = shardckpt.follow(tmp_path, like)
    with shardckpt.Publisher(tmp_path) as publisher:
        for step in (10, 20, 30):
            publisher.publish(step, {"w": state["w"] + step})
            publisher.wait()
    follower.poll().prepare().apply()
    with shardckpt.Publisher(tmp_path) as publisher:
        publisher.publish(20, state)
        publisher.wait()
        version = follower.poll()
        assert (version.step, version.went_back, version.base) == (20, True, None)
        version.prepare().apply()
        assert (like["w"] == state["w"]).all()
        publisher.publish(25, {"w": state["w"] + 1})
        publisher.wait()
        assert [version.step for version in [follower.poll()]] == [25]
    assert {entry.name: entry.superseded for entry in catalog(tmp_path)} == {
        "10": False,
        "20": False,
        "25": False,
        "30": True,
    }


def test_versions_are_pruned_but_not_those_that_kept_ones_differ_from(tmp_path):
    state = {"w": np.arange(1000.0)}
    with shardckpt.Publisher(tmp_path, anchor_every=4, keep=2) as publisher:
        for step in range(11):
            publisher.publish(step, {"w": state["w"] + step * 1e-9})
            publisher.wait()
    assert sorted(published(tmp_path)) == [8, 9, 10]


def test_a_version_that_fails_is_told_once_and_followed_by_all_elements(tmp_path):
    publisher = shardckpt.Publisher(tmp_path)
    publisher.publish(0, {"w": np.zeros(10)})
    publisher.wait()
    (tmp_path / "1").write_text("a file in the way")
    heard = []
    for step in (1, 2, 3):
        try:
            publisher.publish(step, {"w": np.ones(10) * step})
            publisher.wait()
        except StorageError as e:
            heard.append(str(e))
    publisher.close()
    assert len(heard) == 1
    assert "/1" in heard[0]
    assert published(tmp_path)[2].compression is None
    with pytest.raises(OptionError, match="closed"):
        publisher.publish(3, {})


def test_a_version_is_the_last_one_though_what_it_replaces_cannot_be_removed(tmp_path):
    with shardckpt.Publisher(tmp_path) as publisher:
        publisher.publish(1, {"w": np.zeros(1000, np.float32)})
    with removal_refused("00000"), shardckpt.Publisher(tmp_path) as publisher:
        publisher.publish(1, {"w": np.ones(1000, np.float32)})
        assert publisher.wait().attempt == shardckpt.open(tmp_path / "1").record.attempt
        assert len([*(tmp_path / "1").glob("*/")]) == 2


def test_a_version_whose_wait_was_interrupted_is_waited_for_again(tmp_path, monkeypatch):
    gate = threading.Event()

    def fails(*_arguments):
        gate.wait(60)
        raise StorageError("the disk is full")

    monkeypatch.setattr(attempt, "assemble", fails)
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    with shardckpt.Publisher(tmp_path) as publisher:
        publisher.publish(0, {"w": np.zeros(10)})
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(KeyboardInterrupt):
            publisher.wait()
        signal.signal(signal.SIGALRM, before)
        gate.set()
        with pytest.raises(StorageError, match="is full"):
            publisher.wait()
        assert publisher.wait() is None


def test_what_cannot_be_published_is_refused_by_name(tmp_path):
    with pytest.raises(OptionError, match="anchor_every"):
        shardckpt.Publisher(tmp_path, anchor_every=0)
    with (
        shardckpt.Publisher(tmp_path, include="model/**") as publisher,
        pytest.raises(NamesMismatchError, match="include="),
    ):
        publisher.publish(0, {"w": np.zeros(3)})
    with shardckpt.Publisher(tmp_path) as publisher, pytest.raises(OptionError, match="step=-1"):
        publisher.publish(-1, {"w": np.zeros(3)})


def test_jax_arrays_are_published_before_they_are_donated_and_followed_as_new_arrays(tmp_path):
    import jax
    import jax.numpy as jnp

    step_of = jax.jit(lambda w: w + 1, donate_argnums=0)
    weights, expected = jnp.arange(20_000, dtype=jnp.float32), []
    like = {"w": jnp.zeros(20_000, jnp.bfloat16)}
    with shardckpt.Publisher(tmp_path, dtype=jnp.bfloat16) as publisher:
        for step in range(3):
            expected.append(np.asarray(weights.astype(jnp.bfloat16)))
            publisher.publish(step, {"w": weights})
            weights = step_of(weights)
            publisher.wait()
    with shardckpt.follow(tmp_path, like, mode="each") as follower:
        for array in expected:
            version = follower.poll().prepare()
            applied = version.apply()
            assert isinstance(applied["w"], jax.Array)
            assert np.asarray(applied["w"]).tobytes() == array.tobytes()
            assert version.prove() == ["w"]


def test_checkpoints_without_a_fingerprint_are_followed_whole_and_cannot_be_proved(tmp_path):
    like = {"w": np.zeros(10)}
    with shardckpt.follow(tmp_path / "run", like) as follower:
        assert follower.poll() is None
        for step in range(2):
            shardckpt.save(tmp_path / "run" / str(step), {"w": np.full(10, step + 1.0)})
            version = follower.poll().prepare()
            version.apply()
            assert (like["w"] == step + 1).all()
            with pytest.raises(OptionError, match="no fingerprint was recorded"):
                version.prove()


def test_a_version_is_applied_once_it_is_prepared_and_until_a_later_one_is(tmp_path):
    like = {"w": np.zeros(10)}
    with (
        shardckpt.Publisher(tmp_path) as publisher,
        shardckpt.follow(tmp_path, like, mode="each") as follower,
    ):
        for step in range(2):
            publisher.publish(step, {"w": np.full(10, step + 1.0)})
            publisher.wait()
        first, second = follower.poll(), follower.poll()
        with pytest.raises(OptionError, match="call prepare"):
            first.apply()
        first.prepare()
        with pytest.raises(OptionError, match="call apply"):
            first.prove()
        second.prepare()
        with pytest.raises(OptionError, match="call prepare"):
            first.apply()
        assert (like["w"] == 0).all()
        second.apply()
        assert (like["w"] == 2).all()


def finish(publisher, step, state):
    """Publish a last version: its error comes out here, now or at the end."""
    publisher.publish(step, state)
    publisher.close()


def publish_all(url, states, **options):
    with shardckpt.Publisher(url, **options) as publisher:
        for step, state in states:
            publisher.publish(step, state)
            publisher.wait()


def test_the_same_elements_in_chunks_of_other_shapes_are_read_anew(tmp_path):
    rng = np.random.default_rng(0)
    array, like = rng.random((512, 300)).astype(np.float32), {"w": np.zeros((512, 300), np.float32)}
    by_columns = {
        "w": shardckpt.Sharding(shardckpt.Mesh((2,), ("x",)), shardckpt.PartitionSpec(None, "x"))
    }
    with shardckpt.follow(tmp_path, like) as follower:
        for step, shardings in enumerate([{}, by_columns, {}]):
            options = shardckpt.SaveOptions(fingerprint=True, shardings=shardings)
            shardckpt.save(tmp_path / str(step), {"w": array}, options=options)
            version = follower.poll().prepare()
            like["w"][:] = 0
            follower.stale.add("w")
            version.apply()
            assert (like["w"] == array).all()
            version.prove()
    assert len({shardckpt.open(tmp_path / str(step)).info("w").chunks for step in range(2)}) == 2


def test_going_back_does_not_replace_what_a_pinned_version_needs(tmp_path):
    publish_all(tmp_path, [(step, {"w": np.arange(1000.0) + step}) for step in range(6)])
    pin(tmp_path / "5")
    publisher = shardckpt.Publisher(tmp_path)
    with pytest.raises(
        OptionError,
        match="version 5 is pinned or tagged, and version 3, which it needs, would be replaced",
    ):
        finish(publisher, 3, {"w": np.zeros(1000)})
    assert not any(entry.superseded for entry in catalog(tmp_path))
    assert (shardckpt.restore(tmp_path / "5")["w"] == np.arange(1000.0) + 5).all()


def test_a_version_that_cannot_be_published_supersedes_nothing(tmp_path):
    publish_all(tmp_path, [(step, {"w": np.zeros(10)}) for step in range(3)])
    with shardckpt.Publisher(tmp_path) as publisher, pytest.raises(LeafError):
        publisher.publish(1, {"w": object()})
    assert not any(entry.superseded for entry in catalog(tmp_path))


def test_a_version_that_fails_before_it_is_published_supersedes_and_deletes_nothing(
    tmp_path, monkeypatch
):
    def fails(*_arguments):
        raise StorageError("the disk is full")

    publish_all(tmp_path, [(step, {"w": np.full(10, float(step))}) for step in (1, 2, 3)])
    publisher = shardckpt.Publisher(tmp_path)
    for _ in range(2):
        with monkeypatch.context() as full:
            full.setattr(attempt, "assemble", fails)
            publisher.publish(1, {"w": np.zeros(10)})
            with pytest.raises(StorageError, match="is full"):
                publisher.wait()
        assert not any(entry.superseded for entry in catalog(tmp_path))
        assert shardckpt.follow(tmp_path, {"w": np.zeros(10)}).poll().step == 3
    finish(publisher, 4, {"w": np.zeros(10)})
    publisher.close()
    assert sorted(published(tmp_path)) == [1, 2, 3, 4]
    for step in (1, 2, 3):
        assert (shardckpt.restore(tmp_path / str(step))["w"] == step).all()


def test_a_manager_does_not_take_over_a_directory_of_versions(tmp_path):
    with shardckpt.Publisher(tmp_path) as publisher:
        for step in range(3):
            publisher.publish(step, {"w": np.full(1000, step, np.float32)})
            publisher.wait()
    manager = shardckpt.CheckpointManager(tmp_path, every=1, keep=1)
    manager.save(3, {"w": np.zeros(1000, np.float32)})
    with pytest.raises(OptionError, match="a Publisher keeps its versions"):
        manager.close()
    (outcome,) = committing.commit(tmp_path)
    assert outcome.state == "refused"
    assert "is not a version, but a Publisher keeps its versions there" in outcome.reason
    shardckpt.CheckpointManager(tmp_path).restore()
    assert [info.step for info in list_steps(Store.open(tmp_path))] == [0, 1, 2]


def test_a_publisher_whose_job_was_replaced_publishes_nothing_more(tmp_path, monkeypatch):
    """The first version of the later job comes just before the earlier job publishes its third."""
    assembles = attempt.assemble
    later = shardckpt.Publisher(tmp_path, coordinator=shardckpt.SingleProcess())
    earlier = shardckpt.Publisher(tmp_path, coordinator=shardckpt.SingleProcess())

    def publish(publisher, *steps):
        for step in steps:
            publisher.publish(step, {"w": np.full(1000, float(step)) + (publisher is later)})
            publisher.wait()

    def later_job_begins(*arguments):
        monkeypatch.setattr(attempt, "assemble", assembles)
        publish(later, 4)
        return assembles(*arguments)

    publish(earlier, 1, 2)
    monkeypatch.setattr(attempt, "assemble", later_job_begins)
    with pytest.raises(OtherJobError, match="took over"):
        publish(earlier, 3)
    assert [outcome.state for outcome in committing.commit(tmp_path)] == ["refused"]
    publish(later, 5)
    for step in (4, 5, 6):
        with pytest.raises(OtherJobError, match="took over"):
            publish(earlier, step)
    publish(later, 6)
    earlier.close()
    later.close()
    assert sorted(published(tmp_path)) == [1, 2, 4, 5, 6]
    for step in (4, 5, 6):
        assert (shardckpt.restore(tmp_path / str(step))["w"] == step + 1).all()
        assert len(shardckpt.open(tmp_path / str(step)).record.structure.chain) == step - 4


def test_a_version_of_a_few_bytes_needs_little_room(tmp_path, monkeypatch):
    """A save of all elements asks for room for all of them, before it writes."""
    state = {"w": np.random.default_rng(0).standard_normal(200_000)}
    with shardckpt.Publisher(tmp_path) as publisher:
        publisher.publish(0, state)
        publisher.wait()
        asked = []
        monkeypatch.setattr(attempt, "check_space", lambda _place, nbytes: asked.append(nbytes))
        state["w"][7] += 1
        publisher.publish(1, state)
        publisher.wait()
    assert asked == []


def test_the_directory_of_a_manager_is_refused(tmp_path):
    with shardckpt.CheckpointManager(tmp_path) as manager:
        manager.save(1, {"w": np.zeros(10)})
    publisher = shardckpt.Publisher(tmp_path, keep=1)
    with pytest.raises(OptionError, match="a CheckpointManager keeps its run there"):
        finish(publisher, 1, {"w": np.ones(10)})
    assert (shardckpt.restore(tmp_path / "1")["w"] == 0).all()


def test_tensors_that_prove_finds_changed_are_copied_again(tmp_path):
    like = {"w": np.zeros(10), "v": np.zeros(10)}
    publish_all(tmp_path, [(0, {"w": np.ones(10), "v": np.ones(10)})])
    with shardckpt.follow(tmp_path, like) as follower:
        version = follower.poll().prepare()
        version.apply()
        like["w"][3] = 7
        with pytest.raises(CorruptionError, match="'w'"):
            version.prove()
        version.apply()
        assert sorted(version.prove()) == ["v", "w"]


def test_a_follower_of_each_version_gets_those_from_after_a_rollback_and_hears_of_it(tmp_path):
    def states(steps, add):
        return [(step, {"w": np.full(10, step + add)}) for step in steps]

    seen = []
    with shardckpt.follow(tmp_path, None, mode="each") as follower:
        for steps, add in ((range(1, 5), 0.0), ((2, 3, 6), 100.0)):
            publish_all(tmp_path, states(steps, add))
            while (version := follower.poll()) is not None:
                seen.append((version.step, version.went_back, version.prepare().apply()["w"][0]))
    assert seen == [(step, False, step) for step in range(1, 5)] + [
        (2, True, 102),
        (3, False, 103),
        (6, False, 106),
    ]


def test_without_tensors_to_fill_each_version_gives_arrays_of_its_own(tmp_path):
    states = [{"w": np.ones(3)}, {"w": np.ones(4), "v": np.ones(2)}, {"v": np.zeros(2)}]
    with shardckpt.Publisher(tmp_path) as publisher, shardckpt.follow(tmp_path, None) as follower:
        for step, state in enumerate(states):
            publisher.publish(step, state)
            publisher.wait()
            applied = follower.poll().prepare().apply()
            assert {name: array.tobytes() for name, array in applied.items()} == {
                name: array.tobytes() for name, array in state.items()
            }


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"anchor_every": 129}, "at most 128"),
        ({"dtype": "int8"}, "floating-point"),
        ({"include": 3}, "3"),
        ({"coordinator": 3}, "oordinator"),
    ],
)
def test_options_of_a_publisher_that_make_no_sense_are_refused(tmp_path, options, words):
    with pytest.raises(OptionError, match=words):
        shardckpt.Publisher(tmp_path, **options)


def damaged(path, at=-10):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_damage_of_a_difference_or_of_its_base_is_found_by_every_reader(tmp_path):
    rng = np.random.default_rng(0)
    states = [{"w": rng.random((100, 100))}]
    with shardckpt.Publisher(tmp_path / "p") as publisher:
        for step in range(3):
            states.append({"w": some_changed(states[-1]["w"], 50, rng)})
            publisher.publish(step, states[-1])
            publisher.wait()
    for step in range(3):
        place = tmp_path / f"copy{step}"
        shutil.copytree(tmp_path / "p", place)
        like = {"w": np.full((100, 100), 7.0)}
        with shardckpt.follow(place, like, mode="each") as follower:
            for version in [follower.poll() for _ in range(step)]:
                version.prepare().apply()
            before = like["w"].copy()
            (data,) = (place / str(step)).rglob("d/00000")
            damaged(data)
            with pytest.raises(CorruptionError, match=rf"w.*/{step}/"):
                follower.poll().prepare()
            assert (like["w"] == before).all()
        with pytest.raises(CorruptionError, match=rf"w.*/{step}/"):
            shardckpt.restore(place / "2")
        assert not shardckpt.open(place / "2").verify().ok


def test_a_base_with_other_contents_is_refused(tmp_path):
    rng = np.random.default_rng(0)
    state = {"w": rng.random((100, 100))}
    for name in ("p", "other"):
        with shardckpt.Publisher(tmp_path / name) as publisher:
            publisher.publish(0, {"w": state["w"] + len(name)})
            publisher.wait()
            publisher.publish(1, {"w": some_changed(state["w"] + len(name), 9, rng)})
            publisher.wait()
    shutil.rmtree(tmp_path / "p" / "0")
    shutil.copytree(tmp_path / "other" / "0", tmp_path / "p" / "0")
    with pytest.raises(MissingDataError, match="another checkpoint has taken its place"):
        shardckpt.restore(tmp_path / "p" / "1")


def test_a_base_that_was_replaced_by_the_same_contents_with_another_chain_is_told_as_that(
    tmp_path,
):
    for place, steps in (("run", (0, 10, 20, 30)), ("other", (0, 15, 20))):
        states = [(step, {"w": np.arange(1000) + (np.arange(1000) < step)}) for step in steps]
        publish_all(tmp_path / place, states, catch_up=None)
    shutil.rmtree(tmp_path / "run" / "20")
    for step in ("15", "20"):
        shutil.copytree(tmp_path / "other" / step, tmp_path / "run" / step)
    with pytest.raises(FormatError, match=r"run/20: it was replaced .* Read the newest version"):
        shardckpt.open(tmp_path / "run" / "30").read("w")
    assert shardckpt.open(tmp_path / "run" / "20").verify().ok


def test_records_of_versions_with_differences_are_refused_by_name_by_earlier_releases(tmp_path):
    with shardckpt.Publisher(tmp_path) as publisher:
        for step in range(2):
            publisher.publish(step, {"w": np.arange(10.0) + step})
            publisher.wait()
    versions = {}
    for step in range(2):
        for path in (tmp_path / str(step)).rglob("*.json"):
            versions[step, path.name] = json.loads(path.read_text())["version"]
    later = {key for key, version in versions.items() if version == [6, 0]}
    assert later == {(1, "checkpoint.json"), (1, "00000.json"), (1, "contents.json")}
    assert {version[0] for key, version in versions.items() if key not in later} == {1}


@st.composite
def histories(draw):
    """Versions of a tensor, and boxes of it."""
    shape = tuple(draw(st.lists(st.integers(1, 40), min_size=0, max_size=3)))
    dtype = draw(st.sampled_from(["u1", "<u2", "<f4", "<f8", "<c16"]))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 20)))
    array = (
        rng.integers(0, 256, (*shape, np.dtype(dtype).itemsize), np.uint8)
        .view(dtype)
        .reshape(shape)
    )
    states = [array]
    for count in draw(st.lists(st.sampled_from([0, 1, 3, 1000]), min_size=1, max_size=6)):
        states.append(some_changed(states[-1], count, rng).reshape(shape))
    sides = [sorted(draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
    return states, Box(tuple(a for a, _ in sides), tuple(b for _, b in sides))


@pytest.mark.long
@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(histories(), st.integers(1, 4))
def test_any_box_of_any_version_is_what_was_published(tmp_path, history, anchor_every):
    states, box = history
    url = tmp_path / uuid.uuid4().hex
    with shardckpt.Publisher(url, anchor_every=anchor_every, keep=None) as publisher:
        for step, state in enumerate(states):
            publisher.publish(step, {"w": state})
            publisher.wait()
    like = {"w": np.zeros_like(states[0])}
    follower = shardckpt.follow(url, like, mode="each")
    for step, state in enumerate(states):
        checkpoint = shardckpt.open(url / str(step))
        assert checkpoint.read("w", box).tobytes() == state[box.slices].tobytes()
        assert checkpoint.read("w").tobytes() == state.tobytes()
        follower.poll().prepare().apply()
        assert like["w"].tobytes() == state.tobytes()
    shutil.rmtree(url)
