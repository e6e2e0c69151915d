"""The files of one of PEFT's adapters.

They are `adapter_model.safetensors`, `adapter_config.json`, and the tokenizer's files.

`peft.PeftModel.from_pretrained(base, directory)` loads them. Which tensors they have, and under
which keys, follows from the metadata that `ShardckptCallback` saves.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from shardckpt.convert.formats.safetensors.hf_configs import config_files
from shardckpt.convert.formats.safetensors.layout import lay_out
from shardckpt.convert.formats.safetensors.model_files import ModelFiles
from shardckpt.convert.naming.apply import outputs_of
from shardckpt.convert.options import SafetensorsOptions
from shardckpt.errors import CorruptionError, OptionError
from shardckpt.format.hf_files import ADAPTERS, CONFIGS, adapter_keys
from shardckpt.options import option
from shardckpt.reading.naming.renaming import NameTable
from shardckpt.state.select import check_selection, selector
from shardckpt.text import Message, few, named

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardckpt.reading.checkpoint import Checkpoint
    from shardckpt.reading.naming.substitution import Substitution

_WEIGHTS, _CONFIG = "adapter_model.safetensors", "adapter_config.json"
_MODEL = "model/"
"""Beginning of the names under which the callback saves the model."""


@dataclass(frozen=True, kw_only=True)
class PeftOptions(SafetensorsOptions):
    """Options of an export to PEFT, with the keys of an adapter's tensors."""

    keys: Mapping[str, str] | None = option(
        "Key in PEFT's file by the tensor's name in the checkpoint.", kind="python"
    )

    def renames(self) -> tuple[Substitution | NameTable, ...]:
        """The one rule: each tensor gets its key."""
        return (NameTable(f"metadata {ADAPTERS!r}", dict(self.keys or {})),)


def plan_adapter_files(checkpoint: Checkpoint, options: PeftOptions) -> ModelFiles:
    """Plan the files of the adapter in a checkpoint.

    Raises:
        OptionError: the checkpoint has no adapter, or several are selected, or PEFT computes a
            tensor when it saves.
        CorruptionError: the metadata has something else where adapters are described.
        NamesMismatchError, DtypeError, DtypeMismatchError: as in `export_safetensors`.
    """
    metadata, structure, where = (
        checkpoint.metadata,
        checkpoint.record.structure,
        str(checkpoint.location),
    )
    described = _description(metadata, where)
    names = [name for name in structure.tensors if name.startswith(_MODEL)]
    check_selection(options.exclude or None, structure.tree, where, option="exclude")
    included, excluded = selector(options.include), selector(options.exclude or ())
    selected: dict[str, dict[str, str]] = {}
    for adapter, of in described.items():
        own = adapter_keys(
            [name.removeprefix(_MODEL) for name in names], adapter, described, of["keys"]
        )
        keys = {
            _MODEL + name: key
            for name, key in own.items()
            if included(_MODEL + name) and not excluded(_MODEL + name)
        }
        if any(
            name in of["keys"] or adapter in name.split(".")
            for name in own
            if _MODEL + name in keys
        ) or (keys and len(described) == 1):
            selected[adapter] = keys
    if len(selected) != 1:
        raise OptionError(
            Message(
                f"{where}: it has the adapters {few(sorted(described))}, and PEFT keeps each in a "
                "directory of its own; select one with ",
                named("include", f"model/**.{min(described)}.**"),
                ".",
            )
        )
    ((adapter, keys),) = selected.items()
    if described[adapter]["computed"]:
        raise OptionError(
            f"{where}: PEFT computes {few(described[adapter]['computed'])} of the adapter "
            f"{adapter!r} when it saves, so only PEFT can write its files: resume the training, "
            "and call model.save_pretrained(…)."
        )
    chosen = replace(options, include=sorted(keys), exclude=None, keys=keys)
    outputs = outputs_of(structure, chosen, where)
    configs = {
        name: data
        for name, data in config_files(metadata, None, where).items()
        if name not in CONFIGS
    }
    configs[_CONFIG] = (
        json.dumps(described[adapter]["config"], indent=2, sort_keys=True) + "\n"
    ).encode()
    return ModelFiles(
        outputs,
        {_WEIGHTS: lay_out(outputs.tensors, {"format": "pt"})},
        None,
        configs,
        outputs.notes,
    )


def _description(metadata: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The entry of the adapters in the metadata."""
    described = metadata.get(ADAPTERS)
    if described is None:
        raise OptionError(
            f"{where}: it has no adapter of PEFT that ShardckptCallback saved; write its tensors "
            "with --to safetensors, and name them with --rename."
        )
    kinds = {"config": dict, "keys": dict, "computed": list}
    valid = isinstance(described, dict) and all(
        isinstance(of, dict) and all(isinstance(of.get(key), kind) for key, kind in kinds.items())
        for of in described.values()
    )
    if not valid or not described:
        raise CorruptionError(f"{where}: metadata {ADAPTERS!r} does not describe adapters of PEFT.")
    return dict(described)
