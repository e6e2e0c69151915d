"""Files of checkpoints: `/files` (as exported), `/zarr` (for zarr readers), `/raw` (as stored).

`/files` gives files as an export would write them, and `/zarr` gives files as stock zarr readers
ask for them.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from shardckpt.commit.attempts import is_attempt_name, unfolded
from shardckpt.commit.markers import PINNED, SUPERSEDED
from shardckpt.commit.publish import RECORD
from shardckpt.convert.options import SafetensorsOptions
from shardckpt.errors import NotFoundError, ReplacedError
from shardckpt.io.store import Store
from shardckpt.serve.access.identity import WHO
from shardckpt.serve.openapi import Endpoint
from shardckpt.serve.opened import VIEW, check_chunk
from shardckpt.serve.sources import ANSWERS, ByteSource, of_bytes
from shardckpt.text import shorten

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardckpt.serve.service import Service
    from shardckpt.views.model_view import ModelView

_LISTED = (RECORD, PINNED, SUPERSEDED)
_JSON = "application/json"
_SMALL = 256 << 10


def file(service: Service, path: str, **asked: Any) -> Any:
    """Read a file that an export to safetensors would write, or list these files."""
    ident, name = service.opened.resolve(path)
    opened = service.opened.get(ident)
    view = service.opened.view(opened, SafetensorsOptions.arguments(asked))
    if not name:
        return {
            "id": ident,
            "files": [{"name": one, "bytes": size} for one, size in view.sizes.items()],
        }
    return view_source(service, view, name)


def view_source(
    service: Service, view: ModelView, name: str, headers: Mapping[str, str] | None = None
) -> ByteSource:
    """A file of a view.

    Raises:
        NotFoundError: there is no such file.
    """
    view.layout(name)
    kind = _JSON if name.endswith(".json") else "application/octet-stream"
    return ByteSource(
        view.sizes[name],
        service.tag(view.identity, name),
        partial(view.read_into, name),
        kind,
        headers or {},
        partial(view.block_end, name),
    )


def zarr(service: Service, path: str) -> ByteSource:
    """Read a document or chunk of a checkpoint as a zarr hierarchy."""
    ident, key = service.opened.resolve(path)
    opened = service.opened.get(ident)
    tag = service.tag(unfolded(opened.attempt), "zarr", key)
    document = opened.keys.document(key)
    if document is not None:
        return of_bytes(document, tag, _JSON)
    chunk = opened.keys.chunk_bytes(key)
    if chunk is None:
        raise NotFoundError(f"{shorten(path)}: there is no such key.")
    check_chunk(shorten(path), chunk)
    with ANSWERS.lent(chunk):
        data = opened.keys.read(key) or b""
    return of_bytes(data, tag, "application/octet-stream", held=True)


def raw(service: Service, path: str) -> ByteSource:
    """Read a file of a checkpoint as it is stored, for `shardckpt.open` and `restore`."""
    parts = path.split("/")
    cut = next((i for i, part in enumerate(parts) if i and is_attempt_name(part)), len(parts) - 1)
    ident, key = "/".join(parts[:cut]), "/".join(parts[cut:])
    whole = key in _LISTED
    if not ident or not (whole or cut < len(parts) - 1):
        raise NotFoundError(f"{shorten(path)}: there is no such file of a checkpoint.")
    service.roots.locate(path)  # the file itself is not a link that leads out
    if WHO.get().roots is not None:  # the record names its bases
        service.opened.get(ident)
    store = Store.open(service.roots.locate(ident))
    if whole:
        source = stored_file(service, store, key, _JSON)
    else:  # names of attempts are never used again
        size, read = store.size(key), lambda offset, into: store.read_into(key, offset, [into])
        source = None if size is None else ByteSource(size, service.tag(path, str(size)), read)
    if source is None:
        raise NotFoundError(f"{shorten(path)}: there is no such file.")
    return source


def stored_file(
    service: Service, store: Store, key: str, kind: str, headers: Mapping[str, str] | None = None
) -> ByteSource | None:
    """A file that may be replaced while it is sent; None: there is none.

    Only a small one is held in memory.
    """
    token, size = store.change_token(key), store.size(key)
    if size is None:
        return None
    if size <= _SMALL:
        data = store.read(key)
        return of_bytes(data, service.tag(key, data.decode("latin-1")), kind, headers)

    def read_into(offset: int, into: memoryview) -> None:
        store.read_into(key, offset, [into])
        if store.change_token(key) != token:
            raise ReplacedError(f"{store}: {key} was replaced while it was sent; ask again.")

    return ByteSource(
        size, service.tag(str(store), key, repr(token)), read_into, kind, headers or {}
    )


ENDPOINTS = (
    Endpoint("/files/{path}", file, VIEW, ("application/octet-stream", _JSON)),
    Endpoint("/zarr/{path}", zarr, (), ("application/octet-stream", _JSON)),
    Endpoint("/raw/{path}", raw, (), ("application/octet-stream", _JSON)),
)
