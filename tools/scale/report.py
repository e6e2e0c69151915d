"""The page of a run, docs/scale.md, and what a terminal shows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardckpt.io.buckets.cloud import BUCKET
from tools.scale import layouts
from tools.scale.growth import exponent, per_each
from tools.scale.points import DCP_LIMIT
from tools.scale.reads import TOGETHER, WITHOUT
from tools.scale.targets import TARGETS, curve

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["page", "summary"]

MiB, GiB = 1 << 20, 1 << 30
BUCKET_READS = BUCKET["read"]
"""Per second, of all processes together: what the pace allows."""


def summary(found: dict[str, Any]) -> str:
    """For a terminal."""
    lines = []
    for title, rows in _tables(found):
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines += ["", title]
        lines += [
            "  " + "  ".join(cell.rjust(n) if i else cell.ljust(n) for i, (cell, n) in enumerate(zip(row, widths, strict=True)))
            for row in rows
        ]
    lines.append("")
    lines += [f"  {'met ' if met else 'NOT '} {what}: {value}" for what, value, met in _targets(found)]
    return "\n".join(lines)


def page(found: dict[str, Any]) -> str:
    """docs/scale.md."""
    return "\n".join(_page(found)) + "\n"


def _page(found: dict[str, Any]) -> Iterator[str]:
    versions = ", ".join(f"{name} {number}" for name, number in found["versions"].items())
    yield "# Scale\n"
    yield (
        "<!-- Written by `make scale`: tools/scale/report.py. -->\n\n"
        "What very large jobs cost one host, simulated on one machine with the product's own planner and record code: nothing here ran on "
        "that many devices.\n"
        f"Measured with `python -m tools.scale`, {_runs(found)}: {found['cores']} cores, {found['system']}, Python "
        f"{found['python']}, {versions}. Each point is a process of its own with cold caches, and was measured once; seconds are of "
        "processor time where nothing else is said. The modules of `tools/scale` say what exactly was simulated, and `docs/scale.json` has "
        "all figures."
    )
    yield "\n![Growth curves](scale.svg)\n"
    yield (
        "The figure behind a name is the exponent of the power law that fits: 0 is flat, 1 is linear. It is a summary: a line that is flat "
        "and then rises, as that of the commit record, has no power of its own.\n"
    )
    yield "## Jobs\n"
    yield (
        "The state is that of Llama 3.1 in three sizes: the first 1,000 of its tensors, parameters before the optimizer's, where nothing "
        "else is said. With EP each layer has 64 experts in place of an MLP. Each host has 8 devices. Layouts:\n"
    )
    yield "\n".join(line for line in (layouts.__doc__ or "").splitlines() if line.startswith("|")) + "\n"
    yield "## Targets\n"
    yield from _markdown(
        [["target", "measured", "met"], *([what, value, "yes" if met else "**no**"] for what, value, met in _targets(found))]
    )
    for title, rows in _tables(found):
        yield f"\n## {title}\n"
        yield from _markdown(rows)
        note = _NOTES.get(title.partition(":")[0])
        if note:
            yield f"\n{note}"


_NOTES = {
    "A save's plan": (
        "The first of the job's hosts plans its first save: which boxes its devices hold, who else has them, how every tensor is chunked, "
        "which chunks this host writes. No other process is asked, and none waits for it. *Peak*: of all sizes the most, Python and "
        "libraries included. *Boxes*: those of which it writes chunks, at the most devices; of what others hold, too, it writes a part, "
        "which with HSDP over many devices is few boxes' chunks. What was not measured is left open."
    ),
    "A restore's plan": (
        "Of the first host, onto the same kind of layout over half as many devices, 8 at least: boxes, and which chunks they overlap, "
        "where. *Peak* and *boxes*: as above, those that it needs. Where few devices hold all of it, a host has hundreds "
        "of thousands of chunks."
    ),
    "A save's plan by tensors": "The same plan of as many of the state's tensors.",
    "A save's plan beside DCP's": (
        "The same layouts, one rank per device. *DCP's coordinator*: `DefaultSavePlanner.create_local_plan` of rank 0 and "
        "`create_global_plan` over the plans of all ranks, which every rank of the job waits for. Those plans were built beforehand in the "
        "same process, of the classes and boxes of which ranks build them; building, pickling and sending them is not in the figures, nor "
        "are DCP's collectives. Who reads the comparison should know that its figure is for one process that plans for all, and ours for "
        f"one host that plans for itself. What took longer than {DCP_LIMIT:.0f} s was cut off, and is told with >; larger jobs of that "
        "layout were not tried. Memory is that of the whole process, with torch and, for the coordinator, all ranks' plans."
    ),
    "A restore's plan beside DCP's": (
        "*One rank of DCP*: `DefaultLoadPlanner.create_local_plan`, with the metadata of such a save, onto half as many ranks; as in ours, "
        "every process plans for itself. It goes through all stored boxes of each tensor; ours goes through the chunks of eight "
        "devices' boxes, which are more where few devices hold all of it: on 8 devices it takes longer with the "
        "larger models. HSDP's groups of 256 are the same over half of 1,024 devices: then one stored box of each tensor is read, and of "
        "the others two."
    ),
    "Metadata": (
        "What a host says of the checkpoint is one file, which hosts that say the same share. The commit record is that, and a line per "
        "host. The chunk table's header names the data files, at least one per host, and has 16 bytes per 128 chunks: it grows "
        "with the data. "
        "The commit record is parsed by every restoring host."
    ),
    "Commits": (
        "One process, from all hosts' records to the published checkpoint, on a file system in memory; wall time. *Floor*: reading all "
        "hosts' files one by one, and writing the one table. The constants come from a fit of all rows by hosts and chunks."
    ),
    "Requests": (
        "Of a save: an ordinary host's requests, counted on a real save by three processes through a proxy "
        "(`tools/scale/counted.py`), made "
        "by all hosts within 0.1 s of each other with 4 GiB each, by a simulated clock and with the rate limit of "
        "`shardckpt.io.buckets.rate_limit` (`tools/scale/bucket.py`). Besides its data files of 64 MiB a host writes four or five small "
        "objects and reads four; of each host the committer reads four. A new bucket of Cloud Storage bears 1,000 writes and 5,000 reads "
        "per second."
    ),
    "Requests of a restore": (
        "What hosts read that restore from an object store, the average of up to six spread over the job: the rows of chunk tables as the "
        "product's own reader asks for them, from the tables that all hosts of such a save leave, and data as it joins neighbours, up to "
        "10 MiB (`tools/scale/reads.py`). *Saved by*: layout and hosts, of 8 devices each; *onto*: as many hosts. *Tables*: the header of "
        "the table of all, units of it, and hosts' records and own tables, where these cost less; *without hosts'*: if hosts' own "
        "tables were never read. The commit record is one more. *All hosts*: what they read of data, and the seconds over which the pace "
        f"of {BUCKET_READS:,.0f} requests per second spreads all their requests. *Together*: with `restore(cooperative=True)`, where hosts "
        "that need the same read a part each, up to 64 of them, and send it to the others (docs/meshes.md). "
        "The first row tells how large the checkpoint is, of all layouts but EP, whose experts make it larger; where hosts hold unequal "
        "shares, what six of them read tells of all only about how much it is.\n\n"
        "HSDP's replicas read everything once each, which is what takes its many requests; together they do not. With FSDP+TP and EP it is "
        "the vectors, which all devices hold: a save deals their chunks out to all hosts, so each lies in another host's file, and "
        "who needs all of them asks for them, and for their rows of the table, one by one "
        "([0032](decisions/0032-tables-of-hosts.md))."
    ),
    "A reshard's plan": "Llama 405B from 16,384 devices to 4,096, from the record alone (`tools/scale/reshards.py`; docs/planning.md).",
}


def _runs(found: dict[str, Any]) -> str:
    """When, and what in which run if it was not all in one."""
    runs: dict[str, list[str]] = {}
    for r in (*found["results"], *({"what": "bucket"} | load for load in found["bucket"])):
        runs.setdefault(r.get("run", found["date"]), []).append(r["what"])
    if len(runs) == 1:
        return f"all in one run, on {next(iter(runs))}"
    told = (f"on {run} {', '.join(dict.fromkeys(whats))}" for run, whats in sorted(runs.items()))
    return f"in {len(runs)} runs ({'; '.join(told)})"


def _tables(found: dict[str, Any]) -> Iterator[tuple[str, list[list[str]]]]:
    results = found["results"]
    for what, title in (("save", "A save's plan"), ("restore", "A restore's plan")):
        lines = list(dict.fromkeys((r["tree"], r["kind"]) for r in results if r["what"] == what))
        columns = sorted({r["devices"] for r in results if r["what"] == what})
        rows = []
        for tree, kind in lines:
            curves = {key: curve(results, what, key, tree=tree, kind=kind) for key in ("cpu", "peak", "boxes")}
            shown = (*_columns(columns, *curves["cpu"]), _power(*curves["cpu"]), f"{max(curves['peak'][1]) / MiB:.0f}")
            rows.append([f"{tree}, {kind}", *shown, f"{curves['boxes'][1][-1]:,}"])
        if rows:
            yield f"{title}: seconds by devices", [["", *(f"{n:,}" for n in columns), "exponent", "peak MiB", "boxes"], *rows]
    yield from _by_tensors(results)
    yield from _dcp(results)
    trees = dict.fromkeys(r["tree"] for r in results if r["what"] == "metadata")
    for tree in trees:
        kinds = dict.fromkeys(r["kind"] for r in results if (r["what"], r.get("tree")) == ("metadata", tree))
        rows = []
        for kind in kinds:
            for key, name in (
                ("contents bytes", "what a host says"),
                ("host record bytes", "a host's record"),
                ("commit record bytes", "commit record"),
                ("table header bytes", "table's header"),
                ("seconds to read the commit record", "seconds to read the commit record"),
            ):
                devices, values = curve(results, "metadata", key, tree=tree, kind=kind)
                shown = map(_seconds, values) if "seconds" in key else (f"{value:,}" for value in values)
                rows.append([f"{kind}, {name}", *shown, _power(devices, values)])
        yield f"Metadata: bytes by devices, {tree}", [["", *(f"{n:,}" for n in devices), "exponent"], *rows]
    yield from _commits(results)
    yield from _bucket(found["bucket"])
    yield from _restores(results)
    for r in (r for r in results if r["what"] == "reshard"):
        keys = ("seconds to read the record", "seconds to plan the reshard", "seconds to count everything", "seconds to draw the page")
        rows = [[key, _seconds(r[key])] for key in keys]
        yield "A reshard's plan", [["", "s"], *rows, ["peak MiB in all", f"{r['peak'] / MiB:.0f}"]]


def _by_tensors(results: list[dict[str, Any]]) -> Iterator[tuple[str, list[list[str]]]]:
    some = sorted(
        (r for r in results if (r["what"], r.get("kind"), r.get("devices")) == ("save", "FSDP+TP", 16384)), key=lambda r: r["tensors"]
    )
    some = [r for r in some if r["tree"] == some[-1]["tree"]] if some else []
    if len(some) > 1:
        power = _power([r["tensors"] for r in some], [r["cpu"] for r in some])
        title = f"A save's plan by tensors: {some[0]['tree']}, FSDP+TP over 16,384 devices"
        yield title, [["", *(f"{r['tensors']:,}" for r in some), "exponent"], ["s", *(_seconds(r["cpu"]) for r in some), power]]


def _dcp(results: list[dict[str, Any]]) -> Iterator[tuple[str, list[list[str]]]]:
    for what, title, who in (("save", "A save's plan", "DCP's coordinator"), ("restore", "A restore's plan", "one rank of DCP")):
        theirs = [r for r in results if r["what"] == f"dcp {what}"]
        columns = sorted({r["devices"] for r in theirs})
        rows = []
        for tree, kind in dict.fromkeys((r["tree"], r["kind"]) for r in theirs):
            name = f"{tree}, {kind}"
            same = {r["devices"]: r for r in theirs if (r["tree"], r["kind"]) == (tree, kind)}
            some = [r for r in results if (r["what"], r.get("tree"), r.get("kind"), r.get("tensors")) == (what, tree, kind, 1000)]
            ours = {r["devices"]: r for r in some if r["devices"] in same}
            last = max(same)
            times = f"{_cut(same[last])}{same[last]['cpu'] / ours[last]['cpu']:,.0f}" if last in ours else ""
            rows.append([f"{name}: {who}", *_beside(columns, same), times])
            if ours:
                rows.append([f"{name}: a host of ours", *_beside(columns, ours), ""])
        if rows:
            head = ["seconds by devices", *(f"{n:,}" for n in columns), "exponent", "peak MiB", "DCP / ours, at the most devices"]
            yield f"{title} beside DCP's", [head, *rows]


def _beside(columns: Sequence[int], found: dict[int, dict[str, Any]]) -> list[str]:
    """Seconds by devices, their exponent, the most memory."""
    seconds = [f"{_cut(found[n])}{_seconds(found[n]['cpu'])}" if n in found else "" for n in columns]
    whole = sorted(n for n in found if not found[n].get("cut"))
    return [*seconds, _power(whole, [found[n]["cpu"] for n in whole]), f"{max(r['peak'] for r in found.values()) / MiB:,.0f}"]


def _cut(result: dict[str, Any]) -> str:
    """Before what was cut off."""
    return "> " if result.get("cut") else ""


def _commits(results: list[dict[str, Any]]) -> Iterator[tuple[str, list[list[str]]]]:
    commits = sorted((r for r in results if r["what"] == "commit"), key=lambda r: (r["chunks"] / r["hosts"], r["hosts"]))
    if not commits:
        return
    rows = [
        [f"{r['hosts']:,} × {r['chunks'] // r['hosts']:,}", _seconds(r["wall"]), _seconds(r["floor"]), f"{r['peak'] / MiB:.0f}"]
        for r in commits
    ]
    title = "Commits"
    if len(commits) > 3:
        once, host, chunk = per_each([(r["hosts"], r["chunks"]) for r in commits], [r["wall"] for r in commits])
        title = f"Commits: {once * 1e3:.0f} ms, {host * 1e3:.2f} ms per host, {chunk * 1e6:.2f} µs per chunk"
    yield title, [["hosts × chunks of each", "s", "floor, s", "peak MiB"], *rows]


def _bucket(loads: list[dict[str, Any]]) -> Iterator[tuple[str, list[list[str]]]]:
    if not loads:
        return
    rows = [["", *(f"{load['hosts']:,}" for load in loads)]]
    for name, run, key in (
        ("writes", "paced", "writes"),
        ("reads", "paced", "reads"),
        ("most writes in a second", "paced", "most_writes"),
        ("the same without a pace", "unpaced", "most_writes"),
        ("most reads in a second", "paced", "most_reads"),
        ("the same without a pace", "unpaced", "most_reads"),
        ("seconds at least", "paced", "seconds"),
    ):
        rows.append([name, *(f"{load[run][key]:,.0f}" for load in loads)])
    yield "Requests: when all hosts save at once, by hosts", rows


def _restores(results: list[dict[str, Any]]) -> Iterator[tuple[str, list[list[str]]]]:
    some = [r for r in results if r["what"] == "requests"]
    rows = []
    for r in some:
        for how in ("", TOGETHER):
            if f"data requests{how}" not in r:
                continue
            requests = r["hosts"] * (1 + r[f"table requests{how}"] + r[f"data requests{how}"])
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
                    f"{requests / BUCKET_READS:,.0f}",
                ]
            )
    if rows:
        head = ["saved by", "onto", "data, GiB", "requests for data", "for tables", "tables, MiB"]
        head += ["for tables, without hosts'", "without hosts', MiB", "all hosts: data, GiB", f"s at {BUCKET_READS:,.0f} per second"]
        yield f"Requests of a restore: {some[0]['tree']}, per host", [head, *rows]


def _targets(found: dict[str, Any]) -> Iterator[tuple[str, str, bool]]:
    for target in TARGETS:
        value = target.found(found["results"])
        if value is not None:
            yield f"{target.what} ≤ {target.most:g} {target.unit}".rstrip(), f"{value:.3g} {target.unit}".rstrip(), value <= target.most


def _markdown(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield "| " + " | ".join(rows[0]) + " |"
    yield "|" + "---|" * len(rows[0])
    yield from ("| " + " | ".join(row) + " |" for row in rows[1:])


def _columns(columns: Sequence[float], x: Sequence[float], y: Sequence[float]) -> list[str]:
    """Seconds in the columns of their own; what was not measured is left open."""
    known = dict(zip(x, y, strict=True))
    return [_seconds(known[n]) if n in known else "" for n in columns]


def _seconds(value: float) -> str:
    return f"{value:.3f}" if value < 10 else f"{value:.1f}"


def _power(x: Sequence[float], y: Sequence[float]) -> str:
    power = exponent(x, y)
    return "" if power is None else f"{power:.2f}".replace("-0.00", "0.00").replace("-", "−")
