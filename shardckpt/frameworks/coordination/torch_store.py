"""Coordinator on the store that torch.distributed was set up with, for any backend.

Torch_xla's rendezvous has such a store, too.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from shardckpt.errors import CoordinationError
from shardckpt.frameworks.coordination.base import Coordinator
from shardckpt.frameworks.coordination.calls import StoreCalls
from shardckpt.frameworks.coordination.executing import until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

T = TypeVar("T")


class TorchStore(Coordinator):
    """The coordinator of a torch.distributed job.

    The processes of the job are the ranks of the default group.
    """

    def __init__(
        self, *, devices: Mapping[str, Iterable[int]] | None = None, timeout: float = 600
    ) -> None:
        """Agree with the other ranks; see `Coordinator`."""
        # Neither the group nor its store is kept alive: both end when the program destroys the
        # group.
        self._group = weakref.ref(dist.group.WORLD)
        self._calls = StoreCalls("torch.distributed's store")
        store = _get_default_store()
        self._store = until(timeout, lambda: self._calls.make(lambda: _own_connection(store)))
        super().__init__(dist.get_rank(), dist.get_world_size(), devices=devices, timeout=timeout)

    @property
    def is_current(self) -> bool:
        """Whether the process group that this coordinator was made in is still the default."""
        group = self._group()
        return group is not None and group is dist.group.WORLD

    def _set(self, key: str, value: bytes) -> None:
        self._ask(lambda store: store.set(key, value.decode("ascii")))

    def _get(self, key: str) -> bytes | None:
        # `get` waits for a missing key, up to the group's timeout; `check` does not, and shardckpt
        # never deletes its keys.
        return self._ask(lambda store: bytes(store.get(key)) if store.check([key]) else None)

    def _ask(self, question: Callable[[Any], T]) -> T:
        store = self._store()
        if store is None:
            raise CoordinationError(
                "the torch.distributed process group of this run was destroyed; call "
                "Coordinator.current() again."
            )
        try:
            return self._calls.make(lambda: question(store))
        except RuntimeError as error:  # torch's DistError is a RuntimeError
            reason = str(error).partition("\n")[0]
            raise CoordinationError(
                f"torch.distributed's store does not answer ({reason}); the process that holds it "
                "has ended, or was never there: start the job again, and end it on all processes "
                "at the same point."
            ) from error


def _own_connection(store: Any) -> Callable[[], Any]:
    """Getter of a separate client of the store, or of the store itself as long as it lives.

    A client does one operation at a time: through the program's own client, our operation would
    wait behind a blocking one of another thread. Unlike the store itself on process 0, a separate
    client keeps no server alive; a server that outlives its group answers the next group at the
    same address with addresses of dead processes.
    """
    try:
        client = store.clone()
    except (AttributeError, RuntimeError, NotImplementedError):
        # Older torch, or a store written in Python.
        return weakref.ref(store)
    return lambda: client
