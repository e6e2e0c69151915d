"""Load a model as everybody does, and write down what it makes of some tokens.

python inference.py FOLDER LOGITS
"""

import sys

import numpy as np
import torch
from transformers import AutoModelForCausalLM

torch.set_num_threads(1)
model, loading = AutoModelForCausalLM.from_pretrained(
    sys.argv[1], attn_implementation="eager", output_loading_info=True
)
assert not any(loading.values()), loading
with torch.no_grad():
    np.save(sys.argv[2], model.eval()(input_ids=torch.arange(24).reshape(2, 12)).logits.numpy())
