"""Boxes of foreign tensors come to where they are wanted, each stored byte once, in few reads."""

from __future__ import annotations

import io
import tempfile
import threading
import tracemalloc
import uuid
import zlib
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from shardckpt.convert.foreign import row_chunks
from shardckpt.convert.foreign_source import ForeignSource, ForeignSpec
from shardckpt.convert.formats.safetensors import source as from_safetensors
from shardckpt.convert.options import NameOptions
from shardckpt.convert.placed import Foreign
from shardckpt.convert.span import StoredRun
from shardckpt.errors import CorruptionError
from shardckpt.io.store import Store
from shardckpt.layout.box import Box, BoxArray
from shardckpt.reading.locate import Request

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Wanted = tuple[str, Box, NDArray[Any]]

MiB = 1 << 20


def read(source: ForeignSource, reads: list[Wanted]) -> None:
    """Each by a request of its own; converted, where the buffer is of another dtype than the
    tensor."""
    requests = []
    for name, box, buffer in reads:
        tensor = source.record.structure.tensors[name]
        meaning = None if buffer.dtype == tensor.dtype.storage else tensor.dtype.numpy
        requests.append(
            Request(
                name,
                tensor.dtype.storage,
                tensor.pieces,
                BoxArray.of([box], box.ndim),
                [buffer],
                convert_from=meaning,
            )
        )
    source.reader.read(requests)


@st.composite
def cases(draw: st.DrawFn) -> tuple[dict[str, NDArray[Any]], list[Wanted]]:
    """A state, and boxes of it with memory for each, which may be larger, or of another dtype."""
    shapes = draw(st.lists(st.lists(st.integers(1, 9), max_size=3), min_size=1, max_size=4))
    state: dict[str, NDArray[Any]] = {
        f"t{i}": np.random.default_rng(i).random(shape, np.float32)
        for i, shape in enumerate(shapes)
    }
    reads = []
    for name in draw(st.lists(st.sampled_from(list(state)), min_size=1, max_size=6)):
        start = [draw(st.integers(0, n - 1)) for n in state[name].shape]
        box = Box(
            tuple(start),
            tuple(
                draw(st.integers(a + 1, n)) for a, n in zip(start, state[name].shape, strict=True)
            ),
        )
        dtype = draw(st.sampled_from([np.float32, np.float64]))
        reads.append((name, box, np.zeros([n + draw(st.integers(0, 1)) for n in box.shape], dtype)))
    return state, reads


@settings(max_examples=60)
@given(case=cases(), rows=st.sampled_from([16, 64, MiB]), transposed=st.booleans())
def test_any_boxes_of_any_tensors_are_read_to_any_memory(
    case: tuple[dict[str, NDArray[Any]], list[Wanted]], rows: int, transposed: bool
) -> None:
    state, reads = case
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        patch.setattr(from_safetensors, "row_chunks", partial(row_chunks, nbytes=rows))
        file = Path(directory, "model")
        if transposed:
            torch.save(
                {name: torch.from_numpy(array.T.copy().T) for name, array in state.items()}, file
            )
        else:
            save_file(state, file)
        read(ForeignSpec(str(file), "torch" if transposed else "safetensors").open(), reads)
    for name, box, buffer in reads:
        part = state[name][(*box.slices, ...)]
        np.testing.assert_array_equal(
            buffer[(*map(slice, part.shape), ...)], part.astype(buffer.dtype)
        )


def test_what_follows_in_a_file_is_read_together_and_once(tmp_path: Path) -> None:
    state = {f"t{i:04d}": np.full((16, 16), i, np.float32) for i in range(1000)} | {
        "large": np.zeros((3 * MiB, 4), np.uint8)
    }
    save_file(state, tmp_path / "model.safetensors")
    source = ForeignSpec(str(tmp_path / "model.safetensors"), "safetensors").open()
    nbytes = sum(array.nbytes for array in state.values())
    straight = [(name, Box.full(array.shape), np.ones_like(array)) for name, array in state.items()]
    copied = [
        (name, Box.full(array.shape), np.ones(array.shape, np.float64))
        for name, array in state.items()
        if name != "large"
    ]

    read(source, straight + copied)

    assert source.stats.bytes_read == nbytes, "though most is wanted twice"
    assert source.stats.reads <= 1000 // 256 + nbytes // (3 * MiB) + 2
    assert all((buffer == state[name]).all() for name, _, buffer in [*straight, *copied])


