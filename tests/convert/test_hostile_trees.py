"""Nested states with hostile keys, exported as each format: the format's own library and our import
give back what was exported.

What a format has no words for is an error that says so; then nothing is written. What comes back
otherwise than it was is what docs/export.md says: `MODELS` has it.
"""

from __future__ import annotations

import os
import re
import tempfile
import warnings
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from convert_states import joined
from faults import TORTURE
from foreign_states import without_torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import shardckpt
from shardckpt import errors

KEYS = (
    *(
        "",
        "a",
        "b",
        "a.b",
        "a/b",
        "a.",
        ".a",
        "~",
        "~0",
        "~1",
        "a~b",
        "a~1b",
        "0",
        "1",
        "-1",
        "True",
        "None",
        " ",
        "é",
        "x\ny",
        "'",
        '"',
        "\\",
    ),
    *(0, 1, -1, 10**21, True, False, None),
    *(
        ".",
        "..",
        "a/..",
        "/",
        "a/",
        "/a",
        "c",
        "c/0",
        "zarr.json",
        "a/c",
        "\ud800",
        "\0",
        "x" * 250,
    ),
    *(
        "_METADATA",
        "_sharding",
        "_strings.json",
        "checkpoint",
        "manifest.ocdbt",
        "ocdbt.process_0",
        "d",
        "default",
        "state",
        "metadata",
    ),
    *(
        "metrics",
        "commit_success.txt",
        "array_metadatas",
        "descriptor",
        "orbax.checkpoint",
        "_CHECKPOINT_METADATA",
        "x.orbax-checkpoint-tmp-1",
    ),
    *("param_groups", ".metadata", "__0_0.distcp", "__metadata__", "$tensor", "$dict", "data.pkl"),
)
tensors = st.builds(
    lambda shape, dtype: np.arange(int(np.prod(shape)), dtype=dtype).reshape(shape),
    st.sampled_from([(), (2,), (0,), (2, 1)]),
    st.sampled_from(["float32", "int64", "bool"]),
)
small = st.one_of(
    st.sampled_from(
        [
            0,
            -1,
            1 << 63,
            1 << 64,
            1 << 70,
            True,
            None,
            1.5,
            float("nan"),
            float("-inf"),
            1j,
            b"",
            b"b",
            np.float16(2),
            np.int8(3),
        ]
    ),
    st.sampled_from(["", "text", "a/b", "~", "\0", "é", "$tensor", "\ud800"]),
    st.sampled_from([torch.bfloat16, torch.device("cpu")]),
)
states = st.recursive(
    st.one_of(tensors, tensors, small),
    lambda children: st.one_of(
        st.dictionaries(st.sampled_from(KEYS), children, max_size=3),
        st.dictionaries(st.sampled_from(["a", "b", "0", 0, 1]), children, max_size=3),
        st.lists(children, max_size=3),
        st.lists(children, max_size=3).map(tuple),
    ),
    max_leaves=8,
).filter(lambda state: isinstance(state, dict | list | tuple))

REFUSED = (errors.NamesMismatchError, errors.StructureMismatchError)


def plain(value):
    """Containers, and leaves by their kind and bits."""
    if isinstance(value, dict):
        return {key: plain(child) for key, child in value.items()}
    if type(value) in (list, tuple):
        return [type(value).__name__, *(plain(child) for child in value)]
    if hasattr(value, "dtype") and not isinstance(value, np.generic):
        array = np.asarray(value)
        return (array.dtype.name, array.shape, array.tobytes())
    return repr(value.item() if isinstance(value, np.generic) else value)


def has_tensors(value):
    children = (
        value.values() if isinstance(value, dict) else value if type(value) in (list, tuple) else ()
    )
    return isinstance(value, np.ndarray) or any(map(has_tensors, children))


# --- torch


