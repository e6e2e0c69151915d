"""`layout.records.record`."""

from dataclasses import replace

import pytest

from shardckpt.layout.records import record


@record
class Pair:
    one: int
    other: tuple[int, ...] = ()


@record
class Triple(Pair):
    third: str = ""


def test_records_with_equal_fields_are_equal_and_one_key():
    assert Pair(1, (2,)) == Pair(1, (2,))
    assert Pair(1, (2,)) != Pair(1, (3,))
    assert Pair(1) != Triple(1)
    assert len({Pair(1, (2,)), Pair(1, (2,)), Triple(1, (2,))}) == 2


def test_a_changed_copy_leaves_the_record_as_it_is():
    pair = Triple(1, (2,), "c")
    assert replace(pair, one=3) == Triple(3, (2,), "c")
    assert pair.one == 1


def test_a_record_takes_no_other_attribute():
    with pytest.raises(AttributeError):
        Pair(1).third = 2
