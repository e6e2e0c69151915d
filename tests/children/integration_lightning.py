"""A small model, trained by Lightning's Trainer under DDP or alone, as test_lightning.py asks."""

import json
import logging
import os
import signal
from pathlib import Path

import gcsfs  # noqa: F401 - what Lightning imports in each process, in seconds
import lightning
import s3fs  # noqa: F401
import torch
from integration_launch import digest, launch
from lightning.fabric.accelerators import xla
from lightning.pytorch.callbacks import (
    Callback,
    EarlyStopping,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import shardckpt
from shardckpt import ShardckptError
from shardckpt.runs.pinning import pin
from shardckpt.training.integrations.lightning import ShardckptIO

xla._XLA_AVAILABLE = False  # nor look for a TPU
ROWS, BATCH = 24, 6
"""Of all processes together."""


class Model(lightning.LightningModule):
    def __init__(self, width=16, extra=None):
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(1)
        self.layers = nn.Sequential(
            nn.Linear(8, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 1)
        )
        self.losses = []

    def training_step(self, batch, _index):
        x, y = batch
        loss = nn.functional.mse_loss(self.layers(x), y)
        self.losses.append([self.global_step, loss.item()])
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4])]


class Watch(Callback):
    """Notes what is saved and what is loaded; and the end, if one is planned."""

    def __init__(self, notes, dies_at):
        self.notes, self.dies_at = Path(notes), dies_at

    def on_save_checkpoint(self, trainer, _module, checkpoint):
        digests = digest(
            {key: checkpoint[key] for key in ("state_dict", "optimizer_states", "lr_schedulers")}
        )
        if trainer.is_global_zero:  # each process has running statistics of its own
            self.notes.with_name(f"saved{trainer.global_step}").write_text(json.dumps(digests))

    def on_train_start(self, trainer, module):
        states = {
            "state_dict": module.state_dict(),
            "optimizer_states": [optimizer.state_dict() for optimizer in trainer.optimizers],
            "lr_schedulers": [
                config.scheduler.state_dict() for config in trainer.lr_scheduler_configs
            ],
        }
        self.start = digest(states)

    def on_train_batch_end(self, trainer, *_rest):
        if trainer.global_step == self.dies_at:
            # So far as the test says, steps are committed by then.
            trainer.strategy.checkpoint_io._finish()
            trainer.strategy.barrier()
            os.kill(os.getpid(), signal.SIGKILL)


def quiet(coordinator):
    ranks = launch(coordinator)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    return ranks


