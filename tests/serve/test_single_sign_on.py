"""Users whom a proxy has signed in: by its headers alone, and behind a real nginx with auth_request
(`make deploy`)."""

import http.client
import json
import logging
import re
import shutil
import socket
import ssl
import subprocess
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from urllib.parse import urlencode

import pytest
from paths import ROOT
from serving import Reply, save_run, serving

from shardckpt.errors import OptionError
from shardckpt.serve.access.tokens import add_token
from shardckpt.serve.options import ServeOptions

FORM = "application/x-www-form-urlencoded"
USER, GROUPS = "X-Forwarded-User", "X-Forwarded-Groups"
ANN = {"X_Forwarded_User": "ann@example.org", "X_Forwarded_Groups": "staff, ml"}


@pytest.fixture
def place(tmp_path):
    for root in ("llama", "secret"):
        save_run(tmp_path / root / "a", (1, 2))
    (tmp_path / "tokens").write_text("group:ml llama=operate\nuser:boss@example.org *=admin\n")
    token = add_token(tmp_path / "tokens", "ci", "secret=read")
    return tmp_path, token


def options(top, **more):
    given = {
        "token_file": top / "tokens",
        "state": top / "state",
        "user_header": USER,
        "groups_header": GROUPS,
    }
    return [("llama", top / "llama"), ("secret", top / "secret")], {**given, **more}


def runs(reply):
    return [one["run"] for one in reply.json["runs"]]


@pytest.mark.parametrize("way", ["address", "socket"])
def test_a_trusted_proxy_names_the_user_and_groups_have_rights(place, way, caplog):
    top, token = place
    roots, given = options(
        top,
        **(
            {"trusted_proxy": ("127.0.0.1",)}
            if way == "address"
            else {"unix_socket": top / "socket"}
        ),
    )
    with (
        caplog.at_level(logging.INFO, "shardckpt.serve"),
        serving(*roots, audit_log=top / "audit", **given) as service,
    ):
        assert runs(service.ask("/v1/runs", **ANN)) == ["llama/a"]
        assert runs(service.ask("/v1/runs", X_Forwarded_User="bob")) == []
        assert runs(service.ask("/v1/runs", X_Forwarded_User="boss@example.org")) == [
            "llama/a",
            "secret/a",
        ]
        assert service.ask("/v1/checkpoints/secret/a/1", **ANN).status == 404
        page = service.ask("/ui/runs", **ANN).body.decode()
        assert "ann@example.org" in page
        assert "Sign out" not in page  # the proxy does that
        assert service.ask("/v1/runs").status == 401
        # A known token wins over the header, an unknown one is ignored and not counted.
        assert runs(service.ask("/v1/runs", Authorization=f"Bearer {token}", **ANN)) == ["secret/a"]
        for _ in range(12):
            assert runs(service.ask("/v1/runs", Authorization="Bearer of-the-proxy", **ANN)) == [
                "llama/a"
            ]
        metrics = service.ask("/metrics", X_Forwarded_User="boss@example.org").body
        assert b"shardckpt_serve_wrong_tokens_total 0.0" in metrics
        # A write is one of a session: it comes from a page of this service.
        form = urlencode({"checkpoint": "llama/a/1", "key": "1"})
        own = "http://localhost" if way == "socket" else service.url
        for origin, status in (
            (None, 403),
            ("https://evil.example", 403),
            ("null", 403),
            (own, 303),
        ):
            headers = {} if origin is None else {"Origin": origin}
            assert (
                service.ask(
                    "/ui/jobs/pin", "POST", form, Content_Type=FORM, **ANN, **headers
                ).status
                == status
            ), origin
        (top / "tokens").write_text("")
        assert runs(service.ask("/v1/runs", **ANN)) == []  # rights are those of the file now
    asked = [json.loads(line) for line in (top / "audit").read_text().splitlines()]
    assert {"ann@example.org"} == {
        one["who"] for one in asked if "POST" in one["what"] and one["result"] in ("asked", 303)
    }
    assert "ann@example.org" in {
        record.fields["token"]
        for record in caplog.records
        if record.name == "shardckpt.serve.requests"
    }


