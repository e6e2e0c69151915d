"""The pages of jobs and health, and the forms that start jobs, in a real Chromium."""

from urllib.parse import quote

import pytest
from chromium import check_page, contrast

pytestmark = pytest.mark.browser

PAGES = {
    "jobs": "/ui/jobs",
    "failed jobs": "/ui/jobs?state=failed",
    "no jobs": "/ui/jobs?subject=lab/none",
    "verified": "/ui/job/FIRST",
    "failed": "/ui/job/THIRD",
    "health": "/ui/health",
    "damaged": "/ui/checkpoint/lab/llama/300",
    "unreadable": "/ui/checkpoint/lab/llama/500",
    "tagged": "/ui/checkpoint/lab/llama/200",
    "run": "/ui/run/lab/llama",
    "plan": (
        f"/ui/plan/lab/llama/100?mesh={quote('data=2,model=2')}"
        f"&rule={quote('model/**=(model,None)')}"
    ),
}
STATE = "document.querySelector('main .state').textContent"
LOADED = "document.readyState === 'complete'"


@pytest.fixture
def at(chromium, upkeep):
    """Opens a page for somebody who has signed in."""
    service, token = upkeep
    with chromium.page(service.url + "/ui/login") as page:
        page.run("document.getElementById('token').focus()")
        page.type(token)
        page.press("Enter")
        page.wait_for(f"location.pathname === '/ui/runs' && {LOADED}")
    first, _, third, *_ = map(str, service.jobs)
    return lambda path, **options: chromium.page(
        service.url + path.replace("FIRST", first).replace("THIRD", third), **options
    )


def fill(page, form, **fields):
    """Fill in a form, by keyboard, and send it."""
    for name, text in fields.items():
        field = f"""document.querySelector('form[action="/ui/jobs/{form}"] [name="{name}"]')"""
        page.run(
            "(one => { const box = one.closest('details'); if (box) box.open = true; "
            f"one.focus() }})({field})"
        )
        page.type(text)
    page.press("Enter")


@pytest.mark.parametrize("name", PAGES)
def test_every_page_fits_and_shows_names_as_text(at, upkeep, name):
    for width in (360, 1200):
        with at(PAGES[name], width=width) as page:
            page.run("document.querySelectorAll('details').forEach((one) => { one.open = true })")
            check_page(page, upkeep[0].url)


@pytest.mark.parametrize("dark", [False, True])
def test_text_can_be_read_in_light_and_dark(at, dark):
    for name in ("jobs", "verified", "failed", "health", "damaged"):
        with at(PAGES[name], dark=dark) as page:
            background = page.run(
                "getComputedStyle(document.querySelector('section')).backgroundColor"
            )
            assert contrast(background, "rgb(0, 0, 0)" if dark else "rgb(255, 255, 255)") < 1.5
            for selector in (
                "section",
                "section a",
                ".quiet",
                "td",
                ".bad",
                ".state",
                ".percent",
                "select",
                "textarea",
                "button.danger",
            ):
                color = page.run(
                    "(one => one && "
                    f"getComputedStyle(one).color)(document.querySelector('{selector}'))"
                )
                assert color is None or contrast(color, background) > 4.5, (name, selector)


def test_a_job_is_started_from_a_checkpoint_and_followed_to_its_end(at):
    with at("/ui/checkpoint/lab/llama/100") as page:
        fill(page, "copy", to="lab/copies/100")
        page.wait_for(f"location.pathname.startsWith('/ui/job/') && {LOADED} && {STATE} === 'done'")
        assert any(one.endswith("/events") for one in page.requests)
        assert page.run("document.querySelector('[data-events]')") is None
        assert page.complaints == []
        page.wait_for(
            "[...document.querySelectorAll('main a')].some((one) => one.textContent === "
            "'lab/copies/100')"
        )
        page.run(
            "[...document.querySelectorAll('main a')].find((one) => one.textContent === "
            "'lab/copies/100').click()"
        )
        page.wait_for(f"document.querySelector('h1').textContent === 'lab/copies/100' && {LOADED}")
        row = (
            "[...document.querySelectorAll('#jobs tbody tr')].map((one) => "
            "one.cells[1].textContent)"
        )
        assert page.run(row) == ["copy"]


def test_a_job_is_seen_at_work_and_cancelled(at, upkeep):
    service, token = upkeep
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    with at("/ui/plan/lab/llama/100?mesh=data%3D8") as page:
        fill(page, "reshard", to="lab/resharded/live")
        page.wait_for(f"location.pathname.startsWith('/ui/job/') && {LOADED}")
    for i in range(8):
        service.ask(
            "/v1/jobs/export",
            "POST",
            f'{{"checkpoint": "lab/llama/100", "to": "lab/exports/{i}"}}',
            **headers,
        )
    number = service.get("/v1/jobs", Authorization=headers["Authorization"])["jobs"][0]["number"]
    with at(f"/ui/job/{number}") as page:
        page.wait_for(
            "document.getElementById('follow').textContent === 'This page follows the job.'"
        )
        page.run("document.querySelector('button.danger').focus()")
        page.press("Enter")
        page.wait_for(f"{STATE} === 'cancelled' && {LOADED}")
        assert page.run("document.querySelector('button.danger')") is None
        assert page.run(
            "[...document.querySelectorAll('main form button')].map((one) => one.textContent)"
        ) == ["Start again"]
    with at("/ui/jobs") as page:
        marks = "document.querySelectorAll('#jobs .mark-queued, #jobs .mark-running').length"
        page.wait_for(f"{marks} === 0")  # without a reload
        assert page.complaints == []


def test_deletion_has_to_be_confirmed_by_the_name(at):
    with at("/ui/checkpoint/lab/llama/600") as page:
        fill(page, "delete", confirm="lab/llama/500")
        page.wait_for(f"document.querySelector('h1').textContent.startsWith('400') && {LOADED}")
        assert "nothing was deleted" in page.run(
            "document.querySelector('[role=alert]').textContent"
        )
        page.run("document.querySelector('main a').click()")
        page.wait_for(f"document.querySelector('h1').textContent === 'lab/llama/600' && {LOADED}")
        fill(page, "delete", confirm="lab/llama/600")
        page.wait_for(f"location.pathname.startsWith('/ui/job/') && {LOADED} && {STATE} === 'done'")
        assert "The checkpoint is deleted." in page.run("document.body.textContent")
