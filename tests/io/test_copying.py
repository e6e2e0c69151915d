"""Arrays are copied by several threads, part by part."""

import numpy as np
import pytest
from crc32c import crc32c
from hypothesis import given, settings
from hypothesis import strategies as st

from shardckpt.io import copying, extension
from shardckpt.io.copying import checksum, copy_all, copy_summed


@given(st.lists(st.lists(st.integers(0, 9), max_size=4), max_size=8), st.integers(8, 300))
@settings(max_examples=100, deadline=None)
def test_every_element_is_copied_whatever_the_shapes_and_the_parts_are(shapes, part_bytes):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copying, "_PART_BYTES", part_bytes)
        sources = [np.random.default_rng(0).random(shape).T for shape in shapes]
        targets = [np.zeros_like(source) for source in sources]
        copy_all([*zip(targets, sources, strict=True)])
    for target, source in zip(targets, sources, strict=True):
        np.testing.assert_array_equal(target, source)


@given(
    st.lists(st.lists(st.integers(0, 9), max_size=4), max_size=6),
    st.sampled_from(["float64", "int8", "bool", "complex128", "S3"]),
    st.booleans(),
    st.integers(16, 9_000),
)
@settings(max_examples=150, deadline=None)
def test_what_is_summed_while_it_is_copied_is_copied_and_has_the_checksum_of_its_elements(
    shapes, dtype, transposed, part_bytes
):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copying, "_PART_BYTES", part_bytes)
        patch.setattr(copying, "_LARGEST_PART", part_bytes)
        patch.setattr(copying, "_SUMMED_BYTES", 5)
        drawn = np.random.default_rng(0)
        sources = [drawn.integers(0, 100, shape).astype(dtype) for shape in shapes]
        sources = [source.T if transposed else source for source in sources]
        memory = np.full(sum(source.nbytes for source in sources) + 9, 7, np.uint8)
        targets, at = [], 0
        for source in sources:
            part = memory[at : (at := at + source.nbytes)]
            targets.append(part.view(source.dtype).reshape(source.shape))
        crcs = copy_summed([*zip(targets, sources, strict=True)])
    for target, source, crc in zip(targets, sources, crcs, strict=True):
        np.testing.assert_array_equal(target, source)
        assert crc == checksum(source) == crc32c(source.tobytes())
    assert (memory[at:] == 7).all()


@pytest.mark.parametrize("at", [0, 3, -1, (1 << 20) + (8 << 12)])
def test_a_source_that_changes_where_it_is_compared_again_has_no_checksum(at, monkeypatch):
    source = np.zeros(3 << 20, np.uint8)
    copy = copying._copy_summed

    def late(parts):
        copy(parts)
        source[at] += 1

    monkeypatch.setattr(copying, "_copy_summed", late)
    unchanged = extension.moving is None or at == -1
    (crc,) = copy_summed([(np.ones_like(source), source)])
    assert (crc is not None) == unchanged


@pytest.mark.parametrize(
    ("of", "changed"),
    [
        (lambda full: full[:, 0], np.s_[:, :]),  # each row is consecutive, all of them are not
        (lambda full: full.reshape(-1, 1 << 16), np.s_[:, 1 << 10 :]),
        (lambda full: full.reshape(-1, 1 << 12), np.s_[np.arange(3 << 11) % 16 > 0]),
    ],
)
def test_a_change_of_most_elements_while_they_are_copied_is_noticed(monkeypatch, of, changed):
    """Without the extension each part is summed before it is copied: a later change is of no
    concern."""
    source = of(np.zeros((3, 2, 4 << 20), np.uint16))
    copy = copying._copy_summed

    def late(parts):
        copy(parts)
        source[changed] += 1

    monkeypatch.setattr(copying, "_copy_summed", late)
    monkeypatch.setattr(copying, "cores", lambda: 1)  # no part changes between its sum and its copy
    target = np.ones_like(source)
    (crc,) = copy_summed([(target, source)])
    assert crc == (checksum(target) if extension.moving is None else None)


@pytest.mark.long
@pytest.mark.parametrize("place", [0, 1, 20])
def test_when_a_copy_fails_no_thread_copies_any_more(place):
    sources, targets = ([np.full(1 << 20, fill) for _ in range(30)] for fill in (1.0, 0.0))
    targets[place].flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        copy_all([*zip(targets, sources, strict=True)])
    before = [target.copy() for target in targets]
    for source in sources:
        source[:] = 2
    np.testing.assert_array_equal(before, targets)


def test_threads_draw_small_arrays_many_at_a_time(monkeypatch):
    monkeypatch.setattr(copying, "cores", lambda: 4)
    copied, copy = [], copying._copy
    monkeypatch.setattr(copying, "_copy", lambda pairs: (copied.append(len(pairs)), copy(pairs)))
    sources = np.arange(20_000 * 256, dtype=np.float32).reshape(20_000, 256)  # 20 MB
    targets = np.zeros_like(sources)
    copy_all([*zip(targets, sources, strict=True)])
    np.testing.assert_array_equal(targets, sources)
    assert sum(copied) == len(sources)
    assert len(copied) == -(-sources.nbytes // copying._PART_BYTES)
