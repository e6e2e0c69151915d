"""The `shardckpt` command and its subcommands."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from shardckpt.cli import (
    commit,
    diff,
    doctor,
    exits,
    export,
    fingerprint,
    fold,
    gc,
    import_,
    jobs,
    ls,
    pin,
    reshard,
    serve,
    stats,
    verify,
)
from shardckpt.cli.help import EXAMPLES, HINTS, server_first
from shardckpt.cli.info import command as info
from shardckpt.cli.plan import command as plan
from shardckpt.cli.project import project_url
from shardckpt.cli.screen import write_text
from shardckpt.cli.server import choose_server

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class _Documented:
    """Mixin for help that ends with examples, and with the address of the documentation."""

    name: str | None

    def get_help_option(self, ctx: Any) -> Any:
        """The option `--help`.

        An output that cannot be written is an error as with all commands.
        """
        option = super().get_help_option(ctx)  # type: ignore[misc]
        if option is not None:
            option.callback = _show_help
        return option

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the command's examples and epilog, if any, and the address."""
        examples = EXAMPLES.get(self.name or "", ()) if not isinstance(self, TyperGroup) else ()
        if examples:
            with formatter.section("Examples"):
                for example in examples:  # never wrapped: they are copied
                    formatter.write(f"  {example}\n")
        super().format_epilog(ctx, formatter)  # type: ignore[misc]
        url = project_url("Documentation")
        if url is not None:
            formatter.write_paragraph()
            formatter.write_text(f"Documentation: {url}")


def _show_help(ctx: Any, _option: object, requested: bool) -> None:
    if requested and not ctx.resilient_parsing:
        write_text(f"{ctx.get_help()}\n")
        ctx.exit()


class _Command(_Documented, TyperCommand):
    """A command with the metavars of the documentation.

    Its help ends with examples and the documentation's address.
    """

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """The pieces of the line of usage, without braces around arguments."""
        return [
            piece.removeprefix("{").removesuffix("...").removesuffix("}")
            for piece in super().collect_usage_pieces(ctx)
        ]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments and options; an argument has no type beside its name."""
        arguments = [param for param in self.get_params(ctx) if param.param_type_name == "argument"]
        records = [
            (param.metavar or param.name, record[1])
            for param in arguments
            if (record := param.get_help_record(ctx)) is not None
        ]
        options = [
            record
            for param in self.get_params(ctx)
            if param not in arguments and (record := param.get_help_record(ctx)) is not None
        ]
        for title, rows in (("Arguments", records), ("Options", options)):
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)


class _Group(_Documented, TyperGroup):
    """The command group; it reports errors through `exits`, also when a test runner calls it."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        typed = sys.argv[1:] if args is None else list(args)
        given = server_first(typed)

        def action() -> int | None:
            # With standalone_mode=False errors are raised here, and `typer.Exit` becomes the
            # status.
            status: int | None = super(_Group, self).main(
                given,
                prog_name or "shardckpt",
                complete_var,
                standalone_mode=False,
                windows_expand_args=windows_expand_args,
                **extra,
            )
            return status

        status = exits.run(action, as_json="--json" in typed)
        if standalone_mode:
            sys.exit(status)
        return status

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command of the arguments; an unknown one gets a hint."""
        if args and args[0] in HINTS and self.get_command(ctx, args[0]) is None:
            ctx.fail(f"There is no command {args[0]!r}: {HINTS[args[0]]}.")
        return super().resolve_command(ctx, args)


app = typer.Typer(
    cls=_Group,
    invoke_without_command=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(requested: bool) -> None:
    if requested:
        from shardckpt._version import __version__
        from shardckpt.io.extension import ENGINE

        write_text(
            f"shardckpt {__version__} ({'with' if ENGINE == 'C' else 'without'} its C extension)\n"
        )
        raise typer.Exit


@app.callback(epilog="With --json a command prints one JSON document.")
def root(
    context: typer.Context,
    server: Annotated[
        str | None,
        typer.Option(
            "--server",
            metavar="URL",
            help="Url of a service that answers ls, info, verify, diff, fingerprint and plan, and "
            "runs jobs. Give ids of its checkpoints instead of urls. May also come after the "
            "command.",
        ),
    ] = None,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Inspect, verify, compare, reshard, export, import, serve and remove sharded checkpoints."""
    del version
    choose_server(server, context.invoked_subcommand)
    if context.invoked_subcommand is None:
        write_text(f"{context.get_help()}\n")


_COMMANDS: dict[str, Callable[..., None]] = {
    "ls": ls.ls,
    "info": info.info,
    "verify": verify.verify,
    "diff": diff.diff,
    "stats": stats.stats,
    "fingerprint": fingerprint.fingerprint,
    "plan": plan.plan,
    "reshard": reshard.reshard,
    "export": export.export,
    "import": import_.import_,
    "commit": commit.commit,
    "gc": gc.gc,
    "rm": gc.rm,
    "fold": fold.fold,
    "pin": pin.pin,
    "unpin": pin.unpin,
    "tag": pin.tag,
    "untag": pin.untag,
    "doctor": doctor.doctor,
    "serve": serve.serve,
    "token": serve.token,
    "jobs": jobs.jobs,
}
_JOB_COMMANDS: dict[str, Callable[..., None]] = {
    "start": jobs.start,
    "show": jobs.show,
    "wait": jobs.wait,
    "cancel": jobs.cancel,
}
for _name, _function in _COMMANDS.items():
    app.command(_name, cls=_Command)(_function)
_job = typer.Typer(cls=_Group, rich_markup_mode=None, no_args_is_help=True)
for _name, _function in _JOB_COMMANDS.items():
    _job.command(_name, cls=_Command)(_function)
app.add_typer(_job, name="job", help="Start, show, wait for or cancel a job.")
