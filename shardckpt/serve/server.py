"""The server process: uvicorn, with limits that it does not have by itself.

1. A request, with its headers and its body, arrives in time, and its headers are short.
2. A client that does not read what is sent to it is disconnected after a time without progress.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import gc
import logging
import os
import resource
import signal
import socket
import ssl
import stat
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from shardckpt.errors import OptionError, StorageError
from shardckpt.io.status import exists, status
from shardckpt.io.threads import SWITCH_SECONDS
from shardckpt.serve.app import application
from shardckpt.serve.logs import log_to_stderr
from shardckpt.serve.service import Service
from shardckpt.serve.sources import ABORT

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardckpt.serve.options import ServeOptions

_log = logging.getLogger("shardckpt.serve")
_REQUEST_SECONDS, _STALL_SECONDS, _IDLE_SECONDS = 20.0, 60.0, 15
_LONGEST_HEADERS, _MOST_HEADERS = 32 << 10, 100
_CONNECTIONS = 512
"""Most connections; they take at most half of the descriptors that this process may have."""
_CERTIFICATE_SECONDS = 2.0
_M_MMAP_THRESHOLD = -3
_REFUSED = b"HTTP/1.1 %s\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


class LimitedProtocol(HttpToolsProtocol):
    """A connection with limits."""

    _arriving: asyncio.TimerHandle | None = None
    _stalled: asyncio.TimerHandle | None = None
    _length = 0
    """Bytes since the last complete header."""
    _in_headers = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to wait for a request."""
        super().connection_made(transport)  # type: ignore[arg-type]
        self._arriving = self.loop.call_later(_REQUEST_SECONDS, self.transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop all timers."""
        for timer in (self._arriving, self._stalled):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse, unless the headers are too long."""
        if self._in_headers:
            self._length += len(data)
            if self._length > _LONGEST_HEADERS + len(data):
                self._refuse(b"431 Request Header Fields Too Large")
                return
        super().data_received(data)
        if self._in_headers and self._length > _LONGEST_HEADERS:
            self._refuse(b"431 Request Header Fields Too Large")

    def on_message_begin(self) -> None:
        """Begin a request, which must be complete in time."""
        self._in_headers = True
        if self._arriving is None:
            self._arriving = self.loop.call_later(_REQUEST_SECONDS, self.transport.abort)
        super().on_message_begin()
        self.scope["extensions"] = {ABORT: self.transport.abort}  # type: ignore[dict-item]

    def on_header(self, name: bytes, value: bytes) -> None:
        """Note a header."""
        if len(self.headers) >= _MOST_HEADERS:
            raise ValueError("too many headers")  # the parser answers 400
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Begin the body."""
        self._in_headers, self._length = False, 0
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """End a request."""
        self._in_headers = True
        if self._arriving is not None:
            self._arriving.cancel()
            self._arriving = None
        super().on_message_complete()

    def pause_writing(self) -> None:
        """Begin to wait until the client reads."""
        super().pause_writing()
        if self._stalled is None:
            self._stalled = self.loop.call_later(_STALL_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        """Go on writing."""
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None
        super().resume_writing()

    def _refuse(self, status: bytes) -> None:
        self.transport.write(_REFUSED % status)
        self.transport.close()


def serve(options: ServeOptions, started: Callable[[str], Any] = lambda _url: None) -> None:
    """Serve until a signal ends the process.

    Args:
        options: what to serve, and where.
        started: called with the url when connections are accepted.

    Raises:
        OptionError, UrlError, StorageError: an option is invalid, or names something that cannot be
            used.
    """
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    server = make_server(options, started)
    _return_memory()
    gc.freeze()  # other threads wait while garbage is looked for, now only among what comes later
    sys.setswitchinterval(SWITCH_SECONDS)  # the thread that answers waits for no reading thread
    listener = log_to_stderr()
    signal.signal(signal.SIGHUP, lambda *_: server.service.audit.reopen())
    try:
        server.run()
    finally:
        listener.stop()


def _return_memory() -> None:
    """Let glibc give blocks of 1 MiB and more back to the system when they are freed.

    Otherwise each thread keeps some of them.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 1 << 20)


