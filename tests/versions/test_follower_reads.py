"""Bytes and versions that a follower reads: its share of the differences, few versions after a long
absence; tensors of another size."""

from __future__ import annotations

import asyncio
import shutil
import threading
from contextlib import suppress

import ml_dtypes
import numpy as np
import pytest
import torch
from numcodecs import Zstd
from one_of_several import on_threads

import shardckpt
from shardckpt.errors import (
    CorruptionError,
    FormatError,
    OptionError,
    ShapeMismatchError,
    StorageError,
)
from shardckpt.runs.collecting import delete
from shardckpt.versions.finding import VersionFinder
from shardckpt.versions.follower import FollowedVersion, Follower
from shardckpt.writing.encoder import Encoder

SHAPES = [(512, 512)] * 8 + [(1376, 512)] * 4 + [(4096, 512)]


def publish(url, states, **options):
    with shardckpt.Publisher(url, keep=None, **options) as publisher:
        for step, state in enumerate(states):
            publisher.publish(step, state)
            publisher.wait()


def some_changed(array, share, rng):
    changed = array.copy()
    at = rng.random(array.size) < share
    changed.reshape(-1).view(np.uint16)[at] ^= 1
    return changed


def test_a_version_at_two_percent_takes_six_tenths_of_whole_tensor_xor(tmp_path):
    """Tensors of 0.5 to 4 MiB, some moved elements of which move by more than one unit in the last
    place, as in trainings."""
    rng = np.random.default_rng(0)
    first = {
        str(i): (0.02 * rng.standard_normal(shape)).astype(ml_dtypes.bfloat16)
        for i, shape in enumerate(SHAPES)
    }
    second, xor = {}, 0
    for name, old in first.items():
        bits, moved = old.view(np.uint16).copy(), rng.random(old.shape) < 0.02
        bits += (
            (moved * rng.choice([1, -1, 2, -2], old.shape, p=[0.4, 0.4, 0.1, 0.1]))
            .astype(np.int16)
            .view(np.uint16)
        )
        second[name] = bits.view(ml_dtypes.bfloat16)
        xor += len(Zstd(level=3).encode(bits ^ old.view(np.uint16)))
    publish(tmp_path, [first, second])
    stored = sum(file.stat().st_size for file in (tmp_path / "1").rglob("*") if file.is_file())
    assert stored <= 0.6 * xor


@pytest.mark.parametrize("shape", [(512, 1024), (4096, 128)])
def test_a_follower_of_an_eighth_of_a_tensor_reads_an_eighth_of_the_differences(tmp_path, shape):
    """The bytes are those of chunks. Records and chunk tables, which every process reads, are not
    among them."""
    rng = np.random.default_rng(0)
    first = rng.standard_normal((4096, 1024)).astype(ml_dtypes.bfloat16)
    second = some_changed(first, 0.02, rng)
    publish(tmp_path, [{"w": first}, {"w": second}])
    totals = shardckpt.open(tmp_path / "1").record.totals
    assert totals["changed_bytes"] == 2 * int(
        (first.view(np.uint16) != second.view(np.uint16)).sum()
    )
    assert "changed_bytes" not in shardckpt.open(tmp_path / "0").record.totals
    stored = totals["stored_bytes"]
    assert stored < 0.02 * second.nbytes
    like = {"w": np.zeros(shape, ml_dtypes.bfloat16)}
    with shardckpt.follow(tmp_path, like, mode="each", fit={"w": "slice"}) as follower:
        follower.poll().prepare()
        whole = follower.cache.read_bytes
        assert first.nbytes / 8 <= whole <= 1.1 * first.nbytes / 8
        follower.poll().prepare().apply()
        assert 0.9 * stored / 8 <= follower.cache.read_bytes - whole <= 1.1 * stored / 8
    assert like["w"].tobytes() == second[: shape[0], : shape[1]].tobytes()


