"""A client of the service, for programs: `shardckpt.Client("https://host:8470")`.

Everything that reads elements verifies nothing by itself: the service has verified each chunk before it sends it. `open` reads through
`/raw` instead, and verifies here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Self, TypedDict
from urllib.parse import quote

import numpy as np

from shardckpt.errors import MissingExtraError, ShardckptError, StorageError, UrlError, by_code
from shardckpt.excerpt import excerpt
from shardckpt.io.buckets.cloud import web_headers
from shardckpt.layout.dtypes import by_name
from shardckpt.reading.checkpoint import Checkpoint

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from types import TracebackType

    import httpx
    from numpy.typing import NDArray

    from shardckpt.layout.box import Box

_PAGE = 500


class RunEntry(TypedDict):
    """A run; bytes are sums over its checkpoints, steps and `created` (ISO 8601) None if none has one."""

    run: str
    checkpoints: int
    committed: int
    uncommitted: int
    unreadable: int
    damaged: int
    first_step: int | None
    last_step: int | None
    bytes: int | None
    stored_bytes: int | None
    pinned: int
    created: str | None


class VerificationEntry(TypedDict):
    """A verification that has ended: `damaged` parts of `chunks`. `job` is None for the scrub; `error` says why it came to no end."""

    number: int
    attempt: str
    begun: str
    ended: str
    job: int | None
    chunks: int
    total: int | None
    bytes: int
    damaged: int
    error: str | None
    ok: bool


class CheckpointEntry(TypedDict):
    """A checkpoint in a list, as `shardckpt ls --json` has it, with its id, its run and the latest verification of its attempt."""

    id: str
    run: str
    name: str
    url: str
    state: Literal["committed", "uncommitted", "deleted", "unreadable"]
    step: int | None
    attempt: str | None
    created: str | None
    layout: str | None
    tensors: int | None
    bytes: int | None
    stored_bytes: int | None
    metrics: dict[str, float | str]
    reason: str | None
    finished: int | None
    hosts: int | None
    committable: bool
    pinned: bool
    tags: list[str]
    superseded: bool
    bases: list[str]
    idle: float | None
    verification: VerificationEntry | None


class Client:
    """Asks a service. Safe to use from several threads; a context manager."""

    def __init__(self, url: str, *, token: str | None = None, timeout: float = 120.0) -> None:
        """Prepare to ask; no request is made.

        Args:
            url: the service, such as "https://host:8470".
            token: a bearer token; None: the headers in `SHARDCKPT_HTTP_HEADERS` for that origin.
            timeout: seconds without an answer after which a request fails.

        Raises:
            MissingExtraError: httpx is not installed. UrlError: the url is not a web server's.
        """
        try:
            import httpx
        except ImportError:
            raise MissingExtraError('shardckpt.Client needs httpx; install it with `pip install "shardckpt[serve]"`.') from None
        self.url = url.rstrip("/")
        scheme, separator, host = self.url.partition("://")
        if scheme not in ("http", "https") or not separator or not host or "/" in host or "@" in host:
            raise UrlError(f"{excerpt(url)} is no service; write https://host:port.")
        headers = web_headers(self.url) if token is None else {"Authorization": f"Bearer {token}"}
        self._failures = httpx.HTTPError, httpx.InvalidURL
        self._http: httpx.Client = httpx.Client(base_url=self.url, headers=headers, timeout=timeout)

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Close the connections."""
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def runs(self, text: str | None = None) -> Iterator[RunEntry]:
        """All runs, or those whose id contains a text, in order of their ids.

        Raises:
            ShardckptError: the service's error, by its code. StorageError: it does not answer.
        """
        return self._pages("/v1/runs", "runs", {"text": text})

    def checkpoints(
        self,
        run: str | None = None,
        *,
        step: str | int | None = None,
        state: str | None = None,
        tag: str | None = None,
        metric: str | None = None,
        text: str | None = None,
        order: Literal["ascending", "descending"] = "ascending",
    ) -> Iterator[CheckpointEntry]:
        """Checkpoints in order of run and step.

        Args:
            run: id of a run; None: all.
            step: a step, or a range such as "100:200", to which both ends belong.
            state: "committed", "uncommitted", "unreadable" or "deleted".
            tag: only those with this tag; or "pinned" or "superseded".
            metric: a name, a comparison and a number, as in "loss<2.5".
            text: a part of the id.
            order: of runs and steps.

        Raises:
            ShardckptError: as for `runs`.
        """
        asked = {"run": run, "step": step, "state": state, "tag": tag, "metric": metric, "text": text, "order": order}
        return self._pages("/v1/checkpoints", "checkpoints", asked)

    def checkpoint(self, ident: str) -> dict[str, Any]:
        """A checkpoint's tree, layouts, sizes and metadata, as `shardckpt info --json`; raises as `runs`."""
        return self._json(_path(ident))

    def layout(self, ident: str, name: str) -> dict[str, Any]:
        """The layout of a tensor, and the box of each device; raises as `runs`."""
        return self._json(_path(ident, "layouts", name))

    def statistics(self, ident: str, name: str, *, budget: int = 16 << 20) -> dict[str, Any]:
        """Statistics and a histogram of at most `budget` bytes of a tensor; raises as `runs`."""
        return self._json(_path(ident, "statistics", name), budget=budget)

    def read(self, ident: str, name: str, box: Box | None = None) -> NDArray[Any]:
        """The elements of a tensor, or of a box of it, at most 16 MiB (ml_dtypes for bfloat16 and fp8); raises as `runs`."""
        text = None if box is None else ",".join(f"{a}:{b}" for a, b in zip(box.start, box.stop, strict=True))
        reply = self._get(_path(ident, "tensors", name), {"format": "raw", "box": text})
        shape = [int(side) for side in reply.headers["X-Shardckpt-Shape"].split(",") if side]
        return np.frombuffer(reply.content, by_name(reply.headers["X-Shardckpt-Dtype"]).numpy).reshape(shape)

    def diff(self, a: str, b: str, *, values: bool = True, layouts: bool = False) -> dict[str, Any]:
        """A comparison of two checkpoints by the service, as `shardckpt diff --json`; raises as `runs`."""
        return self._json("/v1/diff", a=a, b=b, values=str(values).lower(), layouts=str(layouts).lower())

    def plan(self, ident: str, **options: Any) -> dict[str, Any]:
        """The forecast of a reshard (`mesh=`, `rule=[…]`, `preset=`, `dtype=` …), as `shardckpt plan --json`; raises as `runs`."""
        return self._json(_path(ident, "plan"), **options)

    def raw_url(self, ident: str) -> str:
        """The url at which `shardckpt.open` and `restore` read a checkpoint."""
        return f"{self.url}/raw/{quote(ident)}"

    def open(self, ident: str) -> Checkpoint:
        """Open a checkpoint through the service. A token must be in `SHARDCKPT_HTTP_HEADERS`; raises as `shardckpt.open`."""
        return Checkpoint(self.raw_url(ident))

    def _pages(self, path: str, what: str, asked: Mapping[str, Any]) -> Iterator[Any]:
        cursor = None
        while True:
            page = self._json(path, **asked, limit=_PAGE, cursor=cursor)
            yield from page[what]
            cursor = page["next"]
            if cursor is None:
                return

    def _json(self, path: str, **asked: Any) -> dict[str, Any]:
        reply = self._get(path, asked)
        try:
            found: dict[str, Any] = reply.json()
        except ValueError as e:
            raise StorageError(f"{self.url}{path}: the answer is no JSON; is that a shardckpt service?") from e
        return found

    def _get(self, path: str, asked: Mapping[str, Any]) -> httpx.Response:
        given = {key: value for key, value in asked.items() if value is not None}
        try:
            reply = self._http.get(path, params=given)
        except self._failures as e:
            raise StorageError(f"{self.url}{path}: the service does not answer ({e}).") from e
        if reply.status_code == 200:
            return reply
        raise _error(reply, f"{self.url}{path}")


def _path(ident: str, *words: str) -> str:
    return "/".join(["/v1/checkpoints", *(quote(word, errors="surrogatepass") for word in (ident, *words))])


def _error(reply: httpx.Response, where: str) -> ShardckptError:
    """The error that the service tells of, by its code."""
    try:
        said = reply.json()
        code, detail = str(said["code"]), str(said["detail"])
    except (ValueError, KeyError, TypeError):
        return StorageError(f"{where}: {reply.status_code} {reply.reason_phrase}")
    kind = by_code(code)
    return kind(detail) if kind.code == code else StorageError(f"{where}: {detail}")
