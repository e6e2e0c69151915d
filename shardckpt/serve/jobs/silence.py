"""Notices about runs that have stopped saving, although nobody has marked them as ended.

Only a run that was seen saving is told of, once. The journal remembers which are, so that a restart
neither forgets nor repeats one.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from shardckpt.errors import ShardckptError
from shardckpt.io.store import Store
from shardckpt.runs.ended import ENDED
from shardckpt.serve.jobs.background import BackgroundWork
from shardckpt.serve.rhythm import COMMITS, rhythm_of

if TYPE_CHECKING:
    from shardckpt.serve.catalogue.catalogue import Catalogue
    from shardckpt.serve.jobs.journal import Journal
    from shardckpt.serve.roots import Roots
    from shardckpt.serve.scanner import Scanner

_log = logging.getLogger("shardckpt.serve")
_POLL = 60.0


class SilenceWatch(BackgroundWork):
    """Looks for runs that have stopped, in the background."""

    def __init__(
        self, journal: Journal, roots: Roots, catalogue: Catalogue, scanner: Scanner
    ) -> None:
        """Nothing is looked for before `start`."""
        super().__init__(
            "silence", _log, "silent runs could not be looked for", first=_POLL, again=_POLL
        )
        self._journal, self._roots, self._catalogue, self._scanner = (
            journal,
            roots,
            catalogue,
            scanner,
        )

    def look(self) -> float:
        """Tell of each run that was saving at an earlier look, and is silent now.

        Raises StorageError.
        """
        saving = self._journal.saving()
        for run in self._catalogue.all_runs() if self._scanner.complete.is_set() else ():
            if run.partition("/")[0] in self._scanner.watch.vanished:
                continue
            commits = self._catalogue.recent(run, COMMITS)
            rhythm = rhythm_of(one["created"] for one in commits)
            if rhythm is None or rhythm.every is None or rhythm.silent != (run in saving):
                continue
            # The scanner may not have seen yet that an operator has marked the run as ended.
            notice = None
            try:
                ended = rhythm.silent and Store.open(self._roots.locate(run)).exists(ENDED)
            except ShardckptError as e:
                _log.warning("%s: it is not known whether the run has ended: %s", run, e)
                continue
            if rhythm.silent and not ended:
                notice = {
                    "event": "silent",
                    "run": run,
                    "last": commits[-1]["created"],
                    "every": rhythm.every,
                }
                _log.warning("silent", extra={"fields": notice})
            self._journal.set_saving(run, saving=not rhythm.silent, notice=notice)
        return _POLL
