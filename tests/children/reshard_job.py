"""One call of `shardckpt.reshard` in a process of its own, to be interrupted: arguments as JSON, the report as JSON.

Besides the arguments of that, `patience`: for how many seconds a cluster may be without workers; and `call`, the name of another
function that takes the same.
"""

import json
import sys
from dataclasses import asdict

import shardckpt
from shardckpt.reshard import clusters
from shardckpt.reshard.rules import parse_mesh

arguments = json.loads(sys.argv[1])
clusters.WORKER_TIMEOUT = arguments.pop("patience", clusters.WORKER_TIMEOUT)
call = getattr(shardckpt, arguments.pop("call", "reshard"))
arguments["mesh"] = parse_mesh(arguments["mesh"])
if "worker" in arguments:
    arguments["worker"] = tuple(arguments["worker"])
print(json.dumps(asdict(call(**arguments))))
