"""A mapping rule: one tensor merged from several, or several split from one.

It works in both directions.

A rule has *parts* and a *whole*, and goes from the parts to the whole (it merges) or back (it
splits). Both directions share one layout:

1. The dimensions of each part are permuted into the whole's order (`permutation`).
2. Parts of one index lie along `axis`: concatenated, or interleaved, group by group (`groups`).
3. If parts have an index that the whole lacks, such as the number of an expert, index i is at i
   along one more dimension, `stack`.
4. One dimension of the whole may be unfolded into two (`unfold`).

So shapes alone determine the boxes that a part and the whole share (`part_layout`). `merge` reads
these boxes from the parts, `split` from the whole, and the inverse of a rule is the same rule in
the other direction.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NoReturn, TypeVar

from shardckpt.errors import DtypeMismatchError, OptionError, ShapeMismatchError
from shardckpt.plan.views import View
from shardckpt.reading.naming.outputs import OutputTensor
from shardckpt.reading.naming.part_layout import (
    ElementRun,
    PartLayout,
    Rotary,
    Unfold,
    interleaved_runs,
)
from shardckpt.state.names import shown

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardckpt.format.structure import TensorRecord
    from shardckpt.reading.naming.name_pattern import NamePattern

_Part = TypeVar("_Part")
_UNCUT = [ElementRun(0, 0, 0, 0)]
"""Runs of a whole that is not cut along an axis."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MappingRule:
    """One rule of a mapping."""

    parts: tuple[NamePattern, ...]
    whole: NamePattern
    merges: bool
    """Whether the rule goes from the parts to the whole; otherwise from the whole to the parts."""
    axis: int = 0
    """The whole's dimension along which parts of one index lie; from the end if negative."""
    stack: int | None = None
    """The whole's dimension that counts the index which only the parts have; or, without such an
    index, that counts the parts."""
    shares: tuple[int, ...] | None = None
    """Elements of each part along `axis`, or their ratio; None, in a rule that merges: any
    sizes."""
    exact: bool = False
    """Whether `shares` are numbers of elements; otherwise ratios."""
    groups: int = 1
    """Number of interleaved groups along `axis`; 1: the parts are concatenated."""
    permutation: tuple[int, ...] | Literal["reverse"] | None = None
    """For each dimension of the whole without `stack`, the part's dimension; "reverse": in reverse
    order; None: the same order."""
    rotary: Rotary | None = None
    """Reordering of the rows of heads."""
    unfold: Unfold | None = None
    """A dimension of the whole that is unfolded into two; `axis` and `stack` count without the
    second."""
    optional: bool = False
    """Whether the rule may match nothing."""
    origin: str
    """File and number of the rule, for messages."""

    def __post_init__(self) -> None:
        """Refuse invalid rules, and options without effect."""
        self._check_names()
        if self.stack is not None and self.counted is None and len(self.parts) == 1:
            self._refuse(
                "stack: there is nothing to stack; write {expert} into the name of the tensors "
                "to stack"
            )
        if not self.cuts and (self.shares is not None or self.groups != 1):
            self._refuse(
                "sizes, ratio and interleave describe several parts along an axis, but there is "
                "one part"
            )
        if self.rotary is not None and (len(self.parts) > 1 or self.stack is not None):
            self._refuse("rotary goes with one tensor on each side")
        if self.shares is not None and len(self.shares) != len(self.parts):
            self._refuse(f"{len(self.shares)} sizes are given for {len(self.parts)} parts")
        if not self.merges and self.shares is None and self.concatenates:
            object.__setattr__(self, "shares", (1,) * len(self.parts))

    def _check_names(self) -> None:
        """Refuse names unless those of one side determine those of the other."""
        for part in self.parts:
            if set(part.keys) != set(self.parts[0].keys):
                self._refuse(
                    f"{part} and {self.parts[0]} have different wildcards; give them the same"
                )
        if len(set(self.parts)) != len(self.parts):
            self._refuse("it has the same name twice on one side; give each part a name of its own")
        lost = [key for key in self.whole.keys if key not in self.parts[0].keys]
        if lost:
            self._refuse(
                f"{self.whole} has the wildcard {_wildcard_text(lost[0])}, but {self.parts[0]} "
                "does not"
            )
        extra = [key for key in self.parts[0].keys if key not in self.whole.keys]
        if len(extra) > 1:
            self._refuse(
                f"{self.whole} lacks {' and '.join(map(_wildcard_text, extra))}; only one of them "
                "can be stacked"
            )
        if extra and self.stack is None:
            self._refuse(
                f"{self.whole} lacks {_wildcard_text(extra[0])}; to stack the tensors that it "
                "counts, give the dimension: stack = 0"
            )

    @property
    def counted(self) -> str | None:
        """Key of the wildcard that is stacked, or None."""
        return next((key for key in self.parts[0].keys if key not in self.whole.keys), None)

    @property
    def concatenates(self) -> bool:
        """Whether several parts lie along `axis`."""
        return len(self.parts) > 1 and (self.stack is None or self.counted is not None)

    @property
    def cuts(self) -> bool:
        """Whether the whole's `axis` has more than one run."""
        return self.concatenates or self.rotary is not None

    def inverse(self) -> MappingRule:
        """The rule in the other direction.

        Raises:
            OptionError: the sizes of the parts are not given.
        """
        if self.merges and self.concatenates and self.shares is None:
            self._refuse(
                "to work in the other direction, it needs the share of each part; write ratio = "
                f"{[1] * len(self.parts)} for equal parts"
            )
        return replace(self, merges=not self.merges)

    # --- directions -------------------------------------------------------------------------------

    def merge(self, name: str, members: Sequence[Sequence[TensorRecord]]) -> OutputTensor:
        """Merge parts into the whole.

        Args:
            name: name of the whole.
            members: for each stacked index (or once), the parts in order.

        Raises:
            ShapeMismatchError: the parts do not fit together.
        """
        rows = self._by_index(members)
        first = rows[0][0]
        stack, axis = self._dimensions(len(first.shape) + (self.stack is not None), first)
        permutation = self._permutation(len(first.shape), stack, first)
        shapes = [
            [self._shape_in_whole(tensor, permutation, len(rows), first) for tensor in row]
            for row in rows
        ]
        self._check_alike(rows, shapes, axis)
        sizes = None if axis is None else [shape[axis] for shape in shapes[0]]
        if sizes is not None:
            self._check_shares(sizes, name)
        runs = self._runs(sizes, first)
        shape = tuple(
            [n if sizes is None or d != axis else sum(sizes) for d, n in enumerate(shapes[0][0])]
        )
        unfold = self._unfold_of(shape)
        if self.unfold is not None and (unfold is None or unfold.axis == stack):
            self._mismatch(
                f"{shown(name)}: no dimension of {shape} but stack can be made two, as unfold says"
            )
        layout = PartLayout(
            shape=shape, permutation=permutation, stack=stack, axis=axis, runs=runs, unfold=unfold
        )
        to_whole = layout.to_whole
        views = [
            View(rows[b.row][b.part].name, b.in_part, to_whole, b.in_whole.start)
            for b in layout.shared_boxes()
        ]
        return OutputTensor(name, layout.whole_shape, first.dtype, tuple(views))

    def split(self, whole: TensorRecord, names: Sequence[Sequence[str]]) -> list[OutputTensor]:
        """Split a whole into its parts.

        Args:
            whole: the tensor.
            names: names of the parts, arranged like the parts in `merge`.

        Raises:
            ShapeMismatchError: the whole cannot be split as requested.
        """
        rows = self._by_index(names)
        shape, unfold = self._fold(whole)
        folded = replace(whole, shape=shape)
        stack, axis = self._dimensions(len(shape), folded)
        if stack is not None and shape[stack] != len(rows):
            self._mismatch(
                f"{shown(whole.name)} of shape {shape} has {shape[stack]} along dimension "
                f"{stack}, not {len(rows)}"
            )
        permutation = self._permutation(len(shape) - (stack is not None), stack, folded)
        sizes = None if axis is None else self._sizes(shape[axis], folded)
        runs = self._runs(sizes, folded)
        if unfold is not None and unfold.axis == stack:
            self._mismatch(
                f"{shown(whole.name)} of shape {whole.shape}: stack and unfold are both dimension "
                f"{stack}; give two different ones"
            )
        layout = PartLayout(
            shape=shape, permutation=permutation, stack=stack, axis=axis, runs=runs, unfold=unfold
        )
        to_part = layout.to_part
        views: list[list[list[View]]] = [[[] for _ in row] for row in rows]
        for box in layout.shared_boxes():
            views[box.row][box.part].append(
                View(whole.name, box.in_whole, to_part, box.in_part.start)
            )
        shapes = [
            layout.part_shape(None if sizes is None else sizes[part])
            for part in range(len(rows[0]))
        ]
        return [
            OutputTensor(name, shape, whole.dtype, tuple(part_views))
            for row, row_views in zip(rows, views, strict=True)
            for name, shape, part_views in zip(row, shapes, row_views, strict=True)
        ]

    def stacked_length(self, whole: TensorRecord) -> int:
        """The number of stacked indices in a whole; 1 without `stack`.

        Raises:
            ShapeMismatchError: the whole has too few dimensions.
        """
        shape, _ = self._fold(whole)
        stack, _ = self._dimensions(len(shape), whole)
        if stack is not None and shape[stack] == 0:
            self._mismatch(
                f"{shown(whole.name)} of shape {whole.shape} has no elements along dimension "
                f"{stack}, so no tensor would be made"
            )
        return 1 if stack is None else shape[stack]

    # --- shapes -----------------------------------------------------------------------------------

    def _fold(self, whole: TensorRecord) -> tuple[tuple[int, ...], Unfold | None]:
        """The shape of a whole with the two unfolded dimensions as one, and `unfold`.

        The axis of the returned `unfold` is not negative.
        """
        if self.unfold is None:
            return whole.shape, None
        axis, count = self.unfold.axis, self.unfold.count
        rank, shape = len(whole.shape) - 1, whole.shape
        at = axis % rank if -rank <= axis < rank else None
        if at is None or shape[at] != count:
            self._mismatch(
                f"{shown(whole.name)} of shape {shape} does not have {count} along dimension "
                f"{axis} and one more dimension (unfold)"
            )
        return (*shape[:at], shape[at] * shape[at + 1], *shape[at + 2 :]), Unfold(at, count)

    def _unfold_of(self, shape: Sequence[int]) -> Unfold | None:
        """`unfold` with a non-negative axis, for a shape that is not unfolded.

        None if the shape lacks that dimension or factor.
        """
        if self.unfold is None or not -len(shape) <= self.unfold.axis < len(shape):
            return None
        at, count = self.unfold.axis % len(shape), self.unfold.count
        return None if shape[at] % count else Unfold(at, count)

    def _dimensions(self, rank: int, tensor: TensorRecord) -> tuple[int | None, int | None]:
        """`stack` and `axis` as non-negative dimensions of a whole of that rank.

        None for one that is not used.
        """
        dimensions = []
        for what, d, needed in (
            ("stack", self.stack, self.stack is not None),
            ("axis", self.axis, self.cuts),
        ):
            if needed and d is not None and not -rank <= d < rank:
                self._mismatch(
                    f"{what} = {d} is not a dimension of {self.whole}, which has {rank} with "
                    f"{shown(tensor.name)} of {tensor.shape}"
                )
            dimensions.append(d % rank if needed and d is not None else None)
        stack, axis = dimensions
        if stack is not None and stack == axis:
            self._refuse(
                f"axis and stack are both dimension {axis} of {self.whole}; give the other one of "
                f"its {rank}"
            )
        return stack, axis

    def _permutation(
        self, rank: int, stack: int | None, tensor: TensorRecord
    ) -> tuple[int | None, ...]:
        """For each dimension of the whole, the dimension of a part of that rank.

        None for `stack`.
        """
        order = tuple(range(rank)) if self.permutation is None else self.permutation
        if order == "reverse":
            order = tuple(reversed(range(rank)))
        if len(order) != rank:
            self._mismatch(
                f"transpose names {len(order)} dimensions, and with {shown(tensor.name)} of "
                f"{tensor.shape} it is {rank}"
            )
        return order if stack is None else (*order[:stack], None, *order[stack:])

    def _shape_in_whole(
        self,
        tensor: TensorRecord,
        permutation: Sequence[int | None],
        stacked: int,
        first: TensorRecord,
    ) -> tuple[int, ...]:
        """The shape of a part with the dimensions of the whole."""
        if len(tensor.shape) != len(first.shape):
            self._mismatch(
                f"{shown(tensor.name)} of shape {tensor.shape} and {shown(first.name)} of shape "
                f"{first.shape} differ in rank"
            )
        return tuple([stacked if d is None else tensor.shape[d] for d in permutation])

    def _check_alike(
        self,
        rows: Sequence[Sequence[TensorRecord]],
        shapes: Sequence[Sequence[tuple[int, ...]]],
        axis: int | None,
    ) -> None:
        """Refuse parts that differ in dtype, or in shape where they must agree.

        A part must have one shape across indices. Between parts, only the length along `axis` may
        differ.
        """
        first = rows[0][0]
        for row, in_whole in zip(rows, shapes, strict=True):
            for tensor, shape, expected in zip(row, in_whole, shapes[0], strict=True):
                if tensor.dtype != first.dtype:
                    unlike = (
                        f"{shown(tensor.name)} has dtype {tensor.dtype}, {shown(first.name)} has "
                        f"{first.dtype}"
                    )
                    raise DtypeMismatchError(
                        f"{self}: {unlike}; one tensor has one dtype. Leave this rule out."
                    )
                if shape != expected or any(
                    a != b
                    for d, (a, b) in enumerate(zip(shape, shapes[0][0], strict=True))
                    if d != axis
                ):
                    aside = (
                        "" if axis is None else f" but for what lies along dimension {self.axis}"
                    )
                    self._mismatch(
                        f"{shown(tensor.name)} has shape {tensor.shape}, {shown(first.name)} has "
                        f"{first.shape}; they must agree{aside}"
                    )

    def _check_shares(self, sizes: Sequence[int], name: str) -> None:
        if self.shares is None:
            return
        total, shares = (1, 1) if self.exact else (sum(sizes), sum(self.shares))
        if any(n * shares != share * total for n, share in zip(sizes, self.shares, strict=True)):
            what = "sizes" if self.exact else "ratio"
            self._mismatch(
                f"the parts of {shown(name)} have {list(sizes)} along dimension {self.axis}; "
                f"{what} is {list(self.shares)}"
            )

    def _sizes(self, total: int, whole: TensorRecord) -> list[int]:
        """Lengths of the parts along the axis of a whole."""
        if self.shares is None:
            return [total]
        share, where = (
            sum(self.shares),
            f"{shown(whole.name)} of shape {whole.shape} has {total} along dimension {self.axis}",
        )
        if self.exact:
            if share != total:
                self._mismatch(f"{where}, and sizes {list(self.shares)} are {share} together")
            return list(self.shares)
        if total % share:
            self._mismatch(
                f"{where}, which cannot be cut by the ratio {':'.join(map(str, self.shares))}"
            )
        return [total // share * n for n in self.shares]

    def _runs(self, sizes: Sequence[int] | None, tensor: TensorRecord) -> list[ElementRun]:
        """The runs of parts of these lengths; None: the whole is not cut."""
        if sizes is None:
            return _UNCUT
        if self.rotary is not None:
            if sizes[0] % (2 * self.rotary.heads):
                self._mismatch(
                    f"{shown(tensor.name)}: {sizes[0]} rows are not an even number for each of "
                    f"{self.rotary.heads} heads"
                )
            return list(self.rotary.runs(sizes[0]))
        if any(n % self.groups for n in sizes):
            self._mismatch(
                f"{shown(tensor.name)}: parts of {list(sizes)} cannot be interleaved in "
                f"{self.groups} groups (interleave)"
            )
        return list(interleaved_runs(sizes, self.groups if any(sizes) else 1))

    def _by_index(self, rows: Sequence[Sequence[_Part]]) -> Sequence[Sequence[_Part]]:
        """Parts grouped by stacked index; if the parts themselves are stacked, each is a group."""
        return (
            rows
            if self.counted is not None or self.stack is None
            else [[part] for row in rows for part in row]
        )

    # --- messages ---------------------------------------------------------------------------------

    def __str__(self) -> str:
        """The rule, for messages."""
        parts = ", ".join(map(str, self.parts))
        return (
            f"{self.origin} ({parts} → {self.whole})"
            if self.merges
            else f"{self.origin} ({self.whole} → {parts})"
        )

    def _refuse(self, problem: str) -> NoReturn:
        raise OptionError(f"{self}: {problem}.")

    def _mismatch(self, problem: str) -> NoReturn:
        raise ShapeMismatchError(f"{self}: {problem}.")


def _wildcard_text(key: str) -> str:
    """A wildcard for messages."""
    return "one of its *" if key.isdecimal() else f"{{{key}}}"
