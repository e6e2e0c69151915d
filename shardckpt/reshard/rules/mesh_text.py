"""Parser of meshes as text, in the notation of the command line.

data=2,model=4                   Mesh((2, 4), ("data", "model"))
data=2,model=2@3,1,0-1           with device ids in row-major order; a-b is the range from a to b
data=1x2,fsdp=4                  HybridMesh((1, 4), (2, 1), …): devices within a slice × slices
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from shardckpt.errors import OptionError, ShardingError, extend
from shardckpt.layout.hybrid_mesh import HybridMesh
from shardckpt.layout.mesh import MAX_DEVICES, Mesh
from shardckpt.text import clip, shorten

if TYPE_CHECKING:
    from collections.abc import Iterator

_AXIS = re.compile(
    r"\s*(?P<name>[^\s=,@]+)\s*=\s*(?P<ici>\d{1,9})(?:x(?P<dcn>\d{1,9}))?\s*", re.ASCII
)
_IDS = re.compile(r"\s*(?P<first>\d{1,18})(?:-(?P<last>\d{1,18}))?\s*", re.ASCII)


def parse_mesh(text: str) -> Mesh:
    """Parse a mesh.

    Raises:
        OptionError: the text is not a mesh; the message names the wrong part.
        ShardingError: the text describes an impossible mesh.

    >>> parse_mesh("data=2,model=4")
    Mesh((2, 4), ('data', 'model'))
    >>> parse_mesh("data=1x2,fsdp=2").devices.tolist()
    [[0, 1], [2, 3]]
    """
    axes_text, at, ids_text = text.partition("@")
    axes = []
    for part in axes_text.split(","):
        axis = _AXIS.fullmatch(part)
        if axis is None:
            raise OptionError(
                f"mesh {clip(text)!r}: {shorten(part)} is not an axis; write name=size for each, "
                "as in data=2,model=4, with sizes of at most nine digits."
            )
        axes.append(axis)
    names = [axis["name"] for axis in axes]
    inner = [int(axis["ici"]) for axis in axes]
    try:
        if not any(axis["dcn"] for axis in axes):
            return Mesh(inner, names, list(_ids(text, ids_text)) if at else None)
        if at:
            raise OptionError(
                f"mesh {clip(text)!r}: a mesh of slices (AxB) has ids from 0 in order; leave out "
                "the ids (@…) or the slices (x…)."
            )
        return HybridMesh(inner, [int(axis["dcn"] or 1) for axis in axes], names)
    except ShardingError as error:
        raise ShardingError(f"mesh {clip(text)!r}: {error}") from error


def mesh_of(value: object, where: str) -> Mesh:
    """The mesh of a rules file: a text, or a table of axis and size.

    Raises:
        OptionError, ShardingError: it is not a mesh; the message names `where`, the file and place.
    """
    if isinstance(value, Mapping):
        value = ",".join(f"{axis}={size}" for axis, size in value.items())
    if not isinstance(value, str):
        raise OptionError(
            f'{where}: {shorten(value)} is not a mesh; write "data=2,model=4", or a table of axis '
            "and size."
        )
    try:
        return parse_mesh(value)
    except (OptionError, ShardingError) as error:
        extend(error, before=f"{where}: ")
        raise


def _ids(text: str, ids_text: str) -> Iterator[int]:
    count = 0
    for part in ids_text.split(","):
        run = _IDS.fullmatch(part)
        if run is None:
            raise OptionError(
                f"mesh {clip(text)!r}: {shorten(part)} is not a device id; write numbers and "
                "ranges, as in @0-3,7,6."
            )
        ids = range(int(run["first"]), int(run["last"] or run["first"]) + 1)
        count += len(ids)
        if not ids or count > MAX_DEVICES:
            raise OptionError(
                f"mesh {clip(text)!r}: {shorten(part)} is not a range of device ids, or the mesh "
                "has too many."
            )
        yield from ids
