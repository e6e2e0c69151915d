"""docs/lab/scale-tables.md: every figure of a run, as tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardckpt.io.buckets.cloud import BUCKET
from tools.scale import layouts
from tools.scale.growth import exponent, per_each
from tools.scale.points import DCP_LIMIT
from tools.scale.reads import TOGETHER, WITHOUT
from tools.scale.targets import curve

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

MiB, GiB = 1 << 20, 1 << 30
MADE = "<!-- Written by `make scale`: tools/scale/report.py and tools/scale/lab.py. -->"
BUCKET_READS = BUCKET["read"]
"""Requests per second that the rate limiter allows to all processes together."""
LEAST_FITTED = 3
"""More commits than these are needed to fit their time."""


def tables(figures: dict[str, Any]) -> str:
    """docs/lab/scale-tables.md."""
    return "\n".join(_lab(figures)) + "\n"


def _lab(figures: dict[str, Any]) -> Iterator[str]:
    yield f"# Scale tables\n\n{MADE}\n"
    yield (
        "The state: the first 1,000 tensors of Llama 3.1 in three sizes, parameters before "
        "optimizer states. With EP, 64 experts replace each MLP. Each host has 8 devices. An "
        "empty cell was not measured. Layouts:\n"
    )
    yield "\n".join(line for line in (layouts.__doc__ or "").splitlines() if line.startswith("|"))
    for title, rows in all_tables(figures):
        yield f"\n## {title}\n"
        yield from markdown(rows)
        note = _NOTES.get(title.partition(":")[0])
        if note:
            yield f"\n{note}"


_NOTES = {
    "A save's plan": (
        "The first host plans its first save: the boxes of its devices, the other owners, the "
        "chunks of all tensors, the chunks that it writes. No process asks another one. *Peak*: "
        "the most over all device counts, with Python and libraries. *Boxes*: boxes of which the "
        "host writes chunks, with the most devices."
    ),
    "A restore's plan": (
        "The first host plans a restore onto the same kind of layout over half as many devices, "
        "at least 8. *Boxes*: boxes that the host needs."
    ),
    "A save's plan by tensors": "The columns are numbers of tensors.",
    "A save's plan beside DCP's": (
        "One rank per device. *DCP's coordinator*: `DefaultSavePlanner.create_local_plan` of "
        "rank 0, and `create_global_plan` over the plans of all ranks. The ranks' plans were "
        "made before, from the same classes and boxes; making and sending them is not included. "
        f"`>`: stopped after {DCP_LIMIT:.0f} s; larger jobs were not tried. *Peak*: the process "
        "with torch and, for the coordinator, the plans of all ranks."
    ),
    "A restore's plan beside DCP's": (
        "*One rank of DCP*: `DefaultLoadPlanner.create_local_plan` with the metadata of the save, "
        "onto half as many ranks. It goes through all stored boxes of each tensor. A shardckpt "
        "host goes through the chunks of 8 devices. HSDP with 1,024 devices has the same groups of "
        "256 after halving, so one stored box of each tensor is read instead of two."
    ),
    "Metadata": (
        "The chunk table's header lists the data files, at least one per host, and 16 bytes per "
        "128 chunks. Every restoring host parses the commit record."
    ),
    "Commits": (
        "Wall time of one process, from the host records to the published checkpoint, on a file "
        "system in memory. *Floor*: reading all hosts' files one by one and writing the merged "
        "table. The formula is fitted to all rows."
    ),
    "Requests": (
        "A host writes data files of 64 MiB and four or five small objects, and reads four "
        "objects. The committer reads four objects of each host."
    ),
    "Requests of a restore": (
        "*Tables*: the merged table's header and blocks, or hosts' records and tables where that "
        "takes fewer requests; the commit record takes one request more. *All hosts*: data read, "
        "and seconds for all requests at the rate limit. *Together*: "
        "`restore(cooperative=True)`. The first row shows the size of the checkpoint, except for "
        "EP, whose experts make it larger. Where hosts hold unequal shares, the average of six "
        "hosts is an estimate.\n"
        "\n"
        "With HSDP each replica reads everything. With FSDP+TP and EP every device holds all "
        "vectors, and a save spreads their chunks over the files of all hosts, so each chunk "
        "takes a request ([0032](../decisions/0032-tables-of-hosts.md))."
    ),
    "A reshard's plan": "Llama 405B from 16,384 devices to 4,096, from the commit record alone "
    "(`tools/scale/reshards.py`).",
}


def all_tables(figures: dict[str, Any]) -> Iterator[tuple[str, list[list[str]]]]:
    """The title and the rows of each table; the first row is the head."""
    results = figures["results"]
    for what, title in (("save", "A save's plan"), ("restore", "A restore's plan")):
        lines = list(dict.fromkeys((r["tree"], r["kind"]) for r in results if r["what"] == what))
        columns = sorted({r["devices"] for r in results if r["what"] == what})
        rows = []
        for tree, kind in lines:
            curves = {
                key: curve(results, what, key, tree=tree, kind=kind)
                for key in ("cpu", "peak", "boxes")
            }
            shown = (
                *_columns(columns, *curves["cpu"]),
                _power(*curves["cpu"]),
                f"{max(curves['peak'][1]) / MiB:.0f}",
            )
            rows.append([f"{tree}, {kind}", *shown, f"{curves['boxes'][1][-1]:,}"])
        if rows:
            yield (
                f"{title}: seconds by devices",
                [["", *(f"{n:,}" for n in columns), "exponent", "peak MiB", "boxes"], *rows],
            )
    yield from _by_tensors(results)
    yield from _dcp(results)
    trees = dict.fromkeys(r["tree"] for r in results if r["what"] == "metadata")
    for tree in trees:
        kinds = dict.fromkeys(
            r["kind"] for r in results if (r["what"], r.get("tree")) == ("metadata", tree)
        )
        rows = []
        for kind in kinds:
            for key, name in (
                ("contents bytes", "contents"),
                ("host record bytes", "host record"),
                ("commit record bytes", "commit record"),
                ("table header bytes", "table header"),
                ("seconds to read the commit record", "seconds to read the commit record"),
            ):
                devices, values = curve(results, "metadata", key, tree=tree, kind=kind)
                shown = (
                    map(seconds_text, values)
                    if "seconds" in key
                    else (f"{value:,}" for value in values)
                )
                rows.append([f"{kind}, {name}", *shown, _power(devices, values)])
        yield (
            f"Metadata: bytes by devices, {tree}",
            [["", *(f"{n:,}" for n in devices), "exponent"], *rows],
        )
    yield from _commits(results)
    yield from _bucket(figures["bucket"])
    yield from _restores(results)
    for r in (r for r in results if r["what"] == "reshard"):
        steps = {
            "read the commit record": "seconds to read the record",
            "plan the reshard": "seconds to plan the reshard",
            "count reads, writes and chunks": "seconds to count everything",
            "draw the HTML page of the plan": "seconds to draw the page",
        }
        rows = [[step, seconds_text(r[key])] for step, key in steps.items()]
        yield "A reshard's plan", [["", "s"], *rows, ["peak memory, MiB", f"{r['peak'] / MiB:.0f}"]]


def _by_tensors(results: list[dict[str, Any]]) -> Iterator[tuple[str, list[list[str]]]]:
    saves = sorted(
        (
            r
            for r in results
            if (r["what"], r.get("kind"), r.get("devices")) == ("save", "FSDP+TP", 16384)
        ),
        key=lambda r: r["tensors"],
    )
    saves = [r for r in saves if r["tree"] == saves[-1]["tree"]] if saves else []
    if len(saves) > 1:
        power = _power([r["tensors"] for r in saves], [r["cpu"] for r in saves])
        title = f"A save's plan by tensors: {saves[0]['tree']}, FSDP+TP over 16,384 devices"
        yield (
            title,
            [
                ["", *(f"{r['tensors']:,}" for r in saves), "exponent"],
                ["s", *(seconds_text(r["cpu"]) for r in saves), power],
            ],
        )


def _dcp(results: list[dict[str, Any]]) -> Iterator[tuple[str, list[list[str]]]]:
    for what, title, who in (
        ("save", "A save's plan", "DCP's coordinator"),
        ("restore", "A restore's plan", "one rank of DCP"),
    ):
        theirs = [r for r in results if r["what"] == f"dcp {what}"]
        columns = sorted({r["devices"] for r in theirs})
        rows = []
        for tree, kind in dict.fromkeys((r["tree"], r["kind"]) for r in theirs):
            name = f"{tree}, {kind}"
            same = {r["devices"]: r for r in theirs if (r["tree"], r["kind"]) == (tree, kind)}
            alike = [
                r
                for r in results
                if (r["what"], r.get("tree"), r.get("kind"), r.get("tensors"))
                == (what, tree, kind, 1000)
            ]
            ours = {r["devices"]: r for r in alike if r["devices"] in same}
            last = max(same)
            times = (
                f"{cut_mark(same[last])}{same[last]['cpu'] / ours[last]['cpu']:,.0f}"
                if last in ours
                else ""
            )
            rows.append([f"{name}: {who}", *_beside(columns, same), times])
            if ours:
                rows.append([f"{name}: a host of shardckpt", *_beside(columns, ours), ""])
        if rows:
            head = [
                "seconds by devices",
                *(f"{n:,}" for n in columns),
                "exponent",
                "peak MiB",
                "DCP / shardckpt, largest job",
            ]
            yield f"{title} beside DCP's", [head, *rows]


def _beside(columns: Sequence[int], by_devices: dict[int, dict[str, Any]]) -> list[str]:
    """Seconds by devices, their exponent, the most memory."""
    seconds = [
        f"{cut_mark(by_devices[n])}{seconds_text(by_devices[n]['cpu'])}" if n in by_devices else ""
        for n in columns
    ]
    whole = sorted(n for n in by_devices if not by_devices[n].get("cut"))
    return [
        *seconds,
        _power(whole, [by_devices[n]["cpu"] for n in whole]),
        f"{max(r['peak'] for r in by_devices.values()) / MiB:,.0f}",
    ]


def _commits(results: list[dict[str, Any]]) -> Iterator[tuple[str, list[list[str]]]]:
    commits = commits_of(results)
    if not commits:
        return
    rows = [
        [
            f"{r['hosts']:,} × {r['chunks'] // r['hosts']:,}",
            seconds_text(r["wall"]),
            seconds_text(r["floor"]),
            f"{r['peak'] / MiB:.0f}",
        ]
        for r in commits
    ]
    title = "Commits"
    if len(commits) > LEAST_FITTED:
        once, host, chunk = fitted(commits)
        title = (
            f"Commits: {once * 1e3:.0f} ms + {host * 1e3:.2f} ms per host + {chunk * 1e6:.2f} µs "
            "per chunk"
        )
    yield title, [["hosts × chunks of each host", "s", "floor, s", "peak MiB"], *rows]


def _bucket(loads: list[dict[str, Any]]) -> Iterator[tuple[str, list[list[str]]]]:
    if loads:
        yield "Requests: all hosts save at once", save_rows(loads)


def _restores(results: list[dict[str, Any]]) -> Iterator[tuple[str, list[list[str]]]]:
    restores = [r for r in results if r["what"] == "requests"]
    rows = []
    for r in restores:
        for how in ("", TOGETHER):
            if f"data requests{how}" not in r:
                continue
            of_all = r["hosts"] * requests(r, how)
            rows.append(
                [
                    f"{r['kind']}, {r['saved by']:,}{',' if how else ''}{how}",
                    f"{r['hosts']:,}",
                    f"{r[f'data bytes{how}'] / GiB:.2f}",
                    f"{r[f'data requests{how}']:,.0f}",
                    f"{r[f'table requests{how}']:,.0f}",
                    f"{r[f'table bytes{how}'] / MiB:.1f}",
                    "" if how else f"{r[f'table requests{WITHOUT}']:,.0f}",
                    "" if how else f"{r[f'table bytes{WITHOUT}'] / MiB:.1f}",
                    f"{r['hosts'] * r[f'data bytes{how}'] / GiB:,.0f}",
                    f"{of_all / BUCKET_READS:,.0f}",
                ]
            )
    if rows:
        head = [
            "saved by: layout, hosts",
            "restored by, hosts",
            "data, GiB",
            "data requests",
            "table requests",
            "tables, MiB",
        ]
        head += [
            "table requests, merged table only",
            "tables, MiB, merged table only",
            "all hosts: data, GiB",
        ]
        head += [f"all hosts: seconds at {BUCKET_READS:,.0f} requests per second"]
        yield f"Requests of a restore: {restores[0]['tree']}, per host", [head, *rows]


def commits_of(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """All commits, by chunks per host and then by hosts."""
    return sorted(
        (r for r in results if r["what"] == "commit"),
        key=lambda r: (r["chunks"] / r["hosts"], r["hosts"]),
    )


def fitted(commits: list[dict[str, Any]]) -> tuple[float, float, float]:
    """Seconds for each commit, host and chunk."""
    once, host, chunk = per_each(
        [(r["hosts"], r["chunks"]) for r in commits], [r["wall"] for r in commits]
    )
    return once, host, chunk


def save_rows(loads: list[dict[str, Any]]) -> list[list[str]]:
    """A table of the requests of a save, by hosts."""
    rows = [["hosts", *(f"{load['hosts']:,}" for load in loads)]]
    for name, run, key in (
        ("writes", "paced", "writes"),
        ("reads", "paced", "reads"),
        ("most writes in one second", "paced", "most_writes"),
        ("most writes in a second, without the rate limit", "unpaced", "most_writes"),
        ("most reads in one second", "paced", "most_reads"),
        ("most reads in a second, without the rate limit", "unpaced", "most_reads"),
        ("shortest possible save, s", "paced", "seconds"),
    ):
        rows.append([name, *(f"{load[run][key]:,.0f}" for load in loads)])
    return rows


def requests(restored: dict[str, Any], how: str) -> float:
    """All requests of one host; the commit record takes one."""
    return float(1 + restored[f"table requests{how}"] + restored[f"data requests{how}"])


def _columns(columns: Sequence[float], x: Sequence[float], y: Sequence[float]) -> list[str]:
    """Seconds by column; empty where nothing was measured."""
    known = dict(zip(x, y, strict=True))
    return [seconds_text(known[n]) if n in known else "" for n in columns]


def _power(x: Sequence[float], y: Sequence[float]) -> str:
    power = exponent(x, y)
    return "" if power is None else f"{power:.2f}".replace("-0.00", "0.00").replace("-", "−")


def cut_mark(result: dict[str, Any]) -> str:
    """Before what was cut off."""
    return "> " if result.get("cut") else ""


def markdown(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """The lines of a table in Markdown."""
    yield "| " + " | ".join(rows[0]) + " |"
    yield "|" + "---|" * len(rows[0])
    yield from ("| " + " | ".join(row) + " |" for row in rows[1:])


def seconds_text(value: float) -> str:
    """Seconds with three decimals, or one from 10 on."""
    return f"{value:.3f}" if value < 10 else f"{value:.1f}"
