"""The small files of a Hugging Face model beside its weights, as metadata of a checkpoint.

These files are configurations and tokenizers.
"""

from __future__ import annotations

import base64
import zlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

CONFIG = "config.json"
"""The model's configuration."""
CONFIGS = (CONFIG, "generation_config.json")
"""Names of the files that are kept as JSON, each in a metadata entry of its name."""
BYTES = (
    *(
        "tokenizer.json",
        "tokenizer_config.json",
        "tokenizer.model",
        "special_tokens_map.json",
        "added_tokens.json",
        "vocab.json",
    ),
    *(
        "vocab.txt",
        "merges.txt",
        "spiece.model",
        "sentencepiece.bpe.model",
        "tekken.json",
        "chat_template.jinja",
        "chat_template.json",
    ),
    *("preprocessor_config.json", "processor_config.json"),
)
"""Names of the files that are kept byte by byte, all in one metadata entry."""
LARGEST_FILE = 64 << 20
"""Most bytes of such a file."""
ENTRY = "hf_files"
"""The metadata entry: name → contents, compressed by zlib, in Base64."""
ADAPTERS = "peft"
"""The metadata entry of PEFT's adapters: adapter → `config`, the contents of its
`adapter_config.json`, and `keys`."""


def as_metadata(contents: Mapping[str, bytes]) -> dict[str, Any]:
    """Metadata that keeps files byte by byte; empty if there are none."""
    packed = {
        name: base64.b64encode(zlib.compress(data, 9)).decode() for name, data in contents.items()
    }
    return {ENTRY: packed} if packed else {}


def adapter_keys(
    names: Iterable[str],
    adapter: str,
    adapters: Iterable[str],
    exceptions: Mapping[str, str | None],
) -> dict[str, str]:
    """The keys in PEFT's own file of the tensors of one adapter, by their names in the model.

    Args:
        names: names of the stored tensors, as in the PEFT model's `state_dict`.
        adapter: the name of the adapter.
        adapters: the names of all adapters of the model.
        exceptions: the entry `keys` of the metadata: name → key, or None for a tensor that PEFT
            does not save, for the names for which the rule is wrong. The rule: the adapter's name
            is removed from the name, and tensors of other adapters are not the adapter's.
    """
    others = {*adapters} - {adapter}
    keys = {}
    for name in names:
        parts = name.split(".")
        key: str | None
        if name in exceptions:
            key = exceptions[name]
        elif others.intersection(parts):
            key = None
        else:
            if adapter in parts:
                del parts[len(parts) - 1 - parts[::-1].index(adapter)]
            key = ".".join(parts)
        if key is not None:
            keys[name] = key
    return keys
