"""The JAX adapter against JAX itself, on 8 virtual devices, and against torch_xla through a
checkpoint.

Everything is asked of processes of their own: `tests/children/jax_*.py`.
"""

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from importlib.metadata import version
from importlib.util import find_spec
from math import prod

import pytest
from forks import Forked
from paths import CHILDREN

from shardckpt.layout.dtypes import DTYPES, by_name

PAIRS, CROSS = 64, 24 if find_spec("torch_xla") else 0
ORDERED, PERMUTED = list(range(8)), [3, 1, 2, 0, 7, 6, 5, 4]
WIDE = {"int64", "uint64", "float64", "complex128"}
FLOATS_OF_6_BITS = {"float6_e2m3fn", "float6_e3m2fn"}
"""JAX has them since 0.12; they round-trip, and are staged without being counted as copied."""
UNKNOWN = {"complex32", "bcomplex32"} | (
    FLOATS_OF_6_BITS if version("jax").split(".")[:2] < ["0", "12"] else set()
)
PACKED = {"int1", "uint1", "int2", "uint2", "int4", "uint4", "float4_e2m1fn"}
GSPMD = [
    ("{replicated}", [8, 8]),
    ("{devices=[4,2]<=[2,4]T(1,0)}", [8, 8]),
    ("{devices=[4,1,2]<=[8] last_tile_dim_replicate}", [8, 3]),
    ("{devices=[2,2,2]7,6,5,4,3,2,1,0 last_tile_dim_replicate}", [4, 2]),
]


def layouts():
    """Meshes, shapes and specs of every kind, on devices in order and not, and on some of them."""
    for devices in ORDERED, PERMUTED:
        for mesh, shape, spec in (
            ([4, 2], [8, 8], ["x", "y"]),
            ([4, 2], [8, 8], ["y", "x"]),
            ([4, 2], [8, 3], ["x", None]),
            ([4, 2], [3, 8], [None, "x"]),
            ([4, 2], [8, 8], ["y"]),
            ([4, 2], [5, 7], []),
            ([4, 2], [8, 3], [["x", "y"], None]),
            ([4, 2], [3, 16], [None, ["y", "x"]]),
            ([8], [8], ["x"]),
            ([4, 2], [], []),
            ([4, 2], [0], ["x"]),
            ([4, 2], [4, 0], ["x", None]),
            ([2, 2, 2], [4, 6, 2], ["z", "y", "x"]),
            ([2, 2, 2], [4, 6, 5], [["z", "x"], "y"]),
            ([2, 2, 2], [2, 3, 2, 3, 4], [None, None, "y", None, ["x", "z"]]),
            ([1, 8], [16, 3], ["y", "x"]),
            ([2, 2], [4, 6], ["y", "x"]),
            ([3], [6, 2], ["x"]),
            ([1], [6], ["x"]),
        ):
            yield {
                "mesh": mesh,
                "devices": devices[: prod(mesh)],
                "shape": shape,
                "spec": spec,
                "dtype": "float32",
            }


def of_other_shardings():
    for text, shape in GSPMD:
        yield {"text": text, "devices": PERMUTED, "shape": shape, "dtype": "float32"}
    for device in 0, 5:
        yield {"device": device, "shape": [3, 4], "dtype": "float32"}


def of_every_dtype():
    for dtype in sorted(set(DTYPES) - WIDE - UNKNOWN - FLOATS_OF_6_BITS):
        for shape, spec in (([8, 6], ["x", "y"]), ([8, 7], ["y", None]), ([3, 5], []), ([], [])):
            yield {
                "mesh": [4, 2],
                "devices": PERMUTED,
                "shape": shape,
                "spec": spec,
                "dtype": dtype,
            }


