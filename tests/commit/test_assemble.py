"""From what three hosts have written to one commit record: put together whole, or refused with a
name in the message."""

from __future__ import annotations

import shutil
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import tensorstore as ts
from chunk_tables import decode_table, read_table
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import Processes

import shardckpt
from shardckpt.commit import index
from shardckpt.commit.assemble import assemble, finished_hosts
from shardckpt.commit.index import write_table
from shardckpt.commit.publish import publish, published_attempt, read_prior
from shardckpt.commit.waiting import pause, wait_for_hosts
from shardckpt.errors import CommitError, FormatError, MissingDataError
from shardckpt.format.documents import open_envelope, seal
from shardckpt.format.record import HostRecord
from shardckpt.format.table import OWN_OBJECT, ArrayChunks, Table
from shardckpt.io import ocdbt
from shardckpt.io.store import Store

HOSTS = 3
NAMES = {"large": "array/large", "medium": "array/medium"}


class Saved:
    """A save by three processes that lacks its commit."""

    def __init__(self, url):
        self.root = Store.open(url)
        (attempt,) = (child[:-1] for child in self.root.list_children() if child.endswith("/"))
        self.place = self.root.sub(attempt)

    def record(self, host):
        key = f"records/{host:05d}.json"
        return HostRecord.from_json(open_envelope(self.place.read(key), key), key)

    def write_record(self, record, host=None):
        host = record.host if host is None else host
        self.place.write(f"records/{host:05d}.json", seal(record.to_json()))

    def table(self, host):
        """Files, and array path → rows (chunk, file, offset, length, crc)."""
        files, arrays = decode_table(self.place.read(self.record(host).files.table.key), "")
        columns = {
            path: [rows.chunk, rows.file, rows.offset, rows.length, rows.crc]
            for path, rows in arrays.items()
        }
        return files, {
            path: list(zip(*(column.tolist() for column in of_array), strict=True))
            for path, of_array in columns.items()
        }

    def write_table(self, host, files, rows, *, chunks=None):
        """A host's table, and the record that vouches for it; `chunks` as the record is to count
        them."""
        table = Table.of(
            files,
            {
                path: ArrayChunks.of_rows(of_array) if of_array else ArrayChunks.none()
                for path, of_array in rows.items()
            },
        )
        record = self.record(host)
        reference = write_table(self.place, record.files.table.key, table)
        chunks = sum(map(len, rows.values())) if chunks is None else chunks
        self.write_record(
            replace(record, files=replace(record.files, table=reference), chunks=chunks)
        )

    def refuses(self, match):
        with pytest.raises(CommitError, match=match) as raised:
            assemble(self.place)
        assert "othing was published" in str(raised.value)
        (outcome,) = shardckpt.commit(str(self.root))
        assert outcome.state in ("refused", "incomplete")
        assert published_attempt(self.root) is None


@pytest.fixture(scope="module", params=["packed", "zarr"])
def left(request, tmp_path_factory):
    """The directory of a save by three processes that lacks its commit, in each layout."""
    base = tmp_path_factory.mktemp(request.param) / "c"
    with Processes("many_hosts") as job:
        job.run("save_without_committing", HOSTS, base, {"layout": request.param})
    return base


@pytest.fixture
def saved(left, tmp_path):
    """A copy of it."""
    return Saved(shutil.copytree(left, tmp_path / "c"))


def holder(saved, path):
    """A host that has written chunks of an array, with its files and rows."""
    return next(
        (host, *saved.table(host)) for host in range(HOSTS) if saved.table(host)[1].get(path)
    )


def path_of(saved, name):
    """The path of a tensor's array."""
    (path,) = {
        path
        for host in range(HOSTS)
        for path in saved.table(host)[1]
        if path.rpartition("/")[2] == name
    }
    return path


# --- whole ----------------------------------------------------------------------------------------


def test_what_all_hosts_have_written_becomes_one_checkpoint(saved):
    record = assemble(saved.place)
    assert publish(saved.root, record, read_prior(saved.root, overwrite=False))
    opened = shardckpt.open(str(saved.root))
    assert opened.verify().damage == []
    np.testing.assert_array_equal(
        opened.read("large"), np.arange(2_400_000, dtype=np.float32).reshape(2400, 1000)
    )
    small = opened.record.small_table
    chunks = sum(saved.record(host).chunks for host in range(HOSTS)) + sum(
        map(len, decode_table(saved.place.read(small.key), "")[1].values())
    )
    assert record.totals["chunks"] == chunks
    assert [reference.key for reference in record.hosts] == [
        f"records/{host:05d}.json" for host in range(HOSTS)
    ]


def test_it_becomes_the_same_however_often_it_is_assembled(saved):
    first, again = assemble(saved.place), assemble(saved.place)
    assert replace(first, created="") == replace(again, created="")
    assert publish(saved.root, again, read_prior(saved.root, overwrite=False))
    assert shardckpt.open(str(saved.root)).verify().damage == []


