"""Storing arrays of random keys (`jax.random.key`).

Its words: an array of uint32 with the generator's key shape behind the dimensions of the keys. It is laid out as the
keys are, and what is behind them is whole on every device. That the words are keys, and of which generator, is their
`meaning`, which the checkpoint keeps beside them. Neither way runs anything or copies anything.

Of a ShapeDtypeStruct public JAX does not tell the generator, so it is taken from where the dtype has it.
"""

from __future__ import annotations

from typing import Any

import jax

from shardckpt.errors import LeafError
from shardckpt.state.names import shown

__all__ = ["check_named", "is_keys", "key_shape", "keys_of", "meaning", "words_of"]

_UNNAMED = "<unnamed>"
"""What JAX calls a generator that somebody defined without a name."""


def is_keys(leaf: Any) -> bool:
    """Whether an array, or what stands for one, has keys for elements. Raw keys (`jax.random.PRNGKey`) are numbers."""
    return bool(jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def meaning(leaf: Any) -> str | None:
    """What the stored elements stand for: `jax.key:` and the generator's name; None for those that are just numbers."""
    return f"jax.key:{leaf.dtype._impl.name}" if is_keys(leaf) else None


def key_shape(dtype: Any) -> tuple[int, ...]:
    """The shape of one key's words."""
    return tuple(dtype._impl.key_shape)


def words_of(keys: Any) -> Any:
    """The words of an array of keys: the same memory."""
    return jax.random.key_data(keys)


def keys_of(words: Any, dtype: Any) -> Any:
    """The array of keys with these words: the same memory."""
    return jax.random.wrap_key_data(words, impl=dtype._impl)


def check_named(name: str, leaf: Any) -> None:
    """Refuse keys of a generator that no name tells from others.

    Raises:
        LeafError: naming the leaf.
    """
    if leaf.dtype._impl.name == _UNNAMED:
        raise LeafError(
            f"{shown(name)}: these keys ({leaf.dtype}) are of a generator without a name; define it with one, "
            f"jax.extend.random.define_prng_impl(…, name=…), or store jax.random.key_data(keys)."
        )
