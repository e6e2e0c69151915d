"""One rank of a torch.distributed job over gloo, coordinated through its store. JSON on stdout.

The store is a TCPStore that the test itself serves, so that it outlives the rank, or files for
several groups in turn.
"""

import json
import logging
import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from threading import Barrier

import torch
import torch.distributed as dist

import shardckpt
from shardckpt.errors import ShardckptError
from shardckpt.frameworks.coordination import Coordinator, waiting

scenario, place, rank, world = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])


def tcp_store():
    return dist.TCPStore("127.0.0.1", int(place), is_master=False, timeout=timedelta(seconds=60))


def failure_of(action):
    try:
        action()
    except ShardckptError as error:
        return f"{type(error).__name__}: {error}"
    return None


def join_files(name):
    dist.init_process_group(
        "gloo", init_method=f"file://{place}/{name}", rank=rank, world_size=world
    )


def everything():
    """From the first call to the end of the group."""
    dist.init_process_group("gloo", store=tcp_store(), rank=rank, world_size=world)
    together = Barrier(4)

    def first(_):
        together.wait()
        return Coordinator.current(timeout=60)

    with ThreadPoolExecutor(4) as pool:
        coordinators = list(pool.map(first, range(4)))
    ours = coordinators[0]
    answers = {
        "kind": type(ours).__name__,
        "same object": all(c is ours for c in coordinators) and Coordinator.current() is ours,
        "world": [
            ours.world.process,
            ours.world.processes,
            dict(ours.world.devices),
            ours.world.sharing,
        ],
        "run_id": ours.run_id,
        "shared": ours.share("word", {"rank": rank, "large": "x" * 100_000 * rank})[-1]["rank"],
        "agreed": ours.agree("resume", lambda: [7, rank]),
        "before": ours.peek("step"),
    }
    ours.share("peeked", None)
    if rank == world - 1:
        ours.announce("step", 1)
        ours.announce("step", {"stop": 2})
    ours.share("announced", None)
    answers["peeked"] = ours.peek("step")
    child = os.fork()
    if child == 0:
        os._exit("was forked from process" not in str(failure_of(Coordinator.current)))
    answers["fork refused"] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    dist.destroy_process_group()
    alone = Coordinator.current()
    answers["after the group"] = [
        type(alone).__name__,
        alone.world.processes,
        alone.run_id != ours.run_id,
    ]
    return answers


def two_rounds():
    """Destroy the group and set up another in the same process; then use what belongs to the
    first."""
    join_files("first")
    first = Coordinator.current(timeout=60)
    first.announce("step", 1)
    first.share("announced", None)
    dist.destroy_process_group()
    join_files("second")
    second = Coordinator.current(timeout=60)
    answers = {
        "run_ids": [first.run_id, second.run_id],
        "peeked": second.peek("step"),
        "same object": second is first,
    }
    dist.barrier()
    dist.destroy_process_group()
    return answers


def same_store():
    """A round in a store that an earlier round's processes have used, under the very same
    prefix."""
    # Of gloo's own keys the earlier round's would mislead it: a backend without connections leaves
    # the store to us.
    from torch.testing._internal.distributed import fake_pg  # noqa: F401

    dist.init_process_group("fake", store=tcp_store(), rank=rank, world_size=world)
    ours = Coordinator.current(timeout=60)
    answers = {
        "run_id": ours.run_id,
        "left": ours.peek("step"),
        "agreed": ours.agree("resume", lambda: ours.run_id),
    }
    ours.share("peeked", None)
    ours.announce("step", 1)
    ours.share("announced", None)
    return answers


def absent():
    """The last rank is in the group and never calls."""
    dist.init_process_group("gloo", store=tcp_store(), rank=rank, world_size=world)
    answers = {}

    def save_too(*_):
        answers["in a handler"] = failure_of(lambda: Coordinator.current(timeout=1))

    if rank < world - 1:
        signal.signal(signal.SIGALRM, save_too)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        answers["failure"] = failure_of(lambda: Coordinator.current(timeout=1))
    dist.barrier()
    # All of them now: the same processes in the same group, after some of them had given up.
    ours = Coordinator.current(timeout=60)
    if rank < world - 1:
        Coordinator.current(timeout=1)
        answers["later"] = failure_of(lambda: Coordinator.current().share("alone", None))
    dist.barrier()
    return answers | {"run_id": ours.run_id}


