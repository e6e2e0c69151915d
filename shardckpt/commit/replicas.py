"""Comparison of several hosts' copies of the same boxes, by the checksums that they wrote."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardckpt.errors import CommitError
from shardckpt.format.replicas import difference, open_checksums
from shardckpt.state.names import shown

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shardckpt.format.record import HostRecord
    from shardckpt.format.structure import TensorRecord
    from shardckpt.io.store import Store


def check_replicas(
    place: Store, hosts: Sequence[HostRecord], tensors: Mapping[str, TensorRecord]
) -> None:
    """Check that all holders of a box have the same elements, as far as they have compared them.

    Files are read only where hosts have different digests.

    Args:
        place: the attempt.
        hosts: all host records.
        tensors: the tensors by name.

    Raises:
        CommitError: hosts have different elements; the message names the tensor, and hosts on both
            sides.
    """
    by_group: dict[str, dict[str, list[HostRecord]]] = {}
    for host in hosts:
        for group, digest in host.files.replicas.digests.items() if host.files.replicas else ():
            by_group.setdefault(group, {}).setdefault(digest, []).append(host)
    for group, by_digest in by_group.items():
        if len(by_digest) < 2:
            continue
        versions = [
            ([host.host for host in holders], _checksums(place, holders[0], group))
            for holders in by_digest.values()
        ]
        differs = difference(versions)
        if differs is not None:
            plain = tensors[differs[0]].layout is None
            local = (
                ', or give each its own name and SaveOptions(host_tensors="local")' if plain else ""
            )
            raise CommitError(
                f"{place}: {shown(differs[0])}: this {'plain' if plain else 'replicated'} tensor "
                f"{differs[1]}, and all write a part of it; make them equal, and check_replicas= "
                f"the same on all processes{local}. SaveOptions(check_replicas=False) stores the "
                "lowest process's copy. Nothing was published."
            )


def _checksums(place: Store, host: HostRecord, group: str) -> Mapping[str, int]:
    reference = host.files.replicas
    assert reference is not None
    key = reference.file.key
    return open_checksums(place.read(key), reference, place.path_of(key)).get(group, {})
