"""Access to the service: its users, their origins, and what they can reach."""

import ast
import logging
import os
import re
import shutil
import socket
import time
from contextlib import suppress

import numpy as np
import pytest
from forgery import opened_envelope, seal
from paths import ROOT
from serving import serving

import shardckpt
from shardckpt import SaveOptions
from shardckpt.errors import FormatError, OptionError, StorageError
from shardckpt.format.structure import DIFFERENCE_VERSION
from shardckpt.serve import server, sources
from shardckpt.serve.access import guard, tokens
from shardckpt.serve.access.tokens import Tokens, add_token
from shardckpt.serve.options import ServeOptions
from shardckpt.serve.roots import Roots
from shardckpt.versions.folding import fold


@pytest.fixture
def token_file(tmp_path):
    return tmp_path / "tokens"


def test_other_machines_need_tokens(tmp_path, token_file):
    with pytest.raises(OptionError, match="--token-file"):
        ServeOptions(roots=(f"a={tmp_path}",), host="0.0.0.0")
    ServeOptions(roots=(f"a={tmp_path}",), host="0.0.0.0", token_file=token_file)
    with pytest.raises(OptionError, match="--ssl-keyfile"):
        ServeOptions(roots=(f"a={tmp_path}",), certificate="x")


def test_a_certificate_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / "key.pem").write_text("no key")
    for certificate in (tmp_path / "nothing.pem", tmp_path / "key.pem"):
        options = ServeOptions(
            roots=(f"a={tmp_path}",), certificate=str(certificate), key=str(tmp_path / "key.pem")
        )
        with pytest.raises(
            OptionError,
            match=rf"--ssl-certfile {re.escape(str(certificate))}, --ssl-keyfile .*cannot be used "
            r"for TLS",
        ):
            server.make_server(options, lambda _url: None)


def test_requests_from_other_pages_and_other_names_are_refused(service):
    port = service.address[1]
    for host in (f"127.0.0.1:{port}", f"localhost:{port}", "LOCALHOST", f"[::1]:{port}"):
        assert service.ask("/v1/runs", Host=host).status == 200
    for host in (
        "evil.example",
        f"evil.example:{port}",
        "127.0.0.1.evil.example",
        "",
        "localhost@evil.example",
        "2130706433",
    ):
        assert service.ask("/v1/runs", Host=host).json["code"] == "host"
        assert service.ask("/healthz", Host=host).status == 200
    own = f"http://127.0.0.1:{port}"
    assert service.ask("/v1/runs", Origin=own).status == 200
    for origin in (
        "http://evil.example",
        "null",
        f"http://127.0.0.1:{port + 1}",
        f"{own}.evil.example",
    ):
        assert service.ask("/v1/runs", Origin=origin).json["code"] == "origin"
    assert (
        service.ask("/v1/runs", Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="no-cors").status == 403
    )
    assert (
        service.ask("/v1/runs", Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="navigate").status
        == 200
    )
    assert b"421" in service.send(
        b"GET /v1/runs HTTP/1.1\r\n"
        b"Host: localhost\r\n"
        b"Host: evil.example\r\n"
        b"Connection: close\r\n"
        b"\r\n"
    )


@pytest.mark.parametrize(
    "host",
    [
        "x/healthz?",
        "x/ui/login?",
        "x/static/?",
        "x/healthz#",
        "127.0.0.1/healthz?",
        "[::1]/readyz?",
    ],
)
def test_no_host_header_replaces_the_token(tmp_path, token_file, host):
    add_token(token_file, "ann", "read")
    with serving(("lab", tmp_path), token_file=token_file) as running:
        for path in (
            "/v1/runs",
            "/raw/lab/a/1/checkpoint.json",
            "/files/lab/a/1/model.safetensors",
        ):
            assert running.ask(path, Host=host).status == 401, path


