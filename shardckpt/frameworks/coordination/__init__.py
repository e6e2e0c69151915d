"""What the processes of a job tell each other: once, when it starts, and then only in passing.

`base` is the public `Coordinator`; `agreement` is how processes agree through any store of keys and values, and
`devices` what they have to say; `torch_store`, `jax_client` and `single` are the stores that a job brings along, and
`detection` finds the one at hand. `calls` bounds the time for which a store that does not answer is waited for. Nothing here
imports torch or jax unless the program has. The saving and restoring layers import this package; it imports `world` and
`errors` alone.
"""

from shardckpt.frameworks.coordination.base import Coordinator, check_coordinator
from shardckpt.frameworks.coordination.calls import SilentStoreError
from shardckpt.frameworks.coordination.single import SingleProcess

__all__ = ["Coordinator", "SilentStoreError", "SingleProcess", "check_coordinator"]
