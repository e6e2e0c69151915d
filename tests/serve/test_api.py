"""The API for programs: its answers are those of the library."""

import io
import urllib.parse

import numpy as np
import pytest
from openapi_spec_validator import validate
from safetensors.numpy import load

import shardckpt
from shardckpt import Box
from shardckpt.reading import documents
from shardckpt.reading.compare import compare

CKPT = "/v1/checkpoints/lab/llama/10"


def test_runs_and_checkpoints_are_listed_filtered_and_paged(service):
    runs = service.get("/v1/runs")
    assert [
        (one["run"], one["checkpoints"], one["first_step"], one["last_step"])
        for one in runs["runs"]
    ] == [
        ("lab/llama", 3, 10, 30),
        ("lab/tiny-gpt", 1, 10, 10),
    ]
    assert runs["complete"]
    assert not runs["unreachable"]

    def ids(query):
        return [one["id"] for one in service.get(f"/v1/checkpoints?{query}")["checkpoints"]]

    assert ids("") == ["lab/llama/10", "lab/llama/20", "lab/llama/30", "lab/tiny-gpt/10"]
    assert ids("run=lab/llama&order=descending") == ["lab/llama/30", "lab/llama/20", "lab/llama/10"]
    assert ids("step=20:") == ["lab/llama/20", "lab/llama/30"]
    assert ids("step=20") == ["lab/llama/20"]
    assert ids("metric=loss%3C2.5") == ["lab/llama/20", "lab/llama/30"]
    assert ids("metric=loss%3E%3D3") == ["lab/llama/10"]
    assert ids("metric=other%3C9") == ids("state=uncommitted") == ids("tag=pinned") == []
    assert ids("text=TINY") == ["lab/tiny-gpt/10"]
    assert ids("text=%25") == []

    for order in ("ascending", "descending"):
        listed, cursor = [], ""
        while True:
            page = service.get(f"/v1/checkpoints?limit=1&order={order}{cursor}")
            listed += [one["id"] for one in page["checkpoints"]]
            if page["next"] is None:
                break
            cursor = f"&cursor={page['next']}"
        assert listed == ids(f"order={order}")
    first = service.get("/v1/runs?limit=1")
    assert (
        service.get(f"/v1/runs?limit=1&cursor={first['next']}")["runs"][0]["run"] == "lab/tiny-gpt"
    )


def test_a_checkpoint_is_described_as_the_command_line_describes_it(service, runs):
    ckpt = shardckpt.open(runs / "llama" / "10")
    document = service.get(CKPT)
    assert document.pop("id") == document["entry"]["id"] == "lab/llama/10"
    assert document.pop("entry")["metrics"] == {"loss": 3.0}
    assert document == documents.checkpoint_json(ckpt, ckpt.parsed_tree)
    selection = service.get(f"{CKPT}?only=model/**")
    assert {one["name"] for one in selection["tensors"]} == {
        "model/embed.weight",
        "model/head",
        "model/scale",
        "model/none",
    }
    described = service.get(f"{CKPT}/tensors/model/head")
    assert described == {"id": "lab/llama/10", **documents.tensor_json(ckpt, "model/head")}


@pytest.mark.parametrize(
    ("text", "box"),
    [("0:8,4:20", Box((0, 4), (8, 20))), (":,47", Box((0, 47), (64, 48))), (None, None)],
)
def test_boxes_of_tensors_come_as_npy_raw_and_safetensors(service, runs, text, box):
    expected = shardckpt.open(runs / "llama" / "10").read("model/embed.weight", box)
    query = "" if text is None else f"&box={text}"
    path = f"{CKPT}/tensors/model/embed.weight"
    assert np.array_equal(
        np.load(io.BytesIO(service.ask(f"{path}?format=npy{query}").body)), expected
    )
    raw = service.ask(f"{path}?format=raw{query}")
    assert raw.headers["x-shardckpt-dtype"] == "float32"
    assert raw.headers["x-shardckpt-shape"] == ",".join(map(str, expected.shape))
    assert raw.body == expected.tobytes()
    assert np.array_equal(
        load(service.ask(f"{path}?format=safetensors{query}").body)["model/embed.weight"], expected
    )
    again = service.ask(f"{path}?format=raw{query}", If_None_Match=raw.headers["etag"])
    assert (again.status, again.body) == (304, b"")


