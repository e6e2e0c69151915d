"""The torch_xla adapter against torch_xla itself, on 8 virtual devices.

One process does everything that is asked: `tests/children/xla_adapter.py`.
"""

import json
import os
import sys
from math import ceil, prod

import forks
import pytest
from paths import CHILDREN

pytestmark = pytest.mark.xla

ORDERED, PERMUTED = list(range(8)), [3, 1, 2, 0, 7, 6, 5, 4]
TILED = {
    "mesh": [4, 2],
    "devices": ORDERED,
    "shape": [512, 512],
    "spec": ["x", "y"],
    "dtype": "float32",
}
PARTIAL = TILED | {"spec": ["y", None]}
REPLICATED = TILED | {"spec": [None, None]}
MEMORY = [case | {"shape": [8192, 1024]} for case in (TILED, PARTIAL, REPLICATED)]
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
        "float32",
        "float64",
    ),
    *("complex64", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
)


def layouts():
    """Mesh, shape and spec of every kind, on devices in order and not."""
    for devices in ORDERED, PERMUTED:
        for mesh, shape, spec in (
            ([4, 2], [8, 8], ["x", "y"]),
            ([4, 2], [8, 8], ["y", "x"]),
            ([4, 2], [8, 8], ["x", None]),
            ([4, 2], [8, 8], [None, "x"]),
            ([4, 2], [8, 8], ["y", None]),
            ([4, 2], [8, 8], [None, None]),
            ([4, 2], [8, 8], [["x", "y"], None]),
            ([4, 2], [8, 8], [["y", "x"], None]),
            ([4, 2], [10, 7], ["x", "y"]),
            ([4, 2], [10, 7], ["y", "x"]),
            ([4, 2], [10, 7], ["x", None]),
            ([4, 2], [10, 3], [None, "x"]),
            ([4, 2], [10], [["x", "y"]]),
            ([8], [3], ["x"]),  # five devices hold padding only
            ([8], [9], ["x"]),
            ([8], [1], ["x"]),
            ([4, 2], [], []),
            ([4, 2], [5], [None]),
            ([4, 2], [0], ["x"]),
            ([4, 2], [0, 4], [None, None]),
            ([4, 2], [4, 0], [None, None]),
            ([2, 2, 2], [4, 6, 5], ["z", "y", "x"]),
            ([2, 2, 2], [4, 6, 5], [["z", "x"], None, "y"]),
            ([2, 2, 2], [5, 3, 2, 7], [None, "y", None, "x"]),
            ([2, 2, 2], [2, 3, 2, 3, 4], [None, "y", None, None, ["x", "z"]]),
            ([1, 8], [16, 3], ["y", "x"]),
        ):
            yield {
                "mesh": mesh,
                "devices": devices,
                "shape": shape,
                "spec": spec,
                "dtype": "float32",
            }


def of_every_dtype():
    for dtype in DTYPES:
        for shape, spec in (
            ([10, 7], ["x", "y"]),
            ([10, 7], ["y", None]),
            ([3, 5], [None, None]),
            ([], []),
        ):
            yield {
                "mesh": [4, 2],
                "devices": PERMUTED,
                "shape": shape,
                "spec": spec,
                "dtype": dtype,
            }


CASES = {
    "round_trip": [*layouts(), *of_every_dtype()],
    "targets": [c for c in layouts() if c["shape"] != [0]],
    "names": [TILED | {"devices": PERMUTED}, PARTIAL, REPLICATED],
    "pending": [None],
    "private": [
        *(
            case | {"private": True}
            for case in (TILED, PARTIAL, TILED | {"dtype": "bfloat16"}, TILED | {"dtype": "int32"})
        ),
        TILED | {"shape": [10, 7], "private": False},
        REPLICATED | {"private": False},
    ],
    "unmarked": [None],
    "identities": [None],
    "training": [None],
    "memory": MEMORY,
    "batched": [case | {"shape": [10, 7]} for case in (TILED, PARTIAL, REPLICATED)],
    "refusals": [None],
}


