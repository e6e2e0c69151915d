"""Modules whose `state_dict` hooks give other tensors than the module's own, with and without the
hooks that undo it."""

from __future__ import annotations

import torch
from torch import nn


class Hooked(nn.Module):
    """Two weights of one shape, and hooks.

    Args:
        loads: whether the hook that undoes `out` is registered.
    """

    def __init__(self, loads=True):
        super().__init__()
        self.q, self.k = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.register_state_dict_post_hook(
            lambda _module, state, prefix, _: self.out(state, prefix)
        )
        if loads:
            self.register_load_state_dict_pre_hook(
                lambda _module, state, prefix, *_: self.into(state, prefix)
            )

    @staticmethod
    def out(state, prefix):
        raise NotImplementedError

    @staticmethod
    def into(state, prefix):
        raise NotImplementedError


class Renamed(Hooked):
    @staticmethod
    def out(state, p):
        state[p + "query"] = state.pop(p + "q.weight")

    @staticmethod
    def into(state, p):
        state[p + "q.weight"] = state.pop(p + "query")


class Copied(Renamed):
    @staticmethod
    def out(state, p):
        state[p + "query"] = state.pop(p + "q.weight").detach().clone()


class Converted(Hooked):
    @staticmethod
    def out(state, p):
        state[p + "q.weight"] = state[p + "q.weight"].double()

    @staticmethod
    def into(state, p):
        pass


class Fused(Hooked):
    @staticmethod
    def out(state, p):
        state[p + "qk"] = torch.cat([state.pop(p + "q.weight"), state.pop(p + "k.weight")])

    @staticmethod
    def into(state, p):
        state[p + "q.weight"], state[p + "k.weight"] = state.pop(p + "qk").chunk(2)


class Split(Hooked):
    """Copies of the parts of one weight."""

    @staticmethod
    def out(state, p):
        state[p + "a"], state[p + "b"] = (
            part.clone() for part in state.pop(p + "q.weight").chunk(2)
        )

    @staticmethod
    def into(state, p):
        state[p + "q.weight"] = torch.cat([state.pop(p + "a"), state.pop(p + "b")])


class SplitViews(Split):
    @staticmethod
    def out(state, p):
        state[p + "a"], state[p + "b"] = state.pop(p + "q.weight").chunk(2)


class Dropped(Hooked):
    @staticmethod
    def out(state, p):
        del state[p + "k.weight"]

    @staticmethod
    def into(state, p):
        pass


class Added(Hooked):
    @staticmethod
    def out(state, p):
        state[p + "merged"] = (state[p + "q.weight"] + state[p + "k.weight"]).detach()

    @staticmethod
    def into(state, p):
        state.pop(p + "merged")


KINDS = {
    kind.__name__: kind
    for kind in (Renamed, Copied, Converted, Fused, Split, SplitViews, Dropped, Added)
}
LOST = {
    ("Copied", False): (["0.q.weight"], ["0.query"]),
    ("Fused", False): (["0.q.weight", "0.k.weight"], ["0.qk"]),
    ("Split", False): (["0.q.weight"], ["0.a", "0.b"]),
    ("Dropped", True): (["0.k.weight"], []),
    ("Dropped", False): (["0.k.weight"], []),
}
"""Names that a restore into such a module in a `Sequential` cannot fill, and names that it reads
for nothing."""


def hooked(kind, loads, seed=0):
    """Such a module, in another one."""
    torch.manual_seed(seed)
    return nn.Sequential(KINDS[kind](loads))
