"""OpShardings: the text in and out, what is the same, what can be saved. XLA itself is asked in
test_sharding_{xla,jax}.py."""

import json
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardckpt.errors import FormatError, ShardingError
from shardckpt.layout.mesh import MAX_DEVICES
from shardckpt.layout.op_sharding import Kind, OpSharding

SUBGROUPS = [Kind.REPLICATED, Kind.MANUAL, Kind.UNREDUCED]


@st.composite
def tiled(draw, subgroups=SUBGROUPS):
    dims = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    kinds = draw(st.lists(st.sampled_from(subgroups), max_size=2))
    dims += draw(st.lists(st.integers(1, 3), min_size=len(kinds), max_size=len(kinds)))
    ids = draw(
        st.one_of(
            st.none(),
            st.permutations(range(100, 100 + int(np.prod(dims)))),
            st.permutations(range(int(np.prod(dims)))),
        )
    )
    return OpSharding.tiled(dims, ids, subgroups=kinds)


def shardings():
    plain = [
        OpSharding(kind) for kind in (Kind.REPLICATED, Kind.MANUAL, Kind.UNKNOWN, Kind.UNREDUCED)
    ]
    return st.one_of(
        st.sampled_from(plain), st.integers(0, 10**18 - 1).map(OpSharding.maximal), tiled()
    )


def holdings(sharding, shape):
    """The box of every device, as a dictionary: the meaning of a sharding."""
    tiles = sharding.device_boxes(shape)
    rows = zip(
        tiles.device_ids.tolist(),
        tiles.boxes.start.tolist(),
        tiles.boxes.stop.tolist(),
        strict=True,
    )
    return {device: (start, stop) for device, start, stop in rows}


# Text


@given(shardings(), st.sampled_from(["auto", "listed"]))
def test_parsing_what_was_printed_gives_the_same_sharding(sharding, form):
    assert OpSharding.parse(sharding.to_hlo(form)) == sharding


@given(shardings())
def test_printing_what_was_parsed_gives_the_same_text(sharding):
    for form in ("auto", "listed"):
        text = sharding.to_hlo(form)
        assert OpSharding.parse(text).to_hlo(form) == text


@pytest.mark.parametrize(
    ("iota", "listed"),
    [
        ("{devices=[4,2]<=[8]}", "{devices=[4,2]0,1,2,3,4,5,6,7}"),
        ("{devices=[4,2]<=[2,4]T(1,0)}", "{devices=[4,2]0,4,1,5,2,6,3,7}"),
        (
            "{devices=[4,1,2]<=[8] last_tile_dim_replicate}",
            "{devices=[4,1,2]0,1,2,3,4,5,6,7 last_tile_dims={replicated}}",
        ),
        ("{devices=[2,2,2]<=[2,2,2]T(2,1,0)}", "{devices=[2,2,2]0,4,2,6,1,5,3,7}"),
        ("{devices=[1]<=[1]}", "{devices=[1]0}"),
        (
            "{devices=[2,2]<=[4] last_tile_dims={manual}}",
            "{devices=[2,2]0,1,2,3 last_tile_dims={manual}}",
        ),
    ],
)
def test_iota_and_listed_forms_are_one_sharding(iota, listed):
    a, b = OpSharding.parse(iota), OpSharding.parse(listed)
    assert a == b
    assert hash(a) == hash(b)
    assert a.equivalent(b)
    assert b.to_hlo() == iota == a.to_hlo("iota")
    assert "<=" not in a.to_hlo("listed")


def test_devices_without_an_iota_cannot_be_printed_as_one():
    sharding = OpSharding.tiled((2, 2), [3, 1, 2, 0])
    assert sharding.to_hlo() == "{devices=[2,2]3,1,2,0}"
    with pytest.raises(ShardingError, match='no iota form; write them with form="listed"'):
        sharding.to_hlo("iota")


