"""Removal of folders that runs of a host have left in a committed attempt, and that no record refers to.

Several writers may have worked as one host, each in a folder of its own below `hosts/`. One of them wrote the host's record.
Another may have been killed, and its folder is left.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardckpt.commit.assemble import SMALL_TABLE, finished_hosts, read_host_record
from shardckpt.io.threads import map_on_threads

if TYPE_CHECKING:
    from shardckpt.io.store import Store


def remove_strays(place: Store) -> None:
    """Remove the folders of a complete attempt that no host's record names.

    Raises:
        StorageError: the storage failed.
    """
    folders = {name for name in place.list_children("hosts/") if name.endswith("/")} - {_folder(SMALL_TABLE)}
    hosts = finished_hosts(place)
    if len(folders) <= len(hosts):  # every host has a folder
        return
    records = map_on_threads(lambda host: read_host_record(place, host)[0], hosts)
    for stray in sorted(folders - {_folder(record.files.table.key) for record in records}):
        place.delete_prefix(f"hosts/{stray}")


def _folder(key: str) -> str:
    """The folder of a file below `hosts/`, with a slash at its end."""
    return f"{key.split('/')[1]}/"
