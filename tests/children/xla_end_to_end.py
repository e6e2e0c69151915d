"""Run by test_xla_end_to_end.py on 8 virtual devices: save under one layout, restore under another,
through real storage.

Prints one JSON object with what was seen.
"""

import json
import random
import sys

import numpy as np
import torch
import torch_xla
import torch_xla.debug.metrics as met
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr

import shardckpt
from shardckpt import Mesh, PartitionSpec, Sharding, Target

xr.use_spmd()
ROOT = sys.argv[1]
PAIRS = int(sys.argv[2])
DTYPES = [torch.float32, torch.bfloat16, torch.int32, torch.uint8, torch.bool]
SPECS = {
    0: [()],
    1: [(None,), ("x",), (("x", "y"),), ("y",)],
    2: [
        (None, None),
        ("x", "y"),
        ("y", "x"),
        ("x", None),
        (None, "y"),
        (("x", "y"), None),
        (None, ("y", "x")),
    ],
    3: [(None, "x", "y"), ("y", None, "x"), (("x", "y"), None, None)],
}


def compiles():
    data = met.metric_data("CompileTime")
    return data[0] if data else 0


def random_value(shape, dtype):
    raw = torch.randint(0, 100, shape, dtype=torch.int32)
    return raw > 50 if dtype == torch.bool else raw.to(dtype)


def meshes(rng):
    shape = rng.choice([(4, 2), (2, 4), (8, 1), (1, 8)])
    ids = rng.sample(range(8), 8)
    return xs.Mesh(np.array(ids), shape, ("x", "y")), Mesh(shape, ("x", "y"), ids)


def pairs():
    """Many tensors, each with a layout of its own to save and another to restore, in a few
    checkpoints."""
    rng = random.Random(0)
    torch.manual_seed(0)
    wrong, done, compiled = [], 0, 0
    for batch in range(4):
        values, state, like, targets = {}, {}, {}, {}
        for i in range(PAIRS // 4):
            ndim = rng.choice([0, 1, 2, 2, 2, 3])
            shape = tuple(rng.choice([1, 3, 7, 8, 10, 16, 33]) for _ in range(ndim))
            value = random_value(shape, rng.choice(DTYPES))
            name = f"t{i}"
            values[name] = value
            tensor = value.to("xla")
            if shape:
                xs.mark_sharding(tensor, meshes(rng)[0], rng.choice(SPECS[ndim]))
            state[name] = tensor
            sharding = Sharding(meshes(rng)[1], PartitionSpec(*rng.choice(SPECS[ndim])))
            like[name] = Target(sharding)
            targets[name] = sharding
        layout = ["packed", "zarr"][batch % 2]
        shardckpt.save(f"{ROOT}/pairs{batch}", state, options=shardckpt.SaveOptions(layout=layout))
        before = compiles()
        restored = shardckpt.restore(f"{ROOT}/pairs{batch}", like)
        compiled += compiles() - before
        for name, value in values.items():
            placed = shardckpt.OpSharding.parse(
                torch_xla._XLAC._get_xla_sharding_spec(restored[name])
            )
            expected = targets[name].op_sharding(value.dim())
            # XLA calls a scalar or a tensor that no axis cuts replicated, without naming devices.
            laid_out = (
                placed.equivalent(expected)
                or placed.to_hlo() == expected.canonical().to_hlo() == "{replicated}"
            )
            if (
                not torch.equal(restored[name].cpu(), value)
                or restored[name].dtype != value.dtype
                or not laid_out
            ):
                wrong.append(
                    [
                        batch,
                        name,
                        list(value.shape),
                        str(value.dtype),
                        placed.to_hlo(),
                        expected.to_hlo(),
                    ]
                )
            done += 1
    return {"pairs": done, "wrong": wrong, "compiles": compiled}


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(50, 16)
        self.inner = torch.nn.Linear(16, 32)
        self.outer = torch.nn.Linear(32, 16)
        self.head = torch.nn.Linear(16, 50, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(16))

    def forward(self, tokens):
        x = self.embed(tokens) * self.scale
        return self.head(x + self.outer(torch.relu(self.inner(x))))


def layout_of(name, mesh):
    if name.endswith("weight"):
        return Sharding(mesh, PartitionSpec("x", "y"))
    return Sharding(mesh, PartitionSpec())


def train(model, optimizer, steps):
    generator = torch.Generator().manual_seed(7)
    losses = []
    for _ in range(steps):
        tokens = torch.randint(0, 50, (8, 4), generator=generator).to("xla")
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        torch_xla.sync()
        losses.append(loss.item())
    return losses


def training():
    """Train, save, restore into a meta module and a fresh optimizer on another mesh, train on."""
    torch.manual_seed(1)
    first = Mesh((4, 2), ("x", "y"))
    model = Model().to("xla")
    model.head.weight = model.embed.weight
    xla_mesh = xs.Mesh(np.arange(8), (4, 2), ("x", "y"))
    for name, parameter in model.named_parameters():
        xs.mark_sharding(parameter, xla_mesh, ("x", "y") if name.endswith("weight") else (None,))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train(model, optimizer, 3)
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "step": 3,
        "layout": str(first),
    }
    shardckpt.save(f"{ROOT}/training", state)
    truth = {name: value.cpu() for name, value in state["model"].items()}
    moments = {i: s["exp_avg_sq"].cpu() for i, s in state["optimizer"]["state"].items()}
    expected = train(model, optimizer, 3)

    second = Mesh((2, 4), ("x", "y"), [5, 1, 4, 0, 7, 3, 6, 2])
    checkpoint = shardckpt.open(f"{ROOT}/training")
    with torch.device("meta"):
        fresh = Model()
    names = list(fresh.state_dict())
    targets = {name: Target(layout_of(name, second)) for name in names}
    parameters = [n for n, _ in fresh.named_parameters()]
    # The optimizer's moments go where their parameters go; its groups come from the checkpoint.
    plain = shardckpt.restore(checkpoint, only="optimizer/param_groups/**")
    moment_targets = {
        i: {
            "step": torch.zeros(()),
            **{k: Target(layout_of(n, second)) for k in ("exp_avg", "exp_avg_sq")},
        }
        for i, n in enumerate(parameters)
    }
    like = {
        "model": targets,
        "optimizer": {"state": moment_targets, **plain["optimizer"]},
        "step": 0,
        "layout": "",
    }
    before = compiles()
    restored = shardckpt.restore(checkpoint, like)
    compiled = compiles() - before
    fresh.load_state_dict(restored["model"], assign=True)
    tied = restored["model"]["head.weight"] is restored["model"]["embed.weight"]
    fresh.head.weight = fresh.embed.weight
    again = torch.optim.AdamW(fresh.parameters(), lr=0.01)
    again.load_state_dict(restored["optimizer"])
    equal = all(torch.equal(fresh.state_dict()[n].cpu(), v) for n, v in truth.items())
    equal_moments = all(
        torch.equal(again.state_dict()["state"][i]["exp_avg_sq"].cpu(), v)
        for i, v in moments.items()
    )
    losses = train(fresh, again, 3)
    shards = torch_xla._XLAC._get_xla_sharding_spec(again.state_dict()["state"][0]["exp_avg"])
    return {
        "compiles": compiled,
        "tied": tied,
        "tied_in_record": checkpoint.info("model/head.weight").tied_names
        == ("model/embed.weight",),
        "equal": equal,
        "equal_moments": equal_moments,
        "expected": expected,
        "found": losses,
        "moment_sharding": shards,
    }