@pytest.mark.parametrize(
    ("text", "kind", "dims", "devices", "subgroups"),
    [
        ("{replicated}", Kind.REPLICATED, None, None, ()),
        ("{maximal device=3}", Kind.MAXIMAL, (1,), [3], ()),
        ("{manual}", Kind.MANUAL, None, None, ()),
        ("{unknown}", Kind.UNKNOWN, None, None, ()),
        ("{unreduced}", Kind.UNREDUCED, None, None, ()),
        (
            " {\tdevices = [ 2 ,1, 2 ] 3 , 2,\n1,0   last_tile_dim_replicate } ",
            Kind.TILED,
            (2, 1, 2),
            [3, 2, 1, 0],
            (Kind.REPLICATED,),
        ),
        (
            "{devices=[1,2,2]<=[4] last_tile_dims={manual, replicated}}",
            Kind.TILED,
            (1, 2, 2),
            [0, 1, 2, 3],
            (Kind.MANUAL, Kind.REPLICATED),
        ),
    ],
)
def test_every_type_of_xla_is_read(text, kind, dims, devices, subgroups):
    sharding = OpSharding.parse(text)
    assert (sharding.kind, sharding.subgroups) == (kind, subgroups)
    assert (None if sharding.tiles is None else sharding.tiles.dims) == dims
    assert (None if sharding.tiles is None else sharding.tiles.devices.tolist()) == devices


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected '{'"),
        ("replicated", "expected '{'"),
        ("{replicated", "expected a word"),
        ("{replicated} {replicated}", "nothing may follow"),
        ("{replicated manual}", "found 'manual' where '}'"),
        ("{{replicated},{manual}}", "tuple of shardings"),
        ("{{devices=[2]0,1}, {replicated}}", "tuple of shardings"),
        ("{}", "tuple of shardings"),
        ("{maximal}", "expected a word"),
        ("{maximal device=1,2}", "one device, found 2"),
        ("{maximal device=-1}", "expected integers"),
        ("{tiled}", "found 'tiled'"),
        ("{devices=[]0}", "expected integers"),
        ("{devices=[2]0,1,}", "expected a word"),
        ("{devices=[2]0}", "1 device ids for shape \\(2,\\)"),
        ("{devices=[2]0,0}", "device id 0 stands"),
        ("{devices=[0,2]<=[0]}", "at least 1"),
        ("{devices=[4,2]<=[4]}", "8 tiles and an iota of 4"),
        ("{devices=[4,2]<=[4,2]}", "needs its order"),
        ("{devices=[8]<=[4,2]T(0,0)}", "not a permutation"),
        ("{devices=[8]<=[4,2]T(1,0,2)}", "not a permutation"),
        (
            "{devices=[2]0,1 last_tile_dims={unknown}}",
            "found 'unknown' where replicated, manual or unreduced",
        ),
        ("{devices=[2]0,1 last_tile_dims={manual manual}}", "expected ','"),
        ("{devices=[2]0,1 last_tile_dims={manual,manual}}", "2 subgroups for the 1 dimensions"),
        ("{devices=[2]0,1 last_tile_dim_replicate last_tile_dim_replicate}", "where '}'"),
        ("{devices=[2]0,1 shard_as 1}", "'shard_as': a constraint between ops"),
        ('{replicated metadata={op_name="x"}}', "'metadata': .* remove it"),
        ("{mesh['a'=8], [{'a'}]}", "'mesh': the named form"),
        ("{devices=[2]0,1234567890123456789}", "expected"),
        (b"{replicated}", "found bytes"),
        (None, "found NoneType"),
    ],
)
def test_what_is_no_sharding_is_refused_with_the_reason(text, message):
    with pytest.raises(ShardingError, match=message):
        OpSharding.parse(text)


@pytest.mark.parametrize(
    "text",
    [
        "{devices=[1000000000,100000000]<=[100000000000000000]}",
        f"{{devices=[{MAX_DEVICES + 1}]<=[{MAX_DEVICES + 1}]}}",
        "{devices=[" + "9" * 18 + "," + "9" * 18 + "]<=[" + "9" * 18 + "," + "9" * 18 + "]T(1,0)}",
        "{devices=[2]0,1 last_tile_dims={" + ",".join(["manual"] * 100_000) + "}}",
        "{devices=[" + "1," * 100_000 + "1]<=[1]}",
        "{devices=[8]<=[" + "1," * 100_000 + "8]T(" + "0," * 100_000 + "1)}",
        "{" * 1_000_000,
        "{devices=[4]" + " " * 1_000_000 + "x",
        "{devices=[4]" + "0 ," * 300_000 + "x}",
        "{" + "a" * 1_000_000 + "}",
        " " * (1 << 24) + " {replicated}",
    ],
    ids=range(11),
)
def test_a_text_that_asks_for_the_moon_is_refused_in_few_words(text):
    with pytest.raises(ShardingError) as caught:
        OpSharding.parse(text)
    assert len(str(caught.value)) < 500


@given(
    st.one_of(
        st.text("{}[](),<=T0123456789 \nabcdeilmnprstuv_", max_size=60),
        st.tuples(tiled().map(str), st.integers(0, 40), st.text("{}[](),=<T09 x", max_size=3)).map(
            lambda t: t[0][: t[1]] + t[2] + t[0][t[1] + 1 :]
        ),
    )
)
def test_garbage_is_a_sharding_error_or_a_sharding(text):
    try:
        sharding = OpSharding.parse(text)
    except ShardingError:
        return
    assert OpSharding.parse(sharding.to_hlo()) == sharding


