"""A plan's numbers as text, from the plan's document, for the terminal and the page."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardckpt.text import count, duration_text, file_size, visible

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

WORTH = 1.1
"""Amplification of a restore as stored; below it a reshard saves very little."""


def factor(ratio: float | None) -> str:
    """A ratio of bytes as text.

    >>> factor(1.004), factor(12.31), factor(None)
    ('1.00×', '12.3×', '–')
    """
    return "–" if ratio is None else f"{ratio:.2f}×" if ratio < 10 else f"{ratio:,.1f}×"


def hosts_text(span: Sequence[int]) -> str:
    """A half-open range of hosts as text.

    >>> hosts_text((3, 4)), hosts_text((0, 16))
    ('host 3', 'hosts 0–15')
    """
    first, stop = span
    return f"host {first}" if stop - first == 1 else f"hosts {first}–{stop - 1}"


def span_text(seconds: float | None) -> str:
    """An approximate duration as text; `assumptions` says why one is not known.

    >>> span_text(0.2), span_text(59.6), span_text(500), span_text(None)
    ('under 1 s', '60 s', '8 min', '–')
    """
    if seconds is None:
        return "–"
    return (
        "under 1 s"
        if seconds < 1
        else f"{seconds:.0f} s"
        if seconds < 120
        else duration_text(seconds)
    )


def rate_text(rates: dict[str, Any]) -> str:
    """The rates that the estimated times are based on; empty if none is known."""
    known = [
        f"{what} at {file_size(rates[key]['bytes_per_second'])}/s"
        for key, what in (("read", "reads"), ("write", "writes"))
        if rates[key]
    ]
    return ", ".join(known)


def route(doc: dict[str, Any]) -> tuple[str, str]:
    """Descriptions of the source and the target: hosts, devices, storage."""
    source, target = doc["source"], doc["target"]
    meshes = [
        " × ".join(f"{a}={n}" for a, n in zip(m["axes"], m["shape"], strict=True)) or "one device"
        for m in target["meshes"]
    ]
    compressed = {
        key: side["compression"] or "not compressed"
        for key, side in (("source", source), ("target", target))
    }
    begins = f"{count(source['tensors'], 'tensor')}, {file_size(source['bytes'])}"
    if source["format"] == "shardckpt":
        begins += (
            f", written by {count(source['processes'], 'host')}; {source['layout']}, "
            f"{compressed['source']}"
        )
    else:
        begins += f", in the format {source['format']}"
    ends = (
        f"{visible('; '.join(meshes)) or 'no mesh'}: {count(target['devices'], 'device')} on "
        f"{count(target['hosts'], 'host')}"
    )
    return begins, f"{ends}; {target['layout']}, {compressed['target']}"


def verdict(doc: dict[str, Any]) -> str:
    """A sentence that says whether the reshard is worth its cost."""
    before, after, pays = doc["restore"], doc["restore_after"], doc["pays_after_restores"]
    if doc["reshard"]["taken_over"]:
        how = {
            "links": "makes hard links to the files and copies nothing",
            "copies": "has the object store copy the files",
        }
        return f"No file changes: a reshard {how[doc['reshard']['taken_over']]}."
    now = (
        f"Without a reshard, a restore by all hosts reads {factor(before['amplification'])} the "
        "bytes that the devices need"
    )
    if pays is None or before["amplification"] < WORTH:
        return (
            f"{now}: a reshard saves next to nothing. Restore it directly, unless you need the "
            "files in another layout."
        )
    return (
        f"{now}: {file_size(before['bytes_read'])}. After the reshard it reads "
        f"{factor(after['amplification'])}: {file_size(after['bytes_read'])}. The reshard itself "
        "reads and writes "
        f"{file_size(doc['reshard']['bytes_read'] + doc['reshard']['bytes_written'])}; it pays "
        f"off after {count(pays, 'restore')}."
    )


def notice_text(notice: dict[str, Any]) -> str:
    """A notice with the tensors that it applies to."""
    others = f" and {count(notice['tensors'] - 1, 'other tensor')}" if notice["tensors"] > 1 else ""
    return visible(f"{notice['first']}{others}: {notice['notice']}")


def assumptions(doc: dict[str, Any]) -> Iterator[str]:
    """The assumptions behind the numbers."""
    target, restore = doc["target"], doc["restore"]
    if target["replaces"]:
        yield "A checkpoint is there already; a reshard replaces it only with --overwrite."
    per_host = count(target["devices_per_host"], "device")
    yield f"Each host is assumed to have {per_host}, in order of their ids (--devices-per-host)."
    known = {key: rate for key, rate in doc["rates"].items() if rate is not None}
    if "read" not in known:
        which, also = (
            ("rate of reading was", "")
            if "write" in known
            else ("rates were", ", and no destination is named")
        )
        yield (
            f"The {which} not measured: there is too little to read{also}. Give --rate for "
            "estimates of time."
        )
    elif "write" not in known:
        yield "The rate of writing was not measured: name a destination, or give --rate."
    for key, rate in known.items():
        what = {"read": "Reading", "write": "Writing"}[key]
        if rate["sample_bytes"] is None:
            yield f"{what} at {file_size(rate['bytes_per_second'])}/s was given."
        else:
            sample = f"{file_size(rate['sample_bytes'])} in {rate['sample_seconds']:.2f} s"
            yield (
                f"{what} at {file_size(rate['bytes_per_second'])}/s was measured just now: "
                f"{sample}, by this machine alone."
            )
    work = (
        "reading, writing and reading back"
        if doc["reshard"]["bytes_read_back"]
        else "reading and writing"
    )
    if "read" in known:
        yield (
            f"The time of the reshard is the time for {work} at these rates; a restore takes as "
            "long as the host that reads most."
        )
    if restore["requests"] is not None and restore["requests_counted_hosts"] < target["hosts"]:
        yield (
            f"Requests were counted of {count(restore['requests_counted_hosts'], 'host')}, evenly "
            "chosen, and scaled up to all."
        )
    if not doc["flow"]["exact"]:
        yield (
            "The chunk tables were not read: the lengths and writers of chunks are estimated "
            "from the record."
        )
