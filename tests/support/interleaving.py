"""Several users of one checkpoint at once, one storage operation at a time, in an order that a test
chooses.

Each actor is a thread that runs the product's own functions over `memory://`, in the plain layout
(the packed one's index TensorStore writes where nobody can look on); before every operation of the
storage, and before every word between the hosts of a job, it waits for its turn. The storage knows
versions by their contents only, as S3 does, or by numbers that never come back, as GCS and disks
do, and deletes objects one by one. Who sleeps until another host of its job has done something
sleeps for too long only if none of them can do anything any more. Whatever changes the storage is
checked at once:

- What the commit record names has all that was ever written into it, and loses nothing while it is
  named.
- An attempt that was not idle for the grace period since its save began is removed by nobody but
  that save, and those whom the storage has told that it is too late to commit it.
- An attempt becomes the checkpoint once at most, and only in place of the version of the record
  that each of its hosts had seen before it wrote anything: so not if another one was published, if
  the checkpoint was deleted, or if the place was collected in between, though nothing be left of
  that.
- The record goes only on condition that it is a known version, and never while it names a
  checkpoint.
- Nobody deletes a checkpoint that came after the one that was to be deleted.
- At the end a last collection leaves one whole checkpoint, or nothing at all.
"""

from __future__ import annotations

import hashlib
import threading
import uuid
from contextlib import contextmanager
from copy import copy
from functools import partial
from types import SimpleNamespace

import pytest
import tensorstore as ts

from shardckpt.commit import remove, waiting
from shardckpt.commit.attempts import is_attempt
from shardckpt.commit.markers import MARKERS
from shardckpt.commit.publish import RECORD
from shardckpt.errors import ShardckptError
from shardckpt.format.record import Tombstone, parse_checkpoint
from shardckpt.frameworks.coordination import Coordinator
from shardckpt.io.store import Store
from shardckpt.layout.world import World
from shardckpt.runs import collecting
from shardckpt.writing import attempt, committer

__all__ = ["GRACE", "VERSIONS", "Actor", "Host", "Stage", "finish"]

GRACE = 100

VERSIONS = ("contents", "numbers")
"""By what a storage knows versions."""
LONG = 1e9
"""Seconds, longer than anybody waits for another process."""


class Killed(BaseException):
    """Ends an actor as SIGKILL ends a process: nothing that it would do afterwards reaches the
    storage."""


class Actor:
    """Somebody who works at the checkpoint."""

    def __init__(self, stage, action):
        self.stage = stage
        self.action = action
        self.job = [self]
        """All hosts of its job."""
        self.done = self.hurried = self.killed = self.asleep = False
        self.slept = 0.0
        self.lost = None
        """The attempt that it would have made the checkpoint, had the record not changed."""
        self.commits = False
        """Whether it commits what others have written, and clears away what has become impossible
        to commit."""
        self.outcome = self.bug = None
        """The value that the action returned, or the ShardckptError that it raised; and an error
        that it should not have raised."""
        self.saw = []
        """Number of changes of the commit record so far, at each time that this actor read it."""
        self.held = None
        """The last of `saw` when it first wrote data: the version that its attempt may replace."""
        # Of two locks that are passed on turn by turn: a semaphore takes ten times as long.
        self._turn, self._back = threading.Lock(), threading.Lock()
        self._turn.acquire()
        self._back.acquire()
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

    def sleep(self):
        """Until its next turn. That is too long if the others of its job wait, too, or are no
        more."""
        self.asleep = True
        self.wait_for_turn()
        self.asleep = False
        if all(other.done or other.asleep for other in self.job if other is not self):
            self.slept += LONG

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


def finish(actors):
    """Turn by turn, all that is left of them; what became of each."""
    while not all(actor.done for actor in actors):
        for actor in actors:
            actor.step()
    return [actor.outcome for actor in actors]


class Host(Coordinator):
    """A host of a job, as it knows of the others: they share a dict of words."""

    # No agreement at the start: nobody would be there yet.
    def __init__(self, stage, words, run_id, process, processes):
        self.world = World(process, processes)
        self.run_id = run_id
        self._stage, self._words = stage, words
        root = stage.store.location.parent or stage.store.location
        self.notes["shared roots"] = {str(root.resolved)}  # the proof of it has tests of its own

    def _set(self, key, value):
        self._stage.gate()
        self._words[key] = value

    def _get(self, key):
        self._stage.gate()
        return self._words.get(key)


