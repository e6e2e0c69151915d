"""Layouts of sums and products of tensors.

Layouts here are those of operands brought to the dimensions of the result. For a part k times
smaller than the batch:

- A sum of cut tensors is cut alike, and of replicated ones replicated, if all scale with the same
  power of the batch.
- A sum of partial sums is a partial sum. A replicated tensor is a partial sum as well: of k equal
  terms that are k times too large, so it can be added to a mean.
- A product multiplies powers. It is linear in each factor, so that one factor may be a partial sum
  if the others are replicated.
- Zero fits every layout.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardckpt.reshard.batch_dims.layouts import Partial, Replicate, Shard
from shardckpt.reshard.batch_dims.sizes import Undecided

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

Known = Replicate | Shard | Partial
"""A layout that is not Unknown."""


def position(layouts: Iterable[Known]) -> tuple[int, int] | None:
    """The dimension where all cut layouts are cut, with its element count outside of the batch.

    The result is None if no layout is cut.

    Raises:
        Undecided: they are cut in different places.
    """
    places = {(layout.dim, layout.outer) for layout in layouts if isinstance(layout, Shard)}
    if len(places) > 1:
        raise Undecided(
            "operands have the batch in different places: "
            + " and ".join(str(Shard(*place)) for place in sorted(places))
        )
    return next(iter(places), None)


def added(terms: Sequence[Known], zero: Sequence[bool] = ()) -> Known:
    """The layout of a sum, or of a choice between tensors.

    Args:
        terms: layouts of the terms.
        zero: whether each term is zero everywhere.

    Raises:
        Undecided: the layouts are incompatible.
    """
    place = position(terms)
    counted = [
        term
        for term, is_zero in zip(terms, zero or [False] * len(terms), strict=True)
        if not is_zero
    ]
    partial = next((term for term in counted if isinstance(term, Partial)), None)
    if partial is not None:
        return _with_partial(partial, counted, place)
    powers = {term.power for term in counted}
    if len(powers) > 1:
        raise Undecided(
            f"{_list_text(counted)} are combined, which scale differently with the size of the part"
        )
    power = powers.pop() if powers else 0
    return Replicate(power) if place is None else Shard(*place, power)


def _with_partial(
    partial: Partial, terms: Sequence[Known], place: tuple[int, int] | None
) -> Partial:
    neutral: Replicate = Replicate(
        partial.power + 1 if partial.reduction == "sum" else partial.power
    )
    if place is not None or any(term not in (partial, neutral) for term in terms):
        raise Undecided(f"{_list_text(terms)} are combined: what is partial must be reduced before")
    if partial.reduction != "sum" and sum(isinstance(term, Partial) for term in terms) > 1:
        raise Undecided(f"the sum of two {partial} is not a {partial}: reduce them before")
    return partial


def extreme(terms: Sequence[Known], reduction: str) -> Known:
    """The layout of the elementwise maximum ("max") or minimum ("min") of tensors.

    Raises:
        Undecided: the layouts are incompatible.
    """
    if any(isinstance(term, Partial) for term in terms):
        same = Partial(reduction)
        if any(term not in (same, Replicate()) for term in terms):
            raise Undecided(
                f"{_list_text(terms)} are compared: what is partial must be reduced before"
            )
        return same
    if any(term.power for term in terms):
        raise Undecided(f"{_list_text(terms)} are compared, which scale with the size of the part")
    return added(terms)


def multiplied(factors: Sequence[Known]) -> Known:
    """The layout of a product, element by element.

    Raises:
        Undecided: the product is not linear in a partial factor.
    """
    power = sum(factor.power for factor in factors)
    partial = [factor for factor in factors if isinstance(factor, Partial)]
    place = position(factors)
    if partial:
        if len(partial) > 1 or place is not None or partial[0].reduction != "sum":
            raise Undecided(
                f"{_list_text(factors)} are multiplied: what is partial must be reduced before"
            )
        return Partial("sum", power)
    return Replicate(power) if place is None else Shard(*place, power)


def _list_text(layouts: Iterable[Known]) -> str:
    return " and ".join(dict.fromkeys(map(str, layouts)))