def test_the_service_never_goes_by_a_url_made_from_headers():
    """Old releases of Starlette put the Host header before the path without a check."""
    for path in (ROOT / "shardckpt/serve").rglob("*.py"):
        nodes = ast.walk(ast.parse(path.read_text()))
        used = [
            node
            for node in nodes
            if isinstance(node, ast.Attribute) and node.attr in ("url", "base_url", "url_for")
        ]
        of_requests = [
            node for node in used if isinstance(node.value, ast.Name) and node.value.id == "request"
        ]
        assert not of_requests, path


def test_every_response_forbids_scripts_frames_and_sniffing(service):
    for path in ("/v1/runs", "/healthz", "/nothing", "/v1/checkpoints/lab/llama/10"):
        headers = service.ask(path).headers
        assert "default-src 'none'" in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert re.fullmatch(r"[0-9a-f]{16}", headers["x-request-id"])
        assert "server" not in headers
    assert service.ask("/v1/runs", X_Request_Id="mine-1").headers["x-request-id"] == "mine-1"
    assert service.ask("/v1/runs", X_Request_Id="a b").headers["x-request-id"] != "a b"


def test_tokens_are_stored_hashed_have_scopes_and_are_revoked_by_a_line(
    runs, token_file, caplog, capfd
):
    reader, operator = add_token(token_file, "ann", "read"), add_token(token_file, "bob", "operate")
    # Digests only: a service that runs as another user reads it.
    assert token_file.stat().st_mode & 0o777 == 0o644
    assert reader not in token_file.read_text()
    known = Tokens(token_file)
    assert known.identity(reader).may("read")
    assert not known.identity(reader).may("operate")
    assert known.identity(operator).may("operate")
    assert not known.identity(operator).may("admin")
    assert known.identity(reader[:-1]) is None
    secret = known.begin_session(reader)
    assert known.in_session(secret).name == "ann"
    assert known.in_session(secret[1:]) is None

    with (
        caplog.at_level(logging.INFO, "shardckpt.serve"),
        serving(("lab", runs), token_file=token_file) as service,
    ):
        assert service.ask("/v1/runs").headers["www-authenticate"].startswith("Bearer")
        assert service.ask("/metrics").status == 401
        assert service.ask("/v1/runs", Authorization=f"Bearer {reader}").status == 200
        assert (
            service.ask("/v1/runs", Authorization=f"bearer {reader}", Host="any.example").status
            == 200
        )
        assert service.ask("/v1/runs", Authorization=f"Basic {reader}").status == 401
        assert service.ask("/healthz").status == service.ask("/readyz").status == 200
        token_file.write_text(
            "".join(line for line in token_file.read_text().splitlines(True) if "ann" not in line)
        )
        assert service.ask("/v1/runs", Authorization=f"Bearer {reader}").status == 401
        assert known.in_session(secret) is None
        assert service.ask("/v1/runs", Authorization=f"Bearer {operator}").status == 200
    assert reader not in caplog.text
    fields = [
        record.fields for record in caplog.records if record.name == "shardckpt.serve.requests"
    ]
    assert {"ann", "bob", None} == {one["token"] for one in fields}
    assert {"id", "method", "path", "status", "bytes", "seconds", "client", "token"} == set(
        fields[0]
    )


def test_token_files_that_cannot_be_trusted_are_refused(tmp_path, token_file):
    with pytest.raises(StorageError, match="cannot be read"):
        Tokens(token_file)
    add_token(token_file, "ann", "read")
    token_file.chmod(0o666)
    with pytest.raises(OptionError, match="chmod 644"):
        Tokens(token_file)
    token_file.chmod(0o600)
    token_file.write_text("ann read secret\n")
    with pytest.raises(OptionError, match="line 1"):
        Tokens(token_file)
    with pytest.raises(OptionError, match="names have letters"):
        add_token(token_file, "a b", "read")


