"""One large object goes to an object store part by part: whole or not at all, whatever fails on the
way, with little memory."""

from __future__ import annotations

import dataclasses
import socket
import sys
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from emulators import environment
from faults import TRANSIENT, Rule, faulty_cloud
from hypothesis import given
from hypothesis import strategies as st

from shardckpt.errors import (
    AlreadyExistsError,
    BudgetError,
    CorruptionError,
    FormatError,
    MissingExtraError,
    StorageError,
)
from shardckpt.format.documents import Fields
from shardckpt.io.buckets import cloud as settings
from shardckpt.io.buckets.upload_session import UploadState
from shardckpt.io.buckets.uploading import (
    BUFFERS,
    MOST_PARTS,
    SMALLEST,
    abandon_upload,
    open_upload,
    part_size,
)
from shardckpt.io.store import Store
from shardckpt.io.url import parse

PART = 1 << 18
SIZE = 5 * PART + 1234


def content(nbytes=SIZE, seed=0):
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


@pytest.fixture(scope="module", params=["gs", "s3"])
def cloud(request):
    """A bucket of each kind behind the proxy."""
    server = request.getfixturevalue("gcs_server" if request.param == "gs" else "s3_server")
    # TensorStore keeps a bucket's endpoint: this one is known by the proxy's alone.
    ours = dataclasses.replace(server, bucket=server.new_bucket(f"uploads-{uuid.uuid4().hex}"))
    with faulty_cloud(ours) as faulty:
        yield faulty


@pytest.fixture
def place(cloud):
    """Of an object that is not there yet."""
    return parse(cloud.emulator.url(uuid.uuid4().hex, "a model"))


def stored(place):
    """The bytes of the object there, None where there is none."""
    return Store.open(place.parent).read_versioned(place.name)[0]


def upload(place, data, **options):
    with open_upload(place, part_bytes=PART, **options) as one:
        one.write(data)
        one.finish()


def write_confirmed(one, data):
    """Write, and wait until the storage has confirmed all full parts: `close` drops a part that no
    thread has begun to send."""
    one.write(data)
    full = len(data) // PART * PART
    for _ in range(6000):
        if one.durable == full:
            return
        time.sleep(0.01)
    raise TimeoutError(f"{one.durable} of {full} bytes are confirmed after a minute")


def unfinished(cloud):
    """Uploads that S3 keeps parts of."""
    from boto3 import client

    listed = client("s3", endpoint_url=cloud.emulator.endpoint).list_multipart_uploads(
        Bucket=cloud.emulator.bucket
    )
    return [one["Key"] for one in listed.get("Uploads", ())]


@pytest.mark.parametrize("nbytes", [0, 1, PART - 1, PART, PART + 1, 3 * PART, SIZE])
def test_an_object_is_what_was_written_and_is_visible_when_it_is_finished(place, nbytes):
    data = content(nbytes)
    with open_upload(place, part_bytes=PART) as one:
        for at in range(0, nbytes, 100_003):
            one.write(memoryview(data)[at : at + 100_003])
        assert stored(place) is None
        assert not one.published
        one.finish()
        assert one.published
        one.finish()
    assert stored(place) == data.tobytes()


