"""A tiny Llama, trained by Hugging Face's Trainer under DDP or alone, as test_hf_trainer.py asks."""

import json
import logging
import os
import signal
from pathlib import Path

import torch
import transformers
from integration_launch import digest, launch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

import shardckpt
from shardckpt import ShardckptError
from shardckpt.training.integrations.hf_trainer import ShardckptCallback
from shardckpt.training.policies import OnPreemption

VOCABULARY, LENGTH, ROWS, BATCH = 31, 8, 20, 4
"""The batch is for all processes together."""


class Tokens(Dataset):
    def __len__(self):
        return ROWS

    def __getitem__(self, i):
        tokens = (torch.arange(LENGTH) * (i + 3) + i) % VOCABULARY
        return {"input_ids": tokens, "labels": tokens}


class Watch(TrainerCallback):
    """Notes what is there when a step begins; ends its process, if that is planned."""

    def __init__(self, dies_at, callback):
        self.dies_at, self.callback = dies_at, callback
        self.start = None

    def on_step_begin(self, args, state, control, model=None, optimizer=None, lr_scheduler=None, **_kwargs):
        found = digest([model.state_dict(), optimizer.state_dict(), lr_scheduler.state_dict()])
        if self.start is None:
            self.start = [state.global_step, found]
        elif state.is_world_process_zero:
            Path(args.output_dir, f"at{state.global_step}").write_text(json.dumps(found))
        if state.global_step == self.dies_at:
            self.callback._manager.wait()  # what is committed by then is what the test says
            if args.world_size > 1:
                torch.distributed.barrier()
            os.kill(os.getpid(), signal.SIGKILL)


def made(ranks, directory, steps, preemption=None, **arguments):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        attention_dropout=0.2,
        tie_word_embeddings=True,
    )
    callback = ShardckptCallback(Path(directory, "run"), preemption=preemption)
    Path(directory, "trainer").mkdir(exist_ok=True)
    chosen = {
        "output_dir": str(Path(directory, "trainer")),
        "max_steps": steps,
        "per_device_train_batch_size": BATCH // ranks,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_steps": 3,
        "save_total_limit": 2,
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "ddp_find_unused_parameters": False,
        "seed": 5,
        **arguments,
    }
    watch = Watch(None, callback)
    trainer = Trainer(
        LlamaForCausalLM(config),
        TrainingArguments(**chosen),
        train_dataset=Tokens(),
        eval_dataset=Tokens(),
        callbacks=[watch, callback],
    )
    return trainer, callback, watch


def quiet(coordinator):
    ranks = launch(coordinator)
    transformers.logging.set_verbosity_error()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    return ranks


def train(coordinator, directory, steps, dies_at=None, **arguments):
    """Train, beginning where the last one ended."""
    ranks = quiet(coordinator)
    trainer, callback, watch = made(ranks, directory, steps, **arguments)
    watch.dies_at = dies_at
    trainer.train(resume_from_checkpoint=callback.resume(trainer))
    losses = {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry}
    final = digest([trainer.model.state_dict(), trainer.optimizer.state_dict(), trainer.lr_scheduler.state_dict()])
    coordinator.share("leave", None)
    return {"start": watch.start, "losses": losses, "final": final, "rng": digest(torch.get_rng_state())}


def migrate(coordinator, directory, half, steps):
    """Train with checkpoints of the Trainer's own, and from the last of these on with the callback; the run's steps, and the end."""
    quiet(coordinator)
    trainer, callback, _ = made(1, directory, half)
    trainer.remove_callback(callback)
    trainer.train()
    trainer, callback, watch = made(1, directory, steps)
    trainer.train(resume_from_checkpoint=callback.resume(trainer) or str(Path(directory, "trainer", f"checkpoint-{half}")))
    final = digest([trainer.model.state_dict(), trainer.optimizer.state_dict(), trainer.lr_scheduler.state_dict()])
    weights = digest(shardckpt.restore(Path(directory, "run", str(steps)), {"model": trainer.model.state_dict()}, only="model/**")["model"])
    return {"start": watch.start[0], "final": final, "weights": weights}


