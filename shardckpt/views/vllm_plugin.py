"""vLLM's plugin: it serves a checkpoint without an export.

    vllm serve runs/100 --load-format shardckpt --config-format shardckpt --tokenizer-mode shardckpt

vLLM finds `register` by the entry point `vllm.general_plugins`. Each worker reads the parts of
tensors that its model copies into its parameters (`placeholders`). Configuration and tokenizer are
those that an import kept in the checkpoint's metadata.
"""

from __future__ import annotations

import atexit
import logging
import shutil
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from vllm.distributed import get_world_group
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.renderers.registry import RENDERER_REGISTRY
from vllm.tokenizers import TokenizerRegistry
from vllm.tokenizers.hf import CachedHfTokenizer
from vllm.transformers_utils.config import HFConfigParser, register_config_parser

from shardckpt.convert.formats.safetensors.hf_configs import config_files
from shardckpt.errors import NamesMismatchError, OptionError, ShardckptError
from shardckpt.io.status import is_file
from shardckpt.reading.checkpoint import Checkpoint
from shardckpt.text import few
from shardckpt.views.model_view import ModelView
from shardckpt.views.placeholders import Recorder, storage_addresses
from shardckpt.views.proof import ReadProof

if TYPE_CHECKING:
    from torch import nn

NAME = "shardckpt"
"""Name of the load format, the config format and the tokenizer mode."""
T = TypeVar("T")
_log = logging.getLogger("vllm.shardckpt")  # vLLM configures the loggers below its own name


class CheckpointLoader(BaseModelLoader):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """Fills a model's parameters from a checkpoint.

    `--model-loader-extra-config` may have `url`, the place of the checkpoint if the model's path is
    a directory of configuration and tokenizer; and `include`, `strip_prefix`, `mapping` and other
    options of `safetensors_view` that choose and name tensors.
    """

    def __init__(self, load_config: Any) -> None:
        """Take vLLM's options."""
        super().__init__(load_config)
        self._options = dict(load_config.model_loader_extra_config or {})
        self._url = self._options.pop("url", None)

    def download_model(self, model_config: Any) -> None:
        """Nothing: weights are read where they are."""

    def load_weights(self, model: nn.Module, model_config: Any) -> None:
        """Read what the model keeps.

        Raises:
            OptionError: the model is quantised, or wants weights of other models.
            NamesMismatchError: names of checkpoint and model differ.
            CorruptionError, MissingDataError, StorageError: stored bytes are damaged, gone, or
                cannot be read; or what was read is not what was saved, by its fingerprint.
        """
        began = time.monotonic()
        url = self._url or model_config.model
        refuse_models(url, model, model_config)
        view = ModelView(url, **self._options)
        proof = ReadProof(view)
        recorder = Recorder(view, proof.add)
        advice = (
            '--model-loader-extra-config, as in {"include": "model/**", "strip_prefix": "model/"}'
        )
        load_weights(url, model, recorder, advice)
        proved = proof.check(of_all_ranks(proof.parts))
        _log.info(
            "%s: read %.3f GB in %.1f seconds; %d tensors proved by their fingerprint; "
            "operations that read at once: %s",
            url,
            view.checkpoint.stats.bytes_read / 1e9,
            time.monotonic() - began,
            len(proved),
            dict(recorder.read_at_once) or "none",
        )


def refuse_models(url: str, model: nn.Module, model_config: Any) -> None:
    """Raise OptionError for a model that is quantised, or needs weights of a second one."""
    if model_config.quantization is not None:
        raise OptionError(
            f"{url}: shardckpt does not load quantised models, and this one is "
            f"{model_config.quantization}; export it to safetensors."
        )
    if getattr(model, "secondary_weights", ()):
        raise OptionError(
            f"{url}: {type(model).__name__} needs weights of a second model, which shardckpt does "
            "not load; export it to safetensors."
        )


