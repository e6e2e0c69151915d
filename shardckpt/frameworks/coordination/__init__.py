"""Coordination of a job's processes: an exchange when it starts, and short messages afterwards.

`base` is the public `Coordinator`, the process that is alone, and the search for the store of the job; `agreement` is how
processes agree through any store of keys and values, and `devices` what they have to say; `torch_store` and `jax_client` are the
stores that a job brings along. `calls` bounds the time for which a store that does not answer is waited for. Nothing here
imports torch or jax unless the program has. The saving and restoring layers import this package; it imports `world` and
`errors` alone.
"""

from shardckpt.frameworks.coordination.base import Coordinator, SingleProcess, check_coordinator
from shardckpt.frameworks.coordination.calls import SilentStoreError

__all__ = ["Coordinator", "SilentStoreError", "SingleProcess", "check_coordinator"]
