"""Options of a save that are refused, and the messages of their errors."""

import inspect
import warnings

import numpy as np
import pytest
import torch

import shardckpt
from shardckpt import Mesh, PartitionSpec, SaveOptions, Sharding
from shardckpt.errors import OptionError, ShardckptError
from shardckpt.options import parse_bytes
from shardckpt.reshard.options import ReshardOptions
from shardckpt.text import named, shorten

LAYOUT = Sharding(Mesh((2,), ("x",)), PartitionSpec("x"))


def nested(levels, kind):
    value = {"k": 1}
    for _ in range(levels - 2):
        value = {"k": value} if kind is dict else [value]
    return {"k": value}


@pytest.mark.parametrize("kind", [dict, list])
def test_metadata_of_more_than_200_levels_is_refused_before_anything_is_saved(tmp_path, kind):
    shardckpt.save(tmp_path / "c", {"step": 1}, options=SaveOptions(metadata=nested(200, kind)))
    assert shardckpt.open(tmp_path / "c").metadata == nested(200, kind)
    for levels in (201, 300, 500, 550, 600, 900, 5000):
        with pytest.raises(OptionError, match="nested more than 200 deep"):
            SaveOptions(metadata=nested(levels, kind))


def test_metadata_that_contains_itself_is_refused():
    inner = {}
    inner |= {"a": inner, "b": [inner]}
    with pytest.raises(OptionError, match="nested more than 200 deep"):
        SaveOptions(metadata=inner)


def test_metadata_that_changes_after_it_was_checked_is_stored_as_it_was(tmp_path):
    metadata = {"losses": [0.5]}
    options = SaveOptions(metadata=metadata)
    metadata["losses"].append(float("nan"))
    shardckpt.save(tmp_path / "c", {"step": 1}, options=options)
    assert shardckpt.open(tmp_path / "c").metadata == {"losses": [0.5]}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layout": "tar"}, 'use "packed" or "zarr"'),
        ({"compression": "gzip"}, 'use None or "zstd"'),
        ({"host_tensors": "shared"}, 'use "replicated" or "local"'),
        ({"device_copy": True}, 'use "wait" or "overlap"'),
        ({"shardings": None}, "NoneType is not a mapping; give a dict"),
        ({"shardings": [("w", LAYOUT)]}, "list is not a mapping; give a dict"),
        ({"shardings": {5: LAYOUT}}, "the key 5 is not a pattern"),
        ({"shardings": {("a", "b"): LAYOUT}}, "is not a pattern"),
        ({"shardings": {"w": "x"}}, "'w' has a str; give a shardckpt Sharding"),
        ({"overwrite": "no"}, "overwrite='no': give True or False"),
        ({"overwrite": None}, "overwrite=None: give True or False"),
        ({"memory_limit": "16KiB"}, "at least 16 MiB"),
        ({"memory_limit": -(10**6000)}, "give bytes as a whole number"),
        ({"shardings": {"w" * 10_000: "x"}}, r"'w{10,60}\.\.\.w{10,60}' has a str"),
        ({"layout": np.ones(3)}, r'a ndarray of shape 3\): use "packed" or "zarr"'),
        ({"check_replicas": np.ones(3)}, 'use "sample" or True or False'),
    ],
)
def test_an_option_that_cannot_be_is_refused_with_what_to_give(options, message):
    with pytest.raises(OptionError, match=message):
        SaveOptions(**options)


def test_an_array_in_the_place_of_a_choice_is_refused_with_the_choices():
    with pytest.raises(OptionError, match=r'layout=a ndarray of shape 3: use "packed" or "zarr"'):
        ReshardOptions(layout=np.ones(3))


def test_sizes_are_numbers_or_text():
    assert [parse_bytes(size, "limit") for size in (5, "5", "5B", "1.5 kB", "2KiB", "1TiB")] == [
        5,
        5,
        5,
        1500,
        2048,
        1 << 40,
    ]


