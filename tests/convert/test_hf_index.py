"""Tensors are dealt out to files as Hugging Face deals them out."""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest
from huggingface_hub.serialization import split_state_dict_into_shards_factory
from hypothesis import example, given
from hypothesis import strategies as st

from shardckpt.convert.formats.safetensors.hf_index import split
from shardckpt.errors import OptionError


@dataclass
class Sized:
    """A tensor, as far as its size goes."""

    nbytes: int


@given(st.dictionaries(st.text(min_size=1), st.integers(0, 12), min_size=1), st.integers(1, 20))
@example({"a": 6, "b": 6, "c": 2, "d": 6, "e": 2, "f": 2}, 10)
@example({"a": 0, "b": 11, "c": 0}, 10)
def test_files_and_index_are_those_of_huggingface_hub(sizes: dict[str, int], limit: int) -> None:
    theirs = split_state_dict_into_shards_factory(
        {name: Sized(size) for name, size in sizes.items()},
        get_storage_size=lambda tensor: tensor.nbytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=limit,
    )
    ours = split(sizes, limit)
    assert {file: list(names) for file, names in ours.files.items()} == theirs.filename_to_tensors
    assert ours.weight_map == theirs.tensor_to_filename
    text = ours.index(total_parameters=7)
    assert (text is not None) == theirs.is_sharded
    if text is not None:
        assert json.loads(text) == {
            "metadata": {**theirs.metadata, "total_parameters": 7},
            "weight_map": theirs.tensor_to_filename,
        }


def test_without_a_limit_there_is_one_file_and_without_tensors_an_empty_one() -> None:
    assert split({"a": 10**15, "b": 1}).files == {"model.safetensors": ("a", "b")}
    assert split({}, "1GB").files == {"model.safetensors": ()}


@pytest.mark.parametrize(
    ("size", "files"), [("5GB", 2), ("5 gb", 2), ("5GiB", 1), (5 * 2**30, 1), ("6000MB", 1)]
)
def test_sizes_are_decimal_unless_they_say_otherwise(size: int | str, files: int) -> None:
    assert len(split({"a": 3 * 10**9, "b": 2 * 10**9 + 1}, size).files) == files


def test_tensors_that_exceed_the_limit_are_named() -> None:
    assert split({"a": 3, "b": 2, "c": 1}, 1).oversized == ("a", "b")
    assert split({"a": 3, "b": 2, "c": 1}).oversized == ()


@pytest.mark.parametrize("size", [0, -1, "5 XB", "much", True])
def test_a_size_that_is_none_is_refused(size: object) -> None:
    with pytest.raises(OptionError, match="max_shard_size="):
        split({"a": 1}, size)  # type: ignore[arg-type]
