"""A state that is exported and imported again is unchanged, bit for bit, for each format and all
that it can hold.

What a format cannot hold comes back as `COMES_BACK` says, and nothing else is different:

| | safetensors | torch | dcp | orbax |
|---|---|---|---|---|
| elements, dtypes, shapes | same | same | same | same |
| dicts in dicts | one dict, its keys joined by dots | same | same | same |
| int keys | text, in the joined key | same | text, but in tuples that have no tensor | text |
| lists | as dicts with their indices as keys | same | same | same |
| tuples | as lists | same | lists, where a tensor is in them | lists |
| tied tensors | one, by the name that comes first | tied | one for each name | one for each name |
| numbers, texts, None | – | same | same | same |
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from convert_states import arrays_of, joined, layouts, random
from foreign_states import described
from hypothesis import Phase, given, note, settings
from hypothesis import strategies as st

import shardckpt
from shardckpt import SaveOptions

DTYPES = (
    *(
        "bool",
        "int8",
        "int16",
        "int32",
        "int64",
        "uint8",
        "uint16",
        "uint32",
        "uint64",
        "float16",
        "bfloat16",
        "float32",
        "float64",
    ),
    *("complex64", "float8_e4m3fn", "float8_e5m2"),
)
"""Those that all four have."""
KEYS = st.sampled_from(["weight", "bias", "layers", "größe", "a b", "0", "exp_avg"])

tensors = st.builds(
    lambda shape, dtype, seed: random(tuple(shape), dtype, seed),
    st.lists(st.integers(0, 9), max_size=3),
    st.sampled_from(DTYPES),
    st.integers(0, 1 << 30),
)
small = st.one_of(
    st.integers(-(2**63), 2**63 - 1), st.booleans(), st.floats(), st.text(max_size=8), st.none()
)
leaves = st.one_of(tensors, tensors, small)
inner = st.recursive(
    leaves,
    lambda children: st.one_of(
        st.dictionaries(KEYS, children, min_size=1, max_size=3),
        st.dictionaries(st.integers(0, 99), children, min_size=1, max_size=3),
        st.lists(children, min_size=1, max_size=3),
        st.lists(children, min_size=1, max_size=3).map(tuple),
    ),
    max_leaves=8,
)


@st.composite
def states(draw):
    """A state with a tensor that has two names, and how each of its tensors is laid out, evenly or
    not."""
    state = draw(st.dictionaries(KEYS, inner, max_size=3))
    # Tensors without elements are not tied.
    state["first"] = random((3, draw(st.integers(1, 9))), draw(st.sampled_from(DTYPES)))
    state["tied"] = {"second": state["first"]}
    shardings = {}
    for path, tensor in arrays_of(state):
        layout = draw(layouts(tensor.ndim))
        name = "/".join(path)
        if path[0] not in ("first", "tied") and draw(st.booleans()):
            shardings[name] = layout
    return state, shardings


def with_lists(value, *, always):
    """Keys as text, and lists in place of tuples; or tuples without a tensor as they are."""
    if isinstance(value, dict):
        return {str(key): with_lists(child, always=always) for key, child in value.items()}
    if isinstance(value, tuple) and not always and not any(arrays_of(value)):
        return value
    if isinstance(value, (list, tuple)):
        return [with_lists(child, always=always) for child in value]
    return value


COMES_BACK = {
    "safetensors": joined,
    "torch": lambda state: state,
    "dcp": lambda state: with_lists(state, always=False),
    "orbax": lambda state: with_lists(state, always=True),
}
"""Format → a function from a state to the same state after a round trip."""


@pytest.mark.parametrize("form", COMES_BACK)
@settings(max_examples=8, deadline=None, phases=[Phase.generate, Phase.reuse])
@given(states())
def test_an_import_of_an_export_is_what_was_exported(form, drawn):
    state, shardings = drawn
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        shardckpt.save(folder / "before", state, options=SaveOptions(shardings=shardings))
        out = folder / {"safetensors": "a.safetensors", "torch": "a.pt"}.get(form, "a")
        exported = shardckpt.export(folder / "before", out, to=form)
        imported = shardckpt.import_checkpoint(
            out, folder / "after", trust_pickle=form == "dcp", workers=1
        )
        note(f"{exported.notes} {imported.notes}")
        restored = shardckpt.restore(folder / "after")
    assert imported.format == form
    assert described(restored) == described(COMES_BACK[form](state))
    if form == "torch":
        assert restored["first"] is restored["tied"]["second"]
