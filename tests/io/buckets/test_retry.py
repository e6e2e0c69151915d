"""Requests to services that were never there fail soon; those to services that were there are
retried, and the log says so."""

import errno
import logging
import socket

import pytest
from faults import patience_of

from shardckpt.io.buckets import retry
from shardckpt.io.buckets.retry import NoBucketError, PassingError, Retry, note_answer

REFUSED = PassingError("NewConnectionError: connection refused")
REFUSED.__cause__ = ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")


def unresolved(code):
    """The error of a request whose name does not resolve, as botocore and urllib3 chain it."""
    error = PassingError("EndpointConnectionError: Could not connect")
    error.__context__ = OSError("NameResolutionError")
    error.__context__.__cause__ = socket.gaierror(code, "Name or service not known")
    return error


class Service:
    """A service that fails with each of some errors, then answers; pauses take no time."""

    def __init__(self, name, *errors):
        self.name, self.errors, self.pauses = name, list(errors), []

    def ask(self):
        call = Retry()
        call.pause = self.pauses.append
        return call.call(self._once, lambda error: isinstance(error, PassingError), self.name)

    def _once(self):
        if self.errors:
            raise self.errors.pop(0)
        note_answer(self.name)
        return "answer"


@pytest.fixture(autouse=True)
def new_process(monkeypatch):
    monkeypatch.setattr(retry, "_answered", set())
    monkeypatch.setattr(retry, "_failing", set())


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (REFUSED, "connections are refused"),
        (unresolved(socket.EAI_NONAME), "the name does not resolve (Name or service not known)"),
    ],
)
def test_a_service_that_never_answered_fails_after_few_attempts(error, why, monkeypatch):
    clock = iter(range(1000))
    monkeypatch.setattr(retry.time, "monotonic", lambda: float(next(clock)))
    service = Service("https://storage.example", *[error] * 100)
    with pytest.raises(OSError, match="nothing there has answered this process before") as failed:
        service.ask()
    assert str(failed.value).startswith(why)
    assert len(service.pauses) <= 4


@pytest.mark.parametrize(
    "error",
    [REFUSED, unresolved(socket.EAI_NONAME), unresolved(socket.EAI_AGAIN), PassingError("503")],
)
def test_a_service_that_has_answered_is_tried_again_until_the_time_is_used(error):
    with patience_of("300"):
        service = Service("https://storage.example")
        assert service.ask() == "answer"
        service.errors = [error] * 15
        assert service.ask() == "answer"
        assert len(service.pauses) == 15
        service.errors = [error] * 100
        with pytest.raises(OSError, match="attempts failed, the last one because"):
            service.ask()


def test_a_resolver_that_says_try_again_is_always_asked_again():
    service = Service("https://storage.example", *[unresolved(socket.EAI_AGAIN)] * 15)
    assert service.ask() == "answer"


def test_an_unknown_bucket_is_tried_again_only_if_it_was_known_before():
    service = Service("https://storage.example", NoBucketError("b", "404"))
    with pytest.raises(NoBucketError, match="there is no such bucket"):
        service.ask()
    note_answer("b")
    service.errors = [NoBucketError("b", "404")] * 3
    assert service.ask() == "answer"


def test_the_log_names_the_service_once_until_it_answers(caplog):
    errors = [PassingError("503 Slow Down")] * 8
    service = Service("https://storage.example", *errors)
    with caplog.at_level(logging.WARNING, "shardckpt"):
        service.ask()
        service.errors = errors[:2]
        service.ask()  # short: nothing is said
        service.errors = list(errors)
        service.ask()
    assert [record.getMessage() for record in caplog.records] == [
        "https://storage.example: 503 Slow Down; retrying for up to 300 s"
    ] * 2


def test_pauses_before_the_log_says_anything_are_short(caplog):
    with caplog.at_level(logging.WARNING, "shardckpt"):
        Service("https://storage.example", *[PassingError("503")] * 2).ask()
    assert not caplog.records
