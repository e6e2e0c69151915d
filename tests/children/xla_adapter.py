"""Does with real torch_xla tensors on 8 virtual devices what test_torch_xla.py asks. JSON on stdin,
answers on stdout."""

import ctypes
import gc
import itertools
import json
import os
import sys
from math import prod
from pathlib import Path

os.environ.update(
    PJRT_DEVICE="CPU", CPU_NUM_DEVICES="8", TF_CPP_MIN_LOG_LEVEL="3", MALLOC_ARENA_MAX="1"
)

import numpy as np
import torch
import torch_xla
import torch_xla.debug.metrics as met
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
from torch_xla import _XLAC

import shardckpt.frameworks.torch_xla as adapter
from shardckpt import frameworks
from shardckpt.errors import ShardckptError
from shardckpt.frameworks.base import Target
from shardckpt.layout.dtypes import by_name
from shardckpt.layout.mesh import Mesh
from shardckpt.layout.op_sharding import OpSharding
from shardckpt.layout.partition_spec import PartitionSpec
from shardckpt.layout.sharding import Sharding

xr.use_spmd()
NAMES = ("x", "y", "z")


def xla_mesh(case):
    return xs.Mesh(case["devices"], tuple(case["mesh"]), NAMES[: len(case["mesh"])])


def spec_of(case):
    return tuple(tuple(part) if isinstance(part, list) else part for part in case["spec"])


def bits(shape, dtype, seed):
    """Random bits, not-a-numbers among them, as a numpy array and as a CPU tensor that knows
    nothing of our adapters."""
    kind, size = by_name(dtype), prod(shape)
    raw = np.random.default_rng(seed).integers(
        0, 2 if dtype == "bool" else 256, size * kind.itemsize, np.uint8
    )
    if dtype == "float16":
        raw[1::2] &= (
            # No infinity and no NaN: reading a device, torch_xla 2.9 makes all NaNs of this dtype
            # the same one.
            0xBF
        )
    tensor = (
        torch.zeros(0, dtype=getattr(torch, dtype))
        if size == 0
        else torch.frombuffer(bytearray(raw), dtype=getattr(torch, dtype))
    )
    return raw.view(kind.numpy).reshape(shape), tensor.reshape(shape)


def sharded(case, seed=0):
    """Elements, and a device tensor of them that torch_xla itself has sharded."""
    array, tensor = bits(case["shape"], case["dtype"], seed)
    tensor = tensor.to("xla")
    xs.mark_sharding(tensor, xla_mesh(case), spec_of(case))
    return array, tensor


def text(tensor):
    return _XLAC._get_xla_sharding_spec(tensor)


def compiles():
    metric = met.metric_data("CompileTime")
    return metric[0] if metric else 0


def read_bytes():
    metric = met.metric_data("InboundData")
    return int(metric[1]) if metric else 0


def assembled(source, arrays):
    """The whole tensor out of a source's boxes, and how often each element was covered."""
    whole = np.zeros(source.shape, source.dtype.numpy)
    covered = np.zeros(source.shape, int)
    for i, array in enumerate(arrays):
        box = source.boxes[i]
        whole[box.slices] = array
        covered[box.slices] += 1
    return whole, covered


def filled(sink, array):
    """Buffers as a caller lends them: with rubbish where nothing is read to."""
    buffers = []
    for i, shape in enumerate(sink.buffer_shapes):
        buffer = np.full(
            prod(shape) * sink.dtype.itemsize, 0xFF if sink.dtype.name != "bool" else 1, np.uint8
        )
        buffer = buffer.view(sink.dtype.numpy).reshape(shape)
        box = sink.boxes[i]
        buffer[tuple(slice(n) for n in box.shape)] = array[box.slices]
        buffers.append(buffer)
    return buffers


def same_bits(a, b):
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and np.ascontiguousarray(a).tobytes() == np.ascontiguousarray(b).tobytes()
    )


def device_bits(tensor):
    """Bytes of the shard on every device, padding included."""
    return [
        shard.reshape(-1).view(torch.uint8).numpy().tobytes() if shard.numel() else b""
        for shard, _ in _XLAC._get_local_shards([tensor])[0]
    ]


def error(function, *args):
    try:
        function(*args)
    except ShardckptError as e:
        return [type(e).__name__, str(e)]
    return None