# --- a lost, duplicated or short list of chunks ---------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_chunk_that_is_in_no_list_is_missed_by_its_tensors_name(saved, name):
    path = path_of(saved, name)
    host, files, rows = holder(saved, path)
    saved.write_table(host, files, {**rows, path: rows[path][1:]})
    saved.refuses(f"1 of .* chunks of '{name}' were not written")


def test_an_array_that_is_in_no_list_is_missed_by_its_tensors_name(saved):
    path = path_of(saved, "large")
    missing = 0
    for host in range(HOSTS):
        files, rows = saved.table(host)
        missing += len(rows.pop(path, []))
        saved.write_table(host, files, rows)
    saved.refuses(f"{missing} of {missing} chunks of 'large' were not written")


def test_an_empty_list_is_missed_by_a_tensors_name(saved):
    files, _ = saved.table(1)
    saved.write_table(1, files, {})
    saved.refuses("chunks of '(large|medium)' were not written")


@pytest.mark.parametrize("name", NAMES)
def test_a_chunk_in_two_lists_is_refused_by_its_tensors_name(saved, name):
    path = path_of(saved, name)
    host, _, rows = holder(saved, path)
    other = (host + 1) % HOSTS
    others_files, others_rows = saved.table(other)
    number = rows[path][0]
    place = (
        number[0],
        min(number[1], len(others_files) - 1) if others_files else number[1],
        *number[2:],
    )
    saved.write_table(
        other, others_files, {**others_rows, path: sorted([*others_rows.get(path, []), place])}
    )
    saved.refuses(f"more than one host wrote the same chunks of '{name}'")


def test_a_chunk_in_two_lists_makes_up_for_no_other_that_is_in_none(saved):
    """The counts are right."""
    path = path_of(saved, "large")
    (one, files, rows), (other, _, others) = [
        (h, *saved.table(h)) for h in range(HOSTS) if saved.table(h)[1].get(path)
    ][:2]
    assert one != other
    moved = (others[path][0][0], *rows[path][0][1:])
    saved.write_table(one, files, {**rows, path: sorted([*rows[path][1:], moved])})
    saved.refuses("more than one host wrote the same chunks of 'large'")


def test_a_chunk_beyond_the_tensor_is_refused_by_its_name(saved):
    path = path_of(saved, "large")
    host, files, rows = holder(saved, path)
    saved.write_table(host, files, {**rows, path: [*rows[path], (10**6, *rows[path][-1][1:])]})
    saved.refuses("chunk 1000000 of 'large' was written")


def test_chunks_of_no_tensor_are_refused_by_their_path(saved):
    path = path_of(saved, "large")
    host, files, rows = holder(saved, path)
    saved.write_table(host, files, {**rows, "else/where": rows[path][:1]})
    saved.refuses("else/where, which is not a tensor of this checkpoint")


@pytest.mark.parametrize("off", [-1, 1])
def test_a_list_that_is_not_as_long_as_its_record_says_is_refused(saved, off):
    saved.write_table(2, *saved.table(2), chunks=saved.record(2).chunks + off)
    saved.refuses("the chunk table of host 2 has .* its record says")


def test_a_list_of_another_layout_than_its_records_is_refused(saved):
    records = [saved.record(host) for host in range(HOSTS)]
    if records[0].layout == "packed":
        for host in range(HOSTS):
            files, rows = saved.table(host)
            alone = {
                path: [(chunk, OWN_OBJECT, 0, length, crc) for chunk, _, _, length, crc in of_array]
                for path, of_array in rows.items()
            }
            saved.write_table(host, files, alone)
    for host in range(HOSTS):
        saved.write_record(replace(saved.record(host), layout="packed"))
    saved.refuses("the chunk table of host 0 has chunks in files of their own")


def test_a_list_that_is_not_the_one_its_record_vouches_for_is_refused(saved):
    key = saved.record(1).files.table.key
    whole = saved.place.read(key)
    for data, why in (
        (whole[:-1], "bytes"),
        (whole[:-1] + bytes([whole[-1] ^ 1]), "its checksum is wrong"),
        (b"", "not the file"),
    ):
        saved.place.write(key, data)
        with pytest.raises(FormatError, match=f"hosts/00001/table.*{why}"):
            assemble(saved.place)
    saved.place.delete(key)
    with pytest.raises(MissingDataError, match="hosts/00001/table"):
        assemble(saved.place)
    assert shardckpt.commit(str(saved.root))[0].state == "refused"


def test_an_index_that_lacks_a_chunk_of_the_list_is_refused(saved):
    """Host 0's record forgets a lane, whose chunks are in its table."""
    record = saved.record(0)
    if record.layout == "packed":
        saved.write_record(replace(record, files=replace(record.files, lanes=())))
        saved.refuses("host 0 has chunks in hosts/00000/0, but its record names no index")


def test_one_leaf_says_what_many_say(left, tmp_path, monkeypatch):
    """Chunks in files of several hosts, chunks of small tensors, and documents, to TensorStore and
    to us."""
    contents = []
    for most in (ocdbt.LEAF_KEYS, 3):
        monkeypatch.setattr(ocdbt, "LEAF_KEYS", most)
        saved = Saved(shutil.copytree(left, tmp_path / f"c{most}"))
        if saved.record(0).layout == "zarr":
            return
        assemble(saved.place)
        database = ts.KvStore.open(
            {"driver": "ocdbt", "base": saved.place.location.kvstore()}
        ).result()
        keys = sorted(database.list().result())
        contents.append(
            (
                {key: database.read(key).result().value for key in keys},
                dict(index.index_values(saved.place)),
            )
        )
    assert contents[0] == contents[1]
    assert len(contents[0][1]) > 10


