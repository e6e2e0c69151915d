"""The page of a run, docs/performance.md, in the order a reader needs it.

Whether targets are met; where others are faster; the chart; how it was measured, and with which settings; all figures.
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

__all__ = ["page", "summary"]

READS = ("restore", "other", "columns", "verify", "export")
ALONE = "verify"
"""Nobody else can be asked for it."""


def summary(found: dict[str, Any]) -> str:
    """For a terminal."""
    known, lines = ratios(found), []
    for title, results in _tables(found):
        lines.append(f"\n{title}")
        for r in results:
            ratio = known.get((*where(r), r["subject"]))
            beside = f"{ratio.value:8.2f}" if ratio is not None else ""
            rate = f"{_rate(r):>6} {_unit(r)}  {_cpu(r):>5} CPU s/GB"
            lines.append(f"  {r['operation']:8} {r['subject']:35} {_seconds(r['median']):>8} s  {rate} {beside}")
    lines += ["", *(f"  {'met ' if h.met else 'NOT '} {h.target.what}: {h.bound}: {h.value:.2f}" for h in held(found))]
    lines += [f"  FAILED {', '.join(_task(f))}: {_last_line(f)}" for f in found["failed"]]
    return "\n".join(lines)


def page(found: dict[str, Any]) -> str:
    """docs/performance.md."""
    parts = (_summary, _slower, _failures, _chart, _how, _subjects, _figures)
    return "<!-- Written by `make bench`: tools/bench/report.py. -->\n# Performance\n\n" + "\n".join(
        line for part in parts for line in part(found)
    )


def _summary(found: dict[str, Any]) -> Iterator[str]:
    reached = list(held(found))
    met = sum(h.met for h in reached)
    versions = found["versions"]
    yield (
        f"shardckpt {versions['shardckpt']} beside torch.distributed.checkpoint (DCP, torch {versions['torch']}), Orbax "
        f"{versions['orbax-checkpoint']} and safetensors {versions['safetensors']}, on {found['cores']} cores of one machine: "
        f"{met} of {len(reached)} targets are met. Ratios are our rate over theirs: **above 1, we are faster**. "
        "A floor (write(2), readv(2), memcpy, HTTP puts and gets, raw TensorStore, placing ready shards) only moves the bytes, without "
        "names, checksums or a commit. A floor on files has as many threads, and as many processes, as shardckpt; its name says so.\n"
    )
    yield "| what | target | measured | met |"
    yield "|---|---|--:|---|"
    for h in reached:
        yield f"| {h.target.what} | {h.bound} | {h.value:.2f} | {h.verdict} |"
    yield ""


def _slower(found: dict[str, Any]) -> Iterator[str]:
    yield "## Where we are not the fastest\n"
    lines = []
    for (storage, state, group, operation, other), ratio in ratios(found).items():
        if ratio.value < 1 and not ratio.floor:
            lines.append(
                f"| {OPERATIONS[operation].title} | {group} | {STATES[state].what}, {STORAGES[storage]} | {other} | {ratio.value:.2f} |"
            )
    if not lines:
        yield "Nobody but floors was faster at anything, in this run.\n"
        return
    yield (
        "Peers that were faster at something. safetensors and torch.save write one file, without checksums, and neither make it durable "
        "nor commit it; DCP and Orbax read without comparing checksums where the tables below say so. DCP's consolidation exports from "
        "the shards of one rank, which are whole tensors, and reads nothing back; we export from chunks, compare the checksum of each, "
        "and read back what was written.\n"
    )
    yield "| what | of | state | faster | our rate over theirs |"
    yield "|---|---|---|---|--:|"
    yield from lines
    yield ""


def _failures(found: dict[str, Any]) -> Iterator[str]:
    if found["failed"]:
        yield "## What could not be measured\n"
        for failure in found["failed"]:
            yield f"- {', '.join(_task(failure))}: `{_last_line(failure).replace('`', '')}`"
        yield ""


def _chart(found: dict[str, Any]) -> Iterator[str]:
    del found
    yield "![GB/s of each operation, on tmpfs and in a bucket: shardckpt, its peers, and the floors](performance.svg)\n"


def _how(found: dict[str, Any]) -> Iterator[str]:
    yield "## How it was measured\n"
    yield (
        f"On {found['date']} with `python -m tools.bench --write`: {found['cores']} cores, {found['memory_bytes'] / 2**30:.0f} GiB, "
        f"{found['system']}, Python {found['python']}, {', '.join(f'{name} {number}' for name, number in found['versions'].items())}. "
        "All subjects of a table have the same state and memory, in the same processes, and take turns; every other round goes "
        f"backwards, and one that does not count comes first. Told are medians of {LEAST_ROUNDS} to {max(line.rounds for line in PLAN)} "
        "rounds. Files that are read were written just before, and lie in the kernel's cache. `tools/bench/measure.py` has the "
        "rules, and [performance.json](performance.json) all figures.\n\n"
        "No figure is of a GPU: CUDA tensors have not been measured ([cuda.md](cuda.md)).\n\n"
        "Absolute figures are this machine's; compare ratios. `python -m tools.bench --compare docs/performance.json` measures "
        "again and names those that got worse.\n"
    )
    if any(r["storage"] in DELAYS for r in found["results"]):
        yield (
            "The bucket is one of fake-gcs-server, an emulator of Cloud Storage that keeps objects in memory, on the same machine. It "
            "shares the cores with the subjects, and takes at most some hundred MB/s of puts, from any client. So seconds say less there "
            "than the own processor time of a subject, which does not count the emulator's. Plain HTTP puts send objects of 64 MiB from "
            "memory (smaller ones if there are more streams than that), and plain HTTP gets read ranges of 4 MiB into place. Over TLS, "
            "the emulator has a certificate of the bench's own. A bucket some ms away stands behind a proxy that delays each request by "
            "that time, and does not limit the bandwidth.\n"
        )
    parts = {r["part"] for r in found["results"]}
    if min(parts, default=1) > 1:
        yield f"**Of every state, 1/{min(parts)} at the most was measured. Fixed costs weigh more than they do in use.**\n"
    yield "| state | bytes | storage | of it | rounds |"
    yield "|---|--:|---|---|--:|"
    for (state, storage, part), results in groupby(_ordered(found), key=lambda r: (r["state"], r["storage"], r["part"])):
        rounds = {len(r["seconds"]) for r in results}
        made = str(min(rounds)) if len(rounds) == 1 else f"{min(rounds)} – {max(rounds)}"
        of_it = "all" if part == 1 else f"1/{part}"
        yield f"| {STATES[state].what} | {_gigabytes(STATES[state].nbytes)} | {STORAGES[storage]} | {of_it} | {made} |"
    yield ""


def _subjects(found: dict[str, Any]) -> Iterator[str]:
    yield "## Who, and with which settings\n"
    yield "| of | who | settings |"
    yield "|---|---|---|"
    results = [r for r in _ordered(found) if not r["floor"]]
    for group, subject, settings in dict.fromkeys((r["group"], r["subject"], r["settings"]) for r in results):
        yield f"| {group} | {subject} | {settings} |"
    yield (
        "\nPeers at their best are what their documented options gave the best times here with. To verify every stored byte is "
        "nothing that a peer can be asked for, so it stands beside reading alone.\n"
    )


def _figures(found: dict[str, Any]) -> Iterator[str]:
    known = ratios(found)
    yield "## All figures\n"
    yield (
        "Ratio: our rate over theirs, with the least and the most of one round. CPU s/GB: processor time of the subject's process alone, "
        "user and system, per GB moved. Peak: resident memory at the most, above what it was before. Read: bytes read from files, per "
        "byte needed (not what is read through memory that is mapped). Floors stand in italics."
    )
    for title, results in _tables(found):
        yield f"\n### {title}\n"
        yield f"| | who | seconds (least – most) | {_unit(results[0])} | ours / theirs | CPU s/GB | peak MiB | read | files | checksums |"
        yield "|---|---|--:|--:|--:|--:|--:|--:|--:|---|"
        for operation, same in groupby(results, key=lambda r: r["operation"]):
            for number, r in enumerate(same):
                ratio = known.get((*where(r), r["subject"]))
                beside = "" if ratio is None else f"{ratio.value:.2f} ({ratio.least:.2f} – {ratio.most:.2f})"
                name = f"*{r['subject']}*" if r["floor"] else f"**{r['subject']}**" if is_ours(r["subject"]) else r["subject"]
                yield (
                    f"| {'' if number else OPERATIONS[operation].title} | {name} | "
                    f"{_seconds(r['median'])} ({_seconds(r['least'])} – {_seconds(r['most'])}) | {_rate(r)} | {beside} | {_cpu(r)} | "
                    f"{r['peak_bytes'] >> 20} | {_read(r)} | {r['files'] or ''} | "
                    f"{'' if r['floor'] else 'yes' if r['checksums'] else 'no'} |"
                )
    yield ""


def _tables(found: dict[str, Any]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    for (storage, state, group), results in groupby(_ordered(found), key=lambda r: (r["storage"], r["state"], r["group"])):
        of_table = list(results)
        parts = {r["part"] for r in of_table} - {1}
        some = f", 1/{max(parts)} of it" if parts else ""
        yield f"{group}: {STATES[state].what}{some}, {STORAGES[storage]}", of_table


def _ordered(found: dict[str, Any]) -> list[dict[str, Any]]:
    """As the plan has them, whenever they were measured."""
    storages, states, operations = list(STORAGES), list(STATES), list(OPERATIONS)
    groups = list(dict.fromkeys(group for line in PLAN for group in line.groups))
    return sorted(
        found["results"],
        key=lambda r: (storages.index(r["storage"]), states.index(r["state"]), groups.index(r["task"]), operations.index(r["operation"])),
    )


def _unit(result: dict[str, Any]) -> str:
    return "MB/s" if result["storage"] in DELAYS else "GB/s"


def _rate(result: dict[str, Any]) -> str:
    rate = result["nbytes"] / result["median"] / 1e9
    return f"{rate * 1e3:.0f}" if result["storage"] in DELAYS else f"{rate:.2f}"


def _cpu(result: dict[str, Any]) -> str:
    """Seconds per GB; of results of earlier versions of the bench nothing."""
    return f"{result['cpu_median'] / result['nbytes'] * 1e9:.2f}" if "cpu_median" in result else ""


def _read(result: dict[str, Any]) -> str:
    """Bytes read from files, per byte needed; what comes from a bucket is not among them."""
    if result["operation"] not in READS or result["storage"] in DELAYS:
        return ""
    return f"{result['read_bytes'] / result['nbytes']:.2f}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.3f}" if seconds >= 0.1 else f"{seconds:.4f}"


def _gigabytes(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e7 else f"{nbytes / 1e6:.2f} MB"


def _task(failure: dict[str, Any]) -> tuple[str, str, str, str]:
    return failure["storage"], STATES[failure["state"]].what, failure["task"], OPERATIONS[failure["operation"]].title


def _last_line(failure: dict[str, Any]) -> str:
    return str(failure["message"].strip().splitlines()[-1])
