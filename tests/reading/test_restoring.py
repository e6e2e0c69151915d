"""Restoring refuses what it cannot do right, before it reads, and says what is left behind where
reading fails."""

import gc
import itertools
import shutil
import sys
import threading
import uuid
import warnings
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from counting import steps
from safetensors.numpy import save_file

import shardckpt
from shardckpt import Box, PerProcess, SaveOptions, Target, errors
from shardckpt.errors import NotFoundError
from shardckpt.frameworks.base import PlainSink, whole
from shardckpt.io.stores.memory import MemoryStore
from shardckpt.io.url import parse
from shardckpt.layout.dtypes import DType, by_name
from shardckpt.reading import checkpoint as checkpoints
from shardckpt.reading import restore as restoring
from shardckpt.reading.missing import no_checkpoint
from shardckpt.reading.restoring.filling import fill
from shardckpt.views.model_view import ModelView
from shardckpt.views.proof import ReadProof


@pytest.fixture
def two(tmp_path):
    shardckpt.save(tmp_path / "c", {"a": np.arange(1000.0), "b": -np.arange(1000.0)})
    return shardckpt.open(tmp_path / "c")


def overlapping():
    buffer = np.zeros(1002)
    yield buffer[:1000], buffer[2:]
    yield buffer[:1000], buffer[:1000].reshape(1000)
    yield buffer[:1000], buffer[999::-1]
    tensor = torch.zeros(1000, dtype=torch.float64)
    yield tensor, tensor.numpy()
    yield tensor, tensor.detach()


@pytest.mark.parametrize("pair", range(5))
def test_leaves_that_share_memory_are_refused_by_name(two, pair):
    a, b = list(overlapping())[pair]
    with pytest.raises(
        errors.StructureMismatchError,
        match=r"^[ab]: in `like` it shares memory with [ab],.*restore with strict=False",
    ):
        shardckpt.restore(two, {"a": a, "b": b})
    assert two.stats.reads == 0


def test_leaves_that_interleave_without_sharing_are_filled(two):
    buffer = np.zeros(2000)
    restored = shardckpt.restore(two, {"a": buffer[::2], "b": buffer[1::2]})
    np.testing.assert_array_equal(restored["a"], np.arange(1000.0))
    np.testing.assert_array_equal(restored["b"], -np.arange(1000.0))


@pytest.mark.parametrize("turn", [np.asarray, np.transpose, np.flip])
def test_columns_of_a_matrix_are_not_compared_in_pairs(tmp_path, turn):
    number = 300
    state = {f"c{i:03}": turn(np.full((5, 2), i)) for i in range(number)}
    shardckpt.save(tmp_path / "c", state)
    matrix = np.zeros((5, 2 * number), np.int64)
    like = {name: turn(matrix[:, 2 * i : 2 * i + 2]) for i, name in enumerate(state)}
    assert steps(lambda: shardckpt.restore(tmp_path / "c", like)) < number * number / 2
    assert np.array_equal(matrix, np.tile(np.arange(number).repeat(2), (5, 1)))
    like["c007"] = turn(matrix[:, 13:15])
    with pytest.raises(errors.StructureMismatchError, match=r"c00[67]: .* memory with c00[67],"):
        shardckpt.restore(tmp_path / "c", like)


def test_aliases_of_one_tied_tensor_may_be_the_same_memory(tmp_path):
    weight = torch.arange(6.0)
    shardckpt.save(tmp_path / "c", {"a": weight, "b": weight})
    fresh = torch.zeros(6)
    restored = shardckpt.restore(tmp_path / "c", {"a": fresh, "b": fresh.detach()})
    assert restored["a"] is fresh
    assert torch.equal(fresh, weight)
    with pytest.raises(errors.StructureMismatchError, match="shares memory"):
        shardckpt.restore(tmp_path / "c", {"a": fresh.numpy(), "b": fresh.numpy()[::-1]})


CASTS = [
    "float32",
    "float16",
    "bfloat16",
    "float8_e4m3fn",
    "float8_e8m0fnu",
    "int8",
    "int64",
    "uint4",
    "int4",
    "bool",
    "complex64",
    "complex32",
    "float8_e4m3",
]


