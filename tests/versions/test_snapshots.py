"""Publishing from copies on the tensors' own devices, and the proof that what is written is what
the tensors have.

A CPU is a device here like any other: the copies are in its memory, and the same code compares
them.
"""

from __future__ import annotations

import threading
from contextlib import suppress

import ml_dtypes
import numpy as np
import pytest
import torch
from fake_cuda import FakeCuda
from hypothesis import given, settings
from hypothesis import strategies as st
from interrupting import interrupted

import shardckpt
from shardckpt.errors import BudgetError, CorruptionError, OptionError
from shardckpt.frameworks import torch_snapshots
from shardckpt.frameworks.snapshots import ChangedWords, merged, sum_of
from shardckpt.io import copying
from shardckpt.layout.dtypes import of_numpy
from shardckpt.runs.catalog import catalog
from shardckpt.versions import device

KINDS = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float64, torch.int16, torch.bool)


def of_torch(rng):
    """Tensors of many kinds that are compared on their device; one is a view with gaps."""
    state = {
        str(kind)[6:]: torch.from_numpy(rng.integers(0, 2, (300, 400))).to(kind) for kind in KINDS
    }
    return {
        **state,
        "gaps": torch.from_numpy(rng.standard_normal((400, 300))).t(),
        "small": torch.zeros(3),
    }


def changed(tensors, rng, count=200):
    for tensor in tensors.values():
        flat = tensor.reshape(-1).clone()
        at = torch.from_numpy(rng.integers(0, len(flat), count))
        flat[at] = torch.from_numpy(rng.integers(0, 2, count)).to(tensor.dtype)
        tensor.copy_(flat.reshape(tensor.shape))


def publish(publisher, step, w):
    publisher.publish(step, {"w": w})
    publisher.wait()


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.long
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_versions_from_a_snapshot_on_the_device_are_those_from_a_snapshot_on_the_host(
    tmp_path, dtype
):
    rng = np.random.default_rng(0)
    tensors, totals = of_torch(rng), []
    with (
        shardckpt.Publisher(
            tmp_path / "device", snapshot="device", anchor_every=4, dtype=dtype
        ) as one,
        shardckpt.Publisher(tmp_path / "host", anchor_every=4, dtype=dtype) as other,
    ):
        for step in range(6):
            changed(tensors, rng, 100_000 if step == 3 else 200)
            for publisher in (one, other):
                publisher.publish(step, tensors)
            changed({"w": tensors["float32"]}, rng)  # the versions have what was there before
            one.wait(), other.wait()
            a, b = (shardckpt.open(tmp_path / name / str(step)) for name in ("device", "host"))
            assert a.fingerprint() == b.fingerprint() == a.fingerprint(recorded=False)
            totals.append((a.record.totals["stored_bytes"], b.record.totals["stored_bytes"]))
    assert all(a == b for a, b in totals), totals


def test_only_what_has_changed_leaves_the_device(tmp_path, monkeypatch):
    sent = []
    take = torch_snapshots.TorchSnapshot.take

    def counted(self, elements, dtype):
        change = take(self, elements, dtype)
        sent.append(
            change.words.nbytes + (0 if change.positions is None else change.positions.nbytes)
        )
        return change

    monkeypatch.setattr(torch_snapshots.TorchSnapshot, "take", counted)
    w = torch.randn(1000, 1000)
    with shardckpt.Publisher(tmp_path, snapshot="device", dtype="bfloat16") as publisher:
        for step in range(4):
            publisher.publish(step, {"w": w})
            w[step, :50] += 1
            publisher.wait()
    assert sent == [2_000_000, 50 * 6, 50 * 6, 50 * 6]


