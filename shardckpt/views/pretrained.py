"""`from_pretrained`: load a transformers model from a checkpoint.

Each process reads only the weights that it keeps.

transformers builds the model on the meta device, and takes the weights as a dict of slices like
those of safetensors. It indexes each with the slices that this process holds under its
tensor-parallel plan or device map.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Any

from shardckpt.convert.options import NameOptions
from shardckpt.errors import NamesMismatchError, OptionError
from shardckpt.format.hf_files import CONFIGS
from shardckpt.frameworks.torch import torch_dtype
from shardckpt.layout.dtypes import by_name
from shardckpt.text import few, shorten
from shardckpt.views.model_view import ModelView
from shardckpt.views.safe_open import TensorSlice

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable

    from shardckpt.reading.checkpoint import Checkpoint

_CONFIG = "config.json"
_KERNELS = {
    "attn_implementation",
    "attn_implementation_internal",
    "experts_implementation",
    "experts_implementation_internal",
}
_OF_VIEW = NameOptions.declared().keys() - {"dtype", "config"}


def from_pretrained(
    model_class: Any,
    source: str | os.PathLike[str] | Checkpoint,
    *,
    config: Any = None,
    **options: Any,
) -> Any:
    """Load a transformers model from a checkpoint, without an export.

        model = shardckpt.from_pretrained(
            AutoModelForCausalLM, "gs://bucket/run/100", include="model/**", strip_prefix="model/"
        )

    Args:
        model_class: `AutoModelForCausalLM`, or another class with transformers' `from_pretrained`.
        source: path or url of the checkpoint, or an open one.
        config: the model's configuration, its `config.json`, or a directory with this file; None:
            the `config.json` in the checkpoint's metadata.
        options: `include`, `mapping` and other options of `safetensors_view` that choose and name
            tensors. All others go to transformers, such as `dtype`, `device_map`, `device_mesh` and
            `tp_plan`. The default of `dtype` is the most frequent floating-point dtype of the
            weights.

    Returns:
        The model; with `output_loading_info=True`, the model and transformers' loading information.

    Raises:
        OptionError: there is no configuration, or transformers does not know it.
        NamesMismatchError: the checkpoint lacks a weight of the model.
        NotFoundError, CorruptionError, MissingDataError, StorageError: as for `safetensors_view`.
    """
    import torch
    from transformers import AutoConfig, GenerationConfig

    view = ModelView(source, **{name: options.pop(name) for name in _OF_VIEW & options.keys()})
    kept = _kept_configs(view, [name for name in CONFIGS if config is None or name != _CONFIG])
    if config is None:
        if _CONFIG not in kept:
            raise OptionError(
                f"{view.checkpoint.location} has no config.json, which only an import from "
                "Hugging Face keeps; give config=, a directory."
            )
        # Names of kernels there would be names of code to download.
        described = {
            name: value for name, value in kept[_CONFIG].items() if name.lstrip("_") not in _KERNELS
        }
        try:
            config = AutoConfig.for_model(described.pop("model_type"), **described)
        except (KeyError, TypeError, ValueError) as error:
            raise OptionError(
                f"{view.checkpoint.location}: transformers does not know the model of config.json "
                f"({error!r}); give config=."
            ) from error
    elif not hasattr(config, "to_dict"):
        config = AutoConfig.from_pretrained(config)
    arrays = view.arrays()
    counts = Counter(
        dtype
        for array in arrays
        if (dtype := torch_dtype(by_name(array.dtype_name))) is not None and dtype.is_floating_point
    )
    if not options.keys() & {"dtype", "torch_dtype"}:
        options["dtype"] = counts.most_common(1)[0][0] if counts else torch.float32
    if hasattr(model_class, "from_config"):  # an Auto class; without a path these choose no class
        with torch.device("meta"):
            model_class = type(model_class.from_config(config))
    weights = {array.name: TensorSlice(array, "pt", "cpu") for array in arrays}
    with_info = options.pop("output_loading_info", False)
    model, info = model_class.from_pretrained(
        None, config=config, state_dict=weights, output_loading_info=True, **options
    )
    if info["missing_keys"] and not with_info:
        raise NamesMismatchError(
            f"{view.checkpoint.location} has no weights for {few(sorted(info['missing_keys']))} "
            f"of {type(model).__name__}; choose and name tensors as the model does, by include=, "
            "strip_prefix= and mapping=, or take them as they are with output_loading_info=True."
        )
    if "generation_config.json" in kept and getattr(model, "generation_config", None) is not None:
        model.generation_config = GenerationConfig.from_dict(kept["generation_config.json"])
    return (model, info) if with_info else model


def _kept_configs(view: ModelView, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """The configurations that the checkpoint has, by name of their files.

    Raises:
        OptionError: one is not an object; names it.
    """
    kept = {name: json.loads(view.open(name).readall()) for name in names if name in view.sizes}
    for name, value in kept.items():
        if not isinstance(value, dict):
            raise OptionError(
                f"{view.checkpoint.location}: {name} is {shorten(value)}, and an object is "
                "expected; save it in SaveOptions(metadata=…) as a dict"
                f"{', or give config=' if name == _CONFIG else ''}."
            )
    return kept
