"""The proxy that other tests rely on: it enforces what Cloud Storage documents, counts everything,
and breaks what it is told to."""

from __future__ import annotations

import base64
import http.client
import json
import socket
import subprocess
import sys
import uuid
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import boto3
import botocore.config
import botocore.exceptions
import crc32c
import pytest
import tensorstore as ts
from emulators import environment
from fault_proxy import FaultProxy
from fault_rules import Rule

# Of gcsfs itself, importing it decides for the whole process whether it asks over gRPC.
from gcsfs.core import GCSFileSystem
from json_api import Objects, ask
from paths import TOOLS

RETRIES = {"max_retries": 5, "initial_delay": "1ms", "max_delay": "10ms"}


@pytest.fixture(scope="module")
def running(gcs_server):
    with FaultProxy(gcs_server.endpoint) as proxy:
        yield proxy


@pytest.fixture
def proxy(running):
    """A proxy before fake-gcs-server, which breaks nothing yet and has counted nothing."""
    running.traffic.reset()
    yield running
    running.rules.clear()


@pytest.fixture
def bucket(gcs_server):
    """A new bucket: TensorStore keeps the connection to one that it knows."""
    name = f"proxy-{uuid.uuid4().hex}"
    assert (
        ask(gcs_server.endpoint, "POST", "/storage/v1/b?project=test", json.dumps({"name": name}))[
            0
        ]
        == 200
    )
    return name


@pytest.fixture
def store(proxy, bucket, gcs_server):
    """TensorStore on that bucket, through the proxy."""
    with environment(gcs_server.env(proxy.url)):
        return ts.KvStore.open(
            {"driver": "gcs", "bucket": bucket, "gcs_request_retries": RETRIES}
        ).result()


# --- preconditions --------------------------------------------------------------------------------

OK = "goes ahead"
DOCUMENTED = {
    # condition, G being the object's generation: without an object, with one
    "": (OK, OK),
    "ifGenerationMatch=0": (OK, 412),
    "ifGenerationMatch=G": (412, OK),
    "ifGenerationMatch=7": (412, 412),
    "ifGenerationNotMatch=0": (304, OK),
    "ifGenerationNotMatch=G": (OK, 304),
    "ifGenerationNotMatch=7": (OK, OK),
    "ifGenerationMatch=G&ifGenerationNotMatch=7": (412, OK),
    "ifGenerationMatch=G&ifGenerationNotMatch=G": (412, 304),
}
NEED_AN_OBJECT = ("delete", "read", "stat")


@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize("condition", DOCUMENTED)
@pytest.mark.parametrize(
    "kind", ["media", "multipart", "resumable", "compose", "copy", *NEED_AN_OBJECT]
)
def test_a_request_goes_ahead_exactly_when_its_preconditions_hold(
    proxy, bucket, kind, condition, there
):
    objects, name = Objects(proxy.url, bucket), "run/a b"
    generation = 12345
    if there:
        assert objects.media(name, data=b"old") == 200
        generation = objects.generation(name)
    expected = DOCUMENTED[condition][there]
    if kind in NEED_AN_OBJECT and not there:
        expected = 404
    status = getattr(objects, kind)(name, condition.replace("=G", f"={generation}"))
    assert status in (200, 204) if expected == OK else status == expected
    before = b"old" if there else None
    after = {"delete": None, "read": before, "stat": before}.get(kind, b"new")
    assert objects.content(name) == (after if expected == OK else before)


def test_the_preconditions_of_a_resumable_upload_hold_when_it_ends(proxy, bucket):
    objects = Objects(proxy.url, bucket)
    first, second = (objects.begin("name", "ifGenerationMatch=0") for _ in range(2))
    part = {"Content-Range": "bytes 0-2/*"}
    assert [ask(proxy.url, "PUT", path, b"abc", part)[0] for path in (first, second)] == [308, 308]
    rest = {"Content-Range": "bytes 3-5/6"}
    assert ask(proxy.url, "PUT", first, b"def", rest)[0] == 200
    assert ask(proxy.url, "PUT", second, b"xyz", rest)[0] == 412
    assert objects.content("name") == b"abcdef"


