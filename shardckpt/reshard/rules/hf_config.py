"""The preset for a Hugging Face model, chosen by its `config.json`.

`model_type` chooses the family. The numbers of heads are passed on, so that a cut through a head is
reported: transformers and vLLM replicate key-value heads if there are fewer heads than parts.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardckpt.errors import OptionError
from shardckpt.io.status import is_directory
from shardckpt.reshard.rules.preset import Heads, Preset
from shardckpt.state.names import did_you_mean
from shardckpt.text import shorten

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

MODEL_TYPES = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), "llama"),
    **dict.fromkeys(("mixtral", "qwen2_moe", "qwen3_moe"), "mixtral"),
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text"), "gemma"),
    "gpt2": "gpt2",
    **dict.fromkeys(("t5", "mt5", "umt5"), "t5"),
}
"""`model_type` → the family with the same tensor names."""

_LARGEST = 16 << 20
"""Maximum bytes of a configuration; real ones have a few thousand."""


def read_preset(path: str | os.PathLike[str], roles: str = "") -> Preset:
    """The preset for a model; see `Rules.from_hf_config`."""
    file, config = read_config(path)
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in MODEL_TYPES:
        raise OptionError(
            f"{file}: there is no preset for model_type "
            f"{shorten(kind)}{did_you_mean(str(kind), MODEL_TYPES)}; there are those for "
            f"{', '.join(MODEL_TYPES)}. Choose one by its name, as in llama/fsdp+tp, or write "
            "rules."
        )
    family = MODEL_TYPES[kind]
    return Preset.parse(f"{family}/{roles}" if roles else family, head_counts(config))


def read_config(path: str | os.PathLike[str]) -> tuple[Path, dict[str, Any]]:
    """The path of a model's configuration file, and its content.

    Args:
        path: `config.json`, or its directory.

    Raises:
        OptionError: the file cannot be read.
    """
    file = Path(path)
    if is_directory(file):
        file /= "config.json"
    try:
        with file.open("rb") as stream:
            config = json.loads(stream.read(_LARGEST))
    except (OSError, ValueError, RecursionError) as error:
        raise OptionError(f"{file}: the model's configuration cannot be read: {error}.") from error
    return file, config if isinstance(config, dict) else {}


def head_counts(config: Mapping[str, Any]) -> Heads | None:
    """Numbers of attention heads of a model, under the keys of any family.

    None: the configuration has none.
    """
    query = _count(config, "num_attention_heads", "n_head", "num_heads")
    return None if query is None else Heads(query, _count(config, "num_key_value_heads") or query)


def _count(config: Mapping[str, Any], *keys: str) -> int | None:
    """The value of the first key that has a positive integer in the configuration.

    None: no key has one.
    """
    return next(
        (config[key] for key in keys if type(config.get(key)) is int and config[key] > 0), None
    )
