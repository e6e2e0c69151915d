"""Stand before an object store's emulator.

Enforce Cloud Storage's preconditions, count requests, and break some.

    python tools/fault_proxy.py --backend http://127.0.0.1:4443
        [--port 0] [--rule '{"fault": "status", …}']

prints its own address and serves until it is interrupted. Clients are led to it instead of the
emulator: with `TENSORSTORE_GCS_HTTP_URL` or `STORAGE_EMULATOR_HOST` before fake-gcs-server,
`AWS_ENDPOINT_URL` before moto.

For each request it

1. asks the rules (`fault_rules.py`) what becomes of it;
2. takes in the whole body, because an emulator may lock all objects while it reads one;
3. with a request that changes an object, or has preconditions, waits until it is the only one of
   that object; looks up the object's generation, and refuses what must not go ahead
   (`gcs_preconditions.py`): fake-gcs-server would not; answers what is asked of a resumable upload,
   and passes on what is new to it (`gcs_resumable.py`): it would not either;
4. passes it on, and the answer back; and notes what came of it (`fault_requests.py`).

Under its own paths it is told what to do, in JSON:

    GET   /__proxy__/stats[?prefix=bucket/run]   counts; DELETE starts from zero
    GET   /__proxy__/rules                       the rules in force, and how often each has fired
    POST  /__proxy__/rules                       add one, or a list; DELETE removes all
    POST  /__proxy__/late                        pass on what the fault `late` has held back; the
          codes of the answers

In a test, `with FaultProxy(backend) as proxy` runs one on a thread: `proxy.url`, `proxy.rules`,
`proxy.traffic`, `proxy.land()`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import threading
from collections import Counter
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, replace
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, quote
from weakref import WeakValueDictionary

import aiohttp
from aiohttp import web
from fault_requests import Operation, Traffic, classify, with_name_from_body
from fault_rules import Rule, RuleBook
from fault_transfer import HOP_BY_HOP, PIECE, Transfer
from gcs_preconditions import Preconditions
from gcs_resumable import QUANTUM, Part, Resumable
from yarl import URL

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from typing import Self

__all__ = ["FaultProxy"]

_OWN_PATHS = "/__proxy__/"
_SETTLING = 0.02
"""Seconds in which the event loop makes the connections that it has accepted."""


class _Reset(Exception):  # noqa: N818  (no error: it is what was asked for)
    """The client's connection is to be reset."""


class _Refused(Exception):  # noqa: N818  (as above)
    """The client is to be told no: status, reason, and headers if there are any."""


