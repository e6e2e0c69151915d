"""Lightning: its Trainer saves and loads checkpoints through shardckpt.

Interrupt the first command with Ctrl-C, or kill it. The second one goes on after the latest saved
epoch:

    python examples/lightning_loop.py
    python examples/lightning_loop.py

Needs `pip install 'shardckpt[torch,lightning] @ git+https://github.com/shardckpt/shardckpt'`.
To begin anew, remove runs/lightning_loop.
"""

from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import shardckpt
from shardckpt.training.integrations.lightning import ShardckptIO

RUN = Path("runs/lightning_loop")


class Model(lightning.LightningModule):
    """A small network that learns a sine."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 64))

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        """Compute the loss of a batch."""
        x, y = batch
        loss = nn.functional.mse_loss(self.layers(x), y)
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def on_train_epoch_end(self) -> None:
        """Print the mean loss."""
        print(f"epoch {self.current_epoch} loss {self.trainer.callback_metrics['loss']:.6f}")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Make the optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


lightning.seed_everything(0)
x = torch.randn(512, 64)
loader = DataLoader(TensorDataset(x, x.roll(1, dims=1).sin()), batch_size=64)

trainer = lightning.Trainer(
    accelerator="cpu",
    max_epochs=40,
    plugins=[ShardckptIO()],  # saves in the background; a checkpoint is a directory
    # Each epoch's replaces the one before.
    callbacks=[ModelCheckpoint(RUN, filename="last", enable_version_counter=False)],
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)

last = RUN / "last.ckpt"
try:
    shardckpt.open(last)
    print(f"resuming from {last}")
except FileNotFoundError:  # nothing was saved yet, or not completely
    last = None
trainer.fit(Model(), loader, ckpt_path=last)
