"""The parts of a running service."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
import threading
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from shardckpt.errors import NotFoundError, ShardckptError
from shardckpt.serve.access.audit import AuditLog
from shardckpt.serve.access.tokens import Tokens
from shardckpt.serve.calculations import Calculations
from shardckpt.serve.catalogue.catalogue import Catalogue
from shardckpt.serve.jobs.upkeep import Upkeep
from shardckpt.serve.metrics import ServeMetrics
from shardckpt.serve.opened import OpenCheckpoints
from shardckpt.serve.roots import Roots
from shardckpt.serve.scanner import Scanner
from shardckpt.text import shorten

if TYPE_CHECKING:
    import asyncio

    from shardckpt.serve.options import ServeOptions


class Service:
    """State of a running service, for its endpoints."""

    def __init__(self, options: ServeOptions) -> None:
        """Open the catalogue; nothing is scanned before `start`.

        Raises:
            OptionError, UrlError, StorageError: an option is invalid, or names something that
                cannot be used.
        """
        self.roots = Roots(options.roots, options.allow_base)
        self.tokens = None if options.token_file is None else Tokens(Path(options.token_file))
        self.metrics = ServeMetrics()
        self.audit = AuditLog(None if options.audit_log is None else Path(options.audit_log))
        self._own = (
            None if options.state is not None else Path(tempfile.mkdtemp(prefix="shardckpt-serve-"))
        )
        self.catalogue = Catalogue(self._own or Path(options.state or ""))
        self.scanner = Scanner(self.roots, self.catalogue, self.metrics.note_scan)
        self.opened = OpenCheckpoints(self.roots, self.catalogue)
        self.calculations = Calculations(self.roots)
        self.upkeep = None
        """Jobs, scrub and retention; None without a state directory."""
        if options.state is not None:
            try:
                self.upkeep = Upkeep(
                    Path(options.state),
                    options,
                    self.roots,
                    self.catalogue,
                    self.scanner,
                    self.audit,
                )
            except ShardckptError:
                self.catalogue.close()
                raise
        self.streams: Counter[str] = Counter()
        """Clients that follow jobs, by user."""
        self.listening: dict[str, list[asyncio.Event]] = {}
        """Those who wait for versions, by the id of the run."""
        self.listeners: Counter[str] = Counter()
        """Their number, by user."""
        self.commits: dict[tuple[str, str], str] = {}
        """The id of the checkpoint by run and commit of a model, for some that were asked for."""
        self.closing = threading.Event()
        """Set when the service is about to end, so that streams end."""

    def start(self) -> None:
        """Begin to scan, and to run jobs."""
        self.calculations.start()
        self.scanner.start()
        if self.upkeep is not None:
            self.upkeep.start()

    def close(self) -> None:
        """Stop scanning and all jobs, and close the catalogue."""
        if self.upkeep is not None:
            self.upkeep.close()
        self.scanner.stop()
        self.catalogue.close()
        self.audit.close()
        if self._own is not None:
            shutil.rmtree(self._own, ignore_errors=True)

    def exactly(self, ident: str) -> str:
        """The id of a checkpoint, checked.

        Raises:
            NotFoundError: there is no such checkpoint.
        """
        checkpoint, rest = self.opened.resolve(ident.strip("/"))
        if rest:
            raise NotFoundError(f"{shorten(ident)}: there is no checkpoint.")
        return checkpoint

    @staticmethod
    def tag(*parts: str) -> str:
        """A strong tag of what some texts determine."""
        return hashlib.sha256("\0".join(parts).encode("utf-8", "surrogatepass")).hexdigest()[:40]