def test_a_few_rows_in_an_object_store_cost_few_bytes_and_all_rows_few_requests(
    tmp_path: Path,
) -> None:
    array = np.zeros((16 << 10, 1024), np.float32)
    save_file({"a": array}, tmp_path / "model.safetensors")
    url = f"memory://{uuid.uuid4().hex}"
    Store.open(url).write("model.safetensors", (tmp_path / "model.safetensors").read_bytes())
    few, every = (ForeignSpec(f"{url}/model.safetensors", "safetensors").open() for _ in "ab")

    read(few, [("a", Box((0, 0), (9, 1024)), np.ones((9, 1024), np.float32))])
    read(every, [("a", Box.full(array.shape), np.ones_like(array))])

    assert few.stats.bytes_read <= MiB
    assert every.stats.bytes_read == array.nbytes
    assert every.stats.reads <= array.nbytes // (8 * MiB)


def test_groups_that_share_a_tensor_are_each_read_in_few_reads(tmp_path: Path) -> None:
    state = {
        name: np.random.default_rng(i).random((300, 1000), np.float32)
        for i, name in enumerate("abc")
    }
    save_file(state, tmp_path / "model.safetensors")
    source = ForeignSpec(str(tmp_path / "model.safetensors"), "safetensors").open()
    tensors = source.record.structure.tensors
    names_and_dtypes = [("ab", np.float32), ("bc", np.float64), ("a", np.float32)]
    buffers = [
        {name: np.zeros((300, 1000), dtype) for name in names} for names, dtype in names_and_dtypes
    ]
    groups = [
        [
            Request.of(
                tensors[name],
                BoxArray.of([Box.full((300, 1000))], 2),
                [into],
                converts=into.dtype == np.float64,
            )
            for name, into in group.items()
        ]
        for group in buffers
    ]

    calls = source.reader.reads(groups)
    assert not any(into.any() for group in buffers for into in group.values())
    for call in calls:
        call()

    assert all((into == state[name]).all() for group in buffers for name, into in group.items())
    assert (source.stats.reads, source.stats.bytes_read) == (3, 5 * state["a"].nbytes)


def test_a_stored_bool_that_is_neither_0_nor_1_is_read_as_true(tmp_path: Path) -> None:
    save_file({"mask": np.array([0, 1, 7, 0], np.uint8).view(bool)}, tmp_path / "model.safetensors")
    source = ForeignSpec(str(tmp_path / "model.safetensors"), "safetensors").open()
    into = np.empty(4, source.record.structure.tensors["mask"].dtype.storage)
    read(source, [("mask", Box.full((4,)), into)])
    assert into.tobytes() == b"\0\1\1\0"


def test_the_table_of_a_file_has_the_place_of_each_chunk(tmp_path: Path) -> None:
    state = {
        "a": np.random.default_rng(0).random((700, 1000), np.float32),
        "b": np.arange(5),
        "none": np.zeros((0, 3), np.int8),
    }
    file = tmp_path / "model.safetensors"
    save_file(state, file)
    raw = file.read_bytes()
    source = ForeignSpec(str(file), "safetensors").open()

    table = source.reader.whole_table()

    for name, tensor in source.record.structure.tensors.items():
        (piece,) = tensor.pieces
        rows = table.arrays[piece.path]
        places = [
            (table.files[row], at, n)
            for row, at, n in zip(
                rows.file, rows.offset.tolist(), rows.length.tolist(), strict=True
            )
        ]
        assert rows.chunk.tolist() == list(range(piece.num_chunks))
        assert {where for where, _, _ in places} <= {str(file)}
        assert b"".join(raw[at : at + n] for _, at, n in places) == state[name].tobytes()


def test_a_tensor_whose_rows_move_is_read_in_as_few_reads_as_one_that_stays(tmp_path: Path) -> None:
    state = {"q": np.arange(4 * MiB, dtype=np.float32).reshape(1024, 4096)}
    save_file(state, tmp_path / "model.safetensors")
    (tmp_path / "rows.toml").write_text(
        '[[map]]\nfrom = "q"\nto = "q"\nrotary = {heads = 8, to = "halves"}'
    )
    reads = []
    for names in (NameOptions(), NameOptions(mapping=tmp_path / "rows.toml")):
        source = ForeignSpec(str(tmp_path / "model.safetensors"), "safetensors", names=names).open()
        read(source, [("q", Box.full((1024, 4096)), np.empty((1024, 4096), np.float32))])
        reads.append((source.stats.reads, source.stats.bytes_read))
    assert reads[0] == reads[1]


def test_a_flipped_bit_in_a_checksummed_tensor_is_an_error_that_names_tensor_and_file(
    tmp_path: Path,
) -> None:
    file = tmp_path / "model.pt"
    torch.save({"a": torch.zeros(1000), "b": torch.arange(1000, dtype=torch.float32)}, file)
    raw = bytearray(file.read_bytes())
    raw[raw.index(np.arange(1000, dtype=np.float32).tobytes()) + 17] ^= 1
    file.write_bytes(raw)
    source = ForeignSpec(str(file), "torch").open()

    with pytest.raises(CorruptionError, match=r"(?s)'b'.*model\.pt.*CRC-32"):
        read(source, [("b", Box((0,), (1000,)), np.empty(1000, np.float32))])


