"""numpy's part in the end-to-end matrix: one process, whole arrays, laid out on paper when
saved."""

import numpy as np
from e2e_state import TENSORS, begin, compare, differing, expected, layout, rng_of, sharding, state

import shardckpt
from shardckpt import SaveOptions


def save(coordinator, places, seed):
    begin()
    names = [name for name in TENSORS if name.startswith("model")]
    layouts = {}
    for kind, (url, options) in places.items():
        layouts[kind] = {
            name: layout(rng_of("numpy saves", kind, seed, name), TENSORS[name][0], 8, smaller=True)
            for name in names
        }
        on_paper = {name: sharding(case) for name, case in layouts[kind].items()}
        whole = state(expected, expected, 0)
        shardckpt.save(
            url, whole, options=SaveOptions(shardings=on_paper, **options), coordinator=coordinator
        )
    return layouts


FLIPPED = [
    "model/embed",
    "model/layers/0/uneven",
    "model/layers/1/fp8",
    "model/mask uneven",
    "model/table",
    "host/large",
]


def save_flipped(coordinator, url):
    """A bit of the last element of some tensors is another one, and a small leaf is 0 instead of
    False."""
    begin()

    def flipped(name):
        array = expected(name).copy()
        if name in FLIPPED:
            array.reshape(-1).view(np.uint8)[-1] ^= 1
        return array

    shardckpt.save(url, state(flipped, flipped, 0) | {"done": 0}, coordinator=coordinator)
    return [*FLIPPED, "('done',)"]


def restore(coordinator, places, _seed):
    """Into arrays in place, and with no `like`."""
    begin()
    outcomes = {}
    for saver, (url, processes) in places.items():
        like = state(
            lambda name: np.zeros_like(expected(name)),
            lambda name: np.ones_like(expected(name)),
            0,
            rest=False,
        )
        restored = shardckpt.restore(url, like, coordinator=coordinator)
        unlike = differing(url, restored, coordinator)
        outcomes[saver] = compare(restored, processes, shards) | {"layouts": {}}
        outcomes[saver]["wrong"] += unlike
        if restored["model"]["embed"] is not like["model"]["embed"]:
            outcomes[saver]["wrong"].append("not in place")
        bare = shardckpt.restore(url, coordinator=coordinator)
        bare["loader"] = restored["loader"]
        outcomes[saver]["wrong"] += compare(bare, processes, shards)["wrong"]
        outcomes[saver]["wrong"] += map(str, shardckpt.open(url).verify().damage)
    return outcomes


def shards(name, leaf):
    return [(expected(name), leaf)]
