"""`shardckpt info`."""

import numpy as np
import pytest
import tensorstore as ts
from counting import steps

import shardckpt
from shardckpt import Mesh, OpSharding, PartitionSpec, Sharding

EVIL = "\x1b]0;owned\x07\n[red]\u202eevil[/red]"


def test_the_tree_shows_shapes_dtypes_sizes_and_specs(run, checkpoint):
    answer = run("info", checkpoint)
    assert answer.status == 0
    tree = answer.out[answer.out.index("\n.") + 1 :].splitlines()
    assert [line.split() for line in tree] == [
        [".", "4", "tensors,", "3.8", "KiB"],
        ["├─", "model", "4", "tensors,", "3.8", "KiB"],
        ["│", "├─", "embed", "64×12", "float32", "3", "KiB", "data,", "model"],
        ["│", "├─", "head", "=", "model/embed"],
        ["│", "├─", "layers", "list,", "2", "tensors,", "768", "B"],
        ["│", "│", "├─", "0", "1", "tensor,", "384", "B"],
        ["│", "│", "│", "└─", "w", "8×6", "float64", "384", "B"],
        ["│", "│", "└─", "1", "1", "tensor,", "384", "B"],
        ["│", "│", "└─", "w", "8×6", "float64", "384", "B"],
        ["│", "└─", "norm", "16", "float16", "32", "B", "model"],
        ["├─", "opt"],
        ["│", "└─", "0"],
        ["│", "└─", "lr", "0.1", "float"],
        ["└─", "step", "100", "int"],
    ]


def test_the_heading_shows_totals_mesh_and_metadata(run, checkpoint):
    heading = run("info", checkpoint).out.split("\n\n")[0].splitlines()
    facts = {line[:12].strip(): line[12:] for line in heading}
    assert facts["checkpoint"] == str(checkpoint)
    assert facts["holds"] == "4 tensors, 3.8 KiB, 880 parameters"
    assert facts["mesh"] == "data=4 × model=2"
    assert facts["metadata"] == "loss = 1.25"
    assert facts["stored"].startswith("packed, not compressed, 1 host, ")


def test_json_holds_the_whole_record(run, checkpoint):
    doc = run("info", checkpoint, "--json").json
    record = shardckpt.open(checkpoint).record
    assert {
        key: doc[key]
        for key in ("url", "attempt", "layout", "compression", "hosts", "metadata", "totals")
    } == {
        "url": str(checkpoint),
        "attempt": record.attempt,
        "layout": "packed",
        "compression": None,
        "hosts": 1,
        "metadata": {"loss": 1.25},
        "totals": record.totals,
    }
    assert doc["meshes"] == [{"shape": [4, 2], "axes": ["data", "model"], "devices": None}]
    embed, *_, norm = doc["tensors"]
    assert (embed["name"], embed["shape"], embed["dtype"], embed["bytes"], embed["tied"]) == (
        "model/embed",
        [64, 12],
        "float32",
        3072,
        ["model/head"],
    )
    assert doc["shardings"][embed["sharding"]]["spec"] == ["data", "model"]
    assert OpSharding.parse(doc["shardings"][norm["sharding"]]["op_sharding"]).parts(1) == (2,)
    assert doc["leaves"] == [
        {"name": "opt/0/lr", "kind": "float", "value": "0.1"},
        {"name": "step", "kind": "int", "value": "100"},
    ]


def test_a_tensor_is_shown_in_full_with_its_picture(run, checkpoint):
    answer = run("info", checkpoint, "model/embed")
    facts, captions, picture = answer.out.split("\n\n")
    assert "shape       64×12\n" in facts
    assert "mesh        data=4 × model=2\n" in facts
    assert "spec        data, model\n" in facts
    assert "OpSharding  {devices=[4,2]<=[8]}\n" in facts
    assert "tied to     model/head\n" in facts
    assert captions.startswith("Dimension 0 down: 64 in 4 tiles of 16")
    assert [line.split() for line in picture.splitlines() if "│" in line] == [
        [f"{16 * i}:{16 * i + 16}", "│", f"{2 * i}", "│", f"{2 * i + 1}", "│"] for i in range(4)
    ]


@pytest.mark.parametrize("layout", ["packed", "zarr"])
def test_stock_tensorstore_opens_a_tensor_by_the_spec_shown(run, saver, tmp_path, layout, model):
    saver(tmp_path / "1", layout=layout)
    spec = run("info", tmp_path / "1", "model/embed", "--json").json["tensorstore"]
    assert (ts.open(spec).result().read().result() == model()["model"]["embed"]).all()
    line = next(
        line
        for line in run("info", tmp_path / "1", "model/embed").out.splitlines()
        if line.startswith("open with")
    )
    assert line == f"open with   tensorstore.open({spec!r})"


def test_json_of_a_tensor_names_its_layout(run, checkpoint):
    doc = run("info", checkpoint, "model/head", "--json").json
    assert (doc["name"], doc["tied"], doc["spec"], doc["op_sharding"]) == (
        "model/head",
        ["model/embed"],
        ["data", "model"],
        "{devices=[4,2]<=[8]}",
    )
    assert doc["mesh"] == {"shape": [4, 2], "axes": ["data", "model"], "devices": None}
    plain = run("info", checkpoint, "model/layers/0/w", "--json").json
    assert (plain["mesh"], plain["spec"], plain["op_sharding"], plain["pieces"]) == (
        None,
        None,
        None,
        [{"start": [0, 0], "shape": [8, 6]}],
    )


