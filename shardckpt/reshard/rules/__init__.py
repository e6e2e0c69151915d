"""Which layout should every tensor get? Ordered patterns over names, families of models, another checkpoint's layout.

Pure: names, shapes and a mesh in, layouts and the reasons for them out. Files are read by `files` and `hf_config` alone.
"""

from shardckpt.reshard.rules.decision import Decision
from shardckpt.reshard.rules.mesh_text import parse_mesh
from shardckpt.reshard.rules.rule import Rule
from shardckpt.reshard.rules.rules import Rules

__all__ = ["Decision", "Rule", "Rules", "parse_mesh"]
