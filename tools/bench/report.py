"""The pages of a run: docs/performance.md and docs/lab/performance-tables.md.

The first page is for users, and the second one has every figure.
"""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Any

from tools.bench.bucket import DELAYS
from tools.bench.measure import LEAST_ROUNDS, OPERATIONS
from tools.bench.plan import PLAN, STORAGES
from tools.bench.ratios import is_ours, ratios, where
from tools.bench.states import STATES
from tools.bench.targets import held

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["page", "summary", "tables"]

READS = ("restore", "other", "columns", "verify", "export")
MADE = "<!-- Written by `make bench`: tools/bench/report.py. -->"
TABLES = "https://github.com/shardckpt/shardckpt/blob/main/docs/lab/performance-tables.md"
WHY_FASTER = """
Reasons:

- safetensors and torch.save write one file without checksums and without a commit protocol. They do
  not wait until it is durable.
- The peers do not compare checksums when they read. shardckpt compares the checksum of every chunk.
- In the export, DCP copies complete tensors from one file, and does not read the result back.
  shardckpt reads chunks, compares their checksums, and reads the result back.
"""
FLOORS = """
A *floor* is a small program that only moves the bytes of the state, without names, checksums or a
commit. It shows what the machine can do.

| floor | operation |
|---|---|
| write(2) | write to files, with as many threads and processes as shardckpt |
| readv(2) | read from files, likewise |
| memcpy | copy in memory, likewise |
| HTTP puts | write to a bucket, with 4 requests at a time |
| HTTP gets | read from a bucket, with 4, 16 or 32 requests at a time; the fastest counts |
| host shards to devices | copy shards that are already in host memory to devices |
"""
BUCKET = """
## The bucket

- fake-gcs-server emulates Cloud Storage in memory on the same machine, and accepts a few hundred
  MB/s from any client.
- HTTP puts send objects of at most 64 MiB. HTTP gets read ranges of 4 MiB.
- "20 ms away" is a proxy that delays every request by 20 ms and does not limit bandwidth. TLS uses
  a certificate made for the test.
"""
COLUMNS = """
- Seconds: median (min – max) of the rounds.
- Ratio: shardckpt's rate divided by the program's (min – max over rounds).
- CPU s/GB: user and system time of the program's own process.
- Peak: growth of resident memory.
- Read: bytes read from files, per byte needed. Reads through mapped memory are not counted.
- Floors are in italics.
"""


def summary(figures: dict[str, Any]) -> str:
    """For a terminal."""
    known, lines = ratios(figures), []
    for title, results in _tables(figures):
        lines.append(f"\n{title}")
        for r in results:
            ratio = known.get((*where(r), r["subject"]))
            beside = f"{ratio.value:8.2f}" if ratio is not None else ""
            rate = f"{_rate(r):>6} {_unit(r)}  {_cpu(r):>5} CPU s/GB"
            lines.append(
                f"  {r['operation']:8} {r['subject']:35} {_seconds(r['median']):>8} s  {rate} "
                f"{beside}"
            )
    lines += [
        "",
        *(
            f"  {'met ' if h.met else 'NOT '} {h.target.what}: {h.bound}: {h.shown}"
            for h in held(figures)
        ),
    ]
    lines += [f"  FAILED {', '.join(_task(f))}: {_last_line(f)}" for f in figures["failed"]]
    return "\n".join(lines)


def page(figures: dict[str, Any]) -> str:
    """docs/performance.md."""
    parts = (_beginning, _gains, _faster, _how, _terms, _targets, _failures)
    return f"# Performance\n\n{MADE}\n\n" + "\n".join(
        line for part in parts for line in part(figures)
    )


def tables(figures: dict[str, Any]) -> str:
    """docs/lab/performance-tables.md."""
    parts = (_each_faster, _sizes, _settings, _figures)
    return f"# Performance tables\n\n{MADE}\n\n" + "\n".join(
        line for part in parts for line in part(figures)
    )