K = 1 << 18


class Session:
    """A resumable upload through the proxy."""

    def __init__(self, proxy, bucket):
        self.objects = Objects(proxy.url, bucket)
        self.path = self.objects.begin("name")

    def put(self, span, body=b"", **headers):
        """Status, and how far the session says it is."""
        status, answered, _ = ask(
            self.objects.url, "PUT", self.path, body, {"Content-Range": f"bytes {span}", **headers}
        )
        return status, answered.get("Range")

    @property
    def content(self):
        return self.objects.content("name")


@pytest.fixture
def session(proxy, bucket):
    return Session(proxy, bucket)


def test_a_resumable_upload_that_is_asked_how_far_it_is_says_so_and_is_not_published(session):
    assert session.put("*/*") == (308, None)
    assert session.put(f"0-{K - 1}/*", b"a" * K) == (308, f"bytes=0-{K - 1}")
    for query in ("*/*", f"*/{K + 1}"):
        assert session.put(query) == (308, f"bytes=0-{K - 1}")
    assert session.content is None
    assert session.put(f"*/{K}")[0] == 200
    assert session.content == b"a" * K
    assert session.put("*/*")[0] == 200, "it has become the object"


def test_a_resumable_upload_ignores_what_it_has_and_refuses_what_is_not_next(session):
    session.put(f"0-{K - 1}/*", b"a" * K)
    assert session.put(f"{K + 1}-{2 * K}/*", b"b" * K)[0] == 400
    assert session.put(f"0-{K - 1}/*", b"z" * K) == (308, f"bytes=0-{K - 1}")
    assert session.put(f"{K - 2}-{K + 2}/{K + 3}", b"zzbcd")[0] == 200
    assert session.content == b"a" * K + b"bcd"


def test_a_resumable_upload_keeps_what_came_before_the_connection_broke(session, proxy):
    with proxy.rules.during(Rule("reset", after_bytes=K + 5)), pytest.raises(OSError):
        session.put(f"0-{3 * K - 1}/*", b"a" * 3 * K)
    assert session.put("*/*") == (308, f"bytes=0-{K - 1}")


def test_a_resumable_upload_is_refused_whose_checksum_does_not_agree(session):
    session.put(f"0-{K - 1}/*", bytes(K))
    assert (
        session.put(f"{K}-{K + 2}/{K + 3}", b"abc", **{"x-goog-hash": "crc32c=AAAAAA=="})[0] == 400
    )
    assert session.content is None
    right = base64.b64encode(crc32c.crc32c(bytes(K) + b"abc").to_bytes(4)).decode()
    assert (
        session.put(f"{K}-{K + 2}/{K + 3}", b"abc", **{"x-goog-hash": f"crc32c={right}"})[0] == 200
    )
    assert session.content == bytes(K) + b"abc"


def test_a_resumable_upload_that_was_deleted_is_known_no_more(session):
    session.put(f"0-{K - 1}/*", bytes(K))
    assert ask(session.objects.url, "DELETE", session.path)[0] == 499
    assert session.put("*/*")[0] == session.put(f"*/{K}")[0] == 404
    assert session.content is None


def test_a_precondition_that_the_proxy_does_not_know_is_refused_rather_than_ignored(proxy, bucket):
    objects = Objects(proxy.url, bucket)
    assert objects.media("name", "ifMetagenerationMatch=0") == 501
    assert objects.media("name", "ifGenerationMatch=new") == 400
    assert objects.content("name") is None


