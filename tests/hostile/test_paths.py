"""No path leads out of a checkpoint, and what is not a file is not waited for."""

import contextlib
import os
import shutil

import numpy as np
import pytest
from chunk_tables import decode_table, encode_table
from forgery import TRUTH, Forgery, use_in_every_way

import shardckpt
from shardckpt import SaveOptions, ShardckptError, errors
from shardckpt.io import ocdbt

LAYOUTS = ["packed", "zarr"]
ESCAPES = [
    "../outside/secret",
    "a/../../outside/secret",
    "/etc/passwd",
    "..",
    ".",
    "",
    "a//b",
    "a\\..\\b",
    "a\0b",
    "\ud800",
    "x.__lock",
    "a/",
    1,
    None,
]


@pytest.fixture
def secret(tmp_path):
    """A file beside the checkpoint; nobody has changed it in the end."""
    (tmp_path / "outside").mkdir()
    file = tmp_path / "outside" / "secret"
    file.write_bytes(b"secret")
    yield file
    assert file.read_bytes() == b"secret"


@pytest.mark.parametrize("path", ESCAPES)
def test_no_path_of_a_commit_record_leads_out_of_the_checkpoint(forgery, secret, path):
    reference = {**forgery.commit["table"], "key": path}
    for change in (
        {"attempt": path},
        {"hosts": [reference]},
        {"table": reference},
        {"small_table": reference},
    ):
        forgery.write(commit={**forgery.commit, **change})
        with pytest.raises(errors.FormatError):
            shardckpt.open(forgery.url)
    # Deleting what is replaced goes by the record, too.
    forgery.write(commit={**forgery.commit, "attempt": path})
    with contextlib.suppress(ShardckptError):
        shardckpt.save(forgery.url, {"a": 1}, options=SaveOptions(overwrite=True))


@pytest.mark.parametrize("path", ESCAPES)
def test_no_path_of_a_host_record_leads_out_of_the_checkpoint(forgery, secret, path):
    """Of the commit record's readers none follows it, and nobody commits it."""
    for member in ("table", "contents", "values", "lanes"):
        changed = [path] if member == "lanes" else {**forgery.hosts[0][member], "key": path}
        for of_all in (True, False):
            forgery.write(host={**forgery.hosts[0], member: changed}, of_all=of_all)
            with pytest.raises(ShardckptError):
                shardckpt.restore(forgery.url)
            assert not shardckpt.open(forgery.url).verify().ok
        forgery.unpublish()
        (outcome,) = shardckpt.commit(forgery.url)
        assert outcome.state == "refused", member


@pytest.mark.parametrize("path", [path for path in ESCAPES if path != "\ud800"])
def test_no_file_of_a_chunk_table_lies_outside_of_the_checkpoint(forgery, secret, path):
    files, arrays = decode_table(forgery.table, "")
    table = encode_table([path] * len(files), arrays)
    for change in ({"table": table}, {"tables": {0: table}, "of_all": False}):
        forgery.write(**change)
        if change.get("of_all", True):  # the host's own is as good
            np.testing.assert_array_equal(shardckpt.restore(forgery.url)["w"], TRUTH["w"])
        else:
            with pytest.raises(errors.FormatError):
                shardckpt.restore(forgery.url)
        assert not shardckpt.open(forgery.url).verify().ok
    forgery.unpublish()
    (outcome,) = shardckpt.commit(forgery.url)
    assert outcome.state == "refused"


def test_an_index_cannot_lead_out_of_the_checkpoint_either(forgery, tmp_path):
    """TensorStore itself refuses the keys; a node elsewhere is not even asked for."""
    (tmp_path / "outside").mkdir()
    node = ocdbt.leaf_node([b"w/c/0/0"], ["../../checkpoint.json"], [0], [0], [10])
    (tmp_path / "outside" / "node").write_bytes(node)
    for place in ("../../outside/node", "d/../../../outside/node"):
        (forgery.attempt / "manifest.ocdbt").write_bytes(ocdbt.manifest(place, len(node), 1, 10))
        damage = shardckpt.open(forgery.url).verify().damage
        assert damage
        assert all(d.file == f"{forgery.attempt.name}/manifest.ocdbt" for d in damage)


def test_a_link_to_a_checkpoint_and_links_within_it_are_followed(tmp_path):
    """Model hubs hand out directories of links. What is reached so passes the same checks."""
    forgery = Forgery.of_one_host(tmp_path / "checkpoint")
    farm = tmp_path / "farm"
    for path in sorted(forgery.url.rglob("*")):
        if path.is_file():
            link = farm / path.relative_to(forgery.url)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(path)
    (tmp_path / "link").symlink_to(farm, target_is_directory=True)
    for url in (farm, tmp_path / "link"):
        np.testing.assert_array_equal(shardckpt.restore(url)["w"], TRUTH["w"])
        assert shardckpt.open(url).verify().ok


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("special", ["a pipe", "a device", "a directory"])
def test_a_pipe_device_or_directory_in_place_of_a_file_is_an_error_and_not_waited_for(
    tmp_path, layout, special
):
    original = Forgery.of_one_host(tmp_path / "checkpoint", layout).url
    for i, path in enumerate(
        sorted(p.relative_to(original) for p in original.rglob("*") if p.is_file())
    ):
        copy = tmp_path / str(i)
        shutil.copytree(original, copy)
        (copy / path).unlink()
        if special == "a pipe":
            os.mkfifo(copy / path)
        elif special == "a device":
            (copy / path).symlink_to("/dev/zero")
        else:
            (copy / path).mkdir()
        try:
            assert not shardckpt.open(copy).verify().ok, path
        except ShardckptError:
            assert path.name == "checkpoint.json"
        use_in_every_way(copy)