def _beginning(figures: dict[str, Any]) -> Iterator[str]:
    versions = figures["versions"]
    yield (
        "After this page you know where shardckpt is faster than its peers, where it is slower, "
        "and how to measure it yourself.\n"
    )
    yield (
        f"shardckpt {versions['shardckpt']} is compared here with torch.distributed.checkpoint "
        f"(DCP) of torch {versions['torch']}, Orbax {versions['orbax-checkpoint']} and "
        f"safetensors {versions['safetensors']}, on {figures['cores']} CPU cores of one machine.\n"
    )
    yield "![GB/s of saves, stalls and restores, on tmpfs and in a bucket](performance.svg)\n"


def _gains(figures: dict[str, Any]) -> Iterator[str]:
    yield "## What you gain\n"
    yield (
        "The time of DCP or Orbax, with their default options, divided by that of shardckpt: "
        "least and most of all states.\n"
    )
    rows: dict[tuple[str, str, str], list[float]] = {}
    for (_, _, group, operation, other), ratio in ratios(
        figures | {"results": _ordered(figures)}
    ).items():
        if other in ("DCP", "Orbax"):
            rows.setdefault((operation, _framework(group), other), []).append(ratio.value)
    yield "| operation | framework | than | times as fast |\n|---|---|---|--:|"
    for (operation, framework, other), values in sorted(
        rows.items(), key=lambda row: list(OPERATIONS).index(row[0][0])
    ):
        least, most = (f"{pick(values):.1f}" for pick in (min, max))
        yield (
            f"| {OPERATIONS[operation].title} | {framework} | {other} | "
            f"{least if least == most else f'{least} – {most}'} |"
        )
    yield ""


def _faster(figures: dict[str, Any]) -> Iterator[str]:
    yield "## Where peers are faster\n"
    yield "States are described below.\n"
    rows: dict[tuple[str, str, str], list[tuple[float, str]]] = {}
    for (storage, state, group, operation, other), ratio in _lost(figures):
        place = f"`{state}`" if storage == "tmpfs" else f"`{state}` {STORAGES[storage]}"
        rows.setdefault((OPERATIONS[operation].title, _framework(group), other), []).append(
            (ratio, place)
        )
    if not rows:
        yield "No peer was faster at anything in this run.\n"
        return
    yield "| operation | framework | faster peer | ratio | states |\n|---|---|---|--:|---|"
    for (operation, framework, other), cases in rows.items():
        least, most = (f"{pick(ratio for ratio, _ in cases):.2f}" for pick in (min, max))
        yield (
            f"| {operation} | {framework} | {other} | "
            f"{least if least == most else f'{least} – {most}'} | "
            f"{', '.join(dict.fromkeys(place for _, place in cases))} |"
        )
    yield WHY_FASTER
    yield (
        "These are the states. Unless a row names a disk or a bucket, they are saved to tmpfs, a "
        "file system in memory.\n"
    )
    yield "| state | tensors | size |\n|---|---|--:|"
    for state in STATES.values():
        yield f"| `{state.name}` | {state.what} | {_gigabytes(state.nbytes)} |"
    yield ""


def _terms(_measured: dict[str, Any]) -> Iterator[str]:
    yield "## Terms\n"
    yield (
        "- *Ratio*: shardckpt's rate divided by the other program's rate. Above 1, shardckpt is "
        "faster.\n"
        "- *Rate*: the bytes of the state divided by the time of the operation.\n"
        "- *Stall*: the time until `save_async` returns.\n"
        "- *DCP* and *Orbax* run with their default options; *at its best* means their fastest "
        "documented options on this machine. shardckpt runs with its defaults, and with a larger "
        "`memory_limit` where the state needs it."
    )
    yield FLOORS


def _targets(figures: dict[str, Any]) -> Iterator[str]:
    reached = list(held(figures))
    yield "## Targets\n"
    yield (
        f"The project set itself {len(reached)} targets on this machine; "
        f"**{sum(h.met for h in reached)} are met.**\n"
    )
    yield (
        "The state is `llama`, except in operations on *1-D tensors* (`flat`), *matrices* and "
        "*small tensors* (`small`, `ten`)."
    )
    yield (
        "The column *measured* has ratios, except where the target is processor time in CPU s/GB.\n"
    )
    yield "| operation | target | measured | met |\n|---|---|--:|---|"
    for h in reached:
        yield f"| {h.target.what} | {h.bound} | {h.shown} | {h.verdict} |"
    yield ""