def test_of_many_creators_at_once_exactly_one_wins(proxy, bucket, store):
    missing = store.read("record").result().stamp.generation
    objects = Objects(proxy.url, bucket)

    def create(i):
        if i % 4 == 0:
            return bool(store.write("record", str(i), if_equal=missing).result().generation)
        upload = [objects.media, objects.multipart, objects.resumable][i % 4 - 1]
        return upload("record", "ifGenerationMatch=0", str(i).encode()) == 200

    with ThreadPoolExecutor(16) as pool:
        for _ in range(5):
            won = list(pool.map(create, range(16)))
            assert won.count(True) == 1
            assert objects.content("record") == str(won.index(True)).encode()
            store.write("record", None).result()


def test_no_increment_of_a_counter_is_lost_however_many_swap_at_once(store):
    store.write("counter", b"0").result()

    def increment(times):
        generations = []
        while len(generations) < times:
            counter = store.read("counter").result()
            value = str(int(counter.value) + 1)
            generations += filter(
                None,
                [
                    store.write("counter", value, if_equal=counter.stamp.generation)
                    .result()
                    .generation
                ],
            )
        return generations

    with ThreadPoolExecutor(8) as pool:
        generations = [g for part in pool.map(increment, [5] * 8) for g in part]
    assert store.read("counter").result().value == b"40"
    assert len(set(generations)) == 40


# --- what is counted ------------------------------------------------------------------------------


def test_every_request_is_counted_by_kind_object_and_bytes(proxy, bucket, store):
    store.write("run/a", b"x" * 3000).result()
    store.write("run/b", b"y" * 500).result()
    store.read("run/a").result()
    store.read("run/a", byte_range=slice(100, 300)).result()
    store.read("run/a", byte_range=slice(0, 0)).result()
    store.read("run/none").result()
    store.list().result()
    store.write("run/b", None).result()
    counts = proxy.traffic.summary(f"{bucket}/run/")
    assert counts["kinds"] == {"upload": 2, "read": 3, "stat": 1, "delete": 1}
    assert counts["methods"] == {"POST": 2, "GET": 4, "DELETE": 1}
    assert counts["statuses"] == {"200": 4, "206": 1, "404": 1, "204": 1} or counts["statuses"] == {
        "200": 5,
        "206": 1,
        "404": 1,
    }
    assert counts["uploaded"] == {f"{bucket}/run/a": 3000, f"{bucket}/run/b": 500}
    assert counts["bytes_up"] == 3500
    reads = [
        e.bytes_down
        for e in proxy.traffic.exchanges(f"{bucket}/run/a")
        if e.operation.kind == "read"
    ]
    assert reads == [3000, 200]
    assert proxy.traffic.summary()["kinds"]["list"] == 1


def test_bytes_that_a_client_sends_again_are_seen(proxy, bucket, store):
    proxy.rules.add(Rule("status", status=503, times=2), Rule("reset", after_bytes=1000))
    store.write("name", b"x" * 3000).result()
    assert proxy.traffic.uploaded() == {f"{bucket}/name": 3 * 3000 + 1000}


def test_counts_and_rules_are_to_be_had_over_http_too(proxy, bucket):
    objects = Objects(proxy.url, bucket)
    rule = {"fault": "status", "status": 429, "kinds": ["upload"], "objects": "*/a"}
    assert ask(proxy.url, "POST", "/__proxy__/rules", json.dumps([rule]))[0] == 200
    assert [objects.media(name) for name in ("a", "b", "a")] == [429, 200, 200]
    (entry,) = json.loads(ask(proxy.url, "GET", "/__proxy__/rules")[2])
    assert entry["fired"] == 1
    assert entry["rule"]["status"] == 429

    counts = json.loads(ask(proxy.url, "GET", f"/__proxy__/stats?prefix={bucket}/a")[2])
    assert counts == proxy.traffic.summary(f"{bucket}/a")
    assert counts["faults"] == {"status 429": 1}
    assert json.loads(ask(proxy.url, "DELETE", "/__proxy__/stats")[2])["requests"] == 0
    assert json.loads(ask(proxy.url, "DELETE", "/__proxy__/rules")[2]) == []
    assert ask(proxy.url, "POST", "/__proxy__/rules", '{"fault": "gremlins"}')[0] == 400
    assert ask(proxy.url, "GET", "/__proxy__/nothing")[0] == 404


