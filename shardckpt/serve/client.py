"""A client of the service, for programs: `shardckpt.Client("https://host:8470")`.

The service verifies each chunk before it sends elements; the client does not verify them again.
`open` reads stored bytes through `/raw`, and verifies them in the client.
"""

from __future__ import annotations

import json
import re
import time
import uuid
from contextlib import closing
from typing import TYPE_CHECKING, Any, Literal, Self, TypedDict, cast
from urllib.parse import quote

import numpy as np

from shardckpt.errors import (
    CommitError,
    CoordinationError,
    MissingExtraError,
    OptionError,
    ShardckptError,
    StorageError,
    UrlError,
    by_code,
)
from shardckpt.io.buckets.cloud import web_headers
from shardckpt.layout.dtypes import by_name
from shardckpt.reading.checkpoint import Checkpoint
from shardckpt.runs.announcing import SILENCE
from shardckpt.text import install_command, shorten

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping
    from types import TracebackType

    import httpx
    from numpy.typing import NDArray

    from shardckpt.layout.box import Box
    from shardckpt.serve.jobs.entries import JobEntry, VerificationEntry

_PAGE = 500
_DOTS = re.compile(r"(?<![^/])(\.\.?)(?![^/])")
_PAUSE = 0.5
"""Seconds between two looks at a job that cannot be followed."""


class RunEntry(TypedDict):
    """A run.

    Bytes are sums over its checkpoints; `created` is in ISO 8601. None: no checkpoint has a value.
    """

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


class CheckpointEntry(TypedDict):
    """A checkpoint in a list.

    It is the entry of `shardckpt ls --json`, with the checkpoint's id, its run, and the latest
    verification of its attempt.
    """

    id: str
    run: str
    name: str
    url: str
    state: Literal["committed", "uncommitted", "deleted", "unreadable"]
    step: int | None
    attempt: str | None
    created: str | None
    began: str | None
    layout: str | None
    tensors: int | None
    bytes: int | None
    stored_bytes: int | None
    changed_bytes: int | None
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


class _NoAnswerError(StorageError):
    """The service does not answer; it may later."""


