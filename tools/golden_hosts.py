"""The three hosts that save a golden checkpoint together, for tools/make_golden.py."""

import golden_held  # noqa: F401  (what the state has parts of)
import make_golden
import torch  # noqa: F401  (which the state has leaves of)

import shardckpt


def save(coordinator, path, layout, compression):
    make_golden.make_small()
    state = make_golden.job_state(coordinator.world.process)
    shardckpt.save(
        path, state, options=make_golden.job_options(layout, compression), coordinator=coordinator
    )
    return "saved"


def save_local(coordinator, path):
    process = coordinator.world.process
    rows = make_golden.elements(f"rows {process}", "int8", (3 + process, 4))
    more = {
        "q": rows,
        "kept": make_golden.elements("kept", "float32", (9,)),
        "nested": {"n": process, "only": {process: "x"}},
    }
    state = shardckpt.train_state(rng=False, step=7, local=["q", "nested/*"], **more)
    shardckpt.save(path, state, coordinator=coordinator)
    return "saved"


def save_axis(coordinator, path):
    position = coordinator.world.process // 2
    read = shardckpt.PerProcess(
        {"at": 10 * position, "seen": make_golden.elements(f"seen {position}", "int16", (3,))},
        axis=(position, 2),
    )
    state = {
        "loader": read,
        "rng": shardckpt.PerProcess(coordinator.world.process),
        "w": make_golden.elements("w", "float32", (9,)),
    }
    shardckpt.save(path, state, coordinator=coordinator)
    return "saved"