def test_a_hundred_thousand_devices_go_through_the_listed_form():
    ids = np.random.default_rng(0).permutation(100_000)
    sharding = OpSharding.tiled((1000, 50, 2), ids, subgroups=(Kind.REPLICATED,))
    assert OpSharding.parse(sharding.to_hlo("listed")) == sharding


def test_the_number_of_devices_is_checked_and_given_to_replicated():
    assert OpSharding.parse("{replicated}", num_devices=8).num_devices == 8
    assert OpSharding.parse("{devices=[4,2]<=[8]}", num_devices=8).num_devices == 8
    with pytest.raises(ShardingError, match="the text has 8 devices, but num_devices=16"):
        OpSharding.parse("{devices=[4,2]<=[8]}", num_devices=16)


# Construction


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: OpSharding(Kind.TILED), "needs a tile assignment"),
        (lambda: OpSharding(Kind.MAXIMAL), "exactly one device"),
        (lambda: OpSharding(Kind.MANUAL, OpSharding.tiled((2,)).tiles), "manual has no devices"),
        (lambda: OpSharding(Kind.REPLICATED, OpSharding.tiled((2, 2)).tiles), "flat list"),
        (lambda: OpSharding(Kind.REPLICATED, None, (Kind.MANUAL,)), "replicated has no subgroups"),
        (lambda: OpSharding.tiled((2, 2), subgroups=(Kind.UNKNOWN,)), "cannot be unknown"),
        (lambda: OpSharding.tiled((2, 2), subgroups=["other"]), "'other' is not a kind"),
        (lambda: OpSharding.tiled((2, 2), subgroups=[3]), "3 is not a kind"),
        (lambda: OpSharding("nonsense"), "'nonsense' is not a kind"),
        (lambda: OpSharding.replicated(True), "expected integers, found True"),
        (lambda: OpSharding.replicated(8).device_boxes((4,), [0.5]), "integers, found .*float64"),
        (lambda: OpSharding.replicated(8).device_boxes((4,), ["a"]), "integers, found .*<U1"),
        (lambda: OpSharding.replicated(8).device_boxes((4,), [[0], [1, 2]]), "integers, found"),
        (
            lambda: OpSharding.tiled((2,), subgroups=(Kind.MANUAL, Kind.MANUAL)),
            "2 subgroups for the 1 dimensions",
        ),
        (lambda: OpSharding.replicated(0), "at least 1"),
        (lambda: OpSharding.replicated([]), "at least 1"),
        (lambda: OpSharding.maximal(-1), "negative"),
    ],
)
def test_fields_that_contradict_each_other_are_refused(make, message):
    with pytest.raises(ShardingError, match=message):
        make()


def test_positions_are_replaced_by_the_ids_of_a_device_list():
    ids = [2048, 7, 2049, 6]
    assert OpSharding.parse("{devices=[2,2]<=[2,2]T(1,0)}").relabel(ids) == OpSharding.tiled(
        (2, 2), [2048, 2049, 7, 6]
    )
    assert OpSharding.parse("{replicated}").relabel(ids) == OpSharding.replicated(
        [6, 7, 2048, 2049]
    )
    assert OpSharding.parse("{replicated}", 2).relabel(ids) == OpSharding.replicated([7, 2048])
    assert OpSharding.parse("{maximal device=1}").relabel(ids) == OpSharding.maximal(7)
    assert OpSharding.parse("{manual}").relabel(ids).kind is Kind.MANUAL
    with pytest.raises(ShardingError, match="names device 4, and the device list has 4"):
        OpSharding.parse("{maximal device=4}").relabel(ids)


# Sameness


@given(tiled(subgroups=[Kind.REPLICATED]), st.data())
def test_the_canonical_form_leaves_every_device_what_it_had(sharding, data):
    ndim = len(sharding.data_dims)
    shape = data.draw(st.lists(st.integers(0, 7), min_size=ndim, max_size=ndim))
    canonical = sharding.canonical()
    assert canonical.canonical() == canonical
    assert canonical.equivalent(sharding)
    assert holdings(canonical, shape) == holdings(sharding, shape)


