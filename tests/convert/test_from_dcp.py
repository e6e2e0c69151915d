"""Directories of torch.distributed.checkpoint that real gloo jobs wrote, read without torch, and
held against DCP's own reading."""

from __future__ import annotations

import json
import pickle  # DCP's own way to write its metadata
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from foreign_contents import contents
from processes import Processes
from safetensors.torch import save_file
from torch.distributed.checkpoint import FileSystemReader, HuggingFaceStorageWriter

import shardckpt
from shardckpt.convert.detect import detect
from shardckpt.convert.files.file_version import Candidate
from shardckpt.convert.foreign import ROWS_BYTES
from shardckpt.convert.formats.dcp import source as from_dcp
from shardckpt.convert.importing import import_checkpoint
from shardckpt.errors import (
    CorruptionError,
    FormatError,
    MissingDataError,
    OptionError,
    ReplacedError,
)
from shardckpt.io.store import Store
from shardckpt.io.url import parse

QUIET = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}


@pytest.fixture(scope="module")
def jobs():
    with Processes("dcp_saves", env=QUIET) as processes:
        yield processes


def saved(jobs, directory, ranks, *how):
    assert jobs.run("save", ranks, directory, *how) == [None] * ranks
    return parse(directory)


@pytest.fixture(scope="module")
def plain(jobs, tmp_path_factory):
    """A checkpoint that one process saved; not to be changed."""
    return saved(jobs, tmp_path_factory.mktemp("dcp") / "plain", 1, "plain")


@pytest.fixture
def copied(plain, tmp_path):
    """The same, to be damaged."""
    return Path(shutil.copytree(str(plain), tmp_path / "copy"))


def opened(place):
    return from_dcp.open_foreign(
        parse(place) if isinstance(place, Path) else place, trust_pickle=True
    )


