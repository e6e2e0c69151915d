"""The forecast of a restore agrees with the reads of real hosts, as the reader counts them."""

import numpy as np
import pytest
from emulators import environment
from processes import Processes
from simulated_readers import read_by_host

import shardckpt
from shardckpt import Mesh, OpSharding, PartitionSpec, SaveOptions, Sharding
from shardckpt.errors import FormatError
from shardckpt.format.table import ArrayChunks
from shardckpt.layout.placements import Placements
from shardckpt.reading.lookup import WholeTable
from shardckpt.reading.places import read_places
from shardckpt.reshard.forecast.hosts import Hosts
from shardckpt.reshard.forecast.restore import forecast_restore
from shardckpt.reshard.forecast.stored import ByLayout, ByTable

MESH = Mesh((4, 2), ("data", "model"))
OTHER = Mesh((3, 2), ("x", "y"), [5, 3, 1, 0, 2, 4])
SPECS = [
    PartitionSpec("data", "model"),
    PartitionSpec("model"),
    PartitionSpec(None, ("model", "data")),
    PartitionSpec(),
]
TARGETS = {
    "both axes": Sharding(MESH, PartitionSpec("model", "data")),
    "replicated over one": Sharding(MESH, PartitionSpec("data")),
    "uneven, permuted devices": Sharding(OTHER, PartitionSpec("x", "y")),
    "on every host whole": None,
    "an OpSharding": OpSharding.parse("{devices=[2,2,2]<=[8] last_tile_dim_replicate}"),
    "DTensor's nested shards": Placements.of(Mesh((4, 2), ("a", "b")), ["S(0)", "S(0)"]),
}


def state():
    rng = np.random.default_rng(0)
    sizes = {
        "a": (700, 330),
        "b": (257, 1024),
        "empty": (0, 5),
        "c": (1000, 96),
        "d": (64, 64),
        "e": (64, 72),
    }
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in sizes.items()}


def by_table(checkpoint):
    return ByTable(
        checkpoint.record,
        read_places(checkpoint.place, checkpoint.record, checkpoint.reader.whole_table()),
    )


@pytest.fixture(scope="module", params=["packed", "zarr", "packed zstd"])
def saved(request, tmp_path_factory):
    """A checkpoint of several tensors, each laid out in another way."""
    place = tmp_path_factory.mktemp("saved") / "c"
    layout, *compression = request.param.split()
    shardings = {name: Sharding(MESH, SPECS[i % 4]) for i, name in enumerate(state())}
    options = SaveOptions(layout=layout, compression=(*compression, None)[0], shardings=shardings)
    shardckpt.save(place, state(), options=options)
    return place


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("devices_per_host", [1, 3])
def test_every_host_reads_what_was_forecast_to_the_byte_and_to_the_request(
    saved, target, devices_per_host
):
    checkpoint = shardckpt.open(saved)
    tensors = list(checkpoint.record.structure.tensors.values())
    layouts = dict.fromkeys(checkpoint.record.structure.tensors, TARGETS[target])
    hosts = Hosts.of(
        ((layout, 2) for layout in layouts.values()), devices_per_host=devices_per_host
    )

    prediction = forecast_restore(
        tensors, layouts, hosts, by_table(checkpoint), checkpoint.reader.limits
    )

    counted = read_by_host(saved, layouts, hosts)
    assert prediction.read.tolist() == [host.bytes_read for host in counted]
    assert prediction.needed.tolist() == [host.bytes_needed for host in counted]
    assert prediction.requests == sum(host.reads for host in counted)
    assert prediction.requests_counted == hosts.number
    assert sum(one.read for one in prediction.tensors.values()) == prediction.read.sum()
    assert prediction.flow.nbytes.sum(axis=0).tolist() == prediction.read.tolist()
    assert prediction.amplification >= 1.0
    if checkpoint.record.compression is None:
        assert prediction.amplification == pytest.approx(
            prediction.read.sum() / prediction.needed.sum(), rel=1e-3
        )


@pytest.mark.parametrize("target", TARGETS)
def test_a_record_alone_tells_the_same_bytes_where_nothing_is_compressed(saved, target):
    checkpoint = shardckpt.open(saved)
    tensors = list(checkpoint.record.structure.tensors.values())
    layouts = dict.fromkeys(checkpoint.record.structure.tensors, TARGETS[target])
    hosts = Hosts.of(((layout, 2) for layout in layouts.values()), devices_per_host=2)

    alone = forecast_restore(tensors, layouts, hosts, ByLayout(checkpoint.record))

    known = forecast_restore(tensors, layouts, hosts, by_table(checkpoint))
    assert alone.needed.tolist() == known.needed.tolist()
    if checkpoint.record.compression is None:
        assert alone.read.tolist() == known.read.tolist()
    else:
        assert alone.read.sum() == pytest.approx(known.read.sum(), rel=0.2)
    assert alone.requests is None


