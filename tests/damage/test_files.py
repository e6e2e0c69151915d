"""A file of any kind that is missing, cut off or too long is noticed; of tensors' data it is known
which part is lost."""

import os

import pytest
from flip_bits import file_kinds, same
from noticed import CHUNKS, KINDS, assert_noticed, damage_of

import shardckpt


@pytest.mark.long
@pytest.mark.parametrize(("layout", "number", "kind"), KINDS)
def test_a_missing_file_of_any_kind_is_noticed(checkpoint_of, layout, number, kind):
    checkpoint, truth = checkpoint_of(layout, number)
    path = file_kinds(checkpoint, layout)[kind][-1]
    path.unlink()
    assert_noticed(checkpoint, path, kind, truth)


@pytest.mark.long
@pytest.mark.parametrize(("layout", "number", "kind"), KINDS)
def test_a_truncated_file_of_any_kind_is_noticed(checkpoint_of, layout, number, kind):
    checkpoint, truth = checkpoint_of(layout, number)
    path = file_kinds(checkpoint, layout)[kind][0]
    size = path.stat().st_size
    # The last byte of a record is a newline that nobody needs.
    for left in (size - 2, size // 2, 0):
        os.truncate(path, left)
        assert_noticed(checkpoint, path, kind, truth)


@pytest.mark.long
@pytest.mark.parametrize(
    ("layout", "number", "kind"),
    [k for k in KINDS if k[2] not in {"lane: node", "merged index: nodes"}],
)
def test_bytes_after_the_end_of_a_file_are_noticed(checkpoint_of, layout, number, kind):
    """But behind an index's node, to which the index points with its length; nobody reads what
    follows."""
    checkpoint, truth = checkpoint_of(layout, number)
    path = file_kinds(checkpoint, layout)[kind][0]
    with path.open("ab") as file:
        file.write(b"x")
    if kind in {CHUNKS[layout], "small tensors"}:  # our readers go by the table, and lack nothing
        assert same(truth, shardckpt.restore(checkpoint))
        assert str(path.relative_to(checkpoint)) in damage_of(checkpoint)
    else:
        assert_noticed(checkpoint, path, kind, truth)