@pytest.mark.long
@pytest.mark.parametrize("store", ["file", "memory", "gs"], indirect=True)
def test_differences_are_made_on_half_of_the_cores_wherever_they_go(store, monkeypatch):
    rng = np.random.default_rng(0)
    first = {name: rng.integers(0, 1 << 16, (4096, 4608), np.uint16) for name in ("v", "w")}
    second = {name: some_changed(array, 0.01, rng) for name, array in first.items()}
    both, met = threading.Barrier(2, timeout=60), set()

    def append(encoder, *of, **how):
        if encoder._compression == "difference" and encoder._thread not in met:
            met.add(encoder._thread)
            both.wait()
        real(encoder, *of, **how)

    real = Encoder.append
    monkeypatch.setattr(Encoder, "append", append)
    monkeypatch.setattr("shardckpt.writing.memory.cores", lambda: 4)
    publish(store.location, [first, second])
    assert met == {0, 1}
    assert all(
        shardckpt.open(store.location.join("1")).read(name).tobytes() == array.tobytes()
        for name, array in second.items()
    )
    assert shardckpt.open(store.location.join("1")).verify().ok


def test_a_part_that_was_not_prepared_is_refused_by_name(tmp_path):
    """The tensors to fill were replaced between prepare() and apply(); or `checkpoint` reads
    something else."""
    whole = np.arange(1000 * 1000, dtype=np.int32).reshape(1000, 1000)
    publish(tmp_path, [{"w": whole, "other": whole + 1}])
    like = {"w": np.zeros((1000, 50), np.int32)}
    with shardckpt.follow(tmp_path, like, fit={"w": "slice"}, strict="like") as follower:
        version = follower.poll().prepare()
        with version.reading():
            read = version.checkpoint.read("w", shardckpt.Box((0, 0), (1000, 50)))
            np.testing.assert_array_equal(read, whole[:, :50])
            for name, box in (
                ("w", ((0, 0), (50, 1000))),
                ("w", ((900, 900), (910, 910))),
                ("other", ((0, 0), (50, 50))),
            ):
                with pytest.raises(OptionError, match=f"a part of '{name}' was not prepared"):
                    version.checkpoint.read(name, shardckpt.Box(*box))
        like["w"] = replaced = np.zeros((50, 1000), np.int32)
        with pytest.raises(OptionError, match="Call prepare"):
            version.apply()
        assert not replaced.any()
        version.prepare().apply()
        np.testing.assert_array_equal(replaced, whole[:50])


def test_a_publisher_that_goes_back_says_how_many_versions_it_supersedes(tmp_path, caplog):
    with shardckpt.Publisher(tmp_path) as publisher:
        for step in (1, 2, 3, 4, 2):
            publisher.publish(step, {"w": np.full(9, step, np.float32)})
            publisher.wait()
    messages = [
        record.getMessage()
        for record in caplog.records
        if "training went back" in record.getMessage()
    ]
    assert len(messages) == 1
    assert "training went back: the new version 2 supersedes versions 2-4." in messages[0]


def test_followers_are_told_that_training_went_back_when_the_newest_versions_were_deleted(tmp_path):
    publish(tmp_path, [{"w": np.full(1000, float(step))} for step in range(4)])
    like = {"w": np.zeros(1000)}
    with (
        shardckpt.follow(tmp_path, like) as newest,
        shardckpt.follow(tmp_path, dict(like), mode="each") as each,
    ):
        assert newest.poll().prepare().step == 3
        assert [each.poll().step for _ in range(4)] == [0, 1, 2, 3]
        for step in ("3", "2"):
            delete(str(tmp_path / step), grace=0)
        version = newest.poll()
        assert (version.step, version.went_back) == (1, True)
        version.prepare().apply()
        version.prove()
        assert like["w"][0] == 1
        assert newest.poll() is None
        assert each.poll() is None  # it has given all that are there
        with shardckpt.Publisher(tmp_path) as publisher:
            publisher.publish(2, {"w": np.full(1000, 5.0)})
        version = newest.poll()
        assert (version.step, version.went_back) == (2, False)
        version = each.poll()
        assert (version.step, version.went_back) == (2, True)