def trainer_for(ranks, directory, epochs, *callbacks, io=None):
    return lightning.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy="ddp" if ranks > 1 else "auto",
        max_epochs=epochs,
        plugins=[io or ShardckptIO()] if io is not False else None,
        callbacks=list(callbacks),
        default_root_dir=directory,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def loader_for(ranks):
    rows = torch.arange(ROWS * 8, dtype=torch.float32).reshape(ROWS, 8).sin()
    return DataLoader(TensorDataset(rows, rows.sum(1, keepdim=True)), BATCH // ranks, shuffle=False)


def train(coordinator, directory, epochs, dies_at=None, resume=None, *, own_files=False):
    ranks = quiet(coordinator)
    saving = ModelCheckpoint(
        directory, filename="{step}", monitor="loss", save_top_k=2, save_last=True, every_n_epochs=1
    )
    watch = Watch(Path(directory, "notes"), dies_at)
    io = False if own_files else None
    trainer = trainer_for(
        ranks, directory, epochs, saving, EarlyStopping("loss", patience=100), watch, io=io
    )
    model = Model(extra={"list": [1, (2, None)]})
    trainer.fit(model, loader_for(ranks), ckpt_path=resume)
    kept = sorted(Path(path).name for path in saving.best_k_models)
    return {
        "losses": model.losses,
        "start": watch.start,
        "best": saving.best_model_score.item(),
        "kept": kept,
    }


def migrate(coordinator, directory, half, epochs):
    """Train with Lightning's own files, import the last of them, and go on from there in another
    directory; both losses."""
    old, new = Path(directory, "old"), Path(directory, "new")
    old.mkdir()
    before = train(coordinator, old, half, own_files=True)
    shardckpt.import_checkpoint(old / "last.ckpt", new / "last.ckpt")
    return [before["losses"], train(coordinator, new, epochs, None, new / "last.ckpt")["losses"]]


def swa(coordinator, directory, epochs, resume):
    """Train with averaged weights; what it ends with."""
    ranks = quiet(coordinator)
    saving = ModelCheckpoint(directory, filename="{epoch}", save_top_k=-1, every_n_epochs=1)
    averaging = StochasticWeightAveraging(1e-2, swa_epoch_start=1, annealing_epochs=3)
    trainer = trainer_for(ranks, directory, epochs, saving, averaging)
    model = Model()
    trainer.fit(model, loader_for(ranks), ckpt_path=resume)
    return {
        "losses": model.losses,
        "final": digest(model.state_dict()),
        "averaged": averaging.n_averaged.item(),
    }


def top(coordinator, directory):
    """Two runs that keep the three best of six checkpoints, with the same names; what lies there
    after each."""
    quiet(coordinator)
    listings = []
    for _ in range(2):
        saving = ModelCheckpoint(
            directory, filename="{epoch}", monitor="loss", save_top_k=3, every_n_epochs=1
        )
        trainer_for(1, directory, 6, saving).fit(Model(), loader_for(1))
        listings.append(sorted(path.name for path in Path(directory).iterdir() if path.is_dir()))
    return listings


def links(coordinator, directory):
    """Trainings that link to their last checkpoint, each in a new directory; what the link leads
    to."""
    quiet(coordinator)
    targets = []
    for i in range(3):
        place = Path(directory, f"new{i}", "deep")
        trainer_for(1, directory, 2, ModelCheckpoint(place, save_last="link")).fit(
            Model(), loader_for(1)
        )
        targets.append(
            [
                place.joinpath("last.ckpt").is_symlink(),
                shardckpt.restore(place / "last.ckpt")["epoch"],
            ]
        )
    return targets


def is_there_at_once(coordinator, directory):
    """Whether the directory of a checkpoint is there when the call of an asynchronous save returns,
    each in a new directory."""
    io, answers = ShardckptIO(), []
    for i in range(20):
        path = Path(directory, f"new{i}", "last.ckpt")
        io.save_checkpoint({"w": torch.ones(3)}, path)
        answers.append(path.is_dir())
    io.teardown()
    return answers


def raises(coordinator, directory):
    """Two trainings that raise after a save has begun, which the second one's storage refuses; what
    they say."""
    quiet(coordinator)

    class Raise(Callback):
        def __init__(self, path):
            self.path = path

        def on_train_epoch_end(self, trainer, _module):
            trainer.save_checkpoint(self.path)
            raise ZeroDivisionError("mine")

    Path(directory, "file").write_text("in the way")
    messages = []
    for path in (Path(directory, "saved.ckpt"), Path(directory, "file", "inside.ckpt")):
        try:
            trainer_for(1, directory, 1, Raise(path)).fit(Model(), loader_for(1))
        except ZeroDivisionError as e:
            messages.append([str(e), *getattr(e, "__notes__", [])])
    return messages


def sharded(coordinator, directory):
    """The refusal of a Trainer whose strategy shards; Lightning takes the other such strategies
    with CUDA alone."""
    quiet(coordinator)
    try:
        lightning.Trainer(
            accelerator="cpu", devices=1, strategy=ModelParallelStrategy(), plugins=[ShardckptIO()]
        )
    except ShardckptError as e:
        return {"refused": [type(e).__name__, str(e)]}


class Own:
    """A hyperparameter that pickle can write."""


def refusals(coordinator, directory):
    """Errors for state that cannot be kept and for failures in the background, and the files that
    are left."""
    quiet(coordinator)
    outcomes = {}

    def attempt(what, function):
        try:
            function()
        except ShardckptError as e:
            outcomes[what] = [type(e).__name__, str(e)]

    io = ShardckptIO()
    trainer = trainer_for(1, directory, 1, io=io)
    attempt("hyperparameter", lambda: trainer.fit(Model(extra=Own()), loader_for(1)))
    ok = {"state_dict": {"w": torch.ones(3)}}
    attempt(
        "ndarray",
        lambda: io.save_checkpoint(ok | {"a": torch.ones(1).numpy()}, Path(directory, "odd.ckpt")),
    )
    attempt(
        "storage options",
        lambda: io.save_checkpoint(ok, Path(directory, "odd.ckpt"), storage_options={}),
    )
    attempt(
        "map_location",
        lambda: io.load_checkpoint(Path(directory, "odd.ckpt"), map_location={"cuda:0": "cpu"}),
    )
    attempt("not there", lambda: io.load_checkpoint(Path(directory, "odd.ckpt")))
    io.remove_checkpoint(Path(directory, "odd.ckpt"))

    first, second = Path(directory, "first.ckpt"), Path(directory, "second.ckpt")
    io.save_checkpoint(ok, first)
    io.teardown()
    Path(directory, "file").write_text("in the way")
    io.save_checkpoint(ok, Path(directory, "file", "inside.ckpt"))

    def whatever_comes_next():
        io.remove_checkpoint(first)
        io.teardown()

    attempt("in the background", whatever_comes_next)
    io.teardown()
    outcomes["kept when the next one fails"] = io.load_checkpoint(first)["state_dict"]["w"].tolist()
    io.save_checkpoint(
        {
            "state_dict": {"w": torch.zeros(3), "half": torch.ones(2, dtype=torch.bfloat16)},
            "n": (1, {2: None}),
        },
        second,
    )
    io.remove_checkpoint(first)
    loaded = io.load_checkpoint(second, map_location="cpu")
    outcomes["loaded"] = [
        loaded["state_dict"]["w"].tolist(),
        str(loaded["state_dict"]["half"].dtype),
        loaded["n"] == (1, {2: None}),
    ]
    link, pinned = Path(directory, "link.ckpt"), Path(directory, "pinned.ckpt")
    link.symlink_to("second.ckpt")
    io.remove_checkpoint(link)
    io.save_checkpoint(ok, pinned)
    io.teardown()
    pin(pinned)
    io.remove_checkpoint(pinned)
    outcomes["there"] = sorted(path.name for path in Path(directory).glob("*.ckpt"))
    attempt("removed", lambda: io.load_checkpoint(first))
    blocking = ShardckptIO(asynchronous=False, options=shardckpt.SaveOptions())
    attempt("exists", lambda: blocking.save_checkpoint(ok, second))
    return outcomes
