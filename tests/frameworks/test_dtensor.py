"""The DTensor adapter against torch, on the ranks of real gloo jobs.

One process does everything that is asked, and forks the ranks: `tests/children/dtensor_ranks.py`.
What every rank says it holds is put together here.
"""

import json
import sys
from itertools import product
from math import prod

import forks
import numpy as np
import pytest
from paths import CHILDREN

from shardckpt.layout.mesh import Mesh
from shardckpt.layout.partition_spec import PartitionSpec as P
from shardckpt.layout.placements import Placements
from shardckpt.layout.sharding import Sharding

CHILD = CHILDREN / "dtensor_ranks.py"
ROWS = (1, 2, 3, 5, 6, 7, 10, 12, 13)
DTYPES = (
    *(
        "bool",
        "uint8",
        "uint16",
        "uint32",
        "uint64",
        "int8",
        "int16",
        "int32",
        "int64",
        "float16",
        "float32",
        "float64",
    ),
    *("complex64", "complex128", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
)


def plain(mesh, rows, ids=None, gather=False):
    """Every way to lay out matrices of some numbers of rows by Shard and Replicate."""
    for texts in product(("S(0)", "S(1)", "R"), repeat=len(mesh)):
        for n in rows:
            yield {"mesh": mesh, "ids": ids, "shape": [n, 4], "placements": texts, "gather": gather}


def strided(mesh):
    """Strided shards of lengths that all their parts divide."""
    after = prod(mesh[1:])
    pairs = [
        (f"_S(0,{mesh[-1]})", "S(0)"),
        ("S(0)", "_S(0,2)"),
        ("S(0)", "_S(0,3)"),
        ("_S(0,2)", "R"),
        ("R", "_S(0,3)"),
    ]
    pairs += [
        ("_S(0,2)", "_S(0,2)"),
        (f"_S(0,{2 * mesh[-1]})", "S(0)"),
        ("_S(0,2)", "S(1)"),
        ("_S(0,2)", "_S(1,3)"),
        ("_S(1,2)", "_S(0,3)"),
    ]
    deep = [
        (f"_S(0,{after})", f"_S(0,{mesh[-1]})", "S(0)"),
        ("S(0)", f"_S(0,{mesh[-1]})", "S(0)"),
        (f"_S(0,{mesh[1]})", "S(0)", "S(0)"),
    ]
    deep += [
        (f"_S(0,{after})", "S(0)", "S(0)"),
        ("R", f"_S(0,{mesh[-1]})", "S(0)"),
        ("_S(0,3)", "S(1)", "_S(0,3)"),
        ("S(0)", "R", "_S(0,2)"),
    ]
    for texts in pairs if len(mesh) == 2 else deep:
        yield {"mesh": mesh, "ids": None, "shape": [72, 36], "placements": texts}


def uneven(mesh):
    """Strided shards of which torch does not say in one way where they are."""
    for texts in (
        ("S(0)", "_S(0,2)"),
        ("_S(0,2)", "R"),
        ("_S(0,2)", "S(1)"),
        ("_S(0,2)", "_S(0,3)"),
    ):
        yield {"mesh": mesh, "ids": None, "shape": [10, 4], "placements": texts}


CASES = {
    2: [
        *plain([2], ROWS, gather=True),
        *plain([1, 2], (3,)),
        {"mesh": [2], "ids": None, "shape": [], "placements": ["R"]},
    ],
    4: [
        *plain([4], ROWS),
        *plain([2, 2], ROWS),
        *plain([2, 2], (5, 7), ids=[0, 2, 1, 3], gather=True),
        *plain([2], (3, 4), ids=[1, 3]),  # ranks 0 and 2 are not in the mesh
        *plain([2, 2], (7, 8), gather=True),
        *strided([2, 2]),
        *uneven([2, 2]),
        *(
            {"mesh": [4], "ids": None, "shape": shape, "placements": ["S(0)"]}
            for shape in ([0], [0, 3], [3], [9], [3, 0], [5, 2, 3])
        ),
    ],
    6: [
        *plain([6], ROWS),
        *plain([2, 3], ROWS),
        *plain([3, 2], ROWS),
        *plain([1, 2, 3], (7, 13), ids=[0, 2, 4, 1, 3, 5]),
    ]
    + [
        case for mesh in ([2, 3], [3, 2], [1, 2, 3], [3, 1, 2], [3, 2, 1]) for case in strided(mesh)
    ],
}
ALONE = (
    "partial",
    "from_local",
    "outside",
    "tied",
    "autograd",
    "modules",
    "refusals",
    "targets",
    "pending",
)
JOBS = [
    {"ranks": 2, "topics": {"distributed": CASES[2], "bits": DTYPES} | dict.fromkeys(ALONE)},
    {
        "ranks": 4,
        "topics": {
            "distributed": CASES[4],
            "fsdp_over_tp": [[2, 2]],
            "hsdp": [[2, 2]],
            "trained": None,
            "slices": None,
            "descending": None,
            "lacking": None,
        },
    },
    {
        "ranks": 6,
        "topics": {"distributed": CASES[6], "fsdp_over_tp": [[2, 3], [3, 2]], "hsdp": [[2, 3]]},
    },
    {"ranks": 9, "topics": {"fsdp_over_tp": [[3, 3]]}},
]


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """By the number of ranks and topic: what each rank answered."""
    folder = str(tmp_path_factory.mktemp("saved"))
    JOBS[1]["topics"] |= {"descending": folder, "lacking": folder}
    command = [sys.executable, CHILD]
    child = forks.run(command, input=json.dumps(JOBS), capture_output=True, text=True, timeout=250)
    assert child.returncode == 0, child.stderr[-4000:]
    by_job = json.loads(child.stdout.splitlines()[-1])
    return {
        (job["ranks"], topic): [rank[topic] for rank in ranks]
        for job, ranks in zip(JOBS, by_job, strict=True)
        for topic in job["topics"]
    }


@pytest.fixture(scope="module")
def distributed(answers):
    """Cases, and what each rank says of them."""
    return [
        (case, ranks)
        for n, cases in CASES.items()
        for case, ranks in zip(cases, zip(*answers[n, "distributed"], strict=True), strict=True)
    ]


@pytest.fixture(scope="module")
def models(answers):
    """Parameters of models under FSDP2, by where they come from, and what each rank says of
    them."""
    parameters = {}
    for (n, topic), ranks in answers.items():
        if topic in {"fsdp_over_tp", "hsdp"}:
            for case, models in enumerate(zip(*ranks, strict=True)):
                parameters |= {
                    (topic, n, case, name): [model[name] for model in models] for name in models[0]
                }
        if topic == "trained":
            parameters |= {
                (topic, n, 0, name): [rank["facts"][name] for rank in ranks]
                for name in ranks[0]["facts"]
            }
    return parameters


def check_whole(ranks, where):
    """The descriptions of one tensor by all ranks are true, and fit together."""
    assert all(rank["right"] and rank["views"] and rank["last"] for rank in ranks), where
    assert all(rank["layout"] == ranks[0]["layout"] for rank in ranks), where
    shape = ranks[0]["shape"]
    owners = {}
    for number, rank in enumerate(ranks):
        for start, stop in rank["boxes"]:
            owners.setdefault((tuple(start), tuple(stop)), []).append(number)
    covered = np.zeros(shape, int)
    for start, stop in owners:
        covered[tuple(map(slice, start, stop))] += 1
    assert (covered == 1).all(), where
    for rank in ranks:
        assert rank["holders"] == [
            owners[tuple(start), tuple(stop)] for start, stop in rank["boxes"]
        ], where


def layout_of(ranks):
    doc = ranks[0]["layout"]
    return Sharding.from_json(doc) if "spec" in doc else Placements.from_json(doc)


def is_refused(case):
    """Cases of strided shards without one meaning."""
    return case["shape"] == [10, 4] and any("_S" in text for text in case["placements"])


# Boxes


def test_boxes_of_all_ranks_are_the_tensor_once_and_their_holders_are_those_who_have_them(
    distributed,
):
    assert len(distributed) == 491
    for case, ranks in distributed:
        if not is_refused(case):
            check_whole(ranks, case)


def test_our_own_arithmetic_says_of_every_rank_what_torch_has_put_there(distributed):
    for case, ranks in distributed:
        if is_refused(case):
            continue
        layout = Placements.of(
            Mesh(case["mesh"], tuple("abc")[: len(case["mesh"])], case["ids"]), case["placements"]
        )
        full = np.arange(prod(case["shape"]), dtype=np.float32).reshape(case["shape"])
        for rank, facts in enumerate(ranks):
            boxes, places = (
                layout.rank_boxes(case["shape"], rank),
                layout.local_boxes(case["shape"], rank),
            )
            assert [
                [list(boxes[i].start), list(boxes[i].stop)] for i in range(len(boxes))
            ] == facts["boxes"], case
            shape = layout.local_shape(case["shape"], rank)
            if shape is None:
                assert facts["boxes"] == facts["local"] == []
                continue
            assert (list(shape), len(layout.holders(rank))) == (
                facts["local shape"],
                len(facts["holders"][0]) if len(boxes) else len(layout.holders(rank)),
            ), case
            local = np.full(shape, -1, np.float32)
            for i in range(len(boxes)):
                local[places[i].slices] = full[boxes[i].slices]
            assert local.reshape(-1).tolist() == facts["local"], case


def test_what_torch_gathers_is_what_was_saved(distributed):
    gathered = [
        rank["gathered"] for _, ranks in distributed for rank in ranks if "gathered" in rank
    ]
    assert len(gathered) > 100
    assert all(gathered)


def test_boxes_of_a_sharding_are_recorded_as_one_and_no_others(distributed, models):
    kinds = {Sharding: 0, Placements: 0}
    for where, ranks in [
        *((str(case), ranks) for case, ranks in distributed if not is_refused(case)),
        *models.items(),
    ]:
        layout = layout_of(ranks)
        kinds[type(layout)] += 1
        if isinstance(layout, Placements):
            assert layout.as_sharding(ranks[0]["shape"]) is None, where
            continue
        held = layout.device_boxes(ranks[0]["shape"])
        for i, rank in enumerate(held.device_ids.tolist()):
            box = held.boxes[i]
            assert ranks[rank]["boxes"] == (
                [[list(box.start), list(box.stop)]] if box.size else []
            ), where
    assert min(kinds.values()) > 100


def test_strided_shards_without_one_meaning_are_refused_by_name(distributed):
    refused = [rank for case, ranks in distributed if is_refused(case) for rank in ranks]
    assert len(refused) == 16
    for rank in refused:
        assert rank["error"][0] == "ShardingError"
        assert rank["error"][1].startswith("'w': ")
        assert "redistribute it to plain Shard placements" in rank["error"][1]


def test_every_number_of_rows_under_fsdp_over_tensor_parallelism_is_saved_as_it_lies(models):
    chosen = {where: ranks for where, ranks in models.items() if where[0] == "fsdp_over_tp"}
    assert len(chosen) == 4 * 13 * 4  # meshes, rows, and two layers of two parameters each
    for where, ranks in chosen.items():
        check_whole(ranks, where)


def test_hsdp_and_the_optimizer_state_of_a_trained_model_are_saved_as_they_lie(models, answers):
    chosen = {where: ranks for where, ranks in models.items() if where[0] != "fsdp_over_tp"}
    assert len({where[:2] for where in chosen}) == 3
    for where, ranks in chosen.items():
        check_whole(ranks, where)
    assert answers[4, "trained"][0]["step"] == ["Tensor", None]


def test_a_tensor_on_a_slice_has_one_layout_on_all_ranks_and_threads(answers):
    expected = [
        Sharding(Mesh((2, 2), axes, [0, 1, 2, 3]), P(axes[0])).to_json()
        for axes in (("dp", "tp"), ("a", "b"))
    ]
    for rank in answers[4, "slices"]:
        assert rank == {"here": expected, "on another thread": expected}


# Restoring


def test_restoring_fills_every_local_tensor_where_it_is_or_makes_a_new_one_for_meta(
    distributed, models
):
    for where, ranks in [
        *((str(case), ranks) for case, ranks in distributed if not is_refused(case)),
        *models.items(),
    ]:
        for rank in ranks:
            assert rank["filled"], where
            assert rank["copied"], where
            assert rank["made"], where


def test_parameters_stay_what_they_are_and_autograd_hears_of_the_write(answers):
    for rank in answers[2, "autograd"]:
        assert rank["same object"]
        assert rank["requires grad"] == [True, True]
        assert rank["versions"]
        assert "modified by an inplace operation" in rank["caught"]
        assert rank["inference"] == [[5, 5], [5, 5]]


def test_every_dtype_goes_there_and_back_bit_by_bit(answers):
    for rank in answers[2, "bits"]:
        assert rank == dict.fromkeys(DTYPES, True)


def test_a_target_of_mesh_and_placements_gives_a_new_dtensor(answers):
    for number, rank in enumerate(answers[2, "targets"]):
        assert (rank["dtype"], rank["placements"], rank["mesh"], rank["shape"]) == (
            "torch.bfloat16",
            "(Shard(dim=0),)",
            True,
            [5, 2],
        )
        assert rank["local"] == [list(range(6)), list(range(6, 10))][number]
        assert rank["scalar"] == 3
        assert rank["requires grad"] is False
        assert rank["tied"] == [True, False, False]
        assert rank["from the end"] == [["[0:5, 0:2]"], ["[0:5, 2:4]"]][number]


def test_a_target_that_cannot_be_is_refused_by_name(answers):
    rank = answers[2, "targets"][0]
    for question, kind, words in (
        ("partial", "ShardingError", "partial values"),
        ("too few", "ShardingError", "0 placements for a mesh of 1"),
        ("too many", "ShardingError", "2 placements for a mesh of 1"),
        ("before", "ShardingError", "its placement is Shard(dim=-5), and it has 2 dimensions"),
        ("not placements", "ShardingError", "use Shard or Replicate"),
        ("one placement", "ShardingError", "give one for each of the 1 dimensions"),
        ("no placements", "ShardingError", "give one for each of the 1 dimensions"),
        ("bits", "DtypeError", "torch has no dtype int4"),
        ("beyond", "ShardingError", "shards dimension 2 of a tensor with 2"),
        ("dtype that torch lacks", "DtypeError", "float8_e3m4"),
    ):
        assert rank[question][0] == kind
        assert rank[question][1].startswith("'w': ")
        assert words in rank[question][1]


# Ranks


def test_a_rank_outside_the_mesh_holds_nothing_and_keeps_its_leaf(answers):
    first, second = (rank["submesh"] for rank in answers[2, "outside"])
    assert (first["boxes"], first["holders"], first["filled"]) == ([], [], True)
    assert (second["boxes"], second["holders"]) == ([[[0, 0], [4, 2]]], [[1]])
    assert first["layout"] == second["layout"]


def test_ranks_with_layers_of_their_own_each_hold_theirs(answers):
    stages = [rank["stage"] for rank in answers[2, "outside"]]
    assert [stage["holders"] for stage in stages] == [[[0]], [[1]]]
    assert all(stage["right"] and stage["filled"] for stage in stages)


def test_a_mesh_whose_ranks_descend_along_a_sharded_dimension_is_refused_before_any_byte_moves(
    answers,
):
    for rank in answers[4, "descending"]:
        for kind, line in (
            ("distributed", "'dim0' the mesh has ranks [3, 2, 1, 0]"),
            ("FSDP2", "'dim0' the mesh has ranks [3, 2, 1, 0]"),
            ("HSDP", "'tp' the mesh has ranks [1, 0]"),
            ("FSDP2 and TP", "'tp' the mesh has ranks [1, 0]"),
        ):
            refused = rank["refused"][kind]
            for call in ("saved", "restored", "meta", "new"):
                assert refused[call][0] == "ShardingError"
                assert refused[call][1].startswith(f"'w': along its sharded dimension {line}, ")
                assert "make the mesh with ascending ranks" in refused[call][1]
            assert not refused["written"]
            assert not refused["read"]


def test_a_sharded_tensor_that_a_rank_leaves_out_is_an_error_that_names_both(answers):
    for refused in answers[4, "lacking"]:
        assert refused[0] == "CommitError"
        assert "chunks of 'x' were not written" in refused[1]
        assert "'x' is missing from process 1: give it to all processes that hold" in refused[1]


def test_ranks_of_replicas_may_descend(answers):
    for kind in ("all", "of slices"):
        ranks = [rank["replicas"][kind] for rank in answers[4, "descending"]]
        check_whole(ranks, kind)
        assert all(rank["filled"] and rank["made"] for rank in ranks)
        assert all(rank["gathered"] == np.arange(20.0).reshape(5, 4).tolist() for rank in ranks)


def test_ranks_that_are_not_the_processes_are_refused_by_name(answers):
    for number, rank in enumerate(answers[2, "refusals"]):
        for question, process, processes in (
            ("alone", 0, 1),
            ("renumbered", 1 - number, 2),
            ("more processes", number, 3),
        ):
            kind, message = rank[question]
            assert kind == "ShardingError"
            assert message.startswith(
                f"'layer/w': torch.distributed says that this is rank {number} of 2, but the "
                f"coordinator says process {process} of {processes}; "
            )


def test_tied_parameters_are_found_on_ranks_that_hold_nothing_of_them_too(answers):
    assert [rank["held"] for rank in answers[2, "tied"]] == [[1, 1], [0, 0]]
    for rank in answers[2, "tied"]:
        assert rank["same"] == 1
        assert rank["same, in its own memory"] == 1
        assert rank["apart"][0] == rank["apart"][1]
        assert rank["none"] == [None, None]
        assert rank["targets"]


def test_empty_shards_in_one_buffer_are_two_tensors_as_on_the_ranks_with_elements(answers):
    assert [rank["in buffers"] for rank in answers[2, "tied"]] == [[2, 2], [2, 2]]


# Ways to make a DTensor


def test_local_tensors_cut_by_another_rule_are_refused_by_name(answers):
    ours, theirs = ([3, 2], [2, 3])
    for number, rank in enumerate(answers[2, "from_local"]):
        for question in "the other way", "the other way, restored":
            kind, message = rank[question]
            assert kind == "ShardingError"
            assert message.startswith("'layer/w': (Shard(dim=0),) of shape (5, 3) ")
            assert (
                f"of shape ({ours[number]}, 3), and it has one of ({theirs[number]}, 3)" in message
            )


@pytest.mark.parametrize("made", ["uneven", "transposed"])
def test_uneven_and_transposed_local_tensors_are_saved_as_they_lie(answers, made):
    check_whole([rank[made] for rank in answers[2, "from_local"]], made)


def test_distribute_module_replicates_what_it_does_not_shard(answers):
    buffers = {
        name: [rank[name] for rank in answers[2, "modules"]] for name in ("weight", "running_mean")
    }
    for name, ranks in buffers.items():
        check_whole(ranks, name)
    assert buffers["weight"][1]["boxes"] == [[[3], [5]]]
    assert buffers["running_mean"][1]["holders"] == [[0, 1]]


def test_a_collective_that_has_only_been_started_is_waited_for(answers):
    for rank in answers[2, "pending"]:
        assert rank == {"local": "AsyncCollectiveTensor", "right": True}


# Partial values


def test_partial_values_are_refused_by_name_with_what_to_do(answers):
    for rank in answers[2, "partial"]:
        for question in "saved", "restored":
            kind, message = rank[question]
            assert kind == "ShardingError"
            assert message.startswith(
                "'grad': over mesh dimension 'dp' it holds partial values (Partial(sum))"
            )
            assert "reduce_partial=True" in message


def test_partial_values_are_reduced_by_those_who_ask_for_it_and_all_else_is_left_alone(answers):
    for rank in answers[2, "partial"]:
        assert (rank["sum"], rank["max"], rank["holders"]) == ([3, 3, 3], [2, 2, 2], [[0, 1]])
        assert rank["order"] == ["z", "a", "other", "plain"]
        assert rank["untouched"]
        assert rank["nothing to reduce"] == ["plain"]


# Refusals


@pytest.mark.parametrize(
    ("question", "kind", "words"),
    [
        ("meta", "LeafError", "a meta tensor has no data to save"),
        ("freed", "LeafError", "its memory was freed"),
        ("freed, restored", "LeafError", "its memory was freed"),
        ("expanded", "LeafError", "elements of this tensor share memory"),
        ("local subclass", "LeafError", "the tensor subclass __main__.Other computes its elements"),
        ("subclass", "LeafError", "the DTensor subclass __main__.Sub is not supported"),
        ("conjugate", "LeafError", "lazily conjugated or negated view"),
        ("dtype", "DtypeError", "torch.complex32 cannot be stored"),
    ],
)
def test_what_cannot_be_stored_is_refused_by_name(answers, question, kind, words):
    for rank in answers[2, "refusals"]:
        assert rank[question][0] == kind
        assert rank[question][1].startswith("'layer/w': ")
        assert words in rank[question][1]


def test_a_lazy_conjugate_is_saved_as_what_it_says(answers):
    assert [rank["conjugate saved"] for rank in answers[2, "refusals"]] == [[8, True]] * 2