class _Proxy:
    """Handles requests, within one event loop."""

    def __init__(
        self,
        backend: str,
        rules: RuleBook,
        traffic: Traffic,
        session: aiohttp.ClientSession,
        *,
        enforces: bool,
    ) -> None:
        self._backend = backend.rstrip("/")
        self._rules = rules
        self._traffic = traffic
        self._session = session
        self._enforces = enforces
        self._held: list[Transfer] = []
        """Requests that their clients believe lost, and that may still land."""
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._gathered: Counter[str] = Counter()
        """Object → requests of it that have waited for each other."""
        self._gathering = asyncio.Condition()
        self._resumable: dict[str, Resumable] = {}
        """Upload id → how far it is."""

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request."""
        if request.path.startswith(_OWN_PATHS):
            return await self._control(request)
        transfer = Transfer(request, self._operation(request))
        noted = transfer.exchange
        self._traffic.add(noted)
        try:
            if noted.operation.kind == "upload" and not noted.operation.name:
                await transfer.receive()
                noted.operation = with_name_from_body(noted.operation, transfer.body)
            return await self._serve(transfer)
        except _Refused as refused:
            return await transfer.refuse(*refused.args)
        except (_Reset, ConnectionError, web.RequestPayloadError):
            transfer.reset()
            return web.Response()
        finally:
            self._traffic.end(noted)

    async def land(self) -> list[int]:
        """Pass on what was held back, in the order in which it came.

        The codes of the answers, which nobody gets.
        """
        held, self._held = self._held, []
        codes = []
        for transfer in held:
            try:
                async with await self._ask_storage(transfer) as answer:
                    await answer.read()
                    codes.append(answer.status)
            except _Refused as refused:
                codes.append(refused.args[0])
        return codes

    async def _serve(self, transfer: Transfer) -> web.StreamResponse:
        """Do with a request what the rules say."""
        fate = self._rules.decide(transfer.exchange.operation)
        rule, transfer.links = fate.rule, fate.links
        fault = "" if rule is None else rule.fault
        transfer.exchange.fault = (
            fault if rule is None or fault != "status" else f"status {rule.status}"
        )
        if fate.delay:
            await asyncio.sleep(fate.delay)
        if fate.requests:
            await self._gather(transfer.exchange.operation.object, fate.requests)
        await transfer.receive(rule.after_bytes if rule is not None and fault == "reset" else None)
        if fault == "late":
            self._held.append(transfer)
        if fault == "reset":
            await self._keep_what_came(transfer)
        if fault in {"reset", "late"}:
            raise _Reset
        if rule is not None and fault in {"status", "rate"}:
            raise _Refused(rule.status if fault == "status" else 429, "injected by the fault proxy")
        try:
            answer = await self._ask_storage(transfer)
        except _Refused as refused:
            raise (_Reset if fault == "lost-answer" else refused) from None
        async with answer:
            if fault == "lost-answer":
                await answer.read()
                raise _Reset
            return await (
                transfer.send(answer) if rule is None else transfer.send_part(answer, rule)
            )

    async def _gather(self, name: str, requests: int) -> None:
        """Wait until so many requests of an object have come."""
        async with self._gathering:
            self._gathered[name] += 1
            self._gathering.notify_all()
            await self._gathering.wait_for(lambda: self._gathered[name] >= requests)

    async def _ask_storage(self, transfer: Transfer) -> aiohttp.ClientResponse:
        """The storage's answer, when it begins; by then the object is as the request leaves it."""
        operation = transfer.exchange.operation
        preconditions = _preconditions(transfer) if self._enforces else None
        if preconditions is None and not operation.mutates:
            return await self._forward(transfer)
        async with self._locks.setdefault(operation.object, asyncio.Lock()):
            resumable = self._resumable.get(transfer.request.query.get("upload_id", ""))
            if resumable is not None:
                return await self._go_on(transfer, resumable, preconditions)
            if preconditions is not None:
                refusal = preconditions.refusal(await self._generation(operation))
                if refusal is not None:
                    raise _Refused(refusal, "a precondition does not hold")
            return await self._forward(transfer)

    async def _go_on(
        self, transfer: Transfer, resumable: Resumable, preconditions: Preconditions | None
    ) -> aiohttp.ClientResponse:
        """The answer to a request about a resumable upload."""
        if transfer.request.method == "DELETE":
            resumable.deleted = True
            return await self._forward(transfer)
        if resumable.deleted:
            raise _Refused(404, "the upload was deleted")
        if resumable.published:
            return await self._stat(resumable.begun)
        part = Part.of(transfer.request.headers.get("Content-Range", ""))
        new = None if part is None else resumable.new(part, transfer.body)
        if part is None or new is None:
            raise _Refused(
                400,
                f"the upload has {resumable.persisted} bytes, and what comes are not the next ones",
            )
        ends = resumable.ends(part, new)
        if not new and not ends:
            raise _Refused(308, "", resumable.range)
        if ends and not resumable.agrees(transfer.request.headers.get("x-goog-hash", ""), new):
            raise _Refused(400, "the checksum does not agree")
        if ends and preconditions is not None:
            refusal = preconditions.refusal(await self._generation(resumable.begun))
            if refusal is not None:
                raise _Refused(refusal, "a precondition does not hold")
        transfer.body = new
        answer = await self._forward(
            transfer, {"Content-Range": resumable.content_range(part, new)}
        )
        if answer.status in {200, 308}:
            resumable.add(new)
            resumable.published = answer.status == 200
        return answer

    async def _keep_what_came(self, transfer: Transfer) -> None:
        """Pass on what Cloud Storage would keep of a part whose connection is about to break.

        The part belongs to a resumable upload.
        """
        resumable = self._resumable.get(transfer.request.query.get("upload_id", ""))
        part = Part.of(transfer.request.headers.get("Content-Range", ""))
        if resumable is None or part is None or resumable.published or resumable.deleted:
            return
        new = resumable.new(part, transfer.body) or bytearray()
        transfer.body = new[: len(new) // QUANTUM * QUANTUM]
        if transfer.body:
            async with await self._forward(
                transfer, {"Content-Range": resumable.content_range(Part(0, None), transfer.body)}
            ) as answer:
                if answer.status == 308:
                    resumable.add(transfer.body)

    async def _forward(
        self, transfer: Transfer, instead: dict[str, str] | None = None
    ) -> aiohttp.ClientResponse:
        """Pass a request on, with some headers instead of its own."""
        request = transfer.request
        given = {**request.headers, **(instead or {})} if instead else request.headers
        headers = [(name, value) for name, value in given.items() if name.lower() not in HOP_BY_HOP]
        if request.body_exists:
            headers.append(("Content-Length", str(len(transfer.body))))
        transfer.exchange.forwarded = True
        answer = await self._asked(
            request.method,
            request.raw_path,
            headers,
            _pieces(transfer.body) if request.body_exists else None,
        )
        if transfer.exchange.operation.query.get("uploadType") == "resumable":
            place = URL(answer.headers.get("Location", ""), encoded=True).raw_query_string
            self._resumable |= {
                upload: Resumable(transfer.exchange.operation)
                for upload in parse_qs(place).get("upload_id", [])
            }
        return answer

    async def _stat(self, operation: Operation) -> aiohttp.ClientResponse:
        """The storage's answer about an object."""
        return await self._asked(
            "GET",
            f"/storage/v1/b/{quote(operation.bucket, safe='')}/o/{quote(operation.name, safe='')}",
        )

    async def _generation(self, operation: Operation) -> int:
        """The present generation of an object, 0 if there is none."""
        async with await self._stat(operation) as answer:
            if answer.status == 404:
                return 0
            if answer.status != 200:
                raise _Refused(
                    502, f"the emulator answers {answer.status} when it is asked for the generation"
                )
            return int((await answer.json())["generation"])

    async def _asked(
        self,
        method: str,
        target: str,
        headers: list[tuple[str, str]] | None = None,
        body: AsyncIterator[memoryview] | None = None,
    ) -> aiohttp.ClientResponse:
        """The emulator's answer, when it begins."""
        try:
            url = URL(self._backend + target, encoded=True)
            return await self._session.request(
                method, url, headers=headers, data=body, allow_redirects=False
            )
        except aiohttp.ClientError as e:
            raise _Refused(502, f"the emulator cannot be asked: {e!r}") from e

    def _operation(self, request: web.BaseRequest) -> Operation:
        """The operation of a request.

        A part of a resumable upload has the operation that the upload was begun with.
        """
        operation = classify(request.method, request.raw_path)
        begun = self._resumable.get(operation.query.get("upload_id", ""))
        return operation if begun is None else replace(begun.begun, method=request.method)

    async def _control(self, request: web.BaseRequest) -> web.StreamResponse:
        """Be told what to do."""
        what, method = request.path.removeprefix(_OWN_PATHS), request.method
        if what == "stats" and method in {"GET", "DELETE"}:
            if method == "DELETE":
                self._traffic.reset()
            return web.json_response(self._traffic.summary(request.query.get("prefix", "")))
        if what == "rules" and method in {"GET", "POST", "DELETE"}:
            if method == "DELETE":
                self._rules.clear()
            elif method == "POST":
                try:
                    doc = await request.json()
                    self._rules.add(*map(Rule.from_json, doc if isinstance(doc, list) else [doc]))
                except ValueError as e:
                    return web.json_response({"error": str(e)}, status=400)
            return web.json_response(
                [{"rule": asdict(rule), "fired": fired} for rule, fired in self._rules.fired()]
            )
        if what == "late" and method == "POST":
            return web.json_response(await self.land())
        return web.json_response(
            {"error": f"{method} {request.path}: see the docstring of fault_proxy.py"}, status=404
        )


def _preconditions(transfer: Transfer) -> Preconditions | None:
    """Preconditions that the proxy enforces for a request.

    For a resumable upload, it enforces them only with the last part.
    """
    request = transfer.request
    if transfer.exchange.operation.service != "gcs" or (
        request.method == "POST" and request.query.get("uploadType") == "resumable"
    ):
        return None
    if request.headers.get("Content-Range", "").endswith("/*"):
        return None
    try:
        return Preconditions.of(transfer.exchange.operation)
    except NotImplementedError as e:
        raise _Refused(501, str(e)) from e
    except ValueError as e:
        raise _Refused(400, str(e)) from e


async def _pieces(body: bytearray) -> AsyncIterator[memoryview]:
    with memoryview(body) as view:
        for at in range(0, len(view), PIECE):
            yield view[at : at + PIECE]


@asynccontextmanager
async def _serving(
    backend: str, port: int, rules: RuleBook, traffic: Traffic, *, enforces: bool = True
) -> AsyncIterator[tuple[_Proxy, int]]:
    """A running proxy; yields it and its port."""
    # A fresh connection for every request: one that the backend is about to close would be a fault
    # that nobody asked for.
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    skipped = ("User-Agent", "Accept", "Accept-Encoding", "Content-Type")
    async with aiohttp.ClientSession(
        connector=connector,
        auto_decompress=False,
        skip_auto_headers=skipped,
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=None),
    ) as session:
        proxy = _Proxy(backend, rules, traffic, session, enforces=enforces)
        runner = web.ServerRunner(web.Server(proxy.handle, access_log=None), shutdown_timeout=0.1)
        with socket.create_server(("127.0.0.1", port)) as listening:
            await runner.setup()
            try:
                await web.SockSite(runner, listening).start()
                yield proxy, int(listening.getsockname()[1])
            finally:
                # Python 3.11's asyncio loses connections that it accepts while it closes the
                # server: first none is accepted any more.
                asyncio.get_running_loop().remove_reader(listening)
                await asyncio.sleep(_SETTLING)
                await runner.cleanup()


