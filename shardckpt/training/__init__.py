"""The whole state of a training: objects that know their own state, collected in one call and put back in another.

`state` has what users see, `TrainState` and `train_state`. How each kind of object is named and put back is in a module
by itself: `modules` (torch.nn.Module), `optimizers` (torch.optim.Optimizer), `generators` (random numbers), and
`likeness` for everything else. Nothing here writes or reads a checkpoint: `saving` and `restoring` ask for plain
containers, and import this package. It imports torch only for a program that has.
"""

from __future__ import annotations

from shardckpt.training.generators import Generators
from shardckpt.training.state import Stateful, TrainState, train_state

__all__ = ["Generators", "Stateful", "TrainState", "train_state"]
