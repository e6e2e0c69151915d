"""JAX arrays on a real GPU, by way of XLA's pinned memory. `make cuda` runs them; without JAX for a
GPU they are skipped.

Everything happens in one process of its own, because torch has the memory of this one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.skipif(find_spec("jax") is None, reason="needs JAX"),
    pytest.mark.timeout(300),
]

PROGRAM = """
import json, sys
from unittest import mock
import jax, jax.numpy as jnp, numpy as np
import shardckpt
from shardckpt import SaveOptions
from shardckpt.frameworks import jax_transfers
from shardckpt.writing.background import Saver

root, answers = sys.argv[1], {}
device = jax.devices()[0]
answers["platform"] = device.platform
if device.platform == "cpu":
    print(json.dumps(answers)); sys.exit()
normal = np.random.default_rng(7).normal(size=(300, 512))
plain = {
    dtype: normal.astype(jnp.dtype(dtype))
    for dtype in ("float32", "bfloat16", "float8_e4m3fn", "int4")
}
plain |= {f"w{i}": np.full((2048, 1024), i, np.float32) for i in range(32)}
state = {name: jax.device_put(array, device) for name, array in plain.items()}
state["offloaded"] = jax.device_put(
    plain["float32"], jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
)
plain["offloaded"] = plain["float32"]

def wrong(url):
    found = shardckpt.restore(url)
    return [name for name, array in plain.items() if found[name].tobytes() != array.tobytes()]

with mock.patch.object(jax_transfers, "_transfer", wraps=jax_transfers._transfer) as transferred:
    saver = Saver(memory_limit="1GiB")
    handle = saver.begin(f"{root}/async", state, SaveOptions())
    donated = {name: state.pop(name) for name in [*state] if name.startswith("w")}
    changed = jax.jit(lambda s: jax.tree.map(lambda a: a * 2 + 1, s), donate_argnums=0)(donated)
    answers["streamed"] = handle.wait().streamed
    answers["calls"] = transferred.call_count
    jax.block_until_ready(changed)
answers["async"] = wrong(f"{root}/async")
state |= {
    name: jax.device_put(array, device) for name, array in plain.items() if name.startswith("w")
}
answers["small"] = (
    Saver(memory_limit="32MiB").begin(f"{root}/small", state, SaveOptions()).wait().streamed,
    wrong(f"{root}/small"),
)
shardckpt.save(f"{root}/saved", state)
answers["saved"] = wrong(f"{root}/saved")
restored = shardckpt.restore(f"{root}/saved", state, memory_limit="64MiB")
answers["restored"] = [
    name
    for name, array in plain.items()
    if np.asarray(restored[name]).tobytes() != array.tobytes()
]
answers["kinds"] = [restored["w0"].sharding.memory_kind, restored["offloaded"].sharding.memory_kind]
print(json.dumps(answers))
"""


def test_arrays_go_by_pinned_memory_in_one_call_and_may_be_donated_and_come_back(tmp_path):
    env = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, tmp_path],
        capture_output=True,
        text=True,
        env=env,
        timeout=200,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    answer = json.loads(run.stdout.splitlines()[-1])
    if answer["platform"] == "cpu":
        pytest.skip("JAX has no GPU here")
    assert not answer["streamed"]
    assert answer["calls"] == 1
    assert answer["async"] == answer["saved"] == answer["restored"] == []
    assert answer["small"] == [True, []]
    assert answer["kinds"][1] == "pinned_host"
