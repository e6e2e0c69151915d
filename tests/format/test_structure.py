"""Structure of a checkpoint, without its bytes: read back unchanged, refused if invalid, and merged
for all processes."""

import json
from dataclasses import replace

import pytest

from shardckpt import Mesh, OpSharding, PartitionSpec, Sharding
from shardckpt.errors import CommitError, FormatError
from shardckpt.format.bases import Base, InBase
from shardckpt.format.merging import merge_structures
from shardckpt.format.structure import Structure, TensorRecord
from shardckpt.layout import dtypes
from shardckpt.layout.placements import Placements
from shardckpt.plan.pieces import Piece
from shardckpt.state.names import array_path, piece_path


def tensor(name, shape, layout=None, *, pieces=None, dtype="float32", partial=False):
    whole = (Piece(array_path(name), (0,) * len(shape), shape, tuple(max(1, n) for n in shape)),)
    return TensorRecord(
        name, shape, dtypes.by_name(dtype), layout, whole if pieces is None else pieces, partial
    )


def rows(name, shape, *spans):
    """Pieces that hold some rows each."""
    return tuple(
        Piece(
            piece_path(name, shape, (a, *(0,) * (len(shape) - 1))),
            (a, *(0,) * (len(shape) - 1)),
            (b - a, *shape[1:]),
            (1,) * len(shape),
        )
        for a, b in spans
    )


def of(*tensors, **leaves):
    return Structure(
        {**{t.name: "$tensor" for t in tensors}, **leaves}, {t.name: t for t in tensors}
    )


MESH = Mesh((4, 2), ("data", "model"), [3, 1, 2, 0, 7, 5, 6, 4])
STRUCTURE = of(
    tensor("sharded", (8, 4), Sharding(MESH, PartitionSpec("data", "model"))),
    tensor("strided", (16, 4), Placements.of(MESH, ["_S(0,2)", "S(0)"])),
    tensor("held by ranks", (16, 4), Placements.of(Mesh((2,), None), ["R"])),
    tensor(
        "nameless",
        (8,),
        OpSharding.parse("{devices=[2,4]<=[8] last_tile_dim_replicate}"),
        dtype="bfloat16",
    ),
    tensor("replicated", (8,), OpSharding.replicated(8)),
    tensor("scalar", (), dtype="uint4"),
    tensor("in pieces", (7,), pieces=rows("in pieces", (7,), (0, 4), (4, 7))),
    tensor("one row", (7, 2), pieces=rows("one row", (7, 2), (3, 4)), partial=True),
    tensor("nothing here", (7, 2), pieces=(), partial=True),
    step=3,
)
WHOLE = of(*(t for t in STRUCTURE.tensors.values() if not t.partial))


def reread(structure, **options):
    return Structure.from_json(json.loads(json.dumps(structure.to_json())), "here", **options)


def test_it_comes_back_as_it_was():
    assert reread(STRUCTURE, allow_partial=True) == STRUCTURE
    assert reread(WHOLE) == WHOLE


def test_equal_meshes_and_shardings_are_written_once():
    layouts = [Sharding(MESH, PartitionSpec("data")), Placements.of(MESH, ["S(0)", "R"])] * 3
    doc = of(*(tensor(str(i), (8,), layout) for i, layout in enumerate(layouts))).to_json()
    assert len(doc["meshes"]) == 1
    assert len(doc["shardings"]) == 2
    assert [t["sharding"] for t in doc["tensors"].values()] == [0, 1] * 3


def test_members_that_a_newer_minor_version_adds_are_ignored():
    doc = STRUCTURE.to_json()
    for list_of in ("meshes", "shardings"):
        doc[list_of] = [{**entry, "new": 1} for entry in doc[list_of]]
    doc["tensors"] = {name: {**entry, "new": 1} for name, entry in doc["tensors"].items()}
    assert Structure.from_json({**doc, "new": 1}, "here", allow_partial=True) == STRUCTURE


def test_what_one_process_shows_is_no_whole_tensor():
    with pytest.raises(FormatError, match="here: tensor 'one row': it has only some of its pieces"):
        reread(STRUCTURE)