def round_trip(case):
    array, tensor = sharded(case)
    before = compiles(), read_bytes()
    source = frameworks.source("w", tensor)
    (arrays,) = frameworks.fetch([source])
    facts = {"read": read_bytes() - before[1]}
    whole, covered = assembled(source, arrays)
    sink = frameworks.target("w", tensor, (), by_name("float32"))
    buffers = filled(sink, array)
    restored = sink.place(buffers)
    for buffer in buffers:
        buffer.reshape(-1).view(np.uint8)[...] = 0x55  # the buffers are ours again
    facts |= {
        "text": text(tensor),
        "layout": str(source.layout),
        "fetched": same_bits(whole, array),
        "covered once": bool((covered == 1).all()),
        "boxes": len(source.boxes),
        "itemsize": source.dtype.itemsize,
        "restored text": text(restored),
        "restored": device_bits(restored) == device_bits(tensor),
        "type": type(restored).__name__,
        "dtype": [str(restored.dtype), str(tensor.dtype)],
        "shape": list(restored.shape),
        "requires_grad": restored.requires_grad,
        "compiles": compiles() - before[0],
    }
    return facts


def targets(case):
    """The same place said in five ways."""
    array, tensor = sharded(case)
    before = compiles()
    mesh = Mesh(case["mesh"], NAMES[: len(case["mesh"])], case["devices"])
    ours = Sharding(mesh, PartitionSpec(*spec_of(case)))
    ways = {
        "Sharding": ours,
        "OpSharding": OpSharding.parse(text(tensor)),
        "op_sharding": ours.op_sharding(len(case["shape"])),
        "ShardingSpec": xs.ShardingSpec(xla_mesh(case), spec_of(case)),
        "pair": (xla_mesh(case), spec_of(case)),
    }
    facts = {}
    for way, sharding in ways.items():
        sink = frameworks.target(
            "w", Target(sharding), tuple(case["shape"]), by_name(case["dtype"])
        )
        restored = sink.place(filled(sink, array))
        facts[way] = text(restored) == text(tensor) and device_bits(restored) == device_bits(tensor)
    return facts | {"compiles": compiles() - before}


def names(case):
    """Layouts without and with a global mesh that explains them, and with one that does not."""
    _, tensor = sharded(case)
    layouts = {"none": str(frameworks.source("w", tensor).layout)}
    other = xs.Mesh(np.roll(np.arange(8), 1), (8,), ("all",))
    for kind, mesh in ("same", xla_mesh(case)), ("other", other):
        xs.set_global_mesh(mesh)
        layouts[kind] = str(frameworks.source("w", tensor).layout)
    xs.set_global_mesh(None)
    return layouts


def pending(_):
    """Leaves that are still to be computed, and one more result that nobody asks for."""
    mesh = xs.Mesh(np.arange(8), (4, 2), NAMES[:2])
    base = torch.arange(64, dtype=torch.float32).reshape(8, 8).to("xla")
    xs.mark_sharding(base, mesh, ("x", "y"))
    leaves = {f"w{i}": base * (i + 2) for i in range(3)}
    bystander = base * 100
    before = compiles()
    sources = frameworks.sources({**leaves, "base": base})
    after = compiles() - before
    whole = {
        name: assembled(s, a)[0].tolist()
        for (name, s), a in zip(
            sources.items(), frameworks.fetch(list(sources.values())), strict=True
        )
    }
    lazy = base * 7
    marked = base * 9
    xs.mark_sharding(marked, mesh, (None, "y"))
    changed = torch.zeros(8, 8).to("xla")
    xs.mark_sharding(changed, mesh, ("x", None))
    changed.add_(base)
    before = compiles()
    frameworks.settle([marked, changed])
    annotated = [frameworks.target("w", leaf, (), by_name("float32")) for leaf in (marked, changed)]
    annotated_programs = compiles() - before
    still = _XLAC._check_tensor_need_materialization([marked, changed])
    sink = frameworks.target("w", lazy, (), by_name("float32"))
    return {
        "programs": after,
        "texts": [text(leaf) for leaf in leaves.values()],
        "bystander pending": _XLAC._check_tensor_need_materialization([bystander])[0],
        "elements": whole,
        "bystander": bystander.cpu().tolist(),
        "base": base.cpu().tolist(),
        "lazy boxes": len(sink.boxes),
        "annotated": [
            annotated_programs,
            still,
            [len(sink.boxes) for sink in annotated],
            [str(sink.dtype) for sink in annotated],
        ],
        "annotated computed": [
            marked.cpu().tolist() == (base.cpu() * 9).tolist(),
            changed.cpu().tolist() == base.cpu().tolist(),
        ],
    }