@pytest.mark.long
def test_shards_of_jax_arrays_are_compared_where_they_are_before_they_are_donated(tmp_path):
    import jax
    import jax.numpy as jnp

    step_of = jax.jit(lambda w: w.at[::97].add(1), donate_argnums=0)
    weights, expected = (
        {"w": jnp.arange(200_000, dtype=jnp.float32), "f8": jnp.ones((400, 400), jnp.float8_e5m2)},
        [],
    )
    with shardckpt.Publisher(tmp_path, dtype=jnp.bfloat16, snapshot="device") as publisher:
        for step in range(4):
            expected.append(np.asarray(weights["w"].astype(jnp.bfloat16)))
            publisher.publish(step, weights)
            weights = {"w": step_of(weights["w"]), "f8": weights["f8"].at[step, 3].set(2.0)}
            publisher.wait()
    for step, array in enumerate(expected):
        restored = shardckpt.restore(tmp_path / str(step))
        assert restored["w"].tobytes() == array.tobytes()
        f8 = np.ones((400, 400), ml_dtypes.float8_e5m2)
        f8[:step, 3] = 2
        assert restored["f8"].tobytes() == f8.tobytes()
        assert shardckpt.open(tmp_path / str(step)).verify().ok
        assert (shardckpt.open(tmp_path / str(step)).record.totals["stored_bytes"] < 20_000) == (
            step > 0
        )


def test_a_shard_of_jax_with_too_many_words_for_its_positions_is_sent_completely(monkeypatch):
    import jax.numpy as jnp

    from shardckpt.frameworks import jax_snapshots

    snapshot, array = jax_snapshots.JaxSnapshot(), jnp.zeros(1000, jnp.float32)
    dtype = of_numpy(np.dtype(np.float32))
    snapshot.take(array, dtype)
    assert len(snapshot.take(array.at[7].set(1), dtype).words) == 1
    monkeypatch.setattr(jax_snapshots, "_MOST_POSITIONS", 1000)
    change = snapshot.take(array, dtype)
    assert change.positions is None
    assert change.words.tobytes() == np.zeros(1000, np.float32).tobytes()
    assert change.total == sum_of(change.words)


def test_versions_that_were_skipped_pass_their_changes_on(tmp_path, monkeypatch):
    """The first version is held up while three are published: the last one has what all of them
    have changed."""
    gate, begun, arrive = threading.Event(), threading.Event(), device.DeviceShare.arrive

    def held_up(self, version):
        arrive(self, version)
        begun.set()
        gate.wait(60)

    monkeypatch.setattr(device.DeviceShare, "arrive", held_up)
    w = torch.zeros(500, 500)
    with shardckpt.Publisher(tmp_path, snapshot="device") as publisher:
        for step in range(5):
            publisher.publish(step, {"w": w})
            w[step % 3, :7] += 1
            assert begun.wait(60)
        gate.set()
        publisher.wait()
        publisher.publish(5, {"w": w})
        publisher.wait()
        assert publisher.skipped == [1, 2, 3]
    now = torch.zeros(500, 500)
    for step in range(5):
        if step in (0, 4):
            assert bits(
                shardckpt.restore(tmp_path / str(step), {"w": torch.empty(500, 500)})["w"]
            ) == bits(now)
        now[step % 3, :7] += 1
    assert bits(shardckpt.restore(tmp_path / "5", {"w": torch.empty(500, 500)})["w"]) == bits(now)


def test_a_version_that_streams_has_the_elements_that_its_devices_had(tmp_path):
    """The arrays in host memory exceed the limit, so writing begins while `publish` copies."""
    state = {"a": np.zeros(40 << 20, np.uint8), "z": torch.zeros(500, 500)}
    with shardckpt.Publisher(tmp_path, snapshot="device", memory_limit="32MiB") as publisher:
        for step in range(3):
            state["z"] += 1
            publisher.publish(step, state)
            assert publisher.wait().step == step
    for step in range(3):
        assert (shardckpt.restore(tmp_path / str(step))["z"] == step + 1).all()


