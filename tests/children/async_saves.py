"""Functions of single processes for the tests of saves in the background, each in a fork of its own
(`fork_server.py`)."""

import gc
import os
import resource
import signal
import sys
import threading
from pathlib import Path

import numpy as np
from one_of_several import on_threads

import shardckpt
from shardckpt import Mesh, PartitionSpec, SaveOptions, Sharding
from shardckpt.writing.background import Saver

MiB = 1 << 20
LIMIT = 16 * MiB


def state(mebibytes, shift=0):
    return {
        "w": np.arange(mebibytes * MiB // 4, dtype=np.int32).reshape(mebibytes, -1)
        + np.int32(shift)
    }


def status():
    """Resident bytes now, and at most so far since the last reset."""
    lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return [int(lines[key].split()[0]) << 10 for key in ("VmRSS", "VmHWM")]


def error_of(action):
    try:
        action()
    except BaseException as error:
        return [type(error).__name__, str(error)]
    return None


def into_a_full_place(_coordinator, url, mebibytes):
    """No file may be larger than a few MiB; who saves, and who waits, is told."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    saver = Saver(memory_limit=LIMIT)
    handles = []

    def begin():
        handles.append(saver.begin(url, state(mebibytes), SaveOptions()))

    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 * MiB, most))
    answer = [
        error_of(begin),
        *(error_of(lambda until=until: handles[0].wait(until)) for until in ("commit", "local")),
    ]
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    saver.begin(f"{url}-later", state(1), SaveOptions()).wait()
    return answer


def raising(number):
    """A progress function that raises a signal once, when more than half is written."""
    struck = threading.Event()

    def strike(done, total):
        if done > total // 2 and not struck.is_set():
            struck.set()
            signal.raise_signal(number)

    return strike


def interrupted(_coordinator, url):
    """Ctrl-C while the thread that saves waits for a buffer; once more than half is written, so
    that it is in the middle."""
    saver = Saver(memory_limit=LIMIT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    error = error_of(
        lambda: saver.begin(url, state(200), SaveOptions(), progress=raising(signal.SIGINT))
    )
    left = list(Path(url).glob("**/*")) if Path(url).exists() else []
    saver.begin(url, state(1), SaveOptions()).wait()
    saver.close()
    return [error[0], len([path for path in left if path.is_file()]), threading.active_count()]


def interrupted_while_the_writer_waits(_coordinator, url):
    """Ctrl-C while the save streams, and its writing thread waits for process 0, which never comes:
    the save before has failed on this process."""
    saver, coordinator = Saver(memory_limit=LIMIT), on_threads(2, lambda ours: ours)[1]
    options = SaveOptions(commit_timeout=300)
    first = error_of(lambda: saver.begin(url, {"w": object()}, options, coordinator=coordinator))
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 2)
    second = error_of(lambda: saver.begin(url, state(64), options, coordinator=coordinator))
    signal.setitimer(signal.ITIMER_REAL, 0)
    return [first[0], second[0]]


def out_of_memory_while_the_writer_waits(_coordinator, url):
    """Memory runs out while process 0's save streams, and its writing thread waits for process 2,
    which never comes: the save before has failed. Process 1 waits, too."""
    savers, coordinators = (
        [Saver(memory_limit=LIMIT) for _ in range(2)],
        on_threads(3, lambda ours: ours),
    )
    options = SaveOptions(commit_timeout=60)

    def begin(process, state):
        return savers[process].begin(url, state, options, coordinator=coordinators[process])

    def handler(*_):
        raise MemoryError("no room")

    error_of(lambda: begin(0, {"w": object()}))
    error_of(lambda: begin(1, state(1)).wait())
    other = begin(1, state(1))
    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 2)
    return [error_of(lambda: begin(0, state(64))), error_of(other.wait)]


def interrupted_by_another_save(_coordinator, url, mebibytes):
    """A signal handler that saves, too, while the thread that saves waits for a buffer in the
    middle of a save."""
    saver = Saver(memory_limit=LIMIT)

    def handler(*_):
        saver.begin(f"{url}-nested", state(mebibytes), SaveOptions()).wait()

    signal.signal(signal.SIGUSR1, handler)
    error = error_of(
        lambda: saver.begin(url, state(200), SaveOptions(), progress=raising(signal.SIGUSR1)).wait()
    )
    saver.begin(f"{url}-later", state(1), SaveOptions()).wait()
    saver.close()
    return error


class Noticed(Sharding):
    """A layout like any other, which sends a signal when the thread that saves compares it with
    that of an earlier save."""

    __hash__ = Sharding.__hash__

    def __eq__(self, other):
        if threading.current_thread() is threading.main_thread():
            signal.raise_signal(signal.SIGUSR1)
        return super().__eq__(other)


def interrupted_as_it_compares_plans(_coordinator, url):
    """A signal handler that saves, too, while the thread that saves looks for the plan of an
    earlier save."""
    saver, nested = Saver(), []

    def handler(*_):
        nested.append(saver.begin(f"{url}-{len(nested)}", state(2), SaveOptions()).wait())

    signal.signal(signal.SIGUSR1, handler)
    for number in range(2):
        options = SaveOptions(shardings={"w": Noticed(Mesh((2,), ("x",)), PartitionSpec("x"))})
        saver.begin(f"{url}-again" if number else url, state(2), options).wait()
    return len(nested)


def killed_by_sigterm(_coordinator, url, mebibytes):
    """SIGTERM, as a scheduler sends it, with a save in flight that is half written."""

    def strike(done, total):
        if done > total // 2:
            os.kill(os.getpid(), signal.SIGTERM)

    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    Saver(memory_limit=LIMIT).begin(url, state(mebibytes), SaveOptions(), progress=strike).wait()


def forked(_coordinator, url):
    """A fork of a process with saves in flight, as data loaders make them: it cannot wait for
    these. (TensorStore cannot be used there.)"""
    held, pipe = threading.Event(), os.pipe()
    saver = Saver()
    handle = saver.begin(
        f"{url}/parent", state(1), SaveOptions(), before_publish=lambda: held.wait(60)
    )
    pid = os.fork()
    if pid == 0:
        error = error_of(handle.wait)
        saver.close()  # nothing of it is waited for, either
        os.write(pipe[1], error[1].encode())
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert not handle.done()
    held.set()
    handle.wait()
    return os.read(pipe[0], 10_000).decode()


def growth(_coordinator, url, saves):
    """Resident bytes that each of many saves has added, once the first few have warmed up."""
    saver = Saver(memory_limit=LIMIT)
    tree = {f"layer {i}": np.full((64, 64), i, np.float32) for i in range(10)}
    sizes = []
    for i in range(saves):
        saver.begin(url, tree, SaveOptions(overwrite=True)).wait()
        if i % 10 == 9:
            gc.collect()
            sizes.append(status()[0])
    return [sizes, saver.pool.high_water]


def peak(_coordinator, url, mebibytes, limit):
    """Bytes that a save has added at its peak, and whether it streamed; numpy's own imports are
    done by a save before."""
    saved = state(mebibytes)
    saver = Saver(memory_limit=limit)
    shardckpt.save_async(f"{url}-before", state(1), options=SaveOptions(memory_limit=LIMIT)).wait()
    Path("/proc/self/clear_refs").write_text("5")
    before = status()[0]
    handle = saver.begin(url, saved, SaveOptions())
    saved["w"] += 1
    report = handle.wait()
    return [status()[1] - before, saver.pool.high_water, report.streamed, report.stored_bytes]


def host_of_several(coordinator, url, mode):
    """One of two processes; what became of its save."""
    options = SaveOptions(commit_timeout=1.0 if mode == "absent" else 60)
    process = coordinator.world.process
    if mode == "absent" and process:
        return "absent"
    kind = {"w": np.zeros((2 if mode == "different" and process else 1, 100_000))}
    handle = shardckpt.save_async(url, kind, options=options, coordinator=coordinator)
    local = error_of(lambda: handle.wait("local"))
    return [local, error_of(handle.wait)]


def at_exit(url, mode):
    """A program that ends with saves in flight."""
    first = shardckpt.save_async(f"{url}/0", state(4))
    if mode == "done":
        first.wait()
    shardckpt.save_async(f"{url}/1", state(40), options=SaveOptions(memory_limit=LIMIT))
    if mode == "error":
        raise ValueError("the training loop failed")


if __name__ == "__main__":
    at_exit(sys.argv[1], sys.argv[2])