def unmarked(_):
    """Never synced; synced; and the result of a program."""
    array, host = bits((3, 5), "float32", 1)
    held = host.to("xla")
    synced = host.clone().to("xla")
    torch_xla.sync()
    computed = torch.ones(3, 5, device="xla") * 2
    sources = frameworks.sources({"held": held, "synced": synced, "computed": computed})
    fetched = frameworks.fetch(list(sources.values()))
    sink = frameworks.target("w", held, (), by_name("float32"))
    restored = sink.place(filled(sink, array))
    return {
        "layouts": [str(s.layout) for s in sources.values()],
        "devices": [s.layout.num_devices for s in sources.values()],
        "elements": [
            same_bits(fetched[0][0], array),
            same_bits(fetched[1][0], array),
            bool((fetched[2][0] == 2).all()),
        ],
        "restored": text(restored),
    }


def identities(_):
    mesh = xs.Mesh(np.arange(8), (4, 2), NAMES[:2])
    one, other = (
        torch.nn.Linear(8, 8, bias=False).to("xla"),
        torch.nn.Linear(8, 8, bias=False).to("xla"),
    )
    with torch.no_grad():
        other.weight.copy_(one.weight)
    torch_xla.sync()
    xs.mark_sharding(one.weight, mesh, ("x", None))
    wrapped = xs.xla_sharding.wrap_as_sharded_tensor(one.weight)
    aliases = [
        one.weight,
        one.state_dict()["weight"],
        one.weight.data,
        one.weight.detach(),
        wrapped,
    ]
    keys = {frameworks.identity(alias) for alias in aliases}
    return {
        "aliases": len(keys),
        "equal elements": frameworks.identity(other.weight) in keys,
        "transposed": frameworks.identity(one.weight.t()) in keys,
        "is_tensor": all(map(frameworks.is_tensor, aliases)),
    }


def training(_):
    """Losses and compiles of three steps: trained on; and restored into a meta module, then trained
    on."""
    mesh = xs.Mesh(np.arange(8), (4, 2), NAMES[:2])
    specs = {"0.weight": ("x", "y"), "0.bias": ("x",), "2.weight": ("y", "x"), "2.bias": (None,)}
    inputs = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))

    def net():
        return torch.nn.Sequential(
            torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 16)
        )

    def steps(module):
        optimizer, before, losses = torch.optim.SGD(module.parameters(), lr=0.1), compiles(), []
        for _ in range(3):
            optimizer.zero_grad()
            batch = inputs.to("xla")
            xs.mark_sharding(batch, mesh, ("x", None))
            loss = (module(batch) ** 2).mean()
            loss.backward()
            optimizer.step()
            torch_xla.sync()
            losses.append(loss.item())
        return losses, compiles() - before

    torch.manual_seed(0)
    normal = net().to("xla")
    for name, parameter in normal.named_parameters():
        xs.mark_sharding(parameter, mesh, specs[name])
    state = normal.state_dict()
    saved = frameworks.sources(state)
    arrays = {
        name: assembled(saved[name], a)[0]
        for name, a in zip(saved, frameworks.fetch(list(saved.values())), strict=True)
    }

    with torch.device("meta"):
        restored = net()
    before, leaves = compiles(), {}
    for name, array in arrays.items():
        leaf = Target((mesh, specs[name])) if name == "0.weight" else state[name]
        sink = frameworks.target(name, leaf, array.shape, saved[name].dtype)
        leaves[name] = sink.place(filled(sink, array))
    restored.load_state_dict(leaves, assign=True)
    load_compiles = compiles() - before
    kinds = sorted({f"{type(p).__name__} {p.requires_grad}" for p in restored.parameters()})
    first, second = steps(normal), steps(restored)
    texts = [[text(p) for p in module.parameters()] for module in (normal, restored)]
    return {
        "losses": [first[0], second[0]],
        "compiles": [first[1], second[1]],
        "load compiles": load_compiles,
        "kinds": kinds,
        "texts": texts,
    }


