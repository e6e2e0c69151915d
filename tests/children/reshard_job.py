"""One call of `shardckpt.reshard` in a process of its own, to be interrupted: arguments as JSON,
the report as JSON.

Besides the arguments of that, `patience`: for how many seconds a cluster may be without workers;
`call`, the name of another function that takes the same; and `pause`: [reports, path], after how
many reports it gives out no more tasks until that file exists.
"""

import json
import sys
import time
from dataclasses import asdict
from itertools import count
from pathlib import Path

import shardckpt
from shardckpt.reshard import clusters
from shardckpt.reshard.rules import parse_mesh

arguments = json.loads(sys.argv[1])
clusters.WORKER_TIMEOUT = arguments.pop("patience", clusters.WORKER_TIMEOUT)
call = getattr(shardckpt, arguments.pop("call", "reshard"))
arguments["mesh"] = parse_mesh(arguments["mesh"])
if "worker" in arguments:
    arguments["worker"] = tuple(arguments["worker"])
if "pause" in arguments:
    reports, path = arguments.pop("pause")
    made = count()

    def pause(_done, _total):
        while next(made) >= reports and not Path(path).exists():
            time.sleep(0.01)

    arguments["progress"] = pause
print(json.dumps(asdict(call(**arguments))))
