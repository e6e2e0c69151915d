"""The documentation as a site, in a real Chromium: every page fits, loads nothing from elsewhere,
and search works by keyboard."""

from __future__ import annotations

import subprocess
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

import pytest
from chromium import Chromium
from paths import ROOT

pytestmark = pytest.mark.browser

SITE = ROOT / "build" / "site"


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def site():
    """The site, built strictly and served on loopback; its url."""
    subprocess.run(["make", "docs"], cwd=ROOT, check=True, capture_output=True, timeout=250)
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=SITE)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def chromium():
    browser = Chromium()
    yield browser
    browser.close()


@pytest.mark.parametrize("width", [360, 1200])
def test_every_page_fits_and_loads_nothing_from_elsewhere(site, chromium, width):
    pages = sorted(
        path.relative_to(SITE)
        for path in SITE.rglob("*.html")
        if "decisions" not in path.parts or path.name == "index.html"
    )
    assert len(pages) > 35
    for name in pages:
        with chromium.page(f"{site}/{name}", width=width, dark=width == 360) as page:
            page.wait_for("document.readyState === 'complete'")
            assert page.run(
                "document.documentElement.scrollWidth <= document.documentElement.clientWidth"
            ), name
            assert {urlsplit(url).netloc for url in page.requests if url.startswith("http")} == {
                urlsplit(site).netloc
            }, name
            assert page.run("document.querySelectorAll('main h1, article h1').length") == 1, name
            assert not page.complaints, name
            beside = (
                page.run(
                    "getComputedStyle(document.querySelector('.md-sidebar--primary')).position"
                )
                == "sticky"
            )
            assert beside == (width == 1200), name  # the navigation


def test_a_function_is_found_by_keyboard(site, chromium):
    box = "document.activeElement.shadowRoot?.activeElement"
    with chromium.page(f"{site}/index.html") as page:
        page.wait_for("document.readyState === 'complete'")
        page.press("/")
        page.wait_for(f"{box}?.tagName === 'INPUT'")
        page.type("save_async")
        page.wait_for(
            "document.activeElement.shadowRoot.querySelector('a')?.hash === '#shardckpt.save_async'"
        )
        page.press("Enter")
        page.wait_for("location.hash === '#shardckpt.save_async'")
        page.wait_for("document.querySelector('h2[id=\"shardckpt.save_async\"]')")


@pytest.mark.parametrize(
    ("words", "result"),
    [("fewer GPUs", "meshes"), ("resume", "training"), ("delete old checkpoints", "training")],
)
def test_a_reader_finds_the_page_by_words_of_their_own(site, chromium, words, result):
    root = "document.activeElement.shadowRoot"
    with chromium.page(f"{site}/index.html") as page:
        page.wait_for("document.readyState === 'complete'")
        page.press("/")
        page.wait_for(f"{root}?.activeElement?.tagName === 'INPUT'")
        page.type(words)
        page.wait_for(
            f"[...{root}.querySelectorAll('a')].slice(0, 5).some((one) => "
            f"one.pathname.endsWith('/{result}.html'))"
        )
