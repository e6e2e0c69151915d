"""Choice of the name under which a tied tensor is written.

Files for inference hold each tensor once. A model ties its weights again after loading, and looks for them under one name: the name
that transformers' `_tied_weights_keys` does not list as tied to another. So in a group of names:

1. The name of a head (`lm_head.weight`) is kept only if there is no other, and the name of an encoder's or decoder's embedding only if
   there is no shared embedding.
2. If several names are left, the first in the state is kept.

A model whose configuration says `tie_word_embeddings: false` does not tie again, and would not find tensors that are left out. For such a
model, and on request, each name gets a separate copy.
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
"""Treatment of tied names: "once", "copies", or "auto": copies if the configuration says that nothing is tied."""

TIED = tuple(
    re.compile(rf"(?:^|[./_])(?:{ends})\.(?:weight|bias)$")
    for ends in (
        r"(?:en|de)coder\.(?:embed_tokens|word_embeddings|embed_patches\.proj)|relative_embedding",
        r"(?:lm_|ctc_)?head|lm_loss|lm_head\.out_proj|output(?:_projection|_layer)?|proj_out|embed_out|vocab_projector|pred_layer\.proj",
        r"decoder",
    )
)
"""Ends of names that transformers' models (and Megatron's and Meta's) tie to another, as `_tied_weights_keys` of transformers 5 lists them:
embeddings that are tied to a shared one, the heads of a model, and weights inside a head. Earlier patterns are preferred."""


def resolve(
    names: Mapping[str, str], ties: Ties = "auto", tie_word_embeddings: bool | None = None
) -> tuple[dict[str, str], dict[str, str]]:
    """Choose the names that are written.

    Args:
        names: output name → name of the stored tensor, in the state's order.
        ties: treatment of tied names.
        tie_word_embeddings: the setting in the model's configuration; None: unknown.

    Returns:
        The entries of `names` that are written; and further name of a tied tensor → its first name, whether the further name is
        written or not.

    Raises:
        OptionError: `ties` is invalid.
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
    """Rank of a name in its group; the name of the lowest rank is kept."""
    return max((rank for rank, ends in enumerate(TIED, 1) if ends.search(name)), default=0)
