"""PEFT's adapters (LoRA, QLoRA and others) in a training.

The module determines what is saved of the model, and what proves that the rest is the same again.

Saved are the parameters that are trained, the tensors that PEFT's own files have, and running
statistics of normalizations. All other tensors are the base model's. They are not saved: the
program loads the base model before it resumes, and the fingerprint of these tensors, which every
save records, must be the same.

The metadata of a checkpoint has the configuration of each adapter, from which `shardckpt export
--to peft` makes PEFT's own files.
"""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch

from shardckpt.errors import MismatchError
from shardckpt.format.hf_files import ADAPTERS, adapter_keys
from shardckpt.state.names import imported_module
from shardckpt.text import few
from shardckpt.training.modules import NamedModule
from shardckpt.writing.fingerprint import fingerprint

if TYPE_CHECKING:
    from shardckpt.frameworks.coordination import Coordinator

_STATISTICS = torch.nn.modules.batchnorm._NormBase  # noqa: SLF001  (torch has no public name for it)


class Adapters:
    """The adapters of a PEFT model, and the base model below them."""

    def __init__(self, model: Any) -> None:
        """Find what is the adapters' and what is the base model's.

        Args:
            model: a `peft.PeftModel` without wrappers; its parameters may be DTensors.
        """
        from peft import get_peft_model_state_dict

        self._model = model
        module = NamedModule("model", model)
        held = model.state_dict()
        names = {id(value): module.name_of(key) for key, value in held.items()}
        self._keys: dict[str, dict[str, str]] = {}
        """For each adapter the keys that PEFT gives its tensors in a file, by name."""
        self._made: dict[str, list[str]] = {}
        """For each adapter the keys of tensors that PEFT computes when it saves."""
        for adapter in model.peft_config:
            saved = get_peft_model_state_dict(
                model, state_dict=dict(held), adapter_name=adapter, save_embedding_layers=False
            )
            self._keys[adapter] = {
                names[id(value)]: key for key, value in saved.items() if id(value) in names
            }
            self._made[adapter] = sorted(
                key for key, value in saved.items() if id(value) not in names
            )
        trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
        for path, part in model.named_modules():
            if isinstance(part, _STATISTICS):
                trained |= {
                    module.name_of(f"{path}.{name}")
                    for name, _ in part.named_buffers(recurse=False)
                }
        stored = trained.union(*self._keys.values())
        extra = {name for name in module.names if name.rpartition(".")[2] == "_extra_state"}
        self.base = frozenset(module.names) - stored - extra
        """Names of the base model's tensors, which are not saved."""
        self._stored = [name for name in module.names if name in stored]

    def metadata(self) -> dict[str, Any]:
        """The metadata that an export to PEFT needs."""
        adapters: dict[str, Any] = {}
        for adapter, config in self._model.peft_config.items():
            with TemporaryDirectory(prefix="shardckpt-") as directory:
                config.save_pretrained(directory)
                document = json.loads(Path(directory, "adapter_config.json").read_bytes())
            document |= {"inference_mode": True, "base_model_name_or_path": self.base_name(adapter)}
            if config.task_type is None:  # PEFT finds the class of the base model by it
                kind = type(self._model.get_base_model())
                document["auto_mapping"] = {
                    "base_model_class": kind.__name__,
                    "parent_library": kind.__module__,
                }
            keys = self._keys[adapter]
            by_rule = adapter_keys(self._stored, adapter, self._model.peft_config, {})
            exceptions = {
                name: keys.get(name) for name in self._stored if keys.get(name) != by_rule.get(name)
            }
            adapters[adapter] = {
                "config": document,
                "keys": exceptions,
                "computed": self._made[adapter],
            }
        return {ADAPTERS: adapters}

    def base_name(self, adapter: str) -> str | None:
        """The name or path of the base model, as the adapter's configuration or model has it."""
        model = self._model.get_base_model()
        name = self._model.peft_config[adapter].base_model_name_or_path or getattr(
            model, "name_or_path", None
        )
        return str(name) if name else None

    def fingerprint(self, coordinator: Coordinator | None) -> dict[str, Any]:
        """Names and a fingerprint of the base model, to be saved. All processes call it.

        Raises:
            StructureMismatchError: processes have different base models.
        """
        values = NamedModule("model", self._model).collect()
        tensors = fingerprint(
            {name: values[name] for name in sorted(self.base) if name in values},
            coordinator=coordinator,
        ).tensors
        return {
            "name": self.base_name(next(iter(self._model.peft_config))),
            "tensors": dict(tensors),
        }


def adapters_of(model: Any) -> Adapters | None:
    """The adapters of a model without wrappers, if PEFT made it."""
    peft = imported_module("peft")
    return Adapters(model) if peft is not None and isinstance(model, peft.PeftModel) else None


def check_base(own: dict[str, Any], saved: dict[str, Any], where: str) -> None:
    """Raise MismatchError unless the base model is the one that the checkpoint was trained on.

    Args:
        own: the `fingerprint` of the base model in memory.
        saved: that of the checkpoint.
        where: location of the checkpoint.
    """
    ours, theirs = own["tensors"], saved["tensors"]
    wrong = sorted(
        name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)
    )
    if wrong:
        raise MismatchError(
            f"{where}: the adapters were trained on another base model ({saved['name']!r}; the "
            f"model in memory is {own['name']!r}): {few(wrong)} differ. Load the base model that "
            "the training began with, in the same dtype and quantization."
        )
