"""A small model, trained by Lightning's Trainer under ModelParallelStrategy on the CPU, as
test_lightning_sharded.py asks."""

import logging
import os
import signal
from pathlib import Path

import gcsfs  # noqa: F401 - what Lightning imports in each process, in seconds
import lightning
import s3fs  # noqa: F401
import torch
from integration_launch import launch
from lightning.fabric.accelerators import xla
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset

from shardckpt import ShardckptError
from shardckpt.training.integrations.lightning import ShardedRun
from shardckpt.training.policies import OnPreemption

xla._XLA_AVAILABLE = False  # nor look for a TPU
ROWS, BATCH = 24, 6
"""Of all processes together."""


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
        self.losses = []

    def configure_model(self):
        if self.device_mesh is None:  # another strategy
            return
        if self.device_mesh["tensor_parallel"].size() > 1:
            parallelize_module(
                self.layers,
                self.device_mesh["tensor_parallel"],
                {"0": ColwiseParallel(), "2": RowwiseParallel()},
            )
        fully_shard(self.layers, mesh=self.device_mesh["data_parallel"])
        for module in self.layers.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)  # Gloo can only sum

    def training_step(self, batch, _index):
        x, y = batch
        loss = nn.functional.mse_loss(self.layers(x), y)
        self.losses.append([self.global_step, loss.item()])
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4])]


class Killed(Callback):
    def __init__(self, run, dies_at):
        self.run, self.dies_at = run, dies_at

    def on_train_batch_end(self, trainer, *_rest):
        if trainer.global_step == self.dies_at:
            self.run._manager.wait()  # what is committed by then is what the test says
            trainer.strategy.barrier()
            os.kill(os.getpid(), signal.SIGKILL)


class Noticed(Callback):
    """Notice the last process of its preemption in the second step."""

    def __init__(self, notice, rank):
        self.notice, self.rank = notice, rank

    def on_train_batch_start(self, trainer, *_rest):
        if trainer.global_step == 1 and trainer.global_rank == self.rank:
            if self.notice is None:
                os.kill(os.getpid(), signal.SIGTERM)
            else:
                self.notice.touch()


def preempted(coordinator, directory, epochs, by_signal):
    """Train until the notice of one process; the steps that were trained."""
    notice = None if by_signal else Path(directory, f"notice{coordinator.world.process}")
    policy = OnPreemption() if by_signal else OnPreemption(signals=(), file=notice)
    return train(
        coordinator,
        directory,
        coordinator.world.processes,
        1,
        epochs,
        preemption=policy,
        notifier=Noticed(notice, coordinator.world.processes - 1),
    )


def train(
    coordinator,
    directory,
    data,
    tensor,
    epochs,
    dies_at=None,
    strategy=None,
    *,
    preemption=None,
    notifier=None,
):
    ranks = launch(coordinator)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    every = ROWS // BATCH if preemption is None else None
    run = ShardedRun(directory, every=every, keep=2, preemption=preemption)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=strategy
        or ModelParallelStrategy(data_parallel_size=data, tensor_parallel_size=tensor),
        max_epochs=epochs,
        min_epochs=None if preemption is None else epochs,  # which a notice does not wait for
        min_steps=None if preemption is None else epochs * ROWS // BATCH,
        callbacks=[run, notifier or Killed(run, dies_at)],
        enable_checkpointing=False,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Model()
    rows = torch.arange(ROWS * 8, dtype=torch.float32).reshape(ROWS, 8).sin()
    try:
        trainer.fit(
            model,
            DataLoader(
                TensorDataset(rows, rows.sum(1, keepdim=True)), BATCH // data, shuffle=False
            ),
        )
    except ShardckptError as e:
        return {"refused": [type(e).__name__, str(e)]}
    return {
        "losses": model.losses,
        "mesh": sorted({str(p.device_mesh) for p in model.parameters()}),
    }