@pytest.mark.parametrize(
    "stale",
    [
        "the copy on the device is ahead of what was sent",
        "a value is lost on its way",
        "the tensor changes",
    ],
)
def test_a_stale_or_torn_copy_of_a_device_fails_the_version_and_the_next_has_all_elements(
    tmp_path, monkeypatch, stale
):
    w = torch.zeros(500, 500)
    take, planted = torch_snapshots.TorchSnapshot._take, []

    def wrong(self, elements, dtype):
        if planted == [1] and stale.startswith("the copy"):
            self._words[77] = elements.reshape(-1).view(torch.int32)[77]
        change = take(self, elements, dtype)
        if planted == [1] and stale.startswith("a value"):
            change = change._replace(positions=change.positions[1:], words=change.words[1:])
        planted.append(1)
        return change

    total = torch_snapshots._sum

    def late(words):
        if len(planted) == 1 and stale.startswith("the tensor"):
            words[5000] = 3  # after it was compared
        return total(words)

    monkeypatch.setattr(torch_snapshots.TorchSnapshot, "_take", wrong)
    monkeypatch.setattr(torch_snapshots, "_sum", late)
    with shardckpt.Publisher(tmp_path, snapshot="device") as publisher:
        for step in range(4):
            if step == 1:  # the error comes out of either call
                with pytest.raises(
                    CorruptionError,
                    match="'w': the copy to be published has other elements than the tensor",
                ):
                    publish(publisher, step, w)
            else:
                publish(publisher, step, w)
                assert bits(
                    shardckpt.restore(tmp_path / str(step), {"w": torch.empty(500, 500)})["w"]
                ) == bits(w)
            w[0, 70:80] += 1
    assert {entry.name for entry in catalog(tmp_path)} == {"0", "2", "3"}
    assert shardckpt.open(tmp_path / "2").record.compression is None


@pytest.mark.parametrize("proof", [True, False])
def test_a_change_that_is_not_noted_after_ctrl_c_reaches_the_next_version(tmp_path, proof):
    """The device's copy has the change already, when the call is interrupted."""
    w = torch.zeros(500, 500)
    with shardckpt.Publisher(tmp_path, snapshot="device", proof=proof) as publisher:
        for step in range(3):
            w[step] = step + 1
            if step == 1:
                assert interrupted(
                    0,
                    "",
                    lambda code: code.co_name == "__init__" and "change" in code.co_varnames,
                    lambda: publisher.publish(1, {"w": w}),
                    lambda: True,
                )
            else:
                publish(publisher, step, w)
    assert bits(shardckpt.restore(tmp_path / "2", {"w": torch.empty(500, 500)})["w"]) == bits(w)


@pytest.mark.parametrize("proof", [True, False])
def test_changes_that_did_not_arrive_for_want_of_memory_arrive_with_the_next_version(
    tmp_path, monkeypatch, proof
):
    def full(*_arguments):
        raise MemoryError

    w = torch.zeros(500, 500)
    with shardckpt.Publisher(tmp_path, snapshot="device", proof=proof) as publisher:
        for step in range(3):
            w[step] = step + 1
            with monkeypatch.context() as patch:
                if step == 1:
                    patch.setattr(device, "_words", full)
                with suppress(BudgetError):
                    publish(publisher, step, w)
    assert {entry.name for entry in catalog(tmp_path)} == {"0", "2"}
    assert bits(shardckpt.restore(tmp_path / "2", {"w": torch.empty(500, 500)})["w"]) == bits(w)


@pytest.mark.parametrize("proof", [True, False])
@pytest.mark.parametrize("transposed", [True, False])
def test_a_stale_or_torn_copy_in_host_memory_fails_the_version(
    tmp_path, monkeypatch, proof, transposed
):
    """A thread changes the tensor while it is copied: when a part is summed and not yet copied, or
    when it is copied."""
    checksum, copy_summed, w = copying.checksum, copying._copy_summed, torch.zeros(500, 500)
    w = w.T if transposed else w

    def late(array):
        total = checksum(array)
        w[3, 3] += 1
        return total

    def torn(parts):
        copy_summed(parts)
        w.add_(1)

    with shardckpt.Publisher(tmp_path, proof=proof) as publisher:
        publisher.publish(0, {"w": w})
        publisher.wait()
        monkeypatch.setattr(copying, "checksum", late)
        monkeypatch.setattr(copying, "_copy_summed", torn)
        if proof:
            with pytest.raises(
                CorruptionError, match="the copy to be saved has other elements than the tensor"
            ):
                publish(publisher, 1, w)
        else:
            publish(publisher, 1, w)
        monkeypatch.undo()
        publisher.publish(2, {"w": w})
        publisher.wait()
    assert (shardckpt.open(tmp_path / "2").record.compression is None) == proof
    assert bits(shardckpt.restore(tmp_path / "2", {"w": torch.empty(500, 500)})["w"]) == bits(w)