CASES = {
    "round_trip": [*layouts(), *of_other_shardings(), *of_every_dtype()],
    "ordered": [
        {
            "mesh": [8],
            "devices": PERMUTED,
            "shape": [8, 6, 5],
            "spec": ["x"],
            "dtype": dtype,
            "order": order,
        }
        for dtype in ("float32", "bfloat16")
        for order in ([0, 1, 2], [2, 0, 1])
    ],
    "targets": [*layouts(), *of_other_shardings()],
    "layouts": [
        {
            "mesh": [4, 2],
            "devices": PERMUTED,
            "shape": [8, 8, 8],
            "spec": [["x", "y"], None],
            "dtype": "float32",
        },
        {"mesh": [4, 2], "devices": ORDERED, "shape": [8], "spec": [], "dtype": "float32"},
        {"text": "{devices=[4,2]<=[8]}", "devices": PERMUTED, "shape": [8, 8], "dtype": "float32"},
        {"device": 5, "shape": [3], "dtype": "float32"},
    ],
    "op_shardings": [
        {
            "devices": ORDERED,
            "shape": [8, 8],
            "texts": [text for text, shape in GSPMD if shape not in ([4, 2], [8, 3])]
            + [
                "{devices=[4,1,2]<=[8] last_tile_dim_replicate}",
                "{devices=[1,2,4]<=[4,2]T(1,0) last_tile_dim_replicate}",
                "{devices=[8,1]<=[8]}",
            ],
        },
        {
            "devices": [1, 3, 4, 5, 6, 7],
            "shape": [6, 6],
            "texts": ["{devices=[2,3]<=[6]}", "{devices=[2,3]<=[3,2]T(1,0)}", "{replicated}"],
        },
    ],
    "memory_of_boxes": [
        {"mesh": [8], "devices": PERMUTED, "spec": ["x"], "wanted": [6, 1]},
        {"mesh": [8], "devices": PERMUTED, "spec": ["x"], "wanted": [*range(8)]},
        {"mesh": [8], "devices": PERMUTED, "spec": ["x"], "wanted": []},
        {"mesh": [2, 4], "devices": PERMUTED, "spec": ["x"], "wanted": [1]},
    ],
    "named_owners": [
        {
            "mesh": [4, 2],
            "devices": ORDERED,
            "shape": [8, 8],
            "spec": spec,
            "dtype": "float32",
            "owners": owners,
        }
        for owners in ({d: d // 4 for d in ORDERED}, {d: d % 2 for d in ORDERED})
        for spec in (["x"], ["y"], [])
    ],
    "dtypes": [{"dtype": dtype, "x64": x64} for dtype in DTYPES for x64 in (False, True)],
    **{
        key: [None]
        for key in (
            *(
                "control",
                "uncommitted",
                "adoption",
                "memory_kinds",
                "x64",
                "identities",
                "guarded",
                "pmapped",
            ),
            *("together", "amid_another", "refusals"),
        )
    },
}


def environment(devices=8):
    # The children are allowed to use fewer threads than there are devices: others work on the
    # machine too.
    return {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
    }


@pytest.fixture(scope="module")
def answers():
    child = subprocess.run(
        [sys.executable, CHILDREN / "jax_adapter.py"],
        input=json.dumps(CASES),
        capture_output=True,
        text=True,
        env=environment(),
        timeout=250,
    )
    assert child.returncode == 0, child.stderr[-4000:]
    return json.loads(child.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def round_trips(answers):
    return list(zip(CASES["round_trip"], answers["round_trip"], strict=True))


# --- Saving ---------------------------------------------------------------------------------------


@pytest.mark.long
def test_fetched_boxes_are_the_array_bit_by_bit_each_element_once(round_trips):
    assert len(round_trips) >= 130
    for case, answer in round_trips:
        assert answer["fetched"], case
        assert answer["covered once"], case


def test_one_of_several_replicas_is_fetched(round_trips):
    for case, answer in round_trips:
        ours, jaxs = answer["boxes"]
        assert ours == jaxs, case


def test_fetching_on_cpu_copies_packed_elements_only_and_says_so(round_trips):
    for case, answer in round_trips:
        expected = prod(case["shape"]) if case["dtype"] in PACKED else 0
        assert (answer["copied"], answer["staged"]) == (expected, expected), case


def test_jax_is_asked_for_no_array_where_python_can_look_at_the_memory(round_trips):
    for case, answer in round_trips:
        assert answer["made by jax"] == (
            0 if by_name(case["dtype"]).numpy.isbuiltin == 1 else answer["boxes"][0]
        ), case


def test_the_order_in_which_jax_holds_elements_does_not_matter(answers):
    assert answers["ordered"] == [True] * 4


def test_only_wanted_boxes_are_copied_to_the_host(answers):
    for case, answer in zip(CASES["memory_of_boxes"], answers["memory_of_boxes"], strict=True):
        assert answer["boxes"] == case["mesh"][0], case
        assert answer["bits"] == [True] * len(case["wanted"]), case
        assert (0 <= answer["taken"] < 1.1) if case["wanted"] else answer["taken"] < 1 << 16, case


def test_a_box_is_held_by_those_whose_devices_have_it_and_an_array_that_may_move_by_nobody(
    answers,
):
    halves, alternating = answers["named_owners"][:3], answers["named_owners"][3:]
    assert [answer["holders"] for answer in halves] == [
        [[0], [0], [1], [1]],
        [[0, 1]] * 2,
        [[0, 1]],
    ]
    assert [answer["holders"] for answer in alternating] == [[[0, 1]] * 4, [[0], [1]], [[0, 1]]]
    assert {answer["uncommitted"] for answer in answers["named_owners"]} == {None}


def test_a_device_that_belongs_to_nobody_is_refused_by_name(answers):
    kind, message = answers["named_owners"][0]["stranger"]
    assert kind == "ShardingError"
    assert message.startswith("'w': device 1 belongs to no process of this job")


def test_what_pmap_returns_is_an_array_like_any_other(answers):
    assert answers["pmapped"] == [{"boxes": 8, "bits": True, "devices": True, "compiles": 0}]


def test_several_threads_fetch_one_array_of_which_jax_has_not_listed_the_shards(answers):
    assert answers["together"] == [[]]


def test_a_signal_handler_saves_while_jax_lists_the_shards_of_an_array(answers):
    assert answers["amid_another"] == [["signal", "handler", "outer"]]


def test_no_copy_stays_with_the_array_when_it_was_fetched(round_trips):
    assert {answer["kept on the host"] for _, answer in round_trips} == {0}


def test_the_layout_has_the_axes_names_or_else_the_op_sharding_over_device_ids(answers):
    assert answers["layouts"] == [
        (
            "Sharding(mesh=Mesh((4, 2), ('x', 'y'), [3, 1, 2, 0, 7, 6, 5, 4]), "
            "spec=PartitionSpec(('x', 'y'), None))"
        ),
        "Sharding(mesh=Mesh((4, 2), ('x', 'y')), spec=PartitionSpec())",
        "{devices=[4,2]3,1,2,0,7,6,5,4}",
        answers["layouts"][3],
    ]
    assert "MAXIMAL" in answers["layouts"][3]


# --- Restoring ------------------------------------------------------------------------------------


def test_a_restored_array_holds_on_every_device_what_the_original_holds(round_trips):
    for case, answer in round_trips:
        assert answer["devices"], case
        assert answer["sharding"], case
        assert (answer["dtype"], answer["shape"]) == (case["dtype"], case["shape"]), case


def test_neither_fetching_nor_placing_compiles_anything(answers, round_trips):
    assert answers["control"][0] > 0
    assert {answer["compiles"] for _, answer in round_trips} == {0}


def test_targets_of_all_vocabularies_make_the_array_that_device_put_makes(answers):
    for case, answer in zip(CASES["targets"], answers["targets"], strict=True):
        assert answer == {way: True for way in answer if way != "compiles"} | {"compiles": 0}, case
        assert set(answer) >= {"jax", "layout", "struct"}
    assert (
        sum("op_sharding" in answer and "tiled" in answer for answer in answers["targets"])
        == 2 * 19
    )


def test_an_array_that_jax_may_move_stays_so(answers):
    (answer,) = answers["uncommitted"]
    assert answer == {
        "layout": "None",
        "boxes": 1,
        "committed": [False, False, True],
        "devices": [[5], [0]],
        "elements": [[[7] * 3] * 2] * 2,
        "together": 8,
        "compiles": 0,
    }


def test_arrays_restored_by_op_shardings_are_arguments_of_one_program(answers):
    for case, answer in zip(CASES["op_shardings"], answers["op_shardings"], strict=True):
        assert answer["sum"] == len(case["texts"]) * prod(case["shape"]), case
        assert all(answer["orders"]), case


def test_a_restored_array_is_the_memory_that_was_read_into_and_can_be_donated(answers):
    assert answers["adoption"] == [[[True] * 4] * 3]


def test_arrays_come_back_in_the_kind_of_memory_that_their_sharding_says(answers):
    (answer,) = answers["memory_kinds"]
    assert answer == {
        kind: {"kinds": [kind], "bits": True} for kind in ("device", "pinned_host", "unpinned_host")
    }


def test_elements_of_64_bits_are_never_made_smaller_in_silence(answers):
    for case, answer in zip(CASES["dtypes"], answers["dtypes"], strict=True):
        if case["dtype"] in UNKNOWN:
            assert answer[0] == "DtypeError", case
            assert f"'w': JAX has no arrays of {case['dtype']}" in answer[1], case
        elif case["dtype"] in WIDE and not case["x64"]:
            assert answer[0] == "DtypeError", case
            assert f"would convert {case['dtype']} to " in answer[1], case
        else:
            assert answer is None, case


def test_an_array_of_64_bits_is_saved_with_x64_on_or_off(answers):
    (answer,) = answers["x64"]
    elements = ["int64", [0, 1 << 40, 2 << 40]]
    assert answer["refused"][0] == "DtypeError"
    assert (answer["fetched"], answer["restored"]) == (elements, elements)


# --- Leaves ---------------------------------------------------------------------------------------


def test_identity_is_being_the_same_array(answers):
    (answer,) = answers["identities"]
    assert answer["itself"]
    assert not answer["equal elements"]
    assert answer["struct"] is None


def test_one_leaf_named_twice_is_one_array_and_two_leaves_are_two(answers):
    assert answers["identities"][0]["ties"] == [True, False, True]


def test_arrays_structs_and_keys_are_tensors_and_nothing_else_is(answers):
    assert answers["identities"][0]["is_tensor"] == [True, True, True, True, False, False]


def test_a_transfer_guard_finds_nothing_to_object_to(answers):
    assert answers["guarded"] == [True]


@pytest.mark.parametrize(
    ("question", "kind", "words"),
    [
        ("deleted", "LeafError", "deleted or donated"),
        ("donated", "LeafError", "deleted or donated"),
        ("traced", "LeafError", "is being traced"),
        ("traced like", "LeafError", "is being traced"),
        ("struct saved", "LeafError", "no data to save"),
        ("kind", "ShardingError", "a Sorted has no XLA form"),
        ("unconstrained", "ShardingError", "leaves a dimension to the compiler"),
        ("unreduced", "ShardingError", "partial sums"),
        ("abstract", "ShardingError", "names no devices"),
        ("uneven", "ShardingError", "cuts dimension 0 of shape (10, 2) into 4 parts"),
        ("uneven ours", "ShardingError", "cuts dimension 0 of shape (10, 2) into 8 parts"),
        ("rank", "ShardingError", "3 entries and the tensor 2 dimensions"),
        ("rank ours", "ShardingError", "3 entries and the tensor 2 dimensions"),
        ("rank hlo", "ShardingError", "cuts tensors of 1 dimensions and this one has 2"),
        ("strangers", "ShardingError", "has device 100 and this JAX job has 8 devices, 0…7"),
        ("maximal", "ShardingError", "has device 8 and this JAX job has 8 devices, 0…7"),
        ("manual", "ShardingError", "manual"),
    ],
)
def test_what_cannot_be_is_refused_by_name_before_anything_is_read(answers, question, kind, words):
    error = answers["refusals"][0][question]
    assert error[0] == kind
    assert error[1].startswith("'w': ")
    assert words in error[1]


def test_a_donated_array_still_says_where_to_restore_to(answers):
    assert answers["refusals"][0]["deleted like"] is None


def test_replicated_without_devices_is_on_all_of_them(answers):
    assert answers["refusals"][0]["everywhere"] is None


@pytest.mark.long
def test_torch_is_never_imported(answers, together):
    assert answers["torch"] == together[0]["torch"] == []


@pytest.mark.long
@pytest.mark.xla
def test_a_state_of_torch_xla_tensors_does_not_make_jax_look_for_devices(together):
    assert not together[1]["jax is awake"]


# --- Through storage ------------------------------------------------------------------------------


def started(script, *arguments, **environment_variables):
    return Forked(
        [sys.executable, CHILDREN / script, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, **environment_variables},
    )


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    """JAX and torch_xla restore each other's checkpoints. Without torch_xla, JAX is alone."""
    root = tmp_path_factory.mktemp("jax")
    partner = started("jax_xla_partner.py", root, CROSS) if CROSS else None
    with (
        partner or nullcontext(),
        started("jax_end_to_end.py", root, PAIRS, CROSS, **environment()) as jax,
    ):
        assert partner is None or partner.stdout.readline() == "saved\n"
        jax_seen, _ = jax.communicate("go on\n", timeout=250)
        partner_seen, _ = (
            ("{}", None) if partner is None else partner.communicate("go on\n", timeout=250)
        )
    assert jax.returncode == 0
    assert partner is None or partner.returncode == 0
    return json.loads(jax_seen.splitlines()[-1]), json.loads(partner_seen.splitlines()[-1])


def test_any_mesh_and_spec_restores_onto_any_other_and_as_numpy_bit_by_bit(together):
    pairs = together[0]["pairs"]
    assert (pairs["pairs"], pairs["wrong"], pairs["compiles"]) == (PAIRS, [], 0)


def test_training_goes_on_without_compiling_its_step_again(together):
    training = together[0]["training"]
    assert (training["restoring"], training["going on"]) == (0, 0)
    assert training["same"]


def test_training_goes_on_on_another_mesh_from_shapes_and_dtypes_alone(together):
    training = together[0]["training"]
    assert training["close"]
    assert training["layouts"] == {
        "w": "Sharding(mesh=Mesh((4, 2), ('x', 'y')), spec=PartitionSpec('x', 'y'))",
        "count": "Sharding(mesh=Mesh((4, 2), ('x', 'y')), spec=PartitionSpec())",
    }


@pytest.mark.xla
def test_what_torch_xla_saved_restores_in_jax_bit_by_bit_and_the_other_way_round(together):
    jax, partner = together
    assert jax["for torch_xla"] == CROSS
    assert jax["wrong from torch_xla"] == partner["wrong from jax"] == []
