"""The page of a plan, in a real Chromium."""

import pytest
from chromium import contrast

pytestmark = pytest.mark.browser

WIDTHS = [400, 800, 1600]
NUMBERS = {
    "bytes": 2,
    "restore_bytes": 5,
    "restore_amplification": 6,
    "restore_after_amplification": 7,
}
"""Column of each number in the table of tensors."""


def column(page, number):
    """Texts of a column of the table of tensors, from the top."""
    return page.run(
        "[...document.querySelectorAll('#tensors tbody tr')].map((row) => "
        f"row.cells[{number}].textContent)"
    )


def exact(page, number):
    return page.run(
        "[...document.querySelectorAll('#tensors tbody tr')].map((row) => "
        f"Number(row.cells[{number}].querySelector('data').value))"
    )


@pytest.mark.parametrize("width", WIDTHS)
def test_the_page_runs_without_a_complaint_asks_for_nothing_else_and_fits(chromium, planned, width):
    path, _ = planned
    with chromium.page(path, width=width) as page:
        assert page.complaints == []
        assert page.requests == [path.resolve().as_uri()]
        assert page.run(
            "document.documentElement.scrollWidth <= document.documentElement.clientWidth"
        )


def test_its_numbers_are_those_of_the_document(chromium, planned):
    path, doc = planned
    with chromium.page(path) as page:
        shown = dict(
            page.run(
                "[...document.querySelectorAll('data[data-key]')].map((one) => [one.dataset.key, "
                "one.value])"
            )
        )
        for key in (
            "reshard.bytes_read",
            "reshard.requests",
            "reshard.peak_memory",
            "restore.bytes_read",
            "restore_after.largest_host",
        ):
            assert key in shown
        for key, value in shown.items():
            expected = doc
            for part in key.split("."):
                expected = expected[int(part) if part.isdecimal() else part]
            assert value == ("" if expected is None else str(expected)), key
        names = column(page, 0)
        tensors = {tensor["name"].replace("\u202e", "\\u202e"): tensor for tensor in doc["tensors"]}
        assert names == list(tensors)
        for key, number in NUMBERS.items():
            assert exact(page, number) == [tensors[name][key] for name in names]
        assert (
            page.run("JSON.parse(document.getElementById('flow').textContent).bytes")
            == doc["flow"]["bytes"]
        )


def test_names_of_tensors_and_places_are_text_and_nothing_else(chromium, planned):
    path, doc = planned
    with chromium.page(path) as page:
        assert page.run("document.querySelectorAll('img, iframe, object, embed, link').length") == 0
        assert page.run("document.scripts.length") == 2
        assert (
            page.run(
                "[...document.querySelectorAll('*')].some((one) => [...one.attributes].some((a) "
                "=> a.name.startsWith('on')))"
            )
            is False
        )
        assert page.run("document.title") == f"Reshard plan: {doc['source']['url']}"
        assert "</title><script>" in doc["source"]["url"]
        # Even what got in would not be run.
        assert (
            page.run(
                "document.body.append(Object.assign(document.createElement('script'), "
                "{textContent: 'window.ran = 1'})); window.ran ?? 0"
            )
            == 0
        )


def test_the_table_is_sorted_by_any_column_with_mouse_or_keyboard(chromium, planned):
    path, _ = planned
    with chromium.page(path) as page:
        assert exact(page, 5) == sorted(exact(page, 5), reverse=True)
        for press in range(2):
            page.run("document.querySelectorAll('#tensors th button')[2].click()")
            assert exact(page, 2) == sorted(exact(page, 2), reverse=press == 0)
        page.run("document.querySelectorAll('#tensors th button')[0].focus()")
        page.press("Enter")
        names = [name for name in column(page, 0) if "layers" in name]
        assert names == [f"model/layers.{i}.w" for i in range(12)]
        assert page.run(
            "[...document.querySelectorAll('#tensors th')].map((head) => "
            "head.getAttribute('aria-sort'))"
        ) == [
            "ascending",
            *["none"] * 8,
        ]


