"""A machine that reads pickles and runs nothing in them, held against Python's own and torch's."""

from __future__ import annotations

import io
import os
import pickle
import struct
import zipfile
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardckpt.convert.formats.dcp.metadata import CLASSES, parse_metadata
from shardckpt.convert.formats.torch.file import open_torch_file
from shardckpt.convert.formats.torch.objects import TABLE, Dtype, PickledTensor, Storage, storage_of
from shardckpt.convert.formats.torch.states import open_state_file
from shardckpt.convert.formats.torch.unpickling import Build, Instance, Name, unpickle
from shardckpt.convert.plain_values import plain, whole
from shardckpt.convert.span import LoadedFile, Span
from shardckpt.errors import CorruptionError, FormatError

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(max_size=300)
)
keys = scalars | st.tuples(scalars, scalars)
values = st.recursive(
    scalars,
    lambda children: (
        st.lists(children)
        | st.tuples(children, children)
        | st.tuples(children)
        | st.dictionaries(keys, children)
    ),
)


@given(values, st.integers(2, 5))
def test_plain_values_are_what_python_itself_reads(value, protocol):
    data = pickle.dumps(value, protocol)
    assert (
        unpickle(
            data,
            "file",
            {
                "_codecs.encode": TABLE["_codecs.encode"],
                "__builtin__.bytes": TABLE["__builtin__.bytes"],
            },
        )
        == value
    )


@given(values)
def test_a_state_that_torch_saved_is_what_torch_itself_reads(value):
    buffer = io.BytesIO()
    torch.save({"state": value}, buffer)
    buffer.seek(0)
    assert file_of(buffer.getvalue()).state == torch.load(buffer, weights_only=False)


def file_of(data):
    return open_torch_file(Span(LoadedFile("the file", data), 0, len(data)))


def test_what_is_shared_is_shared():
    inner = [1]
    items = unpickle(pickle.dumps([inner, inner]), "file")
    assert items[0] is items[1]


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_nothing_that_a_pickle_calls_is_called(tmp_path, protocol):
    class Attack:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path}/reached",)

    data = pickle.dumps([Attack()], protocol)
    (item,) = unpickle(data, "file")
    assert (item.name, item.arguments) == ("posix.system", (f"touch {tmp_path}/reached",))
    with pytest.raises(
        FormatError, match=r"file: this pickle names 'posix\.system'.*nothing of this one was run"
    ):
        parse_metadata(data, "file")
    assert list(tmp_path.iterdir()) == []
    pickle.loads(data)
    assert [path.name for path in tmp_path.iterdir()] == ["reached"], "Python itself runs it"