@pytest.mark.parametrize(
    "name", ["a", "deep/down/a b", "ü/100%25", "a?b#c&d=e", "compose", "x/compose/y", "o/b/o"]
)
def test_an_object_is_known_by_its_name_whatever_is_in_it(proxy, bucket, store, name):
    store.write(name, b"data").result()
    assert store.read(name).result().value == b"data"
    store.read(name, byte_range=slice(0, 0)).result()
    store.write(name, None).result()
    assert [(e.operation.kind, e.operation.object) for e in proxy.traffic.exchanges()] == [
        (kind, f"{bucket}/{name}") for kind in ("upload", "read", "stat", "delete")
    ]


@pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")  # gcsfs does
def test_a_client_that_uploads_in_parts_works_through_it(proxy, bucket, gcs_server):
    with environment(gcs_server.env(proxy.url)):
        fs = GCSFileSystem(
            endpoint_url=proxy.url, token="anon", skip_instance_cache=True, use_listings_cache=False
        )
        data = bytes(range(256)) * (13 << 12)  # 13 MiB: resumable, in several parts
        fs.pipe_file(f"{bucket}/run/big", data, chunksize=5 << 20)
        fs.pipe_file(f"{bucket}/run/small", b"small", mode="create")
        with pytest.raises(FileExistsError):
            fs.pipe_file(f"{bucket}/run/small", b"other", mode="create")
        assert fs.cat_file(f"{bucket}/run/big") == data
        assert fs.cat_file(f"{bucket}/run/small", 1, 3) == b"ma"
        assert sorted(fs.ls(f"{bucket}/run")) == [f"{bucket}/run/big", f"{bucket}/run/small"]
        fs.rm_file(f"{bucket}/run/small")
        assert not fs.exists(f"{bucket}/run/small")
    uploaded = proxy.traffic.uploaded()
    assert len(data) <= uploaded[f"{bucket}/run/big"] < len(data) + 1000, (
        "more by the JSON that began it"
    )
    assert proxy.traffic.summary()["statuses"]["412"] == 1


@pytest.mark.long
def test_amazon_s_own_client_works_through_it(s3_server):
    with FaultProxy(s3_server.endpoint) as proxy:
        s3 = boto3.client(
            "s3",
            endpoint_url=proxy.url,
            region_name="us-east-1",
            aws_access_key_id="test",
            aws_secret_access_key="test",
            config=botocore.config.Config(
                retries={"total_max_attempts": 3}, s3={"addressing_style": "path"}
            ),
        )
        name = {"Bucket": s3_server.bucket, "Key": "run/a b"}
        with proxy.rules.during(
            Rule("status", status=503), Rule("lost-answer", skip=1, kinds=("read",))
        ):
            s3.put_object(**name, Body=b"data")
            assert s3.get_object(**name)["Body"].read() == b"data"
            assert s3.get_object(**name)["Body"].read() == b"data"
        with pytest.raises(botocore.exceptions.ClientError, match="PreconditionFailed"):
            s3.put_object(**name, Body=b"other", IfNoneMatch="*")
        assert s3.head_object(**name)["ContentLength"] == 4
        assert [
            o["Key"] for o in s3.list_objects_v2(Bucket=s3_server.bucket, Prefix="run/")["Contents"]
        ] == ["run/a b"]
        s3.delete_object(**name)
        kinds = [
            (e.operation.kind, e.status)
            for e in proxy.traffic.exchanges(f"{s3_server.bucket}/run/")
        ]
        assert kinds == [
            ("upload", 503),
            ("upload", 200),
            ("read", 200),
            ("read", None),
            ("read", 200),
            ("upload", 412),
            ("stat", 200),
            ("list", 200),
            ("delete", 204),
        ]


