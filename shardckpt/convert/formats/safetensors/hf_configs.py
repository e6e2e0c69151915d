"""The small files beside a Hugging Face model's weights, which an import keeps as metadata and an export writes back.

Without `config.json` Hugging Face's libraries cannot load the weights.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from shardckpt.convert.files.object_files import begun
from shardckpt.io.store import Store

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardckpt.io.url import Location

CONFIGS = ("config.json", "generation_config.json")
"""Names of these files, and of the metadata entries that keep them."""


def config_files(metadata: Mapping[str, Any], config: Mapping[str, Any] | None) -> dict[str, bytes]:
    """The files to write, by name.

    Args:
        metadata: metadata of the checkpoint.
        config: replaces the checkpoint's `config.json`; None: no replacement.
    """
    kept = {name: metadata[name] for name in CONFIGS if isinstance(metadata.get(name), dict)}
    if config is not None:
        kept["config.json"] = dict(config)
    return {name: (json.dumps(doc, indent=2) + "\n").encode() for name, doc in kept.items()}


def without_others(files: Mapping[str, bytes], directory: Location, last: str) -> tuple[dict[str, bytes], list[str]]:
    """Leave out the files that exist already and were not written by this export.

    Args:
        files: contents by name.
        directory: their destination.
        last: the file that an export to that place writes last; files of an incomplete export are its own.

    Returns:
        The files to write, and the names of the others.
    """
    store = Store.open(directory)
    if directory.local is not None:
        own = list(files) if (directory.local / f".{last}.partial").is_dir() else []
    else:
        own = begun(directory, last)
    others = [name for name in files if name not in own and store.exists(name)]
    return {name: data for name, data in files.items() if name not in others}, others
