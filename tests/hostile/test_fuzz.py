"""Records, tables, values and contents with anything in them are refused or read right.

No error is another than ours, memory is bounded, and nothing outside of the checkpoint is opened.
"""

import shutil
from itertools import count
from random import Random

import flip_bits
import pytest
from forgery import LONGEST_MESSAGE, MIB, TENSORS, Forgery, at_most, attempted, use_in_every_way
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mutations import mutated, mutated_table
from one_of_several import OneOfSeveral

import shardckpt
from shardckpt import PerProcess

FUZZ = settings(
    max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), database=None
)
SEEDS = st.integers(0, 2**64 - 1)
MADE = st.sampled_from([("packed", 1), ("zarr", 1), ("packed", 3), ("zarr", 3)])
THREE = flip_bits.make_state(0, 3)
TENSORS_OF_THREE = {
    "even": THREE["even"],
    "scalar": THREE["scalar"],
    "ranks/strided": THREE["ranks"]["strided"],
    "tied/first": THREE["tied"]["first"],
}


def tensors_of(made):
    return TENSORS if made[1] == 1 else TENSORS_OF_THREE


def used(forgeries, forgery):
    """The state restored from a forgery, or None."""
    with at_most(1024 * MIB):
        restored = use_in_every_way(forgery.url)
    assert not forgeries[1].opened()
    return restored


@pytest.mark.long
@given(seed=SEEDS, which=MADE)
@FUZZ
def test_a_commit_record_with_anything_in_it(forgeries, seed, which):
    forgery = forgeries[0][which]
    commit = mutated(Random(seed), forgery.commit)
    forgery.write(commit=commit)
    if used(forgeries, forgery) is None:
        return
    # A tensor that the record describes as the original did is that tensor.
    for name, array in tensors_of(which).items():
        if commit["tensors"].get(name) == forgery.commit["tensors"][name]:
            assert flip_bits.same(array, shardckpt.open(forgery.url).read(name))


@pytest.mark.long
@given(seed=SEEDS, which=MADE)
@FUZZ
def test_a_host_record_with_anything_in_it(forgeries, seed, which):
    forgery, random = forgeries[0][which], Random(seed)
    n = random.randrange(which[1])
    forgery.write(hosts={n: mutated(random, forgery.hosts[n])}, of_all=random.random() < 0.5)
    assert_right(used(forgeries, forgery), which)


@pytest.mark.long
@given(seed=SEEDS, which=MADE)
@FUZZ
def test_a_chunk_table_with_anything_in_it(forgeries, seed, which):
    forgery, random = forgeries[0][which], Random(seed)
    if random.random() < 0.5:
        forgery.write(table=mutated_table(random, forgery.table))
    else:
        n = random.randrange(which[1])
        forgery.write(tables={n: mutated_table(random, forgery.tables[n])}, of_all=False)
    assert_right(used(forgeries, forgery), which)


def assert_right(restored, which):
    """The commit record is whole: whatever other parts say, what is restored has the names and
    shapes that it says."""
    if restored is not None:
        name = "w" if which[1] == 1 else "even"
        assert restored[name].shape == tensors_of(which)[name].shape


@given(seed=SEEDS, which=MADE)
@FUZZ
def test_values_with_anything_in_them(forgeries, seed, which):
    """They take nothing else along: all tensors are restored, and the values of other processes."""
    forgery, random = forgeries[0][which], Random(seed)
    n = random.randrange(which[1])
    forgery.write(values={n: mutated(random, forgery.values[n])})
    with at_most(512 * MIB):
        attempted(lambda: shardckpt.restore(forgery.url, only="own"))
        restored = shardckpt.restore(forgery.url, only=lambda name: name != "own")
    assert not forgeries[1].opened()
    for name, array in tensors_of(which).items():
        node = restored
        for key in name.split("/"):
            node = node[int(key) if isinstance(node, tuple | list) else key]
        assert flip_bits.same(array, node)
    if which[1] == 3:
        other = (n + 1) % 3
        like, coordinator = {"own": PerProcess(None)}, OneOfSeveral(other, 3)
        restored = shardckpt.restore(forgery.url, like, only="own", coordinator=coordinator)
        assert flip_bits.same(THREE["own"][other], restored["own"].value)


NUMBERS = count()


@pytest.mark.long
@given(seed=SEEDS, which=MADE)
@settings(FUZZ, max_examples=25)  # each commits
def test_an_attempt_with_anything_in_it_is_committed_or_refused(
    forgeries, tmp_path_factory, seed, which
):
    """A committer of attempts by others believes as little as a reader."""
    random = Random(seed)
    place = forgeries[0][which].url.with_name(f"attempt{next(NUMBERS)}")
    forgeries[0][which].write()
    shutil.copytree(forgeries[0][which].url, place)
    forgery = Forgery(place)
    n = random.randrange(which[1])
    part = random.choice(["contents", "contents", "record", "table"])
    if part == "contents":
        forgery.write(contents={n: mutated(random, forgery.contents[n])})
    elif part == "record":
        forgery.write(hosts={n: mutated(random, forgery.hosts[n])})
    else:
        forgery.write(tables={n: mutated_table(random, forgery.tables[n])})
    forgery.unpublish()
    with at_most(1024 * MIB):
        outcomes = attempted(lambda: shardckpt.commit(place))
        for outcome in outcomes or []:
            assert outcome.state in ("committed", "refused", "incomplete", "overtaken")
            assert len(outcome.reason) <= LONGEST_MESSAGE
        use_in_every_way(place)
    assert not forgeries[1].opened()
    shutil.rmtree(place)
