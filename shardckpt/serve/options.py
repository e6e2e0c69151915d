"""The options of the service.

The command line makes its flags of them, so nothing heavy is imported.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardckpt.errors import OptionError
from shardckpt.options import Options, option, parse_duration
from shardckpt.reshard.options import DEFAULT_MEMORY_LIMIT

if TYPE_CHECKING:
    import os

LOOPBACK = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True, kw_only=True)
class ServeOptions(Options):
    """Options of `shardckpt serve`."""

    roots: tuple[str, ...] = option("`NAME=ROOT` each.", (), kind="python")
    host: str = option("The address to listen at.", "127.0.0.1", metavar="ADDRESS")
    port: int = option(
        "The port; 0: any that is free.", 8470, kind="integer", metavar="N", least=0, most=65535
    )
    unix_socket: str | os.PathLike[str] | None = option(
        "Listen at this socket (mode 0660) instead of a port; whoever connects there is a "
        "trusted proxy.",
        metavar="PATH",
    )
    trusted_proxy: tuple[str, ...] = option(
        "Address or network of a proxy whose headers X-Forwarded-* are believed.",
        (),
        kind="texts",
        metavar="ADDRESS",
        parse=tuple,
    )
    token_file: str | os.PathLike[str] | None = option(
        "Tokens of users and programs; `shardckpt token` adds one.", metavar="FILE"
    )
    user_header: str | None = option(
        "Header in which a trusted proxy names the user whom it has signed in, as in "
        "X-Forwarded-User.",
        metavar="NAME",
    )
    groups_header: str | None = option(
        "Header in which it names the user's groups, separated by commas.", metavar="NAME"
    )
    audit_log: str | os.PathLike[str] | None = option(
        "File that gets a line for every write, sign-in and refusal; without it nothing is "
        "written.",
        metavar="FILE",
    )
    state: str | os.PathLike[str] | None = option(
        "Directory for the list of checkpoints and for jobs; default: a list in memory, no jobs.",
        metavar="DIR",
    )
    jobs: int = option(
        "Long jobs (copy, reshard, export, …) at the same time.",
        1,
        kind="integer",
        metavar="N",
        least=1,
    )
    workers: int | None = option(
        "Processes of a job at the same time; default: one per core.", kind="integer", metavar="N"
    )
    engine: str | None = option(
        "A cluster for reshards and imports, as in ray://HOST:10001; default: this machine.",
        metavar="URL",
    )
    memory_limit: int | str = option(
        "Limit of memory for the buffers of all workers of a job together.",
        DEFAULT_MEMORY_LIMIT,
        kind="size",
        metavar="BYTES",
    )
    scrub: float | None = option(
        "Verify every chunk once per period, as in 30d.",
        metavar="PERIOD",
        parse=lambda text: parse_duration(text, "--scrub"),
    )
    scrub_rate: int | str = option(
        "Most bytes per second that the scrub reads.", 64 << 20, kind="size", metavar="BYTES"
    )
    keep: str | os.PathLike[str] | None = option(
        "TOML file of retention rules: they delete steps of runs that an admin has marked as "
        "ended.",
        metavar="FILE",
    )
    webhook: str | None = option(
        "Url that gets a POST when damage is found, a job fails, a root vanishes or a run stops "
        "saving.",
        metavar="URL",
    )
    allow_host: tuple[str, ...] = option(
        "Accept this name in the header Host of requests.",
        (),
        kind="texts",
        metavar="NAME",
        parse=tuple,
    )
    allow_base: tuple[str, ...] = option(
        "Also read bases below this url: tensors that a served checkpoint takes from another one.",
        (),
        kind="texts",
        metavar="URL",
        parse=tuple,
    )
    certificate: str | None = option(
        "The TLS certificate, in PEM.", metavar="FILE", flags=("--ssl-certfile",)
    )
    key: str | None = option(
        "The key of the certificate.", metavar="FILE", flags=("--ssl-keyfile",)
    )

    def __post_init__(self) -> None:
        """Refuse to be reached from elsewhere without tokens.

        Raises:
            OptionError: other machines could read without a token, or only one of the TLS files is
                given.
        """
        super().__post_init__()
        if self.token_file is None and self.host not in LOOPBACK:
            raise OptionError(
                f"--host {self.host} can be reached by other machines; give --token-file "
                "(`shardckpt token` makes one)."
            )
        proxied = self.trusted_proxy or self.unix_socket is not None
        if self.user_header is not None and (self.token_file is None or not proxied):
            raise OptionError(
                "--user-header needs --token-file, which has the rights of groups, and "
                "--trusted-proxy or --unix-socket."
            )
        if self.groups_header is not None and self.user_header is None:
            raise OptionError("--groups-header needs --user-header.")
        if (self.certificate is None) != (self.key is None):
            raise OptionError("TLS takes both --ssl-certfile and --ssl-keyfile.")
        if self.state is None and any(
            one is not None for one in (self.scrub, self.keep, self.webhook)
        ):
            raise OptionError(
                "--scrub, --keep and --webhook need --state DIR, where the service keeps what it "
                "has found."
            )
        if self.jobs < 1 or self.rate < 1:
            raise OptionError("--jobs and --scrub-rate are at least 1.")

    @property
    def rate(self) -> int:
        """`scrub_rate` in bytes."""
        return self.nbytes("scrub_rate")
