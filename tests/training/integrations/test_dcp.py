"""A script that saves and loads with torch.distributed.checkpoint keeps its calls, and has
checkpoints of shardckpt's.

Real gloo jobs of 1, 2 and 4 processes (`tests/children/integration_dcp.py`); torch's own DCP plans
and talks.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import Processes

MESHES = {"1 process": (), "FSDP2 on 2": (2,), "FSDP2 and TP on 4": (2, 2)}
QUIET = {"PYTHONWARNINGS": "ignore", "TF_CPP_MIN_LOG_LEVEL": "3"}


@pytest.fixture(scope="module")
def job():
    """Runs a function of the module in each process of a job; what they returned."""
    with Processes("integration_dcp", env=QUIET) as processes:

        def run(function, mesh, *arguments):
            ranks = 1
            for n in mesh:
                ranks *= n
            answers = processes.run(function, ranks, *arguments, timeout=250)
            failed = [a for a in answers if isinstance(a, dict) and {"error", "signal"} & set(a)]
            assert not failed, failed
            return answers

        yield run


@pytest.fixture(scope="module")
def saved(job, tmp_path_factory):
    """Directory of the checkpoints that DCP saves, one for each mesh."""
    root = tmp_path_factory.mktemp("dcp")
    for name, mesh in MESHES.items():
        job("save", mesh, root / name, mesh)
    return root


@pytest.mark.long
@pytest.mark.parametrize("name", MESHES)
def test_what_dcp_saves_is_a_whole_checkpoint_with_its_layouts(job, saved, name):
    (answer,) = job("look", (), saved / name)
    ranks = len(answer["rng"])
    sharded = MESHES[name] != ()
    assert answer == {
        "ok": True,
        "different": [],
        "values": True,
        "layouts": {"model/0.weight": sharded, "model/1.weight": sharded, "more/plain": False},
        "hosts": ranks,
        "rng": [[rank] for rank in range(ranks)],
    }


@pytest.mark.parametrize("onto", MESHES)
@pytest.mark.parametrize("name", MESHES)
def test_dcp_loads_it_onto_any_mesh_bit_by_bit(job, saved, name, onto):
    for answer in job("load", MESHES[onto], saved / name, MESHES[onto]):
        assert answer["different"] == []
        assert answer["needed"] == answer["held"]


def test_dcp_reads_every_stored_byte_once(job, saved):
    (answer,) = job("load", (), saved / "FSDP2 and TP on 4", ())
    assert answer["read"] <= answer["needed"] * 1.5, (
        "checksums of small chunks are all that is read besides"
    )


@pytest.mark.long
@pytest.mark.parametrize("how", ["shardckpt", "async", "changed at once", "without collectives"])
def test_other_ways_to_save_are_loaded_the_same(job, tmp_path, how):
    job("save", (2,), tmp_path / "there", (2,), how)
    assert [answer["different"] for answer in job("load", (2, 2), tmp_path / "there", (2, 2))] == [
        []
    ] * 4


@pytest.mark.long
def test_any_state_is_loaded_as_torchs_own_storage_loads_it(job, tmp_path):
    (answer,) = job("like_torchs_own", (), tmp_path, 80)
    assert answer["different"] == []
    assert answer["loaded"] > 60


def test_a_value_of_each_process_comes_back_to_it(job, saved):
    assert job("load_own", (2,), saved / "FSDP2 on 2") == [[0], [1]]
    for errors in job("load_own", (2,), saved / "1 process"):
        assert {kind for kind, _, _ in errors.values()} == {"MismatchError"}


def test_a_failure_on_one_rank_is_everybodys_and_the_next_save_is_good(job, tmp_path):
    for rank, answer in enumerate(job("subset", (2,), tmp_path)):
        if rank == 0:
            ((kind, message, ours),) = answer["save"].values()
            assert (kind, ours) == ("OptionError", True)
            assert "1 of the job's 2 processes" in message
        assert {kind for kind, _, _ in answer["load"].values()} == {"ReplacedError"}
        assert answer["one bad leaf"]["1"][0] == "LeafError"
        assert "'x'" in answer["one bad leaf"]["1"][1]
        assert answer["after it"] == {}
        assert all("'w'" in message for _, message, _ in answer["unequal"].values())


def test_what_cannot_be_kept_or_loaded_as_it_is_is_refused_by_name(job, tmp_path):
    (answer,) = job("refusals", (), tmp_path)
    expected = {
        "ndarray": ("LeafError", "'w'"),
        "tuple of tensors": ("LeafError", "use lists"),
        "named tuple": ("LeafError", "Pair"),
        "odd dict in a tuple": ("LeafError", "OrderedDict"),
        "object": ("LeafError", "'deep.o'"),
        "planner": ("OptionError", "transform_object"),
        "exists": ("AlreadyExistsError", "overwrite"),
        "no url": ("OptionError", "checkpoint_id"),
        "options": ("OptionError", "SaveOptions"),
        "not there": ("NotFoundError", "nowhere"),
        "dtype": ("DtypeMismatchError", "float64"),
        "tensor for a value": ("StructureMismatchError", "'n'"),
        "shared memory": ("StructureMismatchError", "shares memory"),
        "expanded": ("LeafError", "'w'"),
        "dots": ("NamesMismatchError", "'a.b'"),
        "tensors in a tuple": ("StructureMismatchError", "'t'"),
        "no dict": ("StructureMismatchError", "list"),
        "int4": ("DtypeError", "int4"),
    }
    for case, (kind, words) in expected.items():
        answers = list(answer["refused"][case].values())
        assert [(k, ours) for k, _, ours in answers] == [(kind, True)], (case, answers)
        assert words in answers[0][1], (case, answers)
    assert answer["unharmed"] == [9.0] * 6, "what is refused is refused before anything is read"
    assert not Path(tmp_path, "refused", "checkpoint.json").exists()
    assert answer["replaced"] == {}
    assert answer["part"] == [{}, [1.0, 1.0]]
    numbers = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert answer["everything"] == [numbers, 3, [1.0, 1.0]]
    assert answer["flat"] == [[1.0, 1.0], numbers, 3]


@pytest.mark.long
def test_damaged_bytes_are_an_error(job, tmp_path):
    job("refusals", (), tmp_path)
    data = max(Path(tmp_path, "good").rglob("hosts/*/*/d/0*"), key=lambda path: path.stat().st_size)
    content = bytearray(data.read_bytes())
    for i in range(len(content)):
        content[i] ^= 0xFF
    data.write_bytes(content)
    (answer,) = job("damaged", (), tmp_path / "good")
    assert [kind for kind, _, _ in answer.values()] == ["CorruptionError"]
