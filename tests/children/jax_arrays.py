"""Helpers for arrays in the children: count JAX's compilations, lend buffers, look at devices."""

from math import prod

import jax
import numpy as np

from shardckpt.errors import ShardckptError

compiled = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, _seconds, **_: compiled.append(event)
)


def compiles():
    return sum("compile" in event for event in compiled)


def assembled(source, arrays):
    """The whole array out of a source's boxes, and how often each element was covered."""
    whole = np.zeros(source.shape, source.dtype.numpy)
    covered = np.zeros(source.shape, int)
    for i, array in enumerate(arrays):
        whole[source.boxes[i].slices] = array
        covered[source.boxes[i].slices] += 1
    return whole, covered


def filled(sink, array):
    """Buffers as a caller lends them, aligned so that JAX could use them as they are."""
    buffers = []
    for i, shape in enumerate(sink.buffer_shapes):
        size = prod(shape) * sink.dtype.itemsize
        memory = np.empty(size + 64, np.uint8)
        memory = memory[-memory.ctypes.data % 64 :][:size]
        buffer = memory.view(sink.dtype.numpy).reshape(shape)
        buffer[...] = array[sink.boxes[i].slices]
        buffers.append(buffer)
    return buffers


def placed(sink, array):
    buffers = filled(sink, array)
    restored = sink.place(buffers)
    for buffer in buffers if not sink.adopts else ():
        buffer.reshape(-1).view(np.uint8)[...] = 1  # the buffers are ours again
    return restored


def on_devices(array):
    """Id, index and bits of the shard on every device; for keys the bits of their words."""
    array = (
        jax.random.key_data(array)
        if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key)
        else array
    )
    return [
        (
            s.device.id,
            [list(i.indices(n)[:2]) for i, n in zip(s.index, array.shape, strict=True)],
            np.asarray(s.data).tobytes(),
        )
        for s in sorted(array.addressable_shards, key=lambda s: s.device.id)
    ]


def error(function, *args):
    try:
        function(*args)
    except ShardckptError as e:
        return [type(e).__name__, str(e)]
    return None
