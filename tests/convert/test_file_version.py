"""A file is read as it was when it was first looked at, or not at all."""

import os

import pytest

from shardckpt.convert.files.file_version import FileVersion, file_at, identity_below, identity_of
from shardckpt.errors import (
    CorruptionError,
    FormatError,
    MissingDataError,
    ReplacedError,
    StorageError,
)
from shardckpt.io.store import Store
from shardckpt.io.url import parse


@pytest.fixture(params=["file", "memory"])
def store(request, tmp_path):
    return Store.open(tmp_path if request.param == "file" else f"memory://{tmp_path.name}")


def test_any_bytes_of_it_are_read(store):
    store.write("a", b"0123456789")
    version = FileVersion(store, "a")
    assert version.read(2, 5).tobytes() == b"234"
    assert version.read(4, 4).tobytes() == b""
    assert version.read_whole(10) == b"0123456789"
    parts = [bytearray(3), bytearray(), bytearray(4)]
    version.read_into(2, list(map(memoryview, parts)))
    assert parts == [b"234", b"", b"5678"]
    version.require_length(10)


def test_lengths_that_are_not_as_expected_are_errors(store):
    store.write("a", b"0123456789")
    version = FileVersion(store, "a")
    with pytest.raises(CorruptionError, match="ends before byte 11"):
        version.read(4, 11)
    with pytest.raises(FormatError, match="more than 9 bytes"):
        version.read_whole(9)
    for nbytes in (0, 9, 11, 1000):
        with pytest.raises(FormatError, match=f"should have {nbytes} bytes"):
            version.require_length(nbytes)


@pytest.mark.parametrize("then", [b"another one", b"9876543210", b"", None])
def test_one_that_was_replaced_or_deleted_is_not_read_any_more(store, then):
    store.write("a", b"0123456789")
    version, before = (
        FileVersion(store, "a"),
        identity_of(store.location, [FileVersion(store, "a")]),
    )
    store.delete("a")
    if then is not None:
        store.write("a", then)
        assert identity_of(store.location, [FileVersion(store, "a")]) != before
    for read in (
        lambda: version.read(2, 5),
        lambda: version.read(0, 0),
        lambda: version.read_whole(100),
    ):
        with pytest.raises(
            ReplacedError, match="changed, replaced or deleted while it was being read"
        ):
            read()


def test_one_that_is_written_to_in_place_is_another_version(tmp_path):
    (tmp_path / "a").write_bytes(b"0123456789")
    version = FileVersion(Store.open(tmp_path), "a")
    os.utime(tmp_path / "a", ns=(1, 1))
    with pytest.raises(ReplacedError):
        version.read(0, 1)


def test_a_copy_with_its_times_is_the_same_version(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "w").write_bytes(b"0123456789")
        os.utime(tmp_path / name / "w", ns=(5, 5))
    one, other = (FileVersion(Store.open(tmp_path / name), "w") for name in ("a", "b"))
    assert one.identity == other.identity


def test_a_file_is_told_from_a_directory_and_from_nothing(store):
    store.write("d/a", b"0")
    here = store.location
    assert file_at(here.join("d", "a")).key == "a"
    assert file_at(here.join("d")) is None
    assert file_at(here.join("nothing")) is None
    with pytest.raises(MissingDataError):
        FileVersion(store, "nothing")


def test_a_link_is_what_it_points_to_and_a_pipe_is_refused(tmp_path):
    (tmp_path / "a").write_bytes(b"01")
    (tmp_path / "link").symlink_to("a")
    assert file_at(parse(tmp_path / "link")).read_whole(2) == b"01"
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(StorageError, match="not a regular file"):
        file_at(parse(tmp_path / "pipe"))


def test_any_change_below_a_place_changes_its_identity(store):
    identities = [identity_below(store)]
    for key, data in (("a/b", b"0"), ("a/b", b"1"), ("a/b", b"10"), ("c", b"10")):
        store.write(key, data)
        identities.append(identity_below(store))
        assert identity_below(store) == identities[-1]
    assert len(set(identities)) == 5
    store.delete("c")
    assert identity_below(store) == identities[3]


def test_links_to_directories_are_followed_once(tmp_path):
    for name in ("here", "elsewhere"):
        (tmp_path / name).mkdir()
    (tmp_path / "here" / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "circle").symlink_to(tmp_path / "here")
    (tmp_path / "here" / "broken").symlink_to(tmp_path / "nothing")
    place = Store.open(tmp_path / "here")
    before = identity_below(place)
    (tmp_path / "elsewhere" / "chunk").write_bytes(b"0")
    assert identity_below(place) != before