ATTACKS = {
    "eval": b"cbuiltins\neval\n(X\x01\x00\x00\x00atR.",
    "in the state of a class": (
        b"ctorch.distributed.checkpoint.metadata\nMetadata\n}X\x01\x00\x00\x00acposix\nsystem\nsb."
    ),
    "dropped from the stack": b"cposix\nsystem\n0N.",
    "a getattr": b"c__builtin__\ngetattr\n(X\x01\x00\x00\x00atR.",
    "the old way": b"(S'touch'\niposix\nsystem\n.",
    "an extension": b"\x82\x01.",
    "another file": b"P0\n.",
    "a name that is not text": b"K\x01K\x02\x93.",
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_metadata_that_would_run_code_are_refused_whoever_trusts_them(attack):
    with pytest.raises(FormatError, match=r"^the file: this pickle "):
        parse_metadata(ATTACKS[attack], "the file")


def test_a_state_is_given_to_instances_alone():
    for target in (b"c__builtin__\nobject\n", b"]", b"K\x01"):
        with pytest.raises(FormatError, match="is given a state"):
            unpickle(target + b"}b.", "file")
    assert unpickle(b"ccollections\nOrderedDict\n)R}b.", "file", TABLE) == {}, (
        "torch keeps versions of modules there"
    )


def test_a_large_number_in_few_bytes_takes_no_memory():
    # Python's own machine makes a table as long as the largest place that is spoken of.
    assert unpickle(b"Nr\xff\xff\xff\x7f.", "file") is None
    for length in (
        b"B\xff\xff\xff\xff",
        b"\x8e" + struct.pack("<Q", 1 << 60),
        b"X\xff\xff\xff\xff",
        b"\x8b\xff\xff\xff\x7f",
    ):
        with pytest.raises(FormatError, match="ends at byte"):
            unpickle(length + b"abc.", "file")


def _text(value):
    return b"X" + struct.pack("<I", len(value)) + value


LONG = b"m" * 10_000
MANY = b"(" + b"K\x01" * 10_000
OVER_AND_OVER = {
    "a name": _text(LONG[:400]) + b"\x94]" + b"h\x00h\x00\x93a" * 40_000,
    "a text as bytes": b"c_codecs\nencode\n\x94"
    + _text(LONG)
    + b"\x85\x94]"
    + b"h\x00h\x01Ra" * 400,
    "a list as a torch.Size": b"ctorch\nSize\n\x94]" + MANY + b"e\x85\x94]" + b"h\x00h\x01Ra" * 80,
    "arguments of a method": b"ca\nb\n)R\x94" + MANY + b"t\x94]" + b"h\x00h\x01Ra" * 80,
    "arguments beside keywords": b"ca\nb\n\x94" + MANY + b"t\x94]" + b"h\x00h\x01}\x92a" * 80,
    "a text as a key": _text(LONG) + b"\x94]" + b"}h\x00Nsa" * 400,
    "a number as a key": b"\x8b\x10\x27\x00\x00" + b"\x7f" * 10_000 + b"\x94]" + b"}h\x00Nsa" * 400,
    "a tuple as a key": MANY + b"t\x94]" + b"}h\x00Nsa" * 80,
}


@pytest.mark.parametrize("case", OVER_AND_OVER)
def test_a_program_that_copies_one_long_value_over_and_over_is_refused(case):
    with pytest.raises(FormatError, match="it uses long values over and over"):
        unpickle(OVER_AND_OVER[case] + b".", "file", TABLE)


def test_a_name_that_is_too_long_is_refused():
    with pytest.raises(FormatError, match="a name is too long"):
        unpickle(b"c" + LONG + b"\nb\n.", "file")


@pytest.mark.parametrize("shape", [(1,) * 33, (1 << 63, 0), (1 << 20_000, 0)])
def test_a_tensor_with_a_shape_that_none_can_have_is_refused(shape):
    with pytest.raises(ValueError, match="a tensor has shape"):
        PickledTensor(Storage("0", None, 1), Dtype("uint8"), 0, shape, (0,) * len(shape))


def test_a_pickle_that_is_cut_off_or_nested_without_end_is_an_error_and_no_crash():
    data = pickle.dumps({"a": [1, 2.5, "text", (None, True)]}, 4)
    for end in range(len(data)):
        with pytest.raises(FormatError, match="this pickle"):
            unpickle(data[:end], "file")
    deep = b"N" + b"\x85" * 100_000
    unpickle(deep + b".", "file")
    ((key, value),) = unpickle(b"}" + deep + b"Ns.", "file").items()
    assert (repr(key), value) == ("a tuple", None)
    with pytest.raises(FormatError, match="a list is a key"):
        unpickle(b"}]Ns.", "file")


@given(st.binary(max_size=60), st.data())
def test_any_bytes_are_read_or_refused(noise, data):
    sound = pickle.dumps(
        {"a": [1, (2.5, "b")], 3: OrderedDict(c=b"d")}, data.draw(st.integers(2, 5))
    )
    at = data.draw(st.integers(0, len(sound)))
    with suppress(FormatError):
        unpickle(sound[:at] + noise + sound[at:], "file", TABLE)


def test_functions_of_ours_stand_for_what_is_called():
    data = pickle.dumps([complex(1, 2), range(3)])
    assert unpickle(data, "file", {"builtins.complex": Build(complex)})[0] == 1 + 2j
    other = unpickle(data, "file")[1]
    assert isinstance(other, Instance)
    assert other.name == "builtins.range"
    assert unpickle(pickle.dumps(len), "file") == Name("builtins.len")


def test_names_that_dcp_metadata_may_contain_are_data_alone():
    assert not any(
        name.startswith(("os.", "posix.", "builtins.", "__builtin__."))
        for name in CLASSES - {"builtins.bytes", "__builtin__.bytes"}
    )


class Listed(list):
    """A list with attributes."""


class Outer:
    class Inner:
        def method(self):
            pass


class ByKeywords:
    def __new__(cls, *, rate):
        del rate
        return super().__new__(cls)

    def __getnewargs_ex__(self):
        return (), {"rate": 2}


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_calls_states_and_items_of_objects_are_recorded_alone(protocol):
    listed = Listed([1, 2])
    listed.note = "x"
    inner = Outer.Inner()
    objects = [
        listed,
        {1, 2},
        frozenset([3]),
        bytearray(b"ab"),
        Outer.Inner,
        inner,
        inner.method,
        ByKeywords(rate=2),
        {inner: 1},
    ]
    recorded = unpickle(pickle.dumps(objects, protocol), "file")
    assert (recorded[0].name, recorded[0].appended, recorded[0].state) == (
        f"{__name__}.Listed",
        [1, 2],
        {"note": "x"},
    )
    assert (recorded[1].appended or recorded[1].arguments[0]) == [1, 2]
    assert recorded[2].arguments == ([3],)
    assert recorded[3].name in ("builtins.bytearray", "__builtin__.bytearray")
    assert recorded[4] == Name(f"{__name__}.Outer.Inner")
    assert recorded[5].name == f"{__name__}.Outer.Inner"
    assert recorded[6].arguments[0] is recorded[5]
    assert isinstance(recorded[7], Instance)
    assert list(recorded[8]) == [recorded[5]]


HOSTILE = {
    "a call of what a call returned": b"cposix\nsystem\n)R)R",
    "an attribute of an attribute": b"cbuiltins\n"
    b"getattr\n"
    b"(cbuiltins\n"
    b"getattr\n"
    b"(cos\n"
    b"path\n"
    b"X\x01\x00\x00\x00atRX\x01\x00\x00\x00btR",
    "an attribute of a call": b"cbuiltins\ngetattr\n(cos\npath\n)RX\x01\x00\x00\x00atR)R",
    "a state of a call": b"cposix\nsystem\n)R}X\x01\x00\x00\x00aNsb",
    "items of a call": b"cposix\nsystem\n)R(NNu(Ne",
    "an object in itself": b"cposix\nsystem\n)Rq\x00h\x00b(h\x00h\x00u(h\x00e",
    "a state that is nested without end": b"cposix\nsystem\n)R" + b"N" + b"\x85" * 100_000 + b"b",
    "an argument that is nested without end": b"cposix\nsystem\nN" + b"\x85" * 100_000 + b"\x85R",
    "calls that are nested without end": b"cposix\nsystem\n" + b")R" * 100_000,
    "a key that is nested without end": b"cposix\nsystem\n)R(N" + b"\x85" * 100_000 + b"Nu",
    "an object as a key": b"cposix\nsystem\n)R(cposix\nsystem\n)RNu",
    "a call with keywords": b"cposix\nsystem\n)}\x92",
}


@pytest.mark.parametrize("hostile", HOSTILE)
def test_a_hostile_object_is_left_behind_and_named(hostile):
    @dataclass
    class File:
        state: object
        pickle_bytes: int = 1000

    root = unpickle(
        b"}(X\x01\x00\x00\x00x" + HOSTILE[hostile] + b"X\x01\x00\x00\x00yK\x01u.", "file", TABLE
    )
    state, notes = whole(File(root), {})
    assert state == {"y": 1}
    assert len(notes) == 1
    assert notes[0].startswith("x is left behind: it is ")


def test_shared_lists_in_objects_are_searched_for_tensors_once():
    shared = Instance("a.B", ())
    for _ in range(60):
        shared = [shared, shared]

    @dataclass
    class File:
        state: object
        pickle_bytes: int = 1000

    state, notes = whole(File({"x": [Instance("a.B", (shared,)) for _ in range(50)], "y": 1}), {})
    assert state == {"x": [None] * 50, "y": 1}
    assert len(notes) == 50


def test_a_reference_to_anything_but_a_storage_is_an_error():
    for reference in (
        b"N",
        b"K\x01",
        b"(X\x07\x00\x00\x00storagecposix\nsystem\nX\x01\x00\x00\x000NK\x01t",
        b"cposix\nsystem\n)R",
    ):
        with pytest.raises(FormatError, match="a reference does not name a storage"):
            unpickle(reference + b"Q.", "file", TABLE, persistent=storage_of)
        with pytest.raises(FormatError, match="refers to something outside"):
            unpickle(reference + b"Q.", "file", TABLE)


# --- what torch.save was given --------------------------------------------------------------------


def test_what_is_shared_over_and_over_is_left_behind():
    shared = [0]
    for _ in range(40):
        shared = [shared, shared]
    buffer = io.BytesIO()
    torch.save({"bomb": shared, "fine": 1}, buffer)
    value, left = plain(file_of(buffer.getvalue()), "leaf")
    assert left
    assert "too many shared parts" in left[0]
    assert set(value) <= {"bomb", "fine"}


def test_the_note_on_an_object_says_that_a_tensor_is_lost_with_it():
    scaled = torch.nn.Parameter(torch.ones(2))
    scaled.scale, scaled.kind = torch.ones(3), "int8"
    buffer = io.BytesIO()
    torch.save({"x": (scaled, 2), "y": {1, 2}}, buffer)
    value, left = plain(file_of(buffer.getvalue()), "leaf")
    assert value["x"][1] == 2
    assert left == [
        (
            "leaf/x/0.__dict__ is left behind: it has the attributes 'scale', 'kind' with a tensor "
            "that is nowhere else in the file."
        ),
        "leaf/y is left behind: it is a __builtin__.set.",
    ]


def test_a_storage_that_claims_more_elements_than_its_entry_has_is_refused():
    reference = (
        b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000NJ\x05\x00\x00\x00tQ"
    )
    tensor = (
        b"ctorch._utils\n_rebuild_tensor_v2\n(" + reference + b"K\x00K\x01\x85K\x00\x85\x89)tR."
    )
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("a/data.pkl", tensor)
        archive.writestr("a/data/0", bytes(16))
    with pytest.raises(CorruptionError, match=r"'0' has 5 elements, but it has 16 bytes"):
        plain(file_of(buffer.getvalue()), "leaf")


@pytest.mark.parametrize(
    "rebuild",
    [b"ctorch\nSize\n", b"c_codecs\nencode\n", b"ctorch._tensor\n_rebuild_from_type_v2\n"],
)
def test_a_tensor_that_no_function_for_tensors_makes_is_refused(rebuild):
    """Such a function may copy long values that no call has as an argument, so nothing counts."""
    program = (
        b"ctorch._tensor\n_rebuild_from_type_v2\n("
        + rebuild
        + b"ctorch\nTensor\n]"
        + MANY
        + b"e\x85}tR."
    )
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("a/data.pkl", program)
    data = buffer.getvalue()
    with pytest.raises(FormatError, match="a tensor is made by something else than a function"):
        open_state_file(Span(LoadedFile("the file", data), 0, len(data)))


@pytest.mark.long
def test_values_below_long_names_are_left_behind():
    """Each has a name as long as the keys around it."""
    buffer = io.BytesIO()
    torch.save({"fine": 1, "k" * 100_000: [0] * 20_000}, buffer)
    value, left = plain(file_of(buffer.getvalue()), "leaf")
    assert value["fine"] == 1
    assert "too many shared parts" in left[0]


@pytest.mark.parametrize(
    "instance",
    [
        b"cnumpy.core.multiarray\nscalar\n)R",
        b"cnumpy.core.multiarray\n_reconstruct\n)R(K\x01K\x02NNNtb",
        b"c_io\nBytesIO\n)R)b",
        b"ctorch\ndevice\nN\x85R",
        b"ccollections\nCounter\nK\x01\x85R",
    ],
)
def test_an_object_that_says_nonsense_of_itself_is_left_behind(instance):
    @dataclass
    class File:
        state: object
        pickle_bytes: int = 100

    value, left = plain(File({"x": unpickle(instance + b".", "file", TABLE), "y": 1}), "leaf")
    assert value["y"] == 1
    assert "x" not in value or value["x"] == {}
    assert bool(left) != ("x" in value)


def test_a_damaged_file_of_torch_save_is_an_error_or_reads_as_before():
    buffer = io.BytesIO()
    torch.save({"w": torch.arange(6.0), "n": 5}, buffer)
    sound = buffer.getvalue()
    expected = file_of(sound).state
    rng = np.random.default_rng(0)
    for at in rng.integers(0, len(sound), 300).tolist():
        damaged = bytearray(sound)
        damaged[at] ^= 1 << int(rng.integers(8))
        try:
            read = file_of(bytes(damaged))
            read.storage(read.state["w"].storage)
        except (FormatError, CorruptionError, KeyError, AttributeError, TypeError):
            continue
        assert type(read.state) is type(expected)