def test_scalars_empty_tensors_and_other_dtypes(service):
    assert service.ask(f"{CKPT}/tensors/model/scale?format=raw").body == np.float32(10).tobytes()
    assert service.ask(f"{CKPT}/tensors/model/none?format=raw").body == b""
    assert service.get(f"{CKPT}/tensors/model/head?format=npy", 422)["code"] == "unsupported-dtype"
    assert len(service.ask(f"{CKPT}/tensors/model/head?format=raw&box=1:3,:").body) == 2 * 8 * 2


def test_layouts_statistics_plans_and_differences(service, runs):
    layout = service.get(f"{CKPT}/layouts/model/embed.weight")
    assert layout["text"] == "data, model over data=4 × model=2"
    assert layout["devices"][3] == {"device": 3, "start": [16, 24], "stop": [32, 48]}
    assert service.get(f"{CKPT}/layouts/model/scale")["devices"] == []

    count = service.get(f"{CKPT}/statistics/optimizer/count")
    assert (
        count["min"],
        count["max"],
        count["elements"],
        count["read"],
        sum(count["histogram"]),
    ) == (0, 299, 300, 300, 300)
    sample = service.get(f"{CKPT}/statistics/model/embed.weight?budget=512")
    assert 0 < sample["read"] <= 128
    assert service.get(f"{CKPT}/statistics/model/none")["mean"] is None

    plan = service.get(
        f"{CKPT}/plan?mesh=model=2&rule=model/embed*=(model,None)&devices_per_host=1"
    )
    assert plan["target"]["hosts"] == 2
    assert plan["rates"] == {"read": None, "write": None}

    a, b = (shardckpt.open(runs / "llama" / step) for step in ("10", "20"))
    differences = service.get("/v1/diff?a=lab/llama/10&b=lab/llama/20")
    assert differences == {
        "a": "lab/llama/10",
        "b": "lab/llama/20",
        **documents.comparison_json(compare(a, b), structure=False, layout=False),
    }
    assert service.get("/v1/diff?a=lab/llama/10&b=lab/llama/10&values=false")["equal"]


@pytest.mark.parametrize(
    ("path", "status", "code"),
    [
        ("/v1/checkpoints/lab/llama/11", 404, "not-found"),
        ("/v1/checkpoints/other/llama/10", 404, "not-found"),
        ("/v1/checkpoints/lab/llama/10/nothing/x", 404, "not-found"),
        ("/v1/nothing", 404, "not-found"),
        (f"{CKPT}/tensors/model/embed.wight", 404, "names"),
        (f"{CKPT}/tensors/model/embed.weight?format=raw&box=0:80,:", 400, "shape"),
        (f"{CKPT}/tensors/model/embed.weight?format=raw&box=zero", 400, "shape"),
        (f"{CKPT}/tensors/model/embed.weight?format=xml", 400, "option"),
        ("/v1/checkpoints?step=200:100", 400, "option"),
        ("/v1/checkpoints?step=:", 400, "option"),
        (f"{CKPT}/plan?mesh=nonsense", 400, "option"),
        (f"{CKPT}/plan?mesh=model=2&rule=model/head=(data)", 400, None),
        ("/v1/checkpoints?limit=0", 400, "option"),
        ("/v1/checkpoints?limit=5&limit=6", 400, "option"),
        ("/v1/checkpoints?cursor=AAAA", 400, "option"),
        ("/v1/checkpoints?metric=loss", 400, "option"),
        ("/v1/checkpoints?unknown=1", 400, "option"),
        ("/v1/diff?a=lab/llama/10", 400, "option"),
    ],
)
def test_mistakes_are_problems_with_the_codes_of_the_library(service, runs, path, status, code):
    reply = service.ask(urllib.parse.quote(path, safe="/?&=:,*()"))
    assert reply.status == status
    assert reply.headers["content-type"] == "application/problem+json"
    assert reply.json["status"] == status
    assert code in (None, reply.json["code"])
    assert str(runs) not in reply.json["detail"]