def test_names_beyond_ascii_are_utf_8_and_each_is_a_user_of_its_own(place):
    top, _ = place
    (top / "tokens").write_text("user:josé llama=read\nuser:josà secret=read\n")
    roots, given = options(top, trusted_proxy=("127.0.0.1",))
    with serving(*roots, **given) as service:
        for name, expected in (("josé", ["llama/a"]), ("josà", ["secret/a"]), ("jos", [])):
            assert runs(service.ask("/v1/runs", X_Forwarded_User=name.encode())) == expected
        for odd in (b"jos\xc3\xa9 x", b"a\xc2\xa0b", b"\xe2\x80\xae"):
            assert service.ask("/v1/runs", X_Forwarded_User=odd).status == 400


def test_the_header_of_a_stranger_is_nothing(place):
    top, token = place
    roots, given = options(top, trusted_proxy=("10.0.0.0/8",))
    with serving(*roots, **given) as service:
        assert service.ask("/v1/runs", **ANN).status == 401
        assert service.ask("/v1/runs", Authorization="Bearer wrong", **ANN).status == 401
        assert runs(service.ask("/v1/runs", Authorization=f"Bearer {token}", **ANN)) == ["secret/a"]


def test_doubled_and_odd_headers_are_refused(place):
    top, _ = place
    roots, given = options(top, trusted_proxy=("127.0.0.1",))
    with serving(*roots, **given) as service:
        for lines in (
            f"{USER}: ann\r\n{USER}: boss@example.org\r\n",
            f"{USER}: ann\r\n{GROUPS}: a\r\n{GROUPS}: ml\r\n",
            f"{USER}: a b\r\n",
        ):
            request = (
                f"GET /v1/runs HTTP/1.1\r\nHost: localhost\r\n{lines}Connection: close\r\n\r\n"
            )
            assert service.send(request.encode()).startswith(b"HTTP/1.1 400"), lines
        empty = f"GET /v1/runs HTTP/1.1\r\nHost: localhost\r\n{USER}: \r\nConnection: close\r\n\r\n"
        assert service.send(empty.encode()).startswith(b"HTTP/1.1 401")


def test_headers_without_a_trusted_proxy_or_rights_are_refused_at_the_start(tmp_path):
    for given in (
        {"user_header": USER},
        {"user_header": USER, "trusted_proxy": ("127.0.0.1",)},
        {"user_header": USER, "token_file": "t"},
    ):
        with pytest.raises(OptionError, match="--user-header needs"):
            ServeOptions(roots=(f"a={tmp_path}",), **given)
    with pytest.raises(OptionError, match="--groups-header needs"):
        ServeOptions(roots=(f"a={tmp_path}",), groups_header=GROUPS)


class SignedIn(BaseHTTPRequestHandler):
    """Answers of oauth2-proxy to auth_request, by the cookie."""

    def do_GET(self):
        match = re.search(r"login=(\w+)", self.headers.get("cookie", ""))
        self.send_response(202 if match else 401)
        if match:
            self.send_header("X-Auth-Request-User", f"{match[1]}@example.org")
            self.send_header("X-Auth-Request-Groups", "ml,staff" if match[1] == "ann" else "")
        self.end_headers()

    def log_message(self, *_):
        pass


