"""An fsspec file system of checkpoints: their virtual files, and their arrays as a zarr hierarchy.

    fsspec.open("shardckpt://runs/100/model.safetensors")
    fsspec.open("shardckpt://model.safetensors::gs://bucket/runs/100")
    zarr.open_group("shardckpt://runs/100/zarr", mode="r")

A path is the place of a checkpoint, and a name below it: of a file of `ModelView`, or `zarr/` and a
key. In the second form the place comes after `::`, as any url of shardckpt's. fsspec finds the
class by the entry point `fsspec.specs`.
"""

from __future__ import annotations

import io
from collections import OrderedDict
from dataclasses import dataclass, field
from threading import Lock
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakValueDictionary

from fsspec.spec import AbstractFileSystem

from shardckpt.commit.publish import RECORD
from shardckpt.errors import DtypeError, NamesMismatchError, NotFoundError, UrlError
from shardckpt.io.store import Store
from shardckpt.io.url import parse
from shardckpt.reading.checkpoint import Checkpoint
from shardckpt.reading.zarr_keys import ZarrKeys
from shardckpt.views.model_view import ModelView, drop_blocks

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_ZARR = "zarr"
_MOST_OPEN = 32
"""Number of checkpoints that stay open."""
_MOST_CACHED = 4
"""Number of open checkpoints that keep blocks."""


@dataclass(slots=True)
class _Open:
    """An open checkpoint."""

    checkpoint: Checkpoint
    options: Mapping[str, Any]
    """Options of its view."""
    keys: ZarrKeys
    place: Store
    token: object
    """Token of its record (`Store.change_token`), from before the record was read."""
    planned: ModelView | None = None
    """The view, after its first use."""
    planning: Lock = field(default_factory=Lock)

    @property
    def view(self) -> ModelView:
        """The files. If they cannot be planned, the next use tries it again."""
        with self.planning:
            if self.planned is None:
                self.planned = ModelView(self.checkpoint, **self.options)
            return self.planned

    def files_that_fit(self) -> Iterable[str]:
        """Names of the files; none if safetensors cannot hold the tensors or their names."""
        try:
            return self.view.sizes
        except (DtypeError, NamesMismatchError):
            return ()


