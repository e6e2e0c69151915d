"""Two runs with metrics and layouts, and a service over them."""

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from job_services import operated
from serving import save_run, serving


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    """The directory of two runs."""
    top = tmp_path_factory.mktemp("served") / "runs"
    save_run(top / "llama", (10, 20, 30))
    save_run(top / "tiny-gpt", (10,), loss="nan")
    return top


@pytest.fixture(scope="session")
def service(runs):
    """The service over them, as `lab`."""
    with serving(("lab", runs)) as running:
        yield running


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """A service over a root with a run, which tests may change."""
    top = tmp_path_factory.mktemp("operated")
    save_run(top / "runs" / "llama", (10, 20))
    with operated(top, ("lab", top / "runs")) as running:
        running.root = top / "runs"
        yield running


@pytest.fixture
def webhook_receiver():
    """Bodies that a web server receives, and its url."""
    bodies = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            bodies.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield bodies, f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
