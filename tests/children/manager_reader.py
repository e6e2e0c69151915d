"""Opens a checkpoint, says so, and reads it when told to go on; says what it got."""

import sys

import shardckpt

checkpoint = shardckpt.open(sys.argv[1])
print("open", flush=True)
sys.stdin.readline()
try:
    print(float(checkpoint.read("w")[0]))
except shardckpt.ShardckptError as e:
    print(f"{type(e).__name__}: {e}")