def test_the_table_shows_the_names_that_are_asked_for(chromium, planned):
    path, _ = planned
    with chromium.page(path) as page:
        page.run("document.getElementById('filter').focus()")
        page.type("LAYERS.1")
        assert (
            page.run(
                "[...document.querySelectorAll('#tensors tbody tr')].filter((row) => "
                "row.getClientRects().length).length"
            )
            == 3
        )
        assert page.run("document.getElementById('shown').textContent") == "3 of 17 shown"


def test_the_heat_map_is_read_cell_by_cell(chromium, planned):
    path, doc = planned
    with chromium.page(path) as page:
        page.run("document.getElementById('heat').focus()")
        assert page.run("document.getElementById('cell').textContent").startswith(
            "host 0 → host 0: "
        )
        for _ in range(9):
            page.press("ArrowRight")
        assert page.run("document.getElementById('cell').textContent").startswith(
            "host 0 → host 5: "
        )
        page.run("document.getElementById('heat').scrollIntoView()")
        box = page.run(
            "(({left, top, width, height}) => [left, top, width, "
            "height])(document.getElementById('heat').getBoundingClientRect())"
        )
        page.point_at(box[0] + box[2] * 1.5 / doc["target"]["hosts"], box[1] + box[3] / 2)
        assert page.run("document.getElementById('cell').textContent").startswith(
            "host 0 → host 1: "
        )


def test_on_one_host_the_page_shows_devices_and_no_flow_of_which_there_is_none(
    chromium, on_one_host
):
    with chromium.page(on_one_host) as page:
        assert page.complaints == []
        labels = page.run(
            "[...document.querySelectorAll('.grid .label')].map((one) => one.textContent)"
        )
        assert {str(device) for device in range(8)} <= set(labels)
        assert page.run("document.querySelectorAll('#heat, .ribbons, .balance').length") == 0
        assert "--devices-per-host" in page.run(
            "document.querySelector('[aria-labelledby=section-hosts]').textContent"
        )
        page.run("document.querySelectorAll('#tensors th button')[0].click()")
        assert (
            page.run("document.querySelector('#tensors th').getAttribute('aria-sort')")
            == "ascending"
        )


@pytest.mark.parametrize("dark", [False, True])
def test_text_can_be_read_in_light_and_dark(chromium, planned, dark):
    path, _ = planned
    with chromium.page(path, dark=dark) as page:
        background = page.run("getComputedStyle(document.querySelector('section')).backgroundColor")
        assert contrast(background, "rgb(0, 0, 0)" if dark else "rgb(255, 255, 255)") < 1.5
        for selector in ("section", ".quiet", "dt", "td small", "td", "figcaption"):
            assert (
                contrast(
                    page.run(
                        f"getComputedStyle(document.querySelector('section {selector}') ?? "
                        f"document.querySelector('{selector}')).color"
                    ),
                    background,
                )
                > 4.5
            )
        inks = page.run(
            "[...document.querySelectorAll('.grid .label')].map((one) => "
            "getComputedStyle(one).fill)"
        )
        tiles = page.run(
            "[...document.querySelectorAll('.grid .tile')].map((one) => getComputedStyle(one).fill)"
        )
        assert min(contrast(ink, tile) for ink in set(inks) for tile in set(tiles)) > 4.5


def test_every_drawing_says_in_words_what_it_shows(chromium, planned):
    path, _ = planned
    with chromium.page(path) as page:
        drawings = "[...document.querySelectorAll('svg:not([aria-hidden])')]"
        words = page.run(
            f"{drawings}.map((one) => [one.getAttribute('role'), one.getAttribute('aria-label')])"
        )
        assert len(words) > 5
        assert all(role == "img" and len(label) > 20 for role, label in words)
        assert page.run("document.querySelectorAll('details table tbody tr').length") > 0
        assert page.run("document.documentElement.lang") == "en"
        assert page.run(
            "[...document.querySelectorAll('[id]')].length === new "
            "Set([...document.querySelectorAll('[id]')].map((one) => one.id)).size"
        )
        assert page.run("[...document.querySelectorAll('th')].every((one) => one.scope)")
