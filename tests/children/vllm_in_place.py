"""A follower of vLLM's, without an engine, whose model changes a tensor in place while it loads.

Arguments: a directory; "always" or "after the rehearsal", when the model does so. Prints JSON: the
parameters of the model after an update, or the errors of two.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment
from vllm.model_executor.model_loader.reload import record_metadata_for_reloading
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

import shardckpt
from shardckpt.views.vllm_follow import FollowEngine, FollowInit


class Model(nn.Module):
    """One layer of three tensors; the last one is doubled in place."""

    def __init__(self, doubles):
        super().__init__()
        self.p, self.q, self.r = (nn.Parameter(torch.zeros(8)) for _ in range(3))
        self.doubles = doubles

    def load_weights(self, weights):
        own = dict(self.named_parameters())
        for name, tensor in weights:
            if name == "r" and self.doubles:
                tensor.mul_(2)
            getattr(own[name], "weight_loader", default_weight_loader)(own[name], tensor)
        return {*own}


def main():
    place, moment = Path(sys.argv[1]), sys.argv[2]
    with shardckpt.Publisher(place / "policy") as publisher:
        publisher.publish(1, {name: torch.full((8,), float(i)) for i, name in enumerate("pqr", 1)})
    config = VllmConfig()
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{place}/store", 0, "gloo")
        model = Model(doubles=moment == "always")
        record_metadata_for_reloading(model)
        engine = FollowEngine(None, config, torch.device("cpu"), model)
        engine.model_config = SimpleNamespace(quantization=None, dtype=torch.float32)
        engine.init_transfer_engine(FollowInit(str(place / "policy")))
        engine.prepare()
        model.doubles = True
        errors = []
        for _ in range(1 if moment == "always" else 2):
            try:
                engine.update_weights({"step": 1})
            except shardckpt.ShardckptError as error:
                errors.append(str(error))
    print(
        json.dumps(errors or {name: tensor.tolist() for name, tensor in model.named_parameters()})
    )


main()
