"""Finding and seeing: lists that the server sorts and filters, and pages that say how runs and
checkpoints are."""

import datetime as dt
import re
from html import unescape
from urllib.parse import quote

import numpy as np
import pytest
from safetensors.numpy import load
from serving import serving

import shardckpt
from shardckpt import SaveOptions
from shardckpt.commit import assemble
from shardckpt.io.store import Store
from shardckpt.io.url import parse
from shardckpt.runs.ended import mark_ended
from shardckpt.runs.pinning import tag
from shardckpt.serve.pages.frame import ago
from shardckpt.serve.pages.runs import run_state

NOW = dt.datetime.now(dt.UTC)
LOSSES = {1: 3.0, 2: 1.0, 3: 2.0, 4: 2.0, 5: None}
AGES = {1: 9, 2: 5, 3: 1, 4: 60 * 24 * 3, 5: 2}
"""Minutes since each step was committed."""


def layers(n):
    names = ("self_attn.q_proj.weight", "mlp.up_proj.weight")
    return {
        f"model.layers.{i}.{name}": np.full((4, 2), i, np.float32)
        for i in range(n)
        for name in names
    }


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    top = tmp_path_factory.mktemp("finding")
    with pytest.MonkeyPatch.context() as patch:
        for step, loss in LOSSES.items():
            when = (NOW - dt.timedelta(minutes=AGES[step])).isoformat(timespec="seconds")
            patch.setattr(assemble, "utc_now", lambda when=when: when)
            config = {"config": {"hidden": 64, "names": ["a"] * 40}, "note": "trained <fast>"}
            metadata = config if loss is None else config | {"metrics": {"loss": loss}}
            state = {"model": layers(6), "x": np.zeros(step * 100), "step": step}
            shardckpt.save(
                top / "runs" / "a" / str(step), state, options=SaveOptions(metadata=metadata)
            )
        for minutes in (30, 20, 10):
            when = (NOW - dt.timedelta(days=1, minutes=minutes)).isoformat(timespec="seconds")
            patch.setattr(assemble, "utc_now", lambda when=when: when)
            shardckpt.save(top / "runs" / "b" / str(40 - minutes), {"w": np.ones(2000)})
    shardckpt.save(top / "runs" / "c" / "1", {"w": np.ones(2)})
    tag(top / "runs" / "a" / "2", "good")
    mark_ended(Store.open(parse(str(top / "runs" / "c"))), "ann")
    with serving(("lab", top / "runs")) as running:
        yield running


def steps(service, query):
    """Steps of a list, read in pages of two."""
    numbers, cursor = [], ""
    while cursor is not None:
        doc = service.get(
            f"/v1/checkpoints?run=lab/a&limit=2&{query}{cursor and f'&cursor={quote(cursor)}'}"
        )
        numbers += [one["step"] for one in doc["checkpoints"]]
        cursor = doc["next"]
    return numbers


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("", [1, 2, 3, 4, 5]),
        ("order=descending", [5, 4, 3, 2, 1]),
        ("sort=created", [4, 1, 2, 5, 3]),
        ("sort=created&order=descending", [3, 5, 2, 1, 4]),
        ("sort=size", [1, 2, 3, 4, 5]),
        ("sort=metric:loss", [2, 3, 4, 1]),  # those without are left out; equal ones by id
        ("sort=metric:loss&order=descending", [1, 4, 3, 2]),
        ("sort=metric:nothing", []),
        ("sort=metric:loss&tag=good", [2]),
        ("sort=metric:loss&metric=loss>1.5&step=1:3", [3, 1]),
        ("text=A/3&sort=size", [3]),
    ],
)
def test_the_server_sorts_and_filters_and_pages_fit_together(service, query, expected):
    assert steps(service, query) == expected


