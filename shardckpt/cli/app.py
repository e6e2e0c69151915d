"""The `shardckpt` command and its subcommands."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from shardckpt.cli import commit, diff, exits, export, gc, info, ls, pin, plan, reshard, verify

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["app"]


class _Group(TyperGroup):
    """Reports errors our way, also where a test runner calls it."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        given = sys.argv[1:] if args is None else list(args)

        def action() -> int | None:
            # Not standalone: errors come here, and `typer.Exit` as the status.
            status: int | None = super(_Group, self).main(
                given, prog_name or "shardckpt", complete_var, standalone_mode=False, windows_expand_args=windows_expand_args, **extra
            )
            return status

        status = exits.run(action, as_json="--json" in given)
        if standalone_mode:
            sys.exit(status)
        return status


app = typer.Typer(
    cls=_Group,
    invoke_without_command=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        from shardckpt._version import __version__

        print(f"shardckpt {__version__}")
        raise typer.Exit


@app.callback(epilog="Every command takes --json and prints one document. Exit statuses and keys: docs/cli.md.")
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    """Look into sharded checkpoints, check, compare, reshard and export them, commit what was left, remove what is not needed."""
    del version
    if context.invoked_subcommand is None:
        print(context.get_help())


app.command("ls")(ls.ls)
app.command("info")(info.info)
app.command("verify")(verify.verify)
app.command("diff")(diff.diff)
app.command("plan")(plan.plan)
app.command("reshard")(reshard.reshard)
app.command("export")(export.export)
app.command("commit")(commit.commit)
app.command("gc")(gc.gc)
app.command("rm")(gc.rm)
app.command("pin")(pin.pin)
app.command("unpin")(pin.unpin)
