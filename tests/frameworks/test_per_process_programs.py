"""Values that every process owns by itself, in programs of their own: with JAX or without, without
torch, with DTensors."""

import json
import os
import socket
import subprocess
import sys

import pytest
import torch

from shardckpt.frameworks.per_process import encode_value


def run(code, *, given="", **environment):
    done = subprocess.run(
        [
            sys.executable,
            "-W",
            "error",
            "-c",
            "import json, sys\n"
            "from shardckpt.frameworks.per_process import decode_value, encode_value\n" + code,
        ],
        input=given,
        capture_output=True,
        text=True,
        timeout=250,
        env={**os.environ, "JAX_PLATFORMS": "cpu", **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def of_jax():
    """Encoded by a process with JAX: an array over two devices, one that is on none in particular,
    and keys."""
    return run(
        """
import jax, numpy as np
from jax import numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
sharding = NamedSharding(jax.make_mesh((2,), ("x",)), PartitionSpec("x"))
state = {
    "sharded": jax.device_put(jnp.arange(4.0), sharding),
    "bf16": jnp.ones((2, 1), "bfloat16"),
    "empty": jnp.zeros((0, 2)),
    "key": jax.random.key(3),
    "keys": jax.random.split(jax.random.key(1, impl="rbg"), 3),
    "numpy": np.arange(2),
}
print(json.dumps(encode_value(state, "rng"), allow_nan=False))
""",
        XLA_FLAGS="--xla_force_host_platform_device_count=2",
    )


@pytest.mark.long
def test_arrays_and_keys_of_jax_come_back_as_such_where_jax_is_imported(of_jax):
    output = run(
        """
import jax, numpy as np
back = decode_value(json.load(sys.stdin), "rng")
names = ("sharded", "bf16", "empty", "key", "keys")
assert all(isinstance(back[name], jax.Array) for name in names)
assert type(back["numpy"]) is np.ndarray
assert np.asarray(back["sharded"]).tolist() == [0, 1, 2, 3]
assert back["bf16"].dtype == "bfloat16" and back["empty"].shape == (0, 2)
assert jax.random.uniform(back["key"]) == jax.random.uniform(jax.random.key(3))
assert back["keys"].dtype == jax.random.key(0, impl="rbg").dtype and back["keys"].shape == (3,)
print("fine")
""",
        given=of_jax,
    )
    assert output == "fine\n"


def test_arrays_of_jax_come_back_as_numpys_where_it_is_not(of_jax):
    output = run(
        """
back = decode_value(json.load(sys.stdin), "rng")
assert "jax" not in sys.modules and "torch" not in sys.modules
print([(type(leaf).__name__, str(leaf.dtype), leaf.shape) for leaf in back.values()])
""",
        given=of_jax,
    )
    assert output.strip() == str(
        [
            ("ndarray", "float32", (4,)),
            ("ndarray", "bfloat16", (2, 1)),
            ("ndarray", "float32", (0, 2)),
            ("ndarray", "uint32", (2,)),
            ("ndarray", "uint32", (3, 4)),
            ("ndarray", "int64", (2,)),
        ]
    )


def test_jax_that_would_make_less_of_an_array_or_lacks_a_generator_refuses():
    lines = run(
        """
import jax, numpy as np
from shardckpt.errors import DtypeMismatchError, FormatError, LeafError
def refused(error, make, *arguments):
    try:
        make(*arguments)
    except error as e:
        print(e)
with jax.enable_x64(True):
    wide = encode_value([jax.numpy.arange(3)], "rng")
refused(DtypeMismatchError, decode_value, wide, "rng")
key = encode_value([jax.random.key(0)], "rng")
for meaning in ("jax.key:no such", "jax.key:rbg", "other"):
    key["tree"] = [{"$tensor": meaning}]
    refused(FormatError, decode_value, key, "rng")
gone = jax.numpy.ones(3)
gone.delete()
refused(LeafError, encode_value, [gone], "rng")
refused(LeafError, jax.jit(lambda x: encode_value([x], "rng")), 1.0)
refused(LeafError, encode_value, [jax.ShapeDtypeStruct((1,), "int8")], "rng")
"""
    ).splitlines()
    assert len(lines) == 7
    assert all("'rng/0'" in line for line in lines)
    assert "jax_enable_x64" in lines[0]


@pytest.mark.long
def test_an_array_that_another_process_has_a_part_of_is_refused():
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        address = f"localhost:{probe.getsockname()[1]}"
    code = """
import sys, jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from shardckpt.errors import LeafError
from shardckpt.frameworks.per_process import decode_value, encode_value
jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
sharding = NamedSharding(jax.make_mesh((2,), ("x",)), PartitionSpec("x"))
array = jax.make_array_from_callback((2,), sharding, lambda index: np.arange(2)[index])
assert np.asarray(decode_value(encode_value(jax.numpy.ones(2), "mine"), "mine")).tolist() == [1, 1]
try:
    encode_value(array, "rng")
except LeafError as e:
    print(e)
"""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, address, str(i)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for i in range(2)
    ]
    try:
        for process in processes:
            out, err = process.communicate(timeout=200)
            assert "'rng' is a jax.Array that other processes have parts of" in out, err
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def test_a_program_without_torch_is_told_to_install_it():
    output = run(
        """
sys.modules["torch"] = None
from shardckpt.errors import MissingExtraError
document = json.load(sys.stdin)
try:
    decode_value(document, "rng")
except MissingExtraError as e:
    print(e)
""",
        given=json.dumps(encode_value([torch.ones(2)], "rng")),
    )
    assert "'rng/0' is a tensor of torch's: install torch" in output


@pytest.mark.long
def test_a_dtensor_is_refused():
    output = run(
        """
import torch
from torch import distributed
from torch.distributed.tensor import DeviceMesh, Replicate, distribute_tensor
from shardckpt.errors import LeafError
distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
tensor = distribute_tensor(torch.ones(2), DeviceMesh("cpu", [0]), [Replicate()])
try:
    encode_value([tensor], "rng")
except LeafError as e:
    print(e)
distributed.destroy_process_group()
"""
    )
    assert "'rng/0' is a DTensor on cpu, inside of a PerProcess; keep it outside" in output