class FaultProxy:
    """A proxy on a thread of its own, from `with` to its end."""

    def __init__(self, backend: str, *, port: int = 0, enforces: bool = True) -> None:
        """Stand before `backend`.

        Args:
            backend: the emulator's address, `http://host:port`.
            port: where to listen on the loopback interface; 0 is any free one.
            enforces: whether it refuses what must not go ahead. Without that a test of races shows
                that it tests something.
        """
        self.rules = RuleBook()
        """Rules for faults; they may be changed at any time."""
        self.traffic = Traffic()
        """All requests that came through, and their outcomes."""
        self.url = ""
        """Its address, without a slash at the end; known inside the `with` block."""
        self._backend = backend
        self._port = port
        self._enforces = enforces
        self._proxy: _Proxy | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop = asyncio.Event()
        self._started = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="fault-proxy", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self._started.wait()
        if self._failure is not None:
            self._thread.join()
            raise self._failure
        return self

    def __exit__(self, *_: object) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def land(self) -> list[int]:
        """Pass on what the fault `late` has held back, oldest first.

        The codes of the storage's answers.
        """
        assert self._proxy is not None
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(self._proxy.land(), self._loop).result()

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as e:  # noqa: BLE001  (raised where the `with` block begins)
            self._failure = e
        finally:
            self._started.set()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        serving = _serving(
            self._backend, self._port, self.rules, self.traffic, enforces=self._enforces
        )
        async with serving as (self._proxy, port):
            self.url = f"http://127.0.0.1:{port}"
            self._started.set()
            await self._stop.wait()


async def _main(backend: str, port: int, rules: list[Rule]) -> None:
    book = RuleBook()
    book.add(*rules)
    async with _serving(backend, port, book, Traffic()) as (_, bound):
        print(f"http://127.0.0.1:{bound}", flush=True)
        await asyncio.Event().wait()


def main() -> None:
    """Serve until interrupted."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--backend", required=True, help="the emulator's address, http://host:port")
    parser.add_argument(
        "--port", type=int, default=0, help="where to listen on 127.0.0.1; 0 is any free port"
    )
    parser.add_argument(
        "--rule",
        type=lambda text: Rule.from_json(json.loads(text)),
        action="append",
        default=[],
        help="JSON of a rule",
    )
    asked = parser.parse_args()
    with suppress(KeyboardInterrupt):
        asyncio.run(_main(asked.backend, asked.port, asked.rule))


if __name__ == "__main__":
    main()
