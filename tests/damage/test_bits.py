"""No flipped bit goes unnoticed, whichever file it is in: refused or harmless, reported, located,
and the rest restored."""

import flip_bits
import pytest

import shardckpt
from shardckpt import errors

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("layout", "compression", "number"),
    [("packed", None, 1), ("packed", None, 3), ("zarr", "zstd", 3)],
)
def test_no_flipped_bit_goes_unnoticed(hosts, tmp_path, layout, compression, number):
    tally = flip_bits.run(layout, compression, 75, 1, tmp_path, hosts if number > 1 else None)
    assert tally.failures == []
    assert tally.unreported == []
    assert {counts.total() > 0 for counts in tally.verdicts.values()} == {True}


def test_no_bit_of_the_envelope_goes_unnoticed(tmp_path):
    """The bytes before the record, which its digest does not cover."""
    shardckpt.save(tmp_path / "c", {"a": 1})
    record = tmp_path / "c" / "checkpoint.json"
    data = record.read_bytes()
    head = data.index(b'"record"')
    for bit in (*range(8 * head + 64), *range(8 * len(data) - 16, 8 * len(data))):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        record.write_bytes(flipped)
        try:
            assert not shardckpt.open(tmp_path / "c").verify().ok
        except errors.FormatError:
            continue
    record.write_bytes(data)
    assert shardckpt.open(tmp_path / "c").verify().ok
