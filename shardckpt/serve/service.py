"""The parts of a running service."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shardckpt.errors import NotFoundError, OptionError
from shardckpt.excerpt import excerpt
from shardckpt.serve.catalogue import Catalogue
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


class Service:
    """What the endpoints use."""

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

    def close(self) -> None:
        """Stop scanning, and close the catalogue."""
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
