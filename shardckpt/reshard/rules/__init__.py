"""Rules that give every tensor a layout.

They are patterns over names, presets of model families, and other checkpoints' layouts.

Pure: names, shapes and a mesh in, layouts and the reasons for them out. Files are read by `files`
and `hf_config` alone. `rules` has the public class, `rule`, `preset` and `like` its entries,
`decisions` applies them, and `explain` shows why. Begin with `rules`.
"""

from shardckpt.reshard.rules.decisions import Decision
from shardckpt.reshard.rules.mesh_text import parse_mesh
from shardckpt.reshard.rules.rule import Rule
from shardckpt.reshard.rules.rules import Rules

__all__ = ["Decision", "Rule", "Rules", "parse_mesh"]