@pytest.mark.parametrize(("stored", "target"), list(itertools.permutations(CASTS, 2)))
def test_a_cast_is_numpy_s_or_refused_before_anything_is_read(stored, target):
    value = np.array([[1, 2, 0], [1, 1, 2]]).astype(_dtype(stored))
    url = f"memory://casts/{stored}/{np.random.default_rng().integers(1 << 62)}"
    shardckpt.save(url, {"w": value})
    checkpoint = shardckpt.open(url)
    like = np.zeros((2, 3), _dtype(target))
    loses = "complex" in stored and "complex" not in target
    try:
        expected = None if loses else value.astype(_dtype(target))
    except TypeError:
        expected = None
    if expected is None:
        with pytest.raises(
            errors.DtypeMismatchError,
            match=f"w: .* has dtype {stored}, which cannot be converted to {target}",
        ):
            shardckpt.restore(checkpoint, {"w": like}, cast=True)
        assert checkpoint.stats.reads == 0
    else:
        restored = shardckpt.restore(checkpoint, {"w": like}, cast=True)["w"]
        assert restored is like
        assert restored.tobytes() == expected.tobytes()


def _dtype(name):
    return np.dtype(getattr(ml_dtypes, name, name))


def test_a_tensor_goes_as_it_is_and_converted_at_once_and_is_read_once(tmp_path):
    weight = torch.randn(64, 64)
    shardckpt.save(tmp_path / "c", {"a": weight, "b": weight})
    checkpoint = shardckpt.open(tmp_path / "c")
    restored = shardckpt.restore(
        checkpoint, {"a": np.zeros((64, 64), "f4"), "b": np.zeros((64, 64), "f2")}, cast=True
    )
    np.testing.assert_array_equal(restored["a"], weight.numpy())
    np.testing.assert_array_equal(restored["b"], weight.numpy().astype("f2"))
    assert checkpoint.stats.bytes_read == checkpoint.record.totals["stored_bytes"]


def test_arrays_in_the_other_byte_order_are_filled(two):
    restored = shardckpt.restore(two, {"a": np.zeros(1000, ">f8"), "b": np.zeros(1000)})
    np.testing.assert_array_equal(restored["a"], np.arange(1000.0))
    np.testing.assert_array_equal(restored["b"], -np.arange(1000.0))


def test_a_failure_says_that_leaves_in_place_are_undefined(tmp_path, two):
    (data_file,) = (tmp_path / "c").rglob("00000/0/d/00000")
    data = bytearray(data_file.read_bytes())
    data[-100] ^= 1
    data_file.write_bytes(data)
    with pytest.raises(
        errors.CorruptionError,
        match=r"(?s)b\[.*is damaged.*a backup, or leave the tensor out with "
        r"only=\. The contents of tensors of .* undefined now\.$",
    ):
        shardckpt.restore(two, {"a": np.zeros(1000), "b": np.zeros(1000)})
    meta = torch.empty(1000, dtype=torch.float64, device="meta")
    for like in (None, {"a": Target(), "b": meta}):  # neither has memory
        with pytest.raises(errors.CorruptionError, match="is damaged") as raised:
            shardckpt.restore(two, like)
        assert "undefined" not in str(raised.value)
    np.testing.assert_array_equal(shardckpt.restore(two, only="a")["a"], np.arange(1000.0))


def test_a_checkpoint_that_is_replaced_under_a_reader_says_so(tmp_path, two):
    shardckpt.save(tmp_path / "c", {"a": np.zeros(3)}, options=SaveOptions(overwrite=True))
    for read in (lambda: two.read("a"), lambda: shardckpt.restore(two)):
        with pytest.raises(
            errors.ReplacedError, match="was replaced while it was being read; open it again"
        ):
            read()