def test_guessing_tokens_is_slowed_down_and_does_not_end(runs, token_file, monkeypatch):
    right = add_token(token_file, "ann", "read")
    with serving(("lab", runs), token_file=token_file) as service:
        # A probe sends no token.
        assert {service.ask("/ui/login", "HEAD").status for _ in range(12)} == {200}
        assert {
            service.ask("/ui/login", "POST", body).status
            for body in ("", "token=")
            for _ in range(6)
        } == {403}
        statuses = [
            service.ask("/v1/runs", Authorization=f"Bearer wrong{i}").status for i in range(12)
        ]
        assert statuses == [401] * 10 + [429] * 2
        limited = service.ask("/v1/runs", Authorization="Bearer wrong")
        assert 0 < int(limited.headers["retry-after"]) <= 60
        assert service.ask("/ui/login", "POST", "token=wrong").status == 429
        # Wrong ones of others never lock it out.
        assert service.ask("/v1/runs", Authorization=f"Bearer {right}").status == 200
        assert service.ask("/ui/login", "POST", f"token={right}").status == 303
        assert (
            b"shardckpt_serve_wrong_tokens_total 10.0"
            in service.ask("/metrics", Authorization=f"Bearer {right}").body
        )
        now = time.monotonic
        monkeypatch.setattr(tokens.time, "monotonic", lambda: now() + 61)
        assert service.ask("/v1/runs", Authorization="Bearer wrong").status == 401


@pytest.fixture
def with_secret(tmp_path):
    """A root beside a secret, links that lead to it, and a link that stays inside."""
    top = tmp_path / "root"
    outside = tmp_path / "outside"
    for place in (top / "run" / "1", outside / "run" / "1"):
        shardckpt.save(place, {"w": np.arange(8)})
    (outside / "secret").write_text("secret")
    (top / "away").symlink_to(outside / "run")
    (top / "run" / "2").symlink_to(outside / "run" / "1")
    (top / "run" / "3").symlink_to(top / "run" / "1")
    return top


def test_no_path_and_no_link_leads_out_of_a_root(with_secret):
    with serving(("lab", with_secret)) as service:
        ids = {one["id"] for one in service.get("/v1/checkpoints")["checkpoints"]}
        assert ids == {"lab/run/1", "lab/run/3"}
        attempt = shardckpt.open(with_secret / "run" / "1").record.attempt
        paths = [
            *(
                "../outside/run/1",
                "run/../../outside/run/1",
                "/etc",
                "run//1",
                "run/./1",
                "away/1",
                "run/2",
                "",
                ".",
                "..",
            ),
            *(
                "%2e%2e/outside/run/1",
                "..%2foutside%2frun%2f1",
                "run/1%00",
                "run\\..\\1",
                "%252e%252e/outside",
            ),
        ]
        for path in paths:
            for area in ("v1/checkpoints", "files", "zarr", "raw"):
                for tail in (
                    "",
                    "/model.safetensors",
                    "/zarr.json",
                    "/checkpoint.json",
                    f"/{attempt}/table",
                    "/secret",
                ):
                    reply = service.ask(f"/{area}/lab/{path}{tail}".replace("\\", "%5c"))
                    assert reply.status in (400, 404), (area, path, tail, reply)
                    assert b"secret" not in reply.body.replace(b"/secret", b"")


def test_raw_gives_files_of_checkpoints_and_no_others(with_secret):
    (with_secret / "run" / "notes.txt").write_text("secret")
    (with_secret / "run" / "1" / ".env").write_text("secret")
    attempt = shardckpt.open(with_secret / "run" / "1").record.attempt
    (with_secret / "run" / "1" / attempt / "stolen").symlink_to(
        with_secret.parent / "outside" / "secret"
    )
    os.mkfifo(with_secret / "run" / "1" / attempt / "pipe")
    with serving(("lab", with_secret)) as service:
        for path in (
            "run/notes.txt",
            "run/1/.env",
            f"run/1/{attempt}/stolen",
            f"run/1/{attempt}/pipe",
            f"run/1/{attempt}/",
            "run/1",
        ):
            assert service.ask(f"/raw/lab/{path}").status == 404, path
        assert service.ask(f"/raw/lab/run/1/{attempt}/table").status == 200
        # A checkpoint with a link out of the roots is not read at all.
        assert "leads out" in service.get("/v1/checkpoints/lab/run/1", 422)["detail"]


