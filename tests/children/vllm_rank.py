"""One rank of vLLM's tensor parallelism, without an engine: models by shardckpt's loader, compared
with those by vLLM's own.

Arguments: rank, ranks, a directory, and names of models in it: NAME/hf as Hugging Face has it,
NAME/c the checkpoint. Prints JSON.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
import time
from pathlib import Path

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model_loader
from vllm.utils.torch_utils import set_default_torch_dtype

from shardckpt.reading.checkpoint import Checkpoint
from shardckpt.views.placeholders import Recorder


def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Measured:
    """Most bytes in memory above those at the beginning, and seconds."""

    def __enter__(self):
        gc.collect()
        self._began = time.monotonic()
        self.begin = self.peak = resident()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self):
        while not self._done.wait(0.002):
            self.peak = max(self.peak, resident())

    def __exit__(self, *_):
        self._done.set()
        self._thread.join()
        self.peak -= self.begin
        self.seconds = time.monotonic() - self._began


def config_of(place, ranks, load_format):
    extra = {"url": str(place / "c")} if load_format == "shardckpt" else {}
    return EngineArgs(
        model=str(place / "hf"),
        dtype="float32",
        tensor_parallel_size=ranks,
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_model_len=64,
        load_format=load_format,
        model_loader_extra_config=extra,
    ).create_engine_config()


def load(config, measured):
    """A model with its weights, before the engine arranges them for its kernels."""
    loader = get_model_loader(config.load_config)
    with set_current_vllm_config(config):
        with set_default_torch_dtype(torch.float32):
            model = loader.create_model(vllm_config=config, model_config=config.model_config)
        for tensor in model.parameters():
            # So that its memory is there before the memory of loading is measured.
            tensor.data.zero_()
        with measured:
            loader.load_weights(model, config.model_config)
    return model


def main():
    rank, ranks, where, *names = sys.argv[1:]
    os.environ["VLLM_DIST_IDENT"] = Path(where).name  # as the CPU worker sets it
    seen = []
    opened, made = Checkpoint.__init__, Recorder.__init__

    def open_noted(self, *args, **kwargs):
        seen.append(self)
        opened(self, *args, **kwargs)

    recorders = []

    def made_noted(self, *args, **kwargs):
        recorders.append(self)
        made(self, *args, **kwargs)

    Checkpoint.__init__, Recorder.__init__ = open_noted, made_noted
    for name in names:
        place = Path(where, name)
        config = config_of(place, int(ranks), "shardckpt")
        if name == names[0]:
            with set_current_vllm_config(config):
                store = f"file://{where}/rendezvous-{ranks}"
                init_distributed_environment(
                    int(ranks), int(rank), store, int(rank), backend="gloo"
                )
                initialize_model_parallel(int(ranks))
        measured, stock = Measured(), Measured()
        ours = load(config, measured)
        theirs = load(config_of(place, int(ranks), "auto"), stock)
        pairs = zip(ours.state_dict().items(), theirs.state_dict().items(), strict=True)
        differing = [key for (key, a), (other, b) in pairs if key != other or not torch.equal(a, b)]
        kept = sum(
            tensor.nbytes for tensor in {t.data_ptr(): t for t in ours.parameters()}.values()
        )
        print(
            json.dumps(
                {
                    "model": name,
                    "differing": differing,
                    "kept": kept,
                    "read": seen[-1].stats.bytes_read,
                    "at_once": dict(recorders[-1].read_at_once),
                    "peak": measured.peak,
                    "seconds": [measured.seconds, stock.seconds],
                }
            ),
            flush=True,
        )
        del ours, theirs, pairs


if __name__ == "__main__":
    main()
