"""Arrays are copied by several threads, part by part."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardckpt.io import copying
from shardckpt.io.copying import copy_all


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
