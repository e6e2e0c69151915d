"""Operations that read or write at positions given by another tensor.

| operators | rule |
|---|---|
| embedding, index_select, index | replicated table, cut indices; or a table cut elsewhere |
| gather, scatter, scatter_add | all cut alike, and not in the dimension that is indexed |
| index_put | into a cache that is cut elsewhere; into zeros at cut indices: Partial(sum) |
| embedding_dense_backward | Partial(sum) |
"""

from __future__ import annotations

from typing import Any

from shardckpt.reshard.batch_dims.call import Call, Result, shown
from shardckpt.reshard.batch_dims.layouts import Numbered, Partial, Replicate, Shard
from shardckpt.reshard.batch_dims.rules.algebra import Known, added, position
from shardckpt.reshard.batch_dims.rules.pointwise import aligned
from shardckpt.reshard.batch_dims.sizes import Undecided


def _embedding(call: Call) -> Result:
    table, indices = call.layout(call["weight"]), call.steady(call["indices"])
    if isinstance(table, Shard):
        raise Undecided("its table is cut")
    if isinstance(indices, Replicate):
        return table
    if isinstance(table, Partial):
        raise Undecided(f"its table is {table}: it must be reduced before")
    return Shard(indices.dim, indices.outer, table.power)


def _embedding_backward(call: Call) -> Result:
    gradient, indices = call.layout(call["grad_output"]), call.steady(call["indices"])
    if call["scale_grad_by_freq"]:
        raise Undecided("it divides by how often an index occurs in the whole batch")
    if not (isinstance(gradient, Shard) and isinstance(indices, Shard)):
        raise Undecided("its gradient and its indices are not both cut")
    position([gradient, indices])
    return Partial("sum", gradient.power)


def _index_select(call: Call) -> Result:
    return _indexed(call, [None] * call.dim(call["dim"], len(call.out)) + [call["index"]])


def _index(call: Call) -> Result:
    return _indexed(call, list(call["indices"]))


def _indexed(call: Call, indices: list[Any]) -> Known:
    """The layout of a read at indices, whose dimensions replace the indexed dimensions.

    Dimensions without an index stay.
    """
    source, ndim = call.layout(call["self"]), len(call.shape(call["self"]))
    indices = indices + [None] * (ndim - len(indices))
    if any(map(_is_mask, indices)):
        raise Undecided("the number of elements that a mask selects depends on the data")
    block, start, lengths = _index_block(call, indices)
    if _own_row(call, source, indices):
        return (
            Shard(start + block.dim, block.outer, source.power)
            if isinstance(block, Shard)
            else source
        )
    if isinstance(block, Shard):
        if not isinstance(source, Replicate):
            raise Undecided(
                f"{shown(call['self'])} is {source} and is read at indices that are cut"
            )
        return Shard(start + block.dim, block.outer, source.power)
    if isinstance(source, Shard):
        return Shard(_kept_at(source.dim, indices, start, lengths), source.outer, source.power)
    return source


def _is_mask(index: Any) -> bool:
    return index is not None and str(index.meta["val"].dtype) in {"torch.bool", "torch.uint8"}


def _own_row(call: Call, source: Known, indices: list[Any]) -> bool:
    """Whether every sample selects its own row, by its number.

    Raises:
        Undecided: samples are numbered in a dimension that is not theirs.
    """
    numbered = [
        d
        for d, index in enumerate(indices)
        if index is not None and isinstance(call.known(index), Numbered)
    ]
    if not numbered:
        return False
    if (
        not isinstance(source, Shard)
        or numbered != [source.dim]
        or call.shape(call["self"])[source.dim] != call.batch.value
    ):
        raise Undecided(
            f"{shown(call['self'])} is {source} and is indexed by numbers of samples, which every "
            "process counts from 0"
        )
    return True


def _index_layout(call: Call, index: Any) -> Known:
    layout = call.known(index)
    return Shard(layout.dim, layout.outer) if isinstance(layout, Numbered) else call.steady(index)


def _index_block(call: Call, indices: list[Any]) -> tuple[Known, int, int]:
    """The layout of the broadcast indices, their first dimension in the result, and their rank."""
    given = [index for index in indices if index is not None]
    block = tuple(
        max(sizes) for sizes in zip(*(_pad(call.shape(i), given, call) for i in given), strict=True)
    )
    layouts = [_index_layout(call, index) for index in given]
    cut = frozenset(
        layout.dim + len(block) - len(call.shape(index))
        for index, layout in zip(given, layouts, strict=True)
        if isinstance(layout, Shard)
    )
    places = [d for d, index in enumerate(indices) if index is not None]
    together = places == list(range(places[0], places[-1] + 1))
    of_block = added(
        [
            aligned(call, index, layout, block, cut)
            for index, layout in zip(given, layouts, strict=True)
        ]
    )
    return of_block, places[0] if together else 0, len(block)


def _pad(shape: tuple[int, ...], given: list[Any], call: Call) -> tuple[int, ...]:
    most = max(len(call.shape(index)) for index in given)
    return (1,) * (most - len(shape)) + shape


def _kept_at(dim: int, indices: list[Any], start: int, length: int) -> int:
    """The position in the result of a source dimension that is not indexed."""
    if indices[dim] is not None:
        raise Undecided("it picks samples by their number")
    before = sum(index is None for index in indices[:dim])
    return before + (length if before >= start else 0)


