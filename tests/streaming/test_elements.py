"""Bytes of outputs that are made of many views."""

import gc
import sys
import weakref

import numpy as np
from counting import steps

import shardckpt
from shardckpt import Box
from shardckpt.reading.naming.mapping_file import parse_mapping
from shardckpt.reading.naming.outputs import identity
from shardckpt.reading.read_list import TensorBoxes
from shardckpt.streaming.elements import OutputReader

HEADS, WIDTH = 2, 64
ROTARY = {"map": [{"from": "w", "to": "w", "rotary": {"heads": HEADS, "to": "pairs"}}]}


def calls_of_add(function, argument):
    """The number of views whose reads a call of a function plans."""
    number = 0

    def count(frame, event, _value):
        nonlocal number
        number += event == "call" and frame.f_code is TensorBoxes.add.__code__

    sys.setprofile(count)
    try:
        function(argument)
    finally:
        sys.setprofile(None)
    return number


def test_a_view_for_each_row_neither_cuts_blocks_nor_is_planned_for_reads_of_other_rows(tmp_path):
    stored = np.arange(WIDTH * 5.0).reshape(WIDTH, 5)
    shardckpt.save(tmp_path / "c", {"w": stored})
    checkpoint = shardckpt.open(tmp_path / "c")
    (output,) = parse_mapping(ROTARY, "m").outputs({"w": checkpoint.tensor("w")})
    assert len(output.sources) == WIDTH
    reader = OutputReader(checkpoint, [output])
    assert reader.edges(0) == [0, stored.nbytes]
    halves = stored.reshape(HEADS, 2, WIDTH // HEADS // 2, 5)
    expected = halves.transpose(0, 2, 1, 3).reshape(WIDTH, 5)
    for first, last in [(0, WIDTH), (7, 10), (63, 64)]:
        memory = np.zeros((last - first, 4))
        box = Box((first, 1), (last, 5))
        assert calls_of_add(reader.requests, [(0, box, memory)]) == last - first
        reader.read_boxes([(0, box, memory)])
        assert np.array_equal(memory, expected[first:last, 1:])


def test_small_tensors_that_are_joined_are_read_in_large_blocks(tmp_path):
    shardckpt.save(tmp_path / "c", {f"e.{i}": np.full(64, i, np.float32) for i in range(100)})
    checkpoint = shardckpt.open(tmp_path / "c")
    rules = parse_mapping({"map": [{"from": "e.{i}", "to": "all", "stack": 0}]}, "m")
    (output,) = rules.outputs({name: checkpoint.tensor(name) for name in checkpoint.names()})
    assert OutputReader(checkpoint, [output]).edges(0) == [0, 100 * 256]


def test_blocks_that_leave_the_cache_are_not_summed_up_again(tmp_path):
    shardckpt.save(tmp_path / "c", {f"w{i}": np.full(4, i, np.float32) for i in range(2400)})
    checkpoint = shardckpt.open(tmp_path / "c")
    outputs = [identity(checkpoint.tensor(name), name) for name in checkpoint.names()]
    reader = OutputReader(checkpoint, outputs, cache_bytes=32_000)
    memory = memoryview(bytearray(8))

    def read():
        for number in range(2400):
            reader.read_into([(number, 0, memory)])
            reader.read_into([(number, 8, memory)])

    assert steps(read) < 2400 * 300


def test_a_reader_that_is_dropped_frees_its_blocks_without_the_garbage_collector(tmp_path):
    shardckpt.save(tmp_path / "c", {"w": np.arange(1000.0)})
    checkpoint = shardckpt.open(tmp_path / "c")
    reader = OutputReader(checkpoint, [identity(checkpoint.tensor("w"), "w")])
    for start in (0, 80, 800):
        reader.read_into([(0, start, memoryview(bytearray(8)))])
    is_there = weakref.ref(reader)
    gc.disable()
    try:
        del reader
        assert is_there() is None
    finally:
        gc.enable()
