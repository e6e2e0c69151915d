"""Records that are not JSON, too deep, of another version or not what they should be are
refused."""

import pytest
from forgery import TRUTH, seal
from mutations import deep

import shardckpt
from shardckpt import errors


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[" * 100_000 + "]" * 100_000, "JSON"),
        ('{"a":' * 100_000 + "1" + "}" * 100_000, "JSON"),
        ('{"tombstone":"a","tombstone":"b"}', "same key twice"),
        ('{"totals":' + "9" * 10_000 + "}", "JSON"),
        ('{"metadata":NaN}', "NaN"),
        ('{"metadata":[-Infinity]}', "Infinity"),
        ('{"metadata":{"a":1e999}}', "1e999 is not a finite number"),
        ('{"metadata":{"a":-1' + "0" * 400 + ".5}}", "is not a finite number"),
        ("null", "NoneType"),
        ('"text"', "str"),
        ("{", "JSON"),
        ("", "JSON"),
        ('{"tombstone":1}', "string is expected"),
        ("{}", "is missing"),
    ],
)
def test_a_record_that_is_not_json_or_no_record_is_refused(forgery, text, why):
    forgery.write_raw(seal(text))
    with pytest.raises(errors.FormatError, match=why) as raised:
        shardckpt.open(forgery.url)
    assert len(str(raised.value)) < 1000


def test_a_tree_that_is_too_deep_is_refused(forgery):
    for levels, kind in ((201, "list"), (201, "dict"), (450, "list")):
        forgery.write_raw(seal({**forgery.commit, "tree": deep(levels, kind)}))
        with pytest.raises(errors.FormatError, match="more than 200 containers"):
            shardckpt.open(forgery.url)


@pytest.mark.parametrize("kind", ["list", "dict"])
def test_metadata_that_is_too_deep_is_refused_and_what_earlier_versions_stored_is_read(
    forgery, kind
):
    forgery.write_raw(seal({**forgery.commit, "metadata": {"k": deep(450, kind)}}))
    assert sorted(shardckpt.restore(forgery.url)) == sorted(TRUTH)
    for levels in (500, 700):
        forgery.write_raw(seal({**forgery.commit, "metadata": {"k": deep(levels, kind)}}))
        with pytest.raises(errors.FormatError, match="more than 500 objects and lists"):
            shardckpt.open(forgery.url)


def test_a_newer_major_version_is_refused_by_name_and_a_newer_minor_one_is_read(forgery):
    forgery.write_raw(seal(forgery.commit, version=(7, 0)))
    with pytest.raises(
        errors.VersionError,
        match=r"format version 7\.0 is newer than this shardckpt reads \(6\.0\); upgrade",
    ):
        shardckpt.open(forgery.url)
    forgery.write_raw(seal({**forgery.commit, "in a minor version to come": [1]}, version=(1, 7)))
    assert sorted(shardckpt.restore(forgery.url)) == sorted(TRUTH)