@pytest.mark.parametrize(
    "size",
    [
        "",
        "much",
        "-1",
        "1e9",
        "nan",
        "1 PB",
        True,
        1.5,
        None,
        b"1",
        10**400,
        pytest.param(-(10**6000), id="6001 digits"),
        "9" * 400,
        "9" * 400 + "T",
        "9" * 300 + "TiB" * 9,
    ],
)
def test_a_size_that_is_none_is_refused_in_a_short_message(size):
    with pytest.raises(OptionError, match=r"limit=.*: give bytes as a whole number") as raised:
        parse_bytes(size, "limit")
    assert len(str(raised.value)) < 200


CALLS = {
    "save": (shardckpt.save, ("url", "state")),
    "save_async": (shardckpt.save_async, ("url", "state")),
    "open": (shardckpt.open, ("url",)),
    "restore": (shardckpt.restore, ("source", "like")),
    "diff": (shardckpt.diff, ("a", "b")),
    "export_safetensors": (shardckpt.export_safetensors, ("src", "dst")),
    "import_checkpoint": (shardckpt.import_checkpoint, ("src", "dst")),
    "reshard": (shardckpt.reshard, ("src", "dst")),
    "CheckpointManager": (shardckpt.CheckpointManager, ("root",)),
    "Publisher": (shardckpt.Publisher, ("url",)),
    "SaveOptions": (SaveOptions, ()),
}
TAKE_ANYTHING = {"state", "like"}


def mistaken_arguments():
    for name, (call, needed) in CALLS.items():
        for argument, parameter in inspect.signature(call).parameters.items():
            if argument not in TAKE_ANYTHING and parameter.kind not in (
                parameter.VAR_KEYWORD,
                parameter.VAR_POSITIONAL,
            ):
                yield pytest.param(call, needed, argument, id=f"{name}-{argument}")


@pytest.mark.parametrize(("call", "needed", "mistaken"), [*mistaken_arguments()])
def test_a_state_in_the_place_of_another_argument_is_refused_in_few_words(
    tmp_path, call, needed, mistaken
):
    """As after `save(state, url)`, in the order of torch.save."""
    saved = tmp_path / "saved"
    shardckpt.save(saved, {"w": np.zeros(3)})
    places = dict.fromkeys(("source", "src", "a", "b"), saved)
    arguments = {name: places.get(name, tmp_path / name) for name in needed}
    state = {"layers": [{f"w{i}": np.arange(1000.0)} for i in range(100)]}
    with pytest.raises(ShardckptError) as refused:
        call(**(arguments | {"like": None} if "like" in needed else arguments) | {mistaken: state})
    assert len(str(refused.value)) < 400
    assert "\n" not in str(refused.value)


def test_values_are_shown_in_few_words_whatever_they_are():
    with warnings.catch_warnings(action="ignore"):  # of torch, that its interface may change
        nested = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])
    assert shorten({"a": torch.zeros(3, 4)}) == "{'a': a Tensor of shape 3×4}"
    weight = "{'weight': a Parameter of shape 5×6}"
    assert shorten(torch.nn.Linear(6, 5, bias=False).state_dict(keep_vars=True)) == weight
    assert shorten(np.float32(3)) == "np.float32(3.0)"
    assert named("worker", (0, 8)).typed == ("0/8",)
    assert named("worker", (10**5000, 2)).typed == ("a int/2",)
    assert "nested_tensor" in shorten(nested), "it has no shape"
    assert shorten(Mesh((2, 4), ("a", "b"))) == "Mesh((2, 4), ('a', 'b'))"


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda url, array: shardckpt.restore(url, strict=array), "strict"),
        (lambda url, array: shardckpt.import_checkpoint(url, f"{url}-b", from_=array), "from_"),
        (lambda url, array: shardckpt.CheckpointManager(url, in_flight=array), "in_flight"),
        (lambda url, array: shardckpt.Publisher(url, snapshot=array), "snapshot"),
    ],
)
def test_an_array_in_place_of_a_choice_is_refused_by_name(tmp_path, call, words):
    shardckpt.save(tmp_path / "c", {"w": np.ones(3)})
    with pytest.raises(OptionError, match=words):
        call(tmp_path / "c", np.ones(3))