def torch_keeps(state):
    """State as torch's format keeps it: a list or tuple that has lost an item is a dict, and a
    container that has lost all is not there."""
    if type(state) not in (dict, list, tuple) or not state:
        return LOST if isinstance(state, bytes) and not state else state
    children = {
        key: torch_keeps(child)
        for key, child in (state.items() if isinstance(state, dict) else enumerate(state))
    }
    left = {key: child for key, child in children.items() if child is not LOST}
    if not left:
        return LOST
    return left if isinstance(state, dict) or len(left) < len(state) else type(state)(left.values())


def from_torch(place):

    return without_torch(torch.load(place, weights_only=True))


# --- DCP


def as_dcp(value):
    """Keys are texts, tuples with tensors in them are lists, and dicts without values are not
    there. A list with such a dict is refused."""
    if isinstance(value, dict):
        children = {str(key): as_dcp(child) for key, child in value.items()}
        return {key: child for key, child in children.items() if child is not LOST} or LOST
    if type(value) is list or (type(value) is tuple and has_tensors(value)):
        children = [as_dcp(child) for child in value]
        return LOST if value and all(child is LOST for child in children) else children
    return value


def from_dcp(place):
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    with warnings.catch_warnings(action="ignore"), tempfile.TemporaryDirectory() as folder:
        dcp_to_torch_save(place, Path(folder, "s.pt"))
        return without_torch(torch.load(Path(folder, "s.pt"), weights_only=False))


# --- Orbax


def as_orbax(value):
    """Keys are texts, and tuples are lists."""
    if isinstance(value, dict):
        return {str(key): as_orbax(child) for key, child in value.items()}
    return (
        [as_orbax(child) for child in value]
        if type(value) is list or (type(value) is tuple and value)
        else value
    )


def from_orbax(place):
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    import orbax.checkpoint as ocp

    with warnings.catch_warnings(action="ignore"), ocp.PyTreeCheckpointer() as checkpointer:
        return checkpointer.restore(place)


# --- safetensors


def from_safetensors(place):
    from safetensors.numpy import load_file

    return load_file(place)


def safetensors_name(name):
    """As `shardckpt.state.names` has it: no lone surrogates, and the largest numbers in hex."""
    return name.replace("\ud800", "~ud800").replace(str(10**21), hex(10**21))


def orbax_keeps(state, keys=()):
    """State as Orbax keeps it: None in the place of a lost leaf of a list or tuple; containers that
    lose all leaves stay."""
    if isinstance(state, dict):
        children = {key: orbax_keeps(child, (*keys, str(key))) for key, child in state.items()}
        return {key: child for key, child in children.items() if child is not LOST}
    if type(state) in (list, tuple):
        children = [orbax_keeps(child, (*keys, str(i))) for i, child in enumerate(state)]
        return type(state)(None if child is LOST else child for child in children)
    lost = isinstance(state, bytes | complex | torch.dtype | torch.device) or (
        isinstance(state, int) and not -(1 << 63) <= state < 1 << 64
    )
    return (
        LOST
        if lost
        or (
            isinstance(state, str)
            and (state == "\ud800" or re.search("~(?![01])|\ud800", ".".join(keys)))
        )
        else state
    )


LOST = object()
MODELS = {
    "torch": (from_torch, lambda state: {} if torch_keeps(state) is LOST else torch_keeps(state)),
    "dcp": (from_dcp, lambda state: {} if as_dcp(state) is LOST else as_dcp(state)),
    "orbax": (from_orbax, lambda state: as_orbax(orbax_keeps(state))),
    "safetensors": (
        from_safetensors,
        lambda state: {safetensors_name(name): array for name, array in joined(state).items()},
    ),
}
"""The library that reads a format, and what becomes of a state."""
OUTCOMES: Counter[str] = Counter()