def errors():
    messages = {}
    shardckpt.save(f"{ROOT}/errors", {"w": torch.zeros(4, 4)})
    for name, sharding in {
        "larger mesh": Sharding(Mesh((16,), ("x",)), PartitionSpec("x")),
        "longer spec": Sharding(Mesh((8,), ("x",)), PartitionSpec(None, None, "x")),
    }.items():
        try:
            shardckpt.restore(f"{ROOT}/errors", {"w": Target(sharding)})
        except shardckpt.ShardckptError as e:
            messages[name] = [type(e).__name__, str(e)]
    return messages


def skipping():
    """A sharded tensor is left in a base that was saved with another layout, and restored to a
    third."""
    mesh = xs.Mesh(np.arange(8), (4, 2), ("x", "y"))
    whole = torch.arange(64 * 48, dtype=torch.float32).reshape(64, 48)

    def laid_out(tensor, spec):
        return xs.mark_sharding(tensor.to("xla"), mesh, spec)

    def state(spec, step):
        return {"frozen": laid_out(whole, spec), "lora": laid_out(whole[:8] + step, ("y", None))}

    shardckpt.save(f"{ROOT}/0", state(("x", "y"), 0))
    tuned, read = state((None, "x"), 1), []
    shards = torch_xla._XLAC._get_local_shards
    torch_xla._XLAC._get_local_shards = lambda tensors: (
        read.extend(map(id, tensors)) or shards(tensors)
    )
    options = shardckpt.SaveOptions(base=f"{ROOT}/0", skip="frozen")
    report = shardckpt.save_async(f"{ROOT}/1", tuned, options=options).wait()
    torch_xla._XLAC._get_local_shards = shards
    info = shardckpt.open(f"{ROOT}/1").info("frozen")
    restored = shardckpt.restore(
        f"{ROOT}/1", {"frozen": Target(layout_of_spec("y", "x")), "lora": None}, only="frozen"
    )
    return {
        "tensors read": len(set(read)),
        "written": report.nbytes,
        "op_sharding": info.layout.to_hlo(),
        "base": info.base == f"{ROOT}/0",
        "equal": torch.equal(restored["frozen"].cpu(), whole),
        "other": bool((shardckpt.open(f"{ROOT}/1").read("lora") == whole[:8].numpy() + 1).all()),
    }


def layout_of_spec(*spec):
    return Sharding(Mesh((4, 2), ("x", "y")), PartitionSpec(*spec))


print(
    json.dumps(
        {"pairs": pairs(), "training": training(), "errors": errors(), "skipping": skipping()}
    )
)
