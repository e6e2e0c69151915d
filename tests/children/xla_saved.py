"""Run by test_from_xser.py with torch_xla on its CPU devices: what its ways to save a state leave
in a directory.

Answers with a line of JSON: file → the state, as torch and torch_xla read it themselves.
"""

import json
import sys
import warnings
from pathlib import Path

warnings.simplefilter("ignore")

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.utils.serialization as xser
from foreign_states import described, without_torch

ROOT = Path(sys.argv[1])
on_host = {
    "model": {
        "w": torch.randn(300, 70),
        "bf16": torch.ones(5, 3, dtype=torch.bfloat16),
        "t": torch.arange(6).reshape(2, 3),
    },
    "list": [torch.tensor(3), (torch.zeros(0, 4), torch.ones(2, dtype=torch.bool))],
    "host": torch.arange(4),
    "step": 7,
    "name": "run",
}


def moved(value):
    if isinstance(value, dict):
        return {key: child if key == "host" else moved(child) for key, child in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(moved(child) for child in value)
    return value.to(torch_xla.device()) if isinstance(value, torch.Tensor) else value


state = moved(on_host)
parameter = torch.nn.Parameter(torch.ones(3, device=torch_xla.device()))
xm.save(state, ROOT / "xm.pt")
xser.save(state, str(ROOT / "xser.pt"))
torch.save({**state, "parameter": parameter}, ROOT / "as it is.pt")
read = {
    "xm.pt": torch.load(ROOT / "xm.pt"),
    "xser.pt": xser.load(str(ROOT / "xser.pt")),
    "as it is.pt": {**on_host, "parameter": parameter},
}
sys.stdout.write(
    json.dumps({name: described(without_torch(state_read)) for name, state_read in read.items()})
    + "\n"
)
