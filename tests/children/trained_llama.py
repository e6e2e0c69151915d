"""Train a small Llama for a step under torch_xla SPMD on 8 devices, save it from there, and say
what it then makes of some tokens.

    python trained_llama.py FOLDER

`FOLDER/run` is the checkpoint and `FOLDER/model/config.json` the model's configuration;
`FOLDER/logits.npy` are the logits of the trained weights on a CPU. Needs PJRT_DEVICE=CPU and
CPU_NUM_DEVICES=8. Prints, as JSON, how one weight was laid out.
"""

import json
import sys
import warnings
from pathlib import Path

warnings.simplefilter("ignore")

import numpy as np
import torch
import torch_xla
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
from transformers import LlamaConfig, LlamaForCausalLM

import shardckpt

CONFIG = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
TOKENS = torch.arange(24).reshape(2, 12)

folder = Path(sys.argv[1])
xr.use_spmd()
torch.manual_seed(0)
config = LlamaConfig(
    **CONFIG, vocab_size=96, tie_word_embeddings=False, use_cache=False, attn_implementation="eager"
)
model = LlamaForCausalLM(config)
before = model.lm_head.weight.detach().clone()
model = model.to(torch_xla.device())
mesh = xs.Mesh(np.arange(8), (4, 2), ("data", "model"))
for parameter in model.parameters():
    xs.mark_sharding(parameter, mesh, ("data", "model")[: parameter.ndim])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
batch = TOKENS.to(torch_xla.device())
xs.mark_sharding(batch, mesh, (None, None))
model(input_ids=batch, labels=batch).loss.backward()
optimizer.step()
torch_xla.sync()

shardckpt.save(
    folder / "run", {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 1}
)
layout = shardckpt.open(folder / "run").tensor("model/model.layers.0.mlp.up_proj.weight").layout
config.architectures = ["LlamaForCausalLM"]
config.save_pretrained(folder / "model")

# The same weights on a CPU: XLA adds numbers up in another order than torch does.
trained = LlamaForCausalLM(config)
trained.load_state_dict(
    {name: tensor.cpu() for name, tensor in model.state_dict().items()}, strict=True
)
assert not torch.equal(trained.lm_head.weight, before), "it was trained"
torch.set_num_threads(1)
with torch.no_grad():
    np.save(folder / "logits.npy", trained.eval()(input_ids=TOKENS).logits.numpy())
    on_devices = model.eval()(input_ids=batch).logits.cpu().numpy()
np.save(folder / "on_devices.npy", on_devices)
print(json.dumps(str(layout)))
