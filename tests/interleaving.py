"""Several users of one checkpoint at once, one storage operation at a time, in an order that a test chooses.

Each actor is a thread that runs the product's own functions over `memory://`; before every operation of the storage
it waits for its turn. The storage knows versions by their contents only, as S3 does, and deletes objects one
by one. Whatever changes it is checked at once:

- What the commit record names has all that was ever written into it, and loses nothing while it is named.
- An attempt that was not idle for the grace period since its save began is removed by nobody but that save.
- An attempt becomes the checkpoint once at most, and only if the record has not changed since its save began: so not
  if another one was published, if the checkpoint was deleted, or if the place was collected in between.
- Nobody deletes a checkpoint that came after the one that was to be deleted.
"""

from __future__ import annotations

import hashlib
import threading
import uuid
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import tensorstore as ts

from shardckpt.errors import ShardckptError
from shardckpt.io import collect as collecting
from shardckpt.io.attempts import is_attempt
from shardckpt.io.commit import RECORD
from shardckpt.io.store import Store
from shardckpt.record import Tombstone, parse_checkpoint

__all__ = ["Actor", "Stage"]

GRACE = 100


class Killed(BaseException):
    """Ends an actor as SIGKILL ends a process: nothing that it would do afterwards reaches the storage."""


class Actor:
    """Somebody who works at the checkpoint."""

    def __init__(self, stage, action):
        self.stage = stage
        self.action = action
        self.done = self.hurried = self.killed = False
        self.outcome = self.bug = None
        """What the action returned or the ShardckptError that it raised; what it should not have raised."""
        self.saw = []
        """How often the commit record had changed, each time that this actor read it."""
        self._turn, self._back = threading.Semaphore(0), threading.Semaphore(0)
        threading.Thread(target=self._run, daemon=True).start()
        self.step()  # up to its first operation

    def step(self):
        """Its next operation, and all that it does before the one after that."""
        if not self.done:
            self._turn.release()
            self._back.acquire()
        if self.bug is not None:
            raise self.bug

    def finish(self):
        """All that is left of it, with nobody in between."""
        self.hurried = True
        self.step()
        return self.outcome

    def kill(self):
        self.killed = True
        self.finish()

    def wait_for_turn(self):
        if not self.hurried:
            self._back.release()
            self._turn.acquire()
        if self.killed:
            raise Killed

    def _run(self):
        self.stage.local.actor = self
        self._turn.acquire()
        try:
            self.outcome = self.action()
        except ShardckptError as e:
            self.outcome = e
        except Killed:
            pass
        except BaseException as e:
            self.bug = e
        self.done = True
        self._back.release()


