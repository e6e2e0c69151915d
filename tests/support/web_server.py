"""A web server of a directory, with ranges, redirects, authorization, and answers that are wrong on
purpose."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote


@dataclass
class WebServer:
    """Settings of a test, and the requests that came."""

    folder: Path
    port: int = 0
    authorization: str | None = None
    """Authorization header that requests must have; None: any request is answered."""
    moved: dict[str, str] = field(default_factory=dict)
    """Beginning of paths → beginning of the urls that they are redirected to."""
    ranges: bool = True
    failures: list[int] = field(default_factory=list)
    """Statuses of the next answers."""
    asked: list[tuple[str, str, str | None]] = field(default_factory=list)
    """Method, path and authorization of each request."""
    length: int | None = None
    """Bytes that answers with a file claim to have; None: as many as they have."""
    open_end: bool = False
    """Whether answers say nothing about their length."""
    version: str | None = '"1"'
    """ETag of the files; None: they have none."""
    connections: int = 0
    sent: int = 0
    """Bytes of files."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@contextmanager
def web_server(folder):
    """Serve a directory."""
    state = WebServer(Path(folder))

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def setup(self):
            state.connections += 1
            super().setup()

        def do_GET(self):
            state.asked.append((self.command, self.path, self.headers["Authorization"]))
            if state.failures:
                return self.answer(state.failures.pop(0))
            for begin, target in state.moved.items():
                if self.path.startswith(begin):
                    return self.answer(302, {"Location": target + self.path.removeprefix(begin)})
            if (
                state.authorization is not None
                and self.headers["Authorization"] != state.authorization
            ):
                return self.answer(401)
            file = state.folder / unquote(self.path).lstrip("/")
            if not file.is_file():
                return self.answer(404)
            data, status = file.read_bytes(), 200
            headers = {} if state.version is None else {"ETag": state.version}
            if state.length is not None:
                headers["Content-Length"] = state.length
            if self.headers["Range"] and state.ranges:
                first, _, last = self.headers["Range"].removeprefix("bytes=").partition("-")
                total, status = len(data), 206
                if int(first) >= total:
                    return self.answer(416)
                data = data[int(first) : int(last) + 1 if last else None]
                headers["Content-Range"] = f"bytes {first}-{int(first) + len(data) - 1}/{total}"
            return self.answer(status, headers, data)

        do_HEAD = do_GET  # noqa: N815

        def answer(self, status, headers=None, data=b""):
            self.send_response(status)
            framing = {"Connection": "close"} if state.open_end else {"Content-Length": len(data)}
            for name, value in {**framing, **(headers or {})}.items():
                self.send_header(name, str(value))
            self.end_headers()
            if self.command != "HEAD":
                state.sent += len(data)
                self.wfile.write(data)

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        state.port = server.server_port
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield state
        finally:
            server.shutdown()
