"""By which of its names is a tied tensor written?

Files for inference hold each tensor once. A model that is loaded ties its weights again, and looks for them by one name: the one
that is not listed in transformers' `_tied_weights_keys` as tied to another. So in a group of names:

1. A head's (`lm_head.weight`) is kept only where there is no other, and an encoder's or decoder's embedding only where none is shared.
2. Of several that are left, the first in the state is kept.

A model whose configuration says `tie_word_embeddings: false` does not tie again, and would not find what is left out: there,
and where it is asked for, each name has its own copy.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Literal

from shardckpt.errors import OptionError
from shardckpt.excerpt import excerpt

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["TIED", "Ties", "resolve"]

Ties = Literal["auto", "once", "copies"]
"""What becomes of tied names: "once", a "copies" of each, or "auto": copies where the configuration says that nothing is tied."""

TIED = tuple(
    re.compile(rf"(?:^|[./_])(?:{ends})\.(?:weight|bias)$")
    for ends in (
        r"(?:en|de)coder\.(?:embed_tokens|word_embeddings|embed_patches\.proj)|relative_embedding",
        r"(?:lm_|ctc_)?head|lm_loss|lm_head\.out_proj|output(?:_projection|_layer)?|proj_out|embed_out|vocab_projector|pred_layer\.proj",
        r"decoder",
    )
)
"""Ends of names that transformers' models (and Megatron's and Meta's) tie to another, as `_tied_weights_keys` of transformers 5 lists them:
embeddings that one is shared with, the heads of a model, and what is inside a head. The later, the less it is kept."""


def resolve(
    names: Mapping[str, str], ties: Ties = "auto", tie_word_embeddings: bool | None = None
) -> tuple[dict[str, str], dict[str, str]]:
    """The names that are written.

    Args:
        names: the output's name → the stored tensor's, in the state's order.
        ties: what becomes of tied ones.
        tie_word_embeddings: what the model's configuration says of it; None: there is none.

    Returns:
        Those of `names` that are written, and by further names of tied ones the first, whether they are written or not.

    Raises:
        OptionError: there is no such way.
    """
    if ties not in ("auto", "once", "copies"):
        raise OptionError(f'ties={excerpt(ties)}: use "auto", "once" or "copies".')
    groups: dict[str, list[str]] = {}
    for name, stored in names.items():
        groups.setdefault(stored, []).append(name)
    firsts = {stored: min(group, key=_rank) for stored, group in groups.items()}
    further = {name: firsts[stored] for name, stored in names.items() if name != firsts[stored]}
    copies = ties == "copies" or (ties == "auto" and tie_word_embeddings is False)
    return {name: stored for name, stored in names.items() if copies or name not in further}, further


def _rank(name: str) -> int:
    """The higher, the less it is to be kept."""
    return max((rank for rank, ends in enumerate(TIED, 1) if ends.search(name)), default=0)