def test_followers_are_not_told_that_training_went_back_when_older_versions_were_deleted(tmp_path):
    publish(tmp_path, [{"w": np.zeros(1000)}])
    with shardckpt.follow(tmp_path, {"w": np.zeros(1000)}) as follower:
        assert follower.poll().step == 0
        with shardckpt.Publisher(tmp_path, keep=1) as publisher:
            publisher.publish(1, {"w": np.ones(1000)})
        shutil.rmtree(tmp_path / "0", ignore_errors=True)
        version = follower.poll()
        assert (version.step, version.went_back) == (1, False)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_follower_that_missed_200_versions_reads_an_anchor_and_at_most_eight_differences(
    tmp_path,
):
    """The last version is 72 versions after its anchor. All versions but nine are deleted before it
    is read."""
    like = {"w": np.zeros(1000)}
    with (
        shardckpt.Publisher(tmp_path, anchor_every=128, keep=None) as publisher,
        shardckpt.follow(tmp_path, like) as follower,
    ):
        for step in range(201):
            publisher.publish(step, {"w": np.arange(1000.0) + step})
            publisher.wait()
            if not step:
                follower.poll().prepare().apply()
        needed = ["200"]
        while chain := shardckpt.open(tmp_path / needed[-1]).record.structure.chain:
            needed.append(chain[0].url.removeprefix("../"))
        assert len(needed) <= 9
        assert needed[-1] == "128"
        for place in tmp_path.iterdir():
            if place.name.isdigit() and place.name not in needed:
                shutil.rmtree(place)
        version = follower.poll()
        version.prepare().apply()
        version.prove()
    assert version.step == 200
    assert (like["w"] == np.arange(1000.0) + 200).all()


def test_an_engine_with_a_padded_vocabulary_follows(tmp_path):
    rng = np.random.default_rng(0)
    embeddings = [rng.standard_normal((100, 64)).astype(ml_dtypes.bfloat16)]
    for _ in range(2):
        embeddings.append(some_changed(embeddings[-1], 0.05, rng))
    publish(tmp_path, [{"embed": one, "norm": np.ones(64)} for one in embeddings])
    like = {
        "embed": torch.full((128, 64), 7, dtype=torch.bfloat16),
        "norm": torch.zeros(64, dtype=torch.float64),
    }
    with (
        shardckpt.follow(tmp_path, like) as follower,
        pytest.raises(ShapeMismatchError, match=r"embed.*fit=\{'embed': 'pad'\}"),
    ):
        follower.poll().prepare()
    cut = {
        "embed": torch.zeros(90, 64, dtype=torch.bfloat16),
        "norm": torch.zeros(64, dtype=torch.float64),
    }
    with (
        shardckpt.follow(tmp_path, like, mode="each", fit={"embed": "pad"}) as padded,
        shardckpt.follow(tmp_path, cut, mode="each", fit={"embed": "slice"}) as shorter,
    ):
        for one in embeddings:
            for follower in (padded, shorter):
                version = follower.poll().prepare()
                version.apply()
                assert version.prove() == ["norm"]
            expected = torch.from_numpy(one.view(np.int16)).view(torch.bfloat16)
            assert torch.equal(like["embed"][:100], expected)
            assert not like["embed"][100:].any()
            assert torch.equal(cut["embed"], expected[:90])
        like["norm"][3] = 0
        with pytest.raises(CorruptionError, match="norm"):
            padded.applied.prove()


def test_processes_of_an_engine_never_apply_two_versions_of_one_step(tmp_path, monkeypatch):
    """The publisher goes back and publishes the step anew between their two openings."""
    publish(tmp_path, [{"w": np.full(1000, float(step))} for step in range(3)])
    opens, one_at_a_time = Follower._open, threading.Lock()
    opened = []

    def open_in_turn(follower, step):
        with one_at_a_time:
            checkpoint = opens(follower, step)
            opened.append(step)
            if len(opened) == 1:
                with shardckpt.Publisher(tmp_path) as publisher:
                    publisher.publish(2, {"w": np.full(1000, 99.0)})
            return checkpoint

    monkeypatch.setattr(Follower, "_open", open_in_turn)

    def follow(coordinator):
        like = {"w": np.zeros(1000)}
        with shardckpt.follow(tmp_path, like, coordinator=coordinator) as follower:
            assert follower.poll() is None
            version = follower.poll()
            version.prepare().apply()
            version.prove()
        return version.step, like["w"][0]

    assert on_threads(2, follow) == [(2, 99.0), (2, 99.0)]


@pytest.mark.parametrize("process", [0, 1])
def test_a_version_that_one_process_of_an_engine_finds_gone_is_no_version_for_all(
    tmp_path, monkeypatch, process
):
    publish(tmp_path, [{"w": np.full(1000, float(step))} for step in range(3)])
    opens = Follower._open

    def open_or_not(follower, step):
        if follower.coordinator.world.process == process and step == 2:
            shutil.rmtree(tmp_path / "2", ignore_errors=True)
        return opens(follower, step)

    monkeypatch.setattr(Follower, "_open", open_or_not)

    def follow(coordinator):
        with shardckpt.follow(tmp_path, {"w": np.zeros(1000)}, coordinator=coordinator) as follower:
            assert follower.poll() is None
            return follower.poll().prepare().step

    assert on_threads(2, follow) == [1, 1]


