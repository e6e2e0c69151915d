"""Expected effects of damage to each kind of file."""

from __future__ import annotations

import flip_bits
from flip_bits import SEVERAL_HOSTS

import shardckpt

LAYOUTS = ["packed", "zarr"]
CHUNKS = {"packed": "data file", "zarr": "chunk"}
"""The kind of file that hosts' chunks are in."""
DATA = {*CHUNKS.values(), "small tensors"}
INDEXES = {
    "merged index: manifest",
    "merged index: nodes",
    "lane: manifest",
    "lane: node",
    "zarr.json",
}
"""Kinds of files that only other tools read."""
SPARE = {
    "checksums of replicas",
    "chunk table",
    "a host's chunk table",
    "small tensors' table",
    "contents",
}
"""Kinds of files that a reader can do without: the table of all by itself, or the hosts' and that
of small tensors."""
KINDS = [
    (layout, hosts, kind)
    for layout in LAYOUTS
    for hosts in (1, 3)
    for kind in flip_bits.KINDS[layout]
    if hosts > 1 or kind not in SEVERAL_HOSTS
]


def damage_of(checkpoint):
    """Files that verify names as damaged, relative to the checkpoint."""
    return {damage.file for damage in shardckpt.open(checkpoint).verify().damage}


def assert_noticed(checkpoint, path, kind, truth):
    """Damage to one file of that kind: our readers refuse, unless they do not need it; verify names
    it, and nothing else.

    Where it is tensors' data, error and report say which index ranges of which tensors, and all
    others are restored.
    """
    outcome = flip_bits.observe(checkpoint, truth, path)
    assert outcome.restored == ("right" if kind in INDEXES | SPARE else "refused")
    assert outcome.reported
    if kind == "commit record" and not path.exists():
        return  # then there is no checkpoint, and no file to name
    assert not outcome.failed, outcome
    if kind in DATA:
        assert outcome.damaged
    if kind != "commit record" and outcome.restored == "refused":
        assert outcome.undamaged > 0
