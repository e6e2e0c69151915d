"""The decision records are short, have one form, and are all in the index."""

import re

import pytest
from paths import DOCS

FOLDER = DOCS / "decisions"
RECORDS = sorted(path for path in FOLDER.glob("*.md") if path.name != "index.md")
MOST_WORDS = 250
HEADINGS = ["Context", "Decision", "Consequences"]


def test_numbers_have_no_gaps():
    assert [path.name[:5] for path in RECORDS] == [
        f"{number:04d}-" for number in range(1, len(RECORDS) + 1)
    ]


def test_the_index_has_each_record_once():
    rows = re.findall(
        r"^\| \[(\d+)\]\(([^)]+)\) \| \S", (FOLDER / "index.md").read_text(), re.MULTILINE
    )
    assert rows == [(str(number), path.name) for number, path in enumerate(RECORDS, 1)]


@pytest.mark.parametrize("record", RECORDS, ids=lambda path: path.stem)
def test_form(record):
    text = record.read_text()
    assert text.startswith(f"# {int(record.name[:4])}. ")
    assert re.findall(r"^## (.*)", text, re.MULTILINE) == HEADINGS
    assert len(text.split()) <= MOST_WORDS


@pytest.mark.parametrize("record", RECORDS, ids=lambda path: path.stem)
def test_measurements_are_there(record):
    named = re.findall(r"`docs/(lab/[^`]+)`", record.read_text())
    assert [name for name in named if not (DOCS / name).is_file()] == []


def test_links_lead_to_pages():
    links = {
        (path, link)
        for path in FOLDER.glob("*.md")
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text())
    }
    assert {
        (path.name, link) for path, link in links if not (path.parent / link).is_file()
    } == set()
