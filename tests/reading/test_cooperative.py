"""Processes agree on their shared reads: for any requests, no process enters a collective that
another one does not."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_hosts import Hosts

import shardckpt
from shardckpt import Bandwidths, Coordinator, Mesh, PartitionSpec, Sharding
from shardckpt.errors import CoordinationError, CorruptionError, OptionError
from shardckpt.frameworks.base import PlainSink
from shardckpt.layout.world import World
from shardckpt.reading import cooperative
from shardckpt.reading.landing import restore_jobs

SHAPES = {"w": (64, 48), "v": (48, 64), "b": (50,), "s": (), "e": (0, 3)}


class Wanted(PlainSink):
    """A sink of one host of a job that is not running."""

    def __init__(self, source, world):
        self.shape, self.dtype, self.boxes = source.shape, source.dtype, source.boxes
        self.buffer_shapes = [source.boxes[b].shape for b in range(len(source.boxes))]
        self.destinations, self.tie_key = None, id(self)
        self._holders = set(source.holders or [tuple(range(world.processes))])

    def sharers(self, world):
        return next(iter(self._holders)) if len(self._holders) == 1 else None


class Said(Coordinator):
    """One process of a job, told what all have said; or who only says it."""

    def __init__(self, world, values=None):
        self.world, self.values, self.own = world, values, None

    def share(self, key, value, *, timeout=None):
        self.own = value
        if self.values is None:
            raise InterruptedError
        return self.values

    def _leave(self, key, value):
        self.own = value

    _set = _get = None


class Link:
    bandwidth = 10e9


def divided(checkpoint, jobs, choice, coordinator):
    meeting = cooperative.Meeting(choice, coordinator)
    meeting.location = checkpoint.location
    return meeting.divide(checkpoint, jobs, 1 << 20)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    url = tmp_path_factory.mktemp("agreement") / "c"
    shardckpt.save(url, {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()})
    return shardckpt.open(url)


def layouts(rng, devices, wild):
    """A layout for every tensor, or none; `wild`: some processes have other ones."""
    drawn = {}
    for name, shape in SHAPES.items():
        factors = [n for n in (1, 2, 4, 8) if devices % n == 0]
        side = rng.choice(factors)
        mesh = Mesh(
            (side, devices // side),
            ("x", "y"),
            rng.sample(range(devices), devices) if wild else None,
        )
        spec = [None] * len(shape)
        if shape and rng.random() < 0.8:
            spec[rng.randrange(len(shape))] = rng.choice(["x", "y", ("x", "y")])
        drawn[name] = rng.choice(
            [None, Sharding(mesh, PartitionSpec(*spec)), Sharding(mesh, PartitionSpec(*spec))]
        )
    return drawn


@given(
    st.integers(0, 10**9),
    st.sampled_from([(2, 1), (4, 1), (4, 2), (8, 4), (3, 4)]),
    st.booleans(),
    st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_all_members_of_a_group_read_it_together_or_none_does(checkpoint, seed, sizes, wild, odd):
    rng = random.Random(seed)
    processes, devices = sizes
    hosts = Hosts(
        processes,
        devices,
        rng.sample(range(processes * devices), processes * devices) if wild else None,
    )
    common = layouts(rng, processes * devices, wild)
    choice = rng.choice(
        [
            True,
            Bandwidths(latency=0, gain=1),
            Bandwidths(latency=0, gain=2),
            Bandwidths(latency=1e-5),
        ]
    )
    worlds = [World(p, processes, {"simulated": hosts.owners}) for p in range(processes)]
    jobs = []
    for world in worlds:
        requested = {name: (SHAPES[name], layout, "float32") for name, layout in common.items()}
        if odd and rng.random() < 0.3:  # a process that restores something else
            requested.pop(rng.choice(list(requested)))
            requested |= {
                name: (SHAPES[name], layout)
                for name, layout in layouts(rng, processes * devices, wild).items()
                if name == "w"
            }
        names = rng.sample(list(requested), len(requested))  # nor need they be in one order
        sources = hosts.sources(world.process, {name: requested[name] for name in names})
        places = [
            (checkpoint.tensor(name), [(name, Wanted(source, world))])
            for name, source in sources.items()
        ]
        jobs.append(restore_jobs(checkpoint, places, cast=False))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cooperative, "interconnect_of", lambda _: Link())
        shared = []
        for world, mine in zip(worlds, jobs, strict=True):
            coordinator = Said(world)
            with pytest.raises(InterruptedError):
                divided(checkpoint, mine, choice, coordinator)
            shared.append({**coordinator.own, "call": str(world.process)})
        outcomes = [
            divided(checkpoint, mine, choice, Said(world, shared))
            for world, mine in zip(worlds, jobs, strict=True)
        ]

    together = [
        {r.key: (r.members, [job.tensor.name for job in r.jobs]) for r in readings}
        for _, readings in outcomes
    ]
    for process, groups in enumerate(together):
        # One order on all: no two wait for each other crosswise.
        assert list(groups.values()) == sorted(groups.values())
        for key, (members, names) in groups.items():
            assert process in members
            assert all(together[member].get(key) == (members, names) for member in members)
    for (alone, readings), mine in zip(outcomes, jobs, strict=True):
        assert sorted(
            id(j) for j in [*alone, *(job for r in readings for job in r.jobs)]
        ) == sorted(map(id, mine))
    if choice is True and not odd and all(layout is None for layout in common.values()):
        assert all(len(readings) == 1 for _, readings in outcomes)


def test_a_process_alone_needs_nobody(checkpoint, caplog):
    with caplog.at_level("INFO", "shardckpt"):
        state = shardckpt.restore(checkpoint, cooperative=True)
    assert set(state) == set(SHAPES)
    assert "every process reads by itself: the job has one process" in caplog.text


@pytest.mark.parametrize("choice", ["always", 1, None])
def test_what_is_no_choice_is_refused(checkpoint, choice):
    with pytest.raises(OptionError, match="cooperative"):
        shardckpt.restore(checkpoint, cooperative=choice)


def test_others_hear_of_a_process_that_made_no_choice(checkpoint, monkeypatch):
    monkeypatch.setattr(cooperative, "interconnect_of", lambda _: Link())
    coordinator = Said(World(1, 2), values=[])
    with pytest.raises(OptionError, match="cooperative='yes'"):
        shardckpt.restore(checkpoint, cooperative="yes", coordinator=coordinator)
    assert coordinator.own["code"] == "option"


@pytest.mark.parametrize("kind", [KeyboardInterrupt, CoordinationError])
def test_others_hear_of_a_process_that_fails_before_it_divides_its_reads(
    checkpoint, monkeypatch, kind
):
    monkeypatch.setattr(cooperative, "interconnect_of", lambda _: Link())
    coordinator = Said(World(1, 2))
    with pytest.raises(kind), cooperative.Meeting(True, coordinator):
        raise kind("amid the planning")
    assert coordinator.own["message"].endswith("amid the planning")


def test_an_interrupted_process_is_named_by_the_others(checkpoint, monkeypatch):
    monkeypatch.setattr(cooperative, "interconnect_of", lambda _: Link())
    coordinator = Said(World(1, 2), values=[None, {"call": "", "groups": []}])
    with pytest.raises(CoordinationError, match=r"^process 0 has failed, or was"):
        shardckpt.restore(checkpoint, cooperative=True, coordinator=coordinator)


def test_the_error_of_one_process_is_heard_though_another_was_interrupted(checkpoint, monkeypatch):
    monkeypatch.setattr(cooperative, "interconnect_of", lambda _: Link())
    failure = {"code": CorruptionError.code, "message": "w is damaged"}
    coordinator = Said(World(2, 3), values=[None, failure, {"call": "", "groups": []}])
    with pytest.raises(CorruptionError, match=r"^process 1 could not restore: w is damaged"):
        shardckpt.restore(checkpoint, cooperative=True, coordinator=coordinator)