@pytest.mark.parametrize("place", ["disk", "object store"])
def test_a_flipped_bit_is_noticed_in_a_storage_of_several_chunks_that_is_read_at_once(
    tmp_path: Path, place: str
) -> None:
    w = torch.arange(640 * 1024, dtype=torch.float32).reshape(640, 1024)
    torch.save({"w": w}, tmp_path / "model.pt")
    raw = bytearray((tmp_path / "model.pt").read_bytes())
    raw[raw.index(w[500].numpy().tobytes())] ^= 1
    url = str(tmp_path) if place == "disk" else f"memory://{uuid.uuid4().hex}"
    Store.open(url).write("model.pt", bytes(raw))
    source = ForeignSpec(f"{url}/model.pt", "torch").open()
    assert source.foreign.structure.tensors["w"].num_chunks == 3

    with pytest.raises(CorruptionError, match=r"(?s)'?w'?\[0:256, 0:1024\].*model\.pt.*CRC-32"):
        read(source, [("w", Box((0, 0), (640, 1024)), np.empty((640, 1024), np.float32))])


@pytest.mark.parametrize("place", ["disk", "object store"])
def test_a_flipped_bit_is_noticed_in_a_storage_of_several_chunks_that_several_tensors_view(
    tmp_path: Path, place: str
) -> None:
    flat = torch.arange(640 * 1024, dtype=torch.float32)
    views = {"flat": flat, "square": flat.reshape(640, 1024), "tail": flat[1000:]}
    torch.save(views, tmp_path / "model.pt")
    raw = bytearray((tmp_path / "model.pt").read_bytes())
    raw[raw.index(flat[-2000:].numpy().tobytes())] ^= 1
    url = str(tmp_path) if place == "disk" else f"memory://{uuid.uuid4().hex}"
    Store.open(url).write("model.pt", bytes(raw))
    source = ForeignSpec(f"{url}/model.pt", "torch").open()

    with pytest.raises(CorruptionError, match=r"model\.pt.*CRC-32"):
        read(
            source,
            [
                (name, Box.full(view.shape), np.empty(view.shape, np.float32))
                for name, view in views.items()
            ],
        )


def test_in_an_object_store_several_pieces_are_looked_for_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url, file = f"memory://{uuid.uuid4().hex}", io.BytesIO()
    state = {name: torch.arange(100, dtype=torch.float32) + i for i, name in enumerate("ab")}
    torch.save(state, file)
    Store.open(url).write("model.pt", file.getvalue())
    source = ForeignSpec(f"{url}/model.pt", "torch").open()
    both, run = threading.Barrier(2), Foreign.run

    def waited_for(self: Foreign, *of: Any) -> StoredRun | None:
        both.wait(60)
        return run(self, *of)

    monkeypatch.setattr(Foreign, "run", waited_for)
    reads = [(name, Box((0,), (100,)), np.empty(100, np.float32)) for name in state]

    read(source, reads)

    assert all((buffer == state[name].numpy()).all() for name, _, buffer in reads)


def test_of_what_is_read_together_the_damaged_one_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_file({name: np.zeros(10, np.float32) for name in "abc"}, tmp_path / "model.safetensors")
    run = Foreign.run

    def with_checksum(self: Foreign, tensor: Any, piece: Any) -> StoredRun:
        stored = run(self, tensor, piece)
        assert stored is not None
        span = stored.span
        return StoredRun(span, zlib.crc32(span.read(0, len(span))) ^ (tensor.name == "b"))

    monkeypatch.setattr(Foreign, "run", with_checksum)
    source = ForeignSpec(str(tmp_path / "model.safetensors"), "safetensors").open()

    with pytest.raises(CorruptionError, match=r"^'?b'?\[0:10\]: .*model\.safetensors.*CRC-32"):
        read(source, [(name, Box((0,), (10,)), np.empty(10, np.float32)) for name in "abc"])


def test_what_comes_from_an_object_store_is_copied_from_where_it_came(tmp_path: Path) -> None:
    url, array = (
        f"memory://{uuid.uuid4().hex}",
        np.random.default_rng(0).random((2 * MiB,), np.float32),
    )
    save_file({"a": array}, tmp_path / "model.safetensors")
    Store.open(url).write("model.safetensors", (tmp_path / "model.safetensors").read_bytes())
    source = ForeignSpec(f"{url}/model.safetensors", "safetensors").open()
    source.limit_reading(threads=None, memory=1)
    straight, converted = np.zeros(len(array), np.float32), np.zeros(len(array), np.float64)

    tracemalloc.start()
    read(source, [("a", Box.full(array.shape), straight), ("a", Box.full(array.shape), converted)])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert (straight == array).all()
    assert (converted == array).all()
    assert peak < 2.5 * array.nbytes, (
        "one thread has one run in memory, and this storage hands out a copy of it"
    )