def memory(case):
    """Host bytes at the peak of fetching one leaf, and what its source said."""
    _, tensor = sharded(case)
    source = frameworks.source("w", tensor)

    def status(key):
        return next(
            int(line.split()[1]) * 1024
            for line in Path("/proc/self/status").read_text().splitlines()
            if line.startswith(key)
        )

    frameworks.fetch([source])  # waits until the tensor is on its devices
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    frameworks.fetch([source])
    return {"peak": status("VmHWM") - before, "said": source.staged_bytes}


def private(case):
    """A source's statement whether its arrays have memory of their own, and observations of that
    memory."""
    array, tensor = sharded(case)
    source = frameworks.source("w", tensor)
    torch_xla.sync(wait=True)
    ((*first,), (*second,)) = (frameworks.fetch([source])[0] for _ in range(2))
    for one in second:
        one[...] = 0  # neither the tensor nor another fetch sees that
    kept = [one.copy() for one in first]
    unharmed = same_bits(assembled(source, first)[0], array)
    for _ in range(3):
        tensor.mul_(
            2
            # The program may write to the memory that it is given: what was fetched sees nothing of
            # that.
        )
        torch_xla.sync(wait=True)
    del tensor, source
    gc.collect()
    return {
        "private": case["private"],
        "said": frameworks.source("w", sharded(case)[1]).private,
        "apart": not any(
            np.shares_memory(a, b) for a, b in itertools.combinations([*first, *second], 2)
        ),
        "nothing besides": all(one.nbytes == memory_under(one) for one in first),
        "unharmed": unharmed,
        "unchanged": all(map(same_bits, first, kept)),
    }


def memory_under(array):
    """Bytes of the torch tensor that an array is a view of."""
    while isinstance(array, np.ndarray):
        array = array.base
    return getattr(array, "_tensor", array).untyped_storage().nbytes()


def batched(case):
    """Many leaves in small calls are the leaves one by one."""
    tensors = [sharded(case, seed) for seed in range(7)]
    adapter.CALL_BYTES = 3 * frameworks.source("w", tensors[0][1]).staged_bytes
    sources = [frameworks.source(str(i), tensor) for i, (_, tensor) in enumerate(tensors)]
    fetched = frameworks.fetch(sources)
    return [
        same_bits(assembled(s, a)[0], array)
        for s, a, (array, _) in zip(sources, fetched, tensors, strict=True)
    ]


def refusals(_):
    f32, shape = by_name("float32"), (8, 8)
    deep = Sharding(Mesh((8,), ("x",)), PartitionSpec("x"))
    double = torch.ones(2, 2, dtype=torch.complex128).to("xla")

    def target(sharding, *stored):
        return error(frameworks.target, "w", Target(sharding), *stored)

    return {
        "no spec": target((xs.Mesh(np.arange(8), (8,), ("x",)), 5), shape, f32),
        "few": target(Sharding(Mesh((2, 2), ("x", "y")), PartitionSpec("x")), shape, f32),
        "ids": target(
            Sharding(Mesh((8,), ("x",), range(100, 108)), PartitionSpec("x")), shape, f32
        ),
        "rank": target(Sharding(Mesh((8,), ("x",)), PartitionSpec(None, None, "x")), shape, f32),
        "six": target(deep, (8,) * 6, f32),
        "six whole": target(Sharding(Mesh((8,), ("x",)), PartitionSpec()), (8,) * 6, f32),
        "manual": target(OpSharding.parse("{manual}"), shape, f32),
        "fp8": target(deep, shape, by_name("float8_e4m3fnuz")),
        "axis": target((xs.Mesh(np.arange(8), (8,), ("x",)), ("nope", None)), shape, f32),
        "complex128": error(frameworks.source, "w", double),
    }


QUESTIONS = (
    round_trip,
    targets,
    names,
    pending,
    unmarked,
    identities,
    training,
    memory,
    private,
    batched,
    refusals,
)

if __name__ == "__main__":
    questions = {question.__name__: question for question in QUESTIONS}
    answers = {
        kind: [questions[kind](case) for case in cases]
        for kind, cases in json.load(sys.stdin).items()
    }
    print(json.dumps(answers))
