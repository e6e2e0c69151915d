"""Single operators on samples `x` and constants `w`, to which a result is due that is not
Unknown."""

import torch
from torch.nn import functional

SAMPLES, CONSTANTS = (12, 3, 5), (5, 5)

OPERATORS = {
    "add": lambda x, w: x + w[0],
    "mul": lambda x, w: x * x,
    "div": lambda x, w: x / 2,
    "exp": lambda x, w: x.exp(),
    "where": lambda x, w: torch.where(x > 0, x, 0.0),
    "gelu": lambda x, w: functional.gelu(x),
    "transpose": lambda x, w: x.transpose(0, 2),
    "permute": lambda x, w: x.permute(1, 2, 0),
    "unsqueeze": lambda x, w: x.unsqueeze(0),
    "merge inside": lambda x, w: x.flatten(1),
    "merge in front": lambda x, w: x.flatten(0, 1),
    "split": lambda x, w: x.flatten(0, 1).unflatten(0, (-1, 3)),
    "expand": lambda x, w: x.unsqueeze(0).expand(2, -1, 3, 5),
    "sum of samples": lambda x, w: x.sum(0),
    "sum of features": lambda x, w: x.sum(1),
    "sum of all": lambda x, w: x.sum(),
    "mean of samples": lambda x, w: x.mean(0),
    "largest": lambda x, w: x.amax(0),
    "smallest": lambda x, w: x.amin(0),
    "largest feature": lambda x, w: x.amax(2),
    "twice a sum": lambda x, w: x.sum(0) * 2,
    "sum of two sums": lambda x, w: x.sum(0) + x.sum(0),
    "sum of a sum": lambda x, w: x.sum(0).sum(0),
    "softmax": lambda x, w: x.softmax(-1),
    "layer norm": lambda x, w: functional.layer_norm(x, (5,)),
    "matmul": lambda x, w: x.flatten(0, 1) @ w,
    "matmul of transposed": lambda x, w: w @ x[:, 0].t(),
    "features with each other": lambda x, w: x.flatten(1).t() @ x.flatten(1),
    "bmm": lambda x, w: torch.bmm(x, x.transpose(1, 2)),
    "stack": lambda x, w: torch.stack([x, x], 1),
    "cat": lambda x, w: torch.cat([x, x], 1),
    "select": lambda x, w: x.select(1, 0),
    "slice": lambda x, w: x[:, 1:],
    "lookup": lambda x, w: functional.embedding((x[:, :, 0] > 0).long(), w),
    "constant": lambda x, w: w @ w,
}
"""Name → function."""