@pytest.mark.parametrize("layout", ["packed", "zarr"])
def test_the_flow_says_which_host_wrote_what_each_host_reads(tmp_path, layout):
    shape = (1024, 1024)
    with Processes("many_hosts") as job:
        job.run(
            "save_different",
            4,
            tmp_path / "c",
            [{"w": {"shape": shape, "value": 1.0}}] * 4,
            {"layout": layout},
        )
    checkpoint = shardckpt.open(tmp_path / "c")
    (tensor,) = checkpoint.record.structure.tensors.values()
    layouts = {"w": Sharding(Mesh((2,), ("x",)), PartitionSpec("x"))}
    hosts = Hosts.of([(layouts["w"], 2)], devices_per_host=1)

    known = forecast_restore([tensor], layouts, hosts, by_table(checkpoint)).flow
    shared = forecast_restore([tensor], layouts, hosts, ByLayout(checkpoint.record)).flow

    # All four have the tensor, each writes a quarter of it, in grid order: the first two what the
    # first host reads.
    quarter = known.nbytes.sum() // 4
    assert known.exact
    assert known.nbytes.tolist() == [[quarter, 0], [quarter, 0], [0, quarter], [0, quarter]]
    # From the record one knows only that each could have written a quarter of everything.
    assert not shared.exact
    assert np.allclose(shared.nbytes, quarter / 2, rtol=0.01)


def test_requests_to_an_object_store_are_those_that_are_made(gcs_server):
    with environment(gcs_server.env()):
        url = f"{gcs_server.url('forecast')}/c"
        shardckpt.save(
            url,
            state(),
            options=SaveOptions(shardings={"?": Sharding(MESH, PartitionSpec("data", "model"))}),
        )
        checkpoint = shardckpt.open(url)
        tensors = list(checkpoint.record.structure.tensors.values())
        layouts = dict.fromkeys(
            checkpoint.record.structure.tensors, TARGETS["uneven, permuted devices"]
        )
        hosts = Hosts.of(((layout, 2) for layout in layouts.values()), devices_per_host=2)

        prediction = forecast_restore(
            tensors, layouts, hosts, by_table(checkpoint), checkpoint.reader.limits
        )

        counted = read_by_host(url, layouts, hosts)
        assert prediction.requests == sum(host.reads for host in counted)
        # Small gaps are read along there.
        assert all(
            predicted <= host.bytes_read
            for predicted, host in zip(prediction.read.tolist(), counted, strict=True)
        )


def test_hosts_beyond_the_devices_have_none():
    """Many processes may have saved plain tensors, or a layout over few devices."""
    hosts = Hosts.of([(Sharding(Mesh((2,), ("x",)), PartitionSpec("x")), 1)], number=5)
    assert (hosts.number, hosts.owners.device_ids.tolist(), hosts.owners.processes.tolist()) == (
        5,
        [0, 1],
        [0, 1],
    )


@pytest.mark.parametrize("saved", ["zarr"], indirect=True)
@pytest.mark.parametrize("rows", [{}, {"a": [(0, 0, 0, 9, 0)]}])
def test_a_table_that_a_host_s_own_contradicts_is_refused(saved, rows):
    checkpoint = shardckpt.open(saved)
    arrays = {path: ArrayChunks.of_rows(chunks) for path, chunks in rows.items()}
    with pytest.raises(FormatError, match="the table of host 0 has chunks of"):
        read_places(checkpoint.place, checkpoint.record, WholeTable.of(["x"], arrays))


@pytest.mark.parametrize("saved", ["packed"], indirect=True)
@pytest.mark.parametrize("host", [1, 10**20])
def test_a_file_of_a_host_that_is_not_there_is_nobody_s(saved, host):
    checkpoint = shardckpt.open(saved)
    forged = WholeTable.of(["hosts/00000/0/d/00000", f"hosts/{host}/0/d/00000"], {})
    places = read_places(checkpoint.place, checkpoint.record, forged)
    assert places.host_of_file.tolist() == [0, -1]
