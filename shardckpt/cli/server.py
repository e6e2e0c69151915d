"""The service that `--server` names.

With this option, commands take ids of the service's checkpoints instead of paths and urls.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardckpt.errors import OptionError

if TYPE_CHECKING:
    from shardckpt.serve.client import Client

COMMANDS = ("ls", "info", "verify", "diff", "fingerprint", "plan", "jobs", "job")
"""The commands that use a service."""
_chosen: list[str] = []


def choose_server(url: str | None, command: str | None) -> None:
    """Set the service for a command; None: there is none.

    Raises:
        OptionError: the command does not use a service.
    """
    _chosen[:] = [] if url is None else [url]
    if url is not None and command not in COMMANDS:
        raise OptionError(
            f"--server is for {', '.join(COMMANDS)}; for other commands give https://HOST/raw/ID "
            "as the source."
        )


def server() -> Client | None:
    """A client of the service; None: there is none."""
    from shardckpt.serve.client import Client

    return Client(_chosen[0]) if _chosen else None


def required_server() -> Client:
    """A client of the service.

    Raises:
        OptionError: there is none.
    """
    client = server()
    if client is None:
        raise OptionError(
            "only a service has jobs; name it, as in `shardckpt jobs --server https://HOST:8470`."
        )
    return client


def located(url: str) -> str:
    """The url of a checkpoint: that of an id, if there is a service."""
    if not _chosen:
        return url
    client = server()
    assert client is not None
    with client:
        return client.raw_url(url.strip("/"))
