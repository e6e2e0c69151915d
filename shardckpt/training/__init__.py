"""The training loop: when to save, which steps to keep, and where to resume.

The state of everything that trains belongs to it.

`manager` has the public `CheckpointManager`. Each of its tasks has its own file: `decisions` and
`timeline` (which steps are saved, on all processes alike), `preemption`, `steps`, `resuming` and
`cleaning`. `state` has `TrainState` and `train_state`; `modules`, `optimizers`, `generators` and
`likeness` name the state of each kind of object and restore it. `policies` and `retention` are pure
rules; `events`, `progress` and `metrics` report to users; `integrations` has the loops of other
libraries. `convert` and `cli` may import this package. A single checkpoint is saved and restored by
`writing` and `reading`, which do not know about steps. Begin reading with `manager`.
"""
