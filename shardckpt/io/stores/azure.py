"""A storage in a container of Azure Blob Storage, by the library obstore.

obstore knows all credentials of Azure and has conditional writes. Four things are done around it:

1. It sends each request once: retries, pauses and the limit of requests are the same as for other
   object stores (`Bucket`).
2. Its errors become OSErrors with one line of text. A status that passes, or a broken connection,
   is a `PassingError`.
3. It lists complete directories alone. A prefix that ends within a name takes a listing of the
   directory above.
4. It has no conditional deletion. A signed url has one, if the credentials can sign urls.

TensorStore has no driver for Azure.
"""

from __future__ import annotations

import os
import re
import socket
from contextlib import contextmanager
from datetime import timedelta
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from shardckpt.io.buckets import cloud
from shardckpt.io.buckets.bucket import ABSENT, Body, Bucket, Content, Listed, Page
from shardckpt.io.buckets.retry import NoBucketError, PassingError, has_answered, note_answer
from shardckpt.io.failures import storage_errors
from shardckpt.io.stores.bucket import BucketStore

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardckpt.io.buckets.retry import Retry
    from shardckpt.io.store import Store
    from shardckpt.io.url import Location

_STATUS = re.compile(r"status code: (\d{3})|code: \"(\d{3})\"")
_ENCODED = re.compile(r"[^A-Za-z0-9/._~-]")
"""Characters for which obstore (0.12) signs a url wrongly."""
_PIECE = 1 << 20
_SIGNED = timedelta(minutes=5)
"""For so long a signed url can be used."""


class AzureStore(BucketStore):
    """Objects in a container whose names have a prefix."""

    __slots__ = ()
    has_driver = False
    uploads_in_parts = False

    @classmethod
    def at(cls, location: Location) -> AzureStore:
        """See `Store`."""
        cloud.prepare(location.scheme)
        store = cls(location)
        with storage_errors("open", location):
            assert location.bucket is not None
            AzureContainer(location.bucket).client()
        return store

    def copies_from(self, source: Store) -> bool:
        """See `Store`.

        A copy by Azure may be incomplete when the request ends, and obstore does not wait for it.
        """
        del source
        return False