def test_the_caller_s_buffer_may_be_used_again_at_once(place):
    data, buffer = content(), np.empty(PART // 2, np.uint8)
    with open_upload(place, part_bytes=PART) as one:
        for at in range(0, SIZE, buffer.size):
            piece = buffer[: min(buffer.size, SIZE - at)]
            piece[:] = data[at : at + piece.size]
            one.write(piece)
            piece[:] = 0
        one.finish()
    assert stored(place) == data.tobytes()


@pytest.mark.parametrize("buffers", [2, BUFFERS])
def test_memory_is_that_of_a_few_parts_however_slow_the_storage_is(cloud, place, buffers):
    data = content(12 * PART)
    slow = Rule("latency", seconds=0.02, kinds=("upload",), times=None)
    with cloud.breaking(slow), open_upload(place, part_bytes=PART, buffers=buffers) as one:
        for at in range(0, data.size, 50_000):
            one.write(data[at : at + 50_000])
        one.finish()
        expected = 2 if cloud.emulator.scheme == "gs" else buffers
        assert one.pool.high_water == one.pool.limit == expected * PART
    assert stored(place) == data.tobytes()


@pytest.mark.long
@pytest.mark.parametrize("fault", ["503", "cut off", "lost answer", "truncated"])
def test_an_upload_survives_that_any_one_request_fails(cloud, fault):
    data = content(2 * PART + 7)
    for _ in cloud.each_request(TRANSIENT[fault], at_least=4):
        place = parse(cloud.place())
        upload(place, data)
        assert stored(place) == data.tobytes()


@pytest.mark.parametrize("fault", TRANSIENT)
def test_an_upload_survives_failures_of_every_kind(cloud, place, fault):
    with cloud.breaking(Rule(**TRANSIENT[fault], skip=1, times=3)):
        upload(place, content())
        assert cloud.injected() == 3
    assert stored(place) == content().tobytes()


def test_a_part_that_was_cut_off_is_gone_on_with_where_the_storage_can_do_that(cloud, place):
    part = 4 * PART
    with cloud.breaking(Rule("reset", kinds=("upload",), skip=2, after_bytes=3 * PART + 5)):
        with open_upload(place, part_bytes=part, buffers=2) as one:
            one.write(content(3 * part))
            one.finish()
        sent = cloud.proxy.traffic.uploaded()[
            cloud.name_of(str(place)).rstrip("/").replace("%20", " ")
        ]
    again = 5 if cloud.emulator.scheme == "gs" else 3 * PART + 5
    assert again <= sent - 3 * part < again + 4096  # and what begins and ends an upload
    assert stored(place) == content(3 * part).tobytes()


def test_a_storage_that_does_not_recover_is_an_error_and_nothing_is_visible(cloud, place):
    unavailable = Rule("status", kinds=("upload",), skip=2, times=None)
    with (
        cloud.breaking(unavailable),
        pytest.raises(StorageError, match=r"attempts failed.*SHARDCKPT_RETRY_SECONDS") as failed,
    ):
        upload(place, content())
    assert str(place) in str(failed.value)
    assert stored(place) is None


@pytest.mark.parametrize("status", [404, 412])
def test_an_upload_whose_last_answer_is_lost_finds_its_own_object(cloud, place, status):
    """The upload succeeds, with either status in the answer to the repeated request."""
    before = 1 if cloud.emulator.scheme == "gs" else 2
    lost, refused = (
        Rule(fault, status=status, kinds=("upload",), skip=before)
        for fault in ("lost-answer", "status")
    )
    with cloud.breaking(lost, refused):
        upload(place, content(100))
        assert [e.fault for e in cloud.proxy.traffic.exchanges() if e.fault] == [
            "lost-answer",
            f"status {status}",
        ]
    assert stored(place) == content(100).tobytes()


def test_after_a_failure_nothing_is_published_though_the_storage_recovers(cloud, place):
    one = open_upload(place, part_bytes=PART, buffers=2)
    with (
        cloud.breaking(Rule("status", status=403, kinds=("upload",), times=1)),
        pytest.raises(StorageError, match="give these credentials"),
    ):
        one.write(content())
    for again in (one.finish, one.finish, lambda: one.write(b"more")):
        with pytest.raises(StorageError):
            again()
    one.close()
    with pytest.raises(StorageError, match="closed"):
        one.finish()
    assert stored(place) is None


def test_another_process_goes_on_where_the_storage_has_confirmed(cloud, place):
    data, state, at = content(), None, 0
    for _ in range(20):
        with open_upload(place, part_bytes=PART, resume=state) as one:
            assert one.resume_at <= one.durable
            assert one.resume_at >= at, "what was confirmed before is confirmed still"
            at = one.resume_at
            one.write(data[at : at + PART + 1])
            if at + PART + 1 >= SIZE:
                one.finish()
                break
        # The parts that `close` has waited for are confirmed, and all that another process has is
        # text.
        state = UploadState.from_json(Fields(one.state.to_json(), "state"))
    assert stored(place) == data.tobytes()
    begun = open_upload(place, part_bytes=PART, resume=one.state)
    assert begun.published, (
        "a process that was killed after it published is followed by one that finds it done"
    )
    begun.finish()
    begun.abort()
    assert stored(place) == data.tobytes()


def test_what_the_storage_has_is_not_sent_again(cloud, place):
    data = content()
    with open_upload(place, part_bytes=PART) as one:
        write_confirmed(one, data[: 3 * PART + 9])
    durable = one.durable
    assert durable == 3 * PART
    with cloud.breaking(), open_upload(place, part_bytes=PART, resume=one.state) as other:
        other.write(data[other.resume_at :])
        other.finish()
        assert cloud.proxy.traffic.summary()["bytes_up"] <= SIZE - durable + 4096
    assert stored(place) == data.tobytes()


def test_bytes_that_were_confirmed_after_the_state_was_written_are_not_sent_again(cloud, place):
    data = content()
    with open_upload(place, part_bytes=PART) as one:
        early = one.state
        write_confirmed(one, data[: 3 * PART + 9])
    with cloud.breaking(), open_upload(place, part_bytes=PART, resume=early) as other:
        assert other.durable == 3 * PART
        assert other.resume_at == (0 if cloud.emulator.scheme == "gs" else 3 * PART)
        other.write(data[other.resume_at :])
        other.finish()
        assert cloud.proxy.traffic.summary()["bytes_up"] <= SIZE - 3 * PART + 4096
    assert stored(place) == data.tobytes()


def test_an_upload_that_failed_at_its_last_request_goes_on_with_the_last_part(cloud, place):
    data = content(2 * PART + 7)
    before = 3 if cloud.emulator.scheme == "gs" else 4
    forbidden = Rule("status", status=403, kinds=("upload",), skip=before)
    with cloud.breaking(forbidden), open_upload(place, part_bytes=PART) as one:
        one.write(data)
        with pytest.raises(StorageError):
            one.finish()
    with open_upload(place, part_bytes=PART, resume=one.state) as other:
        assert other.resume_at == other.durable == 2 * PART
        other.write(data[other.resume_at :])
        other.finish()
    assert stored(place) == data.tobytes()


def test_an_upload_that_was_ended_is_begun_anew(cloud, place):
    with open_upload(place, part_bytes=PART) as one:
        one.write(content())
        abandon_upload(place, one.state)
        with pytest.raises(StorageError):
            one.finish()
    with open_upload(place, part_bytes=PART, resume=one.state) as other:
        assert other.resume_at == other.durable == 0
        assert other.state.token != one.state.token
        other.write(content(seed=1))
        other.finish()
    assert stored(place) == content(seed=1).tobytes()


@pytest.mark.parametrize("change", [{"part_bytes": 2 * PART}, {"if_absent": False}])
def test_an_upload_of_other_terms_is_ended_and_begun_anew(cloud, place, change):
    with open_upload(place, part_bytes=PART) as one:
        one.write(content())
    with open_upload(place, **{"part_bytes": PART, **change}, resume=one.state) as other:
        assert other.resume_at == 0
        other.abort()
    with open_upload(place, part_bytes=PART, resume=one.state) as late:
        assert late.state.token != one.state.token
        late.abort()
    if cloud.emulator.scheme == "s3":
        assert f"{place.parent.name}/{place.name}" not in unfinished(cloud)


def test_an_aborted_upload_leaves_nothing(cloud, place):
    one = open_upload(place, part_bytes=PART)
    one.write(content())
    one.abort()
    one.abort()
    assert stored(place) is None
    assert cloud.keys(str(place.parent)) == []
    if cloud.emulator.scheme == "s3":
        assert f"{place.parent.name}/{place.name}" not in unfinished(cloud)


def test_an_object_that_is_there_is_not_replaced_unless_that_is_asked_for(cloud, place):
    upload(place, content())
    with pytest.raises(AlreadyExistsError, match="overwrite=True"):
        upload(place, content(seed=1))
    with open_upload(place, part_bytes=PART, if_absent=False) as one:
        one.write(content(seed=1))
        assert stored(place) == content().tobytes()
        one.finish()
    assert stored(place) == content(seed=1).tobytes()


def test_one_that_appears_meanwhile_is_not_replaced_either(cloud, place):
    with open_upload(place, part_bytes=PART) as late:
        late.write(content(seed=1))
        upload(place, content())
        with pytest.raises(AlreadyExistsError):
            late.finish()
        late.abort()
        with pytest.raises(AlreadyExistsError):
            open_upload(place, part_bytes=PART, resume=late.state)
    assert stored(place) == content().tobytes()
    with open_upload(place, part_bytes=PART, if_absent=False, resume=late.state) as one:
        assert one.resume_at == 0  # the upload before would still not replace it
        one.write(content(seed=1))
        one.finish()
    assert stored(place) == content(seed=1).tobytes()


@pytest.mark.parametrize("lost_answers", [0, 1])
def test_of_several_that_finish_at_once_exactly_one_wins(cloud, place, lost_answers):
    together = threading.Barrier(3)

    def write(seed):
        with open_upload(place, part_bytes=PART) as one:
            one.write(content(PART + 5, seed))
            together.wait(60)
            try:
                one.finish()
            except AlreadyExistsError:
                one.abort()
                return None
            return seed

    last = 6 if cloud.emulator.scheme == "gs" else 9
    lost = Rule("lost-answer", kinds=("upload",), skip=last, times=lost_answers)
    with cloud.breaking(lost), ThreadPoolExecutor(3) as pool:
        (winner,) = (seed for seed in pool.map(write, range(3)) if seed is not None)
    assert stored(place) == content(PART + 5, winner).tobytes()


def test_an_upload_that_arrives_changed_does_not_become_visible(cloud, place):
    """On S3 that is the service's to see, part by part; its emulator does not look."""
    if cloud.emulator.scheme == "s3":
        return
    with open_upload(place, part_bytes=PART) as one:
        one.write(content())
    wrong = dataclasses.replace(one.state, crc32c=one.state.crc32c ^ 1)
    with open_upload(place, part_bytes=PART, resume=wrong) as other:
        other.write(content()[other.resume_at :])
        with pytest.raises((StorageError, CorruptionError), match="checksum"):
            other.finish()
    assert stored(place) is None


def test_a_state_that_somebody_else_wrote_leads_nowhere_else(cloud, place):
    with socket.create_server(("127.0.0.1", 0)) as elsewhere:
        elsewhere.setblocking(False)
        uri = f"http://127.0.0.1:{elsewhere.getsockname()[1]}/upload/storage/v1/b/{cloud.emulator.bucket}/o?upload_id=1"
        theirs = UploadState(uri, "token", PART, if_absent=True)
        abandon_upload(place, theirs)
        with open_upload(place, part_bytes=PART, resume=theirs) as one:
            one.write(content())
            one.finish()
        with pytest.raises(BlockingIOError):
            elsewhere.accept()
    assert stored(place) == content().tobytes()


def test_a_service_that_knows_no_crc32c_gets_md5(cloud, place):
    if cloud.emulator.scheme == "gs":
        return
    with (
        cloud.breaking(Rule("status", status=501, kinds=("upload",))),
        open_upload(place, part_bytes=PART) as one,
    ):
        assert one.state.checksum == "md5"
        one.write(content()[: 2 * PART])
    with open_upload(place, part_bytes=PART, resume=one.state) as other:
        other.write(content()[other.resume_at :])
        other.finish()
    assert stored(place) == content().tobytes()


@pytest.mark.parametrize(
    ("url", "variables", "advice"),
    [
        ("s3://bucket/x", {"AWS_ENDPOINT_URL": "http://127.0.0.1:1"}, "set AWS_ACCESS_KEY_ID"),
        (
            "gs://bucket/x",
            {"TENSORSTORE_GCS_HTTP_URL": "https://127.0.0.1:1"},
            "set GOOGLE_APPLICATION_CREDENTIALS",
        ),
    ],
)
def test_missing_credentials_are_named(tmp_path, monkeypatch, url, variables, advice):
    for name in (
        "AWS_ACCESS_KEY_ID",
        "AWS_SECRET_ACCESS_KEY",
        "AWS_PROFILE",
        "GOOGLE_APPLICATION_CREDENTIALS",
        "GOOGLE_AUTH_TOKEN_FOR_TESTING",
    ):
        monkeypatch.delenv(name, raising=False)
    nobody = {
        "HOME": str(tmp_path),
        "AWS_EC2_METADATA_DISABLED": "true",
        "NO_GCE_CHECK": "true",
        "CLOUDSDK_CONFIG": str(tmp_path),
    }
    with environment({**variables, **nobody}), pytest.raises(StorageError, match=advice):
        open_upload(parse(url), part_bytes=PART)


def test_a_bucket_that_is_not_there_is_told(cloud):
    with pytest.raises(StorageError, match="create it, or check its name"):
        open_upload(parse(f"{cloud.emulator.scheme}://{uuid.uuid4().hex}/x"), part_bytes=PART)


@pytest.mark.parametrize(
    "change",
    [{"part_bytes": 0}, {"summed": 1}, {"crc32c": 1 << 32}, {"checksum": "sha1"}, {"upload": 1}],
)
def test_a_state_that_cannot_be_is_refused(change):
    good = UploadState("id", "token", PART, if_absent=True, summed=PART, crc32c=7).to_json()
    assert UploadState.from_json(Fields(good, "state")).to_json() == good
    with pytest.raises(FormatError, match="state"):
        UploadState.from_json(Fields({**good, **change}, "state"))


@pytest.mark.parametrize(
    ("url", "variable"),
    [("s3://bucket/x", "AWS_ENDPOINT_URL"), ("gs://bucket/x", "TENSORSTORE_GCS_HTTP_URL")],
)
def test_a_service_that_never_answers_is_given_up(monkeypatch, url, variable):
    monkeypatch.setattr(settings, "stalled_seconds", lambda: 0.1)
    keys = {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "SHARDCKPT_RETRY_SECONDS": "0.05",
    }
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = {variable: f"http://127.0.0.1:{silent.getsockname()[1]}"}
        with (
            environment({**endpoint, **keys}),
            pytest.raises(StorageError, match=r"attempts failed.*Timeout"),
        ):
            open_upload(parse(url), part_bytes=PART)


@pytest.mark.parametrize(
    ("url", "variable"),
    [("s3://bucket/x", "AWS_ENDPOINT_URL"), ("gs://bucket/x", "TENSORSTORE_GCS_HTTP_URL")],
)
def test_a_service_that_refuses_connections_is_asked_again_and_given_up(url, variable):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        endpoint = f"http://127.0.0.1:{closed.getsockname()[1]}"
    keys = {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "SHARDCKPT_RETRY_SECONDS": "0.05",
    }
    with (
        environment({variable: endpoint, **keys}),
        pytest.raises(StorageError, match=r"attempts failed.*SHARDCKPT_RETRY_SECONDS"),
    ):
        open_upload(parse(url), part_bytes=PART)


@pytest.mark.parametrize(("scheme", "package"), [("gs", "google.auth"), ("s3", "botocore")])
def test_what_is_not_installed_is_named(monkeypatch, scheme, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtraError, match=package.replace(".", "-")):
        open_upload(parse(f"{scheme}://bucket/x"), part_bytes=PART)


@given(nbytes=st.integers(0, 5 << 40), memory_limit=st.integers(0, 4 << 30))
def test_parts_are_few_enough_and_fit_the_memory(nbytes, memory_limit):
    try:
        part = part_size(nbytes, memory_limit)
    except BudgetError:
        assert memory_limit < 2 * max(SMALLEST, nbytes // MOST_PARTS + (1 << 20))
        return
    assert part >= SMALLEST
    assert part % PART == 0
    assert part * MOST_PARTS >= nbytes
    assert 2 * part <= memory_limit


def test_requests_are_begun_at_the_rate_of_all_others(cloud, place, monkeypatch):
    begun = []
    monkeypatch.setattr(settings, "wait_for_rate", begun.append)
    with cloud.breaking(), open_upload(place, part_bytes=PART) as one:
        one.write(content())
        one.finish()
        assert len(begun) == cloud.proxy.traffic.summary()["requests"]
