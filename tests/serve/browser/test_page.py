"""The pages of the service, in a real Chromium."""

from urllib.parse import quote

import pytest
from chromium import check_page, contrast
from serving import serving

from shardckpt.serve.access.tokens import add_token

pytestmark = pytest.mark.browser

PAGES = {
    "runs": "/",
    "run": "/ui/run/lab/llama",
    "checkpoint": "/ui/checkpoint/lab/llama/100",
    "search": "/ui/checkpoint/lab/llama/100?text=w1",
    "tensor": "/ui/tensor/lab/llama/100?name=model/w0",
    "values": "/ui/tensor/lab/llama/100?name=model/w0&values=read",
    "diff": "/ui/diff?a=lab/llama/100&b=lab/llama/200",
    "plan": (
        f"/ui/plan/lab/llama/100?mesh={quote('data=2,model=2')}"
        f"&rule={quote('model/**=(model,None)')}&devices_per_host=2"
    ),
    "storage": "/ui/storage",
}


@pytest.mark.parametrize("name", PAGES)
def test_every_page_fits_asks_for_nothing_elsewhere_and_shows_names_as_text(chromium, shown, name):
    for width in (360, 1200):
        with chromium.page(shown.url + PAGES[name], width=width) as page:
            check_page(page, shown.url)


@pytest.mark.parametrize("dark", [False, True])
def test_text_can_be_read_in_light_and_dark(chromium, shown, dark):
    for name in ("run", "checkpoint", "values"):
        with chromium.page(shown.url + PAGES[name], dark=dark) as page:
            background = page.run(
                "getComputedStyle(document.querySelector('section')).backgroundColor"
            )
            assert contrast(background, "rgb(0, 0, 0)" if dark else "rgb(255, 255, 255)") < 1.5
            for selector in (
                "section",
                "section a",
                ".quiet",
                "dt",
                "td",
                "small",
                ".button",
                "nav a",
            ):
                color = page.run(
                    "(one => one && "
                    f"getComputedStyle(one).color)(document.querySelector('{selector}'))"
                )
                assert color is None or contrast(color, background) > 4.5, (name, selector)
            ticks = page.run(
                "[...document.querySelectorAll('.tick')].map((one) => getComputedStyle(one).fill)"
            )
            assert all(contrast(tick, background) > 4.5 for tick in ticks)


def test_a_run_shows_its_steps_states_and_metrics_and_leads_on_by_keyboard(chromium, shown):
    with chromium.page(shown.url + PAGES["run"]) as page:
        states = page.run(
            "[...document.querySelectorAll('#checkpoints tbody tr')].map((row) => "
            "row.querySelector('.state').textContent)"
        )
        assert states == [
            "uncommitted",
            "committed",
            "committed",
            "unreadable",
            "committed",
            "committed, pinned",
            "committed, tagged best",
            "committed",
        ]
        captions = page.run(
            "[...document.querySelectorAll('.charts figcaption')].map((one) => one.textContent)"
        )
        assert captions == ["steps and sizes", "loss", "</title><b>"]
        assert (
            page.run("document.querySelectorAll('.charts figure:nth-child(2) circle').length") == 6
        )
        assert "no finite values" in page.run("document.querySelector('.charts').textContent")
        loss = page.run(
            "[...document.querySelectorAll('#checkpoints thead button')].findIndex((one) => "
            "one.textContent === 'loss')"
        )
        page.run(f"document.querySelectorAll('#checkpoints thead button')[{loss}].focus()")
        page.press("Enter")
        values = page.run(
            "[...document.querySelectorAll('#checkpoints tbody tr')].map((row) => "
            f"row.cells[{loss}].querySelector('data')?.value ?? '')"
        )
        numbers = [float(value) for value in values if value]
        assert numbers == sorted(numbers, reverse=True)
        page.run("document.querySelector('.charts figure:nth-child(2) a').focus()")
        page.press("Enter")
        page.wait_for(
            "location.pathname === '/ui/checkpoint/lab/llama/100' && "
            "document.querySelector('h1')?.textContent === 'lab/llama/100'"
        )


def test_the_tree_is_searched_and_leads_to_a_tensor_with_its_values(chromium, shown):
    with chromium.page(shown.url + PAGES["checkpoint"]) as page:
        page.run("document.getElementById('field-text').focus()")
        page.type("W1")
        page.press("Enter")
        page.wait_for("location.search === '?text=W1' && document.readyState === 'complete'")
        assert page.run(
            "[...document.querySelectorAll('.tree li a')].map((one) => one.textContent)"
        ) == ["model/w1"]
        page.run("document.querySelector('.tree li a').click()")
        page.wait_for(
            "document.querySelector('h1')?.textContent === 'model/w1' && document.readyState === "
            "'complete'"
        )
        labels = page.run(
            "[...document.querySelectorAll('.grid .label')].map((one) => one.textContent)"
        )
        assert labels == [str(device) for device in range(8)]
        assert page.run("document.querySelectorAll('.bar').length") == 0
        page.run("document.querySelector('.button').click()")
        page.wait_for("document.querySelectorAll('.bar').length === 40")
        assert "2,048 of 2,048" in page.run("document.body.textContent")


def test_hostile_names_are_found_and_their_pages_open(chromium, shown):
    with chromium.page(shown.url + PAGES["checkpoint"] + "?text=onload") as page:
        page.run("document.querySelector('.tree li a').click()")
        page.wait_for(
            "document.querySelector('h1')?.textContent.includes('svg onload') && "
            "document.readyState === 'complete'"
        )
        assert page.complaints == []
    with chromium.page(f"{shown.url}/ui/run/lab/{quote('<img src=x onerror=alert(5)>')}") as page:
        assert (
            page.run("document.querySelector('h1').textContent")
            == "lab/<img src=x onerror=alert(5)>"
        )
        assert page.complaints == []


def test_people_sign_in_with_a_token_and_out(chromium, shown, tmp_path):
    token = add_token(tmp_path / "tokens", "ann", "read")
    with serving(
        *[one.split("=", 1) for one in shown.options.roots], token_file=tmp_path / "tokens"
    ) as service:
        with chromium.page(service.url) as page:
            assert page.run("location.pathname") == "/ui/login"
            for typed, expected in (
                ("wrong", "document.querySelector('[role=alert]')"),
                (token, "location.pathname === '/ui/runs'"),
            ):
                page.run("document.getElementById('token').focus()")
                page.type(typed)
                page.press("Enter")
                page.wait_for(f"{expected} && document.readyState === 'complete'")
            assert page.run("document.cookie") == ""  # no script sees it
            assert (
                page.run("document.querySelector('nav form button').textContent") == "Sign out ann"
            )
            page.run("document.querySelector('nav form button').click()")
            page.wait_for("location.pathname === '/ui/login' && document.readyState === 'complete'")
        reply = service.ask("/ui/login", "POST", f"token={token}")
        cookie = reply.headers["set-cookie"]
        assert reply.status == 303
        assert "HttpOnly" in cookie
        assert "SameSite=strict" in cookie
        session = cookie.partition(";")[0]
        assert service.ask("/v1/runs", Cookie=session).status == 200
        # No page of this service sent it.
        assert service.ask("/ui/logout", "POST", "", Cookie=session).status == 403
        own = service.url
        assert (
            service.ask(
                "/ui/logout", "POST", "", Cookie=session, Origin="http://evil.example"
            ).status
            == 403
        )
        assert service.ask("/ui/logout", "POST", "", Cookie=session, Origin=own).status == 303
        assert service.ask("/v1/runs", Cookie=session).status == 401