def _index_put(call: Call) -> Result:
    base, ndim = call.layout(call["self"]), len(call.shape(call["self"]))
    indices = list(call["indices"]) + [None] * (ndim - len(call["indices"]))
    if any(map(_is_mask, indices)):
        raise Undecided("the number of elements that a mask writes depends on the data")
    block, start, length = _index_block(call, indices)
    written = length + sum(index is None for index in indices)
    values, shape = call.layout(call["values"]), call.shape(call["values"])
    if call["accumulate"]:
        _refuse_extreme(values)
    if isinstance(values, Shard):
        values = Shard(values.dim + written - len(shape), values.outer, values.power)
    zero, base_zero = call.is_zero(call["values"]), call.is_zero(call["self"])
    if isinstance(block, Shard) and _own_row(call, base, indices):
        place = Shard(block.dim + start, block.outer)
        _refuse_rows(call, place.dim, values, written)
        return added([base, _into(base, values, place)], [base_zero, zero])
    if isinstance(block, Shard):
        place = Shard(block.dim + start, block.outer)
        if isinstance(values, Shard):
            position([Shard(values.dim, values.outer), place])
        if not call["accumulate"] or isinstance(values, Partial) or isinstance(base, Shard):
            raise Undecided("samples write to places that their own data names")
        _refuse_rows(call, place.dim, values, written)
        return added([base, Partial("sum", values.power)], [base_zero, zero])
    if isinstance(base, Shard):
        place = Shard(_kept_at(base.dim, indices, start, length), base.outer)
        _refuse_rows(call, place.dim, values, written)
        return added([base, _into(base, values, place)], [base_zero, zero])
    if isinstance(values, Shard):
        raise Undecided(
            f"{shown(call['self'])} is {base} and samples are written into it; name it in batch=… "
            "if it is cut"
        )
    return added([base, values], [base_zero, zero])


def _refuse_extreme(values: Known) -> None:
    """Refuse maxima and minima: several values may be added at one place."""
    if isinstance(values, Partial) and values.reduction != "sum":
        raise Undecided(f"it adds up elements of {values}, which must be reduced before")


def _into(base: Known, values: Known, place: Shard) -> Known:
    """The layout of written values in terms of `base`.

    `place` is the place that corresponds to the batch of `base`.
    """
    assert isinstance(base, Shard)
    if isinstance(values, Partial):
        raise Undecided(f"{values} is written into a tensor that is cut: it must be reduced before")
    if isinstance(values, Shard):
        position([Shard(values.dim, values.outer), place])
    return Shard(base.dim, base.outer, values.power)


def _refuse_rows(call: Call, dim: int, values: Known, written: int) -> None:
    """Refuse replicated values with more than one row for all samples."""
    shape = call.shape(call["values"])
    shift = written - len(shape)
    if not isinstance(values, Shard) and dim >= shift and shape[dim - shift] != 1:
        raise Undecided(
            f"{shown(call['values'])} is {values} and has elements along the batch; name it in "
            "batch=… if it is cut"
        )


def _gather(call: Call) -> Result:
    source, index = call.layout(call["self"]), call.steady(call["index"])
    dim = call.dim(call["dim"], len(call.out))
    if isinstance(source, Replicate) and isinstance(index, Shard) and index.dim == dim:
        return Shard(index.dim, index.outer, source.power)
    if isinstance(source, Shard) and isinstance(index, Shard) and source.dim != dim:
        _same_length(call, source, "index")
        position([Shard(source.dim, source.outer), index])
        return source
    if isinstance(source, Shard) or isinstance(index, Shard):
        raise Undecided(
            f"{shown(call['self'])} is {source} and is read at {shown(call['index'])}, which is "
            f"{index}"
        )
    return source


def _scatter(call: Call) -> Result:
    dim = call.dim(call["dim"], len(call.out))
    source = call["src"] if call["src"] is not None else call["value"]
    base, index, written = (
        call.layout(call["self"]),
        call.steady(call["index"]),
        call.layout(source),
    )
    if call["reduce"] is not None:
        raise Undecided("it reduces what it writes")
    adds = "scatter_add" in str(call.node.target)
    if adds:
        _refuse_extreme(written)
    cut = [layout for layout in (base, index, written) if isinstance(layout, Shard)]
    if not cut:
        return added([base, written], [call.is_zero(call["self"]), call.is_zero(source)])
    place = position([Shard(layout.dim, layout.outer) for layout in cut])
    assert place is not None
    if (
        adds
        and place[0] == dim
        and isinstance(index, Shard)
        and isinstance(written, Shard)
        and not isinstance(base, Shard)
    ):
        if call.shape(call["index"])[dim] != call.shape(source)[dim]:
            raise Undecided("it writes fewer samples than there are")
        return added([base, Partial("sum", written.power)], [call.is_zero(call["self"]), False])
    whole = [
        layout
        for layout in (base, index, *([] if call["src"] is None else [written]))
        if not isinstance(layout, Shard)
    ]
    if place[0] == dim or whole or isinstance(written, Partial):
        raise Undecided(
            "its values, their positions and its target are not all cut in the same way"
        )
    for name in ("index", "src"):
        if call[name] is not None:
            _same_length(call, base, name)
    return added([base, written], [call.is_zero(call["self"]), call.is_zero(source)])


def _same_length(call: Call, layout: Known, name: str) -> None:
    assert isinstance(layout, Shard)
    if call.shape(call[name])[layout.dim] != call.shape(call["self"])[layout.dim]:
        raise Undecided("it reads or writes fewer samples than there are")


RULES = {
    "embedding": _embedding,
    "embedding_dense_backward": _embedding_backward,
    "index_select": _index_select,
    "index": _index,
    "index_put": _index_put,
    "_unsafe_index": _index,
    "_unsafe_index_put": _index_put,
    "gather": _gather,
    **dict.fromkeys(["scatter", "scatter_add"], _scatter),
}
"""ATen operator → rule."""
