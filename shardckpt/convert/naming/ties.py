"""Choice of the name under which a tied tensor is written.

Files for inference hold each tensor once. A model ties its weights again after loading, and looks
for them under one name: the name that transformers' `_tied_weights_keys` does not list as tied to
another. So in a group of names:

1. The name of a head (`lm_head.weight`) is kept only if there is no other, and the name of an
   encoder's or decoder's embedding only if there is no shared embedding.
2. If several names are left, the first in the state is kept.

A model whose configuration says `tie_word_embeddings: false` does not tie again, and would not find
tensors that are left out. For such a model, and on request, each name gets a separate copy
(`Naming.copy_ties`).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

TIED = tuple(
    re.compile(rf"(?:^|[./_])(?:{ends})\.(?:weight|bias)$")
    for ends in (
        r"(?:en|de)coder\.(?:embed_tokens|word_embeddings|embed_patches\.proj)|relative_embedding",
        r"(?:lm_|ctc_)?head|lm_loss|lm_head\.out_proj|output(?:_projection|_layer)?|proj_out|embed_out|vocab_projector|pred_layer\.proj",
        r"decoder",
    )
)
"""Ends of names that transformers' models (and Megatron's and Meta's) tie to another, as
`_tied_weights_keys` of transformers 5 lists them: embeddings that are tied to a shared one, the
heads of a model, and weights inside a head. Earlier patterns are preferred."""


def first_names(names: Mapping[str, Hashable]) -> dict[str, str]:
    """For each name of a tied tensor that is not written: the name that is.

    Args:
        names: output name → the stored tensor's name, or another value that is equal for names of
            one tensor; in the state's order.
    """
    groups: dict[Hashable, list[str]] = {}
    for name, stored in names.items():
        groups.setdefault(stored, []).append(name)
    firsts = {stored: min(group, key=_rank) for stored, group in groups.items()}
    return {name: firsts[stored] for name, stored in names.items() if name != firsts[stored]}


def _rank(name: str) -> int:
    """Rank of a name in its group; the name of the lowest rank is kept."""
    return max((rank for rank, ends in enumerate(TIED, 1) if ends.search(name)), default=0)
