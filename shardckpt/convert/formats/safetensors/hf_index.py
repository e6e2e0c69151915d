"""Splitting tensors among files, and the index of them, as Hugging Face's `save_pretrained` does it.

1. Tensors go in order into one file after the other; a file is full where the next tensor would make it longer than allowed.
2. A tensor that is longer by itself has a file of its own, and the file begun before it goes on behind it.
3. One file is `model.safetensors`; several are `model-00001-of-00002.safetensors` and so on, and `model.safetensors.index.json`
   says which tensor is in which.

The rule is that of `huggingface_hub.split_torch_state_dict_into_shards`, the index that of `transformers`.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardckpt.errors import OptionError
from shardckpt.options import parse_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["INDEX", "Split", "is_of_a_model", "split"]

INDEX = "model.safetensors.index.json"
_NAMES = re.compile(r"model(-\d{5,}-of-\d{5,})?\.safetensors|" + re.escape(INDEX))


def is_of_a_model(name: str) -> bool:
    """Whether a file is called as a model's files are. Readers take what they find of them in a directory: there is room for one model."""
    return _NAMES.fullmatch(name) is not None


@dataclass(frozen=True, slots=True)
class Split:
    """Tensors, dealt out to files."""

    files: Mapping[str, tuple[str, ...]]
    """The names of the tensors in each, by the name of the file, in order."""
    total_size: int
    """Bytes of all tensors' elements."""

    @property
    def weight_map(self) -> dict[str, str]:
        """The file that each tensor is in."""
        return {name: file for file, names in self.files.items() for name in names}

    def index(self, total_parameters: int) -> str | None:
        """The text of `INDEX`; None where there is one file, which needs none.

        Args:
            total_parameters: elements of all tensors, tied ones once.
        """
        if len(self.files) < 2:
            return None
        metadata = {"total_parameters": total_parameters, "total_size": self.total_size}
        return json.dumps({"metadata": metadata, "weight_map": self.weight_map}, indent=2, sort_keys=True) + "\n"


def split(sizes: Mapping[str, int], max_shard_size: int | str | None = None) -> Split:
    """Deal tensors out to files.

    Args:
        sizes: bytes of each tensor's elements, by name, in order.
        max_shard_size: bytes of elements in a file, or text: "5GB" (decimal, as everywhere at Hugging Face) or "5GiB". None: one file.

    Raises:
        OptionError: it is no positive size.

    >>> split({"a": 6, "b": 3, "c": 3}, 5).weight_map
    {'a': 'model-00001-of-00003.safetensors', 'b': 'model-00002-of-00003.safetensors', 'c': 'model-00003-of-00003.safetensors'}
    """
    limit = None if max_shard_size is None else parse_bytes(max_shard_size, "max_shard_size")
    if limit is not None and limit <= 0:
        raise OptionError(f"max_shard_size={max_shard_size!r}: must be positive.")
    full: list[list[str]] = []
    filling: list[str] = []
    filled = 0
    for name, size in sizes.items():
        if limit is not None and size > limit:
            full.append([name])
            continue
        if limit is not None and filled + size > limit:
            full.append(filling)
            filling, filled = [], 0
        filling.append(name)
        filled += size
    full += [filling] if filling or not full else []
    count = len(full)
    names = ["model.safetensors"] if count == 1 else [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    return Split({file: tuple(tensors) for file, tensors in zip(names, full, strict=True)}, sum(sizes.values()))
