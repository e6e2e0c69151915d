"""Files that torch.save has written are read as torch.load(weights_only=True) reads them, and
nothing in their pickles is run."""

from __future__ import annotations

import argparse
import datetime as dt
import functools
import json
import os
import shutil
import struct
import subprocess
import sys
import tracemalloc
import warnings
import zipfile
from collections import Counter, OrderedDict, defaultdict, deque
from contextlib import suppress
from enum import Enum
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from foreign_contents import contents
from foreign_states import described, without_torch
from forgery import at_most
from hypothesis import given, settings
from hypothesis import strategies as st

import shardckpt
from shardckpt.convert.files.file_version import Candidate
from shardckpt.convert.formats.torch import file as torch_file
from shardckpt.convert.formats.torch.source import looks_like, open_foreign
from shardckpt.convert.importing import import_checkpoint
from shardckpt.errors import (
    CorruptionError,
    FormatError,
    MissingDataError,
    NamesMismatchError,
    ReplacedError,
    ShardckptError,
)
from shardckpt.io.store import Store
from shardckpt.io.url import parse
from shardckpt.state import alias_map

PATH = f"{type(Path()).__module__}.{type(Path()).__name__}"
"""The class of paths; Python 3.13 has moved it."""
DTYPES = [
    *(
        "bool",
        "uint8",
        "int8",
        "int16",
        "int32",
        "int64",
        "uint16",
        "uint32",
        "uint64",
        "float16",
        "bfloat16",
        "float32",
        "float64",
    ),
    *(
        "complex64",
        "complex128",
        "float8_e4m3fn",
        "float8_e5m2",
        "float8_e4m3fnuz",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
    ),
]


def opened(path):
    return open_foreign(parse(str(path)))


def saved(tmp_path, state, **options):
    torch.save(state, tmp_path / "state.pt", **options)
    return tmp_path / "state.pt"


def expect(path, state):
    assert described(contents(opened(path))) == described(without_torch(state))


@pytest.mark.parametrize("protocol", [2, 4])
def test_a_state_is_read_as_torch_reads_it(tmp_path, protocol):
    model = torch.nn.Sequential(torch.nn.Linear(300, 40), torch.nn.BatchNorm1d(40))
    moments = {
        i: {"step": torch.tensor(3.0), "exp_avg": torch.randn_like(p)}
        for i, p in enumerate(model.parameters())
    }
    state = {
        "model": model.state_dict(),
        "parameters": dict(model.named_parameters()),
        "optimizer": {
            "state": moments,
            "param_groups": [{"betas": (0.9, 0.95), "foreach": None, "params": [0, 1, 2, 3]}],
        },
        "leaves": [
            1,
            -(2**70),
            2.5,
            float("nan"),
            True,
            None,
            "é",
            b"\0\xff",
            1 + 2j,
            (),
            {},
            [],
            {3: "int", None: 0, True: 1},
        ],
        "torch": {"dtype": torch.bfloat16, "device": torch.device("cuda:1")},
        "empty": {"0": torch.empty(0), "3": torch.empty(2, 0, 3)},
        "scalar": torch.tensor(3.0, dtype=torch.float64),
        "ordered": OrderedDict(a=torch.ones(2)),
    }
    path = saved(tmp_path, state, pickle_protocol=protocol)
    expect(path, torch.load(path, weights_only=False))
    assert (
        looks_like(Candidate.at(parse(str(path))))
        == "state.pt, a zip archive that begins with data.pkl"
    )


def test_what_is_a_plain_value_in_other_clothes_is_taken(tmp_path):
    state = {
        "arguments": argparse.Namespace(rate=1e-3, layers=[2, 3]),
        "size": torch.Size([2, 3]),
        "default": defaultdict(list, a=[1]),
        "counter": Counter("aab"),
        "numpy": np.arange(6, dtype=np.int16).reshape(2, 3),
        "numpy scalar": np.float32(2.5),
    }
    plain = {
        **state,
        "arguments": vars(state["arguments"]),
        "size": (2, 3),
        "default": {"a": [1]},
        "counter": {"a": 2, "b": 1},
    }
    expect(saved(tmp_path, state), plain)