class AzureContainer(Bucket):
    """The objects of a container, which is named alone or with its account.

    The first form is `az://`, and the second is `container@account.dfs.core.windows.net`.
    """

    def client(self, *, writes: bool = False) -> Any:
        """The obstore client of the container; no request is made."""
        variables = tuple(
            sorted((key, value) for key, value in os.environ.items() if key.startswith("AZURE_"))
        )
        container, _, host = self.name.partition("@")
        with self._errors(asks=False):
            return _client(
                container,
                host,
                variables,
                cloud.retry_seconds(),
                None if writes else cloud.stalled_seconds(),
            )

    @property
    def service(self) -> str:
        """See `Bucket`."""
        endpoint = os.environ.get("AZURE_STORAGE_ENDPOINT") or os.environ.get("AZURE_ENDPOINT")
        return (
            endpoint
            or self.name.partition("@")[2]
            or f"Azure account {os.environ.get('AZURE_STORAGE_ACCOUNT_NAME', '')}"
        )

    @staticmethod
    def is_passing(error: Exception) -> bool:
        """See `Bucket`."""
        return isinstance(error, PassingError)

    def delete_if(self, name: str, generation: bytes) -> bool:
        """See `Bucket`: through a url that is signed for this deletion."""
        if _ENCODED.search(name) or generation == ABSENT:
            return False

        def once() -> bool:
            from obstore import sign
            from obstore.store import HTTPStore

            try:
                with self._errors():
                    url, _, query = sign(self.client(), "DELETE", name, _SIGNED).partition("?")
                    above, _, last = url.rpartition("/")
                    options = {
                        "default_headers": {"If-Match": generation.decode()},
                        "allow_http": True,
                        "timeout": _seconds(60.0),
                    }
                    HTTPStore.from_url(
                        f"{above}?{query}", client_options=options, retry_config={"max_retries": 0}
                    ).delete(last)
            except (FileNotFoundError, _ChangedError, PermissionError, NotImplementedError):
                return False
            return True

        return self._call("write", once)

    def _get(self, name: str, start: int, stop: int | None) -> Body | None:
        span: Any = {"offset": start} if stop is None else (start, stop)
        try:
            with self._errors():
                result = self.client().get(
                    name, options={"range": span} if start or stop is not None else None
                )
                chunks = iter(result.stream(min_chunk_size=_PIECE))
        except FileNotFoundError:
            return None
        first, last = result.range
        rest = memoryview(b"")

        def readinto(buffer: memoryview) -> int:
            nonlocal rest
            with self._errors():
                while not rest.nbytes:
                    chunk = next(chunks, None)
                    if chunk is None:
                        return 0
                    rest = memoryview(chunk)
            nbytes = min(len(buffer), rest.nbytes)
            buffer[:nbytes] = rest[:nbytes]
            rest = rest[nbytes:]
            return nbytes

        return Body(
            readinto, lambda: None, last - first, result.meta["size"], result.meta["e_tag"].encode()
        )

    def _stat(self, name: str) -> tuple[int | None, bytes]:
        try:
            with self._errors():
                meta = self.client().head(name)
        except FileNotFoundError:
            return None, ABSENT
        return meta["size"], meta["e_tag"].encode()

    def _put(self, name: str, content: Content, generation: bytes | None, retry: Retry) -> bytes:
        del retry
        mode: Any = (
            "overwrite"
            if generation is None
            else "create"
            if generation == ABSENT
            else {"e_tag": generation.decode()}
        )
        try:
            with self._errors():
                result = self.client(writes=True).put(
                    name, content.data, mode=mode, use_multipart=False
                )
        except _ChangedError:
            return b""
        return str(result["e_tag"]).encode()

    def _delete(self, name: str) -> None:
        try:
            with self._errors():
                self.client().delete(name)
        except FileNotFoundError:
            pass

    def pages(self, prefix: str, delimiter: str = "") -> Iterator[Page]:
        """See `Bucket`."""
        folder, _, name = prefix.rpartition("/")
        if not name and not delimiter:
            yield from self._pages_below(folder)
            return
        below = self._call("read", lambda: self._children(folder))
        objects = [
            _list_objects(meta) for meta in below["objects"] if meta["path"].startswith(prefix)
        ]
        folders = [path for path in below["common_prefixes"] if path.startswith(prefix)]
        yield Page(objects, [f"{path}/" for path in folders] if delimiter else [], None)
        for path in () if delimiter else folders:
            yield from self._pages_below(path)

    def _pages_below(self, folder: str) -> Iterator[Page]:
        """The pages of everything in a directory.

        After a failure the listing begins again, without the names that it gave. Services differ in
        the order of names, so none is left out for its place in it.
        """
        stream: Any = None
        given: set[str] = set()

        def once() -> list[Listed] | None:
            nonlocal stream
            try:
                with self._errors():
                    stream = stream or iter(
                        self.client().list(folder or None, chunk_size=self.page)
                    )
                    page = next(stream, None)
            except OSError:
                stream = None
                raise
            return (
                None
                if page is None
                else [_list_objects(meta) for meta in page if meta["path"] not in given]
            )

        while (objects := self._call("read", once)) is not None:
            given.update(one.name for one in objects)
            yield Page(objects, [], None)

    def _children(self, folder: str) -> Any:
        with self._errors():
            return self.client().list_with_delimiter(folder or None)

    @contextmanager
    def _errors(self, *, asks: bool = True) -> Iterator[None]:
        """Turn errors of obstore into OSErrors with their first line.

        If the code asks the service, this notes that the service has answered.
        """
        import obstore
        import obstore.exceptions

        kinds = obstore.exceptions

        try:
            yield
        except (FileNotFoundError, kinds.BaseError) as e:
            text = str(e).partition("\n\nDebug source")[0].replace("\n", " ")
            match = _STATUS.search(str(e))
            status = int(match[1] or match[2]) if match else None
            tokens = "token request" in text  # to another service
            if status is not None and not tokens:
                note_answer(self.service)
            if "ContainerNotFound" in text or "FilesystemNotFound" in text:
                raise NoBucketError(f"{self.service}/{self.name}", text) from e
            if isinstance(e, FileNotFoundError):
                raise FileNotFoundError(text) from e
            if isinstance(e, (kinds.AlreadyExistsError, kinds.PreconditionError)):
                raise _ChangedError(text) from e
            if status == 416:
                raise EOFError("the object is shorter than that") from e
            if status in cloud.DENIED and not tokens:
                raise PermissionError(text) from e
            if (status in cloud.PASSING or "HTTP error" in text) and (
                not tokens or has_answered(self.service)
            ):
                raise PassingError(text) from _unreachable(str(e)) or e
            raise OSError(text) from e
        if asks:
            note_answer(self.service)
            note_answer(f"{self.service}/{self.name}")

    # `pages` and `copies_from` are this kind's own.

    def _list(self, prefix: str, delimiter: str, token: str | None) -> Page:
        raise NotImplementedError

    def _copy(self, name: str, bucket: str, new: str) -> None:
        raise NotImplementedError("obstore does not wait for copies on Azure")


class _ChangedError(OSError):
    """The object is not in the state that the request demands."""


def _list_objects(meta: Any) -> Listed:
    return Listed(meta["path"], meta["last_modified"].timestamp(), meta["size"])


def _unreachable(text: str) -> OSError | None:
    """The system's error in obstore's text, if connections are refused or a name is unknown."""
    if "ConnectionRefused" in text:
        return ConnectionRefusedError(text)
    return (
        socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        if "dns error" in text
        else None
    )


def _seconds(seconds: float) -> timedelta:
    return timedelta(seconds=seconds)


@lru_cache(maxsize=8)
def _client(
    container: str,
    host: str,
    variables: tuple[tuple[str, str], ...],
    longest: float,
    stalled: float | None,
) -> Any:
    """A client for all threads; another one if the variables change.

    An upload shows no traffic, and has all the time of a retry.
    """
    import obstore
    import obstore.store

    settings = dict(variables)
    account, _, domain = host.partition(".dfs.")
    endpoint = (
        settings.get("AZURE_STORAGE_ENDPOINT")
        or settings.get("AZURE_ENDPOINT")
        or (f"https://{account}.blob.{domain}" if host else "")
    )
    plain = endpoint.startswith("http:") or "AZURE_STORAGE_USE_EMULATOR" in settings
    options: dict[str, Any] = {"allow_http": plain, "timeout": _seconds(max(longest, 60.0))}
    if stalled is not None:
        options["read_timeout"] = _seconds(stalled)
    config: dict[str, Any] = {
        key: value for key, value in (("account_name", account), ("endpoint", endpoint)) if value
    }
    return obstore.store.AzureStore(
        container, config=config, client_options=options, retry_config={"max_retries": 0}
    )
