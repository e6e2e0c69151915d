"""A program that watches for SIGTERM, and has children of its own. Prints what it came to; a child
that ignores SIGTERM hangs it."""

import multiprocessing
import os
import signal
import sys
import threading
import time

import numpy as np

import shardckpt
from shardckpt.training.policies import OnPreemption

kind, root = sys.argv[1:]
context = multiprocessing.get_context("fork")
manager = shardckpt.CheckpointManager(root, preemption=OnPreemption())
state = {"w": np.ones(3)}


def started(**options):
    """A child that works for long, and has begun."""
    begun = context.Event()

    def work():
        begun.set()
        # A handler of Python's is not called in a sleep that begins just after the signal.
        for _ in range(3000):
            time.sleep(0.1)

    child = context.Process(target=work, **options)
    child.start()
    assert begun.wait(60)
    return child


if kind == "process":
    child = started()
    child.terminate()
    child.join()
    print(child.exitcode)
elif kind == "thread":
    children = []
    thread = threading.Thread(target=lambda: children.append(started()))
    thread.start()
    thread.join()
    children[0].terminate()
    children[0].join()
    print(children[0].exitcode)
elif kind == "two managers":
    with shardckpt.CheckpointManager(f"{root}2", preemption=OnPreemption()):
        child = started()
        child.terminate()
        child.join()
    print(child.exitcode)
elif kind == "pool":
    pool = context.Pool(1)
    pool.apply_async(time.sleep, (300,))
    pool.terminate()
    pool.join()
    print("joined")
elif kind == "just forked":  # the signal comes before Python runs in the child
    ends = set()
    for _ in range(40):
        if not (pid := os.fork()):
            time.sleep(1)
            os._exit(7)
        os.kill(pid, signal.SIGTERM)
        ends.add(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    print(*ends, signal.pthread_sigmask(signal.SIG_BLOCK, ()))
elif kind == "daemon":
    started(daemon=True)
    manager.close()
    print("the end")
elif kind == "own handler on top":
    before = signal.getsignal(signal.SIGTERM)

    def pass_on(number, frame):
        before(number, frame)

    signal.signal(signal.SIGTERM, pass_on)
    child = started()
    child.terminate()
    child.join()
    print(child.exitcode)
elif kind == "group":
    child = started()
    os.killpg(0, signal.SIGTERM)
    step = 0
    while not manager.reached_preemption:
        step += 1
        manager.save(step, state)
    manager.close()
    child.join()
    print(manager.all_steps() == [step], child.exitcode)
