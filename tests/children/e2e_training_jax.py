"""A small transformer, trained by Adam in JAX over a (fsdp, tp) mesh of all processes' devices;
saved, killed, resumed.

Everything about a step follows from its number, the global batch and the key, so that runs on any
mesh are one run.
"""

import hashlib
import json
import os
import signal
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from e2e_jax import join, leave
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import shardckpt

VOCABULARY, LENGTH, BATCH = 60, 8, 12
"""The batch is for all processes together."""
WIDTH, HEADS, HIDDEN = 24, 4, 48
SHAPES = {
    "embed": ((VOCABULARY, WIDTH), PartitionSpec("tp", "fsdp")),
    "qkv": ((3, WIDTH, WIDTH), PartitionSpec(None, "fsdp", "tp")),
    "out": ((WIDTH, WIDTH), PartitionSpec("tp", "fsdp")),
    "up": ((WIDTH, HIDDEN), PartitionSpec("fsdp", "tp")),
    "down": ((HIDDEN, WIDTH), PartitionSpec("tp", "fsdp")),
    "norm": ((2, WIDTH), PartitionSpec()),
    "head": ((WIDTH, VOCABULARY), PartitionSpec("fsdp", "tp")),
}


def forward(w, key, tokens):
    def normed(x, scale):
        return x * scale / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5)

    x = w["embed"][tokens]
    q, k, v = jnp.einsum("bti,nij->nbtj", normed(x, w["norm"][0]), w["qkv"]).reshape(
        3, BATCH, LENGTH, HEADS, -1
    )
    x = x + jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape) @ w["out"]
    hidden = jax.nn.relu(normed(x, w["norm"][1]) @ w["up"])
    hidden = jnp.where(jax.random.bernoulli(key, 0.9, hidden.shape), hidden, 0)
    return (x + hidden @ w["down"]) @ w["head"]


def loss_of(w, key, tokens):
    chances = jax.nn.log_softmax(forward(w, key, tokens[:, :-1]))
    return -jnp.take_along_axis(chances, tokens[:, 1:, None], -1).mean()


def update(state, tokens):
    """A step of Adam: the new state, and the loss."""
    key, dropout = jax.random.split(state["key"])
    loss, grads = jax.value_and_grad(loss_of)(state["model"], dropout, tokens)
    count = state["count"] + 1
    m = jax.tree.map(lambda a, g: 0.9 * a + 0.1 * g, state["m"], grads)
    v = jax.tree.map(lambda a, g: 0.99 * a + 0.01 * g * g, state["v"], grads)
    rate = 0.01 * jnp.sqrt(1 - 0.99**count) / (1 - 0.9**count)
    model = jax.tree.map(lambda w, a, b: w - rate * a / (jnp.sqrt(b) + 1e-8), state["model"], m, v)
    return {"model": model, "m": m, "v": v, "count": count, "key": key}, loss


class Run:
    """A training: the state on its devices, and the step reached."""

    def __init__(self, shape):
        self.mesh = Mesh(
            np.array(sorted(jax.devices(), key=lambda device: device.id)).reshape(shape),
            ("fsdp", "tp"),
        )
        rng = np.random.default_rng(0)
        self.state = {
            "model": {
                n: self.placed(rng.normal(0, 0.2, shape).astype(np.float32), spec)
                for n, (shape, spec) in SHAPES.items()
            },
            "m": {
                n: self.placed(np.zeros(shape, np.float32), spec)
                for n, (shape, spec) in SHAPES.items()
            },
            "v": {
                n: self.placed(np.zeros(shape, np.float32), spec)
                for n, (shape, spec) in SHAPES.items()
            },
            "count": self.placed(np.zeros((), np.int32), PartitionSpec()),
            "key": jax.jit(
                lambda: jax.random.key(7), out_shardings=NamedSharding(self.mesh, PartitionSpec())
            )(),
        }
        self.step = 0
        kept = jax.tree.map(lambda leaf: leaf.sharding, self.state)
        self.update = jax.jit(update, out_shardings=(kept, None), donate_argnums=0)

    def placed(self, whole, spec):
        return jax.make_array_from_callback(
            whole.shape, NamedSharding(self.mesh, spec), lambda index: whole[index]
        )

    def train(self):
        first, stride = np.random.default_rng(1000 + self.step).integers(
            1, VOCABULARY, (2, BATCH, 1)
        )
        tokens = (first + stride % 3 * np.arange(LENGTH + 1)) % VOCABULARY
        self.state, loss = self.update(
            self.state, self.placed(tokens.astype(np.int32), PartitionSpec("fsdp"))
        )
        self.step += 1
        return float(loss)

    def restore(self, url):
        """With nothing but shapes and shardings to say where to."""
        like = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding),
            self.state,
        )
        restored = shardckpt.restore(url, {"state": like, "step": 0})
        self.state, self.step = restored["state"], restored["step"]

    def digests(self):
        """Of all elements of every tensor."""
        state = {**self.state, "key": jax.random.key_data(self.state["key"])}
        everywhere = jax.jit(
            lambda tree: tree, out_shardings=NamedSharding(self.mesh, PartitionSpec())
        )(state)
        leaves = {
            jax.tree_util.keystr(path): np.asarray(leaf)
            for path, leaf in jax.tree.leaves_with_path(everywhere)
        }
        return {name: hashlib.sha256(array.tobytes()).hexdigest() for name, array in leaves.items()}


def train(coordinator, shape, steps, options):
    """Train up to a step; the arguments are those of `e2e_training.train`, without `only`."""
    save, restore, kill = map(options.get, ("save", "restore", "kill"))
    join(coordinator)
    run = Run(shape)
    digests = None
    if restore is not None:
        run.restore(restore)
        digests = run.digests()
    losses = []
    while run.step < steps:
        if run.step + 1 == kill:
            os.kill(os.getpid(), signal.SIGKILL)
        losses.append(run.train())
        if save is not None and run.step == save[0]:
            truth = run.digests()
            if jax.process_index() == 0:
                Path(f"{save[1]}.json").write_text(json.dumps(truth))
            shardckpt.save(save[1], {"state": run.state, "step": run.step})
    leave()
    return {"losses": losses, "digests": digests}
