"""Splitting tensors among files, with an index, as Hugging Face's `save_pretrained` does it.

1. Tensors fill one file after the other, in order; a new file begins where the next tensor would
   exceed the size limit.
2. A tensor that alone exceeds the limit gets its own file, and the file begun before it continues
   after it.
3. A single file is `model.safetensors`; several are `model-00001-of-00002.safetensors` and so on,
   and `model.safetensors.index.json` lists the file of each tensor.

The split follows `huggingface_hub.split_torch_state_dict_into_shards`, the index follows
`transformers`.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardckpt.convert.strict_json import parse_json
from shardckpt.errors import FormatError, MissingDataError, OptionError
from shardckpt.options import parse_bytes
from shardckpt.state.names import shown
from shardckpt.text import Message, few, named, shorten

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from shardckpt.convert.files.file_version import FileVersion

INDEX = "model.safetensors.index.json"
_LARGEST_INDEX = 100_000_000
"""Most bytes of an index, as of the header of a safetensors file."""
_NAMES = re.compile(r"model(-\d{5,}-of-\d{5,})?\.safetensors|" + re.escape(INDEX))


_PART = re.compile(r"(.+)-(\d{5,6})-of-(\d{5,6})(\.safetensors|\.bin)")
"""Name of one file of a split model: model, number, count and ending."""
_SLICES = re.compile(r"consolidated\.(\d{2})\.(safetensors|pth)")
"""Name of one file of a model in Meta's form: each file has slices of the tensors, for one
tensor-parallel rank."""


def parts_of(name: str, names: Sequence[str], where: object) -> list[str]:
    """All files of the split model that a file belongs to, in order.

    The file alone if its name is not the name of a part.

    Args:
        name: name of the file.
        names: names of the files beside it.
        where: the directory, for messages.

    Raises:
        MissingDataError: other parts are missing.
        FormatError: the file has only slices of the tensors, or cannot be one of as many files as
            its name says.
    """
    sliced = sorted(filter(_SLICES.fullmatch, names)) if _SLICES.fullmatch(name) else []
    if len(sliced) > 1 or note_of_slices(name):
        raise FormatError(
            f"{where}: {few(sliced)} {'have' if len(sliced) > 1 else 'has'} slices of the tensors "
            "of a model in Meta's form, which cannot be joined here. Convert the model with "
            "transformers first, or give the path of one file to import only its slices."
        )
    match = _PART.fullmatch(name)
    if match is None:
        return [name]
    width, number, count = len(match[2]), int(match[2]), int(match[3])
    if not 1 <= number <= count:
        raise FormatError(
            f"{where}: {name} cannot be file {number} of {count}; get a new copy, or give it the "
            "name that it had."
        )
    parts = [
        f"{match[1]}-{number:0{width}d}-of-{match[3]}{match[4]}" for number in range(1, count + 1)
    ]
    missing = sorted({*parts} - {*names})
    if missing:
        raise MissingDataError(
            f"{where}: of the {count} files of a split model, {few(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} missing; get a complete copy, or give the "
            "path of one file to import only its tensors."
        )
    return parts


def parts_of_only_model(models: Sequence[str], names: Sequence[str], where: object) -> list[str]:
    """All files of the model that some files belong to, in order; see `parts_of`.

    Raises:
        OptionError: they belong to several models, as of two saves.
    """
    several = len({_model_of(name) for name in models}) > 1
    parts = [] if several else parts_of(models[0], names, where)
    if not {*models} <= {*parts}:
        advice = (
            "move the files of all models but one elsewhere"
            if any(map(is_part, models))
            else "give the path of one of them"
        )
        raise OptionError(f"{where}: there are several models ({few(models)}); {advice}.")
    return parts


def _model_of(name: str) -> object:
    """A value that is equal for all files of one model."""
    match = _PART.fullmatch(name)
    if match is not None:
        return match.group(1, 3, 4)
    return _SLICES.pattern if _SLICES.fullmatch(name) else name


def is_part(name: str) -> bool:
    """Whether a file has the name of one file of a split model, even if it is the only one."""
    return _PART.fullmatch(name) is not None


def note_of_part(name: str) -> list[str]:
    """A note that a file is only a part of a model; empty if its name does not say so."""
    match = _PART.fullmatch(name)
    if match is None:
        return note_of_slices(name)
    return (
        []
        if int(match[3]) == 1
        else [f"{name} is one of {int(match[3])} files of a split model; only it is read."]
    )


def note_of_slices(name: str) -> list[str]:
    """A note that a file is one of several with slices of the tensors.

    Empty if its name does not say so.
    """
    match = _SLICES.fullmatch(name)
    several = match is not None and int(match[1]) > 0
    return (
        [f"{name} has slices of the tensors of a model in Meta's form; only it is read."]
        if several
        else []
    )


def read_weight_map(index: FileVersion, suffix: str = "") -> Mapping[str, str]:
    """Tensor name → the file that contains it, from an index.

    Args:
        index: the index.
        suffix: ending of the names of all files.

    Raises:
        FormatError: it is not an index of files beside it that end in `suffix`.
    """
    raw = index.read_whole(_LARGEST_INDEX)
    try:
        doc = parse_json(raw)
    except ValueError as e:
        raise FormatError(
            f"{index} is not JSON that can be read ({e}); get a new copy of it."
        ) from e
    weight_map = doc.get("weight_map") if isinstance(doc, dict) else None
    if (
        not isinstance(weight_map, dict)
        or not weight_map
        or not all(isinstance(file, str) for file in weight_map.values())
    ):
        raise FormatError(
            f"{index} has no weight_map from tensors to files, or an empty one; get a new copy of "
            "it."
        )
    for file in set(weight_map.values()):
        if not file or "/" in file or not file.endswith(suffix):
            kind = f"a file *{suffix}" if suffix else "a file"
            raise FormatError(
                f"{index}: {shorten(file)} is not the name of {kind} in the same directory; get a "
                "new copy of it."
            )
    return weight_map


def check_index(
    where: str, weight_map: Mapping[str, str], files: Mapping[str, Collection[Any]]
) -> None:
    """Raise FormatError unless every tensor is in the file that the index names, and only there.

    Args:
        where: the index, for messages.
        weight_map: its tensors and their files.
        files: the names of the tensors in each of these files; keys that are not text are wrong.
    """
    for file, names in files.items():
        for name in names:
            if weight_map.get(name) != file:
                says = (
                    "does not know it"
                    if name not in weight_map
                    else f"says it is in {weight_map[name]}"
                )
                raise FormatError(
                    f"{where}: {shown(str(name))} is in {file}, but the index {says}; get new "
                    "copies of the files, or rewrite the index."
                )
    for name, file in weight_map.items():
        if name not in files[file]:
            raise FormatError(
                f"{where}: {shown(name)} should be in {file}, which does not have it; get new "
                "copies of both files."
            )


def is_of_a_model(name: str) -> bool:
    """Whether a file has a name of a model's files.

    Readers load every such file in a directory, so a directory holds one model.
    """
    return _NAMES.fullmatch(name) is not None


@dataclass(frozen=True, slots=True)
class Split:
    """The distribution of tensors over files."""

    files: Mapping[str, tuple[str, ...]]
    """File name → names of its tensors, in order."""
    total_size: int
    """Bytes of all tensors' elements."""
    oversized: tuple[str, ...]
    """Tensors that are larger than the size limit, each in a file of its own."""

    @property
    def weight_map(self) -> dict[str, str]:
        """Tensor name → the file that contains it."""
        return {name: file for file, names in self.files.items() for name in names}

    def index(self, total_parameters: int) -> str | None:
        """The text of `INDEX`; None for a single file, which needs no index.

        Args:
            total_parameters: number of elements of all tensors, tied ones once.
        """
        if len(self.files) < 2:
            return None
        metadata = {"total_parameters": total_parameters, "total_size": self.total_size}
        return (
            json.dumps(
                {"metadata": metadata, "weight_map": self.weight_map}, indent=2, sort_keys=True
            )
            + "\n"
        )


def split(sizes: Mapping[str, int], max_shard_size: int | str | None = None) -> Split:
    """Distribute tensors over files.

    Args:
        sizes: bytes of each tensor's elements, by name, in order.
        max_shard_size: bytes of elements in a file, or text: "5GB" (decimal, as everywhere at
            Hugging Face) or "5GiB". None: one file.

    Raises:
        OptionError: the size is not positive.

    >>> [file[6:] for file in split({"a": 6, "b": 3, "c": 3}, 5).weight_map.values()]
    ['00001-of-00003.safetensors', '00002-of-00003.safetensors', '00003-of-00003.safetensors']
    """
    limit = None if max_shard_size is None else parse_bytes(max_shard_size, "max_shard_size")
    if limit is not None and limit <= 0:
        raise OptionError(Message(named("max_shard_size", max_shard_size), ": must be positive."))
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
    names = (
        ["model.safetensors"]
        if count == 1
        else [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    )
    oversized = tuple(name for name, size in sizes.items() if limit is not None and size > limit)
    return Split(
        {file: tuple(tensors) for file, tensors in zip(names, full, strict=True)},
        sum(sizes.values()),
        oversized,
    )
