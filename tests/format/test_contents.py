"""Contents of one checkpoint, merged from the contents of several processes."""

import numpy as np
import pytest

from shardckpt.errors import CommitError
from shardckpt.format.record import Contents
from shardckpt.format.structure import Structure, TensorRecord
from shardckpt.layout.dtypes import by_name
from shardckpt.plan.pieces import Piece
from shardckpt.state import flatten


def says(**metadata):
    return Contents(Structure(flatten({}, bool, id, repr).tree, {}), {}, metadata)


def test_metadata_is_what_one_process_or_several_alike_have_given():
    union = Contents.union(
        [([0], says(run="a", loss=0.5)), ([1, 2], says(run="a")), ([3], says(tag=1))]
    )
    assert union.metadata == {"run": "a", "loss": 0.5, "tag": 1}


def test_metadata_that_contradicts_itself_is_refused_with_the_processes_that_do():
    with pytest.raises(CommitError, match=r"'loss' differs between process 1 and processes 2-3"):
        Contents.union([([0], says()), ([1], says(loss=0.5)), ([2, 3], says(loss=0.25))])


@pytest.mark.parametrize("other", [1.0, True])
def test_metadata_of_another_type_is_a_contradiction_although_python_has_the_values_equal(other):
    with pytest.raises(CommitError, match=r"'n' differs between process 0 and process 1"):
        Contents.union([([0], says(n=[{"deep": 1}])), ([1], says(n=[{"deep": other}]))])
    Contents.union([([0], says(n={"a": 1, "b": 2})), ([1], says(n={"b": 2, "a": 1}))])


def test_other_shapes_are_told_as_shapes_not_as_other_elements():
    def has(n):
        record = TensorRecord("w", (n,), by_name("float32"), None, (Piece("w", (0,), (n,), (n,)),))
        state = {"w": np.zeros(n)}
        structure = Structure(
            flatten(state, lambda leaf: isinstance(leaf, np.ndarray), id, lambda _: None).tree,
            {"w": record},
        )
        return Contents(structure, {"w": bytes(4 * n)}, {})

    with pytest.raises(CommitError, match=r"'w'.*\(4,\).*\(5,\)"):
        Contents.union([([0], has(4)), ([1], has(5))])
