"""Measure planning: what `shardckpt plan` takes for a model of 405 billion parameters, and one host's plan of a very large job.

    python tools/plan_scale.py                   from 16,384 devices to 4,096; and one host of 100,000 devices
    python tools/plan_scale.py --html plan.html  and the page of it
    python tools/plan_scale.py --json

1. The record is that of Llama 405B, with about a thousand tensors, as 2,048 hosts of 8 devices would have saved it: made from
   shapes and layouts by the code that a save uses, without any elements. It is written as JSON and read back, as `plan` does.
2. The reshard is planned, and everything that `plan` shows is counted, for 512 hosts of 8 devices.
3. One host's plan, at 100,000 devices: which chunks of which tensors it reads, as a restoring host works it out for itself.

Each is measured in a process of its own: seconds of processor time, and the peak of resident memory with Python and numpy included.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from shardckpt import Mesh, PartitionSpec, Sharding
from shardckpt.dtypes import by_name
from shardckpt.names import array_path
from shardckpt.planning.chunks import chunk_shape, smallest_chunk
from shardckpt.planning.plan import Piece, chunk_runs
from shardckpt.record import CheckpointRecord, FileReference, TableReference, parse_checkpoint, seal
from shardckpt.structure import Structure, TensorRecord
from shardckpt.tree import flatten

LAYERS = 126
EMBED, MLP, VOCABULARY, KV = 16384, 53248, 128256, 1024
DTYPE = "bfloat16"


def shapes() -> dict[str, tuple[int, ...]]:
    """The tensors of Llama 3.1 405B by name: 1,137 of them."""
    layer = {
        "self_attn.q_proj.weight": (EMBED, EMBED),
        "self_attn.k_proj.weight": (KV, EMBED),
        "self_attn.v_proj.weight": (KV, EMBED),
        "self_attn.o_proj.weight": (EMBED, EMBED),
        "mlp.gate_proj.weight": (MLP, EMBED),
        "mlp.up_proj.weight": (MLP, EMBED),
        "mlp.down_proj.weight": (EMBED, MLP),
        "input_layernorm.weight": (EMBED,),
        "post_attention_layernorm.weight": (EMBED,),
    }
    layers = {f"model.layers.{i}.{name}": shape for i in range(LAYERS) for name, shape in layer.items()}
    ends = {"model.embed_tokens.weight": (VOCABULARY, EMBED), "lm_head.weight": (VOCABULARY, EMBED), "model.norm.weight": (EMBED,)}
    return {**layers, **ends}


def spec_of(name: str, ndim: int) -> PartitionSpec:
    """Fully sharded over one axis, tensor-parallel over the next; replicas over the third."""
    if ndim == 1:
        return PartitionSpec(None)
    return PartitionSpec("fsdp", "tensor") if name.endswith(("o_proj.weight", "down_proj.weight")) else PartitionSpec("tensor", "fsdp")


def record(mesh: Mesh, hosts: int) -> CheckpointRecord:
    """What `checkpoint.json` would say of the model, saved over that mesh by so many hosts."""
    dtype = by_name(DTYPE)
    total = sum(prod(shape) for shape in shapes().values()) * dtype.storage.itemsize
    tensors = {}
    for name, shape in shapes().items():
        layout = Sharding(mesh, spec_of(name, len(shape)))
        chunks = chunk_shape(shape, dtype.storage.itemsize, layout.parts(len(shape)), smallest=smallest_chunk(total))
        tensors[name] = TensorRecord(name, shape, dtype, layout, (Piece(array_path(name), (0,) * len(shape), shape, chunks),))
    tree = flatten(dict.fromkeys(tensors, 0), lambda leaf: leaf == 0).tree
    chunks = sum(t.num_chunks for t in tensors.values())
    return CheckpointRecord(
        attempt="20260301T000000-00000000",
        created="2026-03-01T00:00:00+00:00",
        writer="tools/plan_scale.py",
        layout="packed",
        compression=None,
        hosts=tuple(FileReference(f"records/{i:05d}.json", 1, "0" * 64) for i in range(hosts)),
        structure=Structure(tree, tensors),
        totals={"tensors": len(tensors), "bytes": total, "stored_bytes": total + 4 * chunks, "chunks": chunks},
        table=TableReference("table", 1, 1, "0" * 64),
    )


SOURCE = Mesh((16, 128, 8), ("data", "fsdp", "tensor"))
TARGET = Mesh((8, 64, 8), ("data", "fsdp", "tensor"))
HUGE = Mesh((100, 125, 8), ("data", "fsdp", "tensor"))
RULES = ["**norm.weight=replicated", "**[ov]_proj.weight=(fsdp,tensor)", "**=(tensor,fsdp)"]
"""Not those of the source for all tensors: `v_proj` is laid out the other way round, and so is `down_proj`."""
DEVICES_PER_HOST = 8


def plan(html: str | None) -> dict[str, Any]:
    """Plan the reshard from 16,384 devices to 4,096, with everything that `shardckpt plan` shows."""
    from shardckpt.cli.page.page import page
    from shardckpt.forecast.document import document
    from shardckpt.forecast.forecast import forecast
    from shardckpt.forecast.rates import Rate, Rates
    from shardckpt.io.url import parse
    from shardckpt.reshard.options import ReshardOptions
    from shardckpt.reshard.plan import plan_reshard
    from shardckpt.rules import Rules

    data = seal(record(SOURCE, SOURCE.size // DEVICES_PER_HOST).to_json())
    started = time.process_time()
    known = parse_checkpoint(data, "checkpoint.json")
    read = time.process_time()
    source = SimpleNamespace(record=known, location=parse("gs://bucket/llama-405b/step_100000"))
    options = ReshardOptions(mesh=TARGET, rules=Rules.parse(RULES))
    reshard = plan_reshard(source, options)
    planned = time.process_time()
    found = forecast(source, reshard, Rates(Rate(2 << 30), Rate(1 << 30)), options=options, devices_per_host=DEVICES_PER_HOST)
    doc = document(found)
    counted = time.process_time()
    text = page(found, doc)
    drawn = time.process_time()
    if html is not None:
        Path(html).write_text(text, "utf-8")
    return {
        "tensors": len(known.structure.tensors),
        "chunks": known.totals["chunks"],
        "record bytes": len(data),
        "seconds to read the record": read - started,
        "seconds to plan the reshard": planned - read,
        "seconds to count everything": counted - planned,
        "seconds to draw the page": drawn - counted,
        "page bytes": len(text.encode()),
        "restore amplification": doc["restore"]["amplification"],
        "reshard amplification": doc["reshard"]["amplification"],
    }


def one_host() -> dict[str, Any]:
    """Which chunks does one host of 100,000 devices read?"""
    from shardckpt.box import distinct_boxes

    tensors = record(SOURCE, SOURCE.size // DEVICES_PER_HOST).structure.tensors
    devices = range(8 * 777, 8 * 778)
    started = time.process_time()
    chunks = nbytes = 0
    for name, tensor in tensors.items():
        boxes, _ = distinct_boxes(Sharding(HUGE, spec_of(name, len(tensor.shape))).device_boxes(tensor.shape, list(devices)).boxes)
        for piece in tensor.pieces:
            first, stop = chunk_runs(piece, boxes)
            chunks += int((stop - first).sum())
            nbytes += int((stop - first).sum()) * prod(piece.chunks) * tensor.dtype.storage.itemsize
    return {"devices": HUGE.size, "tensors": len(tensors), "chunks": chunks, "bytes": nbytes, "seconds": time.process_time() - started}


def main() -> None:
    """Measure both, and print what they took."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--html", metavar="FILE", help="write the page of the plan")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", choices=["plan", "one-host"], help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.only is not None:
        found = plan(asked.html) if asked.only == "plan" else one_host()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(json.dumps(found | {"peak bytes": peak}))
        return
    results = {}
    for what in ("plan", "one-host"):
        command = [sys.executable, __file__, "--only", what, *(["--html", asked.html] if asked.html else [])]
        results[what] = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    if asked.json:
        print(json.dumps(results, indent=1))
        return
    for what, found in results.items():
        print(what)
        for name, value in found.items():
            print(f"  {name:<30}{value:>18,.2f}" if isinstance(value, float) else f"  {name:<30}{value:>18,}")


if __name__ == "__main__":
    main()