def load_weights(url: str, model: nn.Module, recorder: Recorder, advice: str) -> None:
    """Call a model's `load_weights` with a recorder's placeholders.

    Raises:
        NamesMismatchError: the model does not take the tensors, or needs others; names the option
            that chooses and names them, `advice`.
    """
    before = storage_addresses(model.named_parameters())
    try:
        loaded = recorder.run(model.load_weights)
    except ShardckptError:
        raise
    except (KeyError, ValueError) as error:
        raise NamesMismatchError(
            f"{url}: {type(model).__name__} does not take the tensors ({error}); choose and name "
            f"tensors as the model does, with {advice}."
        ) from error
    _refuse_missing(url, model, recorder, loaded, before)


def _refuse_missing(
    url: str, model: nn.Module, recorder: Recorder, loaded: set[str] | None, before: dict[str, int]
) -> None:
    """Raise NamesMismatchError if parameters got no elements, or not all.

    Args:
        url: the checkpoint, for messages.
        model: the model.
        recorder: has run the model's `load_weights`.
        loaded: the parameters that the model says it has loaded; None: it says nothing.
        before: `storage_addresses` of its parameters before that.
    """
    parameters = dict(model.named_parameters())
    absent = (
        recorder.unwritten(parameters.items(), before)
        if loaded is None
        else parameters.keys() - loaded
    )
    missing = sorted({*recorder.filled_in_part(parameters.items()), *absent})
    if missing:
        raise NamesMismatchError(
            f"{url}: the checkpoint has no weights, or not all, for {few(missing)} of "
            f"{type(model).__name__}."
        )


def of_all_ranks(value: T) -> list[T]:
    """The value of each rank of this engine; all ranks call it."""
    group = get_world_group()
    values = [value] * group.world_size
    if group.world_size > 1:
        torch.distributed.all_gather_object(values, value, group=group.cpu_group)
    return values


class CheckpointConfigParser(HFConfigParser):  # type: ignore[misc]
    """Parses the `config.json` that an import kept."""

    def parse(self, model: str | Path, *args: Any, **kwargs: Any) -> Any:
        """Parse the configuration of a checkpoint, or of a directory with a `config.json`.

        Raises:
            OptionError: there is no configuration.
        """
        return super().parse(
            model if is_file(Path(model, "config.json")) else _directory(str(model), "config.json"),
            *args,
            **kwargs,
        )


class CheckpointTokenizer(CachedHfTokenizer):  # type: ignore[misc]
    """Loads the tokenizer that an import kept."""

    @classmethod
    def from_pretrained(cls, path_or_repo_id: str | Path, *args: Any, **kwargs: Any) -> Any:
        """The tokenizer of a checkpoint.

        Raises:
            OptionError: there is no tokenizer.
        """
        return super().from_pretrained(
            _directory(str(path_or_repo_id), "tokenizer_config.json"), *args, **kwargs
        )


@cache
def _directory(url: str, needed: str) -> Path:
    """A temporary directory with the small files that an import kept, while the process runs."""
    checkpoint = Checkpoint(url)
    files = config_files(checkpoint.metadata, None, url)
    if needed not in files:
        raise OptionError(
            f"{url} has no {needed}, which only an import from Hugging Face keeps; give a "
            "directory that has it with --hf-config-path or --tokenizer, and leave out "
            "--tokenizer-mode."
        )
    directory = Path(tempfile.mkdtemp(prefix="shardckpt-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    for name, data in files.items():
        (directory / name).write_bytes(data)
    return directory


def register() -> None:
    """Register loader, parser, tokenizer and weight-transfer engine.

    VLLM calls it in each of its processes, sometimes twice.
    """
    if NAME in TokenizerRegistry.tokenizers:
        return
    register_model_loader(NAME)(CheckpointLoader)
    WeightTransferEngineFactory.register_engine(NAME, "shardckpt.views.vllm_follow", "FollowEngine")
    register_config_parser(NAME)(CheckpointConfigParser)
    TokenizerRegistry.register(NAME, __name__, CheckpointTokenizer.__name__)
    RENDERER_REGISTRY.register(NAME, "vllm.renderers.hf", "HfRenderer")