@given(tiled(subgroups=[Kind.REPLICATED]), st.data())
def test_shardings_are_equivalent_exactly_when_devices_hold_the_same(sharding, data):
    """Of a tensor with more elements than tiles in each dimension, so that no two tiles are the
    same box."""
    ids = sharding.tiles.devices.copy()
    i, j = data.draw(st.integers(0, len(ids) - 1)), data.draw(st.integers(0, len(ids) - 1))
    ids[[i, j]] = ids[[j, i]]
    other = OpSharding.tiled(sharding.tiles.dims, ids, subgroups=sharding.subgroups)
    shape = [4] * len(sharding.data_dims)
    assert sharding.equivalent(other) == (holdings(sharding, shape) == holdings(other, shape))


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        (
            "{devices=[2,2,2]7,6,5,4,3,2,1,0 last_tile_dim_replicate}",
            "{devices=[2,2,2]6,7,4,5,2,3,0,1 last_tile_dim_replicate}",
            True,
        ),
        ("{devices=[8,1]<=[8] last_tile_dim_replicate}", "{devices=[8]<=[8]}", True),
        ("{devices=[1,8]<=[8] last_tile_dim_replicate}", "{replicated}", True),
        ("{devices=[1,1]3}", "{maximal device=3}", True),
        (
            "{devices=[2,2]<=[4] last_tile_dims={manual}}",
            "{devices=[2,2]<=[4] last_tile_dims={replicated}}",
            False,
        ),
        (
            "{devices=[2,2]0,1,3,2 last_tile_dims={manual}}",
            "{devices=[2,2]<=[4] last_tile_dims={manual}}",
            False,
        ),
        ("{devices=[1,4]<=[4] last_tile_dims={manual}}", "{manual}", True),
        ("{devices=[4,2]<=[8]}", "{devices=[2,4]<=[8]}", False),
        ("{devices=[4,2]<=[8]}", "{devices=[4,2]<=[2,4]T(1,0)}", False),
        ("{devices=[4,2]<=[8]}", "{devices=[4,2,1]<=[8]}", False),
        ("{maximal device=3}", "{maximal device=2}", False),
        ("{maximal device=0}", "{replicated}", False),
        ("{manual}", "{unknown}", False),
        ("{unknown}", "{unknown}", True),
        ("{replicated}", "{manual}", False),
    ],
)
def test_equivalence_of_texts(a, b, same):
    assert OpSharding.parse(a).equivalent(OpSharding.parse(b)) is same
    assert OpSharding.parse(b).equivalent(OpSharding.parse(a)) is same


def test_one_device_alone_is_maximal_and_replicated_at_once():
    assert OpSharding.replicated([5]).equivalent(OpSharding.maximal(5))
    assert not OpSharding.replicated([5]).equivalent(OpSharding.replicated([5, 6]))


# Boxes


@given(tiled(subgroups=[Kind.REPLICATED]), st.data())
def test_the_boxes_of_every_replica_tile_the_tensor_exactly_once(sharding, data):
    ndim = len(sharding.data_dims)
    shape = tuple(data.draw(st.lists(st.integers(0, 7), min_size=ndim, max_size=ndim)))
    tiles = sharding.device_boxes(shape)
    assert sorted(sharding.tiles.devices.tolist()) == tiles.device_ids.tolist()
    assert (tiles.tile, tiles.parts) == (sharding.tile(shape), sharding.parts(ndim))
    for replica in range(len(tiles.device_ids) // int(np.prod(tiles.parts))):
        painted = np.zeros(shape, int)
        for i in np.flatnonzero(tiles.replica_id == replica).tolist():
            painted[tiles.boxes[i].slices] += 1
        assert (painted == 1).all()


def test_replicas_are_numbered_by_device_id_in_their_group():
    tiles = OpSharding.parse(
        "{devices=[2,2,2]7,6,5,4,3,2,1,0 last_tile_dim_replicate}"
    ).device_boxes((4, 4))
    assert tiles.replica_id.tolist() == [0, 1] * 4
    assert OpSharding.replicated([30, 10, 20]).device_boxes((4,)).replica_id.tolist() == [0, 1, 2]


def test_replication_groups_are_the_devices_of_every_tile():
    assert OpSharding.parse(
        "{devices=[2,1,2]3,1,2,0 last_tile_dim_replicate}"
    ).replication_groups.tolist() == [[1, 3], [0, 2]]
    assert OpSharding.tiled((2, 2)).replication_groups.tolist() == [[0], [1], [2], [3]]
    assert OpSharding.replicated(3).replication_groups.tolist() == [[0, 1, 2]]
    assert OpSharding.maximal(7).replication_groups.tolist() == [[7]]


def test_maximal_is_the_whole_tensor_on_one_device():
    tiles = OpSharding.maximal(3).device_boxes((10, 7))
    assert tiles.device_ids.tolist() == [3]
    assert tiles.boxes[0].shape == tiles.tile == (10, 7)
    assert OpSharding.maximal(3).num_devices == 1


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{manual}", "has no boxes. It is manual: .* leave the region first"),
        ("{unknown}", "It is unknown: .* compile first"),
        ("{unreduced}", "It is unreduced: .* reduce it first"),
        ("{devices=[2,2]<=[4] last_tile_dims={manual}}", "A subgroup is manual: "),
        (
            "{devices=[2,2,2]<=[8] last_tile_dims={replicated, unreduced}}",
            "A subgroup is unreduced: ",
        ),
        ("{devices=[1,4]<=[4] last_tile_dims={manual}}", "It is manual: "),
        (
            "{replicated}",
            r"does not say on how many devices; read it with parse\(text, num_devices=…\)",
        ),
    ],
)
def test_what_does_not_say_where_data_is_cannot_be_saved_and_says_why(text, reason):
    with pytest.raises(ShardingError, match=reason):
        OpSharding.parse(text).device_boxes((8,))