@pytest.mark.parametrize(
    "read",
    [
        lambda one: one.fingerprint(),
        lambda one: one.zarr_store(),
        lambda one: one.stats,
        lambda one: ReadProof(ModelView(one)),
    ],
)
def test_a_checkpoint_that_is_replaced_before_its_first_read_says_so(tmp_path, read):
    options = SaveOptions(fingerprint=True, overwrite=True)
    shardckpt.save(tmp_path / "c", {"w": np.ones(2)}, options=options)
    checkpoint = shardckpt.open(tmp_path / "c")
    shardckpt.save(tmp_path / "c", {"w": np.ones(2)}, options=options)
    with pytest.raises(errors.ReplacedError, match="was replaced while it was being read"):
        read(checkpoint)


def test_a_signal_handler_may_open_and_read_while_the_program_opens_a_checkpoint(tmp_path, two):
    """At each line of the module, something else opens and reads, as a handler would. Amid a read,
    which locks chunk tables and thread pools, a handler may wait for good."""
    place, inside = parse(tmp_path / "c"), []

    def interrupted(frame, event, _argument):
        if frame.f_code.co_filename != checkpoints.__file__:
            return None
        if event == "line" and not inside:
            inside.append(None)
            shardckpt.open(tmp_path / "c")
            assert checkpoints.open_in_this_process(place)
            two.read("a", Box((0,), (1,)))
            inside.clear()
        return interrupted

    def use():
        sys.settrace(interrupted)
        opened = shardckpt.open(tmp_path / "c")
        ends.append((two.read("a").sum(), opened.location, checkpoints.open_in_this_process(place)))
        sys.settrace(None)

    ends = []
    thread = threading.Thread(target=use, daemon=True)
    thread.start()
    thread.join(60)
    assert ends == [(np.arange(1000.0).sum(), place, True)]


def test_of_a_root_with_many_steps_the_latest_are_looked_at_one_by_one():
    class Counted(MemoryStore):
        def _exists(self, key):
            looks.append(key)
            return super()._exists(key)

    root = parse(f"memory://{uuid.uuid4().hex}/run")
    for step in (7, 30, *range(100, 140)):
        MemoryStore(root).write(f"{step}/checkpoint.json", b"{}")
    for step in range(200, 203):
        MemoryStore(root).write(f"{step}/attempt", b"")
    looks = []
    assert f"did you mean {root}/139?" in str(no_checkpoint(Counted(root), None))
    assert [key for key in looks if key.endswith("checkpoint.json")] == [
        f"{step}/checkpoint.json" for step in (202, 201, 200, 139)
    ]
    for i in range(20):
        MemoryStore(root).write(f"tensorboard-{i}/events", b"")
    assert f"did you mean {root}/139?" in str(no_checkpoint(MemoryStore(root), None))
    for step in range(200, 260):
        MemoryStore(root).write(f"{step}/attempt", b"")
    looks.clear()
    assert "`shardckpt ls" in str(no_checkpoint(Counted(root), None))
    assert sum(key.endswith("checkpoint.json") for key in looks) == 16


@pytest.mark.parametrize("box", [((0.5,), (3,)), ((0,), (2.0,)), (("0",), (3,)), (0, 3)])
def test_a_box_has_integers(box):
    with pytest.raises(errors.OptionError, match="must be tuples of integers"):
        Box(*box)
    assert Box((np.int32(0),), (torch.tensor(3),)) == Box((0,), (3,))


def test_values_of_processes_that_are_deleted_under_a_reader_say_so(tmp_path):
    shardckpt.save(tmp_path / "c", {"seed": PerProcess(3), "w": np.zeros(3)})
    checkpoint = shardckpt.open(tmp_path / "c")
    shutil.rmtree(tmp_path / "c")
    for like in (None, {"seed": PerProcess(0), "w": np.zeros(3)}):
        with pytest.raises(errors.ReplacedError, match="was deleted while it was being read"):
            shardckpt.restore(checkpoint, like)


@dataclass
class Placed(PlainSink):
    """A device's tensor: what was placed, and where in the host's memory it came from."""

    shape: tuple[int, ...]
    dtype: DType
    adopts: bool
    destinations: None = None
    placing_bytes: int = 0
    tie_key: None = None

    @property
    def boxes(self):
        return whole(self.shape)

    @property
    def buffer_shapes(self):
        return [self.shape]

    def place(self, buffers):
        (self.buffer,) = buffers
        self.elements = self.buffer.copy()
        return self


