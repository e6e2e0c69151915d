"""A tiny Llama, trained by Hugging Face's Trainer under DDP or alone, as test_hf_trainer.py
asks."""

import json
import logging
import os
import signal
from pathlib import Path

import torch
import transformers
from integration_launch import digest, launch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch.utils.data import Dataset
from transformers import (
    AutoTokenizer,
    EarlyStoppingCallback,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.trainer_callback import ExportableState

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

    def on_step_begin(
        self, args, state, control, model=None, optimizer=None, lr_scheduler=None, **_kwargs
    ):
        digests = digest([model.state_dict(), optimizer.state_dict(), lr_scheduler.state_dict()])
        if self.start is None:
            self.start = [state.global_step, digests]
        elif state.is_world_process_zero:
            Path(args.output_dir, f"at{state.global_step}").write_text(json.dumps(digests))
        if state.global_step == self.dies_at:
            self.callback._manager.wait()  # what is committed by then is what the test says
            if args.world_size > 1:
                torch.distributed.barrier()
            os.kill(os.getpid(), signal.SIGKILL)


def made(
    ranks,
    directory,
    steps,
    preemption=None,
    kind=Trainer,
    processing_class=None,
    adapted=lambda model: model,
    **arguments,
):
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
    Path(directory, "trainer").mkdir(parents=True, exist_ok=True)
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
    trainer = kind(
        adapted(LlamaForCausalLM(config)),
        TrainingArguments(**chosen),
        train_dataset=Tokens(),
        eval_dataset=Tokens(),
        callbacks=[watch, callback],
        processing_class=processing_class,
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
    losses = {
        entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry
    }
    final = digest(
        [
            trainer.model.state_dict(),
            trainer.optimizer.state_dict(),
            trainer.lr_scheduler.state_dict(),
        ]
    )
    coordinator.share("leave", None)
    return {
        "start": watch.start,
        "losses": losses,
        "final": final,
        "rng": digest(torch.get_rng_state()),
    }


def migrate(coordinator, directory, half, steps):
    """Train with checkpoints of the Trainer's own, and from the last of these on with the callback;
    the run's steps, and the end."""
    quiet(coordinator)
    trainer, callback, _ = made(1, directory, half)
    trainer.remove_callback(callback)
    trainer.train()
    trainer, callback, watch = made(1, directory, steps)
    trainer.train(
        resume_from_checkpoint=callback.resume(trainer)
        or str(Path(directory, "trainer", f"checkpoint-{half}"))
    )
    final = digest(
        [
            trainer.model.state_dict(),
            trainer.optimizer.state_dict(),
            trainer.lr_scheduler.state_dict(),
        ]
    )
    weights = digest(
        shardckpt.restore(
            Path(directory, "run", str(steps)),
            {"model": trainer.model.state_dict()},
            only="model/**",
        )["model"]
    )
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

    trainer, callback, _ = made(
        ranks, directory, steps, OnPreemption(signals=(), file=notice), save_strategy="no"
    )
    trainer.add_callback(Tell())
    trainer.train(resume_from_checkpoint=callback.resume(trainer))
    return {
        "stopped": trainer.state.global_step,
        "own loading": "_load_from_checkpoint" not in vars(trainer),
    }


def refusals(coordinator, directory):
    quiet(coordinator)
    errors = {}

    def attempt(what, function):
        try:
            function()
        except ShardckptError as e:
            errors[what] = [type(e).__name__, str(e)]

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
    attempt("fallback", lambda: ShardckptCallback(Path(directory, "run"), fallback=True))
    return errors


def best(coordinator, directory, steps, resumes_at, arguments):
    """Train with evaluations whose metric is given by the step, and end with the best weights;
    perhaps in two runs."""
    ranks = quiet(coordinator)
    evals = {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "metric_for_best_model": "loss",
        "greater_is_better": False,
        "learning_rate": 0.3,
    }
    weights = {}

    class Note(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **_kwargs):
            weights[state.global_step] = digest(model.state_dict())

    for until in [steps] if resumes_at is None else [resumes_at, steps]:
        trainer, callback, _ = made(ranks, directory, until, **evals | arguments)
        trainer.add_callback(Note())
        trainer.train(resume_from_checkpoint=callback.resume(trainer))
    coordinator.share("leave", None)
    losses = {
        entry["step"]: entry["eval_loss"]
        for entry in trainer.state.log_history
        if "eval_loss" in entry
    }
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
    own = [
        name for name in ("_inner_training_loop", "_load_from_checkpoint") if name in vars(trainer)
    ]
    return {
        "raised": raised,
        "handler is back": handler_is_back,
        "ends at": trainer.state.global_step,
        "left": own,
    }


class Counting(TrainerCallback, ExportableState):
    """A callback with a state of its own."""

    def __init__(self, name="", steps=0):
        self.name, self.steps = name, steps

    def on_step_end(self, args, state, control, **_kwargs):
        self.steps += 1

    def state(self):
        return {"args": {"name": self.name}, "attributes": {"steps": self.steps}}


class Worsening(Trainer):
    """A Trainer whose evaluations never improve, with a gradient scaler as fp16 has on a GPU."""

    def evaluate(self, *_args, **_kwargs):
        metrics = {"eval_loss": 1.0 + self.state.global_step}
        self.control = self.callback_handler.on_evaluate(
            self.args, self.state, self.control, metrics
        )
        return metrics


def continued(coordinator, directory, first, second, half, steps):
    """Train half with the Trainer's own checkpoints ("stock") or the callback ("ours"), and the
    rest with the other or the same."""
    quiet(coordinator)
    arguments = {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "load_best_model_at_end": True,
        "metric_for_best_model": "loss",
        "greater_is_better": False,
        "restore_callback_states_from_checkpoint": True,
        "include_num_input_tokens_seen": "all",
    }

    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **_kwargs):
            control.should_training_stop |= state.global_step == half and half_only

    def new(who):
        trainer, callback, _ = made(1, directory, steps, kind=Worsening, **arguments)
        if who == "stock":
            trainer.remove_callback(callback)
        for one in (EarlyStoppingCallback(8), Counting("one"), Stop()):
            trainer.add_callback(one)
        trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=4)
        return trainer, callback

    half_only = True
    trainer, _ = new(first)
    trainer.train()
    old = str(Path(directory, "trainer", f"checkpoint-{half}"))
    if (first, second) == ("ours", "stock"):
        trainer, callback = new("ours")
        assert callback.export(trainer) == old
    half_only = False
    trainer, callback = new(second)
    resumed_from = callback.resume(trainer) if second == "ours" else None
    trainer.train(resume_from_checkpoint=resumed_from or old)
    counting = next(one for one in trainer.callback_handler.callbacks if isinstance(one, Counting))
    state = trainer.state
    return {
        "losses": {entry["step"]: entry["loss"] for entry in state.log_history if "loss" in entry},
        "state": [
            state.global_step,
            state.epoch,
            state.total_flos,
            state.best_global_step,
            state.num_input_tokens_seen,
        ],
        "scaler": trainer.accelerator.scaler.state_dict(),
        "counting": [counting.name, counting.steps],
        "rng": digest(torch.get_rng_state()),
        "optimizer": digest(trainer.optimizer.state_dict()),
    }


