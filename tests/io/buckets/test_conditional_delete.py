"""An object goes only while it is the version that is meant."""

from __future__ import annotations

import pytest
from emulators import environment

import shardckpt
from shardckpt.commit.publish import RECORD
from shardckpt.io.buckets import s3_client
from shardckpt.io.buckets.s3_client import S3Bucket
from shardckpt.io.store import Store
from shardckpt.runs.collecting import delete_place as delete


def test_a_directory_goes_only_if_it_is_empty(tmp_path):
    store = Store.open(tmp_path / "c")
    store.write("key", b"precious")
    store.remove_empty()
    assert store.read("key") == b"precious"
    store.delete("key")
    store.remove_empty()
    store.remove_empty()
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("name", ["run/plain-1.0_~", "run/a b", "run/ü"])
def test_on_azure_an_object_is_deleted_if_a_url_for_its_name_can_be_signed(azure_server, name):
    with environment(azure_server.env()):
        store = Store.open(azure_server.url(name))
        assert store.create("key", b"first")
        _, first = store.read_versioned("key")
        assert store.replace("key", b"second", first)
        _, second = store.read_versioned("key")
        assert not store.remove("key", first)
        assert store.read_versioned("key") == (b"second", second)
        assert store.remove("key", second) == ("plain" in name)
        assert store.exists("key") == ("plain" not in name)
        assert not store.remove("key", second)


def test_a_service_that_ignores_the_condition_keeps_the_tombstone(s3_server, monkeypatch):
    """As some do that speak S3's protocol: the header gets lost on the way."""
    asked = S3Bucket.ask

    def ask(*what, **options):
        options.pop("IfMatch", None)
        return asked(*what, **options)

    monkeypatch.setattr(S3Bucket, "ask", ask)
    monkeypatch.setattr(s3_client, "_honours", {})
    url = s3_server.url("ignores", "c")
    with environment(s3_server.env()):
        shardckpt.save(url, {"w": 1})
        assert delete(Store.open(url), reason="test", grace=0) == []
        assert Store.open(url).list() == [RECORD]
        with pytest.raises(shardckpt.errors.NotFoundError, match="deleted"):
            shardckpt.open(url)
        shardckpt.save(url, {"w": 2})
        assert shardckpt.restore(url) == {"w": 2}
