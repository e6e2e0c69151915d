"""A tiny Llama 3 trained by torchtitan's Trainer in one process of a job, on the CPU; answers as
JSON.

Arguments: directory, data-parallel degree, tensor-parallel degree, last step, the step after which
the process is killed (0: never). The environment has what torchrun sets.
"""

import json
import os
import signal
import sys
import warnings
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

os.environ |= {"GLOO_SOCKET_IFNAME": "lo"}
warnings.simplefilter("ignore")
import torch
from torchtitan.tools import utils

# Torchtitan takes "cuda" where there is no accelerator.
utils.device_type, utils.device_module = "cpu", torch.cpu
import torchtitan.distributed.utils
from torch.distributed.fsdp import FSDPModule
from torchtitan.components import metrics
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import DebugConfig, ParallelismConfig, TrainingConfig
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.common.config_utils import decoder_vocab_size
from torchtitan.models.llama3 import model_registry
from torchtitan.trainer import Trainer

from shardckpt.training.integrations.torchtitan import TorchtitanCheckpointer

directory = Path(sys.argv[1])
shard, tensor, steps, dies_at = map(int, sys.argv[2:6])
torch.set_num_threads(1)


class NoMemory:
    """torchtitan's monitor of the memory of an accelerator, where there is none."""

    device_name = "cpu"

    def __init__(self):
        pass

    def get_peak_stats(self):
        return metrics.DeviceMemStats(0, 0, 0, 0, 0, 0)

    def reset_peak_stats(self):
        pass


class Tokens(torch.utils.data.IterableDataset):
    """Endless rows of tokens, others for each data rank; its state is the number of rows."""

    def __init__(self, data_rank):
        self.data_rank = data_rank
        self.rows = 0

    def __iter__(self):
        while True:
            self.rows += 1
            row = (torch.arange(33) * (self.rows + 7 * self.data_rank) + self.data_rank) % 128
            yield {"input": row[:-1], "positions": torch.arange(32)}, row[1:]

    def state_dict(self):
        return {"rows": self.rows}

    def load_state_dict(self, state):
        self.rows = state["rows"]


class Loader(ParallelAwareDataloader):
    """torchtitan's loader on these rows."""

    @dataclass(kw_only=True, slots=True)
    class Config(ParallelAwareDataloader.Config):
        """Nothing to configure."""

    def __init__(
        self,
        config,
        *,
        dp_world_size,
        dp_rank,
        local_batch_size,
        snapshot_every_n_steps=None,
        **kwargs,
    ):
        kwargs = {"batch_size": local_batch_size}
        if snapshot_every_n_steps is not None:
            kwargs["snapshot_every_n_steps"] = snapshot_every_n_steps
        super().__init__(Tokens(dp_rank), dp_rank, dp_world_size, **kwargs)


class NoTokenizer(BaseTokenizer):
    """The rows are tokens already."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        """Nothing to configure."""

    def __init__(self, config, **kwargs):
        super().__init__()

    def encode(self, *args, **kwargs):
        raise NotImplementedError

    decode = get_vocab_size = encode


metrics.build_device_memory_monitor = NoMemory
# It numbers devices, which CPUs do not have.
torchtitan.distributed.utils.set_pg_timeouts = lambda **kwargs: None
spec = model_registry("debugmodel")
del spec.model.layers[2:]
# FlexAttention has no backward pass on CPUs; torchtitan's own tests choose this in the same manner.
for layer in spec.model.layers:
    layer.attention.inner_attention = ScaledDotProductAttention.Config()
config = Trainer.Config(
    model_spec=spec,
    dump_folder=str(directory),
    loss=CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(spec)),
    tokenizer=NoTokenizer.Config(),
    dataloader=Loader.Config(),
    optimizer=default_adamw(lr=1e-3),
    lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2),
    training=TrainingConfig(
        local_batch_size=2,
        seq_len=32,
        steps=steps,
        mixed_precision_param="float32",
        disable_cuda_graphs=True,
    ),
    parallelism=ParallelismConfig(data_parallel_shard_degree=shard, tensor_parallel_degree=tensor),
    metrics=metrics.MetricsProcessor.Config(log_freq=1),
    activation_checkpoint=None,
    debug=DebugConfig(seed=int(os.environ.get("SEED", "1")), enable_structured_logging=False),
    checkpoint=TorchtitanCheckpointer.Config(
        enable=True, interval=3, keep_latest_k=2, last_save_model_only=False
    ),
)


def whole(value):
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def digests(trainer):
    states = {**trainer.model_parts[0].state_dict(), **trainer.optimizers.state_dict()}
    tensors = {
        name: whole(value) for name, value in states.items() if isinstance(value, torch.Tensor)
    }
    return {
        name: sha256(tensors[name].detach().numpy().tobytes()).hexdigest()[:12]
        for name in sorted(tensors)
    }


trainer = Trainer(config)
for module in trainer.model_parts[0].modules():
    if isinstance(module, FSDPModule):
        module.set_force_sum_reduction_for_comms(True)  # Gloo can only sum
answer = {"loaded": False, "first": 0, "losses": {}, "digests": {}}
load, save, log = (
    trainer.checkpointer.load,
    trainer.checkpointer.save,
    trainer.metrics_processor.log,
)


def watched_load(step):
    answer["loaded"] = load(step)
    answer["first"] = trainer.step
    answer["digests"][trainer.step] = digests(trainer)
    return answer["loaded"]


def watched_log(step, average, largest, norm, extra_metrics):
    answer["losses"][step] = [average, largest, norm, extra_metrics]
    log(step, average, largest, norm, extra_metrics=extra_metrics)


def watched_save(step, last_step=False):
    saved = save(step, last_step=last_step)
    answer["digests"][step] = digests(trainer)
    if step == dies_at:
        trainer.checkpointer._manager.wait()
        torch.distributed.barrier()
        os.kill(os.getpid(), signal.SIGKILL)
    return saved


trainer.checkpointer.load = watched_load
trainer.checkpointer.save = watched_save
trainer.metrics_processor.log = watched_log
trainer.train()
trainer.close()
if shard == tensor == 1:  # what torchtitan's own adapter makes of the weights
    from safetensors.torch import save_file

    converted = spec.state_dict_adapter(spec.model, None).to_hf(trainer.model_parts[0].state_dict())
    save_file(
        {name: whole(value).contiguous() for name, value in converted.items()},
        directory / "adapter.safetensors",
    )
Path(directory, f"answer{torch.distributed.get_rank()}").write_text(json.dumps(answer))
torch.distributed.destroy_process_group()