def for_inference(coordinator, directory):
    """Train with a tokenizer; load what an export of the checkpoint has, and what is stored beside
    it."""
    quiet(coordinator)
    words = Tokenizer(WordLevel({"[UNK]": 0, "two": 1, "words": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = Whitespace()
    trainer, _, _ = made(
        1,
        directory,
        3,
        processing_class=PreTrainedTokenizerFast(
            tokenizer_object=words, unk_token="[UNK]", pad_token="[UNK]"
        ),
    )
    trainer.train()
    run, exported = Path(directory, "run", "3"), Path(directory, "exported")
    shardckpt.export_safetensors(run, exported, strip_prefix="model/", include="model/**")
    model = LlamaForCausalLM.from_pretrained(exported)
    tokens = AutoTokenizer.from_pretrained(exported)("two words")["input_ids"]
    arguments = shardckpt.restore(run, {"trainer": shardckpt.PerProcess(None)}, only="trainer")[
        "trainer"
    ].value["arguments"]
    trained = digest(trainer.model.state_dict())
    return {
        "same": digest(model.state_dict()) == trained,
        "tokens": tokens,
        "learning_rate": arguments["learning_rate"],
    }


def weights(coordinator, directory, step):
    """For inference: the model alone, into a plain one."""
    quiet(coordinator)
    trainer, _, _ = made(1, directory, 3)
    state = {"model": trainer.model.state_dict()}
    shardckpt.restore(Path(directory, "run", str(step)), state, only="model/**", strict=False)
    return {"model": digest(state["model"])}