def test_manual_of_a_subgroup_of_one_can_be_saved():
    assert OpSharding.parse("{devices=[4,1]<=[4] last_tile_dims={manual}}").device_boxes(
        (8,)
    ).parts == (4,)


def test_a_tensor_of_another_rank_is_refused():
    with pytest.raises(ShardingError, match="cuts tensors of 2 dimensions and this one has 3"):
        OpSharding.tiled((4, 2)).device_boxes((8, 8, 8))
    with pytest.raises(ShardingError, match=r"Tensor shape: .* found -1"):
        OpSharding.tiled((4, 2)).device_boxes((8, -1))


# JSON


@given(
    st.one_of(
        shardings(),
        st.integers(1, 9).map(OpSharding.replicated),
        st.just(OpSharding.replicated([9, 4, 7])),
    )
)
def test_json_brings_the_same_sharding_back(sharding):
    assert OpSharding.from_json(json.loads(json.dumps(sharding.to_json()))) == sharding


def test_json_of_many_devices_stays_small():
    assert OpSharding.replicated(100_000).to_json() == {"hlo": "{replicated}", "devices": 100_000}
    assert OpSharding.tiled((1000, 100)).to_json() == {"hlo": "{devices=[1000,100]<=[100000]}"}


@pytest.mark.parametrize(
    "doc",
    [
        None,
        "{replicated}",
        {},
        {"hlo": 1},
        {"hlo": "{replicated}"},
        {"hlo": "{manual}", "devices": None},
        {"hlo": "{replicated}", "devices": True},
        {"hlo": "{replicated}", "devices": 1.5},
        {"hlo": "{replicated}", "devices": -3},
        {"hlo": "{replicated}", "devices": 10**12},
        {"hlo": "{replicated}", "devices": [0, 0]},
        {"hlo": "{replicated}", "devices": [0, "1"]},
        {"hlo": "{replicated}", "devices": [0, 10**40]},
        {"hlo": "{replicated}", "devices": None, "more": 1},
        {"hlo": "{devices=[2]0,0}"},
        {"hlo": "{"},
    ],
)
def test_json_that_is_no_sharding_is_a_format_error(doc):
    with pytest.raises(FormatError):
        OpSharding.from_json(doc)


def test_str_is_the_text():
    assert re.fullmatch(r"\{devices=.*\}", str(OpSharding.tiled((2,))))


def test_a_kind_in_words_is_the_kind():
    sharding = OpSharding.tiled((1, 8), subgroups=["replicated"])
    assert sharding == OpSharding.tiled((1, 8), subgroups=(Kind.REPLICATED,))
    assert sharding.device_boxes((4,)).replica_id.tolist() == [*range(8)]
    assert OpSharding("manual") == OpSharding(Kind.MANUAL)


@pytest.mark.parametrize("eight", [8, np.int64(8), np.uint8(8), np.array(8)])
def test_a_number_of_devices_may_be_numpys(eight):
    for sharding in (
        OpSharding.replicated(eight),
        OpSharding.parse("{replicated}", num_devices=eight),
    ):
        assert sharding.num_devices == 8


@pytest.mark.parametrize(
    "make",
    [
        OpSharding.replicated,
        OpSharding.parse("{replicated}").relabel,
        lambda ids: OpSharding.tiled((3,), ids),
        lambda ids: OpSharding.tiled((2,)).device_boxes((4,), ids),
    ],
)
def test_ragged_device_ids_are_refused(make):
    with pytest.raises(ShardingError, match="Device ids must be integers"):
        make([[0, 1], [2]])