@pytest.mark.parametrize("process", [0, 1])
def test_a_version_that_one_process_of_an_engine_cannot_prepare_fails_alike_on_all(
    tmp_path, monkeypatch, process
):
    publish(tmp_path, [{"w": np.full(1000, float(step))} for step in range(2)])
    prepares, failed = FollowedVersion._prepare, []

    def prepare_or_fail(version):
        if version._follower.coordinator.world.process == process and not failed:
            failed.append(version)
            raise StorageError("the network is down")
        prepares(version)

    monkeypatch.setattr(FollowedVersion, "_prepare", prepare_or_fail)

    def follow(coordinator):
        like = {"w": np.zeros(1000)}
        with shardckpt.follow(tmp_path, like, coordinator=coordinator) as follower:
            version = follower.poll()
            with pytest.raises(StorageError, match="the network is down"):
                version.prepare()
            with pytest.raises(OptionError, match="not prepared"):
                version.apply()
            version.prepare().apply()
            assert follower.poll() is None
        return like["w"][0]

    assert on_threads(2, follow) == [1.0, 1.0]


def fails(*_arguments):
    raise StorageError("the network is down")


@pytest.mark.parametrize("mode", ["newest", "each"])
def test_a_version_that_could_not_be_read_for_a_while_is_given_again(tmp_path, monkeypatch, mode):
    publish(tmp_path, [{"w": np.full(1000, float(step))} for step in range(2)])
    like, steps = {"w": np.zeros(1000)}, []
    with shardckpt.follow(tmp_path, like, mode=mode) as follower:
        while version := follower.poll():
            with monkeypatch.context() as down:
                if version.step not in steps:
                    down.setattr(follower, "needed", fails)
                with suppress(StorageError):
                    version.prepare().apply()
            steps.append(version.step)
    assert steps == ([1, 1] if mode == "newest" else [0, 0, 1, 1])
    assert (like["w"] == 1).all()


@pytest.mark.parametrize("mode", ["newest", "each"])
def test_a_damaged_version_is_named_once_and_a_follower_goes_on_from_the_next_anchor(
    tmp_path, mode
):
    like = {"w": np.zeros(1000)}

    def publish(step):
        publisher.publish(step, {"w": np.arange(1000.0) + step})
        publisher.wait()

    def damage(step):
        (tmp_path / str(step) / "checkpoint.json").write_bytes(b"garbage")

    with (
        shardckpt.Publisher(tmp_path, keep=None) as publisher,
        shardckpt.follow(tmp_path, like=like, mode=mode) as follower,
    ):
        for step in range(3):
            publish(step)
            if step < 2:
                assert follower.poll().prepare().apply() is not None
        damage(2)
        with pytest.raises(FormatError, match=r"/2/checkpoint\.json"):
            follower.poll()
        assert follower.poll() is None
        with pytest.raises(FormatError, match="stores differences from"):
            publish(3)
        publish(4)
        version = follower.poll()
        assert (version.step, version.went_back) == (4, False)
        version.prepare().apply()
        assert (like["w"] == np.arange(1000.0) + 4).all()
        damage(4)
        with pytest.raises(FormatError, match=r"/4/checkpoint\.json"):
            follower.poll()
        assert follower.poll() is None  # it has this version, so it does not go back


@pytest.mark.long
def test_an_engine_of_several_processes_keeps_few_keys_however_long_it_follows(tmp_path):
    def follow(coordinator):
        like, counts = {"w": np.zeros(1000)}, []
        with shardckpt.follow(tmp_path, like, coordinator=coordinator) as follower:
            for step in range(40):
                if coordinator.world.process == 0:
                    with shardckpt.Publisher(tmp_path) as publisher:
                        publisher.publish(step, {"w": np.full(1000, float(step))})
                version = follower.poll()
                version.prepare().apply()
                version.prove()
                assert like["w"][0] == step
                assert follower.poll() is None
                keys = [*coordinator.keys]
                counts.append(sum(not key.endswith("/missing") for key in keys))
        return counts

    for counts in on_threads(2, follow):
        assert counts[-1] == counts[20]