@contextmanager
def nginx(top):
    """deploy/nginx.conf with a port, a certificate, a socket and an authenticator of this test; a
    function that asks through it."""
    program = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    assert program, (
        "nginx is missing: `make deploy` installs it on Debian; elsewhere install the package nginx"
    )
    make = (
        "openssl req -x509 -newkey rsa:2048 -nodes -keyout key.pem -out cert.pem -subj "
        "/CN=localhost"
    )
    subprocess.run(make.split(), cwd=top, check=True, capture_output=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with HTTPServer(("127.0.0.1", 0), SignedIn) as authenticator:
        threading.Thread(target=authenticator.serve_forever, daemon=True).start()
        text = (ROOT / "deploy" / "nginx.conf").read_text()
        changes = {
            "listen 443 ssl": f"listen 127.0.0.1:{port} ssl",
            "/etc/ssl/checkpoints.pem": f"{top}/cert.pem",
            "/etc/ssl/checkpoints.key": f"{top}/key.pem",
            "/run/shardckpt/socket": f"{top}/socket",
            "127.0.0.1:4180": f"127.0.0.1:{authenticator.server_port}",
        }
        for theirs, ours in changes.items():
            assert theirs in text
            text = text.replace(theirs, ours)
        (top / "server.conf").write_text(text)
        temporary = "".join(
            f"{name}_temp_path {top}/{name};"
            for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        )
        main = (
            f"daemon off; master_process off; pid {top}/nginx.pid; error_log {top}/error.log; "
            "events {}"
        )
        (top / "nginx.conf").write_text(
            f"{main} http {{ access_log off; {temporary} include {top}/server.conf; }}"
        )
        process = subprocess.Popen(
            [program, "-c", str(top / "nginx.conf"), "-p", str(top)], stderr=subprocess.PIPE
        )
        trusting = ssl.create_default_context(cafile=str(top / "cert.pem"))

        def ask(path, method="GET", body=None, **headers):
            connection = http.client.HTTPSConnection(
                "localhost", port, timeout=60, context=trusting
            )
            try:
                connection.request(
                    method,
                    path,
                    body,
                    {name.replace("_", "-"): value for name, value in headers.items()},
                )
                answer = connection.getresponse()
                return Reply(
                    answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read()
                )
            finally:
                connection.close()

        try:
            end = time.monotonic() + 60
            while True:
                assert process.poll() is None, process.stderr.read()
                assert time.monotonic() < end
                try:
                    socket.create_connection(("127.0.0.1", port), timeout=1).close()
                    break
                except OSError:
                    time.sleep(0.05)
            yield ask, f"https://localhost:{port}"
        finally:
            process.terminate()
            process.wait(60)
            process.stderr.close()
            authenticator.shutdown()


@pytest.mark.deploy
def test_behind_a_real_nginx_people_sign_in_elsewhere_and_programs_send_tokens(place):
    top, token = place
    roots, given = options(top, unix_socket=top / "socket")
    with serving(*roots, **given) as service, nginx(top) as (ask, url):
        assert ask("/v1/runs").status == 401  # nginx's
        assert ask("/v1/runs", **ANN).status == 401  # nobody names himself
        ann, bob = {"Cookie": "login=ann"}, {"Cookie": "login=bob"}
        assert runs(ask("/v1/runs", **ann)) == ["llama/a"]
        assert runs(ask("/v1/runs", **ann, X_Forwarded_User="boss@example.org")) == ["llama/a"]
        assert runs(ask("/v1/runs", **bob)) == []
        assert runs(ask("/v1/runs", Authorization=f"Bearer {token}")) == ["secret/a"]
        assert ask("/v1/runs", Authorization="Bearer wrong", **ann).status == 401
        assert runs(
            ask("/v1/runs", Authorization=f"Bearer {token}", X_Forwarded_User="boss@example.org")
        ) == ["secret/a"]
        page = ask("/ui/run/llama/a", **ann)
        assert (page.status, b"ann@example.org" in page.body) == (200, True)
        form = urlencode({"checkpoint": "llama/a/1", "key": "1"})
        for origin, status in (
            (None, 403),
            ("https://evil.example", 403),
            (url.replace("https", "http"), 403),
            (url, 303),
        ):
            headers = {} if origin is None else {"Origin": origin}
            reply = ask("/ui/jobs/pin", "POST", form, Content_Type=FORM, **ann, **headers)
            assert reply.status == status, (origin, reply)
        number = reply.headers["location"].rpartition("/")[2]
        service.wait_until(lambda: ask(f"/v1/jobs/{number}", **ann).json["state"] == "done")
        assert ask(f"/v1/jobs/{number}/events", **ann).body.startswith(b"event: job\n")
        whole = ask("/files/llama/a/1/model.safetensors", **ann)
        part = ask("/files/llama/a/1/model.safetensors", Range="bytes=100-199", **ann)
        assert (part.status, part.body) == (206, whole.body[100:200])
