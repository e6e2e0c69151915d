"""The endpoints of `/v1`: what programs, the command line and the pages ask for.

Each is a function of the library's results.
"""

from __future__ import annotations

import datetime as dt
import io
import json
import re
from itertools import islice
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from shardckpt.errors import BudgetError, DtypeError, NotFoundError, OptionError, ShapeMismatchError
from shardckpt.layout.box import Box
from shardckpt.layout.placements import Placements
from shardckpt.layout.text import layout_text
from shardckpt.options import parse_bytes
from shardckpt.reading import documents
from shardckpt.reshard.options import ReshardOptions
from shardckpt.serve.access.identity import only_readable
from shardckpt.serve.calculations import described
from shardckpt.serve.catalogue.catalogue import MOST_ROWS
from shardckpt.serve.catalogue.query import CheckpointQuery
from shardckpt.serve.health import with_damaged, with_verifications
from shardckpt.serve.openapi import Endpoint, Parameter, number, parameters
from shardckpt.serve.sources import ByteSource
from shardckpt.text import file_size, shorten
from shardckpt.views.model_view import header_of

if TYPE_CHECKING:
    from shardckpt.reading.checkpoint import Checkpoint
    from shardckpt.serve.service import Service

LARGEST_BOX = 16 << 20
"""Most bytes of a box in one response; ranges of `/files` give more."""
_METRIC = re.compile(r"(.{1,200}?)(<=|>=|<|>|=)([^<>=]{1,40})", re.DOTALL)
_ESCAPED_DOTS = re.compile(r"(?<![^/])~(\.\.?)(?![^/])")
"""Keys of a name that a url would lose."""
_MOST_PASSED_OVER = 100
_STEPS = re.compile(r"(\d{1,16})?(:)?(\d{1,16})?", re.ASCII)
_SIDE = re.compile(r"\s*(\d{1,16})?\s*(?::\s*(\d{1,16})?\s*)?", re.ASCII)


def runs(
    service: Service, *, text: str | None, sort: str, order: str, limit: int, cursor: str | None
) -> dict[str, Any]:
    """List runs: directories of checkpoints."""
    page, following = service.catalogue.runs(
        text, limit, cursor, sort=sort, descending=order == "descending"
    )
    scanner, without_places = service.scanner, service.roots.without_places
    return {
        "runs": with_damaged(service, page),
        "next": following,
        "complete": scanner.complete.is_set(),
        "unreachable": {
            name: without_places(why) for name, why in only_readable(scanner.problems).items()
        },
        "passed_over": {
            ident: without_places(why)
            for ident, why in islice(only_readable(scanner.passed_over).items(), _MOST_PASSED_OVER)
        },
    }


def checkpoints(
    service: Service,
    *,
    step: str | None,
    metric: str | None,
    since: str | None,
    until: str | None,
    larger: str | None,
    sort: str | None,
    order: str,
    **asked: Any,
) -> dict[str, Any]:
    """List checkpoints, in order of run and step, or sorted."""
    if sort not in (None, "created", "size") and not sort.startswith("metric:"):
        raise OptionError(f"sort={shorten(sort)}: give created, size or metric:NAME.")
    first, last = _steps(step)
    query = CheckpointQuery(
        first_step=first,
        last_step=last,
        metric=_metric(metric),
        since=_time(since, "since"),
        until=_time(until, "until"),
        larger=None if larger is None else parse_bytes(larger, "larger"),
        sort=sort,
        descending=order == "descending",
        **asked,
    )
    page, following = service.catalogue.checkpoints(query)
    return {"checkpoints": with_verifications(service, page), "next": following}


def checkpoint(
    service: Service, ident: str, *, only: list[str] | None, depth: int | None
) -> dict[str, Any]:
    """Describe a checkpoint: tensors, small leaves, meshes, layouts, sizes, metrics and bases."""
    if only is None:
        document = described(service.opened, ident, only=None, depth=depth)
    else:
        document = json.loads(service.calculations.run("described", ident, only=only, depth=depth))
    return {**document, "entry": entry_of(service, ident)}


