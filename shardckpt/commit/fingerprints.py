"""The recorded fingerprint of a checkpoint: made from the hosts' sums, and read back.

The hosts have written these sums beside their chunks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardckpt.commit.table_reading import read_document
from shardckpt.format.documents import Fields, FileReference, seal
from shardckpt.format.fingerprint import StateSums
from shardckpt.io.threads import AT_ONCE, map_on_threads

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardckpt.format.record import CheckpointRecord, Contents, HostRecord
    from shardckpt.io.requests import ObjectWriter
    from shardckpt.io.store import Store

FINGERPRINT = "fingerprint.json"
"""The file, relative to the attempt."""


def write_fingerprint(
    place: Store, hosts: Sequence[HostRecord], contents: Contents, to: ObjectWriter
) -> FileReference:
    """Write the fingerprint of the tensors that are not in a base.

    Args:
        place: the attempt.
        hosts: all host records; each refers to its part of the sums.
        contents: the union of the hosts' contents.
        to: the attempt, or uploads to it.

    Raises:
        FormatError, StructureMismatchError: a host's sums are damaged.
    """
    tensors = contents.structure.tensors

    def read(host: HostRecord) -> StateSums:
        reference = host.files.sums
        assert reference is not None
        document = read_document(place, reference)
        return StateSums.from_json(document.mapping("sums"), document.where)

    sums = StateSums(tensors.values())
    for first in range(0, len(hosts), AT_ONCE):  # so that few parts are in memory
        for part in map_on_threads(read, hosts[first : first + AT_ONCE]):
            sums.merge(part)
    for name, elements in contents.small.items():  # no host wrote chunks of these
        sums.add_stored(name, elements)
    own = {
        name: digest
        for name, digest in sums.fingerprint().tensors.items()
        if tensors[name].base is None
    }
    data = seal({"tensors": own})
    to.write(FINGERPRINT, data)
    return FileReference.of(FINGERPRINT, data)


def recorded_fingerprint(place: Store, record: CheckpointRecord) -> dict[str, str]:
    """Name → digest, of the tensors whose fingerprint a checkpoint has recorded.

    Empty if it has none.

    Args:
        place: the attempt.
        record: the commit record.

    Raises:
        FormatError, MissingDataError: the file is damaged or missing.
    """
    reference = record.fingerprint
    if reference is None:
        return {}
    document = read_document(place, reference)
    read = Fields(document.mapping("tensors"), document.where)
    return {name: read.string(name) for name in read.doc}
