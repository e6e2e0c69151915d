"""JAX in several processes, with gloo between them: what each holds, who writes it, and that nobody
waits for anybody.

Of each job one process works at a time, while the main threads of the others wait for a line on
stdin.
"""

import json
import os
import socket
import subprocess
import sys
from contextlib import ExitStack
from math import prod

import numpy as np
import pytest
from paths import CHILDREN

from shardckpt.plan.writers import Part, deal

CHILD = CHILDREN / "jax_processes.py"
CASES = 72
JOBS = [(4, 4), (4, 1, 3)]
"""Devices of each process; 8 in all, as the cases want them."""


class Process:
    """A child that does what it is told, and nothing in between."""

    def __init__(self, address, number, job, root):
        self.log = root / str(number)
        flags = f"--xla_force_host_platform_device_count={job[number]}"
        with self.log.open("w") as stderr:
            self.child = subprocess.Popen(
                [sys.executable, CHILD, address, str(number), str(len(job)), str(CASES)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags},
            )

    def tell(self, word):
        self.child.stdin.write(word + "\n")
        self.child.stdin.flush()

    def answer(self):
        line = self.child.stdout.readline()
        assert line, self.log.read_text()[-4000:]
        return json.loads(line)

    def ask(self, word):
        self.tell(word)
        return self.answer()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.child.kill()
        self.child.communicate()


@pytest.fixture(scope="module", params=JOBS, ids=str)
def job(request, tmp_path_factory):
    """Per word, what each process answered."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    root = tmp_path_factory.mktemp("said")
    with ExitStack() as stack:
        processes = [
            stack.enter_context(Process(address, i, request.param, root))
            for i in range(len(request.param))
        ]

        def all_at_once(word):
            for process in processes:
                process.tell(word)
            return [process.answer() for process in processes]

        seen = {"devices": all_at_once("devices")}
        seen |= {
            word: [process.ask(word) for process in reversed(processes)][::-1]
            for word in ("cases", "own", "refusals")
        }
        seen["connected before"] = ["[Gloo]" in process.log.read_text() for process in processes]
        seen["together"] = all_at_once("together")
        seen["connected after"] = ["[Gloo]" in process.log.read_text() for process in processes]
        for process in processes:
            process.tell("end")  # all of them: JAX's farewell waits for the others
        assert [process.child.wait(timeout=200) for process in processes] == [0] * len(processes)
    return {**seen, "local": request.param}


def test_ids_of_several_processes_are_not_0_to_n(job):
    ids = [device for device, _ in job["devices"][0]]
    assert len(ids) == sum(job["local"])
    assert sorted(ids) != list(range(len(ids)))
    assert [
        sum(process == i for _, process in job["devices"][0]) for i in range(len(job["local"]))
    ] == list(job["local"])


def test_a_process_holds_the_boxes_that_jax_says_with_the_processes_that_jax_says(job):
    for cases in job["cases"]:
        assert len(cases) == CASES
        assert [case["boxes"] and case["holders"] for case in cases] == [True] * CASES


def test_a_process_fetches_the_wanted_boxes_while_the_others_do_nothing(job):
    for cases in job["cases"]:
        assert [case["fetched"] for case in cases] == [True] * CASES


def test_a_process_places_its_own_shards_of_a_global_array_while_the_others_do_nothing(job):
    for cases in job["cases"]:
        assert [case["sinks"] and case["restored"] and case["shardings"] for case in cases] == [
            True
        ] * CASES


def test_neither_fetching_nor_placing_compiles_anything(job):
    assert {case["compiles"] for answer in job["cases"] for case in answer} == {0}
    assert {answer["compiles"] for answer in job["own"]} == {0}


def test_no_collective_runs_until_a_program_of_all_processes_needs_one(job):
    assert (set(job["connected before"]), set(job["connected after"])) == ({False}, {True})


def test_there_are_arrays_of_all_sorts(job):
    """Else the other tests would say little: held by all, by some, by one, and not at all by this
    process."""
    assert (
        len({str([(case["sharding"], case["shape"]) for case in cases]) for cases in job["cases"]})
        == 1
    )
    everybody = list(range(len(job["local"])))
    for process, cases in enumerate(job["cases"]):
        sorts = {str(holders) for case in cases for *_, holders in case["held"]}
        assert {str(everybody), str([process])} <= sorts
        assert any(not case["held"] and prod(case["shape"]) for case in cases)
    assert any(len({str(holders) for *_, holders in case["held"]}) > 1 for case in job["cases"][0])
    if len(everybody) > 2:
        assert any(
            1 < len(holders) < len(everybody)
            for case in job["cases"][0]
            for *_, holders in case["held"]
        )


def test_every_element_has_one_writer(job):
    """Each process deals by what it knows: the boxes that it holds, cut into their rows."""
    written = [np.zeros(case["shape"] or [1], int) for case in job["cases"][0]]
    for process, cases in enumerate(job["cases"]):
        parts, rows = [], []
        for i, case in enumerate(cases):
            for start, stop, holders in case["held"]:
                box = written[i][tuple(map(slice, start, stop))]  # a view
                parts.append(
                    Part(
                        f"t{i:02}",
                        "",
                        tuple(start),
                        tuple(holders),
                        len(box),
                        box[0].size * case["itemsize"],
                    )
                )
                rows.append(box)
        for share, box in zip(deal(parts, process), rows, strict=True):
            box[share.start : share.stop] += 1
    for i, whole in enumerate(written):
        assert (whole == 1).all(), i


def test_an_array_that_jax_may_move_is_every_processs_own(job):
    for process, answer in enumerate(job["own"]):
        assert answer["uncommitted"] == [None, None, [1]]
        assert answer["committed"] == [[process]]


def test_a_struct_without_sharding_gives_what_asarray_gives_an_array_of_this_process(job):
    assert [answer["as jnp.asarray"] for answer in job["own"]] == [True] * len(job["local"])


@pytest.mark.parametrize(
    ("question", "words"),
    [
        ("nothing said", "it is not known which process owns which device"),
        ("nobody's", "belongs to no process of this job"),
        ("another's", "let each process name its own jax.local_devices()"),
        ("all one's", "let each process name its own jax.local_devices()"),
    ],
)
def test_a_world_that_contradicts_jax_is_refused_by_name(job, question, words):
    for errors in job["refusals"]:
        kind, message = errors[question]
        assert kind == "ShardingError"
        assert message.startswith("'w': ")
        assert words in message


def test_processes_may_be_numbered_otherwise_than_jax_numbers_them(job):
    assert [answer["numbered otherwise"] for answer in job["refusals"]] == [True] * len(
        job["local"]
    )


def test_training_goes_on_over_all_processes_with_what_each_restored_by_itself(job):
    totals = {total for total, _ in job["together"]}
    assert len(totals) == 1
    assert totals.pop() == pytest.approx(job["together"][0][1])