def _failures(figures: dict[str, Any]) -> Iterator[str]:
    if figures["failed"]:
        yield "## What could not be measured\n"
        for failure in figures["failed"]:
            yield f"- {', '.join(_task(failure))}: `{_last_line(failure).replace('`', '')}`"
        yield ""


def _how(figures: dict[str, Any]) -> Iterator[str]:
    yield "## How it was measured\n"
    yield (
        "```sh\n"
        "make bench-quick   # in a clone: a few minutes; `make bench` takes half an hour and 20 "
        "GiB of memory\n"
        "```\n"
    )
    yield (
        f"Date: {figures['date']}. Machine: {figures['cores']} cores, "
        f"{figures['memory_bytes'] / 2**30:.0f} GiB, {figures['system']}, without a GPU (figures "
        f"of one: [CUDA](cuda.md)). Python {figures['python']}, "
        f"{', '.join(f'{name} {number}' for name, number in figures['versions'].items())}.\n"
    )
    yield (
        "- All programs have the same state in the same memory and processes. They run in turn. "
        "Each round reverses the order. The first round does not count.\n"
        f"- Figures are medians of {LEAST_ROUNDS} to {max(line.rounds for line in PLAN)} rounds.\n"
        "- Files are read just after they were written, from the kernel's cache.\n"
        "- Ratios carry over to other machines better than seconds.\n"
        "- To find regressions, run `python -m tools.bench --compare docs/performance.json`. It "
        "measures again and lists the ratios that fell."
    )
    parts = {r["part"] for r in figures["results"]}
    if min(parts, default=1) > 1:
        yield (
            f"- **At most 1/{min(parts)} of every state was measured, so fixed costs weigh more "
            "than in use.**"
        )
    if any(r["storage"] in DELAYS for r in figures["results"]):
        yield (
            "- The bucket is an emulator in memory on the same cores, so it slows the measured "
            "program. CPU s/GB counts only the measured program: to predict the cost of a real "
            "bucket, use CPU s/GB, not the wall time."
        )
    yield (
        "\n"
        f"[All figures, settings and sizes]({TABLES}) are in the repository. "
        "`tools/bench/measure.py` has the exact rules."
    )
    yield ""


def _lost(figures: dict[str, Any]) -> Iterator[tuple[tuple[str, str, str, str, str], float]]:
    """The ratios of all cases where a peer was faster, if two digits show it; by operation."""
    known = ratios(figures | {"results": _ordered(figures)})
    for key, ratio in sorted(known.items(), key=lambda item: list(OPERATIONS).index(item[0][3])):
        if ratio.value < 0.995 and not ratio.floor:
            yield key, ratio.value


def _each_faster(figures: dict[str, Any]) -> Iterator[str]:
    yield "## Each case where a peer is faster\n"
    yield "| operation | tensors | state | peer | ratio |\n|---|---|---|---|--:|"
    for (storage, state, group, operation, other), ratio in _lost(figures):
        yield (
            f"| {OPERATIONS[operation].title} | {group} | {STATES[state].what}, "
            f"{STORAGES[storage]} | {other} | {ratio:.2f} |"
        )
    yield ""


def _sizes(figures: dict[str, Any]) -> Iterator[str]:
    yield "## Sizes and rounds\n"
    yield "| state | bytes | storage | measured part | rounds |\n|---|--:|---|---|--:|"
    for (state, storage, part), results in groupby(
        _ordered(figures), key=lambda r: (r["state"], r["storage"], r["part"])
    ):
        rounds = {len(r["seconds"]) for r in results}
        made = str(min(rounds)) if len(rounds) == 1 else f"{min(rounds)} – {max(rounds)}"
        measured = "all" if part == 1 else f"1/{part}"
        yield (
            f"| {STATES[state].what} | {_gigabytes(STATES[state].nbytes)} | {STORAGES[storage]} | "
            f"{measured} | {made} |"
        )
    yield ""


