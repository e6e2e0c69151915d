"""A service behind a reverse proxy, and files that it reads again: tokens and certificates."""

import logging
import re
import socket
import ssl
import stat
import subprocess
import threading
import time
from urllib.parse import urlencode

import pytest
from serving import save_run, serving

from shardckpt.errors import OptionError
from shardckpt.serve import server
from shardckpt.serve.access.forwarded import Proxies
from shardckpt.serve.access.tokens import add_token
from shardckpt.serve.opened import OpenCheckpoints
from shardckpt.serve.options import ServeOptions
from shardckpt.serve.roots import Roots

FORM = "application/x-www-form-urlencoded"
BEHIND = {
    "X_Forwarded_Proto": "https",
    "X_Forwarded_Host": "ckpt.example",
    "X_Forwarded_For": "203.0.113.7",
}


@pytest.fixture
def place(tmp_path):
    """A run, and a token of an admin."""
    save_run(tmp_path / "runs" / "a", (1, 2))
    return tmp_path, add_token(tmp_path / "tokens", "ann", "admin")


def sign_in(service, token, **headers):
    return service.ask(
        "/ui/login", "POST", urlencode({"token": token}), Content_Type=FORM, **headers
    )


@pytest.mark.parametrize("trusted", [(), ("10.0.0.0/8",)])
def test_headers_of_strangers_are_not_believed(place, trusted, caplog):
    top, token = place
    with (
        caplog.at_level(logging.INFO, "shardckpt.serve"),
        serving(("lab", top / "runs"), token_file=top / "tokens", trusted_proxy=trusted) as service,
    ):
        assert (
            sign_in(service, token, Origin="https://ckpt.example", **BEHIND).json["code"]
            == "origin"
        )
        reply = sign_in(service, token, X_Forwarded_Prefix="/evil", **BEHIND)
        assert reply.headers["location"] == "/ui/runs"
        assert "Secure" not in reply.headers["set-cookie"]
        own = service.url.partition("://")[2]
        assert sign_in(service, token, Origin=f"http://{own}", **BEHIND).status == 303
    fields = [
        record.fields for record in caplog.records if record.name == "shardckpt.serve.requests"
    ]
    assert {one["client"] for one in fields} == {"127.0.0.1"}


@pytest.mark.parametrize("way", ["address", "socket"])
def test_a_trusted_proxy_gives_scheme_host_prefix_and_address(place, way, caplog):
    top, token = place
    options = (
        {"trusted_proxy": ("127.0.0.0/8", "10.1.1.1")}
        if way == "address"
        else {"unix_socket": top / "socket"}
    )
    given = {"token_file": top / "tokens", "state": top / "state", **options}
    behind = {**BEHIND, "X_Forwarded_Prefix": "/ckpt/"} | (
        {"X_Forwarded_For": "1.1.1.1, 203.0.113.7, 10.1.1.1"} if way == "address" else {}
    )
    with (
        caplog.at_level(logging.INFO, "shardckpt.serve"),
        serving(("lab", top / "runs"), **given) as service,
    ):
        if way == "socket":
            assert stat.S_IMODE((top / "socket").stat().st_mode) == 0o660
        reply = sign_in(service, token, Origin="https://ckpt.example", **behind)
        assert (reply.status, reply.headers["location"]) == (303, "/ckpt/ui/runs")
        cookie = reply.headers["set-cookie"]
        assert "Secure" in cookie
        assert "Path=/ckpt;" in cookie
        session = {"Cookie": cookie.partition(";")[0], **behind}
        for origin in ("http://ckpt.example", "https://evil.example", "null"):
            assert sign_in(service, token, Origin=origin, **behind).json["code"] == "origin", origin
        for path in ("/ui/runs", "/ckpt/ui/runs", "/ui/run/lab/a", "/ui/checkpoint/lab/a/1"):
            page = service.ask(path, **session)
            assert page.status == 200, path
            addresses = re.findall(rb' (?:href|src|action|data-events)="(/[^"]*)"', page.body)
            assert addresses
            assert all(one.startswith(b"/ckpt/") for one in addresses), addresses
        started = service.ask(
            "/ui/jobs/pin",
            "POST",
            urlencode({"checkpoint": "lab/a/1", "key": "1"}),
            Content_Type=FORM,
            Origin="https://ckpt.example",
            **session,
        )
        assert started.headers.get("location", "").startswith("/ckpt/ui/job/"), started
        assert {sign_in(service, "wrong", **behind).status for _ in range(12)} == {403, 429}
        elsewhere = {**behind, "X_Forwarded_For": "198.51.100.9"}
        # Limits are by the client's address.
        assert sign_in(service, "wrong", **elsewhere).status == 403
        assert (
            service.ask(
                "/v1/runs", Authorization=f"Bearer {token}", X_Forwarded_Host="odd host"
            ).status
            == 200
        )
    fields = [
        record.fields for record in caplog.records if record.name == "shardckpt.serve.requests"
    ]
    assert {"203.0.113.7", "198.51.100.9"} <= {one["client"] for one in fields}
    assert "1.1.1.1" not in {one["client"] for one in fields}


def test_a_prefix_that_a_proxy_has_removed_is_not_taken_from_a_root_of_its_name(tmp_path):
    save_run(tmp_path / "runs" / "a", (1,))
    (tmp_path / "runs" / "a" / "config.json").write_text("{}")
    behind = {"X_Forwarded_Prefix": "/ckpt"}
    for name, statuses in (("ckpt", (200, 404)), ("lab", (200, 200))):
        options = {"trusted_proxy": ("127.0.0.1",)}
        with serving((name, tmp_path / "runs"), **options) as service:
            model = f"/{name}/a/resolve/main/config.json"
            for path, status in zip((model, f"/ckpt{model}"), statuses, strict=True):
                assert service.ask(path, **behind).status == status, path


