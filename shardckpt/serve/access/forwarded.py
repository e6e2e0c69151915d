"""Headers of reverse proxies, which say how a client asked.

They count only from proxies that the service was told to trust.

`X-Forwarded-For` is read from the right: the first address that is not a trusted proxy's is the
client's. Of `X-Forwarded-Proto`, `X-Forwarded-Host` and `X-Forwarded-Prefix` the last value counts,
which the nearest proxy has set.
"""

from __future__ import annotations

import re
from ipaddress import ip_address, ip_network
from typing import TYPE_CHECKING

from shardckpt.errors import OptionError
from shardckpt.text import shorten

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from starlette.types import Scope

_HOST = re.compile(r"[A-Za-z0-9._-]{1,255}(:\d{1,5})?|\[[0-9A-Fa-f:.]{2,45}\](:\d{1,5})?", re.ASCII)
_PREFIX = re.compile(r"(/[A-Za-z0-9._~-]{1,100}){1,8}/?", re.ASCII)


class Proxies:
    """The proxies that are trusted."""

    def __init__(
        self, trusted: Sequence[str], *, unix_socket: bool, roots: Collection[str] = ()
    ) -> None:
        """Parse addresses or networks; the clients of a unix socket are trusted as well.

        `roots`: names of roots, which paths of models begin with.

        Raises:
            OptionError: one is not an address or a network.
        """
        try:
            self._networks = [ip_network(one, strict=False) for one in trusted]
        except ValueError as e:
            raise OptionError(
                f"--trusted-proxy: {shorten(str(e))}; give an address or a network, as in "
                "10.0.0.7 or 10.0.0.0/24."
            ) from e
        self._unix_socket, self._roots = unix_socket, roots

    def apply(self, scope: Scope) -> str | None:
        """Put the client's address, scheme and host into a request; return the prefix of its path.

        None: no proxy was believed.
        """
        client = scope.get("client")
        if not (self._unix_socket and not client) and not (client and self._trusts(client[0])):
            return None
        given = {name: _values(scope, name) for name in ("for", "proto", "host", "prefix")}
        for address in reversed(given["for"]):
            scope["client"] = (address, 0)
            if not self._trusts(address):
                break
        if given["proto"] and given["proto"][-1] in ("http", "https"):
            scope["scheme"] = given["proto"][-1]
        if given["host"] and _HOST.fullmatch(given["host"][-1]):
            host = given["host"][-1].encode("ascii")
            scope["headers"] = [
                *((name, value) for name, value in scope["headers"] if name != b"host"),
                (b"host", host),
            ]
        prefix = (
            given["prefix"][-1]
            if given["prefix"] and _PREFIX.fullmatch(given["prefix"][-1])
            else ""
        )
        prefix = prefix.rstrip("/")
        # Of a proxy that does not take it away.
        kept = prefix and prefix.split("/")[1] not in self._roots
        if kept and scope["path"].startswith(f"{prefix}/"):
            scope["path"] = scope["path"].removeprefix(prefix)
            scope.pop("raw_path", None)
        return prefix

    def _trusts(self, address: str) -> bool:
        try:
            parsed = ip_address(address)
        except ValueError:
            return False
        plain = getattr(parsed, "ipv4_mapped", None) or parsed
        return any(plain in network for network in self._networks)


def _values(scope: Scope, name: str) -> list[str]:
    header = f"x-forwarded-{name}".encode()
    joined = ",".join(
        value.decode("latin-1") for given, value in scope["headers"] if given == header
    )
    return [one.strip() for one in joined.split(",") if one.strip()]