def make_server(options: ServeOptions, started: Callable[[str], Any]) -> _Server:
    """A server that is not yet started; see `serve`."""
    service = Service(options)
    config = uvicorn.Config(
        application(service, options),
        host=options.host,
        port=options.port,
        uds=None if options.unix_socket is None else os.fspath(options.unix_socket),
        http=LimitedProtocol,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        limit_concurrency=min(_CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2),
        timeout_keep_alive=_IDLE_SECONDS,
        timeout_graceful_shutdown=10,
        ssl_certfile=options.certificate,
        ssl_keyfile=options.key,
    )
    try:
        config.load()
    except OSError as e:
        raise OptionError(
            f"--ssl-certfile {options.certificate}, --ssl-keyfile {options.key}: these cannot be "
            f"used for TLS ({e})."
        ) from e
    if options.unix_socket is not None:
        _claim(Path(options.unix_socket))
    return _Server(config, started, service)


def _claim(path: Path) -> None:
    """Make a socket file with the mode that uvicorn then keeps.

    Raises:
        OptionError: another file is there, or another server listens. StorageError: none can be
            made there.
    """
    try:
        with socket.socket(socket.AF_UNIX) as one:
            one.setblocking(False)  # wait for no server whose queue is full
            socket_file = status(path)
            # Of a server that has ended.
            if (
                socket_file is not None
                and stat.S_ISSOCK(socket_file.st_mode)
                and one.connect_ex(str(path)) == errno.ECONNREFUSED
            ):
                path.unlink()
        if exists(path):
            raise OptionError(
                f"--unix-socket {path}: another server or a file is there; give another path."
            )
        with socket.socket(socket.AF_UNIX) as one:
            before = os.umask(0o117)
            try:
                one.bind(str(path))
            finally:
                os.umask(before)
    except OSError as e:
        raise StorageError(
            f"--unix-socket {path}: it cannot be made ({e.strerror or e}); give another path."
        ) from e


def _states(files: tuple[str, str]) -> list[tuple[int, int, int] | None]:
    """Times, inode numbers and sizes of files."""
    statuses = [status(Path(file)) for file in files]
    return [None if one is None else (one.st_mtime_ns, one.st_ino, one.st_size) for one in statuses]


class _Server(uvicorn.Server):
    def __init__(
        self, config: uvicorn.Config, started: Callable[[str], Any], service: Service
    ) -> None:
        super().__init__(config)
        self._on_start, self.service = started, service

    async def shutdown(self, sockets: Any = None) -> None:
        self.service.closing.set()  # responses that would go on end now
        await super().shutdown(sockets)

    async def _follow_certificate(self) -> None:
        """Load the certificate and its key again when a file has changed.

        New connections get it.
        """
        files = str(self.config.ssl_certfile), str(self.config.ssl_keyfile)
        known = _states(files)
        while True:
            await asyncio.sleep(_CERTIFICATE_SECONDS)
            if (now := _states(files)) == known:
                continue
            try:
                ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(*files)  # both fit together
                assert self.config.ssl is not None
                self.config.ssl.load_cert_chain(*files)
            except OSError as e:
                _log.warning(
                    "the certificate cannot be used; the one before holds",
                    extra={"fields": {"reason": str(e)}},
                )
            else:
                _log.info("the certificate was loaded again", extra={"fields": {"file": files[0]}})
            known = now

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        if self.started and self.config.ssl is not None:
            self._certificate = asyncio.create_task(self._follow_certificate())
        if self.started and self.config.uds is not None:
            self._on_start(f"unix:{self.config.uds}")
        elif self.started:
            for server in self.servers:
                for one in server.sockets:
                    host, port = one.getsockname()[:2]
                    host = f"[{host}]" if ":" in host else host
                    self._on_start(f"{'https' if self.config.is_ssl else 'http'}://{host}:{port}")