class Stage:
    """A checkpoint's place, its clock, and everything that has happened there."""

    def __init__(self, versions):
        self.url = f"memory://{uuid.uuid4().hex}/7"
        self.versions = versions
        self.writes = 0
        self.numbers = {}
        """Key → the number of its present version."""
        self.jobs = 0
        self.clock = 0.0
        self.local = threading.local()
        self.written = {}
        """Attempt → the keys that its save has written; of one that began before the record
        changed, too."""
        self.savers = {}
        """Attempt → the actors whose save it is."""
        self.times = {}
        """Key → when it was written; of those that are there."""
        self.last = {}
        """Attempt → when anything was written into it for the last time."""
        self.was_idle = set()
        """Attempts that have been idle for the grace period at some time: these are dead."""
        self.history = [None]
        """Attempts that the commit record has named, one for each change; None: no attempt."""

    @classmethod
    @contextmanager
    def set(cls, versions="contents", after=None):
        """A stage, for as long as the block runs; every operation of this process's storages goes
        over it. All has happened there that had on another one when its `past` was taken."""
        stage = cls(versions)
        with pytest.MonkeyPatch.context() as patch:
            stage.store = Store.open(stage.url)
            stage.root = stage.store.kvstore().path
            if after is not None:
                contents, happened = after
                vars(stage).update(_copies(happened))
                for path, data in contents.items():
                    stage.store.write(path, data)
            stage.original = SimpleNamespace(
                **{name: getattr(ts.KvStore, name) for name in ("read", "write", "list")}
            )
            for name in ("read", "write", "list", "delete_range"):
                patch.setattr(ts.KvStore, name, stage._instead_of(name))
            patch.setattr(remove, "idle_seconds", stage._idle_seconds)
            for module in (attempt, committer, waiting):
                patch.setattr(
                    module, "time", SimpleNamespace(monotonic=stage._monotonic, sleep=stage._sleep)
                )
            yield stage

    @property
    def past(self):
        """The contents of the storage, and all that has happened there."""
        contents = {path: self.store.read(path) for path in self.times}
        own = ("url", "versions", "local", "store", "root", "original")
        return contents, _copies({k: v for k, v in vars(self).items() if k not in own})

    @property
    def changes(self):
        """Number of changes of the commit record."""
        return len(self.history) - 1

    @property
    def named(self):
        """The attempt that is the checkpoint."""
        return self.history[-1]

    def begin(self, action):
        return Actor(self, action)

    def begin_job(self, action, hosts):
        """The hosts of one job; `action` takes the coordinator."""
        self.jobs += 1
        words, run_id = {}, f"20260102T000000-{self.jobs:08x}"
        job = [
            Actor(self, partial(action, Host(self, words, run_id, host, hosts)))
            for host in range(hosts)
        ]
        for actor in job:
            actor.job = job
        return job

    def pass_time(self):
        self.clock += GRACE
        self.was_idle |= {
            attempt for attempt, last in self.last.items() if self.clock - last >= GRACE
        }

    def attempts(self):
        """Those of which anything is left."""
        return {key.partition("/")[0] for key in self.times if key not in (RECORD, *MARKERS)}

    # --- the storage

    def _instead_of(self, name):
        ours = getattr(self, f"_{name}")

        def operation(kv, *arguments, **options):  # a function, to become a method of kv
            return ours(kv, *arguments, **options)

        return operation

    def _read(self, kv, key, **options):
        self.gate()
        result = self.original.read(kv, key, **options).result()
        if self._path(kv, key) == RECORD and (actor := self._actor()) is not None:
            actor.saw.append(self.changes)
        stamp = SimpleNamespace(generation=self._generation(self._path(kv, key), result))
        return _Answer(SimpleNamespace(state=result.state, value=result.value, stamp=stamp))

    def _write(self, kv, key, value, if_equal=None):
        self.gate()
        present = self.original.read(kv, key).result()
        path = self._path(kv, key)
        if if_equal not in (None, self._generation(path, present)):
            if path == RECORD and value is not None and (actor := self._actor()) is not None:
                actor.lost = _named(value)
            return _Answer(SimpleNamespace(generation=b""))
        if value is None:
            if path == RECORD:
                assert if_equal is not None, "the record goes on condition"
                assert self.named is None, "a checkpoint is deleted by a tombstone"
                self.history.append(None)
            elif present.state == "value" and path not in MARKERS:
                self._before_deletion(path)
        elif path == RECORD:
            self._before_publication(bytes(value))
        elif path not in MARKERS:
            attempt, actor = path.partition("/")[0], self._actor()
            self.savers.setdefault(attempt, [*getattr(actor, "job", [])])
            if actor is not None and actor.held is None and actor.saw:
                actor.held = actor.saw[-1]
            self.written.setdefault(attempt, set()).add(path)
            self.last[attempt] = self.clock
        self.original.write(kv, key, value).result()
        self.times.pop(path, None)
        if value is not None:
            self.times[path] = self.clock
        self.writes += 1
        self.numbers[path] = self.writes
        return _Answer(
            SimpleNamespace(generation=self._generation(path, self.original.read(kv, key).result()))
        )

    def _list(self, kv, *arguments):
        self.gate()
        return self.original.list(kv, *arguments)

    def _delete_range(self, kv, span):
        for key in self._list(kv, span).result():
            self._write(kv, key.decode(), None)
        return _Answer(None)

    def _idle_seconds(self, store, prefixes):
        """The answer that `io.ages` would give."""
        self.gate()
        newest = {
            p: max((time for key, time in self.times.items() if key.startswith(p)), default=None)
            for p in prefixes
        }
        return {
            prefix: None if time is None else self.clock - time for prefix, time in newest.items()
        }

    def _monotonic(self):
        return self._actor().slept

    def _sleep(self, _seconds):
        self._actor().sleep()

    def _generation(self, path, result):
        if result.state == "missing":
            return b"missing"
        return (
            hashlib.md5(result.value, usedforsecurity=False).digest()
            if self.versions == "contents"
            else b"%d" % self.numbers[path]
        )

    def gate(self):
        if (actor := self._actor()) is not None:
            actor.wait_for_turn()

    def _actor(self):
        return getattr(self.local, "actor", None)

    def _path(self, kv, key):
        return (kv.path + (key if isinstance(key, str) else key.decode())).removeprefix(self.root)

    # --- what must hold

    def _before_deletion(self, path):
        attempt = path.partition("/")[0]
        assert attempt != self.named, "what the record names loses nothing"
        actor = self._actor()
        seen = {saver.held for saver in self.savers[attempt] if saver.held is not None}
        overtaken = getattr(actor, "commits", False) and bool(seen - {self.changes})
        if (
            actor not in self.savers[attempt]
            and attempt != getattr(actor, "lost", None)
            and not overtaken
        ):
            assert attempt in self.was_idle.union(self.history), "a live attempt is left alone"

    def _before_publication(self, data):
        named = _named(data)
        if named not in (None, self.named):
            assert named not in self.history, "an attempt becomes the checkpoint once"
            assert {saver.held for saver in self.savers[named]} == {self.changes}, (
                "who publishes had seen all that came before"
            )
            assert self.written[named] <= self.times.keys(), "what is published is whole"
        elif (actor := self._actor()) is not None:
            assert actor.saw[-1] == self.changes or RECORD not in self.times, (
                "who deletes or collects has seen what it deletes"
            )
        self.history.append(named)

    def check_end(self):
        """Collect a last time, when all work has ended: this leaves one whole checkpoint, or
        nothing."""
        self.pass_time()
        collecting.collect_place(self.store, grace=GRACE)
        assert self.attempts() == {self.named} - {None}
        assert all(is_attempt(self.store, attempt) for attempt in self.attempts())
        assert self.named is not None or not self.times


def _copies(happened):
    """Copies of a stage's attributes, of which the values of dicts may be sets and lists."""
    return {
        name: {k: copy(v) if isinstance(v, set | list) else v for k, v in value.items()}
        if isinstance(value, dict)
        else copy(value)
        for name, value in happened.items()
    }


class _Answer:
    """A future that has its result."""

    def __init__(self, value):
        self._value = value

    def result(self, timeout=None):
        return self._value

    def done(self):
        return True

    def cancel(self):
        return False


def _named(data):
    """The attempt that a commit record names."""
    record = parse_checkpoint(bytes(data), RECORD)
    return None if isinstance(record, Tombstone) else record.attempt