def saves_alone():
    """Rank 0 saves as the job's first call of shardckpt, and the others do not; then by itself;
    then all save."""
    dist.init_process_group("gloo", store=tcp_store(), rank=rank, world_size=world)
    place, state, answers = os.environ["SAVE_TO"], {"w": torch.ones(5)}, {}
    if rank == 0:
        waiting.NOTICE_SECONDS = 0.2
        logged = []
        logging.getLogger("shardckpt").addHandler(handler := logging.Handler())
        handler.emit = lambda record: logged.append(record.getMessage())
        options = shardckpt.SaveOptions(commit_timeout=1)
        answers["save"] = failure_of(lambda: shardckpt.save(f"{place}/1", state, options=options))
        answers["save_async"] = failure_of(
            lambda: shardckpt.save_async(f"{place}/1", state, options=options)
        )
        answers["manager"] = failure_of(lambda: shardckpt.CheckpointManager(place, options=options))
        answers["logged"] = [*logged]
        answers["files"] = [path.name for path in Path(place).glob("*")]
        shardckpt.save(f"{place}/alone", state, coordinator=shardckpt.SingleProcess())
    dist.barrier()
    shardckpt.save(f"{place}/all", state)
    # A later agreement has the usual time limit, not the one of the first save.
    return answers | {
        "timeout": Coordinator.current()._timeout,
        "saved": sorted(path.name for path in Path(place).iterdir()),
    }


def counted():
    """Count what an operation that waits for a missing key would have waited for."""
    waited = []

    class Counted(dist.Store):
        """A TCPStore that keeps account, and that cannot be cloned."""

        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def get(self, key):
            if not self.inner.check([key]):
                waited.append(key)
            return self.inner.get(key)

        def wait(self, keys, timeout=timedelta(seconds=60)):
            waited.extend(keys)
            self.inner.wait(keys, timeout)

        def set(self, key, value):
            self.inner.set(key, value)

        def check(self, keys):
            return self.inner.check(keys)

        def add(self, key, amount):
            return self.inner.add(key, amount)

    from torch.testing._internal.distributed import fake_pg  # noqa: F401

    store = Counted(tcp_store())
    dist.init_process_group("fake", store=store, rank=rank, world_size=world)
    ours = Coordinator.current(timeout=60)
    ours.share("word", rank)
    ours.agree("resume", lambda: 1)
    peeked = ours.peek("never announced")
    ours.announce("mine", 1)
    return {"waited": waited, "peeked": peeked, "own": ours.peek("mine")}


def store_gone():
    """Process 0 holds the store and leaves."""
    join_files("group")
    if rank == 0:
        ours = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port = ours.port
    else:
        ours = port = None
    ports = [port]
    dist.broadcast_object_list(ports, src=0)
    ours = ours or dist.TCPStore("127.0.0.1", ports[0], is_master=False)
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=ours, rank=rank, world_size=world)
    coordinator = Coordinator.current(timeout=60)
    coordinator.announce("last", 1)
    del ours
    dist.destroy_process_group()
    if rank == 0:
        return {"failure": failure_of(lambda: coordinator.peek("last"))}
    # Until process 0's server is gone, which its group kept alive.
    failure = None
    while failure is None:
        failure = failure_of(lambda: coordinator.peek("last"))
    return {"failure": failure}


def jax_beside():
    """JAX in each rank for itself: imported, then used."""
    import jax
    from jax._src import xla_bridge

    join_files("first")
    devices = [dict(Coordinator.current(timeout=60).world.devices)]
    set_up = xla_bridge.backends_are_initialized()
    dist.destroy_process_group()
    ids = [d.id for d in jax.local_devices()]
    join_files("second")
    devices.append(dict(Coordinator.current(timeout=60).world.devices))
    return {"devices": devices, "set up by asking": set_up, "ids": ids}


def torch_xla_beside():
    """The same 8 torch_xla devices in each rank: for itself, then shared out as told, then shared
    out wrongly."""
    import torch_xla.runtime as xr

    xr.use_spmd()
    join_files("first")
    answers = {"private": dict(Coordinator.current(timeout=60).world.devices)}
    dist.destroy_process_group()
    join_files("second")
    own = {"torch_xla": range(4 * rank, 4 * rank + 4)}
    ours = Coordinator.current(devices=own, timeout=60)
    answers["told"] = ours.world.devices["torch_xla"].of_devices(range(8)).tolist()
    answers["again"] = Coordinator.current(devices=own) is ours and Coordinator.current() is ours
    answers["otherwise"] = failure_of(lambda: Coordinator.current(devices={"torch_xla": [0]}))
    dist.destroy_process_group()
    join_files("third")
    answers["twice"] = failure_of(
        lambda: Coordinator.current(devices={"torch_xla": [rank, 5]}, timeout=60)
    )
    return answers


answer = globals()[scenario]()
sys.stdout.write(json.dumps(answer) + "\n")
sys.stdout.flush()
