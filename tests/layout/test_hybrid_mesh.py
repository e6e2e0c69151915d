"""Slices fill a hybrid mesh block by block. torch_xla and JAX are asked for the same in
test_sharding_{xla,jax}.py."""

from itertools import pairwise

import numpy as np
import pytest

from shardckpt.errors import ShardingError
from shardckpt.layout.hybrid_mesh import Device, HybridMesh
from shardckpt.layout.mesh import Mesh


def tpu(torus, slices, cores=1, first_slice=0):
    """Made-up slices of a torus: ids count through slices, chips (x fastest) and cores."""
    chips = [tuple(reversed(at)) for at in np.ndindex(*reversed(torus))]
    places = [(s, chip, core) for s in range(slices) for chip in chips for core in range(cores)]
    return [
        Device(i, first_slice + s, chip, core, process_index=i // 4)
        for i, (s, chip, core) in enumerate(places)
    ]


@pytest.mark.parametrize(
    ("torus", "slices", "ici", "dcn"),
    [
        ((2, 2, 4), 2, (1, 16, 1), (2, 1, 1)),  # v4-32 × 2
        ((2, 2, 4), 4, (2, 8), (2, 2)),
        ((4, 4, 4), 3, (1, 16, 4), (3, 1, 1)),  # v5p-128 × 3
        ((4, 4, 8), 2, (8, 2, 8), (1, 2, 1)),
        ((8, 8, 1), 2, (8, 8), (2, 1)),
    ],
)
def test_every_axis_is_contiguous_in_a_slice_and_slices_are_its_major_part(torus, slices, ici, dcn):
    devices = tpu(torus, slices)
    slice_of = {device.id: device.slice_index for device in devices}
    mesh = HybridMesh(ici, dcn, None, devices)
    assert mesh.shape == tuple(i * d for i, d in zip(ici, dcn, strict=True))
    numbers = np.arange(slices).reshape(dcn)
    for at, device in np.ndenumerate(mesh.devices):
        assert (
            slice_of[int(device)]
            == numbers[tuple(place // i for place, i in zip(at, ici, strict=True))]
        )


def test_neighbours_on_the_last_axis_are_neighbours_in_the_torus():
    devices = tpu((4, 4, 4), 2)
    coords = {device.id: np.array(device.coords) for device in devices}
    mesh = HybridMesh((16, 4), (2, 1), ("data", "model"), devices)
    for row in mesh.devices:
        for left, right in pairwise(row):
            assert np.abs(coords[int(left)] - coords[int(right)]).sum() == 1


def test_two_cores_of_a_chip_are_a_dimension_of_the_torus():
    devices = tpu((4, 4, 1), 1, cores=2)
    chip = {device.id: device.coords for device in devices}
    mesh = HybridMesh((16, 2), (1, 1), ("data", "model"), devices)
    assert all(chip[int(a)] == chip[int(b)] for a, b in mesh.devices)


def test_the_order_of_the_devices_does_not_matter():
    devices = tpu((2, 2, 4), 2)
    assert HybridMesh((4, 4), (2, 1), None, devices[::-1]) == HybridMesh(
        (4, 4), (2, 1), None, devices
    )


def test_slice_indices_may_start_anywhere_and_coordinates_too():
    devices = [
        Device(d.id, d.slice_index, tuple(c + 2 for c in d.coords))
        for d in tpu((2, 2, 2), 2, first_slice=5)
    ]
    assert HybridMesh((2, 4), (2, 1), None, devices) == HybridMesh(
        (2, 4), (2, 1), None, tpu((2, 2, 2), 2)
    )


def test_processes_can_stand_in_for_slices():
    devices = [Device(10 + i, process_index=i // 4) for i in range(8)]
    mesh = HybridMesh((1, 4), (2, 1), ("data", "model"), devices, process_is_granule=True)
    assert mesh.devices.tolist() == [[10, 11, 12, 13], [14, 15, 16, 17]]


def test_without_devices_the_ids_count_through_the_slices():
    mesh = HybridMesh((2, 2), (1, 2), ("data", "model"))
    assert mesh.devices.tolist() == [[0, 1, 4, 5], [2, 3, 6, 7]]


def test_it_is_a_mesh():
    mesh = HybridMesh((1, 4), (2, 1), ("data", "fsdp"))
    assert mesh == Mesh((2, 4), ("data", "fsdp"))
    assert Mesh.from_json(mesh.to_json()) == mesh
    assert (mesh.ici_shape, mesh.dcn_shape) == ((1, 4), (2, 1))


@pytest.mark.parametrize(
    ("ici", "dcn", "devices", "message"),
    [
        ((4,), (2, 1), None, "one size each for every axis"),
        ((4, 0), (2, 1), None, "at least 1"),
        ((1024, 1024), (2, 1), None, "at most 1048576"),
        ((1, 4), (4, 1), tpu((2, 2, 1), 2), r"4 slices, but the devices are in 2: \[0, 1\]"),
        ((1, 8), (2, 1), tpu((2, 2, 1), 2), "8 devices per slice, but slice 0 has 4"),
        ((1, 4), (2, 1), tpu((2, 2, 1), 2)[:-1], "slice 1 has 3"),
        (
            (4,),
            (1,),
            [Device(i, 0, (i // 2, i // 2, 0)) for i in range(4)],
            "2×2×1 places for 4 devices; they must fill a cuboid",
        ),
        ((3,), (1,), tpu((2, 2, 1), 1)[:-1], "2×2×1 places for 3"),
        ((2,), (1,), [Device(0, 0, (0, 0, 0)), Device(1, 0)], "without coordinates"),
        ((2,), (1,), [Device(3), Device(3)], "device id 3 stands at more than one"),
    ],
)
def test_devices_that_do_not_make_the_mesh_are_refused_with_the_numbers(ici, dcn, devices, message):
    with pytest.raises(ShardingError, match=message):
        HybridMesh(ici, dcn, None, devices)


def test_a_device_counts_from_zero():
    with pytest.raises(ShardingError, match=r"Device: .* -1"):
        Device(-1)
    with pytest.raises(ShardingError, match="Coordinates of device 4"):
        Device(4, coords=(0, -2, 0))