def test_arrays_of_numpy_are_read_from_pickles_of_any_protocol(tmp_path):
    whole = np.arange(6.0).reshape(2, 3)
    for protocol in (2, 4, 5):
        state = {"rows": whole, "columns": whole.T, "big": whole.astype(">i4"), "empty": whole[:0]}
        for axes in ((1, 0, 2), (1, 2, 0)):
            state[f"axes {axes}"] = np.arange(24.0).reshape(2, 3, 4).transpose(axes)
        arrays = contents(opened(saved(tmp_path, state, pickle_protocol=protocol)))
        assert arrays.keys() == state.keys()
        for name, array in arrays.items():
            np.testing.assert_array_equal(array, state[name])


def test_every_dtype_of_torch_is_read(tmp_path):
    random = torch.randint(
        0, 2, (40, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    expect(
        saved(
            tmp_path, state := {name: random.clone().view(getattr(torch, name)) for name in DTYPES}
        ),
        state,
    )


def test_a_tensor_that_is_itself_the_state_is_read(tmp_path):
    expect(saved(tmp_path, torch.arange(6).reshape(2, 3).t()), torch.arange(6).reshape(2, 3).t())


@st.composite
def views(draw):
    """A tensor that sees some of a storage: transposed, cut, with steps, repeated."""
    shape = draw(st.lists(st.integers(1, 6), max_size=4))
    tensor = torch.arange(int(np.prod(shape)), dtype=torch.int32).reshape(shape)
    if shape and draw(st.booleans()):
        tensor = tensor.permute(*draw(st.permutations(range(len(shape)))))
    for d in range(tensor.ndim):
        start, step = draw(st.integers(0, tensor.shape[d])), draw(st.integers(1, 3))
        tensor = tensor[(slice(None),) * d + (slice(start, None, step),)]
    return (
        tensor.unsqueeze(0).expand(draw(st.integers(0, 3)), *tensor.shape)
        if draw(st.booleans())
        else tensor
    )


@settings(max_examples=60)
@given(tensors=st.lists(views(), max_size=3))
def test_views_are_read_whatever_their_strides(tmp_path_factory, tensors):
    path = tmp_path_factory.getbasetemp() / "views.pt"
    torch.save(tensors, path)
    expect(path, tensors)


def test_large_views_are_read_in_chunks(tmp_path):
    base = torch.arange(3 << 20, dtype=torch.int32).reshape(1 << 10, 3 << 10)
    state = {
        "whole": base,
        "transposed": base.t(),
        "columns": base[:, ::7],
        "channels": base.view(4, 16, 64, 768).permute(0, 3, 1, 2),
    }
    path = saved(tmp_path, state)
    expect(path, state)
    chunks = {name: tensor.num_chunks for name, tensor in opened(path).structure.tensors.items()}
    assert min(chunks.values()) > 1


def test_the_header_of_a_storage_is_read_once_for_all_chunks_and_views(tmp_path, monkeypatch):
    base = torch.arange(3 << 20, dtype=torch.int32).reshape(1 << 10, 3 << 10)
    path = saved(tmp_path, {"transposed": base.t(), "columns": base[:, ::7]})
    find, entries = torch_file._start, []

    def count(span, info, head):
        entries.append(info.filename)
        return find(span, info, head)

    monkeypatch.setattr(torch_file, "_start", count)
    expect(path, {"transposed": base.t(), "columns": base[:, ::7]})
    assert entries.count("state/data/0") == 1


def test_what_is_the_same_memory_is_stored_once_and_other_views_are_not(tmp_path):
    weight = torch.nn.Parameter(torch.randn(4, 6))
    state = {
        "a": weight,
        "b": weight,
        "c": weight.detach(),
        "transposed": weight.t(),
        "half": weight[:2],
        "copy": weight.clone(),
    }
    foreign = opened(saved(tmp_path, state))
    assert alias_map(foreign.structure.tree) == {"b": "a", "c": "a"}
    assert list(foreign.structure.tensors) == ["a", "transposed", "half", "copy"]
    expect(tmp_path / "state.pt", state)


def test_parameters_with_attributes_are_tensors(tmp_path):
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.tensor_parallel = True
    plain = torch.zeros(2)
    plain.note = "x"
    expect(saved(tmp_path, {"p": parameter, "t": plain}), {"p": parameter, "t": plain})
    expect(saved(tmp_path, {"of a class": scaled(torch.ones(2))}), {"of a class": torch.ones(2)})


def with_attribute(tensor, **attributes):
    tensor.__dict__.update(attributes)
    return tensor


@pytest.mark.parametrize("make", [torch.clone, torch.nn.Parameter])
def test_an_attribute_of_a_tensor_is_left_behind_with_a_note(tmp_path, make):
    scale = torch.ones(1)
    weight = with_attribute(make(torch.ones(3)), rate=0.5, scale=scale)
    foreign = opened(saved(tmp_path, {"in": {"w": weight}, "scale": scale}))
    np.testing.assert_array_equal(contents(foreign)["in"]["w"], np.ones(3))
    assert foreign.notes == (
        "in/w.__dict__ is left behind: it has the attributes 'rate', 'scale'.",
    )


class Custom:
    """Of somebody's own."""

    def __init__(self, **attributes):
        self.__dict__.update(attributes)


class Outer:
    class Inner:
        pass


class Color(Enum):
    RED = 1


class MyDict(dict):
    """A dict of somebody's own."""


class MyList(list):
    """A list of somebody's own."""


class Scaled(torch.Tensor):
    """A tensor of somebody's own."""


def scaled(tensor, **attributes):
    tensor = tensor.as_subclass(Scaled)
    tensor.__dict__.update(attributes)
    return tensor


def deep(n):
    value = []
    for _ in range(n):
        value = [value]
    return value


class RunsCode:
    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


UNSTORABLE = {
    "a quantized tensor": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    "a quantized tensor: save its": lambda: torch.quantize_per_channel(
        torch.ones(2, 3), torch.ones(2), torch.zeros(2), 0, torch.quint8
    ),
    "a sparse tensor": lambda: torch.eye(3).to_sparse(),
    "a sparse tensor: save": lambda: torch.eye(3).to_sparse_csr(),
    "on the device meta": lambda: torch.empty(3, device="meta"),
    "conjugated": lambda: torch.ones(3, dtype=torch.complex64).conj(),
    "a nested tensor": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "float4_e2m1fn_x2": lambda: torch.ones(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
    "is a torch.nn.modules.linear.Linear with a tensor that is nowhere else": lambda: (
        torch.nn.Linear(2, 2)
    ),
    "test_from_torch.Custom with a tensor": lambda: Custom(a=[{"b": (torch.ones(2),)}]),
    "test_from_torch.Custom with a tensor that": lambda: Custom(sparse=torch.eye(2).to_sparse()),
    "test_from_torch.MyDict with a tensor": lambda: MyDict(w=torch.ones(2)),
    "test_from_torch.Scaled with a tensor": lambda: scaled(torch.ones(2), scale=0.5),
    "set with a tensor": lambda: {torch.ones(2)},
    "deque with a tensor": lambda: deque([torch.ones(2)]),
    "posix.system with a tensor": lambda: RunsCode(os.system, torch.ones(2)),
    "a key that cannot be stored, as have 1 values of 'odd' with a tensor": lambda: {
        2.5: torch.ones(2)
    },
    "a key that cannot be stored": lambda: {torch.ones(2): 1},
    "'odd.__dict__' has the attributes 'scale' with a tensor": lambda: with_attribute(
        torch.nn.Parameter(torch.ones(2)), scale=[torch.ones(1)]
    ),
    "'odd.__dict__' has the attributes 'scale' with a tensor that": lambda: with_attribute(
        torch.ones(2), scale=torch.ones(1)
    ),
    "a UntypedStorage": lambda: torch.ones(2).untyped_storage(),
    "nested too deep": lambda: deep(300),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("words", UNSTORABLE)
def test_what_cannot_be_stored_is_refused_by_name(tmp_path, words):
    path = saved(tmp_path, {"w": torch.ones(2), "odd": UNSTORABLE[words]()})
    with pytest.raises(FormatError) as refused:
        opened(path)
    assert words.replace("UntypedStorage", "Storage") in str(refused.value)
    assert f"{path}: '" in str(refused.value)


LEFT = {
    "test_from_torch.Custom": lambda: Custom(rate=1e-3, layers=[2, 3]),
    f"a {PATH}": lambda: Path("runs/1"),
    "is tests.convert.test_from_torch.Outer.Inner": lambda: Outer.Inner,
    "is a tests.convert.test_from_torch.Outer.Inner": Outer.Inner,
    "test_from_torch.MyDict": lambda: MyDict(a=1),
    "test_from_torch.MyList": lambda: MyList([1, 2]),
    "test_from_torch.Color": lambda: Color.RED,
    "a collections.deque": lambda: deque([1, 2]),
    "set": lambda: {1, 2},
    "frozenset": lambda: frozenset([1]),
    "bytearray": lambda: bytearray(b"ab"),
    "functools.partial": lambda: functools.partial(torch.nn.functional.relu, inplace=True),
    "a datetime.date": lambda: dt.date(2026, 1, 2),
    "fractions.Fraction": lambda: Fraction(1, 3),
    "print": lambda: print,
    "a class or function": lambda: OrderedDict,
    "is a class or function": lambda: torch.storage.UntypedStorage,
    "a torch.device": lambda: RunsCode(torch.device, "cuda", 2**31 - 1),
    "getattr": lambda: RunsCode(getattr, "a text", "upper"),
    "a posix.system": lambda: RunsCode(os.system, "touch /nothing"),
    "eval": lambda: RunsCode(eval, "1"),
    "a key that cannot be stored": lambda: {2.5: 1},
    "a key that cannot be stored, as have 2 values": lambda: {(1, (2, (3,))): 1, Path("x"): 2},
    "numpy": lambda: np.array(["texts"]),
    "random": lambda: np.random.default_rng(0),
}


@pytest.mark.parametrize("protocol", [2, 4, 5])
@pytest.mark.parametrize("words", LEFT)
def test_an_object_of_another_class_is_left_behind_and_named_and_the_rest_is_read(
    tmp_path, words, protocol
):
    state = {
        "w": torch.ones(2),
        "hyper": argparse.Namespace(odd=LEFT[words](), epochs=3),
        "list": [LEFT[words](), 4],
    }
    foreign = opened(saved(tmp_path, state, pickle_protocol=protocol))
    read = contents(foreign)
    key = "key" in words
    assert described(read) == described(
        without_torch(
            {"w": torch.ones(2), "hyper": read["hyper"], "list": [{} if key else None, 4]}
        )
    )
    assert read["hyper"] == {"odd": {}, "epochs": 3} if key else {"epochs": 3}
    at_odd, at_item = foreign.notes
    assert at_odd.startswith("hyper/odd[" if key else "hyper/odd is left behind: it ")
    assert at_item.startswith("list/0[" if key else "list/0 is left behind: it ")
    assert words in at_odd


def test_an_object_whose_tensors_are_read_elsewhere_too_is_left_behind(tmp_path):
    net = torch.nn.Sequential(torch.nn.LSTM(2, 3), torch.nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(net.parameters())
    sum(p.sum() for p in net.parameters()).backward()
    optimizer.step()
    state = {"state_dict": net.state_dict(), "hyper_parameters": {"net": net, "rate": 0.1}}
    foreign = opened(saved(tmp_path, state))
    expect(
        tmp_path / "state.pt", {"state_dict": net.state_dict(), "hyper_parameters": {"rate": 0.1}}
    )
    assert foreign.notes == (
        "hyper_parameters/net is left behind: it is a torch.nn.modules.container.Sequential.",
    )
    with pytest.raises(
        FormatError,
        match=r"'optimizer' is a torch\.optim\.adamw\.AdamW with a tensor that is nowhere else",
    ):
        opened(saved(tmp_path, {**state, "optimizer": optimizer}))
    net[0].extra = torch.ones(5)
    with pytest.raises(
        FormatError,
        match=r"'hyper_parameters/net' is a .*Sequential with a tensor that is nowhere else",
    ):
        opened(saved(tmp_path, state))


def test_a_state_that_is_itself_an_object_is_refused(tmp_path):
    for state in (Custom(rate=1), torch.nn.Linear(2, 2), {1, 2}):
        with pytest.raises(
            FormatError, match=r"state\.pt: the state is a .*It cannot be stored.*state_dict\(\)"
        ):
            opened(saved(tmp_path, state))


def test_many_objects_make_few_notes(tmp_path):
    foreign = opened(saved(tmp_path, {"w": torch.ones(2), "odd": [Custom() for _ in range(250)]}))
    assert len(foreign.notes) == 101
    assert foreign.notes[-1] == "150 more values are left behind."


def test_objects_of_a_split_models_files_are_named_with_their_file(split):
    name = "pytorch_model-00001-of-00002.bin"
    torch.save({**torch.load(split / name), "b": Path("b")}, split / name)
    with pytest.raises(FormatError, match=r"'b' should be in pytorch_model-00001-of-00002\.bin"):
        opened(split)
    torch.save({"a": torch.ones(3), "b": {"x": torch.zeros(2), "y": Path("b")}}, split / name)
    for _ in range(2):
        assert f"{name}: b/y is left behind: it is a {PATH}." in opened(split).notes
        (split / "pytorch_model.bin.index.json").unlink(missing_ok=True)


def test_an_import_reports_the_objects_that_it_leaves_behind(tmp_path):
    path = saved(
        tmp_path,
        {
            "state_dict": {"w": torch.ones(3)},
            "hyper_parameters": argparse.Namespace(root=Path("x"), epochs=2),
        },
    )
    report = import_checkpoint(path, tmp_path / "imported")
    assert f"hyper_parameters/root is left behind: it is a {PATH}." in report.notes
    assert described(shardckpt.restore(tmp_path / "imported")) == described(
        {"state_dict": {"w": np.ones(3, np.float32)}, "hyper_parameters": {"epochs": 2}}
    )


@pytest.mark.parametrize(
    ("state", "options", "imported"),
    [
        ({"w": 1, "step": 3}, {"include": "step"}, {"step": 3}),
        ({"w": 1, "step": 3}, {"exclude": "w"}, {"step": 3}),
        ({"step": 3, "e": {}}, {"ties": "once"}, {"step": 3, "e": {}}),
    ],
)
def test_an_import_may_choose_values_alone(tmp_path, state, options, imported):
    torch.save({k: torch.ones(2) if k == "w" else v for k, v in state.items()}, tmp_path / "s.pt")
    import_checkpoint(tmp_path / "s.pt", tmp_path / "c", workers=1, **options)
    assert shardckpt.restore(tmp_path / "c") == imported
    with pytest.raises(NamesMismatchError, match=r"include='sub/\*\*' selects none of its . names"):
        import_checkpoint(tmp_path / "s.pt", tmp_path / "d", include="sub/**")


def test_nothing_of_a_pickle_is_run(tmp_path):
    witness = tmp_path / "it ran"
    for i, odd in enumerate(
        [
            RunsCode(os.system, f"touch '{witness}'"),
            RunsCode(subprocess.call, ["touch", str(witness)]),
            RunsCode(exec, f"open({str(witness)!r}, 'w')"),
            RunsCode(getattr, "a text", "upper"),
            RunsCode(torch.load, str(witness)),
        ]
    ):
        path = tmp_path / f"{i}.pt"
        torch.save({"w": torch.ones(2), "odd": odd}, path)
        foreign = open_foreign(parse(str(path)), trust_pickle=True)
        assert described(contents(foreign)) == described({"w": np.ones(2, np.float32)})
        assert foreign.notes[0].startswith("odd is left behind: it is a ")
    assert not witness.exists()


def test_files_of_before_torch_1_6_are_refused_with_what_to_do(tmp_path):
    path = saved(tmp_path, {"w": torch.ones(2)}, _use_new_zipfile_serialization=False)
    assert (
        looks_like(Candidate.at(parse(str(path))))
        == "state.pt, a file of torch.save before torch 1.6"
    )
    with pytest.raises(FormatError, match=r"before 1\.6.*save it again with torch.save"):
        opened(path)


def test_other_files_are_not_taken_for_torchs(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.ones(3))
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "text").write_text("PK")
    shutil.make_archive(str(tmp_path / "archive"), "zip", tmp_path, "text")
    places = [tmp_path, *tmp_path.iterdir(), tmp_path / "nothing"]
    assert [looks_like(Candidate.at(parse(str(place)))) for place in places] == [None] * len(places)
    for place in places:
        with pytest.raises(ShardckptError):
            opened(place)


def test_a_file_that_was_cut_off_anywhere_is_an_error(tmp_path):
    path = saved(tmp_path, {"a": torch.randn(3000), "b": [torch.ones(5), 3]})
    data = path.read_bytes()
    for length in [0, 1, 4, 30, 500, *np.linspace(1000, len(data) - 1, 30).astype(int).tolist()]:
        path.write_bytes(data[:length])
        with pytest.raises((FormatError, CorruptionError)):
            opened(path)


@settings(max_examples=150)
@given(st.data())
def test_a_damaged_file_gives_an_error_of_ours_or_a_state(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "damaged.pt"
    torch.save({"a": torch.arange(40), "b": [torch.ones(5, 2).t(), {"x": 3}]}, path)
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    with suppress(ShardckptError):
        contents(opened(path))


def test_a_flipped_bit_of_a_tensor_is_noticed_where_torch_does_not(tmp_path):
    path = saved(tmp_path, {"w": torch.arange(3000)})
    data = bytearray(path.read_bytes())
    place = data.index(torch.arange(100, 103).numpy().tobytes())
    data[place] ^= 1
    path.write_bytes(data)
    torch.load(path, weights_only=True)
    with pytest.raises(CorruptionError, match=r"'w': .*CRC-32"):
        contents(opened(path))


def test_an_archive_in_which_two_entries_have_one_name_is_refused(tmp_path):
    path = saved(tmp_path, {"w": torch.ones(3)})
    with zipfile.ZipFile(path, "a") as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        archive.writestr(
            next(name for name in archive.namelist() if name.endswith("/data/0")), bytes(12)
        )
    with pytest.raises(FormatError, match="two of its entries have the same name"):
        opened(path)


def test_a_list_of_entries_that_leads_to_another_entry_is_noticed(tmp_path):
    path = saved(tmp_path, {"a": torch.ones(300_000), "b": torch.zeros(300_000)})
    with zipfile.ZipFile(path) as archive:
        first, second = (
            info.header_offset
            for info in archive.infolist()
            if info.filename.endswith(("/data/0", "/data/1"))
        )
    data = bytearray(path.read_bytes())
    at = data.rindex(second.to_bytes(4, "little"))
    data[at : at + 4] = first.to_bytes(4, "little")
    path.write_bytes(data)
    with pytest.raises(FormatError, match=r"no header of '.*/data/1'"):
        contents(opened(path))


def test_a_file_that_is_overwritten_while_it_is_read_is_an_error(tmp_path):
    foreign = opened(saved(tmp_path, {"w": torch.ones(3000)}))
    before = foreign.identity
    saved(tmp_path, {"w": torch.zeros(4000)})
    with pytest.raises(ReplacedError):
        contents(foreign)
    assert opened(tmp_path / "state.pt").identity != before


# --- Hugging Face directories ---------------------------------------------------------------------


@pytest.fixture
def split(tmp_path):
    """Two files and their index."""
    torch.save(
        {"a": torch.ones(3), "b": torch.zeros(2, 2)}, tmp_path / "pytorch_model-00001-of-00002.bin"
    )
    torch.save({"c": torch.arange(5)}, tmp_path / "pytorch_model-00002-of-00002.bin")
    weight_map = {name: f"pytorch_model-0000{1 + (name == 'c')}-of-00002.bin" for name in "acb"}
    (tmp_path / "pytorch_model.bin.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    return tmp_path


def test_split_files_are_one_state(split):
    expected = {"a": torch.ones(3), "c": torch.arange(5), "b": torch.zeros(2, 2)}
    for path in (split, split / "pytorch_model.bin.index.json"):
        expect(path, expected)
    assert (
        looks_like(Candidate.at(parse(str(split))))
        == "pytorch_model.bin.index.json in the directory"
    )
    torch.save({"w": torch.ones(1)}, split / "pytorch_model.bin")
    expect(split, {"w": torch.ones(1)})


@pytest.mark.parametrize(
    ("weight_map", "error", "words"),
    [
        (
            {"a": "pytorch_model-00001-of-00002.bin"},
            FormatError,
            "'b' is in .* index does not know it",
        ),
        (dict.fromkeys("ac", "pytorch_model-00002-of-00002.bin"), FormatError, "'a' should be in"),
        ({"a": "gone.bin"}, MissingDataError, r"gone\.bin is missing"),
        ({"a": "../state.pt"}, FormatError, "not the name of a file in the same directory"),
        ({"a": ""}, FormatError, "not the name of a file in the same directory"),
        (["a"], FormatError, "no weight_map from tensors to files, or an empty one"),
        ({"a": 3}, FormatError, "no weight_map from tensors to files, or an empty one"),
        ({}, FormatError, "no weight_map from tensors to files"),
    ],
)
def test_an_index_that_disagrees_with_its_files_is_refused(split, weight_map, error, words):
    (split / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(error, match=words):
        opened(split)


def test_keys_of_split_files_that_are_not_text_are_refused_by_their_file(split):
    for number in ("00001", "00002"):
        name = split / f"pytorch_model-{number}-of-00002.bin"
        torch.save({**torch.load(name), 5: torch.ones(1)}, name)
    with pytest.raises(FormatError, match=r"'5' is in pytorch_model-00001-of-00002\.bin, but the"):
        opened(split)
    (split / "pytorch_model.bin.index.json").unlink()
    with pytest.raises(FormatError, match=r"00002-of-00002\.bin: '5' is in another file"):
        opened(split)


# --- other places, and imports --------------------------------------------------------------------


def test_a_split_model_of_one_file_is_read_without_an_index(tmp_path):
    torch.save({"a": torch.ones(3)}, tmp_path / "pytorch_model-00001-of-00001.bin")
    expect(tmp_path, {"a": torch.ones(3)})
    assert looks_like(Candidate.at(parse(str(tmp_path)))) is not None


@pytest.mark.parametrize("number", ["00001-of-00000", "00000-of-00001", "00003-of-00002"])
def test_a_file_with_a_number_that_none_of_a_split_model_has_is_refused(tmp_path, number):
    torch.save({"a": torch.ones(3)}, tmp_path / f"pytorch_model-{number}.bin")
    with pytest.raises(FormatError, match=rf"pytorch_model-{number}\.bin cannot be file"):
        opened(tmp_path)


def test_in_a_bucket_ranges_are_read(tmp_path, cloud):
    state = {"a": torch.randn(700, 1000), "t": torch.randn(40, 30).t(), "n": 3}
    store = Store.open(cloud.url("torch"))
    store.write("state.pt", saved(tmp_path, state).read_bytes())
    foreign = open_foreign(parse(cloud.url("torch", "state.pt")))
    assert described(contents(foreign)) == described(without_torch(state))
    assert looks_like(Candidate.at(foreign.location)).startswith("state.pt, a zip archive")


def test_an_import_restores_as_what_was_saved(tmp_path):
    tied = torch.randn(64, 32)
    state = {
        "model": {"embed": tied, "head": tied, "bias": torch.randn(7).bfloat16()},
        "step": 12,
        "t": torch.randn(30, 20).t(),
    }
    report = import_checkpoint(
        saved(tmp_path, state),
        tmp_path / "imported",
        mesh=shardckpt.Mesh((4,), ("x",)),
        rules={"**/embed": shardckpt.PartitionSpec("x")},
    )
    assert report.format == "torch"
    checkpoint = shardckpt.open(tmp_path / "imported")
    assert described(shardckpt.restore(tmp_path / "imported")) == described(without_torch(state))
    assert checkpoint.info("model/embed").layout.parts(2) == (4, 1)


def test_torch_is_not_imported(tmp_path):
    path = saved(tmp_path, {"w": torch.ones(3)})
    code = (
        "import sys; from shardckpt.io.url import parse; from "
        "shardckpt.convert.formats.torch.source import open_foreign;"
        f"print(list(open_foreign(parse({str(path)!r})).structure.tensors), 'torch' in "
        "sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=True
    )
    assert done.stdout == "['w'] False\n"


@pytest.mark.parametrize("elements", [1 << 56, 1 << 61, (1 << 61) - 1, (1 << 63) - 1])
def test_a_small_file_that_claims_exbibytes_is_refused_in_little_memory(tmp_path, elements):
    import_checkpoint(saved(tmp_path, {"w": torch.ones(1)}), tmp_path / "warm")
    path = saved(tmp_path, {"w": torch.ones(1).expand(elements)})
    tracemalloc.start()
    try:
        with pytest.raises(
            FormatError, match=f"a tensor has {elements} elements, made of 1 in the file"
        ):
            import_checkpoint(path, tmp_path / "c", memory_limit="64MiB")
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("large", ["pickle", "list of entries"])
def test_a_file_with_a_long_hole_in_place_of_its_pickle_or_its_list_is_not_read(tmp_path, large):
    path, hole = tmp_path / "hostile.pt", 2 << 30
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("m/data.pkl", b"")
        (info,) = archive.infolist()
        if large == "pickle":
            info.file_size = info.compress_size = hole
            archive.start_dir += hole
    if large == "list of entries":
        data = path.read_bytes()
        with path.open("r+b") as file:
            file.seek(hole)
            ends = struct.pack(
                "<4s4H2LH", b"PK\x05\x06", 0, 0, 1, 1, hole - len(data), len(data), 0
            )
            file.write(ends)
    with at_most(512 << 20), pytest.raises(FormatError, match=f"{1 << 30} are expected"):
        opened(path)
