"""Checkpoints of Orbax. Begin with `tree`."""