# --- lies -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"shape": [-1, 4]}, "'shape'"),
        ({"shape": [1 << 40, 1 << 40]}, "more elements than can be addressed"),
        ({"shape": [True, 4]}, "'shape'"),
        ({"shape": [1] * 40}, "'shape'"),
        ({"chunks": [0, 4]}, "'chunks'"),
        ({"chunks": [4]}, "differ in rank"),
        ({"chunks": [1 << 61, 1]}, "more bytes than can be addressed"),
        ({"dtype": "object"}, "object"),
        ({"sharding": 99}, "entry 99"),
        ({"pieces": []}, "hold 0 elements of 32"),
        (
            {"pieces": [{"start": [0, 0], "shape": [8, 4], "chunks": [8, 4]}] * 2},
            "two of its pieces start at the same element",
        ),
        (
            {"pieces": [{"start": [i, 0], "shape": [8, 4], "chunks": [8, 4]} for i in (0, 1)]},
            "lies outside the shape",
        ),
        (
            {"pieces": [{"start": [i, 0], "shape": [4, 4], "chunks": [8, 4]} for i in (0, 3)]},
            "hold the same elements",
        ),
        ({"pieces": [{"start": [0], "shape": [8], "chunks": [8]}]}, "another rank"),
        ({"pieces": [{"start": [0, 0], "shape": [8, 4]}]}, "'chunks' is missing"),
        (
            {"pieces": [{"start": [0, 0], "shape": [4, 4], "chunks": [4, 4]}], "partial": True},
            "only some of its pieces",
        ),
        (
            {"pieces": [{"start": [0, 0], "shape": [4, 4], "chunks": [4, 4]}], "partial": "yes"},
            "hold 16 elements of 32",
        ),
    ],
)
def test_a_tensor_that_cannot_be_is_refused_by_name(change, why):
    doc = WHOLE.to_json()
    doc["tensors"] = {**doc["tensors"], "sharded": {**doc["tensors"]["sharded"], **change}}
    with pytest.raises(FormatError, match=why) as raised:
        Structure.from_json(doc, "here")
    assert "sharded" in str(raised.value)


@pytest.mark.parametrize(
    "layout",
    [
        {"mesh": 0, "placements": ["S(0)"], "op_sharding": ""},
        {"mesh": 7, "placements": ["S(0)", "R"]},
        {"mesh": 0, "placements": ["S(0)", "S(99)"]},
        {"mesh": 0, "placements": ["S(0)", "P"]},
        {"mesh": 0, "placements": ["_S(0,3)", "S(0)"]},
        {"mesh": 0, "placements": "RR"},
        {"mesh": 0, "spec": ["data", "data"]},
        {"mesh": 0, "spec": ["no such axis"]},
        {"mesh": 0},
        {"op_sharding": "{devices=[2]0,0}"},
        {"op_sharding": None},
        {},
        [],
    ],
    ids=str,
)
def test_a_layout_that_cannot_be_is_refused(layout):
    doc = WHOLE.to_json()
    doc["shardings"] = [layout, *doc["shardings"][1:]]
    with pytest.raises(FormatError, match="here"):
        Structure.from_json(doc, "here")


def test_a_layout_that_does_not_fit_its_tensor_is_refused_by_name():
    doc = of(tensor("w", (8, 4), Placements.of(MESH, ["R", "S(1)"]))).to_json()
    doc["tensors"]["w"] |= {"shape": [8], "chunks": [8]}
    with pytest.raises(FormatError, match="here: tensor 'w'"):
        Structure.from_json(doc, "here")


# --- several processes ----------------------------------------------------------------------------


def test_processes_that_say_the_same_say_what_each_says():
    assert merge_structures([(range(1000), WHOLE)]) is WHOLE


def test_the_union_has_every_tensor_of_any_process_in_the_order_of_its_tree():
    a, b, c = (tensor(name, (4,)) for name in "abc")
    union = merge_structures([([0, 2], of(a, c, step=1)), ([1], of(b, c, step=1))])
    assert union.tree == {"a": "$tensor", "c": "$tensor", "step": 1, "b": "$tensor"}
    assert list(union.tensors.items()) == [("a", a), ("c", c), ("b", b)]


def test_pieces_of_several_processes_make_a_tensor_in_one_order():
    parts = [
        ([0], of(tensor("w", (6, 2), pieces=rows("w", (6, 2), (4, 6), (0, 1)), partial=True))),
        ([1, 2], of(tensor("w", (6, 2), pieces=rows("w", (6, 2), (1, 4)), partial=True))),
        ([3], of(tensor("w", (6, 2), pieces=rows("w", (6, 2), (4, 6)), partial=True))),  # a replica
    ]
    assert merge_structures(parts) == of(
        tensor("w", (6, 2), pieces=rows("w", (6, 2), (0, 1), (1, 4), (4, 6)))
    )


