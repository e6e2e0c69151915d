"""`shardckpt serve` and `shardckpt token`: the service, and who may use it."""

from __future__ import annotations

import sys
from pathlib import Path  # noqa: TC003  (typer reads the annotation)
from typing import Annotated

import typer

from shardckpt.cli.reshard_options import EngineUrl, MemoryLimit, Workers  # noqa: TC001  (typer reads the annotations)
from shardckpt.io.status import exists
from shardckpt.options import parse_bytes, parse_duration


def serve(
    roots: Annotated[list[str], typer.Argument(metavar="NAME=ROOT…", help="A name, and the path or url that it stands for.")],
    host: Annotated[str, typer.Option("--host", metavar="ADDRESS", help="The address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, metavar="N", help="The port; 0: any that is free.")] = 8470,
    token_file: Annotated[
        Path | None, typer.Option("--token-file", metavar="FILE", help="Tokens of users and programs; `shardckpt token` adds one.")
    ] = None,
    state: Annotated[
        Path | None,
        typer.Option(
            "--state", metavar="DIR", help="Directory for the list of checkpoints and for jobs; default: a list in memory, no jobs."
        ),
    ] = None,
    jobs: Annotated[int, typer.Option("--jobs", min=1, metavar="N", help="Long jobs (copy, reshard, export, …) at the same time.")] = 1,
    workers: Workers = None,
    engine: EngineUrl = None,
    memory_limit: MemoryLimit = "512MiB",
    scrub: Annotated[str | None, typer.Option("--scrub", metavar="PERIOD", help="Verify every chunk once per period, as in 30d.")] = None,
    scrub_rate: Annotated[str, typer.Option("--scrub-rate", metavar="BYTES", help="Most bytes per second that the scrub reads.")] = "64MiB",
    keep: Annotated[
        Path | None,
        typer.Option(
            "--keep", metavar="FILE", help="TOML file of retention rules: they delete steps of runs that an admin has marked as ended."
        ),
    ] = None,
    webhook: Annotated[str | None, typer.Option("--webhook", metavar="URL", help="Url that gets a POST when damage is found.")] = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option("--allow-host", metavar="NAME", help="Accept this name in the header Host of requests; may be repeated."),
    ] = None,
    allow_base: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-base",
            metavar="URL",
            help="A served checkpoint may refer to tensors in another one: read these below this url too; may be repeated.",
        ),
    ] = None,
    certificate: Annotated[str | None, typer.Option("--ssl-certfile", metavar="FILE", help="The TLS certificate, in PEM.")] = None,
    key: Annotated[str | None, typer.Option("--ssl-keyfile", metavar="FILE", help="The key of the certificate.")] = None,
) -> None:
    """Serve checkpoints over HTTP.

    Without --token-file, only users of this machine can read, and nothing can be changed.
    """
    from importlib.util import find_spec

    from shardckpt.errors import MissingExtraError, StorageError

    lacking = [name for name in ("starlette", "uvicorn", "httptools", "prometheus_client") if find_spec(name) is None]
    if lacking:
        raise MissingExtraError(f'the service needs {", ".join(lacking)}; install them with `pip install "shardckpt[serve]"`.')
    from shardckpt.serve.roots import Roots
    from shardckpt.serve.server import serve as run
    from shardckpt.serve.service import ServeOptions

    options = ServeOptions(
        roots=tuple(roots),
        host=host,
        port=port,
        token_file=token_file,
        state=state,
        jobs=jobs,
        workers=workers,
        engine=engine,
        memory_limit=memory_limit,
        scrub=None if scrub is None else parse_duration(scrub, "--scrub"),
        scrub_rate=parse_bytes(scrub_rate, "--scrub-rate"),
        keep=keep,
        webhook=webhook,
        allow_host=tuple(allow_host or ()),
        allow_base=tuple(allow_base or ()),
        certificate=certificate,
        key=key,
    )
    for name, place in Roots(roots).places.items():
        if place.local is not None and not exists(place.local):
            print(f"{name}: there is no directory {place} yet; it is listed as empty until a job saves there", file=sys.stderr)
    try:
        run(options, lambda url: print(f"serving at {url}", flush=True))
    except SystemExit as e:  # uvicorn's, when it cannot listen
        if e.code:
            raise StorageError(f"cannot serve at {host} port {port}; the log above says why. Give --port another one.") from None


def token(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the user or program.")],
    token_file: Annotated[Path, typer.Option("--token-file", metavar="FILE", help="The token file of the service; a line is added.")],
    scope: Annotated[str, typer.Option("--scope", metavar="SCOPE", help="read, operate or admin.")] = "read",
) -> None:
    """Make and print a token for the service.

    The token is printed once; the file has its digest. A name may have several tokens: add the new one before you delete
    the line of the old one, which revokes it.
    """
    from shardckpt.serve.tokens import add_token

    print(add_token(token_file, name, scope))
