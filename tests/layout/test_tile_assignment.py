"""A tile assignment is a device per tile; iota and listed forms are two ways to write one thing."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardckpt.errors import ShardingError
from shardckpt.layout.mesh import MAX_DEVICES
from shardckpt.layout.tile_assignment import Iota, TileAssignment


@st.composite
def iotas(draw):
    dims = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=5)))
    return dims, tuple(draw(st.permutations(range(len(dims)))))


def expand(dims, perm):
    return np.arange(np.prod(dims)).reshape(dims).transpose(perm).reshape(-1)


@given(iotas())
def test_the_canonical_iota_expands_to_the_same_devices(iota):
    assert Iota.canonical(*iota).expand().tolist() == expand(*iota).tolist()


@given(iotas())
def test_the_iota_of_a_list_is_found_and_is_the_canonical_one(iota):
    assert Iota.find(expand(*iota)) == Iota.canonical(*iota)


@given(st.integers(1, 12).flatmap(lambda n: st.permutations(range(n))))
def test_an_iota_is_found_only_where_it_expands_to_the_list(ids):
    iota = Iota.find(np.array(ids))
    assert iota is None or iota.expand().tolist() == list(ids)


def test_a_list_that_is_no_iota_has_none():
    for ids in ([1, 0], [0, 2, 1], [0, 1, 3, 2], [0, 2], [5], [0, 1, 2, 3, 5, 4]):
        assert Iota.find(np.array(ids)) is None


@given(iotas())
def test_both_forms_are_equal_and_hash_alike(iota):
    n = int(np.prod(iota[0]))
    short, listed = TileAssignment((n,), Iota(*iota)), TileAssignment((n,), expand(*iota))
    assert short == listed
    assert hash(short) == hash(listed)
    assert short.to_hlo("auto") == listed.to_hlo("auto")


def test_other_dimensions_or_devices_are_not_equal():
    tiles = TileAssignment((4, 2))
    assert tiles != TileAssignment((2, 4))
    assert tiles != TileAssignment((4, 2), Iota((2, 4), (1, 0)))
    assert tiles != "[4,2]<=[8]"


@pytest.mark.parametrize(
    ("dims", "devices", "message"),
    [
        ((4, 0), None, "at least 1"),
        ((2, 2), [0, 1, 2], "3 device ids"),
        ((2, 2), [0, 1, 1, 2], "device id 1 stands"),
        ((2, 2), Iota((8,), (0,)), "4 tiles and an iota of 8"),
        ((2, 2), Iota((2, 2), (0, 0)), "not a permutation"),
        ((2, 2), Iota((2, 2), (0,)), "not a permutation"),
        ((MAX_DEVICES, 2), None, "at most 1048576"),
        ((10**15, 10**15), Iota((10**15, 10**15), (1, 0)), "at most 1048576"),
        ((1,) * 65, None, "65 dimensions"),
        ((4,), Iota((1,) * 63 + (2, 2), tuple(range(65))), "65 dimensions"),
    ],
)
def test_what_cannot_be_an_assignment_is_refused(dims, devices, message):
    with pytest.raises(ShardingError, match=message):
        TileAssignment(dims, devices)
