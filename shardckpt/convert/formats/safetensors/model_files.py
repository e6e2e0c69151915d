"""The files of a model in safetensors: their names, layouts and small contents.

The files are planned before anything is read.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from shardckpt.convert.formats.safetensors.hf_configs import config_files, with_dtype
from shardckpt.convert.formats.safetensors.hf_index import INDEX, split
from shardckpt.convert.formats.safetensors.layout import lay_out
from shardckpt.convert.naming.apply import outputs_of
from shardckpt.format.hf_files import CONFIG
from shardckpt.state.names import shown

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardckpt.convert.formats.safetensors.layout import SafetensorsFile
    from shardckpt.convert.naming.apply import Outputs
    from shardckpt.convert.options import SafetensorsOptions
    from shardckpt.reading.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The files of a model."""

    outputs: Outputs
    weights: Mapping[str, SafetensorsFile]
    """Name on Hugging Face → layout."""
    index: bytes | None
    """Contents of `model.safetensors.index.json`; None: there is one file of weights, which needs
    no index."""
    configs: Mapping[str, bytes]
    """Name → contents of `config.json`, of the tokenizer's files, and of others of their kind."""
    notes: tuple[str, ...]
    """Requested things that the format cannot hold unchanged, a line each."""

    @property
    def small(self) -> dict[str, bytes]:
        """Name → contents of all files that are not weights."""
        return {**self.configs, **({} if self.index is None else {INDEX: self.index})}


def plan_model_files(checkpoint: Checkpoint, options: SafetensorsOptions) -> ModelFiles:
    """Plan the files of a checkpoint's tensors.

    Files that an import has kept in the checkpoint's metadata are among them.

    Raises:
        OptionError, NamesMismatchError, ShapeMismatchError, DtypeError, DtypeMismatchError: as in
        `export_safetensors`.
    """
    metadata, where = checkpoint.metadata, str(checkpoint.location)
    outputs = outputs_of(checkpoint.record.structure, options, where, config=metadata.get(CONFIG))
    tensors = {output.name: output for output in outputs.tensors}
    shards = split(
        {name: output.nbytes for name, output in tensors.items()}, options.max_shard_size
    )
    index = shards.index(sum(prod(output.shape) for output in outputs.tensors))
    notes = [*outputs.notes]
    if shards.oversized:
        more = f" and {len(shards.oversized) - 1:,} more" if len(shards.oversized) > 1 else ""
        notes.append(
            f"{shown(shards.oversized[0])}{more}: larger than max_shard_size, so in a file of its "
            "own."
        )
    configs = config_files(metadata, options.config, where)
    if (
        options.dtype is not None
        and (converted := with_dtype(configs.get(CONFIG), outputs.tensors)) is not None
    ):
        configs[CONFIG] = converted
    return ModelFiles(
        outputs,
        {
            file: lay_out([tensors[name] for name in members], options.metadata)
            for file, members in shards.files.items()
        },
        None if index is None else index.encode(),
        configs,
        tuple(notes),
    )
