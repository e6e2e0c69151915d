"""Writes that their sender believes lost, and that land later: by then nothing may depend on their
not landing.

The proxy takes such a request in, resets the connection, and passes the request on when the test
says so. Whoever sent it has long given up, been overtaken, been collected or been deleted.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from faults import Rule, make_state, patience_of
from placeholders import put_placeholder
from processes import Processes

import shardckpt
from shardckpt.errors import AlreadyExistsError, NotFoundError, StorageError
from shardckpt.runs import collecting

pytestmark = pytest.mark.slow

STATE, OTHER = make_state(0), make_state(1)
RECORD, HOST_RECORD = "*/checkpoint.json", "*/records/00000.json"
INDEX = "*T??????-????????/manifest.ocdbt"
"""The attempt's own manifest, not a lane's."""
LATE = Rule("late", kinds=("upload",), objects=RECORD)


@pytest.fixture
def cloud(cloud):
    """The same, where everything has landed when a test ends."""
    yield cloud
    cloud.proxy.land()


def refused(status=503, objects=RECORD, **when):
    """From then on no such object can be written."""
    return Rule("status", status=status, kinds=("upload",), objects=objects, times=None, **when)


def save_without_an_answer(cloud, url, *rules, overwrite):
    """Save; the storage keeps the commit's first try, and answers the others by those rules."""
    if overwrite:
        shardckpt.save(url, OTHER)
    else:
        put_placeholder(url)
    with cloud.breaking(LATE, *rules):
        error = cloud.attempt_save(url, STATE, overwrite=overwrite)
    assert isinstance(error, StorageError), error
    assert f"{url}/checkpoint.json" in str(error)
    assert cloud.committed(url, STATE, OTHER) is (OTHER if overwrite else None)


def attempts(cloud, url):
    """The attempts of which anything is there."""
    return {key.partition("/")[0] for key in cloud.keys(url)} - {"checkpoint.json"}


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("then", [503, 403, 404, 412, "nothing at all"])
def test_a_commit_that_lands_after_its_saver_has_given_up_finds_all_that_it_names(
    cloud, then, overwrite
):
    url = cloud.place()
    # After the look for a record that comes before the write.
    silence = Rule("reset", kinds=("upload", "read"), objects=RECORD, skip=1, times=None)
    save_without_an_answer(
        cloud, url, silence if then == "nothing at all" else refused(then), overwrite=overwrite
    )
    assert cloud.proxy.land() == [200]
    cloud.assert_whole(url, STATE)


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_commit_that_lands_after_its_own_second_try_changes_nothing(cloud, overwrite):
    url = cloud.place()
    if overwrite:
        shardckpt.save(url, OTHER)
    else:
        put_placeholder(url)
    with cloud.breaking(LATE):
        assert cloud.attempt_save(url, STATE, overwrite=overwrite) is None
    assert cloud.proxy.land() == [412]
    cloud.assert_whole(url, STATE)


def test_a_commit_that_lands_after_another_one_changes_nothing(cloud):
    url = cloud.place()
    save_without_an_answer(cloud, url, refused(), overwrite=False)
    shardckpt.save(url, OTHER)
    assert cloud.proxy.land() == [412]
    cloud.assert_whole(url, OTHER)
    assert len(attempts(cloud, url)) == 2, (
        "nobody has told the saver that it may remove what it wrote"
    )
    collecting.collect(url, grace=0)
    assert len(attempts(cloud, url)) == 1
    cloud.assert_whole(url, OTHER)


def test_a_saver_that_is_overtaken_between_its_tries_removes_what_can_no_longer_land(cloud):
    url = cloud.place()
    put_placeholder(url)
    # The other saver does not go through the proxy.
    with (
        Processes("fault_hosts", env=cloud.emulator.env()) as others,
        patience_of("300"),
        ThreadPoolExecutor(1) as pool,
    ):
        assert others.run("save", 1, cloud.place(), 0) == ["saved"], (
            "they have started, however long it took"
        )
        with cloud.breaking(LATE, refused()):
            saving = pool.submit(cloud.attempt_save, url, OTHER)
            while cloud.injected() < 2:
                assert not saving.done()
            assert others.run("save", 1, url, 0) == ["saved"]
        assert isinstance(saving.result(), AlreadyExistsError)
    assert cloud.proxy.land() == [412]
    assert len(attempts(cloud, url)) == 1
    assert shardckpt.open(url).verify().ok


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_commit_that_lands_after_a_collection_has_published_its_attempt_changes_nothing(
    cloud, overwrite
):
    url = cloud.place()
    save_without_an_answer(cloud, url, refused(), overwrite=overwrite)
    assert [one.outcome for one in collecting.collect(url, grace=0)] == ["published"], (
        "its data is complete"
    )
    assert cloud.proxy.land() in ([412], [404])
    assert len(attempts(cloud, url)) == 1
    cloud.assert_whole(url, STATE)


def test_a_commit_that_lands_after_its_checkpoint_was_deleted_publishes_nothing(cloud):
    url = cloud.place()
    save_without_an_answer(cloud, url, refused(), overwrite=True)
    collecting.delete(url, grace=0)
    assert cloud.proxy.land() in ([412], [404])
    assert cloud.keys(url) == []
    with pytest.raises(NotFoundError):
        shardckpt.open(url)


def test_a_host_s_record_that_lands_after_its_saver_has_given_up_completes_the_attempt(cloud):
    url = cloud.place()
    with cloud.breaking(replace(LATE, objects=HOST_RECORD), refused(objects=HOST_RECORD)):
        assert isinstance(cloud.attempt_save(url, STATE), StorageError)
    assert [outcome.state for outcome in shardckpt.commit(url)] == ["incomplete"]
    assert cloud.proxy.land() == [200]
    assert [outcome.state for outcome in shardckpt.commit(url)] == ["committed"]
    cloud.assert_whole(url, STATE)


@pytest.mark.parametrize("lands", ["before the commit", "after it"])
def test_a_merged_index_that_lands_after_its_host_went_on_without_it_is_complete(cloud, lands):
    url = cloud.place()
    late = (replace(LATE, objects=INDEX), refused(403, INDEX))
    if lands == "after it":
        late = (late[0], Rule("status", status=403, kinds=("upload",), objects=INDEX))
    with cloud.breaking(*late):
        error = cloud.attempt_save(url, STATE)
    assert (error is None) == (lands == "after it"), error
    assert cloud.proxy.land() == [200]
    if lands == "before the commit":
        assert [outcome.state for outcome in shardckpt.commit(url)] == ["committed"]
    cloud.assert_whole(url, STATE)
    assert shardckpt.open(url).verify().ok


@pytest.mark.parametrize("status", [404, 412])
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_storage_that_refuses_and_shows_what_was_there_before_is_not_believed(
    cloud, status, overwrite
):
    url = cloud.place()
    if overwrite:
        shardckpt.save(url, OTHER)
    else:
        put_placeholder(url)
    with cloud.breaking(refused(status)):
        error = cloud.attempt_save(url, STATE, overwrite=overwrite)
    assert isinstance(error, StorageError), error
    assert f"{url}/checkpoint.json" in str(error)
    assert cloud.committed(url, STATE, OTHER) is (OTHER if overwrite else None)
