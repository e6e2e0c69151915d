"""docs/scale.md, the page of a run for users, and the summary for a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardckpt.io.buckets.cloud import BUCKET
from shardckpt.plan.shares import MOST_READERS
from tools.scale.lab import (
    BUCKET_READS,
    LEAST_FITTED,
    MADE,
    all_tables,
    commits_of,
    cut_mark,
    fitted,
    markdown,
    requests,
    save_rows,
    seconds_text,
)
from tools.scale.points import DCP_LIMIT
from tools.scale.reads import TOGETHER
from tools.scale.targets import TARGETS, curve

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["page", "summary"]

MiB = 1 << 20
TABLES = "https://github.com/shardckpt/shardckpt/blob/main/docs/lab/scale-tables.md"


def summary(figures: dict[str, Any]) -> str:
    """For a terminal."""
    lines = []
    for title, rows in all_tables(figures):
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines += ["", title]
        lines += [
            "  "
            + "  ".join(
                cell.rjust(n) if i else cell.ljust(n)
                for i, (cell, n) in enumerate(zip(row, widths, strict=True))
            )
            for row in rows
        ]
    lines.append("")
    lines += [
        f"  {'met ' if met else 'NOT '} {what}: {value}" for what, value, met in _targets(figures)
    ]
    return "\n".join(lines)


def page(figures: dict[str, Any]) -> str:
    """docs/scale.md."""
    parts = (
        _beginning,
        _costs,
        _commit_times,
        _save_requests,
        _restore_requests,
        _beside_dcp,
        _bounds,
        _how,
    )
    return "\n".join(line for part in parts for line in part(figures)) + "\n"


def _beginning(figures: dict[str, Any]) -> Iterator[str]:
    del figures
    yield f"# Scale\n\n{MADE}\n"
    yield (
        "After this page you know what a job of up to 100,000 devices costs each host, and when "
        "to use `restore(cooperative=True)`.\n"
    )
    yield "```sh\nmake scale-quick   # in a clone: three minutes; `make scale` takes ten\n```\n"
    yield (
        "All figures are simulated on one machine with shardckpt's own planner and formats. "
        "Nothing ran on so many devices. Each host has 8 devices.\n"
    )
    yield "| question | answer |\n|---|---|"
    yield (
        "| Does planning grow with the job? | No. Every host plans only its own parts of the "
        "tensors. |"
    )
    yield (
        "| What grows with the job? | The time of a commit grows with the number of hosts and "
        "the number of chunks. The commit record and the header of the chunk table grow with the "
        "number of hosts. |"
    )
    yield (
        "| Do many hosts overload a bucket? | No. shardckpt limits the rate of requests. A save "
        "of many hosts then takes longer. |"
    )
    yield (
        "| When does `cooperative=True` help? | If many hosts restore the same shards: HSDP, EP, "
        "FSDP with tensor parallelism. |"
    )
    yield "\n![Growth with devices and hosts](scale.svg)\n"
    yield (
        "In the legends of the picture, a number after the name of a line says how the line grows. "
        "It is the exponent of the power law that fits the line: 0 is constant, 1 is linear."
    )


def _costs(figures: dict[str, Any]) -> Iterator[str]:
    results, (tree, kind) = figures["results"], _largest(figures)
    devices, _ = curve(results, "save", "cpu", tree=tree, kind=kind)
    yield "\n## Costs of one host\n"
    yield f"Llama 3.1 {tree}, the first 1,000 tensors of model and optimizer, {kind}:\n"
    rows = [["devices", *(f"{n:,}" for n in devices)]]
    for name, what, key, shown in (
        ("plan of the first save, s", "save", "cpu", seconds_text),
        ("plan of a restore, s", "restore", "cpu", seconds_text),
        ("peak memory of a save's plan, MiB", "save", "peak", _mebibytes),
        ("host record, bytes", "metadata", "host record bytes", _count),
        ("contents, bytes", "metadata", "contents bytes", _count),
        ("commit record, bytes", "metadata", "commit record bytes", _count),
        ("header of the chunk table, bytes", "metadata", "table header bytes", _count),
        (
            "reading the commit record, s",
            "metadata",
            "seconds to read the commit record",
            seconds_text,
        ),
    ):
        known = dict(zip(*curve(results, what, key, tree=tree, kind=kind), strict=True))
        rows.append([name, *(shown(known[n]) if n in known else "" for n in devices)])
    yield from markdown(rows)
    yield (
        "\n"
        "Hosts with equal [contents](format.md#contents) share one file. Every restoring host "
        "reads the commit record."
    )


def _commit_times(figures: dict[str, Any]) -> Iterator[str]:
    commits = commits_of(figures["results"])
    if len(commits) > LEAST_FITTED:
        once, host, chunk = fitted(commits)
        most = max(commits, key=lambda r: r["hosts"])
        yield "\n## Commits\n"
        yield (
            f"A commit takes about {once * 1e3:.0f} ms, plus {host * 1e3:.2f} ms per host, plus "
            f"{chunk * 1e6:.2f} µs per chunk, on a file system in memory. With {most['hosts']:,} "
            f"hosts, each with {most['chunks'] // most['hosts']:,} chunks, it took "
            f"{seconds_text(most['wall'])} s and {_mebibytes(most['peak'])} MiB."
        )


def _save_requests(figures: dict[str, Any]) -> Iterator[str]:
    if not figures["bucket"]:
        return
    yield "\n## Requests of a save to a bucket\n"
    yield "All hosts begin within 0.1 s, and each writes 4 GiB:\n"
    yield from markdown(save_rows(figures["bucket"]))
    yield (
        "\n"
        f"shardckpt limits each job to about {BUCKET['write']:,.0f} writes and "
        f"{BUCKET_READS:,.0f} reads per second. A single second may have some more. A new bucket "
        "of Cloud Storage accepts 1,000 writes and 5,000 reads per second. The last row counts "
        "only requests and the network; a real save takes longer."
    )


def _restore_requests(figures: dict[str, Any]) -> Iterator[str]:
    restored = [
        r for r in figures["results"] if r["what"] == "requests" and r.get("onto_devices") is None
    ]
    most = max((r["devices"] for r in restored), default=0)
    restored = [r for r in restored if r["devices"] == most]
    if not restored:
        return
    yield "\n## Requests of a restore from a bucket\n"
    yield (
        f"Llama 3.1 {restored[0]['tree']} restored onto the layout in which it was saved, "
        f"{restored[0]['hosts']:,} hosts:\n"
    )
    rows = [
        [
            "layout",
            "requests per host",
            "with `cooperative=True`",
            "all hosts, s",
            "with `cooperative=True`, s",
        ]
    ]
    for r in restored:
        shown = [requests(r, how) if f"data requests{how}" in r else None for how in ("", TOGETHER)]
        seconds = [None if n is None else n * r["hosts"] / BUCKET_READS for n in shown]
        rows.append([r["kind"], *("" if n is None else f"{n:,.0f}" for n in (*shown, *seconds))])
    yield from markdown(rows)
    yield (
        "\n"
        f"The seconds are what a bucket needs for all hosts, at {BUCKET_READS:,.0f} requests per "
        "second. With `cooperative=True`, hosts that need the same chunks form groups of up to "
        f"{MOST_READERS}. Each host reads a part, and sends it to the others of its group. Plain "
        f"FSDP has no equal shards, so the option changes nothing there. [The tables]({TABLES}) "
        "describe the layouts."
    )


def _beside_dcp(figures: dict[str, Any]) -> Iterator[str]:
    results, (tree, _) = figures["results"], _largest(figures)
    theirs = [r for r in results if r["what"].startswith("dcp ") and r["tree"] == tree]
    columns = sorted({r["devices"] for r in theirs})
    if not theirs:
        return
    yield "\n## Beside DCP\n"
    yield "Seconds of processor time for one plan, DCP / shardckpt:\n"
    rows, faster = [["step, by number of devices", *(f"{n:,}" for n in columns)]], []
    for what, kind in dict.fromkeys((r["what"].removeprefix("dcp "), r["kind"]) for r in theirs):
        ours = dict(zip(*curve(results, what, "cpu", tree=tree, kind=kind), strict=True))
        same = {r["devices"]: r for r in theirs if (r["what"], r["kind"]) == (f"dcp {what}", kind)}
        known = [(n, same[n], ours[n]) for n in columns if n in same and n in ours]
        rows.append(
            [
                f"{what}, {kind}",
                *(
                    f"{cut_mark(r)}{seconds_text(r['cpu'])} / {seconds_text(own)}"
                    for _, r, own in known
                ),
            ]
        )
        rows[-1] += [""] * (len(columns) + 1 - len(rows[-1]))
        if where := [f"{n:,}" for n, r, own in known if r["cpu"] < own]:
            faster.append(f"{what}, {kind}: {', '.join(where)} devices")
    yield from markdown(rows)
    yield ""
    if faster:
        yield f"- DCP plans faster in these cases. {'; '.join(faster)}."
    yield (
        "- A save: DCP's coordinator plans for all ranks, and every rank waits for it. A "
        "shardckpt host plans for itself.\n"
        "- A restore: in both, every process plans for itself. In a job of few devices, each "
        "host restores larger parts of the tensors. shardckpt stores these as more chunks, so "
        "the plan takes longer.\n"
        f"- `>`: stopped after {DCP_LIMIT:.0f} s. DCP's messages between ranks are not included."
    )


def _bounds(figures: dict[str, Any]) -> Iterator[str]:
    yield "\n## Targets\n"
    yield (
        "A measured value is the worst one of all models and layouts, so it can be worse than in "
        "the tables above.\n"
    )
    yield from markdown(
        [
            ["target", "measured", "met"],
            *([what, value, "yes" if met else "**no**"] for what, value, met in _targets(figures)),
        ]
    )


def _how(figures: dict[str, Any]) -> Iterator[str]:
    versions = ", ".join(f"{name} {number}" for name, number in figures["versions"].items())
    yield "\n## How it was measured\n"
    yield (
        f"- `python -m tools.scale`, {_runs(figures)}: {figures['cores']} cores, "
        f"{figures['system']}, Python {figures['python']}, {versions}.\n"
        "- Each figure is one measurement in a new process with cold caches. Seconds are "
        "processor time, except for commits.\n"
        "- Requests of a save: a real save by three processes shows which requests a host makes, "
        "and which ones the committer makes for each host (`tools/scale/counted.py`). A "
        "simulation repeats these requests for every host, with shardckpt's rate limiter and a "
        "simulated clock (`tools/scale/bucket.py`).\n"
        "- Requests of a restore are counted with shardckpt's own reader of chunk tables "
        "(`tools/scale/reads.py`), as the average of up to six hosts.\n"
        f"- [All tables]({TABLES}) are in the repository."
    )


def _largest(figures: dict[str, Any]) -> tuple[str, str]:
    """The model with the most parameters, and the first layout."""
    saves = [r for r in figures["results"] if r["what"] == "save"]
    return max((r["tree"] for r in saves), key=lambda name: float(name.removesuffix("B"))), saves[
        0
    ]["kind"]


def _runs(figures: dict[str, Any]) -> str:
    """The date of the run; of several, each with what it measured."""
    runs: dict[str, list[str]] = {}
    for r in (*figures["results"], *({"what": "bucket"} | load for load in figures["bucket"])):
        runs.setdefault(r.get("run", figures["date"]), []).append(r["what"])
    if len(runs) == 1:
        return f"one run on {next(iter(runs))}"
    parts = (f"{run}: {', '.join(dict.fromkeys(whats))}" for run, whats in sorted(runs.items()))
    return f"{len(runs)} runs ({'; '.join(parts)})"


def _targets(figures: dict[str, Any]) -> Iterator[tuple[str, str, bool]]:
    for target in TARGETS:
        value = target.worst(figures["results"])
        if value is not None:
            bound, shown = (
                f"{number} {target.unit}".rstrip()
                for number in (f"{target.most:g}", f"{value:.3g}".replace("-", "−"))
            )
            yield f"{target.what} ≤ {bound}", shown, value <= target.most


def _mebibytes(value: float) -> str:
    return f"{value / MiB:.0f}"


def _count(value: float) -> str:
    return f"{value:,}"
