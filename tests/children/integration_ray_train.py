"""A small model, trained by Ray Train's TorchTrainer with FSDP2 on CPUs, as test_ray_train.py asks:
argv has JSON, the answer is JSON.

All trainings of one program are in one Ray cluster on the loopback interface, whose files are in
$RAY_TMPDIR.
"""

import json
import os
import shutil
import signal
import sys
import warnings
from pathlib import Path

warnings.simplefilter("ignore")

import ray
import ray.train
import torch
from ray.train.torch import TorchConfig, TorchTrainer
from torch import nn
from torch.distributed.fsdp import fully_shard

import shardckpt
from shardckpt.training.integrations.ray_train import RayTrainManager, checkpoint_url

ROWS = 8
"""Of a batch, of all workers together."""


def train(config):
    """Train to a step; the losses of each attempt go to a file of this worker."""
    torch.set_num_threads(1)
    context = ray.train.get_context()
    rank, world = context.get_world_rank(), context.get_world_size()
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    fully_shard(model)
    model.set_force_sum_reduction_for_comms(True)  # Gloo can only sum
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state = shardckpt.train_state(model=model, optimizer=optimizer)
    directory = Path(config["directory"])
    attempt = len(list(directory.glob(f"losses-{rank}-*")))
    known = ray.train.get_checkpoint()
    with (
        RayTrainManager(config["root"], every=2, keep=config["keep"]) as mgr,
        (directory / f"losses-{rank}-{attempt}").open("w") as losses,
    ):
        restored = mgr.restore(state)
        line = {
            "workers": world,
            "resumed": restored and restored.step,
            "known": known and int(checkpoint_url(known).rpartition("/")[2]),
        }
        print(json.dumps(line), file=losses, flush=True)
        for step in range(restored.step + 1 if restored else 0, config["steps"]):
            batch = torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(step))[
                rank * ROWS // world : (rank + 1) * ROWS // world
            ]
            loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            print(json.dumps([step, loss.item()]), file=losses, flush=True)
            mgr.save(step, state, {"step": step, "loss": loss})
            if attempt < len(config["deaths"]) and [step, rank] == config["deaths"][attempt]:
                os.kill(os.getpid(), signal.SIGKILL)  # the save of this step may be in flight


def train_and_try(config):
    """Train; then make managers that cannot go on from Ray's latest checkpoint."""
    train(config)
    root = Path(config["root"])
    answer = [made(root.with_name("other"))]
    root.rename(root.with_name("moved"))
    try:
        RayTrainManager(root).restore()
    except shardckpt.ShardckptError as e:
        answer.append([type(e).__name__, str(e)])
    Path(config["directory"], "refused").write_text(json.dumps(answer))


def fit(directory, workers, steps, keep=None, num_to_keep=None, deaths=(), tries=False):
    """Train, and answer with the checkpoints that Ray Train has at the end; `deaths` has a step and
    a worker for each attempt that dies."""
    directory = Path(directory)
    directory.mkdir(exist_ok=True)
    config = {
        "directory": str(directory),
        "root": str(directory / "run"),
        "steps": steps,
        "keep": keep,
        "deaths": deaths,
    }
    trainer = TorchTrainer(
        train_and_try if tries else train,
        train_loop_config=config,
        scaling_config=ray.train.ScalingConfig(num_workers=workers),
        torch_config=TorchConfig(backend="gloo"),
        run_config=ray.train.RunConfig(
            name="experiment",
            storage_path=str(directory / "ray"),
            failure_config=ray.train.FailureConfig(max_failures=len(deaths)),
            checkpoint_config=ray.train.CheckpointConfig(num_to_keep=num_to_keep),
        ),
    )
    result = trainer.fit()
    return {
        "latest": checkpoint_url(result.checkpoint),
        "reported": [[checkpoint_url(one), metrics] for one, metrics in result.best_checkpoints],
    }


def made(root):
    """Error of a manager that cannot be made."""
    try:
        RayTrainManager(root)
    except shardckpt.ShardckptError as e:
        return [type(e).__name__, str(e)]
    return "made"


def save_with_a_failure(root):
    """Save three steps, of which the second cannot be saved; then go back, and the third cannot be
    saved again."""
    with RayTrainManager(root, every=1, on_failure=lambda *_: "continue") as mgr:
        for step in (1, 2, 3):
            mgr.wait()
            if step == 2 and ray.train.get_context().get_world_rank() == 0:
                (root / "2").write_text("a file where a directory is needed")
            torch.distributed.barrier()
            mgr.save(step, {"x": torch.ones(2)}, {"step": step})
        mgr.wait()
        mgr.restore(step=1)
        if ray.train.get_context().get_world_rank() == 0:
            shutil.rmtree(root / "3")
            (root / "3").write_text("a file where a directory is needed")
        torch.distributed.barrier()
        mgr.save(3, {"x": torch.ones(2)}, {"step": 3})


def refused(directory):
    """Managers that cannot be made, in this program, in two workers, and in Ray's local mode."""
    (Path(directory) / "foreign").mkdir(parents=True)
    driver = made(directory)

    def tell(name, root):
        if ray.train.get_context().get_world_rank() == 0:
            with Path(directory, "told").open("a") as file:
                print(json.dumps([name, made(root)]), file=file)

    def workers(_config):
        tell("relative", "run")
        save_with_a_failure(Path(directory, "failing"))
        urls = [checkpoint_url(one.checkpoint) for one in ray.train.get_all_reported_checkpoints()]
        Path(directory, "found").write_text(json.dumps(urls))
        ray.train.report({}, ray.train.Checkpoint.from_directory(Path(directory, "foreign")))
        tell("foreign", directory)
        torch.distributed.destroy_process_group()
        tell("apart", directory)

    def local(_config):
        tell("local", directory)

    for function, count in ((workers, 2), (local, 0)):
        run = ray.train.RunConfig(name=function.__name__, storage_path=str(Path(directory, "ray")))
        scaling = ray.train.ScalingConfig(num_workers=count)
        TorchTrainer(
            function,
            scaling_config=scaling,
            torch_config=TorchConfig(backend="gloo"),
            run_config=run,
        ).fit()
    lines = Path(directory, "told").read_text().splitlines()
    return {"driver": driver, **dict(map(json.loads, lines))}


if __name__ == "__main__":
    common = {"include_dashboard": False, "log_to_driver": False, "object_store_memory": 80 << 20}
    ray.init(address="local", num_cpus=3, _node_ip_address="127.0.0.1", **common)
    answers = [
        {"fit": fit, "refused": refused}[function](**arguments)
        for function, arguments in json.loads(sys.argv[1])
    ]
    print(json.dumps(answers))
    ray.shutdown()