def test_bases_lie_in_the_roots_or_where_it_is_allowed(tmp_path):
    for place in ("inside", "outside"):
        shardckpt.save(tmp_path / place / "base", {"w": np.arange(100.0), "x": np.zeros(3)})
    root = tmp_path / "inside" / "run"
    for i, base in enumerate(("inside", "outside")):
        options = SaveOptions(base=tmp_path / base / "base", skip="w")
        shardckpt.save(root / str(i), {"w": np.arange(100.0), "x": np.ones(3)}, options=options)
    path = "/v1/checkpoints/lab/run/{}/tensors/w?format=raw"
    with serving(("lab", tmp_path / "inside")) as service:
        assert service.ask(path.format(0)).body == np.arange(100.0).tobytes()
        assert "outside of the roots" in service.get(path.format(1), 422)["detail"]
    with serving(("lab", tmp_path / "inside"), allow_base=(str(tmp_path / "outside"),)) as service:
        assert service.ask(path.format(1)).body == np.arange(100.0).tobytes()


@pytest.mark.long
def test_the_record_of_an_earlier_version_leads_to_no_place_that_a_later_one_does_not_name(
    tmp_path,
):
    root, away = tmp_path / "inside", tmp_path / "away"
    state = {"w": np.arange(1000.0), "x": np.ones(3)}
    with shardckpt.Publisher(root / "run", keep=None, anchor_every=64, catch_up=None) as publisher:
        for step in range(13):
            publisher.publish(step, {**state, "w": state["w"] + (np.arange(1000) < step)})
            publisher.wait()
    based = SaveOptions(base=root / "run" / "5", skip="w")
    shardckpt.save(root / "based", state, options=based)
    shutil.copytree(root / "run", away)

    def forge(step, number, url):
        path = root / "run" / str(step) / "checkpoint.json"
        record = opened_envelope(path)
        record["bases"][number]["url"] = url
        path.write_bytes(seal(record, DIFFERENCE_VERSION))

    roots = Roots([f"lab={root}"])
    roots.check(shardckpt.open(root / "based"))
    forge(3, 0, (away / "2").as_uri())
    roots.check(shardckpt.open(root / "run" / "4"))
    with pytest.raises(FormatError, match="is not in the chain of that version"):
        shardckpt.open(root / "run" / "4").read("w")
    assert 3 not in [one.step for one in fold(root / "run")]
    forge(3, 0, "../2")
    forge(2, 0, (away / "1").as_uri())
    assert 3 not in [one.step for one in fold(root / "run")]
    # The chain of a base is not among the bases of the checkpoint.
    forge(5, 0, (away / "4").as_uri())
    with pytest.raises(FormatError, match="4 lies outside of the roots"):
        roots.check(shardckpt.open(root / "based"))


def test_a_checkpoint_whose_base_is_gone_or_damaged_is_read_apart_from_what_is_there(tmp_path):
    state = {"w": np.arange(1000.0), "x": np.ones(3)}
    with shardckpt.Publisher(tmp_path / "run", catch_up=None) as publisher:
        for step in range(2):
            publisher.publish(step, {**state, "w": state["w"] + (np.arange(1000) < step)})
            publisher.wait()
    options = SaveOptions(base=tmp_path / "run" / "1", skip="w")
    shardckpt.save(tmp_path / "based", state, options=options)
    with serving(("lab", tmp_path)) as service:
        path, tensors = tmp_path / "run" / "1" / "checkpoint.json", "/v1/checkpoints/lab/based"
        for damage in (lambda: path.write_bytes(path.read_bytes()[:-9]), path.unlink):
            damage()
            roots = Roots([f"lab={tmp_path}"])
            based = shardckpt.open(tmp_path / "based")
            roots.check(based)
            assert [one.tensor for one in based.verify().damage] == ["w"]
            assert service.ask(f"{tensors}/tensors/x?format=raw").body == np.ones(3).tobytes()
            assert service.ask(f"{tensors}/tensors/w?format=raw").status >= 400


