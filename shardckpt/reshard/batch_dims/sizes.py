"""Sizes in a graph that are multiples of the batch.

In a graph with dynamic shapes, sizes are expressions of symbols. Here a different large prime
stands for every symbol. So sizes are plain integers, row-major arithmetic on them is exact, and a
size has the batch as a factor if and only if the batch's prime divides it: no literal size has that
factor.

In a graph with fixed shapes, the batch is the number used in the trace. A literal there may or may
not be derived from the batch. Where that matters, the analysis reports it
(`BatchSize.literal_sizes`) instead of guessing.

Expressions are sympy's, reached through `SymInt.node.expr`, so that neither torch nor sympy is
imported.
"""

from __future__ import annotations

import math
from typing import Any

_FIRST_PRIME = 1_000_003
_END = 1 << 62
"""A literal of at least this size means the end of a dimension, not a number of samples."""


class Undecided(Exception):  # noqa: N818 - it ends one rule's reasoning, and becomes an Unknown
    """The reason why a rule cannot decide."""


def symbol_of(size: Any) -> Any:
    """The sympy expression of a symbolic size; None for a plain number."""
    node = getattr(size, "node", None)
    expr = getattr(node, "expr", None)
    return None if expr is None or not expr.free_symbols else expr


def is_number(value: Any) -> bool:
    """Whether a value is a plain number or a symbolic one."""
    return isinstance(value, int | float) or hasattr(getattr(value, "node", None), "expr")


class BatchSize:
    """The number that stands for the size of the batch, and the relation of other sizes to it.

    >>> six = BatchSize(6)
    >>> six.divides(12), six.divides(16), six.literal_sizes
    (True, False, True)
    """

    def __init__(self, size: Any) -> None:
        self._primes: dict[Any, int] = {}
        self._degrees: dict[Any, int | None] = {}
        self._symbol = symbol_of(size)
        self.literal_sizes = self._symbol is None
        """Whether sizes of the graph are literals, so that their origin from the batch is not
        visible."""
        self.value = self.of(size)
        """The number that stands for the batch's size."""

    def of(self, size: Any) -> int:
        """A size as an integer.

        Raises:
            Undecided: the size depends on the batch, but is not a multiple of it.
        """
        expr = symbol_of(size)
        if expr is None:
            return int(size)
        if self._symbol in expr.free_symbols and self._degree(expr) != 1:
            raise Undecided(f"the size {expr} depends on the batch and is not a multiple of it")
        return int(self._evaluated(expr))

    def shape(self, sizes: Any) -> tuple[int, ...]:
        """A shape as integers; see `of`."""
        return tuple(map(self.of, sizes))

    def divides(self, size: int) -> bool:
        """Whether a size has the batch as a factor."""
        return size > 0 and size % self.value == 0

    def power(self, number: Any) -> int:
        """The power of the batch that a number is proportional to: 0 for a constant.

        Raises:
            Undecided: it is proportional to no power, or the power cannot be determined.
        """
        expr = symbol_of(number)
        if expr is None:
            number = int(number) if hasattr(number, "node") else number
            if self.literal_sizes and _may_count(number, self.value):
                raise Undecided(
                    f"the constant {number} may have been derived from the batch of {self.value}; "
                    "export with a dynamic batch dimension"
                )
            return 0
        if self._symbol not in expr.free_symbols:
            return 0
        degree = self._degree(expr)
        if degree is None:
            raise Undecided(f"the number {expr} is not proportional to the batch")
        return degree

    def is_literal(self, size: int) -> bool:
        """Whether a size contains no symbol."""
        return all(size % prime for prime in self._primes.values())

    def _degree(self, expr: Any) -> int | None:
        """The power of the batch in an expression, tested with batches of several sizes.

        None if it is a multiple of none.
        """
        if expr not in self._degrees:
            values = {
                t: self._evaluated(expr.subs(self._symbol, t)) for t in (1, 2, 3, _FIRST_PRIME)
            }
            fits = (
                p
                for p in (1, -1, 2, -2)
                if all(v * t ** max(-p, 0) == values[1] * t ** max(p, 0) for t, v in values.items())
            )
            self._degrees[expr] = next(fits, None)
        return self._degrees[expr]

    def _evaluated(self, expr: Any) -> Any:
        for symbol in sorted(expr.free_symbols, key=str):
            if symbol not in self._primes:
                self._primes[symbol] = _prime_above(
                    max(self._primes.values(), default=_FIRST_PRIME - 1)
                )
        return expr.subs(self._primes)


def _may_count(number: Any, batch: int) -> bool:
    if (
        isinstance(number, bool)
        or not isinstance(number, int | float)
        or not number
        or not math.isfinite(number)
        or abs(number) >= _END
    ):
        return False
    return any(
        abs(x) >= batch and abs(x / batch - round(x / batch)) < 1e-6 * abs(x / batch)
        for x in (number, 1 / number)
    )


def _prime_above(least: int) -> int:
    candidate = least + 1
    while any(candidate % d == 0 for d in range(2, math.isqrt(candidate) + 1)):
        candidate += 1
    return candidate
