"""The picture of who holds what, read back and compared with the boxes themselves."""

import itertools
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardckpt import Mesh, OpSharding, PartitionSpec, Sharding
from shardckpt.cli.info.picture import picture
from shardckpt.cli.screen import Screen


def draw(layout, shape, width=80):
    screen = Screen()
    screen.width = width
    return list(picture(screen, layout, shape))


def ids(label):
    """Devices of a label without gaps in it."""
    parts = (tuple(map(int, part.split("–"))) for part in label.split(","))
    return [i for part in parts for i in range(part[0], part[-1] + 1)]


def ranges(text):
    return [tuple(map(int, pair)) for pair in re.findall(r"(\d+):(\d+)", text)]


def read_back(lines):
    """(dimension → range, devices) of every cell of a picture in which nothing is joined."""
    cells = []
    down = across = None
    where, tops = {}, []
    for line in lines:
        caption = re.match(r"Dimension (\d+) (down|across)", line)
        if caption:
            down, across = (
                (int(caption[1]), across) if caption[2] == "down" else (down, int(caption[1]))
            )
        elif line.startswith("  where "):
            where = {
                int(d): (int(a), int(b))
                for d, a, b in re.findall(r"dimension (\d+) is (\d+):(\d+)", line)
            }
        elif "│" in line:
            head, *labels, _ = line.split("│")
            for j, label in enumerate(labels):
                box = dict(where)
                if down is not None:
                    (box[down],) = ranges(head)
                if across is not None:
                    box[across] = tops[j]
                cells.append((box, ids(label.strip())))
        elif ranges(line) and "…" not in line:
            tops = ranges(line)
    return cells


@settings(max_examples=150)
@given(data=st.data())
def test_every_cell_names_the_devices_that_hold_that_box(data):
    mesh_shape = data.draw(
        st.sampled_from([(1,), (2,), (4, 2), (2, 2, 2), (8,), (3, 2)]), label="mesh"
    )
    axes = tuple("abc"[: len(mesh_shape)])
    devices = data.draw(st.permutations(range(int(np.prod(mesh_shape)))), label="devices")
    shape = tuple(data.draw(st.lists(st.integers(1, 12), max_size=4), label="shape"))
    owners = data.draw(
        st.lists(st.integers(-1, len(shape) - 1), min_size=len(axes), max_size=len(axes)),
        label="axis → dimension",
    )
    spec = PartitionSpec(
        *(
            tuple(a for a, d in zip(axes, owners, strict=True) if d == dim)
            for dim in range(len(shape))
        )
    )
    layout = Sharding(Mesh(mesh_shape, axes, devices), spec)

    boxes = layout.device_boxes(shape)
    expected = {}
    for device, start, stop in zip(
        boxes.device_ids.tolist(),
        boxes.boxes.start.tolist(),
        boxes.boxes.stop.tolist(),
        strict=True,
    ):
        if all(a < b for a, b in zip(start, stop, strict=True)):
            cut = {
                d: (a, b)
                for d, (a, b) in enumerate(zip(start, stop, strict=True))
                if boxes.parts[d] > 1
            }
            expected.setdefault(tuple(sorted(cut.items())), []).append(device)
    lines = draw(layout, shape)
    drawn = {tuple(sorted(box.items())): devices for box, devices in read_back(lines)}
    assert drawn == expected
    idle = sorted(set(boxes.device_ids.tolist()) - {i for held in expected.values() for i in held})
    idle_shown = [
        ids(m[1]) for line in lines if (m := re.match(r"  Devices? (\S+) holds? nothing", line))
    ]
    assert idle_shown == ([idle] if idle else [])


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize(
    "spec",
    [s for n in range(3) for s in itertools.permutations(("fsdp", "tensor"), n)]
    + [(("fsdp", "tensor"),), (None, ("tensor", "fsdp"))],
)
@pytest.mark.parametrize("mesh", [(16, 16), (256, 16), (4, 1024)])
def test_large_meshes_fit_the_screen_and_name_every_device_or_a_pattern(width, spec, mesh):
    lines = draw(
        Sharding(Mesh(mesh, ("fsdp", "tensor")), PartitionSpec(*spec)), (8192, 8192), width
    )
    assert len(lines) < 30
    assert max(map(len, lines)) <= width
    table = [line for line in lines if "│" in line]
    assert "0" in table[0]
    assert str(np.prod(mesh) - 1) in table[-1]


def test_tiles_in_the_middle_are_joined_and_their_devices_named_together():
    lines = draw(Sharding(Mesh((256,), ("x",)), PartitionSpec("x")), (512,))
    (joined,) = [line for line in lines if "⋯" in line]
    assert joined.split() == ["16:498", "│", "⋯", "8–248", "⋯", "│"]


def test_a_dimension_that_is_not_cut_is_not_drawn_and_those_that_are_are_named():
    lines = draw(
        Sharding(Mesh((2, 2), ("x", "y")), PartitionSpec(None, "x", None, "y")), (5, 4, 7, 6)
    )
    assert lines[:2] == [
        "Dimension 1 down: 4 in 2 tiles of 2",
        "Dimension 3 across: 6 in 2 tiles of 3",
    ]


def test_many_grids_are_not_all_drawn_and_the_rest_is_counted():
    mesh = Mesh((8, 8, 8), ("x", "y", "z"))
    lines = draw(Sharding(mesh, PartitionSpec("x", "y", "z")), (64, 64, 64))
    assert lines[-1] == "  … and 5 more such grids"


@pytest.mark.parametrize(
    ("text", "shape", "words"),
    [
        ("{replicated}", (4,), "does not say on how many devices"),
        ("{manual}", (4,), "manual"),
        ("{devices=[2,2]<=[4]}", (4,), "2 dimensions"),
        ("{maximal device=3}", (4,), "on one device"),
        ("{devices=[2]<=[2]}", (0,), "no elements"),
    ],
)
def test_what_has_no_picture_is_said_in_words(text, shape, words):
    assert words in draw(OpSharding.parse(text), shape)[0]


def test_the_largest_mesh_there_can_be_is_drawn():
    lines = draw(OpSharding.parse("{devices=[1024,1024]<=[1048576]}"), (1 << 20, 1 << 20), 120)
    assert max(map(len, lines)) <= 120
    assert "⋯ 1029180 devices ⋯" in "".join(lines)