class Client:
    """A client of the service that `shardckpt serve` runs.

    A context manager that several threads may use.

    Each method raises the ShardckptError that the service answers with, and StorageError if the
    service does not answer.
    """

    def __init__(self, url: str, *, token: str | None = None, timeout: float = 120.0) -> None:
        """Make a client; no request is sent yet.

        Args:
            url: url of the service, such as "https://host:8470".
            token: a bearer token; None: the headers in `SHARDCKPT_HTTP_HEADERS` for that origin.
            timeout: seconds without an answer after which a request fails.

        Raises:
            MissingExtraError: httpx is not installed.
            UrlError: the url is not `http://host:port` or `https://host:port`.
        """
        try:
            import httpx
        except ImportError:
            raise MissingExtraError(
                f"shardckpt.Client needs httpx; install it with `{install_command('serve')}`."
            ) from None
        self.url = url.rstrip("/")
        scheme, separator, host = self.url.partition("://")
        if (
            scheme not in ("http", "https")
            or not separator
            or not host
            or "/" in host
            or "@" in host
        ):
            raise UrlError(f"{shorten(url)} is not a service; write https://host:port.")
        headers = web_headers(self.url) if token is None else {"Authorization": f"Bearer {token}"}
        self._failures = httpx.HTTPError, httpx.InvalidURL
        self._timeout = timeout
        self._http: httpx.Client = httpx.Client(base_url=self.url, headers=headers, timeout=timeout)

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the connections."""
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def runs(self, text: str | None = None) -> Iterator[RunEntry]:
        """List runs in order of their ids: all, or only those with `text` in their ids."""
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
        """List checkpoints, in order of run and step.

        Args:
            run: id of a run; None: all runs.
            step: a step, or a range such as "100:200" that includes both ends.
            state: "committed", "uncommitted", "unreadable" or "deleted".
            tag: a tag, or "pinned" or "superseded".
            metric: a name, a comparison and a number, such as "loss<2.5".
            text: text that the id contains.
            order: order of runs and steps.
        """
        asked = {
            "run": run,
            "step": step,
            "state": state,
            "tag": tag,
            "metric": metric,
            "text": text,
            "order": order,
        }
        return self._pages("/v1/checkpoints", "checkpoints", asked)

    def checkpoint(self, ident: str) -> dict[str, Any]:
        """A checkpoint's tree, layouts, sizes and metadata.

        The result is the document of `shardckpt info --json`.
        """
        return self._json(_path(ident))

    def layout(self, ident: str, name: str) -> dict[str, Any]:
        """The layout of a tensor, with the box of each device."""
        return self._json(_path(ident, "layouts", name))

    def statistics(self, ident: str, name: str, *, budget: int = 16 << 20) -> dict[str, Any]:
        """Statistics and a histogram of a tensor, from at most `budget` bytes of it."""
        return self._json(_path(ident, "statistics", name), budget=budget)

    def read(self, ident: str, name: str, box: Box | None = None) -> NDArray[Any]:
        """Read a tensor, or a box of it, of at most 16 MiB.

        bfloat16 and fp8 have the dtypes of ml_dtypes.
        """
        text = (
            None
            if box is None
            else ",".join(f"{a}:{b}" for a, b in zip(box.start, box.stop, strict=True))
        )
        reply = self._get(_path(ident, "tensors", name), {"format": "raw", "box": text})
        shape = [int(side) for side in reply.headers["X-Shardckpt-Shape"].split(",") if side]
        return np.frombuffer(
            reply.content, by_name(reply.headers["X-Shardckpt-Dtype"]).numpy
        ).reshape(shape)

    def diff(self, a: str, b: str, *, values: bool = True, layouts: bool = False) -> dict[str, Any]:
        """Compare two checkpoints on the service: the document of `shardckpt diff --json`."""
        return self._json(
            "/v1/diff", a=a, b=b, values=str(values).lower(), layouts=str(layouts).lower()
        )

    def plan(self, ident: str, **options: Any) -> dict[str, Any]:
        """Forecast a reshard (`mesh=`, `rule=[…]`, `preset=`, `dtype=` …).

        The result is the document of `shardckpt plan --json`.
        """
        return self._json(_path(ident, "plan"), **options)

    def raw_url(self, ident: str) -> str:
        """The url at which `shardckpt.open` and `restore` read a checkpoint."""
        return f"{self.url}/raw/{quote(ident)}"

    def open(self, ident: str) -> Checkpoint:
        """Open a checkpoint through the service, as `shardckpt.open`.

        The token must be in `SHARDCKPT_HTTP_HEADERS`.
        """
        return Checkpoint(self.raw_url(ident))

    def start(self, operation: str, /, *, key: str | None = None, **arguments: Any) -> JobEntry:
        """Start a job, and return it.

        If the connection is lost, the request is sent once more. The service starts the job only
        once.

        Args:
            operation: name of the operation, such as "verify" or "copy"; `operations` lists all
                names.
            key: idempotency key: a later call with the same key returns the same job. None: a
                random key.
            arguments: arguments of the operation; `from_` stands for the argument `from`.

        Raises:
            OptionError: an argument is invalid.
        """
        given = {"from" if name == "from_" else name: value for name, value in arguments.items()}
        try:
            body = json.dumps(given, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as e:
            raise OptionError(
                f"{operation}: the arguments cannot be sent as JSON ({e}); give texts, integers, "
                "booleans and lists."
            ) from e
        headers = {
            "Content-Type": "application/json",
            "Idempotency-Key": uuid.uuid4().hex if key is None else key,
        }
        path = f"/v1/jobs/{quote(operation, safe='')}"
        try:
            return self._entry("POST", path, content=body, headers=headers)
        except _NoAnswerError:
            return self._entry("POST", path, content=body, headers=headers)

    def operations(self) -> dict[str, dict[str, Any]]:
        """The operations of jobs: name → JSON schema of the arguments."""
        schemas = {}
        for path, methods in self._json("/v1/openapi.json")["paths"].items():
            above, _, name = path.rpartition("/")
            if above == "/v1/jobs" and "requestBody" in methods.get("post", {}):
                schemas[name] = methods["post"]["requestBody"]["content"]["application/json"][
                    "schema"
                ]
        return schemas

    def job(self, number: int) -> JobEntry:
        """The job with this number."""
        return self._entry("GET", f"/v1/jobs/{number}")

    def jobs(
        self, state: str | None = None, *, operation: str | None = None, subject: str | None = None
    ) -> Iterator[JobEntry]:
        """List jobs, the latest first: all, or those of a state, an operation, or a subject.

        A subject is the id of a checkpoint, run or place.
        """
        return self._pages(
            "/v1/jobs",
            "jobs",
            {"state": state, "operation": operation, "subject": subject},
            "before",
        )

    def cancel(self, number: int) -> JobEntry:
        """Cancel a job, and return it.

        Its process may take a moment to end. OptionError: the job has ended already.
        """
        return self._entry("POST", f"/v1/jobs/{number}/cancel")

    def wait(
        self,
        number: int,
        timeout: float | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> JobEntry:
        """Wait for the end of a job, and return it.

        Args:
            number: number of the job.
            timeout: seconds to wait; the job continues after that. None: no limit while the service
                answers.
            progress: called with the amount done and the total amount.

        Raises:
            ShardckptError: the job failed; the class is that of the job's error.
            CommitError: the job was cancelled.
            CoordinationError: the job has not ended within `timeout`.
            StorageError: the service has not answered for the `timeout` of the client. A shorter
                restart of the service is no error.
        """
        lost: float | None = None
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            try:
                with closing(self._follow(number, end)) as events:
                    for job in events:
                        lost = None
                        if (
                            progress is not None
                            and job["done"] is not None
                            and job["total"] is not None
                        ):
                            progress(job["done"], job["total"])
                        if job["state"] in ("done", "failed", "cancelled"):
                            return _outcome(job)
            except _NoAnswerError:
                lost = time.monotonic() if lost is None else lost
                if time.monotonic() >= lost + self._timeout:
                    raise
            if end is not None and time.monotonic() >= end:
                raise CoordinationError(
                    f"{self.url}: job {number} has not ended within {timeout:g} s; it is still "
                    "running: wait again, or cancel it."
                )
            time.sleep(_PAUSE if end is None else max(0.0, min(_PAUSE, end - time.monotonic())))

    def _follow(self, number: int, end: float | None) -> Generator[JobEntry]:
        """The job after each change, and then once more.

        The changes are followed until the stream of events ends or the time is nearly over.
        """
        path = f"/v1/jobs/{number}"
        if _seconds_left(end, 2 * SILENCE) > SILENCE:
            try:
                with self._http.stream("GET", f"{path}/events", timeout=SILENCE) as reply:
                    for line in reply.iter_lines() if reply.status_code == 200 else ():
                        if line.startswith("data: "):
                            yield json.loads(line[6:])
                        if _seconds_left(end, 2 * SILENCE) <= SILENCE:
                            break
            except (*self._failures, ValueError):
                # It was cut off, perhaps in a line; the job itself says more.
                pass
        yield self._entry("GET", path, timeout=_seconds_left(end, self._timeout))

    def _pages(
        self, path: str, what: str, asked: Mapping[str, Any], by: str = "cursor"
    ) -> Iterator[Any]:
        following = None
        while True:
            page = self._json(path, **asked, limit=_PAGE, **{by: following})
            yield from page[what]
            following = page["next"]
            if following is None:
                return

    def _entry(self, method: str, path: str, **how: Any) -> JobEntry:
        return cast("JobEntry", self._document(self._send(method, path, **how), path))

    def _json(self, path: str, **asked: Any) -> dict[str, Any]:
        return cast("dict[str, Any]", self._document(self._get(path, asked), path))

    def _document(self, reply: httpx.Response, path: str) -> Any:
        try:
            return reply.json()
        except ValueError as e:
            raise StorageError(
                f"{self.url}{path}: the answer is not JSON; is that a shardckpt service?"
            ) from e

    def _get(self, path: str, asked: Mapping[str, Any]) -> httpx.Response:
        return self._send(
            "GET", path, params={key: value for key, value in asked.items() if value is not None}
        )

    def _send(self, method: str, path: str, **how: Any) -> httpx.Response:
        try:
            reply = self._http.request(method, path, **how)
        except self._failures as e:
            raise _NoAnswerError(
                f"{self.url}{path}: the service does not answer ({e}); check the url, and that the "
                "service runs."
            ) from e
        if reply.status_code in (200, 202):
            return reply
        raise _error(reply, f"{self.url}{path}")


def _path(ident: str, *words: str) -> str:
    escaped = (_DOTS.sub(r"~\1", word) for word in words)  # a url loses keys that are dots
    return "/".join(
        ["/v1/checkpoints", *(quote(word, errors="surrogatepass") for word in (ident, *escaped))]
    )


def _seconds_left(end: float | None, most: float) -> float:
    """Seconds that a request may take until a time is over, at least a few, at most `most`."""
    return most if end is None else min(most, max(0.1, end - time.monotonic()))


def _error(reply: httpx.Response, where: str) -> ShardckptError:
    """The error that the service tells of, by its code."""
    try:
        problem = reply.json()
        code, detail = str(problem["code"]), str(problem["detail"])
        error = _error_of_code(code, detail, f"{where}: {detail}")
    except (ValueError, KeyError, TypeError):
        # A proxy answers for the service.
        error = StorageError(f"{where}: {reply.status_code} {reply.reason_phrase}")
    passes = type(error) is StorageError and reply.status_code in (502, 503, 504)
    return _NoAnswerError(str(error)) if passes else error


def _error_of_code(code: str, message: str, unknown: str) -> ShardckptError:
    """The error with a code; StorageError with the message `unknown` if none has it."""
    kind = by_code(code)
    return kind(message) if kind.code == code else StorageError(unknown)


def _outcome(job: JobEntry) -> JobEntry:
    """A job that has ended well; raises CommitError if it was cancelled, or its own error."""
    what = f"job {job['number']} ({job['operation']} {job['subject']})"
    if job["state"] == "cancelled":
        raise CommitError(f"{what} was cancelled.")
    if job["error"] is not None and job["state"] == "failed":
        message = f"{what}: {job['error']['message']}"
        raise _error_of_code(job["error"]["code"], message, message)
    return job
