"""Stand before a server on this machine, and delay what clients send by some milliseconds.

The server then seems to be far away.

    python -m tools.bench.delay PORT BACKEND_PORT MILLISECONDS

1. What a client sends is passed on after that time, however much is on the way. The first bytes of
   a connection take twice as long: a real connection takes a round trip to be made.
2. What the server answers is passed on at once, from socket to socket by splice(2): it takes hardly
   any processor time.

So each request takes a round trip more, and the bandwidth is not limited.
"""

from __future__ import annotations

import fcntl
import os
import socket
import sys
import time
from contextlib import suppress
from queue import SimpleQueue
from threading import Thread

__all__: list[str] = []

AT_ONCE = 1 << 20
"""Bytes that are passed on at a time."""


def main(port: int, backend_port: int, milliseconds: float) -> None:
    """Serve until this process is killed."""
    with socket.create_server(("127.0.0.1", port), backlog=256) as listener:
        while True:
            client, _ = listener.accept()
            server = socket.create_connection(("127.0.0.1", backend_port))
            for end in (client, server):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sent: SimpleQueue[tuple[float, bytes]] = SimpleQueue()
            delay = milliseconds / 1e3
            Thread(target=_take, args=(client, sent, delay), daemon=True).start()
            Thread(target=_pass_on, args=(sent, server), daemon=True).start()
            Thread(target=_answer, args=(server, client), daemon=True).start()


def _take(client: socket.socket, sent: SimpleQueue[tuple[float, bytes]], delay: float) -> None:
    """Note what comes, and when it is to be passed on; at last b""."""
    due, data = 0.0, b"none yet"
    opened = time.monotonic() + delay
    while data:
        try:
            data = client.recv(AT_ONCE)
        except OSError:
            data = b""
        due = max(due, opened + delay, time.monotonic() + delay)
        sent.put((due, data))


def _pass_on(sent: SimpleQueue[tuple[float, bytes]], server: socket.socket) -> None:
    with suppress(OSError):
        while True:
            due, data = sent.get()
            time.sleep(max(0.0, due - time.monotonic()))
            if not data:
                server.shutdown(socket.SHUT_WR)
                return
            server.sendall(data)


def _answer(server: socket.socket, client: socket.socket) -> None:
    """Pass the server's bytes on, until it has no more; then both connections end."""
    out, into = os.pipe()
    fcntl.fcntl(into, fcntl.F_SETPIPE_SZ, AT_ONCE)
    with suppress(OSError):
        while moved := os.splice(server.fileno(), into, AT_ONCE):
            while moved:
                moved -= os.splice(out, client.fileno(), moved)
    for end in (client, server):
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
        end.close()
    os.close(out)
    os.close(into)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
