"""A recorded fingerprint proves the tensors that several processes have read."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import shardckpt
from shardckpt import SaveOptions, errors
from shardckpt.layout.box import Box
from shardckpt.views.model_view import ModelView
from shardckpt.views.placeholders import Recorder
from shardckpt.views.proof import ReadProof

SHAPE = (512, 96)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    path = tmp_path_factory.mktemp("run") / "c"
    rng = np.random.default_rng(0)
    state = {
        "w": torch.from_numpy(rng.standard_normal(SHAPE, np.float32)),
        "b": torch.arange(7),
        "h": torch.ones(3, 5).bfloat16(),
    }
    shardckpt.save(path, state, options=SaveOptions(fingerprint=True))
    return path


def rank(place, load, **options):
    """The proof of a process that loads a model."""
    view = ModelView(place, **options)
    proof = ReadProof(view)
    Recorder(view, proof.add).run(lambda weights: load(dict(weights)))
    return proof


def copied(*parts):
    for part in parts:
        torch.zeros(part.shape, dtype=part.dtype).copy_(part)


def test_ranks_that_together_read_all_prove_all(place):
    rows = [
        rank(place, lambda t, n=n: copied(t["w"].chunk(4)[n], t["b"], t["h"].t()[n]))
        for n in range(4)
    ]
    assert rows[0].check([one.parts for one in rows]) == ["b", "w"]  # of "h" a column is missing
    columns = [
        rank(place, lambda t, n=n: copied(t["w"][:, n * 24 : (n + 1) * 24], t["h"]))
        for n in range(4)
    ]
    assert sorted(columns[0].check([one.parts for one in columns])) == ["h", "w"]
    assert rows[0].check([rows[0].parts]) == ["b"]
    assert rows[0].check([rows[0].parts, columns[1].parts]) == ["b"], (
        "boxes that overlap prove nothing"
    )


def test_a_bit_that_differs_is_named(place):
    proofs = [rank(place, lambda t, n=n: copied(t["w"].chunk(2)[n], t["b"])) for n in range(2)]
    elements = np.asarray(shardckpt.open(place)["w"][:256]).copy()
    elements[7, 9] = -elements[7, 9]
    flipped = ReadProof(ModelView(place))
    flipped.add(
        [array.name for array in ModelView(place).arrays()].index("w"),
        Box((0, 0), (256, 96)),
        elements,
    )
    with pytest.raises(errors.CorruptionError, match=r"do not match the saved fingerprint.*\bw\b"):
        proofs[0].check([flipped.parts, proofs[1].parts])
    with pytest.raises(
        errors.CorruptionError, match=r"two processes have different elements of w\["
    ):
        proofs[0].check([flipped.parts, proofs[0].parts])


def test_what_the_view_changes_is_not_proved(place):
    everything = rank(
        place, lambda t: copied(*t.values()), dtype={"h": "float32"}, rename="s/^b$/bias/"
    )
    assert everything.check([everything.parts]) == ["b", "w"]
    with_none = ModelView(place)
    assert ReadProof(with_none).check([]) == []