@pytest.mark.parametrize("snapshot", ["host", "device"])
def test_tensors_on_devices_with_streams_are_summed_there(tmp_path, monkeypatch, snapshot):
    """The devices are not there (`FakeCuda`): a copy that such a device makes wrong fails the
    version."""
    fake = FakeCuda()
    with fake.installed():
        w = fake.put(torch.randn(300, 300))
        with shardckpt.Publisher(tmp_path, snapshot=snapshot) as publisher:
            for step in range(3):
                publisher.publish(step, {"w": w})
                publisher.wait()
                restored = shardckpt.restore(tmp_path / str(step), {"w": torch.empty(300, 300)})[
                    "w"
                ]
                assert bits(restored) == bits(w)
                w[7, step] += 1
            if snapshot == "host":
                copy = FakeCuda.copy

                def wrong(self, target, source, stream):
                    copy(
                        self,
                        target,
                        torch.zeros_like(source) if source.numel() > 1 else source,
                        stream,
                    )

                monkeypatch.setattr(FakeCuda, "copy", wrong)
                with pytest.raises(
                    CorruptionError, match="the copy to be saved has other elements"
                ):
                    publish(publisher, 3, w)


def test_what_cannot_be_compared_on_a_device_is_refused(tmp_path, monkeypatch):
    with pytest.raises(
        OptionError, match=r"Publisher\(snapshot='disk'\): use \"device\" or \"host\""
    ):
        shardckpt.Publisher(tmp_path, snapshot="disk")

    def full(*_args, **_options):
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(torch_snapshots.TorchSnapshot, "_take", full)
    with (
        shardckpt.Publisher(tmp_path, snapshot="device") as publisher,
        pytest.raises(BudgetError, match='snapshot="host"'),
    ):
        publisher.publish(0, {"w": torch.zeros(500, 500)})


@settings(max_examples=100, deadline=None)
@given(st.data(), st.sampled_from([np.uint8, np.uint16, np.uint32]))
def test_merged_changes_and_sums_are_those_of_the_last_words(data, kind):
    n = data.draw(st.integers(1, 40))
    now = np.zeros(n, kind)
    first, changes = now.copy(), []
    for _ in range(data.draw(st.integers(1, 4))):
        at = np.array(sorted(data.draw(st.sets(st.integers(0, n - 1)))), np.int32)
        now[at] = data.draw(st.integers(0, 200))
        whole = data.draw(st.booleans())
        changes.append(
            ChangedWords(None if whole else at, now.copy() if whole else now[at], sum_of(now))
        )
    one = merged(changes)
    if one.positions is None:
        first[:] = one.words
    else:
        first[one.positions] = one.words
    assert (first == now).all()
    assert sum_of(first) == one.total


@pytest.mark.long
@settings(max_examples=60, deadline=None)
@given(st.binary(min_size=8, max_size=800), st.sampled_from(["u1", "u2", "u4", "u8", "f4", "f8"]))
def test_every_framework_makes_the_same_sum(data, kind):
    import jax
    import jax.numpy as jnp

    from shardckpt.frameworks.jax_snapshots import JaxSnapshot

    array = np.frombuffer(data[: len(data) // 8 * 8], kind).copy()
    dtype = of_numpy(array.dtype)
    word = f"u{min(4, array.itemsize)}"
    expected = sum_of(array.view(word))
    assert torch_snapshots.TorchSnapshot().take(torch.from_numpy(array), dtype).total == expected
    with jax.enable_x64(True):
        change = JaxSnapshot().take(jnp.asarray(array), dtype)
    assert change.total == expected
    assert (change.words == array.view(word)).all()
