"""The small files beside a Hugging Face model's weights, which an import keeps as metadata and an export writes back.

Without `config.json` nothing that Hugging Face's libraries know loads the weights.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from shardckpt.convert.files.object_files import begun
from shardckpt.io.store import Store

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardckpt.io.url import Location

__all__ = ["CONFIGS", "config_files", "without_others"]

CONFIGS = ("config.json", "generation_config.json")
"""Their names, and those of the metadata."""


def config_files(metadata: Mapping[str, Any], config: Mapping[str, Any] | None) -> dict[str, bytes]:
    """The files that are written, by name.

    Args:
        metadata: of the checkpoint.
        config: what takes the place of its `config.json`; None: nothing does.
    """
    kept = {name: metadata[name] for name in CONFIGS if isinstance(metadata.get(name), dict)}
    if config is not None:
        kept["config.json"] = dict(config)
    return {name: (json.dumps(doc, indent=2) + "\n").encode() for name, doc in kept.items()}


def without_others(files: Mapping[str, bytes], directory: Location, last: str) -> tuple[dict[str, bytes], list[str]]:
    """Leave out the files that somebody else has put there already.

    Args:
        files: by name.
        directory: where they go.
        last: the file that an export to that place writes last; what it has begun is its own.

    Returns:
        Those that are written, and the names of the others.
    """
    store = Store.open(directory)
    if directory.local is not None:
        ours = list(files) if (directory.local / f".{last}.partial").is_dir() else []
    else:
        ours = begun(directory, last)
    others = [name for name in files if name not in ours and store.exists(name)]
    return {name: data for name, data in files.items() if name not in others}, others