@pytest.mark.parametrize(
    ("path", "words"),
    [
        (
            f"{CKPT}/tensors/model/embed.weight?format=raw&box=5:2,:",
            "box='5:2,:': the start 5 is after the stop 2; write START:STOP.",
        ),
        (
            f"{CKPT}/tensors/model/embed.weight?format=raw&box=99:,:",
            "lies outside its shape (64, 48)",
        ),
        (f"{CKPT}/tensors/nothing", "no tensor 'nothing'; `shardckpt info` lists its names."),
        (
            "/files/lab/../model.safetensors",
            "'lab/..' is no place below lab: one of the names between its slashes is '..'.",
        ),
        ("/v1/checkpoints?step=200:100", "the first step is after the last"),
    ],
)
def test_problems_say_what_to_do_to_a_client_that_knows_no_python(service, path, words):
    assert words in service.ask(urllib.parse.quote(path, safe="/?&=:,")).json["detail"]


def test_a_path_that_does_not_exist_is_not_found_by_any_method_and_one_that_does_takes_its_own(
    service,
):
    for method in ("GET", "HEAD", "POST", "PUT", "DELETE"):
        for path in ("/nothing", "/v1/nothing", "/v1", "/ui/nothing", "/lab/llama"):
            assert service.ask(path, method).status == 404, (method, path)
    for path in (
        "/v1/runs",
        "/v1/diff",
        "/v1/checkpoints/lab/llama/10",
        "/files/lab/llama/10/",
        "/lab/llama/resolve/main/config.json",
    ):
        assert service.ask(path, "POST").status == 405, path
    assert service.ask("/v1/announcements").status == 405


def test_the_openapi_document_is_valid(service):
    document = service.get("/v1/openapi.json")
    validate(document)
    assert "/v1/checkpoints/{checkpoint}/tensors/{name}" in document["paths"]
    assert service.ask("/v1/runs", "POST").status == 405
    assert service.ask("/v1/runs", "HEAD").body == b""


def test_pages_are_rendered_without_a_browser_too(service):
    paths = [
        "/",
        "/ui/run/lab/llama",
        "/ui/checkpoint/lab/llama/10",
        "/ui/storage",
        "/ui/diff?a=lab/llama/10&b=lab/llama/20",
    ]
    paths += [
        "/ui/tensor/lab/llama/10?name=model/head&values=read",
        "/ui/plan/lab/llama/10?mesh=model=2&rule=**=(model)",
    ]
    for path in paths:
        reply = service.ask(path)
        assert (reply.status, reply.headers["content-type"]) == (200, "text/html; charset=utf-8")
        assert "script-src 'self'" in reply.headers["content-security-policy"]
        assert reply.body.startswith(b"<!DOCTYPE html>")
    for path in (
        "/ui/run/none",
        "/ui/checkpoint/lab/none",
        "/ui/tensor/lab/llama/10",
        "/ui/checkpoint/lab/llama/10?under=none",
    ):
        reply = service.ask(path)
        assert (reply.status, reply.headers["content-type"]) == (404, "text/html; charset=utf-8")
    for name in ("plan.css", "service.css", "plan.js", "service.js", "icon.svg"):
        assert service.ask(f"/static/{name}").status == 200
    assert (
        service.ask("/static/plan.py").status == service.ask("/static/..%2fplan.py").status == 404
    )
