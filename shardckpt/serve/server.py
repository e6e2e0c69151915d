"""The server process: uvicorn, with limits that it does not have by itself.

1. A request, with its headers and its body, arrives in time, and its headers are short.
2. A client that does not read what is sent to it is disconnected after a time without progress.
"""

from __future__ import annotations

import ctypes
import sys
from typing import TYPE_CHECKING, Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from shardckpt.serve.app import application
from shardckpt.serve.logs import log_to_stderr
from shardckpt.serve.service import ServeOptions, Service

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

_REQUEST_SECONDS, _STALL_SECONDS, _IDLE_SECONDS = 20.0, 60.0, 15
_LONGEST_HEADERS, _MOST_HEADERS = 32 << 10, 100
_CONNECTIONS = 512
_M_MMAP_THRESHOLD = -3
_SWITCH_SECONDS = 0.0005
"""Seconds for which a reading thread may keep the interpreter from the thread that answers; Python's own value is ten times as long."""
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
        OptionError, UrlError, StorageError: an option is invalid, or names something that cannot be used.
    """
    server = make_server(options, started)
    _return_memory()
    sys.setswitchinterval(_SWITCH_SECONDS)
    listener = log_to_stderr()
    try:
        server.run()
    finally:
        listener.stop()


def _return_memory() -> None:
    """Let glibc give blocks of 1 MiB and more back to the system when they are freed; else each thread keeps some."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 1 << 20)


def make_server(options: ServeOptions, started: Callable[[str], Any]) -> uvicorn.Server:
    """A server that is not yet started; see `serve`."""
    service = Service(options)
    config = uvicorn.Config(
        application(service, options),
        host=options.host,
        port=options.port,
        http=LimitedProtocol,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        limit_concurrency=_CONNECTIONS,
        timeout_keep_alive=_IDLE_SECONDS,
        timeout_graceful_shutdown=10,
        ssl_certfile=options.certificate,
        ssl_keyfile=options.key,
    )
    return _Server(config, started, service)


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, started: Callable[[str], Any], service: Service) -> None:
        super().__init__(config)
        self._on_start, self._service = started, service

    async def shutdown(self, sockets: Any = None) -> None:
        self._service.closing.set()  # responses that would go on end now
        await super().shutdown(sockets)

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        if self.started:
            for server in self.servers:
                for socket in server.sockets:
                    host, port = socket.getsockname()[:2]
                    host = f"[{host}]" if ":" in host else host
                    self._on_start(f"{'https' if self.config.is_ssl else 'http'}://{host}:{port}")