def keep(coordinator, directory, steps):
    """Train, with an evaluation every three steps."""
    return train(coordinator, directory, steps, eval_strategy="steps", eval_steps=3)


def preempted(coordinator, directory, steps):
    """One process is told at the end of the second step."""
    ranks = quiet(coordinator)
    notice = Path(directory, f"notice{coordinator.world.process}")

    class Tell(TrainerCallback):
        def on_step_end(self, args, state, control, **_kwargs):
            if state.global_step == 2 and args.process_index == ranks - 1:
                notice.touch()

    trainer, callback, _ = made(ranks, directory, steps, OnPreemption(signals=(), file=notice), save_strategy="no")
    trainer.add_callback(Tell())
    trainer.train(resume_from_checkpoint=callback.resume(trainer))
    return {"stopped": trainer.state.global_step, "own loading": "_load_from_checkpoint" not in vars(trainer)}


def refusals(coordinator, directory):
    quiet(coordinator)
    found = {}

    def attempt(what, function):
        try:
            function()
        except ShardckptError as e:
            found[what] = [type(e).__name__, str(e)]

    trainer, callback, _ = made(1, directory, 3)
    attempt("another's", lambda: ShardckptCallback(Path(directory, "run")).resume(trainer))
    trainer.train(resume_from_checkpoint=callback.resume(trainer))
    trainer, callback, _ = made(1, directory, 6)
    callback.resume(trainer)
    attempt("not passed on", trainer.train)
    trainer, callback, _ = made(1, directory, 6)
    damaged = Path(directory, "run", "3", "checkpoint.json")
    damaged.write_bytes(damaged.read_bytes().replace(b"model", b"modul"))
    attempt("damaged", lambda: callback.resume(trainer))
    return found


def best(coordinator, directory, steps, resumes_at, arguments):
    """Train with evaluations whose metric is given by the step, and end with the best weights; perhaps in two runs."""
    ranks = quiet(coordinator)
    evals = {"eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "loss", "greater_is_better": False, "learning_rate": 0.3}
    weights = {}

    class Note(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **_kwargs):
            weights[state.global_step] = digest(model.state_dict())

    for until in [steps] if resumes_at is None else [resumes_at, steps]:
        trainer, callback, _ = made(ranks, directory, until, **evals | arguments)
        trainer.add_callback(Note())
        trainer.train(resume_from_checkpoint=callback.resume(trainer))
    coordinator.share("leave", None)
    losses = {entry["step"]: entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry}
    return {
        "losses": losses,
        "weights": weights,
        "final": digest(trainer.model.state_dict()),
        "best": [trainer.state.best_global_step, str(trainer.state.best_model_checkpoint)],
        "strategy": str(trainer.args.save_strategy.value),
    }


def raises(coordinator, directory, resumes):
    """Training that ends by an exception in the step after a save; what is there then."""
    quiet(coordinator)
    before = signal.getsignal(signal.SIGTERM)

    class Raise(TrainerCallback):
        def on_step_end(self, args, state, control, **_kwargs):
            if state.global_step == 4:
                raise ZeroDivisionError("mine")

    trainer, callback, _ = made(1, directory, 6, OnPreemption())
    trainer.add_callback(Raise())
    try:
        trainer.train(resume_from_checkpoint=callback.resume(trainer) if resumes else None)
    except ZeroDivisionError as e:
        raised = str(e)
        if not resumes:
            callback.close()
    handler_is_back = signal.getsignal(signal.SIGTERM) is before
    trainer.pop_callback(Raise)
    trainer.train(resume_from_checkpoint=callback.resume(trainer))
    own = [name for name in ("_inner_training_loop", "_load_from_checkpoint") if name in vars(trainer)]
    return {"raised": raised, "handler is back": handler_is_back, "ends at": trainer.state.global_step, "left": own}


def weights(coordinator, directory, step):
    """For inference: the model alone, into a plain one."""
    quiet(coordinator)
    trainer, _, _ = made(1, directory, 3)
    state = {"model": trainer.model.state_dict()}
    shardckpt.restore(Path(directory, "run", str(step)), state, only="model/**", strict=False)
    return {"model": digest(state["model"])}