def test_checkpoints_are_found_by_date_and_size(service):
    two_days_ago = (NOW - dt.timedelta(days=2)).strftime("%Y-%m-%d")
    assert steps(service, f"since={two_days_ago}") == [1, 2, 3, 5]
    assert steps(service, f"until={two_days_ago}&sort=created") == [4]
    assert steps(service, f"since={quote((NOW - dt.timedelta(minutes=6)).isoformat())}") == [
        2,
        3,
        5,
    ]
    sizes = {
        one["step"]: one["stored_bytes"]
        for one in service.get("/v1/checkpoints?run=lab/a")["checkpoints"]
    }
    assert steps(service, f"larger={sizes[4]}") == [4, 5]
    assert steps(service, "larger=1GiB") == []
    for bad in (
        "sort=loss",
        "since=yesterday",
        "until=2026-13-01",
        "larger=big",
        "sort=created&cursor=WzEsImEiXQ",
        "since=9999-12-31T23:59-23:00",
    ):
        assert service.ask(f"/v1/checkpoints?{bad}").status == 400, bad


def test_runs_are_sorted_by_name_commit_and_size(service):
    def names(query):
        first = service.get(f"/v1/runs?limit=2&{query}")
        rest = service.get(f"/v1/runs?limit=2&{query}&cursor={first['next']}")
        assert rest["next"] is None
        return [one["run"][4:] for one in first["runs"] + rest["runs"]]

    assert names("") == ["a", "b", "c"]
    assert names("order=descending") == ["c", "b", "a"]
    assert names("sort=created") == ["b", "a", "c"]
    assert names("sort=size&order=descending") == ["b", "a", "c"]


def words(reply):
    assert reply.status == 200, reply
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", reply.body.decode())).split())


def test_the_list_of_runs_says_how_each_is(service):
    service.wait_until(lambda: "ended" in words(service.ask("/ui/runs")))
    page = words(service.ask("/ui/runs"))
    assert "Commits in 24 h 5" in page
    assert "silent for 1 d" in page
    assert "loss 2" in page
    assert " UTC" in page
    assert service.ask("/ui/runs").body.count(b'class="chart curve"') == 1
    assert page.index("lab/a") < page.index("lab/b")
    by_size = words(service.ask("/ui/runs?sort=size"))
    assert by_size.index("lab/b") < by_size.index("lab/a")


def test_the_state_of_a_run_is_a_sentence():
    def sentence(*minutes, ended=False):
        now = dt.datetime.now(dt.UTC)
        commits = [{"created": (now - dt.timedelta(minutes=one)).isoformat()} for one in minutes]
        return re.sub(r"<[^>]*>", "", run_state(commits, ended=ended))

    assert sentence(9, 5, 1) == "saving every 4 min"
    assert sentence(140, 130, 120) == "silent for 2 h"
    assert sentence(2) == "saved 2 min ago"
    assert sentence(9, 5, 1, ended=True) == "ended"
    assert sentence() == "–"
    assert [ago(n) for n in (59, 60, 7199, 7200, 86400)] == [
        "just now",
        "1 min ago",
        "1 h ago",
        "2 h ago",
        "1 d ago",
    ]


def test_the_page_of_a_run_marks_its_best_step_and_filters(service):
    page = service.ask("/ui/run/lab/a").body.decode()
    (row,) = re.findall(r"<tr>(?:(?!<tr>).)*best loss.*?</tr>", page)
    assert "/ui/checkpoint/lab/a/2" in row

    def listed(query):
        page = service.ask(f"/ui/run/lab/a?{query}")
        assert page.status == 200
        return re.findall(
            r'<td data-head="Checkpoint"><a href="/ui/checkpoint/lab/a/(\d)"', page.body.decode()
        )

    assert listed("") == ["5", "4", "3", "2", "1"]
    assert listed("sort=metric:loss") == ["2", "3", "4", "1"]
    assert listed("sort=created&metric=loss<2.5&tag=good") == ["2"]
    assert "No checkpoint is like that." in words(service.ask("/ui/run/lab/a?text=nothing"))
    assert service.ask("/ui/run/lab/a?sort=loss").status == 400
    assert service.ask("/ui/run/lab/none").status == 404


