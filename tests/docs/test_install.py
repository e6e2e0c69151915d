"""Commands that install shardckpt: every text names the one that works, and it does, from a
clone."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from paths import DOCS, ROOT

from shardckpt.text import REPOSITORY, install_command

DOCUMENT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = DOCUMENT["project"]["optional-dependencies"]
TEXTS = [
    ROOT / "README.md",
    *sorted((ROOT / "shardckpt").rglob("*.py")),
    *sorted((ROOT / "examples").glob("*")),
]
TEXTS += [path for path in sorted(DOCS.rglob("*.md")) if not {"lab", "decisions"} & set(path.parts)]
COMMANDS = re.compile(r"pip install[^`\n]*?['\"]shardckpt\[([\w,]*)\]([^'\"\n]*)['\"]")
WORKFLOW = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())


def test_the_address_is_that_of_the_project():
    assert f"git+{DOCUMENT['project']['urls']['Source']}" == REPOSITORY


def test_every_text_names_the_command_that_works():
    extras_of = {}
    for path in TEXTS:
        if path.is_file():
            for extras, rest in COMMANDS.findall(path.read_text(encoding="utf-8")):
                if "{" in rest or rest == "…":
                    continue
                extras_of[path] = extras
                assert rest == f" @ {REPOSITORY}", path
                assert set(extras.split(",")) <= {*EXTRAS, "…"}, path
    assert {ROOT / "README.md", DOCS / "index.md", DOCS / "storage.md"} <= set(extras_of)


def test_errors_for_missing_extras_name_extras_that_exist():
    for path in sorted((ROOT / "shardckpt").rglob("*.py")):
        for extra in re.findall(r"install_command\(['\"](\w+)['\"]\)", path.read_text()):
            assert extra in EXTRAS, path


@pytest.mark.long
def test_the_command_installs_from_a_clone(tmp_path):
    """The address is that of a clone of this commit; packages that shardckpt needs are there
    already."""
    subprocess.run(["git", "clone", "--quiet", f"file://{ROOT}", tmp_path / "clone"], check=True)
    subprocess.run(
        ["git", "-C", tmp_path / "clone", "checkout", "--quiet", "-B", "main"], check=True
    )
    command = install_command("serve", "gcs").replace(REPOSITORY, f"git+file://{tmp_path}/clone")
    (requirement,) = re.findall(r"'(.*)'", command)
    uv = Path(sys.executable).with_name("uv")
    options = ["--quiet", "--no-deps", "--target", tmp_path / "site", "--python", sys.executable]
    subprocess.run([uv, "pip", "install", *options, requirement], check=True, timeout=250)
    code = (
        "import shardckpt, importlib.metadata as m; print(shardckpt.__file__, "
        "m.metadata('shardckpt').get_all('Provides-Extra'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path / "site",
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith(str(tmp_path / "site"))
    for extra in EXTRAS:
        assert f"'{extra}'" in done.stdout


def test_all_has_every_extra_but_xla_and_users_are_offered_no_tests():
    (everything,) = EXTRAS["all"]
    assert set(re.search(r"\[(.*)\]", everything)[1].split(",")) == set(EXTRAS) - {"all", "xla"}
    assert not {"dev", "test"} & set(EXTRAS)
    assert "test" in DOCUMENT["dependency-groups"]


def test_links_of_the_readme_work_outside_the_repository():
    links = re.findall(r"\]\(([^)]+)\)", (ROOT / "README.md").read_text())
    here = DOCUMENT["project"]["urls"]["Source"] + "/blob/main/"
    for link in links:
        assert link.startswith(("https://", "#")), link
        if link.startswith(here):
            assert (ROOT / link.removeprefix(here).partition("#")[0]).exists(), link


def test_a_release_builds_the_sdist_and_two_kinds_of_wheels_and_needs_no_token():
    jobs = WORKFLOW["jobs"]
    assert jobs["wheels"]["strategy"]["matrix"]["runner"] == ["ubuntu-24.04", "ubuntu-24.04-arm"]
    assert set(jobs["publish"]["needs"]) == {"sdist", "wheels"}
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    assert "secrets." not in (ROOT / ".github" / "workflows" / "release.yml").read_text()


@pytest.mark.parametrize("job", WORKFLOW["jobs"])
def test_commands_of_the_workflow_are_shell(job):
    for step in WORKFLOW["jobs"][job]["steps"]:
        if "run" in step:
            subprocess.run(["bash", "-n", "-c", step["run"]], check=True)
