"""Abstract states of Flax NNX and Equinox under `jax.set_mesh`: a restore takes the devices of the
mesh that is set."""

import json
import os
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P
from paths import CHILDREN

import shardckpt
from shardckpt import errors


def train(library, sides, root, first, last):
    env = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
    }
    command = [
        sys.executable,
        CHILDREN / "jax_abstract.py",
        library,
        sides,
        root,
        str(first),
        str(last),
    ]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("library", ["nnx", "equinox"])
def test_losses_are_equal_after_a_resume_from_an_abstract_state(tmp_path, library):
    straight = train(library, "4x2", tmp_path / "straight", 1, 4)
    assert train(library, "4x2", tmp_path / "stopped", 1, 2) == straight[:2]
    shutil.copytree(tmp_path / "stopped", tmp_path / "other mesh")
    assert train(library, "4x2", tmp_path / "stopped", 3, 4) == straight[2:]
    assert train(library, "2x4", tmp_path / "other mesh", 3, 4) == pytest.approx(
        straight[2:], rel=1e-6
    )


@pytest.fixture
def saved(tmp_path):
    shardckpt.save(tmp_path / "c", {"w": jnp.arange(8.0), "k": jax.random.key(3)})
    return tmp_path / "c"


def abstract(axes):
    sharding = NamedSharding(AbstractMesh(tuple(axes.values()), tuple(axes)), P(next(iter(axes))))
    keys = NamedSharding(sharding.mesh, P())
    key = jax.random.key(0)
    return {
        "w": jax.ShapeDtypeStruct((8,), jnp.float32, sharding=sharding),
        "k": jax.ShapeDtypeStruct((), key.dtype, sharding=keys),
    }


def test_an_abstract_mesh_gets_the_devices_of_the_mesh_that_is_set(saved):
    mesh = jax.make_mesh((1,), ("x",))
    with jax.set_mesh(mesh):
        state = shardckpt.restore(saved, abstract({"x": 1}))
        assert (
            shardckpt.restore(
                saved, {"w": shardckpt.Target(abstract({"x": 1})["w"].sharding)}, only="w"
            )["w"].sharding.mesh
            == mesh
        )
    assert state["w"].sharding == NamedSharding(mesh, P("x"))
    assert state["w"].tolist() == [*range(8)]
    assert state["k"].sharding.mesh == mesh
    assert (
        jax.random.key_data(state["k"]).tolist() == jax.random.key_data(jax.random.key(3)).tolist()
    )


def test_without_a_mesh_that_is_set_the_error_says_to_set_one(saved):
    with pytest.raises(
        errors.ShardingError,
        match=r"'(w|k)': .*names no devices; restore within `with jax\.set_mesh\(mesh\)`",
    ):
        shardckpt.restore(saved, abstract({"x": 1}))


@pytest.mark.parametrize("axes", [{"y": 1}, {"x": 2}, {"x": 1, "y": 1}])
def test_a_mesh_with_other_axes_is_refused(saved, axes):
    with (
        jax.set_mesh(jax.make_mesh((1,), ("x",))),
        pytest.raises(errors.ShardingError, match=r"the mesh of jax\.set_mesh has \{'x': 1\}"),
    ):
        shardckpt.restore(saved, abstract(axes))