def bits(value):
    """A value of torch's or numpy's as dtype, shape and bytes; any other as it is."""
    if isinstance(value, torch.Tensor):
        value = value.detach().contiguous()
        raw = value.reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""
        return str(value.dtype).removeprefix("torch."), tuple(value.shape), raw
    if isinstance(value, np.ndarray):
        return value.dtype.name, value.shape, np.ascontiguousarray(value).tobytes()
    if isinstance(value, dict):
        return {str(key): bits(child) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(bits(child) for child in value)
    return value


def as_dcp_reads(location):
    return torch.load(f"{location}.pt", weights_only=False)


@pytest.mark.parametrize(
    ("ranks", "what", "writer"),
    [
        (1, "trained", "one file"),
        (2, "sharded", "two threads"),
        (2, "trained", "a file an item"),
        (4, "sharded", "one file"),
        (4, "trained", "two threads"),
    ],
)
def test_what_dcp_saved_is_what_dcp_itself_reads(jobs, tmp_path, ranks, what, writer):
    location = saved(jobs, tmp_path / "saved", ranks, what, writer)
    assert bits(contents(opened(location))) == bits(as_dcp_reads(location))


def test_plain_tensors_of_every_dtype_and_stride_and_leaves_are_what_dcp_itself_reads(plain):
    assert bits(contents(opened(plain))) == bits(as_dcp_reads(plain))


def test_an_asynchronous_save_is_read_as_any_other(jobs, tmp_path):
    arrays = contents(opened(saved(jobs, tmp_path / "async", 2, "sharded", "one file", "async")))
    np.testing.assert_array_equal(arrays["uneven"], np.arange(5, dtype=np.int32))


def test_each_process_of_dcp_has_a_piece_of_its_own(jobs, tmp_path):
    foreign = opened(saved(jobs, tmp_path / "pieces", 4, "sharded"))
    tensors = foreign.structure.tensors
    assert [(p.start, p.shape) for p in tensors["square"].pieces] == [
        ((0, 0), (4, 3)), ((0, 3), (4, 2)), ((4, 0), (3, 3)), ((4, 3), (3, 2))
    ]  # fmt: skip
    assert [p.shape for p in tensors["uneven"].pieces] == [(2,), (2,), (1,)], (
        "an empty shard is not a piece"
    )
    assert len(tensors["replicated"].pieces) == 1


def test_chunks_lie_as_the_elements_do_and_are_bounded(plain):
    tensors = opened(plain).structure.tensors
    assert tensors["rows"].pieces[0].chunks == (256, 1000)
    assert tensors["transposed"].pieces[0].chunks == (1000, 256), (
        "its columns are one run of bytes each"
    )
    for tensor in tensors.values():
        assert all(
            np.prod(piece.chunks) * tensor.dtype.itemsize <= ROWS_BYTES for piece in tensor.pieces
        )


def test_it_is_detected_and_said_what_was_seen(plain, tmp_path):
    assert (
        from_dcp.looks_like(Candidate.at(plain))
        == "a torch.distributed.checkpoint directory: .metadata and 1 .distcp files"
    )
    assert detect(plain).format == "dcp"
    (tmp_path / "metadata.json").write_text("{}")
    assert from_dcp.looks_like(Candidate.at(parse(tmp_path))) is None
    assert from_dcp.looks_like(Candidate.at(parse(tmp_path / "nothing"))) is None
    assert from_dcp.looks_like(Candidate.at(parse(f"{plain}.pt"))) is None


def test_an_import_is_a_checkpoint_of_the_same_state(plain, tmp_path):
    report = import_checkpoint(str(plain), tmp_path / "ours", trust_pickle=True)
    assert report.format == "dcp"
    assert any("is a pickle" in note for note in report.notes)
    assert bits(shardckpt.restore(tmp_path / "ours")) == bits(as_dcp_reads(plain))


def test_a_directory_in_an_object_store_is_read_by_the_same_code(plain):
    there = Store.open("memory://dcp/plain")
    for path in Path(str(plain)).iterdir():
        there.write(path.name, path.read_bytes())
    foreign = opened(there.location)
    assert bits(contents(foreign)) == bits(as_dcp_reads(plain))


def test_its_identity_is_another_one_when_a_file_is(copied):
    before = opened(copied).identity
    assert opened(copied).identity == before
    file = next(copied.glob("*.distcp"))
    file.write_bytes(file.read_bytes())
    assert opened(copied).identity != before


def test_the_files_that_the_hugging_face_writer_leaves_of_each_process_are_one_state(
    jobs, tmp_path
):
    location = saved(jobs, tmp_path / "shards", 2, "sharded", "hugging face")
    assert detect(location).format == "dcp"
    report = import_checkpoint(str(location), tmp_path / "ours")
    assert any("of 2 processes" in note for note in report.notes)
    other = contents(opened(saved(jobs, tmp_path / "saved", 2, "sharded")))
    assert bits(shardckpt.restore(tmp_path / "ours")) == bits(other)
    (tmp_path / "shards" / "shard-00001-model-00001-of-00001.safetensors").unlink()
    with pytest.raises(MissingDataError, match="the file of shard 1 is missing"):
        opened(location)


def write_shards(place, parts):
    """Write files of that writer: name → the elements of `w` or `b` in it, and where they begin."""
    place.mkdir()
    for file, (name, start, elements) in parts.items():
        starts = json.dumps({name: {"saved_offsets": [start]}})
        path = place / f"shard-{file}.safetensors"
        save_file({name: torch.tensor(elements)}, path, metadata={"DCP_SHARDING_INFO": starts})


TWO_OF_TWO = {
    "00001-model-00001-of-00002": ("w", 0, [1, 2]),
    "00001-model-00002-of-00002": ("b", 0, [5, 6]),
    "00002-model-00001-of-00002": ("w", 2, [3, 4]),
    "00002-model-00002-of-00002": ("b", 2, [7, 8]),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_note_names_a_file_that_no_process_has_as_its_tensors_may_not_be_in_the_state(tmp_path):
    state = {"a": torch.ones(3), "b": torch.zeros(2)}
    writer = HuggingFaceStorageWriter(
        str(tmp_path / "shards"), {"a": 1, "b": 3, "lm_head": 2}, save_distributed=True
    )
    dcp.save(state, storage_writer=writer, no_dist=True)
    foreign = opened(tmp_path / "shards")
    assert bits(contents(foreign)) == bits({name: array.numpy() for name, array in state.items()})
    assert any("no shard has file 2 of 3" in note for note in foreign.notes)


def test_a_note_names_a_file_that_only_some_processes_have(tmp_path):
    write_shards(tmp_path / "whole", TWO_OF_TWO)
    assert not any("is there for" in note for note in opened(tmp_path / "whole").notes)
    write_shards(tmp_path / "shards", dict([*TWO_OF_TWO.items()][:3]))
    notes = opened(tmp_path / "shards").notes
    assert any("file 2 of 2 is there for 1 of 2 shards" in note for note in notes)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_files_that_two_saves_left_in_one_directory_are_refused(tmp_path):
    for value, files in enumerate(({"a": 1, "b": 2}, {"a": 1, "b": 2, "c": 3}), 1):
        writer = HuggingFaceStorageWriter(str(tmp_path / "shards"), files, save_distributed=True)
        state = dict.fromkeys(files, torch.full((2,), value))
        dcp.save(state, storage_writer=writer, no_dist=True)
    with pytest.raises(FormatError, match="files of several saves: of 2 and of 3"):
        opened(tmp_path / "shards")


def test_a_part_that_two_saves_of_different_numbers_of_processes_left_is_refused(tmp_path):
    file = "{:05d}-model-00001-of-00001"
    older = {file.format(n): ("w", 2 * n - 2, [1.0, 1.0]) for n in (1, 2, 3, 4)}
    newer = {file.format(1): ("w", 0, [2.0, 2.0]), file.format(2): ("w", 4, [2.0, 2.0])}
    write_shards(tmp_path / "shards", older | newer)
    with pytest.raises(
        FormatError, match=r"several saves: 'w' has one part in .*shard-00002.*-00003"
    ):
        opened(tmp_path / "shards")


def test_a_large_number_in_the_name_of_a_file_takes_no_time(tmp_path):
    last = f"{10**15}-model-00001-of-00001"
    write_shards(tmp_path / "shards", {last: ("w", 0, [1, 2])})
    with pytest.raises(MissingDataError, match="the file of shard 1 is missing"):
        opened(tmp_path / "shards")
    many = f"00001-model-00001-of-{10**15}"
    write_shards(tmp_path / "files", {many: ("w", 0, [1, 2])})
    assert any(
        f"no shard has file 2 of {10**15}" in note for note in opened(tmp_path / "files").notes
    )


def test_a_process_s_safetensors_file_of_any_length_but_its_own_is_refused(tmp_path):
    write_shards(tmp_path / "shards", TWO_OF_TWO)
    file = tmp_path / "shards" / "shard-00002-model-00002-of-00002.safetensors"
    whole = file.read_bytes()
    for wrong in (*(whole[:n] for n in range(0, len(whole), 7)), whole + b"\0"):
        file.write_bytes(wrong)
        with pytest.raises(FormatError, match=file.name):
            opened(tmp_path / "shards")


# --- what is refused ------------------------------------------------------------------------------


def test_without_trust_the_metadata_is_not_read(plain):
    with pytest.raises(OptionError, match=r"\.metadata is a pickle.*trust_pickle=True"):
        from_dcp.open_foreign(plain)


def test_what_python_objects_need_pickle_for_is_left_behind_and_said(copied):
    torch.save(
        {"kept": 1, "slice": slice(3), "set": {1}, "list": [slice(1), 2]}, copied / "leaf.pt"
    )
    replace_leaf(copied, "values.text", (copied / "leaf.pt").read_bytes())
    foreign = opened(copied)
    assert contents(foreign)["values"]["text"] == {"kept": 1, "list": [None, 2]}
    left = [note for note in foreign.notes if "left behind" in note]
    assert left == [
        "values.text/slice is left behind: it is a __builtin__.slice.",
        "values.text/set is left behind: it is a __builtin__.set.",
        "values.text/list/0 is left behind: it is a __builtin__.slice.",
    ]


def replace_leaf(directory, name, data):
    """Append other bytes to a data file, and have the metadata say that a leaf is those."""
    file = next(directory.glob("*.distcp"))
    at = file.stat().st_size
    file.write_bytes(file.read_bytes() + data)
    change_metadata(
        directory,
        lambda m: m.storage_data.update(
            {index(m, name): stored_at(m, name, offset=at, length=len(data))}
        ),
    )


def index(metadata, name, start=None):
    return next(
        i
        for i in metadata.storage_data
        if i.fqn == name and (start is None or tuple(i.offset) == start)
    )


def stored_at(metadata, name, **changes):
    info = metadata.storage_data[index(metadata, name)]
    return type(info)(
        **{
            "relative_path": info.relative_path,
            "offset": info.offset,
            "length": info.length,
            **changes,
        }
    )


def change_metadata(directory, change):
    path = directory / ".metadata"
    metadata = FileSystemReader(directory).read_metadata()
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize("module", ["pathlib", "pathlib._local"])
def test_metadata_whose_paths_another_python_has_pickled_is_read(copied, module):
    """Python 3.13 calls the module of its paths `pathlib._local`."""
    path = copied / ".metadata"
    metadata = FileSystemReader(copied).read_metadata()
    before = contents(opened(copied)).keys()
    metadata.storage_meta.checkpoint_id = Path("runs/1")
    data = re.sub(
        rb"cpathlib(?:\._local)?\nPosixPath\n",
        f"c{module}\nPosixPath\n".encode(),
        pickle.dumps(metadata, 2),
    )
    assert f"c{module}\n".encode() in data
    path.write_bytes(data)
    assert contents(opened(copied)).keys() == before


def test_what_was_saved_without_checksums_is_read_without(copied):
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"a": torch.arange(3)}, copied / "leaf.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    replace_leaf(copied, "values.text", (copied / "leaf.pt").read_bytes())
    np.testing.assert_array_equal(contents(opened(copied))["values"]["text"]["a"], np.arange(3))


@pytest.mark.parametrize(
    ("size", "why"),
    [
        (8, "7 elements of 8"),
        (6, "outside the shape"),
        (1 << 61, "more bytes than can be addressed"),
    ],
)
def test_boxes_that_do_not_make_the_tensor_are_refused_by_name(copied, size, why):
    def resize(metadata):
        metadata.state_dict_metadata["part"].size = torch.Size([size])

    change_metadata(copied, resize)
    with pytest.raises(FormatError, match=rf"'part'.*\({size},\).*{why}"):
        opened(copied)


def test_a_tensor_of_more_dimensions_than_any_has_is_refused(copied):
    def resize(metadata):
        metadata.state_dict_metadata["part"].size = torch.Size([1] * 70)

    change_metadata(copied, resize)
    with pytest.raises(FormatError, match=r"'part' has 70 dimensions, more than 32"):
        opened(copied)


def test_a_box_that_is_announced_twice_is_taken_once(copied):
    change_metadata(
        copied,
        lambda m: m.state_dict_metadata["part"].chunks.append(
            m.state_dict_metadata["part"].chunks[0]
        ),
    )
    assert len(opened(copied).structure.tensors["part"].pieces) == 1


def test_a_transformed_stream_is_refused_with_its_transform(copied):
    def compress(metadata):
        metadata.storage_data[index(metadata, "part")].transform_descriptors = ["stream.zstd/1"]

    change_metadata(copied, compress)
    with pytest.raises(
        FormatError, match=r"'part' was written with the extensions \['stream.zstd/1'\]"
    ):
        opened(copied)


def test_files_that_are_safetensors_inside_are_refused(jobs, tmp_path):
    with pytest.raises(FormatError, match=r"a file of torch\.save .* begins with"):
        opened(saved(jobs, tmp_path / "inside", 1, "sharded", "safetensors"))


def test_a_save_without_collectives_is_refused(jobs, tmp_path):
    location = saved(jobs, tmp_path / "alone", 2, "sharded", "one file", "without collectives")
    assert "without collectives" in from_dcp.looks_like(Candidate.at(location))
    with pytest.raises(FormatError, match=r"there is no \.metadata.*without collectives"):
        opened(location)


def test_a_missing_file_and_one_that_is_cut_off_are_errors_before_anything_is_read(copied):
    file = next(copied.glob("*.distcp"))
    data = file.read_bytes()
    file.write_bytes(data[:-1])
    with pytest.raises(
        CorruptionError, match=rf"{file.name} is shorter than the {len(data)} bytes"
    ):
        opened(copied)
    file.unlink()
    with pytest.raises(MissingDataError, match=rf"{file.name} is missing"):
        opened(copied)


def test_a_flipped_bit_in_a_tensor_that_is_read_in_one_go_is_noticed(copied):
    change(copied, np.full((3, 4), 1, np.float32).tobytes())
    with pytest.raises(CorruptionError, match=r"'expanded': .*CRC-32"):
        contents(opened(copied))


def test_a_flipped_bit_in_a_leaf_is_noticed(copied):
    change(copied, "naïve".encode())
    with pytest.raises(CorruptionError, match=r"'values.text': .*CRC-32 of its pickle"):
        opened(copied)


def change(directory, known):
    """Flip a bit where these bytes are."""
    file = next(directory.glob("*.distcp"))
    data = bytearray(file.read_bytes())
    assert data.count(known) == 1
    data[data.index(known)] ^= 4
    file.write_bytes(data)


def test_metadata_of_another_file_are_noticed(copied):
    def swap(metadata):
        one, other = index(metadata, "part"), index(metadata, "permuted")
        metadata.storage_data[one], metadata.storage_data[other] = (
            metadata.storage_data[other],
            metadata.storage_data[one],
        )

    change_metadata(copied, swap)
    with pytest.raises(
        FormatError,
        match=r"the metadata say float32 of shape .* but the file has torch.float32 of shape",
    ):
        opened(copied)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("depth", [201, 600])
def test_a_state_that_is_nested_too_deep_is_refused(tmp_path, depth):
    state = {"w": torch.ones(2)}
    for _ in range(depth):
        state = {"a": state}
    dcp.save(state, checkpoint_id=tmp_path / "deep", no_dist=True)
    with pytest.raises(FormatError, match=r"lies in more than 200 containers"):
        opened(tmp_path / "deep")


def test_a_file_outside_of_the_directory_is_not_read(copied):
    def escape(metadata):
        metadata.storage_data[index(metadata, "part")].relative_path = "../secret"

    (copied.parent / "secret").write_bytes(b"x" * 10_000_000)
    change_metadata(copied, escape)
    with pytest.raises(FormatError, match=r"'\.\./secret' is not a valid key below"):
        opened(copied)


def test_a_file_that_changes_while_it_is_read_is_an_error(copied):
    foreign = opened(copied)
    file = next(copied.glob("*.distcp"))
    file.write_bytes(file.read_bytes())
    with pytest.raises(ReplacedError, match=r"was changed"):
        contents(foreign)
