"""The files of a model in safetensors: their names, layouts and small contents, planned before anything is read."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

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
    from shardckpt.convert.options import NameOptions
    from shardckpt.format.structure import Structure


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The files of a model."""

    outputs: Outputs
    weights: Mapping[str, SafetensorsFile]
    """Name on Hugging Face → layout."""
    index: bytes | None
    """Contents of `model.safetensors.index.json`; None: there is one file of weights, which needs no index."""
    configs: Mapping[str, bytes]
    """Name → contents of `config.json`, of the tokenizer's files, and of others of their kind."""
    notes: tuple[str, ...]
    """Requested things that the format cannot hold unchanged, a line each."""

    @property
    def small(self) -> dict[str, bytes]:
        """Name → contents of all files that are not weights."""
        return {**self.configs, **({} if self.index is None else {INDEX: self.index})}


def plan_model_files(
    structure: Structure,
    metadata: Mapping[str, Any],
    names: NameOptions,
    *,
    where: str,
    max_shard_size: int | str | None = None,
    header_metadata: Mapping[str, str] | None = None,
) -> ModelFiles:
    """Plan the files of a checkpoint's tensors.

    Args:
        structure: structure of the checkpoint.
        metadata: the checkpoint's metadata, in which an import keeps the small files.
        names: selection and naming of the tensors.
        where: location of the checkpoint, for messages.
        max_shard_size: bytes of tensors per file; None: one file.
        header_metadata: texts for the files' headers.

    Raises:
        OptionError, NamesMismatchError, ShapeMismatchError, DtypeError, DtypeMismatchError: as in `export_safetensors`.
    """
    outputs = outputs_of(structure, names, where, config=metadata.get(CONFIG))
    tensors = {output.name: output for output in outputs.tensors}
    shards = split({name: output.nbytes for name, output in tensors.items()}, max_shard_size)
    index = shards.index(sum(prod(output.shape) for output in outputs.tensors))
    notes = [*outputs.notes]
    if shards.oversized:
        more = f" and {len(shards.oversized) - 1:,} more" if len(shards.oversized) > 1 else ""
        notes.append(f"{shown(shards.oversized[0])}{more}: larger than max_shard_size, so in a file of its own.")
    configs = config_files(metadata, names.config, where)
    if names.dtype is not None and (converted := with_dtype(configs.get(CONFIG), outputs.tensors)) is not None:
        configs[CONFIG] = converted
    return ModelFiles(
        outputs,
        {file: lay_out([tensors[name] for name in members], header_metadata) for file, members in shards.files.items()},
        None if index is None else index.encode(),
        configs,
        tuple(notes),
    )