def entry_of(service: Service, ident: str) -> dict[str, Any] | None:
    """A checkpoint as lists have it; None: no scan has found it yet."""
    return next(iter(with_verifications(service, service.catalogue.find([ident]))), None)


def tensor(service: Service, ident: str, name: str, *, box: str | None, format: str) -> Any:  # noqa: A002  (of the query)
    """Read a tensor, or a box of it; or describe it (`format=json`)."""
    opened = service.opened.get(ident)
    ckpt = opened.checkpoint
    info = ckpt.info(name)
    if format == "json":
        if box is not None:
            raise OptionError(
                f"{name}: box= selects elements, and format=json has none; add format=npy, raw or "
                "safetensors."
            )
        return {"id": ident, **documents.tensor_json(ckpt, name)}
    part = parse_box(box, info.shape, name)
    nbytes = prod(part.shape) * info.dtype.itemsize
    if nbytes > LARGEST_BOX:
        raise BudgetError(
            f"{name}: the box {part} has {file_size(nbytes)}, and a response at most "
            f"{file_size(LARGEST_BOX)}; ask for smaller boxes, or for ranges of "
            f"/files/{ident}/model.safetensors."
        )
    opened.check_chunks(name)
    head, kind = (
        header_of(name, part.shape, info.dtype) if format == "safetensors" else b"",
        "application/octet-stream",
    )
    if format == "npy":
        head, kind = _npy_header(name, info.dtype.numpy, part.shape), "application/x-npy"

    def read_into(_offset: int, into: memoryview) -> None:
        into[: len(head)] = head
        if nbytes:
            into[len(head) :] = ckpt.read(name, part).reshape(-1).view(np.uint8).data

    headers = {
        "X-Shardckpt-Dtype": info.dtype.name,
        "X-Shardckpt-Shape": ",".join(map(str, part.shape)),
    }
    etag = service.tag(opened.attempt, name, str(part), format)
    return ByteSource(len(head) + nbytes, etag, read_into, kind, headers, whole=True)


def layout(service: Service, ident: str, name: str) -> dict[str, Any]:
    """Describe the layout of a tensor: which device held which box."""
    ckpt = service.opened.get(ident).checkpoint
    boxes, described = device_boxes(ckpt, name), documents.tensor_json(ckpt, name)
    kept = {
        key: described[key]
        for key in (
            "name",
            "shape",
            "dtype",
            "chunk_shape",
            "pieces",
            "mesh",
            "spec",
            "placements",
            "op_sharding",
        )
    }
    return {"id": ident, **kept, "text": layout_text(ckpt.tensor(name).layout), "devices": boxes}


def device_boxes(ckpt: Checkpoint, name: str) -> list[dict[str, Any]]:
    """The box of a tensor that each device held. BudgetError: there are too many devices."""
    tensor = ckpt.tensor(name)
    if tensor.layout is None or isinstance(tensor.layout, Placements):
        return []
    tiles = tensor.layout.tiling(len(tensor.shape)).device_boxes(tensor.shape)
    if len(tiles.device_ids) > MOST_ROWS * 16:
        raise BudgetError(
            f"{name}: its layout has {len(tiles.device_ids)} devices; read its OpSharding instead."
        )
    devices = zip(
        tiles.device_ids.tolist(),
        tiles.boxes.start.tolist(),
        tiles.boxes.stop.tolist(),
        strict=True,
    )
    return [{"device": device, "start": start, "stop": stop} for device, start, stop in devices]


def statistics(service: Service, ident: str, name: str, *, budget: int) -> bytes:
    """Compute statistics and a histogram of a tensor's elements.

    They are of a sample of the elements if the tensor is larger than the budget.
    """
    return service.calculations.run("_statistics", ident, name, budget=budget)


def diff(service: Service, *, a: str, b: str, values: bool, layouts: bool) -> bytes:
    """Compare two checkpoints, values bit by bit."""
    return service.calculations.run(
        "_compare", service.exactly(a), service.exactly(b), values=values, layouts=layouts
    )


def plan(service: Service, ident: str, **asked: Any) -> bytes:
    """Forecast a reshard: what it would read and write, and what restores after it read."""
    return service.calculations.run("_plan", ident, **asked)


