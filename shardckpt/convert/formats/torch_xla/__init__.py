"""Directories of torch_xla's `CheckpointManager`."""
