"""Which tensors of a checkpoint are exported, under which names, and what is left behind?

Every tensor that is wanted goes out once; of tied names the first. A name is what a state dict has: the keys on the way to the tensor,
joined by dots. Small leaves (numbers, texts) and what every process owned by itself have no place in a file of tensors, and are told.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from shardckpt.convert.outputs import OutputTensor, identity
from shardckpt.dtypes import by_name
from shardckpt.errors import DtypeError, NamesMismatchError, OptionError
from shardckpt.names import matches, selector, shown
from shardckpt.tree import alias_map, leaf_names, meanings

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardckpt.checkpoint import Checkpoint
    from shardckpt.dtypes import DType

__all__ = ["Patterns", "choose", "chosen_dtypes", "plain_name"]

Patterns = str | Sequence[str] | None


def choose(
    checkpoint: Checkpoint, include: Patterns, exclude: Patterns, dtype: str | Mapping[str, str] | None
) -> tuple[list[OutputTensor], list[str]]:
    """The outputs of a plain export, and a line for each name that was wanted and is not written as it is.

    Args:
        checkpoint: where from.
        include: patterns of names; None: all.
        exclude: patterns of names of those that are not wanted.
        dtype: what floating-point tensors are converted to, or pattern → dtype, of which the first that matches counts.

    Raises:
        NamesMismatchError: nothing is left; or two tensors would have one name.
        OptionError: no such dtype, or a pattern that matches nothing.
    """
    wanted, unwanted = selector(include), selector(exclude if exclude is not None else ())
    tree, tensors = checkpoint.parsed_tree, checkpoint.record.structure.tensors
    tied = alias_map(tree)
    chosen: dict[str, str] = {}
    for name, stored in {**{name: name for name in tensors}, **tied}.items():
        if wanted(name) and not unwanted(name):
            chosen.setdefault(stored, name)
    if not chosen:
        raise NamesMismatchError(
            f"{checkpoint.location}: include={include!r} and exclude={exclude!r} leave none of its tensors; `shardckpt info` lists them."
        )
    types = chosen_dtypes({name: tensors[stored].dtype for stored, name in chosen.items()}, dtype)
    outputs = [identity(tensors[stored], plain_name(name), types[name]) for stored, name in chosen.items()]
    _refuse_collisions(outputs)
    notes = [f"{name}: no tensor" for name in leaf_names(tree) if wanted(name) and not unwanted(name)]
    notes += [f"{name}: the same tensor as {chosen[s]}" for name, s in tied.items() if name != chosen.get(s, name) and wanted(name)]
    notes += [f"{name}: a {meaning}, of which the numbers are exported" for name, meaning in meanings(tree).items() if wanted(name)]
    return outputs, notes


def plain_name(name: str) -> str:
    """A tensor's name as state dicts have them.

    >>> plain_name("model/layers.0.weight"), plain_name("params/a~1b/~e")
    ('model.layers.0.weight', 'params.a/b.')
    """
    parts = ["" if part == "~e" else part for part in name.split("/")]
    return ".".join(part.replace("~1", "/").replace("~0", "~") if "~" in part else part for part in parts)


def _refuse_collisions(outputs: Sequence[OutputTensor]) -> None:
    seen: dict[str, str] = {}
    for output in outputs:
        source = output.sources[0].tensor
        other = seen.setdefault(output.name, source)
        if other != source:
            raise NamesMismatchError(
                f"{shown(other)} and {shown(source)} would both be called {output.name!r}; rename one, or leave it out with exclude= "
                f"(--exclude)."
            )


def chosen_dtypes(tensors: Mapping[str, DType], dtype: str | Mapping[str, str] | None) -> dict[str, DType]:
    """By name what each tensor is converted to.

    Args:
        tensors: by name, what they are.
        dtype: what floating-point tensors are converted to, or pattern → dtype, of which the first that matches counts.

    Raises:
        OptionError: no such dtype, or a pattern that matches nothing.
    """
    if dtype is None:
        return dict(tensors)
    if isinstance(dtype, str):
        wanted = _dtype(dtype)
        return {name: wanted if _is_floating(own) and _is_floating(wanted) else own for name, own in tensors.items()}
    for pattern in dtype:
        if not any(matches(pattern, name) for name in tensors):
            raise OptionError(f"dtype={dtype!r}: {pattern!r} matches none of the tensors; patterns are matched with whole names.")
    found = {name: next((p for p in dtype if matches(p, name)), None) for name in tensors}
    return {name: tensors[name] if pattern is None else _dtype(dtype[pattern]) for name, pattern in found.items()}


def _dtype(name: str) -> DType:
    try:
        return by_name(name)
    except DtypeError as e:
        raise OptionError(f"dtype={name!r}: {e}") from e


def _is_floating(dtype: DType) -> bool:
    return dtype.name.startswith(("float", "bfloat"))
