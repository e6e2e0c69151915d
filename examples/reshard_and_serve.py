"""Reshard a checkpoint for a tensor-parallel mesh, export safetensors, and serve it over HTTP.

    python examples/reshard_and_serve.py

Needs `pip install 'shardckpt[serve] @ git+https://github.com/shardckpt/shardckpt'`;
no GPU, no torch. The comments give the same steps as commands for a shell.
"""

import subprocess
import sys
import urllib.request
from pathlib import Path

import numpy as np

import shardckpt
from shardckpt import Box, Mesh, PartitionSpec, SaveOptions, Sharding

RUN = Path("runs/serve")
TRAINED, SERVED, FILE = RUN / "100", RUN / "tp4", RUN / "model.safetensors"

# A checkpoint as a training on 8 devices leaves it. Take one of yours instead, of any mesh.
training_mesh = Mesh((4, 2), ("fsdp", "tensor"))
rng = np.random.default_rng(0)
model = {
    f"layers.{i}.{name}.weight": rng.normal(size=shape).astype(np.float32)
    for i in range(4)
    for name, shape in {"up_proj": (1024, 256), "down_proj": (256, 1024)}.items()
}
shardings = {"model/**": Sharding(training_mesh, PartitionSpec("fsdp", "tensor"))}
options = SaveOptions(shardings=shardings, overwrite=True)
shardckpt.save(TRAINED, {"model": model, "step": 100}, options=options)

# 1. For a mesh of 4 devices: rows of up_proj and columns of down_proj, in bfloat16.
#    shardckpt reshard runs/serve/100 runs/serve/tp4 --mesh model=4 --dtype bfloat16 \
#      --only 'model/**' --overwrite \
#      --rule '**/*.up_proj.weight=(model)' --rule '**/*.down_proj.weight=(None, model)'
mesh = Mesh((4,), ("model",))
rules = {
    "**/*.up_proj.weight": PartitionSpec("model"),
    "**/*.down_proj.weight": PartitionSpec(None, "model"),
}
report = shardckpt.reshard(
    TRAINED, SERVED, mesh=mesh, rules=rules, dtype="bfloat16", only="model/**", overwrite=True
)
layout = shardckpt.open(SERVED)["model/layers.0.down_proj.weight"].sharding
print(f"resharded: committed {report.committed}; down_proj is laid out as {layout.spec}")

# 2. One file for other programs; what vLLM or transformers need is in docs/export.md.
#    shardckpt export runs/serve/tp4 runs/serve/model.safetensors --include 'model/**' \
#      --strip-prefix model. --overwrite
exported = shardckpt.export_safetensors(
    SERVED, FILE, include="model/**", strip_prefix="model.", overwrite=True
)
# The same file, which nobody had to write.
with shardckpt.safe_open(SERVED, framework="np", strip_prefix="model.") as view:
    print(f"exported: {exported.nbytes:,} bytes; first name {min(view.keys())}")

# 3. The service. `--port 0` takes any free port; the first line that it prints says where it is.
#    shardckpt serve demo=runs/serve
command = [sys.executable, "-m", "shardckpt", "serve", f"demo={RUN}", "--port", "0"]
server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
try:
    url = server.stdout.readline().split()[-1]
    with shardckpt.Client(url) as client:
        for checkpoint in client.checkpoints():
            size = f"{checkpoint['bytes']:,} bytes"
            print(f"served at {url}: {checkpoint['id']} {checkpoint['state']} {size}")
        rows = client.read("demo/tp4", "model/layers.0.up_proj.weight", Box((0, 0), (2, 4)))
        print(f"a part of a tensor over HTTP: {rows.shape} {rows.dtype}")
    # The service makes the exported file while it is read:
    # curl -O URL/files/demo/tp4/model.safetensors
    file = f"{url}/files/demo/tp4/model.safetensors?include=model/**&strip_prefix=model."
    with urllib.request.urlopen(file) as reply:
        print(f"the same file over HTTP: {reply.read() == FILE.read_bytes()}")
finally:
    server.terminate()
    server.wait()
