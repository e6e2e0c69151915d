"""Trains with Flax NNX or Equinox on a mesh of 8 virtual devices, resumed from an abstract state
under `jax.set_mesh`.

Called with a library, the mesh's sides, a run, and the first and the last step. Prints the losses
as JSON.
"""

import json
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import shardckpt

LIBRARY, SIDES, ROOT, FIRST, LAST = sys.argv[1:]


class Model(nnx.Module):
    def __init__(self, rngs):
        split = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "model"))
        self.up = nnx.Linear(16, 32, kernel_init=split, rngs=rngs)
        self.noise = nnx.Dropout(0.2, rngs=rngs)
        self.down = nnx.Linear(32, 16, rngs=rngs)

    def __call__(self, x):
        return self.down(self.noise(nnx.relu(self.up(x))))


def nnx_parts():
    model = Model(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)


@nnx.jit
def nnx_step(model, optimizer, x):
    loss, gradients = nnx.value_and_grad(lambda model: jnp.mean((model(x) - x) ** 2))(model)
    optimizer.update(model, gradients)
    return loss


def train_nnx(mgr, steps):
    parts = nnx.eval_shape(nnx_parts) if steps.start > 1 else nnx_parts()
    if steps.start > 1:
        nnx.update(parts, mgr.restore(nnx.state(parts)).state)
    model, optimizer = parts
    for step in steps:
        yield nnx_step(model, optimizer, batch(step))
        mgr.save(step, nnx.state(parts))
    check(model.up.kernel[...], P(None, "model"))
    check(optimizer.opt_state[0].mu["up"]["kernel"][...], P(None, "model"))


OPTIMIZER = optax.adamw(1e-2)


def equinox_parts():
    model = eqx.nn.MLP(16, 16, 32, 2, key=jax.random.key(0))
    params, static = eqx.partition(model, eqx.is_array)
    params = jax.tree.map(lambda a: jax.sharding.reshard(a, P("model")), params)
    return eqx.combine(params, static), OPTIMIZER.init(params)


@eqx.filter_jit
def equinox_step(model, state, x):
    def loss(model):
        params, static = eqx.partition(model, eqx.is_array)
        gathered = eqx.combine(jax.tree.map(lambda a: jax.sharding.reshard(a, P()), params), static)
        return jnp.mean((jax.vmap(gathered)(x) - x) ** 2)

    value, gradients = eqx.filter_value_and_grad(loss)(model)
    updates, state = OPTIMIZER.update(gradients, state, eqx.filter(model, eqx.is_array))
    return value, eqx.apply_updates(model, updates), state


def train_equinox(mgr, steps):
    model, state = eqx.filter_eval_shape(equinox_parts) if steps.start > 1 else equinox_parts()
    arrays, static = eqx.partition(
        model, lambda leaf: isinstance(leaf, jax.Array | jax.ShapeDtypeStruct)
    )
    if steps.start > 1:
        arrays, state = mgr.restore((arrays, state)).state
    model = eqx.combine(arrays, static)
    for step in steps:
        loss, model, state = equinox_step(model, state, batch(step))
        yield loss
        mgr.save(step, (eqx.filter(model, eqx.is_array), state))
    check(model.layers[0].weight, P("model", None))
    check(state[0].mu.layers[0].weight, P("model", None))


def batch(step):
    return jax.random.normal(jax.random.key(step), (8, 16))


def check(array, spec):
    expected = jax.sharding.NamedSharding(jax.sharding.get_mesh(), spec)
    assert array.sharding.is_equivalent_to(expected, array.ndim), (array.sharding, expected)


def main():
    sides = tuple(map(int, SIDES.split("x")))
    axes, train = {
        "nnx": (AxisType.Auto, train_nnx),
        "equinox": (AxisType.Explicit, train_equinox),
    }[LIBRARY]
    with (
        jax.set_mesh(jax.make_mesh(sides, ("data", "model"), axis_types=(axes, axes))),
        shardckpt.CheckpointManager(ROOT, every=1) as mgr,
    ):
        losses = list(train(mgr, range(int(FIRST), int(LAST) + 1)))
    sys.stdout.write(json.dumps([float(loss) for loss in losses]) + "\n")


main()