def test_bodies_headers_and_idle_connections_have_limits(runs, monkeypatch):
    monkeypatch.setattr(server, "_REQUEST_SECONDS", 1.5)
    monkeypatch.setattr(guard, "_BODY_SECONDS", 1.0)
    with serving(("lab", runs)) as service:
        head = b"GET /v1/runs HTTP/1.1\r\nHost: localhost\r\n"
        assert b" 431 " in service.send(head + b"X: " + b"a" * 70_000)
        assert b" 431 " in service.send(b"GET /" + b"a" * 70_000)
        assert b" 400 " in service.send(
            head + b"".join(b"X%d: 1\r\n" % i for i in range(200)) + b"\r\n"
        )
        post = b"POST /v1/announcements HTTP/1.1\r\nHost: localhost\r\n"
        assert b" 413 " in service.send(
            post + b"Connection: close\r\nContent-Length: 100000\r\n\r\n" + b"a" * 100_000
        )
        assert b" 408 " in service.send(post + b"Connection: close\r\nContent-Length: 10\r\n\r\n{")
        # Slow clients, before a request, within one, and with its body, are disconnected.
        for begun in (b"", head, b"GE", post + b"Content-Length: 10\r\n"):
            with socket.create_connection(service.address, timeout=60) as one:
                one.sendall(begun)
                with suppress(ConnectionResetError):
                    assert one.recv(1) == b""
        assert service.get("/v1/runs")["complete"]


@pytest.mark.parametrize(
    "data",
    [
        b"\0\xff" * 100,
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /%ff%fe HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
        b"GET /\xc3\xa9 HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
        b"CONNECT evil.example:80 HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
        b"OPTIONS * HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
        (
            b"GET http://evil.example/v1/runs HTTP/1.1\r\n"
            b"Host: evil.example\r\n"
            b"Connection: close\r\n"
            b"\r\n"
        ),
        (
            b"GET / HTTP/1.1\r\n"
            b"Host: localhost\r\n"
            b"Content-Length: 5\r\n"
            b"Transfer-Encoding: chunked\r\n"
            b"Connection: close\r\n"
            b"\r\n"
            b"0\r\n"
            b"\r\n"
        ),
        b"GET /v1/runs?text=%00 HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
        b"GET /v1/runs HTTP/1.1\r\nHost: localhost\r\nRange: bytes="
        + b"0-1," * 1000
        + b"2-3\r\nConnection: close\r\n\r\n",
    ],
)
def test_odd_bytes_are_answered_and_harm_nothing(service, data):
    answer = service.send(data)
    assert answer == b"" or re.match(rb"HTTP/1.1 (2|4)\d\d ", answer)
    assert service.ask("/healthz").status == 200


def test_clients_that_read_nothing_or_leave_end_their_streams(tmp_path, monkeypatch):
    monkeypatch.setattr(server, "_STALL_SECONDS", 0.5)
    shardckpt.save(tmp_path / "1", {"w": np.arange(6 << 20)})
    with serving(("lab", tmp_path)) as service:
        read = []
        read_into = sources._Reader.read
        monkeypatch.setattr(
            sources._Reader,
            "read",
            lambda self, begin: read.append(begin) or read_into(self, begin),
        )
        for leaves in (False, True):
            del read[:]
            with socket.create_connection(service.address, timeout=60) as one:
                one.sendall(
                    b"GET /files/lab/1/model.safetensors HTTP/1.1\r\nHost: localhost\r\n\r\n"
                )
                assert one.recv(100)
                if not leaves:
                    service.wait_until(
                        lambda: b"requests_in_flight 1.0" in service.ask("/metrics").body
                    )
            # That of this request.
            service.wait_until(lambda: b"requests_in_flight 1.0" in service.ask("/metrics").body)
            assert len(read) <= 3  # what is sent, what is read ahead, and no more
