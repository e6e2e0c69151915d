"""The state that results when leaves get other names (`state.moving`), in plain containers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardckpt.state.document import Tensor, Tied, ends, parse
from shardckpt.state.moving import End, ends_by_place, moved_tree
from shardckpt.state.unflatten import assemble

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardckpt.state.document import Tree


def renamed_state(
    tree: Tree,
    tensors: Mapping[str, object],
    leaves: Mapping[str, str],
    origins: Mapping[str, str] | None = None,
) -> Any:
    """Plain containers that hold the given tensors and leaves.

    Args:
        tree: the old state.
        tensors: name in the new state → tensor leaf.
        leaves: name in the old state → new name, for the small leaves and empty containers to keep.
        origins: new name of a tensor → old name, if it has one.

    Raises:
        NamesMismatchError: another leaf has the place of a leaf, or a leaf has no name.
    """
    root = parse(tree)
    old = ends_by_place(root)
    kept = [(name, old[before]) for before, name in leaves.items()]
    made = [
        (
            name,
            End(
                Tensor(name),
                old[before].path if (before := (origins or {}).get(name)) in old else (),
            ),
        )
        for name in tensors
    ]
    stays = [pair for pair in kept if old.get(pair[0]) is pair[1]]
    moves = [pair for pair in kept if old.get(pair[0]) is not pair[1]]
    return assemble(moved_tree(root, [*stays, *made, *moves]), tensors)


def end_names(tree: Tree) -> list[str]:
    """The names of small leaves and empty containers."""
    return [
        end.name for end in ends(parse(tree)) if not isinstance(end, Tensor | Tied) and end.name
    ]
