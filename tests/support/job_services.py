"""A service with tokens and a journal, and what its users do."""

from __future__ import annotations

import json
import time
from contextlib import contextmanager
from dataclasses import dataclass

from serving import Running, serving

from shardckpt.serve.access.tokens import add_token


class LaterJobs(dict):
    """Times before which no job is started: in ten minutes, whatever its number."""

    def get(self, _number, _default=None):
        return time.monotonic() + 600


@dataclass
class Operated:
    """A running service, and tokens of each scope."""

    service: Running
    tokens: dict[str, str]

    def ask(self, path, method="GET", body=None, scope="admin", **headers):
        """One request with a token."""
        given = {
            "Authorization": f"Bearer {self.tokens[scope]}",
            "Content-Type": "application/json",
        } | headers
        return self.service.ask(path, method, None if body is None else json.dumps(body), **given)

    def post(self, operation, scope="admin", key=None, **arguments):
        """Ask for a job."""
        headers = {} if key is None else {"Idempotency-Key": key}
        return self.ask(f"/v1/jobs/{operation}", "POST", arguments, scope, **headers)

    def job(self, number):
        """A job."""
        reply = self.ask(f"/v1/jobs/{number}")
        assert reply.status == 200, reply
        return reply.json

    def wait(self, number, *states, seconds=60):
        """A job once it is in one of some states; default: once it has ended."""
        end = time.monotonic() + seconds
        while (job := self.job(number))["state"] not in (states or ("done", "failed", "cancelled")):
            assert time.monotonic() < end, job
            time.sleep(0.02)
        return job

    def run(self, operation, **arguments):
        """Ask for a job, and wait for its end."""
        reply = self.post(operation, **arguments)
        assert reply.status == 202, reply
        return self.wait(reply.json["number"])

    def done(self, operation, **arguments):
        """The result of a job that succeeds."""
        job = self.run(operation, **arguments)
        assert job["state"] == "done", job
        return job["result"]


@contextmanager
def operated(state, *roots, **options):
    """Serve roots with a token of each scope and a state directory; ends with the block."""
    tokens = {
        scope: add_token(state / "tokens", f"the-{scope}", scope)
        for scope in ("read", "operate", "admin")
    }
    with serving(*roots, token_file=state / "tokens", state=state / "state", **options) as service:
        yield Operated(service, tokens)
