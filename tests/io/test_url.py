"""Places of checkpoints: paths and urls, and refused ones, which could not be kept."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path

import pytest
import tensorstore as ts
from etils import epath
from hypothesis import given, settings
from hypothesis import strategies as st

from shardckpt.errors import FormatError, UrlError
from shardckpt.format.documents import check_key
from shardckpt.io.url import Location, parse

names = st.text(
    st.characters(exclude_characters="/\\\0", exclude_categories=["Cs"]), min_size=1, max_size=20
).filter(lambda n: n not in (".", "..") and not n.endswith(".__lock"))
buckets = st.sampled_from(["bucket", "a.b-c", "0xy"])
printable = names.filter(lambda n: not any(ord(c) < 32 or ord(c) == 127 for c in n))
locations = st.one_of(
    st.builds(
        lambda parts: Location("file", "/" + "/".join(parts)),
        st.lists(names, min_size=1, max_size=4),
    ),
    st.builds(
        lambda parts: Location("memory", "/".join(parts)), st.lists(names, min_size=1, max_size=4)
    ),
    st.builds(
        lambda scheme, bucket, parts: Location(scheme, "/".join([bucket, *parts])),
        st.sampled_from(["gs", "s3"]),
        buckets,
        st.lists(printable, max_size=4),
    ),
)


@given(locations)
def test_what_is_shown_of_a_location_leads_back_to_it(location):
    assert parse(str(location)) == location
    assert parse(location.url) == location


@given(locations, printable, printable)
def test_joining_names_goes_down_by_those_names(location, first, second):
    below = location.join(first, second)
    assert below == location.join(f"{first}/{second}")
    assert below.name == second
    assert below.path == f"{location.path}/{first}/{second}"


@pytest.mark.parametrize(
    "name",
    [
        "plain",
        "a b",
        "ünï-日本",
        "100%",
        "a%20b",
        "q?x",
        "h#y",
        "a|b",
        "c:d",
        "new\nline",
        "'\"",
        ".hidden",
        "-",
        "~",
        "a&b=c",
    ],
)
def test_tensorstore_makes_a_directory_of_exactly_that_name(tmp_path, name):
    location = parse(tmp_path / name)
    ts.KvStore.open(location.kvstore()).result().write("key", b"value").result()
    assert [p.name for p in tmp_path.iterdir()] == [name]
    by_url = ts.KvStore.open(f"{location.url}/").result()
    assert by_url.read("key").result().value == b"value"


def test_a_relative_path_is_below_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert (
        parse("runs//a/../b/") == parse(Path("runs/b")) == Location("file", f"{Path.cwd()}/runs/b")
    )
    assert parse(".").local_path == Path.cwd()


def test_a_relative_path_in_a_working_directory_that_was_removed_is_refused_and_others_are_not(
    tmp_path, monkeypatch
):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(
        UrlError, match="'ckpt/1' is relative to the working directory, which was removed"
    ):
        parse("ckpt/1")
    assert parse(tmp_path / "here").local_path == tmp_path / "here"
    monkeypatch.chdir(tmp_path)


def test_symbolic_links_stay_in_the_path(tmp_path):
    (tmp_path / "target").mkdir()
    (tmp_path / "link").symlink_to("target")
    assert parse(tmp_path / "link").local_path == tmp_path / "link"


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("file:///data/a%20b", "/data/a b"),
        ("FILE:///data/x/", "/data/x"),
        ("file://localhost/data", "/data"),
        ("file:///data/%25", "/data/%"),
        ("memory://runs/7/", "runs/7"),
        ("//data///x", "/data/x"),
        ("./gs:x", None),
    ],
)
def test_a_url_is_decoded_and_a_path_is_not(url, path):
    assert parse(url).path == (path or f"{Path.cwd()}/gs:x")


@pytest.mark.parametrize(
    ("url", "bucket", "prefix"),
    [
        ("gs://bucket/run/7", "bucket", "run/7/"),
        ("S3://my-bucket/a%20b/", "my-bucket", "a b/"),
        ("gs://under_score.example.com", "under_score.example.com", ""),
        ("s3://bucket/", "bucket", ""),
    ],
)
def test_an_object_store_s_url_is_a_bucket_and_what_its_names_begin_with(url, bucket, prefix):
    location = parse(url)
    assert (location.bucket, location.object_prefix, location.local_path) == (bucket, prefix, None)
    spec = location.kvstore()
    assert (spec["driver"], spec["bucket"], spec["path"]) == (
        "gcs" if location.scheme == "gs" else "s3",
        bucket,
        prefix,
    )
    assert parse("/data/x").bucket is None


BUCKETS = [
    "abc",
    "a" * 63,
    "a" * 64,
    "a.b.c",
    "a..b",
    "a-.b",
    "-ab",
    "ab-",
    "a_b",
    "_ab",
    "Abc",
    "ab",
    "a b",
    "ünï",
    "a.b" * 70,
    "a" * 300,
    "a\nb",
    "abc\n",
]


@pytest.mark.parametrize("name", BUCKETS, ids=[repr(name)[:16] for name in BUCKETS])
def test_of_gcs_bucket_names_we_take_those_that_tensorstore_takes(name):
    try:
        ts.KvStore.Spec({"driver": "gcs", "bucket": name})
    except ValueError:
        with pytest.raises(UrlError, match="is not a bucket name"):
            Location("gs", f"{name}/run")
    else:
        Location("gs", f"{name}/run")


@pytest.mark.parametrize("name", BUCKETS, ids=[repr(name)[:16] for name in BUCKETS])
def test_of_s3_bucket_names_we_take_those_that_aws_documents(name):
    """TensorStore also takes those that could be made before 2018."""
    allowed = name in ("abc", "a" * 63, "a.b.c")
    with nullcontext() if allowed else pytest.raises(UrlError, match="is not a bucket name"):
        Location("s3", f"{name}/run")


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("", "empty"),
        ("a\0b", "NUL"),
        ("file:///a%00b", "NUL"),
        ("memory://", "names no place"),
        ("memory://a//b", "''"),
        ("memory://a/../b", "'..'"),
        (
            "ftp://host/x",
            (
                "unknown scheme ftp://; known are file://, gs://, s3://, az://, abfs://, "
                "memory://, http://"
            ),
        ),
        ("gs://", "is not a bucket name"),
        ("s3://B/x", "is not a bucket name"),
        ("gs://bucket//x", "''"),
        ("gs://bucket/../x", "'..'"),
        ("gs://bucket/a?b", "%3F"),
        ("s3://bucket/a%0Ab", "control characters"),
        ("file:/data", "starts with file://"),
        ("gs:bucket", "starts with gs://"),
        ("file://host/data", "three slashes"),
        ("file://", "three slashes"),
        ("file:///a?b", "%3F"),
        ("file:///a#b", "%23"),
        ("file:///100%", "%25"),
        ("file:///%ff", "UTF-8"),
        ("a\\b", "backslash"),
        ("/data/x.__lock", "lock files"),
        ("\udcff", "UTF-8"),
        (b"/data", "not a url"),
        (7, "not a url"),
        (None, "not a url"),
    ],
)
def test_an_invalid_url_is_refused_with_the_reason(url, why):
    with pytest.raises(UrlError) as error:
        parse(url)
    assert why in str(error.value)


class PathLike:
    """A path object, as libraries of object stores have it."""

    def __init__(self, path, shown=None):
        self.path, self.shown = path, shown

    def __fspath__(self):
        return self.path

    def __str__(self):
        return self.shown or self.path


@pytest.mark.parametrize(
    "given",
    [
        PathLike("gs://bucket/run%201"),
        epath.Path("gs://bucket/run%201"),
        # `os.fspath` gives the path of a local copy.
        PathLike("/home/me/.cache/bucket/run 1", shown="gs://bucket/run%201"),
    ],
)
def test_a_path_object_that_stands_for_a_url_is_this_url(given):
    assert parse(given) == Location("gs", "bucket/run 1")


def test_a_path_object_that_gives_a_path_is_this_path(tmp_path):
    assert (
        parse(epath.Path(tmp_path / "a%20b"))
        == parse(PathLike(str(tmp_path / "a%20b")))
        == parse(tmp_path / "a%20b")
    )
    assert parse(tmp_path / "gs:" / "x").local_path == tmp_path / "gs:" / "x"


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (
            Path("gs://bucket/run"),
            (
                "'gs:/bucket/run': a gs url starts with gs://, and pathlib joins its slashes; give "
                "the url as text"
            ),
        ),
        (Path("file:///data"), "a file url starts with file://, and pathlib"),
        (PathLike("adl://container/x"), "unknown scheme adl://"),
        (PathLike("gs://"), "is not a bucket name"),
        (PathLike(b"/data", shown="data"), "is not a url"),
    ],
)
def test_a_path_object_of_an_invalid_url_is_refused(given, why):
    with pytest.raises(UrlError) as error:
        parse(given)
    assert why in str(error.value)


@pytest.mark.parametrize(
    "key", ["", "/etc/passwd", "../x", "a/../../x", "a//b", "./a", "a/", "a\\b", "a\0"]
)
def test_a_key_that_could_leave_its_place_is_refused(key):
    with pytest.raises(FormatError, match="is not a valid key below"):
        check_key(key, "/data")
    with pytest.raises(UrlError):
        Location("memory", "data").join(key)


@settings(max_examples=200)
@given(st.text(st.sampled_from("/.\\ab\0"), max_size=8))
def test_no_key_that_passes_leaves_its_place(key):
    try:
        check_key(key, "/data")
    except FormatError:
        return
    assert os.path.normpath(f"/data/{key}") == f"/data/{key}"


def test_a_path_may_start_at_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert parse("~/runs").local_path == parse(Path("~/runs")).local_path == tmp_path / "runs"
    assert parse("~").local_path == tmp_path
    assert parse("./~/runs").local_path == tmp_path / "~" / "runs"
    assert parse("a/~").local_path == tmp_path / "a" / "~"
    assert parse("file:///~/runs").local_path == Path("/~/runs")


@pytest.mark.parametrize(
    ("url", "above"),
    [
        ("/a/b", "/a"),
        ("/a", "/"),
        ("/", None),
        ("gs://bucket/a", "gs://bucket"),
        ("gs://bucket", None),
        ("memory://a/b", "memory://a"),
    ],
)
def test_a_place_lies_in_another_unless_it_is_the_first(url, above):
    assert parse(url).parent == (None if above is None else parse(above))
