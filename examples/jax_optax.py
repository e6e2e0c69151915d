"""JAX and optax: saved on one mesh, resumed on another; 8 virtual devices stand for 8 accelerators.

Interrupt the first command with Ctrl-C, or kill it. The second one goes on from the latest saved
step, on another mesh:

    python examples/jax_optax.py 4x2
    python examples/jax_optax.py 2x4

Needs `pip install 'shardckpt[jax] @ git+https://github.com/shardckpt/shardckpt' optax`.
To begin anew, remove runs/jax_optax.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardckpt

RUN = "runs/jax_optax"  # or gs://bucket/run
STEPS = 100

jax.config.update("jax_num_cpu_devices", 8)  # remove this line where there are 8 accelerators
shape = tuple(int(n) for n in (sys.argv[1] if len(sys.argv) > 1 else "4x2").split("x"))
mesh = Mesh(np.array(jax.devices()).reshape(shape), ("data", "model"))
SPECS = {"up": P("data", "model"), "bias": P("model"), "down": P("model", "data")}
SHAPES = {"up": (64, 2048), "bias": (2048,), "down": (2048, 64)}
optimizer = optax.adamw(optax.cosine_decay_schedule(1e-2, STEPS))


def init(key: jax.Array) -> dict:
    """The state of a new run: parameters, optimizer state, and the key of the random numbers."""
    keys = dict(zip(SHAPES, jax.random.split(key, len(SHAPES)), strict=True))
    params = {
        name: jax.device_put(
            0.05 * jax.random.normal(keys[name], size), NamedSharding(mesh, SPECS[name])
        )
        for name, size in SHAPES.items()
    }
    return {"params": params, "opt_state": optimizer.init(params), "key": key}


def loss_of(params: dict, x: jax.Array) -> jax.Array:
    """Mean squared error of a small network."""
    y = jax.nn.relu(x @ params["up"] + params["bias"]) @ params["down"]
    return jnp.mean((y - jnp.sin(jnp.roll(x, 1, axis=1))) ** 2)


@jax.jit
def train_step(state: dict) -> tuple[dict, jax.Array]:
    """The next state, and the loss."""
    key, drawn = jax.random.split(state["key"])
    x = jax.lax.with_sharding_constraint(
        jax.random.normal(drawn, (1024, 64)), NamedSharding(mesh, P("data"))
    )
    loss, gradients = jax.value_and_grad(loss_of)(state["params"], x)
    updates, opt_state = optimizer.update(gradients, state["opt_state"], state["params"])
    return {
        "params": optax.apply_updates(state["params"], updates),
        "opt_state": opt_state,
        "key": key,
    }, loss


state, first = init(jax.random.key(0)), 1

with shardckpt.CheckpointManager(RUN, every=10, keep=2) as manager:
    # With the shardings that `state` has, so on this mesh; None: nothing was saved yet.
    restored = manager.restore(like=state)
    if restored:
        state, first = restored.state, restored.step + 1
        print(f"resumed from step {restored.step} on a mesh of {dict(mesh.shape)}")
    for step in range(first, STEPS + 1):
        state, loss = train_step(state)
        print(f"step {step} loss {loss:.6f}")
        manager.save(step, state)  # returns when the arrays are copied