@pytest.mark.long
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_no_single_change_of_any_list_goes_unnoticed(left, tmp_path_factory, data):
    """A row is taken out, put twice, or given another number: always an error with a tensor's name
    in it."""
    saved = Saved(shutil.copytree(left, tmp_path_factory.mktemp("changed") / "c"))
    host = data.draw(st.integers(0, HOSTS - 1))
    files, rows = saved.table(host)
    path = data.draw(st.sampled_from(sorted(path for path, of_array in rows.items() if of_array)))
    i = data.draw(st.integers(0, len(rows[path]) - 1))
    number, *place = rows[path][i]
    others = [row for k, row in enumerate(rows[path]) if k != i]
    numbers = {row[0] for row in others}
    renumbered = data.draw(
        st.one_of(st.none(), st.integers(0, 40).filter(lambda n: n != number and n not in numbers))
    )
    changed = others if renumbered is None else sorted([*others, (renumbered, *place)])
    saved.write_table(host, files, {**rows, path: changed})
    saved.refuses(rf"chunk(s| \d+) of '{path.rpartition('/')[2]}'")


# --- records --------------------------------------------------------------------------------------


def test_a_host_without_a_record_is_named(saved):
    saved.place.delete("records/00001.json")
    assert finished_hosts(saved.place) == [0, 2]
    saved.refuses("host 1 did not finish")
    with pytest.raises(CommitError, match=r"host 1 \(of 3\) did not finish within 0 s"):
        wait_for_hosts(saved.place, HOSTS, 0)


def test_a_failure_that_is_known_is_told_at_once(saved):
    saved.place.delete("records/00001.json")
    with pytest.raises(CommitError, match=r"process 1 ran out of luck\. Nothing was published"):
        wait_for_hosts(saved.place, HOSTS, 600, lambda: "process 1 ran out of luck.")


def test_the_last_record_is_seen_once_an_eighth_of_the_time_has_passed_again_with_few_looks():
    now, looks = 0.0, [0.0]
    while now < 60:
        now += pause(now)
        looks.append(now)
    late = [(after - before) / before for before, after in pairwise(looks) if before >= 0.16]
    assert max(late) <= 1 / 8 + 1e-9
    assert len(looks) <= 80
    assert pause(600) == 2


def test_a_record_of_one_host_too_many_is_refused(saved):
    saved.write_record(replace(saved.record(2), host=3))
    saved.refuses("the save has 3 hosts, and there are records of hosts 0-3")


def test_an_attempt_without_records_says_what_may_have_become_of_it(saved):
    saved.place.delete_prefix("records/")
    with pytest.raises(CommitError, match="has removed it"):
        assemble(saved.place)


def test_a_record_in_another_hosts_place_is_refused(saved):
    saved.write_record(saved.record(1), host=2)
    saved.refuses("the record of host 1 of attempt .*: a wrong file")


def test_a_record_of_another_attempt_is_refused(saved):
    saved.write_record(replace(saved.record(2), attempt="20300101T000000-00000000"))
    saved.refuses("the record of host 2 of attempt 20300101T000000-00000000: a wrong file")


@pytest.mark.parametrize(
    ("what", "value"),
    [("hosts", 4), ("layout", None), ("compression", "zstd"), ("prior", "0" * 64)],
    ids=lambda x: str(x)[:8],
)
def test_hosts_that_saved_differently_are_refused(saved, what, value):
    record = saved.record(2)
    if what == "layout":
        value = {"packed": "zarr", "zarr": "packed"}[record.layout]
    saved.write_record(replace(record, **{what: value}))
    saved.refuses("hosts 0 and 2")


def test_another_versions_record_is_refused(saved):
    key = "records/00002.json"
    saved.place.write(key, saved.place.read(key).replace(b'"version":[1,0]', b'"version":[1,1]'))
    with pytest.raises(CommitError, match="another format version than this process writes"):
        assemble(saved.place)


def test_a_table_that_its_host_has_in_memory_is_compared_with_the_file(saved):
    tables = {}
    for host in range(HOSTS):
        reference = saved.record(host).files.table
        tables[reference] = read_table(saved.place.read(reference.key), "")
    assert replace(assemble(saved.place, None, tables), created="") == replace(
        assemble(saved.place), created=""
    )
    for reference in tables:
        data = saved.place.read(reference.key)
        for position in (0, reference.header - 1, reference.header, reference.size - 1):
            saved.place.write(
                reference.key, data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :]
            )
            with pytest.raises(FormatError):
                assemble(saved.place, None, tables)
        saved.place.write(reference.key, data + b"\0")
        with pytest.raises(FormatError):
            assemble(saved.place, None, tables)
        saved.place.write(reference.key, data)
