"""Through the key-value store of jax.distributed's coordination service.

JAX has no public way to it: `jax.distributed` says whether there is one, and the client is where JAX's own checkpoint
and multi-host code takes it from.

Where process 0, which holds the service, is stopped, JAX itself ends the other processes (SIGABRT, "Terminating process because the
JAX distributed service detected fatal errors") once `jax.distributed.initialize(heartbeat_timeout_seconds=…)` have passed, 100 by default.
Nothing here can prevent that. Saves that are to end with an error of their own before need a smaller `commit_timeout`.
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

__all__ = ["JaxClient"]


class JaxClient(Coordinator):
    """The coordinator of a jax.distributed job: its processes are those that `jax.distributed.initialize` numbered."""

    def __init__(self, *, devices: Mapping[str, Iterable[int]] | None = None, timeout: float = 600) -> None:
        """Agree with the other processes; see `Coordinator`."""
        self._client = global_state.client
        self._calls = StoreCalls("jax.distributed's coordination service")
        # Not jax.process_index(), which would set up backends.
        super().__init__(global_state.process_id, global_state.num_processes, devices=devices, timeout=timeout)

    @property
    def is_current(self) -> bool:
        """Whether the client that this was made with is still the one."""
        return self._client is global_state.client

    def _set(self, key: str, value: bytes) -> None:
        try:
            self._calls.make(lambda: self._client.key_value_set(key, value.decode("ascii"), allow_overwrite=True))
        except JaxRuntimeError as error:
            raise _gone(error) from error

    def _get(self, key: str) -> bytes | None:
        try:
            value: str = self._calls.make(lambda: self._client.key_value_try_get(key))
        except JaxRuntimeError as error:
            if str(error).startswith("NOT_FOUND"):
                return None
            raise _gone(error) from error
        return value.encode("ascii")


def _gone(error: Exception) -> CoordinationError:
    reason = str(error).partition("\n")[0]
    return CoordinationError(
        f"jax.distributed's coordination service does not answer ({reason}); process 0, which holds it, has ended: start the job "
        f"again, and end it on all processes at the same point."
    )
