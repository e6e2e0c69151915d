"""The three hosts that save together what is damaged afterwards; see tools/flip_bits.py."""

from pathlib import Path

import flip_bits
import golden_held  # noqa: F401  (what the state has parts of)


def save(coordinator, path, layout, compression, seed):
    world = coordinator.world
    state = flip_bits.state_of_host(seed, world.process, world.processes)
    flip_bits.save_in_small_files(
        Path(path), state, flip_bits.options(layout, compression), coordinator
    )
    return "saved"