class CheckpointFileSystem(AbstractFileSystem):  # type: ignore[misc]  # fsspec has no types
    """Read-only files of checkpoints.

    `info`, `ls`, `open` and the reading of a whole file see a checkpoint that was replaced; ranges,
    and keys below `zarr/`, are read from the one that is open.
    """

    protocol: ClassVar = "shardckpt"
    root_marker: ClassVar = ""
    _options: Mapping[str, Any]

    def __init__(
        self,
        fo: str | None = None,
        target_protocol: str | None = None,
        target_options: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """Show checkpoints by their paths, or one checkpoint.

        Args:
            fo: path of the one checkpoint, as fsspec gives it for a chain of urls; None: paths name
                checkpoints.
            target_protocol: protocol of that path.
            target_options: ignored: shardckpt reads storages by itself, with settings from the
                environment.
            options: options of `ModelView`; fsspec's own, such as `skip_instance_cache`, are
                accepted.
        """
        del target_options
        own = {
            name: options.pop(name)
            for name in ("asynchronous", "loop", "use_listings_cache", "skip_instance_cache")
            if name in options
        }
        super().__init__(**own)
        scheme = None if target_protocol in (None, "file", "local") else target_protocol
        self._one = (
            None
            if fo is None
            else (str(fo) if scheme is None or "://" in str(fo) else f"{scheme}://{fo}")
        )
        self._options = options
        self._opened: OrderedDict[str, _Open] = OrderedDict()
        """The checkpoints that are open, by place; the one used last comes last."""
        self._lock = Lock()
        self._opening: WeakValueDictionary[str, Lock] = WeakValueDictionary()

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        """The path without `shardckpt://` and slashes at its end."""
        if isinstance(path, list):
            return [cls._strip_protocol(one) for one in path]
        return str(path).removeprefix("shardckpt://").partition("::")[0].rstrip("/")

    def info(self, path: str, **_options: Any) -> dict[str, Any]:
        """Name, type and size of a file or directory, and a tag that differs for other bytes."""
        path = self._strip_protocol(path)
        return self._info(path, *self._find(path, look=True))

    def _info(self, path: str, opened: _Open, name: str) -> dict[str, Any]:
        if name in ("", _ZARR):
            return {"name": path, "type": "directory", "size": 0}
        if name.startswith(f"{_ZARR}/"):
            key = name.removeprefix(f"{_ZARR}/")
            if opened.keys.children(key) is not None:
                return {"name": path, "type": "directory", "size": 0}
            with opened.checkpoint.reading():
                size = opened.keys.size(key)
            if size is not None:
                return {"name": path, "type": "file", "size": size}
        elif name in opened.view.sizes:
            view = opened.view
            return {"name": path, "type": "file", "size": view.sizes[name], "ETag": view.identity}
        raise FileNotFoundError(path)

    def ls(self, path: str, detail: bool = True, **_options: Any) -> list[Any]:
        """The files and directories directly below a path; a file itself."""
        path = self._strip_protocol(path)
        opened, name = self._find(path, look=True)
        below: list[str] | None
        if name == "":
            below = [*opened.files_that_fit(), _ZARR]
        elif name == _ZARR or name.startswith(f"{_ZARR}/"):
            below = opened.keys.children(name[len(_ZARR) + 1 :])
        else:
            below = None
        names = (
            {path: name}
            if below is None
            else {_join(path, child): _join(name, child) for child in below}
        )
        return [self._info(one, opened, names[one]) for one in names] if detail else [*names]

    def cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **_options: Any
    ) -> bytes:
        """A file's bytes, or those from `start` to `end`; negative ones count from its end."""
        path = self._strip_protocol(path)
        opened, name = self._find(path, look=False)
        if name.startswith(f"{_ZARR}/"):
            with opened.checkpoint.reading():
                data = opened.keys.read(name.removeprefix(f"{_ZARR}/"))
            if data is None:
                raise FileNotFoundError(path)
            return data[start:end]
        if start is None and end is None:
            opened, name = self._find(path, look=True)
        view = opened.view
        if name not in view.sizes:
            raise FileNotFoundError(path)
        first, last, _ = slice(start, end).indices(view.sizes[name])
        return view.open(name).pread(first, max(0, last - first))

    def _open(self, path: str, mode: str = "rb", **_options: Any) -> io.BufferedReader | io.BytesIO:
        if mode != "rb":
            raise NotImplementedError(f"{path}: checkpoints are read-only; open it with mode 'rb'")
        opened, name = self._find(path, look=True)
        return (
            io.BytesIO(self.cat_file(path))
            if name.startswith(f"{_ZARR}/") or name not in opened.view.sizes
            else io.BufferedReader(opened.view.open(name), 1 << 20)
        )

    def invalidate_cache(self, path: str | None = None) -> None:
        """Forget the checkpoints that are open; one that was replaced meanwhile is opened anew."""
        super().invalidate_cache(path)
        with self._lock:
            self._opened.clear()

    def _find(self, path: str, *, look: bool) -> tuple[_Open, str]:
        """The checkpoint of a path, and the name below it; FileNotFoundError if there is none.

        Args:
            path: the path.
            look: whether to look for another checkpoint at the place of one that is open.
        """
        if self._one is not None:
            return self._checkpoint(self._one, look=look), path.lstrip("/")
        parts = path.split("/")
        # A name below `zarr` may itself be `zarr`.
        cuts = [i for i, part in enumerate(parts) if part == _ZARR]
        for cut in (*cuts, len(parts) - 1, len(parts)):
            place = "/".join(parts[:cut])
            try:
                return self._checkpoint(place, look=look), "/".join(parts[cut:])
            except (NotFoundError, UrlError):
                continue
        raise FileNotFoundError(path)

    def _checkpoint(self, place: str, *, look: bool) -> _Open:
        opened = self._current(place, look=look)
        if opened is None:
            with self._lock:
                opening = self._opening.setdefault(place, Lock())
            with opening:  # others that need it meanwhile do not parse it as well
                opened = self._current(place, look=look) or self._open_anew(place)
        return opened

    def _current(self, place: str, *, look: bool) -> _Open | None:
        """The checkpoint that is open; None: there is none, or its record may be another one."""
        with self._lock:
            opened = self._opened.get(place)
            if opened is None:
                return None
            self._use(place, opened)
        is_current = not look or opened.place.change_token(RECORD) == opened.token
        return opened if is_current else None

    def _open_anew(self, place: str) -> _Open:
        store = Store.open(parse(place))
        token = store.change_token(RECORD)
        checkpoint = Checkpoint(place)
        with self._lock:
            opened = self._opened.get(place)
        if opened is None or opened.checkpoint.record.attempt != checkpoint.record.attempt:
            keys = ZarrKeys(checkpoint.record, checkpoint.reader)
            opened = _Open(checkpoint, self._options, keys, store, token)
        opened.token = token
        with self._lock:
            self._use(place, opened)
        return opened

    def _use(self, place: str, opened: _Open) -> None:
        """Make a checkpoint the one used last, and free the memory of others; the lock is held."""
        self._opened[place] = opened
        self._opened.move_to_end(place)
        if len(self._opened) > _MOST_OPEN:
            self._opened.popitem(last=False)
        for other in [*self._opened.values()][:-_MOST_CACHED]:
            if other.planned is not None:
                drop_blocks(other.planned)


def _join(path: str, child: str) -> str:
    return f"{path}/{child}" if path else child
