"""Composite tensors in the forms that libraries publish: quantized weights, and states of 8-bit
optimizers."""

from __future__ import annotations

from enum import Enum

import torch

_SAME = (torch.ops.aten.detach.default, torch.ops.aten.alias.default, torch.ops.aten.view.default)
"""Operations that make another tensor of the same elements; a view has the same shape in all uses
here."""


class Preference(Enum):
    """A setting in a context, as libraries have them."""

    AUTO = "auto"
    FAST = "fast"


class Scaled(torch.Tensor):
    """Quantized rows and their scales, as torchao's `Int8Tensor` has them; without `copy_`."""

    @staticmethod
    def __new__(cls, data, scale, block=(1, 4), preference=Preference.AUTO):
        return torch.Tensor._make_wrapper_subclass(
            cls, data.shape, dtype=torch.float32, device=data.device
        )

    def __init__(self, data, scale, block=(1, 4), preference=Preference.AUTO):
        self.data_, self.scale, self.block, self.preference = data, scale, block, preference

    def __tensor_flatten__(self):
        return ["data_", "scale"], {
            "block": self.block,
            "preference": self.preference,
            "dtype": torch.float32,
        }

    @classmethod
    def __tensor_unflatten__(cls, inner, context, size, stride):
        return cls(inner["data_"], inner["scale"], context["block"], context["preference"])

    def dequantize(self):
        return self.data_.float() * self.scale

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func in _SAME:
            of = args[0]
            return cls(of.data_, of.scale, of.block, of.preference)
        if func is torch.ops.aten.copy_.default:
            raise NotImplementedError("copy_")
        plain = [a.dequantize() if isinstance(a, Scaled) else a for a in args]
        return func(*plain, **(kwargs or {}))


class Code(torch.Tensor):
    """State of an 8-bit optimizer, as torchao's `OptimState8bit`: codes, the scale of each block,
    and a table that all shards share."""

    @staticmethod
    def __new__(cls, codes, scale, table, signed, shape):
        return torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=torch.float32, device=codes.device
        )

    def __init__(self, codes, scale, table, signed, shape):
        self.codes, self.scale, self.table, self.signed, self.full = (
            codes,
            scale,
            table,
            signed,
            tuple(shape),
        )

    def __tensor_flatten__(self):
        return ["codes", "scale", "table"], [self.signed, self.full]

    @classmethod
    def __tensor_unflatten__(cls, inner, context, size, stride):
        return cls(inner["codes"], inner["scale"], inner["table"], *context)

    @classmethod
    def zeros(cls, shape, signed=True, block=4):
        n = torch.Size(shape).numel()
        return cls(
            torch.zeros(n, dtype=torch.uint8),
            torch.zeros(n // block),
            torch.linspace(-1, 1, 256),
            signed,
            shape,
        )

    def dequantize(self):
        values = self.table[self.codes.long()].view(
            -1, self.codes.numel() // self.scale.numel()
        ) * self.scale.view(-1, 1)
        return values.view(self.full)

    def quantize_(self, values):
        blocks = values.reshape(self.scale.numel(), -1)
        self.scale.copy_(blocks.abs().amax(1).clamp(min=1e-12))
        codes = ((blocks / self.scale.view(-1, 1) + 1) / 2 * 255).round()
        self.codes.copy_(codes.reshape(-1).to(torch.uint8))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func in _SAME:
            of = args[0]
            return cls(of.codes, of.scale, of.table, of.signed, of.full)
        plain = [a.dequantize() if isinstance(a, Code) else a for a in args]
        return func(*plain, **(kwargs or {}))


def register_code():
    """Register `Code`, so that a new optimizer gets its states back."""
    import shardckpt

    shardckpt.register_tensor(
        Code,
        name="tests.Code",
        split=lambda t: (
            {"codes": t.codes, "scale": t.scale, "table": t.table},
            [t.signed, t.full],
        ),
        make=lambda parts, context, _shape: Code(
            parts["codes"], parts["scale"], parts["table"], context[0], tuple(context[1])
        ),
        shared=["table"],
    )


class CodedSGD(torch.optim.Optimizer):
    """Momentum in 8 bits; in DTensors where the parameters are."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if "momentum" not in state:
                    state["momentum"] = self.new(p)
                mine = getattr(state["momentum"], "_local_tensor", state["momentum"])
                grad, value = (getattr(t, "_local_tensor", t) for t in (p.grad, p.data))
                momentum = mine.dequantize() * 0.9 + grad
                mine.quantize_(momentum)
                value.sub_(mine.dequantize(), alpha=group["lr"])
        return loss

    def new(self, p):
        local = getattr(p, "_local_tensor", None)
        if local is None:
            return Code.zeros(p.shape)
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(
            Code.zeros(local.shape),
            p.device_mesh,
            p.placements,
            run_check=False,
            shape=p.shape,
            stride=p.stride(),
        )


def scaled(seed=0, shape=(8, 4), **more):
    """A `Scaled` with random bits."""
    g = torch.Generator().manual_seed(seed)
    return Scaled(
        torch.randint(-127, 127, shape, dtype=torch.int8, generator=g),
        torch.rand(shape[0], 1, generator=g),
        **more,
    )


def train(model, optimizer, start, stop):
    """The losses of the steps from `start` to `stop`."""
    losses = []
    for i in range(start, stop):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(i))
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