@pytest.fixture
def placed(tmp_path, monkeypatch):
    """Eight tensors of 1 MiB, of which two are staged at a time, restored onto devices that adopt
    memory or copy it."""
    state = {str(i): np.full((512, 512), i, np.float32) for i in range(8)}
    shardckpt.save(tmp_path / "c", state)
    monkeypatch.setattr(restoring, "STAGED_BATCH", 2 << 20)

    def restored(*, adopts):
        sinks = {
            name: Placed(array.shape, by_name("float32"), adopts) for name, array in state.items()
        }
        fill(shardckpt.open(tmp_path / "c"), {name: [(name, sink)] for name, sink in sinks.items()})
        assert all(np.array_equal(sink.elements, state[name]) for name, sink in sinks.items())
        return state, sinks

    return restored


def test_staging_of_a_batch_is_used_again_for_one_after_it(placed):
    _, sinks = placed(adopts=False)
    assert len({sink.buffer.ctypes.data for sink in sinks.values()}) <= 6, (
        "of two, while four more are read"
    )


def test_memory_that_a_leaf_adopts_is_never_lent_again(placed):
    state, sinks = placed(adopts=True)
    assert all(np.array_equal(sink.buffer, state[name]) for name, sink in sinks.items())
    assert not any(sink.buffer.ctypes.data % 64 for sink in sinks.values()), (
        "or JAX would have to copy it"
    )


def test_a_restore_of_another_format_says_which_and_how_it_is_read(tmp_path):
    (tmp_path / "hub").mkdir()
    save_file({"w": np.ones(3)}, tmp_path / "hub" / "model.safetensors")
    torch.save({"w": torch.ones(3)}, tmp_path / "model.pt")
    with warnings.catch_warnings(action="ignore"):  # of one process alone
        dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    for name, what in (
        ("hub", "safetensors"),
        ("hub/model.safetensors", "safetensors"),
        ("model.pt", "torch file"),
        ("dcp", "DCP"),
    ):
        with pytest.raises(
            NotFoundError,
            match=f"no checkpoint of shardckpt there, but .*{what}.*shardckpt.open reads it",
        ):
            shardckpt.restore(tmp_path / name)
        assert "w" in shardckpt.open(tmp_path / name)
    with pytest.raises(NotFoundError, match="no checkpoint there"):
        shardckpt.restore(tmp_path / "none")


@pytest.mark.parametrize(("threads", "batches"), [(2, 4), (16, 1)])
def test_a_batch_of_files_has_more_bytes_where_many_threads_read(
    tmp_path, monkeypatch, threads, batches
):
    monkeypatch.setenv("SHARDCKPT_THREADS", str(threads))
    monkeypatch.setattr(restoring, "LARGEST_BATCH", 1 << 20)
    monkeypatch.setattr(restoring, "_OF_CORE", 1 << 20)
    state = {str(i): np.full((512, 512), i, np.float32) for i in range(8)}
    shardckpt.save(tmp_path / "c", state)
    into, calls = {name: np.zeros_like(array) for name, array in state.items()}, []
    restored = shardckpt.restore(
        tmp_path / "c", into, progress=lambda done, _total: calls.append(done)
    )
    assert calls == [(i + 1) * (8 << 20) // batches for i in range(batches)]
    assert all(np.array_equal(restored[name], array) for name, array in state.items())


def test_the_collector_visits_what_a_restore_of_many_tensors_has_made_once_at_most(tmp_path):
    """With a pause for each of opening, matching and planning, it visited all new objects after
    each."""
    state = {f"layer{i}": np.full(4, i) for i in range(3000)}
    shardckpt.save(tmp_path / "c", state)
    shardckpt.restore(tmp_path / "c", state)  # imports modules
    began = []

    def note(phase, info):
        if phase == "start":
            began.append(info["generation"])

    gc.collect()
    gc.callbacks.append(note)
    try:
        shardckpt.restore(tmp_path / "c", state)
    finally:
        gc.callbacks.remove(note)
    assert len(began) <= 1
