"""Values that Hugging Face's Trainer has beside the model and the optimizer, as plain data.

They are its state with the states of its callbacks, the gradient scaler and the arguments; and the
files of the model's configuration and tokenizer.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from transformers.trainer_callback import ExportableState

from shardckpt.format.hf_files import BYTES, CONFIGS, as_metadata
from shardckpt.runs.retention import Best
from shardckpt.training.integrations.peft_adapters import adapters_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from transformers import Trainer, TrainingArguments

_log = logging.getLogger(__name__)


class TrainerValues:
    """The Trainer's state.

    Process 0's is stored for all, because logged times differ between processes.
    """

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}
        """The fields of a `TrainerState`."""
        self.between_epochs = False
        """Whether the state was saved before an epoch began, rather than before a step."""
        self.scaler: dict[str, Any] | None = None
        """The state of the gradient scaler of fp16; None: there is none, or an earlier release
        saved."""
        self.arguments: dict[str, Any] = {}
        """The `TrainingArguments`, as JSON."""
        self.adapters_alone = False
        """Whether the base model below PEFT's adapters was left out."""

    def take(self, trainer: Trainer, between_epochs: bool, *, adapters_alone: bool) -> None:
        """Take the values of a Trainer, as its own checkpoints do."""
        callbacks: dict[str, list[Any]] = {}
        for callback in (*trainer.callback_handler.callbacks, trainer.control):
            if isinstance(callback, ExportableState):
                callbacks.setdefault(type(callback).__name__, []).append(callback.state())
        of_callbacks = {
            name: states[0] if len(states) == 1 else states for name, states in callbacks.items()
        }
        self.state = {**dataclasses.asdict(trainer.state), "stateful_callbacks": of_callbacks}
        self.between_epochs, self.adapters_alone = between_epochs, adapters_alone
        scaler = getattr(trainer.accelerator, "scaler", None)
        self.scaler = None if scaler is None else scaler.state_dict()
        self.arguments = json.loads(trainer.args.to_json_string())

    def restore_scaler(self, trainer: Trainer) -> None:
        """Give the gradient scaler its state, if both the checkpoint and the Trainer have one."""
        scaler = getattr(trainer.accelerator, "scaler", None)
        if scaler is not None and self.scaler is not None:
            scaler.load_state_dict(self.scaler)
        elif self.scaler is not None or scaler is not None:
            _log.warning(
                "only the %s has a gradient scaler; it is not restored.",
                "Trainer" if self.scaler is None else "checkpoint",
            )

    def state_dict(self) -> dict[str, Any]:
        """The values, to be saved."""
        more = {"adapters_alone": True} if self.adapters_alone else {}
        return {
            "state": self.state,
            "between_epochs": self.between_epochs,
            "scaler": self.scaler,
            "arguments": self.arguments,
            **more,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the values that were saved."""
        self.state, self.between_epochs = state["state"], state["between_epochs"]
        self.scaler, self.arguments = state.get("scaler"), state.get("arguments", {})
        self.adapters_alone = state.get("adapters_alone", False)


def model_files(trainer: Trainer) -> dict[str, Any]:
    """The files that the Trainer writes beside the weights for inference, as metadata."""
    collator = getattr(trainer, "data_collator", None)
    processing = getattr(trainer, "processing_class", None) or getattr(collator, "tokenizer", None)
    model = unwrapped(trainer)
    adapters = adapters_of(model)
    sources = (
        getattr(model, "config", None),
        getattr(model, "generation_config", None),
        processing,
    )
    with TemporaryDirectory(prefix="shardckpt-") as directory:
        for source in sources:
            if source is not None and hasattr(source, "save_pretrained"):
                source.save_pretrained(directory)
        written = [path.name for path in Path(directory).iterdir()]
        files = {
            name: Path(directory, name).read_bytes()
            for name in (*CONFIGS, *BYTES)
            if name in written
        }
    documents = {name: json.loads(files[name]) for name in CONFIGS if name in files}
    for name, document in list(documents.items()):
        try:
            json.dumps(document, allow_nan=False)
        except ValueError:
            _log.warning("%s has NaN or infinity, which JSON has not; it is not saved.", name)
            del documents[name]
    own = {} if adapters is None else adapters.metadata()
    return {
        **documents,
        **own,
        **as_metadata({name: files[name] for name in BYTES if name in files}),
    }


def unwrapped(trainer: Trainer) -> Any:
    """The model without wrappers."""
    return trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)


def best_of(args: TrainingArguments) -> Best:
    """The rule by which the Trainer's arguments choose the best model."""
    metric = args.metric_for_best_model
    return Best(
        1,
        metric if metric.startswith("eval_") else f"eval_{metric}",
        "max" if args.greater_is_better else "min",
    )