def parse_box(text: str | None, shape: tuple[int, ...], name: str) -> Box:
    """A box such as "0:8,:,3" of a tensor; None: all of it.

    A single number keeps its dimension, with one row.

    Raises:
        ShapeMismatchError: the box lies outside the tensor, or is not one.
    """
    if text is None:
        return Box.full(shape)
    sides = text.split(",") if text.strip() else []
    start, stop = [], []
    for side, n in zip(sides, shape, strict=False):
        match = _SIDE.fullmatch(side)
        if match is None or (match[1] is None and ":" not in side):
            raise ShapeMismatchError(
                f"{name}: box={shorten(text)}: write START:STOP for each dimension, as in 0:8,0:64."
            )
        first = int(match[1] or 0)
        if match[2] is not None and int(match[2]) < first:
            raise ShapeMismatchError(
                f"{name}: box={shorten(text)}: the start {first} is after the stop {match[2]}; "
                "write START:STOP."
            )
        start.append(first)
        stop.append((n if match[2] is None else int(match[2])) if ":" in side else first + 1)
    inside = all(0 <= a <= b <= n for a, b, n in zip(start, stop, shape, strict=False))
    if len(sides) != len(shape) or not inside:
        raise ShapeMismatchError(
            f"{name}: box={shorten(text)} lies outside its shape {shape}; write START:STOP for "
            "each dimension."
        )
    return Box(tuple(start), tuple(stop))


