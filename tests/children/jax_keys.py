"""Does with arrays of random keys on 8 virtual devices what test_jax_keys.py asks. JSON on stdin,
answers on stdout."""

import json
import sys

import jax
import numpy as np
from jax._src.lib import xla_client
from jax._src.sharding_impls import GSPMDSharding
from jax.extend.random import define_prng_impl, threefry_prng_impl
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from jax_arrays import assembled, compiles, error, on_devices, placed
from jax_cases import NAMES, same_bits

import shardckpt
from shardckpt import frameworks
from shardckpt.frameworks.base import Target
from shardckpt.layout.dtypes import by_name

U32 = by_name("uint32")


def sharding_of(case):
    """None for keys that JAX may move."""
    if "text" in case:
        return GSPMDSharding(
            [jax.devices()[i] for i in case["devices"]],
            xla_client.HloSharding.from_string(case["text"]),
        )
    if "device" in case:
        return SingleDeviceSharding(jax.devices()[case["device"]])
    if "mesh" not in case:
        return None
    mesh = Mesh(
        np.array([jax.devices()[i] for i in case["devices"]]).reshape(case["mesh"]),
        NAMES[: len(case["mesh"])],
    )
    spec = PartitionSpec(
        *(tuple(part) if isinstance(part, list) else part for part in case["spec"])
    )
    return NamedSharding(mesh, spec, memory_kind=case.get("memory"))


def keys_of(case):
    """Words, and keys of them that JAX itself has laid out."""
    behind = jax.random.key_data(jax.random.key(0, impl=case["impl"])).shape
    words = np.random.default_rng(len(str(case))).integers(
        0, 1 << 32, (*case["shape"], *behind), np.uint32
    )
    keys = jax.random.wrap_key_data(words, impl=case["impl"])
    sharding = sharding_of(case)
    return words, keys if sharding is None else jax.device_put(keys, sharding)


def round_trip(case):
    words, leaf = keys_of(case)
    struct = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding_of(case))
    before = compiles()
    source = frameworks.source("w", leaf)
    (arrays,) = frameworks.fetch([source])
    restored = {
        way: placed(frameworks.target("w", like, words.shape, U32), words)
        for way, like in (("leaf", leaf), ("struct", struct))
    }
    compiled = compiles() - before
    whole, covered = assembled(source, arrays)
    data = jax.random.key_data(leaf)
    return {
        "stored": [
            source.dtype.name,
            list(source.shape),
            same_bits(whole, words),
            bool((covered == 1).all()),
        ],
        "boxes": [
            len(source.boxes),
            len({str(shard.index) for shard in data.addressable_shards if shard.data.size}),
        ],
        "layout": source.layout is None
        or source.layout.parts(words.ndim)[leaf.ndim :] == (1,) * (words.ndim - leaf.ndim),
        "meanings": [frameworks.meaning(leaf), frameworks.meaning(struct)],
        "restored": {
            way: [
                array.shape == leaf.shape,
                array.dtype == leaf.dtype,
                array.committed == leaf.committed,
                on_devices(array) == on_devices(leaf),
            ]
            for way, array in restored.items()
        },
        "shardings": [array.sharding == leaf.sharding for array in restored.values()],
        "kept on the host": sum(
            a._npy_value is not None
            for a in [data, *(shard.data for shard in data.addressable_shards)]
        ),
        "compiles": compiled,
    }


def numbers(impl):
    """Numbers drawn from a saved key and from the restored one, after both have been split."""
    leaf = jax.random.key(11, impl=impl)
    (arrays,) = frameworks.fetch([frameworks.source("w", leaf)])
    restored = placed(
        frameworks.target("w", jax.eval_shape(lambda: leaf), arrays[0].shape, U32), arrays[0]
    )
    return [jax.random.bits(jax.random.split(key)[1], (3,)).tolist() for key in (leaf, restored)]


