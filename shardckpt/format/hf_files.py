"""The small files of a Hugging Face model beside its weights, as metadata of a checkpoint: configurations and tokenizers."""

from __future__ import annotations

import base64
import zlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

CONFIG = "config.json"
"""The model's configuration."""
CONFIGS = (CONFIG, "generation_config.json")
"""Names of the files that are kept as JSON, each in a metadata entry of its name."""
BYTES = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json", "vocab.json"),
    *("vocab.txt", "merges.txt", "spiece.model", "sentencepiece.bpe.model", "tekken.json", "chat_template.jinja", "chat_template.json"),
    *("preprocessor_config.json", "processor_config.json"),
)
"""Names of the files that are kept byte by byte, all in one metadata entry."""
LARGEST_FILE = 64 << 20
"""Most bytes of such a file."""
ENTRY = "hf_files"
"""The metadata entry: name → contents, compressed by zlib, in Base64."""


def as_metadata(contents: Mapping[str, bytes]) -> dict[str, Any]:
    """Metadata that keeps files byte by byte; empty if there are none."""
    packed = {name: base64.b64encode(zlib.compress(data, 9)).decode() for name, data in contents.items()}
    return {ENTRY: packed} if packed else {}
