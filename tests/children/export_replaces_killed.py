"""Exports that replace a directory; in each fork another operation of the publishing kills the
process, or fails.

    python export_replaces_killed.py <directory> <how> <act>

<directory>/base has two checkpoints, `one` and `two`, and `out`, the export of `one`. Each fork
works in a copy of it and exports `two` to `out` with overwrite=True. `how`: `exchange` (the file
system exchanges names), `steps` (it does not), or `layers` (it cannot rename old directories
either, as overlayfs). `act`: `kill` or `fail`. JSON on stdout: for each fork the operation, what
`out` was then, what an export without overwrite said and left, and what one with overwrite left.
"""

import errno
import json
import os
import shutil
import signal
import sys
from pathlib import Path

import torch.distributed.checkpoint._nested_dict  # these are imported once for all forks
import torch.distributed.checkpoint.filesystem  # noqa: F401
from dying import Killer, in_a_fork

import shardckpt
import shardckpt.convert.export
import shardckpt.errors
from shardckpt.convert.files import draft, replacement
from shardckpt.convert.formats.dcp import target  # noqa: F401

OPERATIONS = ("open", "fsync", "mkdir", "rename", "replace", "unlink", "rmdir")
DATA = "__0_0.distcp"


class Failer(Killer):
    """Makes an operation fail, in place of the death of the process."""

    def before(self, operation, *, then=lambda: None):
        with self.lock:
            self.left -= 1
            if self.left == -1:
                os.pwrite(self.report, operation.encode(), 0)
                raise OSError(errno.EIO, "Input/output error")


def without_exchange(_one, _other):
    return False


def rename_within_a_layer(rename):
    """Rename as overlayfs does: a directory that lies in a lower layer keeps its name."""

    def renamed(src, dst, **options):
        if Path(src).name == "out" and Path(dst).name != "out":
            raise OSError(errno.EXDEV, "Invalid cross-device link", str(src))
        return rename(src, dst, **options)

    return renamed


def prepare(how, killer):
    """Make the file system as `how` says, and arm the killer when the publishing begins."""
    if how == "layers":
        os.rename = rename_within_a_layer(os.rename)
    if how != "exchange":
        replacement.exchange = without_exchange
    publish = draft.Draft.publish

    def armed(self):
        if killer is not None:
            killer.arm()
            if how == "exchange":
                replacement.exchange = killer.file_operation("exchange", replacement.exchange)
        publish(self)

    draft.Draft.publish = armed


def export(place, answer, *, overwrite, how, killer=None):
    """Export in this fork, and write down what it said."""
    prepare(how, killer)
    try:
        shardckpt.export(place / "two", place / "out", to="dcp", overwrite=overwrite)
        answer_text = "exported"
    except shardckpt.errors.ShardckptError as e:
        answer_text = f"{type(e).__name__}: {e}"
    os.ftruncate(answer, 0)
    os.pwrite(answer, answer_text.encode(), 0)


def complete_directories(place, known):
    """The complete directories in a place, by name; `out` is named also if it is incomplete or
    missing."""
    there = {"out": "nothing"}
    for path in place.iterdir():
        if path.name not in ("one", "two"):
            whole = {entry.name for entry in path.iterdir()} == {DATA, ".metadata"}
            there[path.name] = (
                known.get((path / DATA).read_bytes(), "incomplete") if whole else "incomplete"
            )
    return there


def known_contents(base):
    """Bytes of the file of items → `old` or `new`."""
    shardckpt.export(base / "two", base / "new", to="dcp")
    known = {(base / "out" / DATA).read_bytes(): "old", (base / "new" / DATA).read_bytes(): "new"}
    shutil.rmtree(base / "new")
    return known


def main():
    top, how, act = Path(sys.argv[1]), *sys.argv[2:]
    known_file = top / "known"
    answers = []
    with (
        (top / "report").open("wb+", buffering=0) as report,
        (top / "answer").open("wb+", buffering=0) as answer,
    ):

        def know():
            known = known_contents(top / "base")
            known_file.write_text(json.dumps({data.hex(): what for data, what in known.items()}))

        assert in_a_fork(know) == 0
        known = {
            bytes.fromhex(data): what for data, what in json.loads(known_file.read_text()).items()
        }
        for k in range(1000):
            place = top / str(k)
            shutil.copytree(top / "base", place)
            report.truncate(0)
            answer.truncate(0)
            killer = (Killer if act == "kill" else Failer)(OPERATIONS, {}, k, report.fileno())

            def fatal(place=place, killer=killer):
                export(place, answer.fileno(), overwrite=True, how=how, killer=killer)

            status = in_a_fork(fatal)
            operation = (top / "report").read_text()
            if not operation:
                assert status == 0
                break
            assert status == (signal.SIGKILL if act == "kill" else 0)
            one = {
                "operation": operation,
                "said": (top / "answer").read_text(),
                "then": complete_directories(place, known),
            }
            for overwrite in (False, True):

                def again(place=place, overwrite=overwrite):
                    export(place, answer.fileno(), overwrite=overwrite, how=how)

                assert in_a_fork(again) == 0
                one["again" if overwrite else "refused"] = [
                    (top / "answer").read_text(),
                    complete_directories(place, known),
                ]
            answers.append(one)
    print(json.dumps(answers))


main()