def through_storage(root):
    """A state with keys in it, saved, and restored in every way."""
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), NAMES[:2])
    cut, other = (NamedSharding(mesh, PartitionSpec(*spec)) for spec in (("x", "y"), ("y",)))
    keys = jax.device_put(
        jax.random.wrap_key_data(np.arange(128, dtype=np.uint32).reshape(8, 4, 4), impl="rbg"), cut
    )
    state = {"keys": keys, "key": jax.random.key(3), "raw": jax.random.PRNGKey(3), "step": 1}
    before = compiles()
    shardckpt.save(f"{root}/keys", state)
    same = shardckpt.restore(f"{root}/keys", state)
    moved = shardckpt.restore(
        f"{root}/keys",
        {**state, "keys": jax.ShapeDtypeStruct(keys.shape, keys.dtype, sharding=other)},
    )
    words = shardckpt.restore(f"{root}/keys", {**state, "keys": Target(other)})
    plain = shardckpt.restore(f"{root}/keys")
    compiled = compiles() - before
    data = np.asarray(jax.random.key_data(keys))
    swapped = {
        "another generator": {
            **state,
            "keys": jax.ShapeDtypeStruct(keys.shape, jax.random.key(0, impl="unsafe_rbg").dtype),
        },
        "numbers": {**state, "keys": jax.random.key_data(keys)},
        "keys for numbers": {**state, "raw": state["key"]},
    }
    return {
        "same": [
            on_devices(same[name]) == on_devices(state[name])
            and same[name].dtype == state[name].dtype
            for name in ("keys", "key", "raw")
        ],
        "moved": moved["keys"].dtype == keys.dtype
        and on_devices(moved["keys"]) == on_devices(jax.device_put(keys, other)),
        "words": same_bits(words["keys"], data)
        and words["keys"].sharding.is_equivalent_to(other, 3),
        "plain": [
            same_bits(plain["keys"], data),
            same_bits(plain["key"], jax.random.key_data(state["key"])),
            same_bits(plain["raw"], state["raw"]),
        ],
        "numpy": [type(plain[name]).__name__ for name in ("keys", "key", "raw")],
        "compiles": compiled,
        "refused": {
            what: error(shardckpt.restore, f"{root}/keys", like) for what, like in swapped.items()
        },
    }


def leaves(_):
    mine = define_prng_impl(
        key_shape=(3,),
        **dict.fromkeys(("seed", "split", "random_bits", "fold_in")),
        name="mine",
        tag="m",
    )
    nameless = define_prng_impl(
        key_shape=threefry_prng_impl.key_shape,
        **{
            verb: getattr(threefry_prng_impl, verb)
            for verb in ("seed", "split", "random_bits", "fold_in")
        },
    )
    own = jax.random.wrap_key_data(np.arange(6, dtype=np.uint32).reshape(2, 3), impl=mine)
    unnamed = jax.random.key(0, impl=nameless)
    gone = jax.random.key(0)
    gone.delete()
    key = jax.random.key(0)
    traced = []
    jax.jit(lambda k: traced.append(error(frameworks.source, "w", k)) or k)(key)
    with jax.debug_key_reuse(True):
        used = jax.random.key(5)
        frameworks.fetch([frameworks.source("w", used)])
        drawn = float(jax.random.uniform(used)) == float(jax.random.uniform(jax.random.key(5)))

    def tie(leaf):
        return frameworks.target("w", leaf, (2,), U32).tie_key

    struct, words = jax.ShapeDtypeStruct((), key.dtype), jax.ShapeDtypeStruct((2,), np.uint32)
    restored = placed(
        frameworks.target("w", own, (2, 3), U32), np.arange(6, dtype=np.uint32).reshape(2, 3)
    )
    return {
        "meanings": [
            frameworks.meaning(leaf)
            for leaf in (own, jax.random.PRNGKey(0), np.zeros(2, np.uint32), struct, words)
        ],
        "own": on_devices(restored) == on_devices(own) and restored.dtype == own.dtype,
        "unnamed": [
            error(frameworks.source, "w", unnamed),
            error(frameworks.target, "w", unnamed, (2,), U32),
        ],
        "deleted": error(frameworks.source, "w", gone),
        "traced": traced[0],
        "saved and used": drawn,
        "identity": [
            frameworks.identity(key) == frameworks.identity(key),
            frameworks.identity(key) == frameworks.identity(own),
        ],
        "ties": [
            tie(struct) == tie(jax.ShapeDtypeStruct((), key.dtype)),
            tie(struct) == tie(words),
        ],
    }


def main():
    questions = json.load(sys.stdin)
    verbs = (round_trip, numbers, leaves, through_storage)
    sys.stdout.write(
        "\n"
        + json.dumps(
            {verb.__name__: [verb(case) for case in questions[verb.__name__]] for verb in verbs}
        )
        + "\n"
    )


main()
