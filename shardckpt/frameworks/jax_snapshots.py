"""Copies of shards of JAX arrays on their own devices; see `snapshots`.

Unlike the rest of the adapter it compiles programs: three small ones for each shape of a shard and,
of the last, for each power of two of changed words.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from shardckpt.errors import BudgetError
from shardckpt.frameworks.snapshots import WORD, ChangedWords

if TYPE_CHECKING:
    from shardckpt.layout.dtypes import DType


_MOST_POSITIONS = 1 << 31
"""A shard of so many words is sent completely: positions have 31 bits in JAX, unless the program
allows 64."""


class JaxSnapshot:
    """See `snapshots.Snapshot`; `elements` is an array on one device."""

    def __init__(self) -> None:
        """Have no copy yet."""
        self._words: Any = None

    def take(self, elements: Any, dtype: DType) -> ChangedWords:
        """See `snapshots.Snapshot`.

        Raises:
            BudgetError: the device has no memory for the copy.
        """
        try:
            return self._take(elements, dtype)
        except jax.errors.JaxRuntimeError as e:
            if "RESOURCE_EXHAUSTED" not in str(e):
                raise
            raise BudgetError(
                f"A device has no memory left for a second copy of the weights ({e}); use "
                'Publisher(snapshot="host").'
            ) from e

    def _take(self, elements: Any, dtype: DType) -> ChangedWords:
        words = _words(elements, dtype.numpy, WORD[dtype.itemsize])
        old, self._words = self._words, words
        if old is None or old.shape != words.shape or len(words) >= _MOST_POSITIONS:
            return ChangedWords(None, _on_host(words), int(jax.device_get(_sum(words))))
        count, total = map(int, jax.device_get(_compare(words, old)))
        if count > len(words) // 4:
            return ChangedWords(None, _on_host(words), total)
        positions, values = jax.device_get(
            _differing(words, old, size=1 << max(0, count - 1).bit_length())
        )
        return ChangedWords(positions[:count], values[:count], total)


def _on_host(words: Any) -> Any:
    copy = jax.device_get(words)
    return copy if copy.flags.owndata and copy.flags.writeable else np.array(copy)


@partial(jax.jit, static_argnames=("dtype", "word"))
def _words(elements: Any, dtype: Any, word: Any) -> Any:
    cast = elements.astype(dtype)
    if cast.dtype == jnp.bool_:
        return jnp.copy(cast.astype(jnp.uint8)).reshape(-1)
    # A copy: what is jitted may return its argument itself, which the program may donate later.
    return jnp.copy(jax.lax.bitcast_convert_type(cast, word).reshape(-1))


@partial(jax.jit)
def _sum(words: Any) -> Any:
    weights = jax.lax.iota(jnp.uint32, len(words)) * jnp.uint32(2) + jnp.uint32(1)
    return jnp.sum(words.astype(jnp.uint32) * weights, dtype=jnp.uint32)


@partial(jax.jit)
def _compare(words: Any, old: Any) -> tuple[Any, Any]:
    return jnp.sum(words != old, dtype=jnp.uint32), _sum(words)


@partial(jax.jit, static_argnames="size")
def _differing(words: Any, old: Any, size: int) -> tuple[Any, Any]:
    (at,) = jnp.nonzero(words != old, size=size, fill_value=0)
    return at, words[at]


make = JaxSnapshot