@pytest.mark.parametrize(
    ("spans", "why"),
    [([(0, 1), (1, 5)], "hold 10 elements of 12"), ([(0, 4), (3, 5)], "hold the same elements")],
)
def test_pieces_of_several_processes_that_do_not_make_the_tensor_are_refused_by_name(spans, why):
    parts = [
        ([p], of(tensor("w", (6, 2), pieces=rows("w", (6, 2), span), partial=True)))
        for p, span in enumerate(spans)
    ]
    with pytest.raises(
        CommitError,
        match=f"'w': the processes' shards do not form the tensor of shape .6, 2.: .*{why}",
    ):
        merge_structures(parts)


def test_one_process_that_shows_only_some_pieces_makes_no_tensor():
    with pytest.raises(
        CommitError, match="'one row': the processes' shards do not form the tensor"
    ):
        merge_structures([([0], STRUCTURE)])


@pytest.mark.parametrize(
    ("other", "what"),
    [
        (tensor("w", (4, 9)), "shape"),
        (tensor("w", (4, 8), dtype="int32"), "dtype"),
        (tensor("w", (4, 8), Placements.of(MESH, ["R", "S(1)"])), "layout"),
        (tensor("w", (4, 8), pieces=rows("w", (4, 8), (0, 2), (2, 4))), "chunks"),
        (tensor("w", (4, 8), pieces=rows("w", (4, 8), (0, 2)), partial=True), "chunks"),
    ],
    ids=["shape", "dtype", "layout", "chunks", "partial"],
)
def test_processes_that_know_one_tensor_differently_are_named(other, what):
    with pytest.raises(
        CommitError,
        match=f"'w': its {what} is .* on process 3 and .* on process 5; give tensors that differ "
        "names of their own",
    ):
        merge_structures([([3, 4], of(tensor("w", (4, 8)))), ([5], of(other))])


def test_a_process_without_pieces_of_a_tensor_must_know_it_as_the_others_do():
    nothing = tensor("w", (4, 8), pieces=(), partial=True)
    piece = tensor("w", (4, 8), pieces=rows("w", (4, 8), (0, 4)), partial=True)
    assert merge_structures([([0], of(nothing)), ([1], of(piece))]).tensors["w"].shape == (4, 8)
    for odd, what in (
        (replace(nothing, shape=(4, 9)), "shape"),
        (replace(nothing, dtype=dtypes.by_name("int8")), "dtype"),
        (replace(nothing, layout=Sharding(MESH, PartitionSpec("data"))), "layout"),
    ):
        for parts in ([([0], of(odd)), ([1], of(piece))], [([0], of(piece)), ([1], of(odd))]):
            with pytest.raises(CommitError, match=f"'w': its {what} is .* on process 0"):
                merge_structures(parts)


def in_base(attempt, url, name="w"):
    return of(replace(tensor("w", (6, 2)), base=InBase(Base(attempt, "packed", None, url), name)))


def test_tensors_in_bases_come_back_and_each_base_is_written_once():
    bases = [
        InBase(Base("a", "packed", None, "../0"), "x"),
        InBase(Base("b", "zarr", "zstd", "file:///r/0"), "2"),
    ] * 2
    structure = of(*(replace(tensor(str(i), (8,)), base=base) for i, base in enumerate(bases)))
    assert reread(structure) == structure
    assert [base.url for base in reread(structure).bases] == ["../0", "file:///r/0"]


def test_processes_may_reach_one_base_by_different_urls_but_not_find_different_attempts_there():
    one, other = in_base("a", "file:///mnt/0"), in_base("a", "file:///data/0")
    assert merge_structures([([0], one), ([1], other)]).bases[0].url == "file:///mnt/0"
    for another in (
        in_base("b", "file:///mnt/0"),
        in_base("a", "file:///mnt/0", "v"),
        of(tensor("w", (6, 2))),
    ):
        with pytest.raises(
            CommitError,
            match=r"'w': its base is attempt a, 'w' on process 0 and .*; save with the same base= "
            r"and skip=",
        ):
            merge_structures([([0], one), ([1], another)])


@pytest.mark.parametrize("odd", [1.0, True, "1"])
def test_a_tensor_that_is_written_like_the_one_before_it_but_for_a_type_is_refused(odd):
    alike = {name: {"shape": [1, 4], "dtype": "float32", "chunks": [1, 4]} for name in ("a", "b")}
    doc = {"shardings": [], "meshes": [], "tensors": alike, "tree": dict.fromkeys(alike, "$tensor")}
    assert [t.pieces[0].path for t in Structure.from_json(doc, "here").tensors.values()] == [
        "a",
        "b",
    ]
    alike["b"]["shape"] = [odd, 4]
    with pytest.raises(FormatError, match="'b'"):
        Structure.from_json(doc, "here")
