"""Small requests that are made at once, and uploads that are given up."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest

from shardckpt.errors import StorageError
from shardckpt.io.requests import Upload, Uploads, read_together
from shardckpt.io.threads import AT_ONCE


class Counted:
    """Calls, and the most that were under way at a time."""

    def __init__(self):
        self.now = self.most = 0
        self.lock, self.gate = threading.Lock(), threading.Event()

    def __call__(self, i):
        with self.lock:
            self.now += 1
            self.most = max(self.most, self.now)
            if self.now == AT_ONCE:
                self.gate.set()
        assert self.gate.wait(60)
        with self.lock:
            self.now -= 1
        return i


def test_results_come_in_order_and_only_some_reads_are_made_at_a_time():
    counted = Counted()
    reads = [lambda i=i: counted(i) for i in range(3 * AT_ONCE)]
    assert read_together(reads) == [*range(3 * AT_ONCE)]
    assert counted.most == AT_ONCE
    assert read_together([]) == []


def test_reads_are_made_one_by_one_where_no_thread_can_be_started(monkeypatch):
    def refuse(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert read_together([lambda i=i: i for i in range(5)]) == [*range(5)]


@pytest.mark.parametrize("reads", [1, 3])
def test_the_first_error_is_raised_and_what_failed_is_not_kept(reads):
    class Large:
        pass

    large = Large()
    kept = weakref.ref(large)

    def fail(held=large):
        raise StorageError(f"no {type(held).__name__}")

    gc.disable()
    try:
        with pytest.raises(StorageError, match="no Large"):
            read_together([fail, *([lambda: 0] * (reads - 1))])
        for thread in threading.enumerate():
            if thread.name == "shardckpt-request":
                thread.join(60)
        del fail, large
        assert kept() is None
    finally:
        gc.enable()


def test_an_error_gives_up_the_uploads_that_are_under_way():
    began = []

    def begin(key, data):
        def write(retry):
            began.append((key, retry))
            if key == "refused":
                raise OSError("403")
            retry.pause(60)  # hangs until it is given up

        return Upload(key, write, background=True)

    def upload():
        with Uploads(begin) as uploads:
            for key in ("refused", "a", "b"):
                uploads.write(key, b"")

    with pytest.raises(StorageError, match="cannot write refused: 403"):
        upload()
    assert {key for key, retry in began if retry.given_up} == {"a", "b"}


def test_at_the_end_all_objects_are_durable():
    written = {}

    def begin(key, data):
        return Upload(key, lambda _: written.update({key: data}), background=True)

    with Uploads(begin) as uploads:
        for i in range(3 * AT_ONCE):
            uploads.write(str(i), b"%d" % i)
    assert written == {str(i): b"%d" % i for i in range(3 * AT_ONCE)}