# --- what is broken -------------------------------------------------------------------------------


def test_an_injected_status_is_answered_and_the_storage_is_not_asked(proxy, bucket, gcs_server):
    objects, behind = Objects(proxy.url, bucket), Objects(gcs_server.endpoint, bucket)
    for status in (408, 429, 500, 503):
        proxy.rules.add(Rule("status", status=status))
        assert objects.media("name") == status
        assert behind.content("name") is None
    assert not any(e.forwarded for e in proxy.traffic.exchanges())
    assert objects.media("name") == 200


@pytest.mark.parametrize("after_bytes", [None, 0, 10])
def test_a_reset_request_does_not_reach_the_storage(proxy, bucket, gcs_server, after_bytes):
    proxy.rules.add(Rule("reset", after_bytes=after_bytes))
    with pytest.raises((ConnectionResetError, BrokenPipeError)):
        Objects(proxy.url, bucket).media("name", data=b"x" * 100)
    assert Objects(gcs_server.endpoint, bucket).content("name") is None
    (exchange,) = proxy.traffic.exchanges()
    assert (exchange.status, exchange.fault, exchange.forwarded) == (None, "reset", False)
    assert exchange.bytes_up == (100 if after_bytes is None else after_bytes)


def test_a_lost_answer_is_lost_after_the_storage_has_done_what_it_was_asked_to(
    proxy, bucket, gcs_server
):
    proxy.rules.add(Rule("lost-answer"))
    objects = Objects(proxy.url, bucket)
    with pytest.raises(ConnectionResetError):
        objects.media("name", "ifGenerationMatch=0", b"mine")
    assert Objects(gcs_server.endpoint, bucket).content("name") == b"mine"
    assert objects.media("name", "ifGenerationMatch=0", b"mine") == 412, (
        "it looks as if somebody else had been first"
    )
    proxy.rules.add(Rule("lost-answer"))
    with pytest.raises(ConnectionResetError):  # a refusal is an answer, too
        objects.media("name", "ifGenerationMatch=0", b"mine")


def test_a_late_request_lands_when_it_is_told_to_and_its_preconditions_must_hold_then(
    proxy, bucket, gcs_server
):
    objects, behind = Objects(proxy.url, bucket), Objects(gcs_server.endpoint, bucket)
    for _ in range(2):
        proxy.rules.add(Rule("late"))
        with pytest.raises(ConnectionResetError):
            objects.media("name", "ifGenerationMatch=0", b"late")
        assert behind.content("name") is None
    assert json.loads(ask(proxy.url, "POST", "/__proxy__/late")[2]) == [200, 412]
    assert behind.content("name") == b"late"
    assert proxy.land() == [], "each lands once"
    with proxy.rules.during(Rule("late")), pytest.raises(ConnectionResetError):
        objects.media("other", "ifGenerationMatch=0", b"late")
    assert objects.media("other", data=b"early") == 200
    assert proxy.land() == [412]
    assert behind.content("other") == b"early"


def test_a_proxy_that_enforces_nothing_lets_two_creators_win(gcs_server, bucket):
    with FaultProxy(gcs_server.endpoint, enforces=False) as lax:
        assert [
            Objects(lax.url, bucket).media("name", "ifGenerationMatch=0") for _ in range(2)
        ] == [200, 200]


def test_an_answer_is_cut_off_or_shortened(proxy, bucket):
    objects = Objects(proxy.url, bucket)
    data = bytes(range(200))
    objects.media("name", data=data)
    for after_bytes, received in ((None, 100), (0, 0), (30, 30), (500, 200)):
        proxy.rules.add(Rule("shorten", after_bytes=after_bytes))
        assert objects.content("name") == data[:received]
        if received < 200:
            proxy.rules.add(Rule("truncate", after_bytes=after_bytes))
            with pytest.raises(http.client.IncompleteRead) as cut:
                objects.content("name")
            assert cut.value.partial == data[:received]
            assert proxy.traffic.exchanges()[-1].bytes_down == received