def ask(script, cases, devices=8):
    env = {**os.environ, "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(devices)}
    command = [sys.executable, CHILDREN / script]
    child = forks.run(
        command, input=json.dumps(cases), capture_output=True, text=True, env=env, timeout=280
    )
    assert child.returncode == 0, child.stderr[-4000:]
    return json.loads(child.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def answers():
    return ask("xla_adapter.py", CASES)


@pytest.fixture(scope="module")
def round_trips(answers):
    return list(zip(CASES["round_trip"], answers["round_trip"], strict=True))


def parts(case):
    sizes = dict(zip("xyz", case["mesh"], strict=False))
    return [
        prod(sizes[axis] for axis in (part if isinstance(part, list) else [part] if part else []))
        for part in case["spec"]
    ]


def test_fetched_boxes_are_the_tensor_bit_by_bit_each_element_once(round_trips):
    assert len(round_trips) >= 110
    for case, answer in round_trips:
        assert answer["fetched"], case
        assert answer["covered once"], case


def test_only_distinct_boxes_that_are_not_empty_are_fetched(round_trips):
    for case, answer in round_trips:
        tiles = [
            ceil(dim / ceil(dim / part)) if dim else 0
            for dim, part in zip(case["shape"], parts(case), strict=True)
        ]
        assert answer["boxes"] == prod(tiles), case


def test_a_restored_tensor_holds_on_every_device_what_the_original_holds_padding_included(
    round_trips,
):
    for case, answer in round_trips:
        assert answer["restored"], case
        assert answer["restored text"] == answer["text"], case
        assert answer["shape"] == case["shape"], case
        assert answer["dtype"] == [f"torch.{case['dtype']}"] * 2, case


def test_a_restored_tensor_is_plain_and_asks_for_no_gradient(round_trips):
    assert {(answer["type"], answer["requires_grad"]) for _, answer in round_trips} == {
        ("Tensor", False)
    }


def test_neither_fetching_nor_placing_compiles_anything(round_trips):
    assert {answer["compiles"] for _, answer in round_trips} == {0}


def test_tiled_and_replicated_tensors_leave_the_devices_once(round_trips):
    for case, answer in round_trips:
        replicas = prod(case["mesh"]) // prod(parts(case))
        if replicas == 1 or prod(parts(case)) == 1:
            padded = prod(
                part * ceil(dim / part)
                for dim, part in zip(case["shape"], parts(case), strict=True)
            )
            assert answer["read"] == padded * answer["itemsize"], case


def test_replicas_of_a_partially_replicated_tensor_are_read_and_dropped(round_trips):
    # torch_xla 2.9 reads one shard by itself only after running a program; see the adapter's
    # docstring.
    for case, answer in round_trips:
        if 1 < prod(parts(case)) < 8:
            tile = prod(
                ceil(dim / part) for dim, part in zip(case["shape"], parts(case), strict=True)
            )
            assert answer["read"] == 8 * tile * answer["itemsize"], case
            assert answer["boxes"] <= prod(parts(case)), case


def test_the_bytes_that_a_source_says_it_stages_are_what_fetching_it_takes(answers):
    for case, answer in zip(MEMORY, answers["memory"], strict=True):
        # The allocator may have some of it at hand already.
        assert 0.7 * answer["said"] <= answer["peak"] <= 1.05 * answer["said"], case
    tiled, partial, replicated = (answer["said"] for answer in answers["memory"])
    assert tiled == replicated == partial / 4


def test_arrays_fetched_from_a_sharded_tensor_share_no_memory_and_do_not_change(answers):
    """A save in the background keeps it while the tensor is trained on."""
    for answer in answers["private"]:
        assert answer["said"] == answer["private"], answer
        if answer["said"]:
            assert all(answer.values()), answer


def test_many_leaves_in_several_calls_are_the_leaves_one_by_one(answers):
    assert answers["batched"] == [[True] * 7] * 3


def test_targets_of_all_vocabularies_make_the_tensor_that_mark_sharding_makes(answers):
    for case, answer in zip(CASES["targets"], answers["targets"], strict=True):
        assert answer == {way: True for way in answer if way != "compiles"} | {"compiles": 0}, case
        assert set(answer) == {
            "Sharding",
            "OpSharding",
            "op_sharding",
            "ShardingSpec",
            "pair",
            "compiles",
        }


def test_axis_names_are_recorded_where_the_global_mesh_explains_the_sharding(answers):
    tiled, partial, replicated = answers["names"]
    assert (
        tiled["same"] == "Sharding(mesh=Mesh((4, 2), ('x', 'y'), [3, 1, 2, 0, 7, 6, 5, 4]), "
        "spec=PartitionSpec('x', 'y'))"
    )
    assert tiled["none"] == tiled["other"] == "{devices=[4,2]3,1,2,0,7,6,5,4}"
    assert (
        partial["same"] == "Sharding(mesh=Mesh((4, 2), ('x', 'y')), spec=PartitionSpec('y', None))"
    )
    assert (
        replicated["same"]
        == "Sharding(mesh=Mesh((4, 2), ('x', 'y')), spec=PartitionSpec(None, None))"
    )


def test_pending_leaves_are_computed_in_one_program_and_nothing_else_is(answers):
    (answer,) = answers["pending"]
    count = [[8.0 * i + j for j in range(8)] for i in range(8)]

    def times(k):
        return [[k * e for e in row] for row in count]

    assert answer["programs"] == 1
    assert answer["texts"] == ["{devices=[4,2]0,1,2,3,4,5,6,7}"] * 3
    assert answer["elements"] == {"w0": times(2), "w1": times(3), "w2": times(4), "base": count}
    assert answer["bystander pending"]
    assert (answer["bystander"], answer["base"]) == (times(100), count)


def test_a_pending_leaf_in_like_says_where_to_restore_to(answers):
    assert answers["pending"][0]["lazy boxes"] == 8


def test_a_pending_leaf_that_was_marked_is_not_computed_to_be_replaced(answers):
    (answer,) = answers["pending"]
    assert answer["annotated"] == [0, [True, True], [2, 4], ["float32", "float32"]]
    assert answer["annotated computed"] == [True, True], "it is still there for others to compute"


def test_tensors_that_nobody_marked_are_replicated_over_all_devices(answers):
    (answer,) = answers["unmarked"]
    assert answer == {
        "layouts": ["{replicated}"] * 3,
        "devices": [8] * 3,
        "elements": [True] * 3,
        "restored": "{replicated}",
    }


def test_identity_is_the_same_for_aliases_of_a_parameter_and_not_for_equal_elements(answers):
    assert answers["identities"] == [
        {"aliases": 1, "equal elements": False, "transposed": False, "is_tensor": True}
    ]


def test_a_meta_module_that_is_assigned_restored_tensors_trains_on_with_the_programs_there_are(
    answers,
):
    (answer,) = answers["training"]
    normal, restored = answer["losses"]
    assert normal == restored
    assert answer["load compiles"] == 0
    assert answer["compiles"][0] >= 1
    assert answer["compiles"][1] == 0
    assert answer["texts"][0] == answer["texts"][1]
    assert answer["kinds"] == ["Parameter True"]


@pytest.mark.parametrize(
    ("question", "kind", "words"),
    [
        ("few", "ShardingError", "4 devices and this torch_xla job has 8"),
        ("ids", "ShardingError", "100…107 and those of this torch_xla job 0…7"),
        ("rank", "ShardingError", "3 entries and the tensor 2 dimensions"),
        ("six", "ShardingError", "at most 5 dimensions and the tensor has 6"),
        ("manual", "ShardingError", "manual"),
        ("axis", "ShardingError", "no axis 'nope'"),
        ("no spec", "ShardingError", "its partition spec is 5"),
        ("fp8", "DtypeError", "no tensors of float8_e4m3fnuz"),
        ("complex128", "DtypeError", "without its imaginary parts"),
    ],
)
def test_what_cannot_be_is_refused_by_name_before_anything_is_read(answers, question, kind, words):
    error = answers["refusals"][0][question]
    assert error[0] == kind
    assert error[1].startswith("'w': ")
    assert words in error[1]


def test_replicated_targets_may_have_any_number_of_dimensions(answers):
    assert answers["refusals"][0]["six whole"] is None


@pytest.mark.parametrize(
    ("spmd", "layout"),
    [pytest.param(False, "None", marks=pytest.mark.slow), (True, "{replicated}")],
)
def test_one_device_needs_no_sharding(spmd, layout):
    answer = ask("xla_single.py", {"spmd": spmd}, devices=1)
    assert answer == {
        "layout": layout,
        "fetched": True,
        "restored": True,
        "device": "xla",
        "boxes": 1,
        "target": spmd,
    }
