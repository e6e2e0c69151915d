"""Random small programs over a batch: steps that work on tensors of any shape, or are left out
where they do not."""

from __future__ import annotations

import random

import torch
from hypothesis import strategies as st

BATCH, LENGTH, WIDTH = 12, 3, 5
"""Sizes that divide each other nowhere but in the batch."""


def rows(a):
    return a.shape[0]


def heads(a, n):
    return a.unflatten(n % a.dim(), (-1, LENGTH))


def index(a, n):
    return (a.abs().flatten(0) * 7).long()[: 2 + n] % 3


STEPS = {
    "add": lambda a, b, n: a + b,
    "add scaled": lambda a, b, n: torch.add(a, b, alpha=2),
    "sub": lambda a, b, n: a - b,
    "sub from number": lambda a, b, n: n - a,
    "mul": lambda a, b, n: a * b,
    "div": lambda a, b, n: a / (1.5 + b.tanh()),
    "halve": lambda a, b, n: a / 2,
    "neg": lambda a, b, n: -a,
    "tanh": lambda a, b, n: a.tanh(),
    "relu": lambda a, b, n: a.relu(),
    "maximum": lambda a, b, n: torch.maximum(a, b),
    "minimum": lambda a, b, n: torch.minimum(a, b),
    "where": lambda a, b, n: torch.where(a > 0, a, b),
    "where number": lambda a, b, n: torch.where(a > b, a, 0.0),
    "masked_fill": lambda a, b, n: a.masked_fill(b > 0, n),
    "transpose": lambda a, b, n: a.transpose(n % a.dim(), (n + 1) % a.dim()),
    "flip dimensions": lambda a, b, n: a.permute(*reversed(range(a.dim()))),
    "merge": lambda a, b, n: a.flatten(n % (a.dim() - 1), n % (a.dim() - 1) + 1),
    "merge all": lambda a, b, n: a.reshape(-1),
    "split": lambda a, b, n: heads(a, n),
    "split front": lambda a, b, n: a.unflatten(n % a.dim(), (LENGTH, -1)),
    "like": lambda a, b, n: a.reshape(b.shape),
    "unsqueeze": lambda a, b, n: a.unsqueeze(n % (a.dim() + 1)),
    "squeeze": lambda a, b, n: a.squeeze(),
    "expand": lambda a, b, n: a.expand(rows(b), *a.shape),
    "expand to": lambda a, b, n: a.expand(b.shape),
    "repeat": lambda a, b, n: a.repeat(2, *[1] * (a.dim() - 1)),
    "sum": lambda a, b, n: a.sum(n % a.dim()),
    "sum all": lambda a, b, n: a.sum(),
    "sum kept": lambda a, b, n: a.sum(n % a.dim(), keepdim=True),
    "mean": lambda a, b, n: a.mean(n % a.dim()),
    "mean all": lambda a, b, n: a.mean(),
    "amax": lambda a, b, n: a.amax(n % a.dim()),
    "amin": lambda a, b, n: a.amin(n % a.dim()),
    "max": lambda a, b, n: a.max(n % a.dim())[0],
    "any": lambda a, b, n: (a > 1).any(n % a.dim()).float(),
    "var": lambda a, b, n: a.var(n % a.dim(), unbiased=False),
    "count": lambda a, b, n: (a > 0).sum(),
    "softmax": lambda a, b, n: a.softmax(n % a.dim()),
    "log_softmax": lambda a, b, n: a.log_softmax(n % a.dim()),
    "cumsum": lambda a, b, n: a.cumsum(n % a.dim()),
    "sort": lambda a, b, n: a.sort(n % a.dim())[0],
    "flip": lambda a, b, n: a.flip(n % a.dim()),
    "tril": lambda a, b, n: a.tril(),
    "layer norm": lambda a, b, n: torch.nn.functional.layer_norm(a, a.shape[-1:]),
    "normalize": lambda a, b, n: torch.nn.functional.normalize(a, dim=n % a.dim()),
    "matmul": lambda a, b, n: a @ b,
    "matmul transposed": lambda a, b, n: a @ b.transpose(-1, -2),
    "transposed matmul": lambda a, b, n: a.transpose(-1, -2) @ b,
    "linear": lambda a, b, n: torch.nn.functional.linear(a, b),
    "einsum": lambda a, b, n: torch.einsum("bij,bik->bjk", a, b),
    "cat": lambda a, b, n: torch.cat([a, b], n % a.dim()),
    "cat itself": lambda a, b, n: torch.cat([a, a], n % a.dim()),
    "stack": lambda a, b, n: torch.stack([a, b], n % a.dim()),
    "select": lambda a, b, n: a.select(n % a.dim(), 0),
    "slice": lambda a, b, n: a.narrow(n % a.dim(), 1, a.shape[n % a.dim()] - 1),
    "chunk": lambda a, b, n: a.split(2, n % a.dim())[0],
    "index_select": lambda a, b, n: a.index_select(n % a.dim(), torch.tensor([0, 1, 0])),
    "lookup": lambda a, b, n: torch.nn.functional.embedding((b > 0).long(), a),
    "index": lambda a, b, n: a[:, (b > 0).long()],
    "index two": lambda a, b, n: a[torch.tensor([0, 1]), ..., torch.tensor([1, 0])],
    "gather": lambda a, b, n: a.gather(n % a.dim(), (b > 0).long()),
    "scatter": lambda a, b, n: a.scatter(n % a.dim(), (b > 0).long(), 2.0),
    "scatter_add": lambda a, b, n: a.scatter_add(n % a.dim(), (b > 0).long(), b),
    "index_add": lambda a, b, n: torch.zeros(2, *b.shape[1:]).index_put(
        ((b > 0).long().flatten(1)[:, 0],), b, accumulate=True
    ),
    "write": lambda a, b, n: a.index_put((None, torch.tensor([1])), b, accumulate=bool(n % 2)),
    "write slice": lambda a, b, n: a.slice_scatter(b, 1, 0, b.shape[1]),
    "write one": lambda a, b, n: a.select_scatter(b, n % a.dim(), 0),
    "pad": lambda a, b, n: torch.nn.functional.pad(a, (n, 1)),
    "zeros": lambda a, b, n: torch.zeros(a.shape) + b,
    "zeros like": lambda a, b, n: torch.zeros_like(a),
    "ones": lambda a, b, n: torch.ones(rows(a), n + 1),
    "count up": lambda a, b, n: torch.arange(rows(a)).float(),
    "own row": lambda a, b, n: a[torch.arange(rows(a)), (b > 0).long()],
    "own rows": lambda a, b, n: b[torch.arange(rows(a))[:, None], torch.arange(2)],
    "write own row": lambda a, b, n: a.index_put(
        (torch.arange(rows(a)), torch.tensor([n % 2])), b[:, 0], accumulate=bool(n % 2)
    ),
    "times rows": lambda a, b, n: a * rows(b),
    "by elements": lambda a, b, n: a / b.numel(),
    "as integer": lambda a, b, n: a.long().float(),
    "gradient": lambda a, b, n: torch.autograd.grad(
        (a.sum() if n % 2 else a.mean()), b, allow_unused=False
    )[0],
}
"""Name → function of two tensors and a small number."""


