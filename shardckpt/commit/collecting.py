"""The documented path of `collect` and `delete`, functions of `shardckpt.runs.collecting`."""

from shardckpt.runs.collecting import collect, delete

__all__ = ["collect", "delete"]