class Stage:
    """A checkpoint's place, its clock, and everything that has happened there."""

    def __init__(self):
        self.url = f"memory://{uuid.uuid4().hex}/c"
        self.clock = 0.0
        self.local = threading.local()
        self.written = {}
        """Attempt → the keys that its save has written; of one that began before the record changed, too."""
        self.savers = {}
        """Attempt → the actor whose save it is."""
        self.times = {}
        """Key → when it was written; of those that are there."""
        self.last = {}
        """Attempt → when anything was written into it for the last time."""
        self.was_idle = set()
        """Attempts that have been idle for the grace period at some time: these are dead."""
        self.named = None
        self.were_named = set()
        self.changes = 0
        """How often the commit record has changed."""

    @classmethod
    @contextmanager
    def set(cls):
        """A stage, for as long as the block runs; every operation of this process's storages goes over it."""
        stage = cls()
        with pytest.MonkeyPatch.context() as patch:
            stage.store = Store.open(stage.url)
            stage.original = SimpleNamespace(**{name: getattr(ts.KvStore, name) for name in ("read", "write", "list")})
            for name in ("read", "write", "list", "delete_range"):
                patch.setattr(ts.KvStore, name, stage._instead_of(name))
            patch.setattr(collecting, "idle_seconds", stage._idle_seconds)
            yield stage

    def begin(self, action):
        return Actor(self, action)

    def pass_time(self):
        self.clock += GRACE
        self.was_idle |= {attempt for attempt, last in self.last.items() if self.clock - last >= GRACE}

    def attempts(self):
        """Those of which anything is left."""
        return {key.partition("/")[0] for key in self.times if key != RECORD}

    # --- the storage

    def _instead_of(self, name):
        ours = getattr(self, f"_{name}")

        def operation(kv, *arguments, **options):  # a function, to become a method of kv
            return ours(kv, *arguments, **options)

        return operation

    def _read(self, kv, key, **options):
        self._gate()
        found = self.original.read(kv, key, **options).result()
        if self._path(kv, key) == RECORD and (actor := self._actor()) is not None:
            actor.saw.append(self.changes)
        stamp = SimpleNamespace(generation=_generation(found))
        return _Answer(SimpleNamespace(state=found.state, value=found.value, stamp=stamp))

    def _write(self, kv, key, value, if_equal=None):
        self._gate()
        present = self.original.read(kv, key).result()
        if if_equal not in (None, _generation(present)):
            return _Answer(SimpleNamespace(generation=b""))
        path = self._path(kv, key)
        if value is None:
            if present.state == "value":
                self._before_deletion(path)
        elif path == RECORD:
            self._before_publication(bytes(value))
        else:
            attempt = path.partition("/")[0]
            self.savers.setdefault(attempt, self._actor())
            self.written.setdefault(attempt, set()).add(path)
            self.last[attempt] = self.clock
        self.original.write(kv, key, value).result()
        self.times.pop(path, None)
        if value is not None:
            self.times[path] = self.clock
        return _Answer(SimpleNamespace(generation=_generation(self.original.read(kv, key).result())))

    def _list(self, kv, *arguments):
        self._gate()
        return self.original.list(kv, *arguments)

    def _delete_range(self, kv, span):
        for key in self._list(kv, span).result():
            self._write(kv, key.decode(), None)
        return _Answer(None)

    def _idle_seconds(self, store, prefixes):
        """What `io.ages` would say."""
        self._gate()
        newest = {p: max((time for key, time in self.times.items() if key.startswith(p)), default=None) for p in prefixes}
        return {prefix: None if time is None else self.clock - time for prefix, time in newest.items()}

    def _gate(self):
        if (actor := self._actor()) is not None:
            actor.wait_for_turn()

    def _actor(self):
        return getattr(self.local, "actor", None)

    def _path(self, kv, key):
        return (kv.path + (key if isinstance(key, str) else key.decode())).removeprefix(self.store.kvstore().path)

    # --- what must hold

    def _before_deletion(self, path):
        assert path != RECORD
        attempt = path.partition("/")[0]
        assert attempt != self.named, "what the record names loses nothing"
        if self._actor() is not self.savers[attempt]:
            assert attempt in self.was_idle | self.were_named, "a live attempt is left alone"

    def _before_publication(self, data):
        record = parse_checkpoint(data, RECORD)
        named = None if isinstance(record, Tombstone) else record.attempt
        if named not in (None, self.named):
            assert named not in self.were_named, "an attempt becomes the checkpoint once"
            assert self.savers[named].saw[0] == self.changes, "who publishes had seen all that came before when it began"
            assert self.written[named] <= self.times.keys(), "what is published is whole"
        elif (actor := self._actor()) is not None:
            assert actor.saw[-1] == self.changes, "who deletes or collects has seen what it deletes"
        self.changes += 1
        self.named = named
        self.were_named |= {named} - {None}

    def check_end(self):
        """When nobody works any more, a last collection leaves one whole checkpoint, or none."""
        self.pass_time()
        collecting.collect(self.store, grace=GRACE)
        assert self.attempts() == {self.named} - {None}
        assert all(is_attempt(self.store, attempt) for attempt in self.attempts())


class _Answer:
    """A future that has its result."""

    def __init__(self, value):
        self._value = value

    def result(self):
        return self._value


def _generation(found):
    return b"missing" if found.state == "missing" else hashlib.md5(found.value, usedforsecurity=False).digest()