def _npy_header(name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    if dtype.isbuiltin != 1:
        raise DtypeError(
            f"{name}: npy files have no {dtype.name}; ask for format=safetensors or raw."
        )
    out = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        out, {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    )
    return out.getvalue()


def _steps(text: str | None) -> tuple[int | None, int | None]:
    """First and last step of "100", "100:", ":200" or "100:200"; both ends belong to the range."""
    if text is None:
        return None, None
    match = _STEPS.fullmatch(text)
    if match is None or text in ("", ":"):
        raise OptionError(f"step={shorten(text)}: give a step, or a range such as 100:200.")
    first, colon, last = match.groups()
    low = None if first is None else int(first)
    high = low if not colon else None if last is None else int(last)
    if low is not None and high is not None and low > high:
        raise OptionError(
            f"step={shorten(text)}: the first step is after the last; give a range such as 100:200."
        )
    return low, high


def _time(text: str | None, what: str) -> str | None:
    """A date or time as records have it.

    A date without a time is its beginning, or with `until` its end.
    """
    if text is None:
        return None
    try:
        time = dt.datetime.fromisoformat(text)
        time = time if time.tzinfo else time.replace(tzinfo=dt.UTC)
        days = int(what == "until" and len(text) == len("2026-01-01"))
        return (time.astimezone(dt.UTC) + dt.timedelta(days=days)).isoformat(timespec="seconds")
    except (ValueError, OverflowError):
        raise OptionError(
            f"{what}={shorten(text)}: give a date, as in 2026-01-31, or a time, as in "
            "2026-01-31T12:00."
        ) from None


def _metric(text: str | None) -> tuple[str, str, float] | None:
    if text is None:
        return None
    match = _METRIC.fullmatch(text)
    if match is None:
        raise OptionError(
            f"metric={shorten(text)}: give a name, a comparison and a number, as in loss<2.5."
        )
    return match[1], match[2], number(match[3], f"metric={shorten(text)}")


_CURSOR = Parameter(name="cursor", about="The `next` of the last page.")
_ORDER = Parameter(
    name="order", about="Order.", choices=("ascending", "descending"), default="ascending"
)
_LIMIT = Parameter(
    name="limit", kind="integer", about="Most rows of a page.", least=1, most=MOST_ROWS, default=100
)
PLAN = (
    *parameters(ReshardOptions, without=("compression", "overwrite")),
    Parameter(
        name="devices_per_host",
        kind="integer",
        about="Devices per restoring host.",
        least=1,
        most=1 << 20,
    ),
    Parameter(
        name="rate",
        about="READ[,WRITE] in bytes per second, as in 2GiB,800MiB; nothing is measured.",
    ),
)
ENDPOINTS = (
    Endpoint(
        "/v1/runs",
        runs,
        (
            Parameter(name="text", about="A part of the id."),
            Parameter(
                name="sort",
                about="Key: id, time of the last commit, or stored bytes.",
                choices=("run", "created", "size"),
                default="run",
            ),
            _ORDER,
            _LIMIT,
            _CURSOR,
        ),
    ),
    Endpoint(
        "/v1/checkpoints",
        checkpoints,
        (
            Parameter(name="run", about="Id of a run."),
            Parameter(name="step", about="A step, or a range such as 100:200."),
            Parameter(
                name="state",
                about="State.",
                choices=("committed", "uncommitted", "deleted", "unreadable"),
            ),
            Parameter(name="tag", about="A tag, or pinned or superseded.", example="best"),
            Parameter(
                name="metric",
                about="A name, a comparison and a number, as in loss<2.5.",
                example="loss<2.5",
            ),
            Parameter(name="text", about="A part of the id."),
            Parameter(
                name="since",
                about="Committed at this date or time, or later.",
                example="2026-01-31",
            ),
            Parameter(name="until", about="Committed at this date or time, or earlier."),
            Parameter(name="larger", about="Least stored bytes, as in 10GiB.", example="10GiB"),
            Parameter(
                name="sort",
                about="created, size or metric:NAME; default: run and step.",
                example="metric:loss",
            ),
            _ORDER,
            _LIMIT,
            _CURSOR,
        ),
    ),
    Endpoint(
        "/v1/checkpoints/{checkpoint}",
        checkpoint,
        (
            Parameter(name="only", kind="texts", about="Describe only names that match a pattern."),
            Parameter(
                name="depth", kind="integer", about="Most components of a name.", least=1, most=1000
            ),
        ),
        long=True,
    ),
    Endpoint(
        "/v1/checkpoints/{checkpoint}/tensors/{name}",
        tensor,
        (
            Parameter(
                name="box", about="START:STOP for each dimension; default: all.", example="0:8,0:64"
            ),
            Parameter(
                name="format",
                about="Form of the answer.",
                choices=("json", "npy", "raw", "safetensors"),
                default="json",
            ),
        ),
        ("application/json", "application/octet-stream", "application/x-npy"),
    ),
    Endpoint("/v1/checkpoints/{checkpoint}/layouts/{name}", layout, ()),
    Endpoint(
        "/v1/checkpoints/{checkpoint}/statistics/{name}",
        statistics,
        (
            Parameter(
                name="budget",
                kind="integer",
                about="Most bytes to read.",
                least=1,
                most=256 << 20,
                default=16 << 20,
            ),
        ),
        long=True,
    ),
    Endpoint("/v1/checkpoints/{checkpoint}/plan", plan, PLAN, long=True),
    Endpoint(
        "/v1/diff",
        diff,
        (
            Parameter(name="a", about="Id of a checkpoint.", required=True),
            Parameter(name="b", about="Id of the checkpoint to compare with.", required=True),
            Parameter(name="values", kind="boolean", about="Also compare elements.", default=True),
            Parameter(
                name="layouts",
                kind="boolean",
                about="Count other layouts as a difference.",
                default=False,
            ),
        ),
        long=True,
    ),
)
OF_CHECKPOINT = {
    endpoint.path.split("/")[4] if endpoint.path.count("/") > 3 else "": endpoint
    for endpoint in ENDPOINTS[2:7]
}
"""Endpoints about one checkpoint, by the word after its id."""


def endpoint_of(service: Service, path: str) -> tuple[Endpoint, tuple[str, ...]]:
    """The endpoint about one checkpoint that a path names, and its parameters in the path.

    The path lies below `/v1/checkpoints/`.

    Raises:
        NotFoundError: there is no such checkpoint, or no such endpoint.
    """
    ident, rest = service.opened.resolve(path)
    word, _, name = rest.partition("/")
    name = _ESCAPED_DOTS.sub(r"\1", name)
    endpoint = OF_CHECKPOINT.get(word)
    named = endpoint is not None and "{name}" in endpoint.path
    if endpoint is None or named != bool(name):
        raise NotFoundError(f"{shorten(path)}: there is no checkpoint or endpoint of that name.")
    return endpoint, (ident, name) if named else (ident,)
