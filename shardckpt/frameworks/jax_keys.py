"""Storage of arrays of random keys (`jax.random.key`).

Keys are stored as their words: an array of uint32 that has the generator's key shape as its last
dimensions. The words have the layout of the keys, and their own dimensions are not cut. The
`meaning` in the checkpoint records that the words are keys, and of which generator. Both
conversions run no program and copy nothing.

JAX has no public function for the generator of a ShapeDtypeStruct, so it is read from a private
attribute of the dtype.
"""

from __future__ import annotations

from typing import Any

import jax

from shardckpt.errors import LeafError
from shardckpt.state.names import shown

_MEANING = "jax.key:"
_UNNAMED = "<unnamed>"
"""JAX's name for a generator that was defined without a name."""


def is_keys(leaf: Any) -> bool:
    """Whether the elements of an array, or of its placeholder, are keys.

    Raw keys (`jax.random.PRNGKey`) are numbers.
    """
    return bool(jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def meaning(leaf: Any) -> str | None:
    """Meaning of the stored elements: `jax.key:` and the generator's name; None for numbers."""
    return f"{_MEANING}{leaf.dtype._impl.name}" if is_keys(leaf) else None


def new_keys(means: str, words: tuple[int, ...]) -> Any | None:
    """Placeholder for keys of the generator that a meaning names; None: JAX has no such generator.

    Args:
        means: result of `meaning`.
        words: shape of the stored words.
    """
    generator = means.removeprefix(_MEANING)
    try:
        dtype = jax.eval_shape(lambda: jax.random.key(0, impl=generator)).dtype
    except ValueError:
        return None
    return jax.ShapeDtypeStruct(words[: len(words) - len(key_shape(dtype))], dtype)


def key_shape(dtype: Any) -> tuple[int, ...]:
    """Shape of the words of one key."""
    return tuple(dtype._impl.key_shape)


def words_of(keys: Any) -> Any:
    """The words of an array of keys, in the same memory."""
    return jax.random.key_data(keys)


def keys_of(words: Any, dtype: Any) -> Any:
    """The array of keys with these words, in the same memory."""
    return jax.random.wrap_key_data(words, impl=dtype._impl)


def check_named(name: str, leaf: Any) -> None:
    """Refuse keys of an unnamed generator, which could not be identified in the checkpoint.

    Raises:
        LeafError: the generator has no name; names the leaf.
    """
    if leaf.dtype._impl.name == _UNNAMED:
        raise LeafError(
            f"{shown(name)}: these keys ({leaf.dtype}) come from a generator without a name; "
            "define it with a name, jax.extend.random.define_prng_impl(…, name=…), or store "
            "jax.random.key_data(keys)."
        )