def test_a_page_is_kept_for_the_last_few_prefixes(tmp_path):
    save_run(tmp_path / "runs" / "a", (1,))
    with serving(("lab", tmp_path / "runs"), trusted_proxy=("127.0.0.1",)) as service:
        for prefix in ("/one", "/two", "/two", "/one"):
            page = service.ask("/ui/checkpoint/lab/a/1", X_Forwarded_Prefix=prefix)
            addresses = re.findall(rb' href="(/[^"]*/ui/tensor/[^"]*)"', page.body)
            assert addresses
            assert all(one.startswith(prefix.encode()) for one in addresses), addresses
    opened = OpenCheckpoints(Roots([f"lab={tmp_path / 'runs'}"])).get("lab/a/1")
    for n in range(100):
        assert opened.part("tree", lambda n=n: n, f"/{n}") == n
        assert opened.part("tree", lambda: None, f"/{n}") == n
    assert list(opened.parts) == ["tree"]
    assert opened.part("tree", lambda: None, "/96") == 96
    assert opened.part("tree", lambda: "made anew", "/95") == "made anew"


def test_trusted_proxies_and_sockets_that_cannot_be_are_refused(place):
    top, _ = place
    with pytest.raises(OptionError, match="--trusted-proxy"):
        Proxies(["proxy.example"], unix_socket=False)
    (top / "file").touch()
    with pytest.raises(OptionError, match="--unix-socket"):
        server.make_server(
            ServeOptions(roots=(f"a={top}",), unix_socket=top / "file"), lambda _url: None
        )
    with (
        serving(("lab", top / "runs"), unix_socket=top / "socket"),
        pytest.raises(OptionError, match="another server"),
    ):
        server.make_server(
            ServeOptions(roots=(f"a={top}",), unix_socket=top / "socket"), lambda _url: None
        )
    in_use = ServeOptions(roots=(f"a={top}",), unix_socket=top / "in-use")
    for kind in (socket.SOCK_DGRAM, socket.SOCK_STREAM):  # of another program, or a busy one
        with socket.socket(socket.AF_UNIX, kind) as one, socket.socket(socket.AF_UNIX) as waits:
            one.bind(str(top / "in-use"))
            if kind == socket.SOCK_STREAM:
                one.listen(0)
                waits.connect(str(top / "in-use"))
            with pytest.raises(OptionError, match="another server"):
                server.make_server(in_use, lambda _url: None)
            (top / "in-use").unlink()
    with socket.socket(socket.AF_UNIX) as left:  # by a server that was killed
        (top / "socket").unlink(missing_ok=True)
        left.bind(str(top / "socket"))
    with serving(("lab", top / "runs"), unix_socket=top / "socket") as service:
        assert service.ask("/v1/runs").status == 200


def test_a_bad_line_of_the_token_file_is_told_and_the_others_hold(place, caplog):
    top, token = place
    file, valid = top / "tokens", {"Authorization": f"Bearer {token}"}
    good = file.read_text()
    with (
        caplog.at_level(logging.INFO, "shardckpt.serve"),
        serving(("lab", top / "runs"), token_file=file) as service,
    ):

        def bad_lines():
            return re.search(rb"bad_token_lines (\d\S*)", service.ask("/metrics", **valid).body)[1]

        file.write_text(
            f"{good}ci reed 0\n\udcff\n".encode("utf-8", "surrogateescape").decode("latin-1")
        )
        assert service.ask("/v1/runs", **valid).status == 200
        assert bad_lines() == b"2.0"
        file.unlink()
        assert service.ask("/v1/runs", **valid).status == 200  # as an editor writes it
        file.write_text("")
        file.chmod(0o666)
        assert service.ask("/v1/runs", **valid).status == 200
        file.chmod(0o644)
        assert service.ask("/v1/runs", **valid).status == 401
        other = add_token(file, "bob", "read")
        assert service.ask("/v1/runs", Authorization=f"Bearer {other}").status == 200
    entries = [
        record.fields for record in caplog.records if record.name == "shardckpt.serve.tokens"
    ]
    assert {"known": 1, "bad_lines": [2, 3]} in entries
    assert {"known": 0, "bad_lines": []} in entries
    assert sum("reason" in one for one in entries) == 2


def test_a_certificate_is_loaded_again_when_its_file_changes(place, monkeypatch):
    top, _ = place
    monkeypatch.setattr(server, "_CERTIFICATE_SECONDS", 0.05)
    monkeypatch.chdir(top)

    def make(name):
        command = (
            f"openssl req -x509 -newkey rsa:2048 -nodes -keyout {name}.key -out {name}.pem -subj "
            "/CN=localhost"
        )
        subprocess.run(command.split(), check=True, capture_output=True)
        return (top / f"{name}.pem").read_text()

    first, second = make("first"), make("second")
    options = {"certificate": str(top / "first.pem"), "key": str(top / "first.key")}
    chosen = ServeOptions(roots=(f"lab={top / 'runs'}",), port=0, **options)
    urls = []
    running = server.make_server(chosen, urls.append)
    thread = threading.Thread(target=running.run, daemon=True)
    thread.start()
    end = time.monotonic() + 60

    def shown():
        port = int(urls[0].rpartition(":")[2])
        return ssl.get_server_certificate(("127.0.0.1", port)).split() if urls else None

    while not urls:
        assert time.monotonic() < end
    assert shown() == first.split()
    (top / "first.pem").write_text(second)  # the key does not fit yet: the old one goes on
    (top / "first.key").write_bytes((top / "second.key").read_bytes())
    while shown() != second.split():
        assert time.monotonic() < end
    running.should_exit = True
    thread.join(60)