def test_the_page_of_a_checkpoint_folds_layers_and_has_numbers_metadata_and_commands(service):
    page = words(service.ask("/ui/checkpoint/lab/a/3", Host="localhost"))
    assert "Parameters 96" in page  # of the model alone
    assert "layers.{0…5} × 6, 12 tensors" in page
    assert "trained <fast>" in page
    assert "config" in page
    assert 'shardckpt.restore("http://localhost/raw/lab/a/3")' in page
    assert "Bearer $SHARDCKPT_TOKEN" in page
    assert "plain" not in page
    assert "Reshard" in page
    folded = service.ask("/ui/checkpoint/lab/a/3").body.decode()
    assert "/ui/tensor/lab/a/3?name=model%2Fmodel.layers.0.mlp.up_proj.weight" in folded
    assert service.ask("/ui/checkpoint/lab/a/3?text=model.layers").status == 200


def test_a_download_has_the_models_own_names_and_all_tensors_are_another_one(service, tmp_path):
    optimizer = {"state": {"w": np.ones(3)}}
    states = {
        "both": {"model": {"w": np.ones(2)}, "optimizer": optimizer},
        "weights": {"model": {"w": np.ones(2)}},
        "other": optimizer,
    }
    for name, state in states.items():
        shardckpt.save(tmp_path / "runs" / name / "1", state)
    downloads = {}
    with serving(("lab", tmp_path / "runs")) as lab:
        for name in states:
            page = unescape(lab.ask(f"/ui/checkpoint/lab/{name}/1", Host="localhost").body.decode())
            links = re.findall(r'href="(/files/[^"]+)" download="([a-z.]+)">([^<]+)</a>', page)
            downloads[name] = {
                (text, file): sorted(load(lab.ask(link).body)) for link, file, text in links
            }
            commands = re.findall(r"curl [^<]* -o ([a-z.]+) 'http://localhost(/files/[^']+)'", page)
            assert commands == [(file, link) for link, file, _ in links]
    model, everything = (
        ("Download the model", "model.safetensors"),
        ("Download all tensors of the state", "state.safetensors"),
    )
    assert downloads["both"] == {model: ["w"], everything: ["model.w", "optimizer.state.w"]}
    assert downloads["weights"] == {model: ["w"]}
    assert downloads["other"] == {everything: ["state.w"]}


def test_a_tree_of_many_keys_fits_on_a_page(tmp_path):
    many = {f"w{i}.{'x' * (i % 7 + 1)}": np.zeros(i % 5 + 1) for i in range(3000)}
    shardckpt.save(tmp_path / "runs" / "a" / "1", {"m": many, "empty": {}, "list": [1, 2, 3]})
    with serving(("lab", tmp_path / "runs")) as service:
        page = service.ask("/ui/checkpoint/lab/a/1").body.decode()
        assert page.count("<li>") < 500
        assert "list" in page
        inside = service.ask("/ui/checkpoint/lab/a/1?under=m")
        assert (inside.status, "more; search for them" in words(inside)) == (200, True)


def test_a_comparison_begins_with_a_sentence_and_the_largest_relative_change(tmp_path):
    one = {
        "big": np.array([1000.0, 1.0]),
        "small": np.array([1.0, 1.0]),
        "odd": np.array([1.0, 2.0]),
        "same": np.ones(3),
    }
    other = {
        "big": np.array([1010.0, 1.0]),
        "small": np.array([1.5, 1.0]),
        "odd": np.array([np.nan, 2.0]),
        "same": np.ones(3),
    }
    shardckpt.save(tmp_path / "runs" / "a" / "1", one)
    shardckpt.save(tmp_path / "runs" / "a" / "2", other)
    with serving(("lab", tmp_path / "runs")) as service:
        page = words(service.ask("/ui/diff?a=lab/a/1&b=lab/a/2"))
        assert (
            "different : 4 tensors compared bit by bit; 3 of them differ, most of all odd." in page
        )
        assert re.findall(r"\b(odd|small|big) 1 ", page) == ["odd", "small", "big"]
        relative = {
            value["name"]: value["relative"]
            for value in service.get("/v1/diff?a=lab/a/1&b=lab/a/2")["values"]
        }
        assert relative == {"big": 0.01, "small": 0.5, "odd": None}
        assert "equal : 4 tensors compared bit by bit." in words(
            service.ask("/ui/diff?a=lab/a/1&b=lab/a/1")
        )
