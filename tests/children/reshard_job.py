"""One call of `shardckpt.reshard` in a process of its own, to be interrupted: arguments as JSON, the report as JSON."""

import json
import sys
from dataclasses import asdict

import shardckpt
from shardckpt.rules import parse_mesh

arguments = json.loads(sys.argv[1])
print(json.dumps(asdict(shardckpt.reshard(**{**arguments, "mesh": parse_mesh(arguments["mesh"])}))))