def _settings(figures: dict[str, Any]) -> Iterator[str]:
    yield "## Settings\n"
    yield "| tensors | program | settings |\n|---|---|---|"
    results = [r for r in _ordered(figures) if not r["floor"]]
    for group, subject, settings in dict.fromkeys(
        (r["group"], r["subject"], r["settings"]) for r in results
    ):
        yield f"| {group} | {subject} | {settings} |"
    yield "\nNo peer can verify stored bytes, so Verify is compared with reading alone."
    yield BUCKET


def _figures(figures: dict[str, Any]) -> Iterator[str]:
    known = ratios(figures)
    yield f"## All figures\n{COLUMNS}"
    for title, results in _tables(figures):
        yield f"### {title}\n"
        yield (
            f"| operation | program | seconds | {_unit(results[0])} | ratio | CPU s/GB | peak MiB "
            "| read | files | checksums |"
        )
        yield "|---|---|--:|--:|--:|--:|--:|--:|--:|---|"
        for operation, same in groupby(results, key=lambda r: r["operation"]):
            for number, r in enumerate(same):
                ratio = known.get((*where(r), r["subject"]))
                beside = (
                    ""
                    if ratio is None
                    else f"{ratio.value:.2f} ({ratio.least:.2f} – {ratio.most:.2f})"
                )
                name = (
                    f"*{r['subject']}*"
                    if r["floor"]
                    else f"**{r['subject']}**"
                    if is_ours(r["subject"])
                    else r["subject"]
                )
                yield (
                    f"| {'' if number else OPERATIONS[operation].title} | {name} | "
                    f"{_seconds(r['median'])} ({_seconds(r['least'])} – {_seconds(r['most'])}) | "
                    f"{_rate(r)} | {beside} | {_cpu(r)} | {r['peak_bytes'] >> 20} | {_read(r)} | "
                    f"{r['files'] or ''} | "
                    f"{'' if r['floor'] else 'yes' if r['checksums'] else 'no'} |"
                )
        yield ""


def _tables(figures: dict[str, Any]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    for (storage, state, group), results in groupby(
        _ordered(figures), key=lambda r: (r["storage"], r["state"], r["group"])
    ):
        of_table = list(results)
        parts = {r["part"] for r in of_table} - {1}
        part = f", 1/{max(parts)} of it" if parts else ""
        yield f"{group}: {STATES[state].what}{part}, {STORAGES[storage]}", of_table


def _ordered(figures: dict[str, Any]) -> list[dict[str, Any]]:
    """In the order of the plan, whenever they were measured."""
    storages, states, operations = list(STORAGES), list(STATES), list(OPERATIONS)
    groups = list(dict.fromkeys(group for line in PLAN for group in line.groups))
    return sorted(
        figures["results"],
        key=lambda r: (
            storages.index(r["storage"]),
            states.index(r["state"]),
            groups.index(r["task"]),
            operations.index(r["operation"]),
        ),
    )


def _framework(group: str) -> str:
    """The first word of a group's name."""
    return group.partition(" ")[0].rstrip(",")


def _unit(result: dict[str, Any]) -> str:
    return "MB/s" if result["storage"] in DELAYS else "GB/s"


def _rate(result: dict[str, Any]) -> str:
    rate = result["nbytes"] / result["median"] / 1e9
    return f"{rate * 1e3:.0f}" if result["storage"] in DELAYS else f"{rate:.2f}"


def _cpu(result: dict[str, Any]) -> str:
    """Seconds per GB; empty in results of earlier versions of the bench."""
    return f"{result['cpu_median'] / result['nbytes'] * 1e9:.2f}" if "cpu_median" in result else ""


def _read(result: dict[str, Any]) -> str:
    """Bytes read from files, per byte needed; empty for reads from a bucket."""
    if result["operation"] not in READS or result["storage"] in DELAYS:
        return ""
    return f"{result['read_bytes'] / result['nbytes']:.2f}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.3f}" if seconds >= 0.1 else f"{seconds:.4f}"


def _gigabytes(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e7 else f"{nbytes / 1e6:.2f} MB"


def _task(failure: dict[str, Any]) -> tuple[str, str, str, str]:
    return (
        failure["storage"],
        STATES[failure["state"]].what,
        failure["task"],
        OPERATIONS[failure["operation"]].title,
    )


def _last_line(failure: dict[str, Any]) -> str:
    return str(failure["message"].strip().splitlines()[-1])