@pytest.mark.long
def test_a_publisher_of_several_processes_keeps_few_keys_however_long_it_publishes(tmp_path):
    def publish(coordinator):
        counts = []
        with shardckpt.Publisher(tmp_path, coordinator=coordinator) as publisher:
            for step in range(40):
                publisher.publish(step, {"w": np.full(100_000, float(step))})
                publisher.wait()
                counts.append(sum("/version/" in key for key in [*coordinator.keys]))
        return counts

    for counts in on_threads(2, publish):
        assert 0 < counts[-1] == counts[20]
    assert shardckpt.follow(tmp_path, {"w": np.zeros(100_000)}).poll().step == 39


def test_a_version_found_while_the_caller_gave_up_waiting_is_given_to_the_next_call(
    tmp_path, monkeypatch
):
    gate, look = threading.Event(), VersionFinder.next

    def held_up(finder):
        version = look(finder)
        gate.wait(60)
        return version

    async def receive(follower):
        with suppress(TimeoutError):
            await asyncio.wait_for(anext(follower), 0.2)
        with suppress(TimeoutError):
            await asyncio.wait_for(anext(follower), 0.2)
        gate.set()
        steps = [(await anext(follower)).step]
        async for version in follower:
            steps.append(version.step)
            if version.step == 2:
                follower.close()
        return steps

    publish(tmp_path, [{"w": np.full(10, float(step))} for step in range(3)])
    monkeypatch.setattr(VersionFinder, "next", held_up)
    with shardckpt.follow(tmp_path, None, mode="each") as follower:
        assert asyncio.run(receive(follower)) == [0, 1, 2]


@pytest.mark.parametrize("mode", ["newest", "each"])
def test_a_version_taken_by_its_step_that_could_not_be_read_is_given_again(
    tmp_path, monkeypatch, mode
):
    publish(tmp_path, [{"w": np.full(1000, float(step))} for step in range(2)])
    with shardckpt.follow(tmp_path, {"w": np.zeros(1000)}, mode=mode) as follower:
        version = follower.poll()
        with monkeypatch.context() as down, suppress(StorageError):
            down.setattr(follower, "needed", fails)
            follower.at(version.step).prepare()
        assert follower.poll().step == version.step


def test_an_iteration_pauses_before_it_gives_a_version_again_that_could_not_be_read(
    tmp_path, monkeypatch
):
    publish(tmp_path, [{"w": np.zeros(1000)}])
    pauses, attempts = [], 0
    with shardckpt.follow(tmp_path, {"w": np.zeros(1000)}) as follower:
        monkeypatch.setattr(follower, "needed", fails)
        monkeypatch.setattr("shardckpt.versions.finding.time.sleep", pauses.append)
        for version in follower:
            attempts += 1
            with suppress(StorageError):
                version.prepare()
            if attempts == 8:
                break
    assert pauses == [0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 2.0]


async def _poll(follower):
    return follower.poll()


async def _iterate(follower):
    return next(iter(follower))


@pytest.mark.parametrize("ask", [_poll, _iterate])
def test_a_version_found_for_an_anext_that_gave_up_is_given_to_any_next_call(
    tmp_path, monkeypatch, ask
):
    gate, look = threading.Event(), VersionFinder.next

    def held_up(finder):
        version = look(finder)
        gate.wait(60)
        return version

    async def receive(follower):
        with suppress(TimeoutError):
            await asyncio.wait_for(anext(follower), 0.2)
        gate.set()
        await asyncio.sleep(0.5)
        return (await ask(follower)).step, follower.poll()

    publish(tmp_path, [{"w": np.zeros(10)}])
    monkeypatch.setattr(VersionFinder, "next", held_up)
    with shardckpt.follow(tmp_path, None) as follower:
        assert asyncio.run(asyncio.wait_for(receive(follower), 60)) == (0, None)


def test_a_follower_that_one_task_waits_for_refuses_another(tmp_path):
    async def receive(follower):
        first = asyncio.ensure_future(anext(follower))
        await asyncio.sleep(0)
        with pytest.raises(OptionError, match="another task waits"):
            await anext(follower)
        with pytest.raises(OptionError, match="another task waits"):
            follower.poll()
        publish(tmp_path, [{"w": np.zeros(10)}])
        return (await first).step

    with shardckpt.follow(tmp_path, None) as follower:
        assert asyncio.run(asyncio.wait_for(receive(follower), 60)) == 0
