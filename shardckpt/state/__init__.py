"""A state of nested containers as named tensors and one JSON document, and back.

Everything here is pure and independent of any framework: the caller decides which leaves are
tensors.

1. `flatten` walks a state once and returns its tensors by name, in order, and the tree document.
2. `union` merges the documents of several processes: the merged state has every part that any
   process has.
3. `unflatten` rebuilds a state from tensors and a document, as plain dicts, lists and tuples.
4. `select` makes the document of a part of the state.
5. `match` compares a `like` with a document, before anything is read: it pairs both by typed key
   path, determines which stored tensor goes into which leaf, and then builds `like`'s own
   containers around the values that were read.

The tree document is strict JSON, of a size in proportion to the number of leaves. Equal states have
equal documents, byte for byte (`json.dumps(tree, separators=(",", ":"), allow_nan=False)`, keys
unsorted: their order is the dict's).

    node      = leaf | tensor | [node, …] | {"$tuple": [node, …]} | dict
              | {"$per_process": null}                 a value per process, stored elsewhere
    tensor    = "$tensor"
              | {"$tensor": meaning}                   a framework's, as "jax.key:threefry2x32"
              | {"$tied": name}                        another name of the tensor `name`
    dict      = {text: node, …}                        all keys are str without surrogates
              | {"$dict": [[key, node], …]}            any other keys
    key       = text | {"$str": hex} | {"$int": hex} | integer | true | false | null
    leaf      = as in `shardckpt.state.leaves`
              | {"$leaf": [registered name, node]}     no tensors inside, and nothing per process
    text      = a str; if it begins with "$", it is written with another "$" in front
    meaning   = a str of 1 to 256 printable characters

A tensor's name is not written: it follows from the position of its node (`shardckpt.state.names`).
The name in `$tied` is always the name of a tensor node. `flatten` stores a tied tensor under its
first name; after a `union` the tensor node may come later. A node is nested in at most 200 others.
"""

from __future__ import annotations

from shardckpt.state.document import (
    Meaning,
    Tree,
    alias_map,
    parse,
    stored_names,
    tensor_names,
)
from shardckpt.state.flatten import Flat, flatten
from shardckpt.state.leaves import JSON
from shardckpt.state.listing import iter_leaves, leaf_names, meanings, per_process_names
from shardckpt.state.match import Matched, match
from shardckpt.state.per_process import PerProcess
from shardckpt.state.select import select
from shardckpt.state.unflatten import unflatten
from shardckpt.state.union import union

__all__ = [
    "JSON",
    "Flat",
    "Matched",
    "Meaning",
    "PerProcess",
    "Tree",
    "alias_map",
    "flatten",
    "iter_leaves",
    "leaf_names",
    "match",
    "meanings",
    "parse",
    "per_process_names",
    "select",
    "stored_names",
    "tensor_names",
    "unflatten",
    "union",
]
