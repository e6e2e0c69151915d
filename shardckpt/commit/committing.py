"""The documented path of `commit`, a function of `shardckpt.runs.committing`."""

from shardckpt.runs.committing import Outcome, commit

__all__ = ["Outcome", "commit"]
