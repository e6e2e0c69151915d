"""An attempt that claims what is not so is refused by who commits it, by name, in bounded memory;
and stays as it is."""

import base64
import copy

import flip_bits
import pytest
from forgery import MIB, at_most
from mutations import deep

import shardckpt
from shardckpt import errors


def refused(forgery):
    """Reason for not committing it."""
    forgery.unpublish()
    with at_most(512 * MIB):
        (outcome,) = shardckpt.commit(forgery.url)
    assert outcome.state in ("refused", "incomplete"), outcome
    with pytest.raises(errors.UncommittedError):
        shardckpt.open(forgery.url)
    forgery.write_raw(b"")
    return outcome.reason


def test_it_is_committed_as_it_was(of_three_hosts):
    """Else that the others are refused would mean little."""
    forgery = of_three_hosts()
    forgery.unpublish()
    assert [outcome.state for outcome in shardckpt.commit(forgery.url)] == ["committed"]
    assert flip_bits.same(flip_bits.make_state(0, 3), shardckpt.restore(forgery.url))
    assert shardckpt.open(forgery.url).verify().ok


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"hosts": 2**62}, "'hosts' is 4611686018427387904"),
        ({"hosts": 2**20}, "of 1048576"),
        ({"hosts": 0}, "'hosts' is 0"),
        ({"host": 2}, "is the record of host 2"),
        ({"layout": "zarr"}, "disagree on layout"),
        ({"compression": "zstd"}, "disagree on compression"),
        ({"attempt": "20000101T000000-00000000"}, "a wrong file"),
        ({"lanes": []}, "its record names no index"),
        ({"lanes": ["hosts/00001/0"]}, "its record names hosts/00001/0"),
        ({"lanes": ["hosts/00007/0"]}, "its record names hosts/00007/0"),
        ({"chunks": 2**62}, "its record says 4611686018427387904"),
        ({"stored_bytes": 2**62}, "its record says 4611686018427387904"),
    ],
)
def test_a_host_record_that_lies(of_three_hosts, change, why):
    forgery = of_three_hosts()
    forgery.write(hosts={0: {**forgery.hosts[0], **change}})
    reason = refused(forgery)
    assert why in reason
    assert len(reason) < 1000


def with_tensor(contents, name, **entry):
    """A host's contents, with another entry for a tensor."""
    changed = copy.deepcopy(contents)
    tensors = changed["structure"]["tensors"]
    tensors[name] = {
        key: value for key, value in {**tensors[name], **entry}.items() if value is not None
    }
    return changed


@pytest.mark.parametrize("hosts", [[0, 1, 2], [1]], ids=["all", "one"])
@pytest.mark.parametrize(
    "entry",
    [
        {"shape": [2**30, 2**30], "chunks": [1, 1]},
        {"shape": [2**61, 4], "chunks": [1, 1], "dtype": "complex128"},
        {"shape": [1] * 33, "chunks": [1] * 33},
        {"chunks": None, "pieces": [{"start": [0, 0], "shape": [64, 48], "chunks": [1, 1]}] * 2},
        {"chunks": None, "pieces": []},
        {"chunks": None, "pieces": [], "partial": True},
        {"partial": 1, "chunks": [2**30, 2**30]},
        {"dtype": "x" * 100_000},
        {"sharding": 2**40},
    ],
)
def test_a_tensor_that_cannot_be_or_that_nobody_wrote(of_three_hosts, hosts, entry):
    forgery = of_three_hosts()
    forgery.write(contents={n: with_tensor(forgery.contents[n], "even", **entry) for n in hosts})
    reason = refused(forgery)
    assert "'even'" in reason
    assert len(reason) < 1000


@pytest.mark.parametrize(
    ("name", "data", "why"),
    [
        ("scalar", base64.b64encode(bytes(9)).decode(), "9 bytes of elements of 'scalar'"),
        ("scalar", "@@@@", "not base64"),
        ("scalar", 7, "not base64"),
        (
            "scalar",
            base64.b64encode(bytes(8)).decode(),
            "'scalar': this small plain tensor has other elements",
        ),
        ("even", base64.b64encode(bytes(64 * 48 * 4)).decode(), "more than one host wrote"),
        ("x" * 100_000, "", "which no tensor of that name has"),
    ],
)
def test_elements_of_small_tensors_that_are_not_theirs(of_three_hosts, name, data, why):
    forgery = of_three_hosts()
    changed = copy.deepcopy(forgery.contents[1])
    changed["small"][name] = data
    forgery.write(contents={1: changed})
    reason = refused(forgery)
    assert why in reason
    assert len(reason) < 1500


def test_a_small_tensor_with_a_chunk_that_would_have_to_be_filled_up(of_three_hosts):
    """A few bytes of elements, and a terabyte of zeros behind them."""
    forgery = of_three_hosts()
    forgery.write(
        contents={
            n: with_tensor(forgery.contents[n], "dtypes/int8", chunks=[2**20, 2**20])
            for n in range(3)
        }
    )
    assert "chunks of 'dtypes/int8' are larger than the tensor" in refused(forgery)


@pytest.mark.parametrize(
    "tree",
    [
        deep(201, "list"),
        deep(201, "dict"),
        deep(450, "list"),
        ["$tensor"] * 1000,
        {"$leaf": ["os.system", "true"]},
    ],
)
def test_a_tree_that_cannot_be(of_three_hosts, tree):
    forgery = of_three_hosts()
    changed = copy.deepcopy(forgery.contents)
    for contents in changed:
        contents["structure"]["tree"] = tree
    forgery.write(contents=dict(enumerate(changed)))
    assert len(refused(forgery)) < 1000
