"""The small files beside a Hugging Face model's weights.

An import keeps these files as metadata, and an export writes them back.

Without `config.json` Hugging Face's libraries cannot load the weights; without the tokenizer's
files they cannot use the model.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections import Counter
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardckpt.convert.files.local_files import begun_here
from shardckpt.convert.files.object_files import begun
from shardckpt.errors import CorruptionError, OptionError
from shardckpt.format.hf_files import BYTES, CONFIGS, ENTRY, LARGEST_FILE
from shardckpt.io.status import is_directory, is_file
from shardckpt.io.store import Store
from shardckpt.reshard.rules.hf_config import read_config

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Mapping

    from shardckpt.io.url import Location
    from shardckpt.reading.naming.outputs import OutputTensor

_OF_TRANSFORMERS = frozenset({"float64", "float32", "float16", "bfloat16"})
"""Dtypes that a model can be loaded with."""


def config_files(
    metadata: Mapping[str, Any], config: str | os.PathLike[str] | None, where: str
) -> dict[str, bytes]:
    """The files to write, by name.

    Args:
        metadata: metadata of the checkpoint.
        config: a `config.json` that replaces the checkpoint's; or a directory, all files of which
            replace the checkpoint's.
        where: location of the checkpoint, for messages.

    Raises:
        CorruptionError: the metadata has something else where files are kept.
        OptionError: a file of the directory cannot be read.
    """
    documents = {name: metadata[name] for name in CONFIGS if isinstance(metadata.get(name), dict)}
    kept = _files_in_metadata(metadata, where)
    if config is not None:
        file, documents["config.json"] = read_config(config)
        if is_directory(Path(config)):
            documents |= {
                name: read_config(path)[1]
                for name in CONFIGS
                if is_file(path := file.with_name(name))
            }
            kept |= {name: _read(path) for name in BYTES if is_file(path := file.with_name(name))}
    return {
        name: (json.dumps(doc, indent=2) + "\n").encode() for name, doc in documents.items()
    } | kept


def with_dtype(config: bytes | None, tensors: Iterable[OutputTensor]) -> bytes | None:
    """A `config.json` that names the dtype that most elements have, or None if it names none.

    By this dtype the library transformers loads all of them.
    """
    if config is None:
        return None
    elements: Counter[str] = Counter()
    for tensor in tensors:
        elements[tensor.dtype.name] += prod(tensor.shape)
    name = max(elements.keys() & _OF_TRANSFORMERS, key=elements.__getitem__, default=None)
    if name is None:
        return None

    def renamed(key: str, value: Any) -> Any:
        # Models of several parts have a config of each.
        if isinstance(value, dict) and key != "quantization_config":
            return {inner: renamed(inner, part) for inner, part in value.items()}
        named = key in ("dtype", "torch_dtype") and isinstance(value, str)
        return name if named and value in _OF_TRANSFORMERS else value

    document = json.loads(config)
    changed = renamed("", document)
    return None if changed == document else (json.dumps(changed, indent=2) + "\n").encode()


def _files_in_metadata(metadata: Mapping[str, Any], where: str) -> dict[str, bytes]:
    packed = metadata.get(ENTRY)
    if not isinstance(packed, dict):
        return {}
    files = {}
    for name in packed.keys() & {*BYTES}:
        inflate = zlib.decompressobj()
        try:
            files[name] = inflate.decompress(
                base64.b64decode(packed[name], validate=True), LARGEST_FILE
            )
        except (TypeError, ValueError, zlib.error) as error:
            raise CorruptionError(
                f"{where}: metadata {ENTRY!r} does not hold {name}: {error}."
            ) from error
        if not inflate.eof:
            raise CorruptionError(
                f"{where}: in metadata {ENTRY!r}, {name} is incomplete or has more than "
                f"{LARGEST_FILE:,} bytes."
            )
    return {name: files[name] for name in BYTES if name in files}


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(LARGEST_FILE + 1)
    except OSError as error:
        raise OptionError(f"{path}: the file cannot be read: {error}.") from error
    if len(data) > LARGEST_FILE:
        raise OptionError(
            f"{path}: it has more than {LARGEST_FILE:,} bytes, so it is not a tokenizer; move it "
            "elsewhere."
        )
    return data


def without_others(
    files: Mapping[str, bytes], directory: Location, last: str
) -> tuple[dict[str, bytes], list[str]]:
    """Leave out the files that exist already and were not written by this export.

    Args:
        files: contents by name.
        directory: their destination.
        last: the file that an export to that place writes last; files of an incomplete export are
            its own.

    Returns:
        The files to write, and the names of the others.
    """
    store = Store.open(directory)
    path = directory.local_path
    own = begun(directory, last) if path is None else begun_here(path, last)
    others = [name for name in files if name not in own and store.exists(name)]
    return {name: data for name, data in files.items() if name not in others}, others