def test_an_object_cannot_be_changed_too_often(proxy, bucket):
    proxy.rules.add(Rule("rate", seconds=3600, times=None))
    objects = Objects(proxy.url, bucket)
    assert [objects.media(name) for name in ("a", "b", "a")] == [200, 200, 429]
    assert [objects.read("a"), objects.delete("b"), objects.media("c")] == [200, 429, 200]


def test_a_stalled_request_holds_up_no_other(proxy, bucket):
    proxy.rules.add(Rule("latency", seconds=3600, objects="*/slow"))
    objects = Objects(proxy.url, bucket)
    with pytest.raises(TimeoutError):
        ask(proxy.url, "GET", f"{objects.path}/slow", timeout=0.1)
    assert objects.media("fast") == 200
    assert objects.content("fast") == b"new"


def test_requests_that_are_to_go_together_wait_for_each_other(proxy, bucket):
    proxy.rules.add(Rule("together", requests=3, kinds=("upload",), times=None))
    objects = Objects(proxy.url, bucket)
    with ThreadPoolExecutor(3) as pool:
        two = [pool.submit(objects.media, "name") for _ in range(2)]
        while len(proxy.traffic.exchanges()) < 2:
            pass
        assert objects.read("name") == 404, "not one of them has gone ahead"
        assert pool.submit(objects.media, "name").result() == 200
        assert [one.result() for one in two] == [200, 200]
    assert objects.media("name") == 200, "who comes later waits for nobody"


def test_what_comes_through_a_slow_line_is_whole(proxy, bucket):
    proxy.rules.add(
        Rule("bandwidth", bytes_per_second=1e8, times=None),
        Rule("latency", seconds=0.001, times=None),
    )
    objects = Objects(proxy.url, bucket)
    data = bytes(range(256)) * 8192
    assert objects.media("name", data=data) == 200
    assert objects.content("name") == data


def test_a_client_that_goes_away_leaves_nothing_behind(proxy, bucket, gcs_server):
    where = urlsplit(proxy.url)
    with socket.create_connection((where.hostname, where.port)) as connection:
        path = f"/upload/storage/v1/b/{bucket}/o?uploadType=media&name=name"
        connection.sendall(
            f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n".encode() + b"x" * 50
        )
    objects = Objects(proxy.url, bucket)
    assert objects.media("other") == 200
    assert Objects(gcs_server.endpoint, bucket).content("name") is None


def test_without_a_backend_every_request_is_answered_with_a_bad_gateway():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        nobody = f"http://127.0.0.1:{s.getsockname()[1]}"
        with FaultProxy(nobody) as proxy:
            assert Objects(proxy.url, "bucket").media("name") == 502
            assert Objects(proxy.url, "bucket").media("name", "ifGenerationMatch=0") == 502


def test_two_proxies_cannot_have_one_port(proxy, gcs_server):
    with (
        pytest.raises(OSError, match="already in use"),
        FaultProxy(gcs_server.endpoint, port=urlsplit(proxy.url).port),
    ):
        pass


# --- the command line -----------------------------------------------------------------------------


def test_it_runs_from_the_command_line(gcs_server, bucket):
    rule = json.dumps({"fault": "status", "status": 503})
    command = [
        sys.executable,
        str(TOOLS / "fault_proxy.py"),
        "--backend",
        gcs_server.endpoint,
        "--rule",
        rule,
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            url = process.stdout.readline().strip()
            assert [Objects(url, bucket).media("name") for _ in range(2)] == [503, 200]
            assert json.loads(ask(url, "GET", "/__proxy__/stats")[2])["requests"] == 2
        finally:
            process.terminate()
            process.wait(60)
