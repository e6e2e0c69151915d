"""`shardckpt serve` and `shardckpt token`: the service, and who may use it."""

from __future__ import annotations

import os
import sys
from pathlib import Path  # noqa: TC003  (typer reads the annotation)
from typing import Annotated, Any

import typer

from shardckpt.cli.options import takes
from shardckpt.serve.options import ServeOptions


@takes(ServeOptions)
def serve(
    roots: Annotated[
        list[str],
        typer.Argument(
            metavar="NAME=ROOT…", help="A name, and the path or url that it stands for."
        ),
    ],
    *,
    given: dict[str, Any],
) -> None:
    """Serve checkpoints over HTTP.

    Without --token-file, only users of this machine can read, and nothing can be changed.
    """
    from importlib.util import find_spec

    from shardckpt.errors import MissingExtraError, StorageError
    from shardckpt.text import install_command

    lacking = [
        name
        for name in ("starlette", "uvicorn", "httptools", "prometheus_client")
        if find_spec(name) is None
    ]
    if lacking:
        raise MissingExtraError(
            f"the service needs {', '.join(lacking)}; install them with "
            f"`{install_command('serve')}`."
        )
    from shardckpt.io.store import Store
    from shardckpt.serve.roots import Roots
    from shardckpt.serve.server import serve as run

    options = ServeOptions(roots=tuple(roots), **ServeOptions.arguments(given))
    for name, place in Roots(roots).places.items():
        if not Store.open(place).has_directory():
            print(
                f"{name}: there is no directory {place} yet; it is listed as empty until a job "
                "saves there",
                file=sys.stderr,
            )
    # Interpreters that `multiprocessing` starts would look for modules in the working directory.
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        run(options, lambda url: print(f"serving at {url}", flush=True))
    except SystemExit as e:  # uvicorn's, when it cannot listen
        if e.code:
            raise StorageError(
                f"cannot serve at {options.host} port {options.port}; the log above says why. "
                "Give --port another one."
            ) from None


def token(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the user or program.")],
    token_file: Annotated[
        Path,
        typer.Option(
            "--token-file", metavar="FILE", help="The token file of the service; a line is added."
        ),
    ],
    scope: Annotated[
        list[str] | None,
        typer.Option(
            "--scope",
            metavar="[ROOT=]SCOPE",
            help="read (default), operate or admin, for every root or for ROOT; may be repeated.",
        ),
    ] = None,
    expires: Annotated[
        str | None,
        typer.Option(
            "--expires",
            metavar="DURATION|DATE",
            help="The token ends after this time, as in 90d, or at this date (UTC).",
        ),
    ] = None,
) -> None:
    """Make and print a token for the service.

    The token is printed once; the file has its digest. A name may have several tokens: add the new
    one before you delete the line of the old one, which revokes it.
    """
    from shardckpt.serve.access.tokens import add_token

    print(add_token(token_file, name, *(scope or ()), expires=expires))