def run(steps, w, c, y, x):
    """All that a program computes."""
    values = [v.clone().requires_grad_() for v in (w, c, y, x)]
    for name, i, j, n in steps:
        values.append(STEPS[name](values[i], values[j], n))
    return tuple(values)


def inputs(batch=BATCH, seed=0):
    """Two without a batch, and two with one in front, of two and three dimensions."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (WIDTH, WIDTH), (LENGTH, WIDTH), (batch, WIDTH), (batch, LENGTH, WIDTH)
    return tuple(torch.randn(shape, generator=generator) for shape in shapes)


@st.composite
def programs(draw, tries=10):
    """Steps that run for a batch, its halves and its thirds."""
    dice = random.Random(draw(st.integers(0, 1 << 32)))
    return chosen(dice, tries)


def chosen(dice, tries):
    steps = []
    for _ in range(tries):
        known = 4 + len(steps)
        step = (
            dice.choice(sorted(STEPS)),
            recent(dice, known),
            recent(dice, known),
            dice.randrange(4),
        )
        try:
            for batch in (BATCH, BATCH // 2, BATCH // 3):
                values = run([*steps, step], *inputs(batch))
        except (RuntimeError, IndexError, ValueError, TypeError, ZeroDivisionError):
            continue
        if (
            0 < values[-1].numel() < 5000
            and values[-1].isfinite().all()
            and values[-1].abs().max() < 1e4
        ):
            steps.append(step)
    return steps


def recent(dice, known):
    return known - 1 - min(dice.randrange(known), dice.randrange(known))