def check(form, state):
    library, model = MODELS[form]
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder, {"safetensors": "a.safetensors", "torch": "a.pt"}.get(form, "a"))
        shardckpt.save(Path(folder, "before"), state)
        try:
            report = shardckpt.export(Path(folder, "before"), place, to=form)
        except REFUSED:
            OUTCOMES[f"{form} refused"] += 1
            assert [path.name for path in Path(folder).iterdir()] == ["before"]
            return
        OUTCOMES[f"{form} exported"] += 1
        expected = plain(model(state))
        assert plain(library(place)) == expected, report.notes
        shardckpt.import_checkpoint(
            place, Path(folder, "after"), from_=form, trust_pickle=form == "dcp", workers=1
        )
        assert plain(shardckpt.restore(Path(folder, "after"))) == expected, report.notes


@pytest.mark.long
@pytest.mark.timeout(3600 if TORTURE else 300)
@pytest.mark.parametrize("form", MODELS)
@settings(
    max_examples=1000 if TORTURE else 20,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(states)
def test_a_hostile_tree_comes_back_from_the_format_s_own_library_and_from_our_import(form, state):
    check(form, state)


def test_a_tensor_that_is_named_like_a_process_s_part_comes_back_from_orbax():
    check("orbax", {"ocdbt.process_0": {"a": np.zeros((), np.float32)}, "x": np.ones(2)})


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_a_list_with_an_empty_dict_comes_back_from_what_dcp_itself_saved(tmp_path):
    import torch.distributed.checkpoint as dcp

    dcp.save({"l": [torch.ones(2), {}, torch.zeros(3)]}, checkpoint_id=tmp_path / "d", no_dist=True)
    shardckpt.import_checkpoint(tmp_path / "d", tmp_path / "c", trust_pickle=True, workers=1)
    items = shardckpt.restore(tmp_path / "c")["l"]
    assert (items[0].tolist(), items[1], items[2].tolist()) == ([1, 1], {}, [0, 0, 0])


@pytest.mark.parametrize(
    "state", [["x", {}], ["x", {"k": {}}, "y"], [np.ones(2), {}, np.ones(1)], [["x", {}]]]
)
def test_a_list_with_a_dict_without_values_is_refused_for_dcp(tmp_path, state):
    shardckpt.save(tmp_path / "c", {"l": state, "m": ["x", ["y", []], []]})
    with pytest.raises(
        errors.StructureMismatchError,
        match=r"'l(\.0)?\.1' is an empty dict in a list: DCP does not store it",
    ):
        shardckpt.export(tmp_path / "c", tmp_path / "o", to="dcp")
    assert not (tmp_path / "o").exists()
    shardckpt.export(tmp_path / "c", tmp_path / "o", to="dcp", exclude="l/**")
    assert from_dcp(tmp_path / "o") == {"m": ["x", ["y", []], []]}


@pytest.mark.parametrize("to", ["dcp", "orbax"])
def test_keys_that_are_one_text_are_refused_by_name_with_prefixes_too(tmp_path, to):
    shardckpt.save(tmp_path / "c", {"x": {1: {"a": np.ones(2)}, "1": {"b": np.ones(2)}}})
    with pytest.raises(
        errors.NamesMismatchError, match="'x' has the keys 1 and '1', which become the same text in"
    ):
        shardckpt.export(tmp_path / "c", tmp_path / "o", to=to)


def test_texts_below_keys_with_slashes_and_items_without_leaves_come_back_from_orbax(tmp_path):
    check(
        "orbax",
        {"a/b": "x", "a/c": "y", "a~b": "left out", "l": [{"x": b"y"}, np.ones(2)], "nothing": {}},
    )
    shardckpt.save(tmp_path / "c", {"a": {}})
    shardckpt.export(tmp_path / "c", tmp_path / "o", to="orbax")
    assert from_orbax(tmp_path / "o") == {"a": {}}
    shardckpt.save(tmp_path / "t", {"a": "x", "a/b": "y"})
    with pytest.raises(errors.NamesMismatchError, match="'a/b' would be inside another text"):
        shardckpt.export(tmp_path / "t", tmp_path / "p", to="orbax")
