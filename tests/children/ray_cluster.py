"""A Ray cluster on the loopback interface: argv has the port of its client server, and how many
nodes do tasks.

What it is goes to stdout as JSON; it ends with stdin. The head does no tasks. Each other node is
one raylet with one CPU, which starts its workers. Its files are in $RAY_TMPDIR, whose name must be
short: sockets are among them.
"""

import json
import os
import sys
from pathlib import Path

from ray.cluster_utils import Cluster

port, nodes = int(sys.argv[1]), int(sys.argv[2])
Path(os.environ["RAY_TMPDIR"], "ray").mkdir()
common = {
    "node_ip_address": "127.0.0.1",
    "object_store_memory": 80 << 20,
    "include_dashboard": False,
}
cluster = Cluster(
    initialize_head=True, head_node_args={**common, "num_cpus": 0, "ray_client_server_port": port}
)
try:
    others = [cluster.add_node(num_cpus=1, memory=4 << 30, **common) for _ in range(nodes)]
    raylets = [node.all_processes["raylet"][0].process.pid for node in others]
    head = [
        started.process.pid
        for processes in cluster.head_node.all_processes.values()
        for started in processes
    ]
    print(json.dumps({"address": cluster.address, "raylets": raylets, "head": head}), flush=True)
    sys.stdin.read()
finally:
    cluster.shutdown()
