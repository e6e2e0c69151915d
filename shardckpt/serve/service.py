"""The parts of a running service."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shardckpt.errors import NotFoundError, OptionError, ShardckptError
from shardckpt.excerpt import excerpt
from shardckpt.serve.catalogue import Catalogue
from shardckpt.serve.jobs.upkeep import Upkeep
from shardckpt.serve.metrics import ServeMetrics
from shardckpt.serve.opened import OpenCheckpoints
from shardckpt.serve.roots import Roots
from shardckpt.serve.scanner import Scanner
from shardckpt.serve.tokens import Tokens

if TYPE_CHECKING:
    import os

LOOPBACK = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Options of `shardckpt serve`."""

    roots: tuple[str, ...]
    """`NAME=ROOT` each."""
    host: str = "127.0.0.1"
    port: int = 8470
    token_file: str | os.PathLike[str] | None = None
    state: str | os.PathLike[str] | None = None
    """The directory of the catalogue; None: one that is removed at the end."""
    allow_host: tuple[str, ...] = ()
    """Names of the service in `Host`, besides those of loopback."""
    allow_base: tuple[str, ...] = ()
    """Paths or urls below which bases of checkpoints may lie, besides the roots."""
    scrub: float | None = None
    """Seconds within which each checkpoint is verified once; None: none is."""
    scrub_rate: int = 64 << 20
    """Most bytes per second that the scrub reads."""
    keep: str | os.PathLike[str] | None = None
    """The file of rules for runs that have ended; None: nothing is deleted by rules."""
    webhook: str | None = None
    """The url that is told of damage."""
    jobs: int = 1
    """Jobs at a time."""
    memory_limit: int | str = "512MiB"
    """Bytes of buffers of a job."""
    workers: int | None = None
    """Concurrent tasks of a reshard or an import; None: as many as cores and memory allow."""
    engine: str | None = None
    """A cluster that does the work of reshards and imports, as in `shardckpt.reshard`."""
    certificate: str | None = None
    """File of the TLS certificate, in PEM."""
    key: str | None = None
    """File of its key."""

    def __post_init__(self) -> None:
        """Refuse to be reached from elsewhere without tokens.

        Raises:
            OptionError: other machines could read without a token, or only one of the TLS files is given.
        """
        if self.token_file is None and self.host not in LOOPBACK:
            raise OptionError(f"--host {self.host} can be reached by other machines; give --token-file (`shardckpt token` makes one).")
        if (self.certificate is None) != (self.key is None):
            raise OptionError("TLS takes both --ssl-certfile and --ssl-keyfile.")
        if self.state is None and any(one is not None for one in (self.scrub, self.keep, self.webhook)):
            raise OptionError("--scrub, --keep and --webhook need --state DIR, where the service keeps what it has found.")
        if self.jobs < 1 or self.scrub_rate < 1:
            raise OptionError("--jobs and --scrub-rate are at least 1.")


class Service:
    """State of a running service, for its endpoints."""

    def __init__(self, options: ServeOptions) -> None:
        """Open the catalogue; nothing is scanned before `start`.

        Raises:
            OptionError, UrlError, StorageError: an option is invalid, or names something that cannot be used.
        """
        self.roots = Roots(options.roots, options.allow_base)
        self.tokens = None if options.token_file is None else Tokens(Path(options.token_file))
        self.metrics = ServeMetrics()
        self._own = None if options.state is not None else Path(tempfile.mkdtemp(prefix="shardckpt-serve-"))
        self.catalogue = Catalogue(self._own or Path(options.state or ""))
        self.scanner = Scanner(self.roots, self.catalogue, self.metrics.note_scan)
        self.opened = OpenCheckpoints(self.roots, self.catalogue)
        self.upkeep = None
        """Jobs, scrub and retention; None without a state directory."""
        if options.state is not None:
            try:
                self.upkeep = Upkeep(Path(options.state), options, self.roots, self.catalogue, self.scanner)
            except ShardckptError:
                self.catalogue.close()
                raise
        self.streams = 0
        """Clients that follow jobs."""
        self.closing = threading.Event()
        """Set when the service is about to end, so that streams end."""

    def start(self) -> None:
        """Begin to scan, and to run jobs."""
        self.scanner.start()
        if self.upkeep is not None:
            self.upkeep.start()

    def close(self) -> None:
        """Stop scanning and all jobs, and close the catalogue."""
        if self.upkeep is not None:
            self.upkeep.close()
        self.scanner.stop()
        self.catalogue.close()
        if self._own is not None:
            shutil.rmtree(self._own, ignore_errors=True)

    def exactly(self, ident: str) -> str:
        """The id of a checkpoint, checked.

        Raises:
            NotFoundError: there is no such checkpoint.
        """
        found, rest = self.opened.resolve(ident.strip("/"))
        if rest:
            raise NotFoundError(f"{excerpt(ident)}: there is no checkpoint.")
        return found

    @staticmethod
    def tag(*parts: str) -> str:
        """A strong tag of what some texts determine."""
        return hashlib.sha256("\0".join(parts).encode("utf-8", "surrogatepass")).hexdigest()[:40]
