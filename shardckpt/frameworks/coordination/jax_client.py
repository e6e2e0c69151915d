"""Coordinator on the key-value store of jax.distributed's coordination service.

JAX has no public interface to it: `jax.distributed` only says whether it exists. The client comes
from the same place from which JAX's own checkpoint and multi-host code gets it.

If process 0, which holds the service, is stopped, JAX itself ends the other processes (SIGABRT,
"Terminating process because the JAX distributed service detected fatal errors") after
`jax.distributed.initialize(heartbeat_timeout_seconds=…)`, 100 by default. This module cannot
prevent that. Saves that must raise an error of their own before that need a smaller
`commit_timeout`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jax._src.distributed import global_state
from jax.errors import JaxRuntimeError

from shardckpt.errors import CoordinationError
from shardckpt.frameworks.coordination.base import Coordinator
from shardckpt.frameworks.coordination.calls import StoreCalls

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


class JaxClient(Coordinator):
    """The coordinator of a jax.distributed job.

    It uses the process numbers of `jax.distributed.initialize`.
    """

    def __init__(
        self, *, devices: Mapping[str, Iterable[int]] | None = None, timeout: float = 600
    ) -> None:
        """Agree with the other processes; see `Coordinator`."""
        self._client = global_state.client
        self._calls = StoreCalls("jax.distributed's coordination service")
        # Not jax.process_index(), which would set up backends.
        super().__init__(
            global_state.process_id, global_state.num_processes, devices=devices, timeout=timeout
        )

    @property
    def is_current(self) -> bool:
        """Whether JAX still uses the client that this coordinator was made with."""
        return self._client is global_state.client

    def _set(self, key: str, value: bytes) -> None:
        try:
            self._calls.make(
                lambda: self._client.key_value_set(key, value.decode("ascii"), allow_overwrite=True)
            )
        except JaxRuntimeError as error:
            raise _is_gone(error) from error

    def _get(self, key: str) -> bytes | None:
        try:
            value: str = self._calls.make(lambda: self._client.key_value_try_get(key))
        except JaxRuntimeError as error:
            if str(error).startswith("NOT_FOUND"):
                return None
            raise _is_gone(error) from error
        return value.encode("ascii")


def _is_gone(error: Exception) -> CoordinationError:
    reason = str(error).partition("\n")[0]
    return CoordinationError(
        f"jax.distributed's coordination service does not answer ({reason}); process 0, which "
        "holds it, has ended: start the job again, and end it on all processes at the same point."
    )
