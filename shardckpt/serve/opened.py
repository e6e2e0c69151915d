"""Open checkpoints and the views of them, kept for the next requests.

A checkpoint that was replaced or deleted is noticed at the next request: on a disk when its record
has another status and then another generation, elsewhere by the record's generation, which is asked
for after `_TRUSTED` seconds.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from concurrent.futures import Future
from dataclasses import dataclass, field
from threading import Lock
from typing import TYPE_CHECKING, Any

from shardckpt.commit.publish import RECORD
from shardckpt.convert.options import SafetensorsOptions
from shardckpt.errors import BudgetError, NotFoundError, StorageError
from shardckpt.format.zarr_arrays import largest_chunk
from shardckpt.io.store import Store, kind_of
from shardckpt.reading.checkpoint import Checkpoint
from shardckpt.reading.naming.mapping_file import PRESETS
from shardckpt.reading.zarr_keys import ZarrKeys
from shardckpt.serve.access.identity import as_service
from shardckpt.serve.openapi import parameters
from shardckpt.text import file_size, shorten
from shardckpt.views.model_view import ModelView

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping

    from shardckpt.serve.catalogue.catalogue import Catalogue
    from shardckpt.serve.roots import Needs, Roots

_MOST_OPEN = 32
_MOST_VIEWS = 4
"""Most views of all checkpoints together; each keeps blocks."""
_VIEW_BYTES = 32 << 20
_MEMORY = 32 << 20
_LARGEST_CHUNK = 64 << 20
"""Most bytes of a chunk that is read as a whole, as compressed ones are; those of saves have some
MiB."""
_TRUSTED = 10.0
_MOST_PARTS = 64
_MOST_VALUES = 4
"""Most values of one part of a checkpoint, such as its tree below the prefixes of proxies."""
VIEW = parameters(SafetensorsOptions, without=("overwrite",), mapping=PRESETS)


@dataclass(slots=True)
class Opened:
    """An open checkpoint."""

    ident: str
    checkpoint: Checkpoint
    token: object
    """Token of the record at the last look (`Store.change_token`)."""
    version: object
    checked: float
    needs: Needs
    """Roots that it needs."""
    parts: dict[str, OrderedDict[Hashable, Any]] = field(default_factory=dict)
    """Values computed from it, such as its zarr keys, by what else they were computed from."""
    making: Lock = field(default_factory=Lock)

    @property
    def attempt(self) -> str:
        """The attempt that is open; never used again for other bytes."""
        return self.checkpoint.record.attempt

    def part(self, key: str, make: Callable[[], Any], of: Hashable = None) -> Any:
        """The value that `make` returned at the first call with this key and `of`.

        The values of the last few `of` of each key are kept.
        """
        with self.making:
            values = self.parts.setdefault(key, OrderedDict())
            if of not in values:
                values[of] = make()
            values.move_to_end(of)
            if len(values) > _MOST_VALUES:
                values.popitem(last=False)
            return values[of]

    def check_chunks(self, *names: str) -> None:
        """Check that memory has room for the chunks of some tensors, or of all.

        Raises:
            BudgetError: a compressed chunk is larger than what this service reads at once.
        """
        record = self.checkpoint.record
        for tensor in (
            map(self.checkpoint.tensor, names) if names else record.structure.tensors.values()
        ):
            if (record if tensor.base is None else tensor.base.base).compression is not None:
                check_chunk(f"{self.ident}: {tensor.name}", largest_chunk([tensor]))

    @property
    def keys(self) -> ZarrKeys:
        """The checkpoint as a zarr hierarchy."""
        hierarchy: ZarrKeys = self.part(
            "zarr", lambda: ZarrKeys(self.checkpoint.record, self.checkpoint.reader)
        )
        return hierarchy


class OpenCheckpoints:
    """The checkpoints that were asked for last. Safe to use from several threads."""

    def __init__(self, roots: Roots, catalogue: Catalogue | None = None) -> None:
        """Open nothing yet; `resolve` needs a catalogue."""
        self._roots, self._catalogue = roots, catalogue
        self._opened: OrderedDict[str, Opened] = OrderedDict()
        self._views: OrderedDict[tuple[str, str, str], ModelView] = OrderedDict()
        self._lock = Lock()
        self._opening: dict[str, Future[Opened]] = {}

    def resolve(self, path: str) -> tuple[str, str]:
        """The id of the checkpoint that a path begins with, and the rest of the path.

        Raises:
            NotFoundError: it begins with none, or the user may not read its root.
            StorageError: the catalogue cannot be read, and no such checkpoint is open.
        """
        parts = path.split("/")
        idents = ["/".join(parts[:n]) for n in range(1, min(len(parts), _MOST_PARTS) + 1)]
        self._roots.root(path)
        opened = next((one for one in reversed(idents) if one in self._opened), None)
        try:
            ident = None if self._catalogue is None else self._catalogue.longest(idents)
        except StorageError:
            if opened is None:
                raise
            ident = None
        ident = ident or opened
        if ident is None:  # it may be new
            ident = next(
                (one for one in idents[:8] if Store.open(self._roots.locate(one)).exists(RECORD)),
                None,
            )
        if ident is None:
            raise NotFoundError(f"{shorten(path)}: there is no checkpoint.")
        return ident, path[len(ident) + 1 :]

    def get(self, ident: str) -> Opened:
        """An open checkpoint.

        Raises:
            NotFoundError, FormatError: there is none; its record is damaged, or it needs something
                outside of the roots that the user may read.
            StorageError: the storage failed.
        """
        self._roots.root(ident)
        opened = self._get(ident)
        self._roots.check_needs(opened.needs)
        return opened

    def _get(self, ident: str) -> Opened:
        known = self._current(ident)
        if known is not None:
            return known
        mine: Future[Opened] = Future()
        with self._lock:
            opening = self._opening.setdefault(ident, mine)
        if opening is mine:  # others that ask for it meanwhile get the same result or error
            try:
                with as_service():  # it is for several users; `get` checks what each may read
                    opened = self._current(ident) or self._open(ident)
            except BaseException as e:  # noqa: BLE001  (raised below, in all that wait)
                mine.set_exception(e)
            else:
                mine.set_result(opened)
            with self._lock:
                del self._opening[ident]
        return opening.result()

    def _current(self, ident: str) -> Opened | None:
        """The open checkpoint that is still there; None: there is none."""
        with self._lock:
            known = self._opened.get(ident)
            if known is None:
                return None
            self._opened.move_to_end(ident)
        place, now = known.checkpoint.location, time.monotonic()
        if not kind_of(place).near and now < known.checked + _TRUSTED:
            return known
        store = Store.open(place)
        token = store.change_token(RECORD)
        if token != known.token and _version(store, token) != known.version:
            return None
        known.checked, known.token = now, token
        return known

    def _open(self, ident: str) -> Opened:
        with self._lock:  # what was there is gone, and must not hide those below it
            self._opened.pop(ident, None)
        place, now = self._roots.locate(ident), time.monotonic()
        store = Store.open(place)
        token = store.change_token(RECORD)
        version = _version(store, token)
        checkpoint = Checkpoint(place)
        needs = self._roots.check(checkpoint)
        # A disk is read by few threads per request, as there are many requests; an object store
        # wants many reads at a time.
        checkpoint.limit_reading(threads=2 if kind_of(place).near else None, memory=_MEMORY)
        opened = Opened(ident, checkpoint, token, version, now, needs)
        with self._lock:
            self._opened[ident] = opened
            while len(self._opened) > _MOST_OPEN:
                self._opened.popitem(last=False)
        return opened

    def view(self, opened: Opened, options: Mapping[str, Any]) -> ModelView:
        """The files of a checkpoint.

        Raises:
            BudgetError: as for `Opened.check_chunks`.
            OptionError, NamesMismatchError, ShapeMismatchError, DtypeError, DtypeMismatchError: as
            for `ModelView`.
        """
        key = (opened.ident, opened.attempt, repr(sorted(options.items())))
        with self._lock:
            known = self._views.get(key)
            if known is not None:
                self._views.move_to_end(key)
                return known
        opened.check_chunks()
        view = ModelView(opened.checkpoint, cache_bytes=_VIEW_BYTES, **options)
        with self._lock:
            view = self._views.setdefault(key, view)
            while len(self._views) > _MOST_VIEWS:
                self._views.popitem(last=False)
        return view


def check_chunk(what: str, nbytes: int) -> None:
    """Check that memory has room for a chunk. Raises BudgetError."""
    if nbytes > _LARGEST_CHUNK:
        raise BudgetError(
            f"{what} has chunks of {file_size(nbytes)}, and this service reads chunks of at most "
            f"{file_size(_LARGEST_CHUNK)}; `shardckpt reshard` writes smaller ones."
        )


def _version(store: Store, token: object) -> object:
    """The generation of the record at a place: another record has another one.

    On a disk, the token may change by itself: some mounts number files anew at each look.
    """
    return store.read_versioned(RECORD)[1] if store.near else token