def test_a_container_or_a_small_leaf_can_be_named(run, checkpoint):
    assert [line.split()[-4:] for line in run("info", checkpoint, "model/layers").out.splitlines()][
        2
    ] == ["8×6", "float64", "384", "B"]
    assert run("info", checkpoint, "opt/0/lr").out.split() == ["opt/0/lr", "0.1", "float"]
    assert [
        t["name"] for t in run("info", checkpoint, "model/layers", "--json").json["tensors"]
    ] == [
        "model/layers/0/w",
        "model/layers/1/w",
    ]


def test_patterns_and_depth_choose_what_is_shown(run, checkpoint):
    out = run("info", checkpoint, "--only", "**/w", "--only", "step").out
    assert "norm" not in out
    assert out.count("float64") == 2
    assert "step" in out
    assert [
        t["name"] for t in run("info", checkpoint, "--only", "model/n*", "--json").json["tensors"]
    ] == ["model/norm"]
    shallow = run("info", checkpoint, "--depth", "1").out
    assert "model" in shallow
    assert "embed" not in shallow
    for place in ([], ["model"]):
        answer = run("info", checkpoint, *place, "--only", "nosuch")
        assert (answer.status, answer.out) == (5, "")
        assert "--only nosuch selects none of its names" in answer.err
        answer = run("info", checkpoint, *place, "--only", "**/norm", "--only", "nosuch")
        assert (answer.status, answer.out) == (5, "")
        assert "--only nosuch selects none of its names" in answer.err


@pytest.mark.parametrize("width", [80, 120])
def test_the_tree_of_a_language_model_fits_the_screen(run, saver, tmp_path, width):
    names = ("self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj", "mlp.gate_proj")
    layers = {
        f"model.layers.{i}.{name}.weight": np.zeros((1000, 500), np.float16)
        for i in range(3)
        for name in names
    }
    sharding = Sharding(
        Mesh((8, 8), ("fully_sharded", "tensor")), PartitionSpec(("fully_sharded", "tensor"))
    )
    saver(tmp_path / "1", {"model": layers}, shardings={"**": sharding})
    lines = run("info", tmp_path / "1", width=width).out.splitlines()
    assert max(map(len, lines[1:])) <= width
    assert [line.split()[1:6] for line in lines if "layers" in line] == [
        ["model.layers.{0…2}", "12", "tensors,", "11.4", "MiB"]
    ]
    rows = [line for line in lines if "proj.weight" in line]
    assert len(rows) == 4
    assert all("3 × 977 KiB" in row for row in rows)
    label = "fully_sharded+tensor" if width == 120 else "[1]"
    assert all(row.endswith(label) for row in rows)
    assert width == 120 or lines[-1] == "[1] fully_sharded+tensor"


def test_specs_say_which_of_several_meshes_they_are_over(run, saver, tmp_path):
    a, b = Mesh((2,), ("x",)), Mesh((4,), ("x",), [4, 5, 6, 7])
    saver(
        tmp_path / "1",
        {"v": np.ones(8), "w": np.ones(8)},
        shardings={"v": Sharding(a, PartitionSpec("x")), "w": Sharding(b, PartitionSpec("x"))},
    )
    out = run("info", tmp_path / "1").out
    assert "mesh 1      x=2\nmesh 2      x=4, devices 4–7\n" in out
    assert "x on mesh 1\n" in out
    assert "x on mesh 2\n" in out


def test_names_and_metadata_cannot_reach_the_terminal(run, saver, tmp_path):
    mesh = Mesh((2,), (EVIL,))
    saver(
        tmp_path / "1",
        {EVIL: np.ones(4), "leaf": EVIL},
        shardings={"*evil*": Sharding(mesh, PartitionSpec(EVIL))},
        metadata={EVIL: EVIL},
    )
    name = shardckpt.open(tmp_path / "1").names()[0]
    for args in (
        ["info", tmp_path / "1"],
        ["info", tmp_path / "1", name],
        ["diff", tmp_path / "1", tmp_path / "1"],
    ):
        out = run(*args).out
        assert out.replace("\n", "").isprintable()
    assert r"\x1b]0;owned\x07\n[red]\u202eevil[~1red]" in run("info", tmp_path / "1").out
    assert run("info", tmp_path / "1", "--json").json["tensors"][0]["name"] == name
    assert run("info", tmp_path / "1", name + "\x1b").err.replace("\n", "").isprintable()


def test_many_tensors_take_time_in_proportion(saver, tmp_path, run):
    """Counted in steps of Python, which do not depend on the machine."""

    def steps_of(n):
        saver(
            tmp_path / str(n),
            {f"layer{i}": {"w": np.float32(i) * np.ones(1), "lr": 0.1} for i in range(n)},
        )

        def show():
            assert run("info", tmp_path / str(n)).status == 0
            assert run("info", tmp_path / str(n), "--json").status == 0

        return steps(show)

    steps_of(10)  # imports
    few, many = steps_of(50), steps_of(500)
    assert many < 11 * few


def test_json_is_one_document_also_for_small_leaves_that_json_lacks(run, saver, tmp_path):
    saver(tmp_path / "1", {"nan": float("nan"), "bytes": b"\xff", "big": 2**80, "z": 1j})
    kinds = {
        leaf["name"]: leaf["kind"] for leaf in run("info", tmp_path / "1", "--json").json["leaves"]
    }
    assert kinds == {"nan": "float", "bytes": "bytes", "big": "int", "z": "complex"}
