"""A training with optax on 8 virtual devices, with Orbax's managers or shardckpt's in their place;
answers as JSON.

Arguments: "orbax" or "shardckpt", "v0" or "v1", directory, shape of the mesh, last step, the step
at which the process is killed.
"""

import json
import os
import signal
import sys
import warnings

os.environ |= {
    "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
    "JAX_PLATFORMS": "cpu",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}
warnings.simplefilter("ignore")
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from orbax.checkpoint import v1

from shardckpt.training.integrations import orbax as ours

who, api, directory, shape, steps, dies_at = sys.argv[1:7]
shape, steps, dies_at = json.loads(shape), int(steps), int(dies_at)
mesh = Mesh(np.array(jax.devices()[: np.prod(shape)]).reshape(shape), ("data", "model"))
rule = optax.adam(1e-1)
target = np.linspace(-1, 1, 64 * 16, dtype=np.float32).reshape(64, 16)


def fresh():
    """Weights, moments, and a key; every update is elementwise, so that losses have the same bits
    on any mesh."""
    params = {"w": jnp.zeros((64, 16)), "b": jnp.ones(8)}
    state = {"params": params, "opt": rule.init(params), "key": jax.random.key(3)}
    specs = jax.tree.map(
        lambda x: PartitionSpec("data", "model") if x.ndim == 2 else PartitionSpec(), state
    )
    return jax.tree.map(lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), state, specs)


@jax.jit
def update(state):
    key, noise = jax.random.split(state["key"])
    gradients = {
        "w": state["params"]["w"] - target + 0.1 * jax.random.normal(noise, (64, 16)),
        "b": state["params"]["b"],
    }
    changes, opt = rule.update(gradients, state["opt"])
    return {"params": optax.apply_updates(state["params"], changes), "opt": opt, "key": key}


def loss(state):
    return float(np.square(np.asarray(state["params"]["w"]) - target).sum())


def abstract(state):
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )


losses, state = {}, fresh()


def trained(state, first, save):
    for step in range(first, steps + 1):
        state = update(state)
        losses[step] = loss(state)
        save(step, state)
        if step == dies_at:
            manager.wait() if api == "v1" else manager.wait_until_finished()
            os.kill(os.getpid(), signal.SIGKILL)
    return state


if api == "v1":
    training = v1.training
    kind = training.Checkpointer if who == "orbax" else ours.OrbaxCheckpointer
    with kind(
        directory,
        save_decision_policy=training.save_decision_policies.FixedIntervalPolicy(3),
        preservation_policy=training.preservation_policies.LatestN(2),
    ) as manager:
        first = 1
        if manager.latest is not None:
            state = manager.load(manager.latest, abstract_state=abstract(state))
            first = manager.latest.step + 1

        def save(step, state):
            if step % 2:
                manager.save(step, state)
            else:
                manager.save_async(step, state)

        state = trained(state, first, save)
        manager.wait()
        kept = [one.step for one in manager.checkpoints]
else:
    kind = ocp.CheckpointManager if who == "orbax" else ours.OrbaxCheckpointManager
    with kind(
        directory, options=ocp.CheckpointManagerOptions(save_interval_steps=3, max_to_keep=2)
    ) as manager:
        first = 1
        if (latest := manager.latest_step()) is not None:
            restored = manager.restore(
                latest,
                args=ocp.args.Composite(
                    state=ocp.args.StandardRestore(abstract(state)), note=ocp.args.JsonRestore()
                ),
            )
            assert restored["note"] == {"step": latest, "words": ["a"]}
            state = restored.state
            first = latest + 1
        state = trained(
            state,
            first,
            lambda step, state: manager.save(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.StandardSave(state),
                    note=ocp.args.JsonSave({"step": step, "words": ["a"]}),
                ),
                metrics={"loss": losses[step]},
            ),
        )
        manager.wait_until_finished()
        kept = list(manager.all_steps())
sharded = len({str(shard.index) for shard in state["params"]["w"].addressable_shards})
print(json.dumps({"losses": losses, "first": first, "kept": kept, "shards": sharded}))
