"""Saves at each url that it is told, from several threads at once, each thread a value of its own.

    python fault_saver.py <first value> <threads>

Writes a line when it is ready, and then one for each url that it reads: a JSON list of `saved` or
the error's class.
"""

import json
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np

import shardckpt


def save_value(url, value):
    try:
        shardckpt.save(url, {"w": np.full(1000, value)})
    except shardckpt.ShardckptError as e:
        return type(e).__name__
    return "saved"


def main():
    first, threads = map(int, sys.argv[1:])
    # Work that is done once in a process is done now, not in the race.
    save_value(f"memory://{first}", first)
    with ThreadPoolExecutor(threads) as pool:
        print("ready", flush=True)
        for line in sys.stdin:
            print(
                json.dumps(
                    list(
                        pool.map(
                            save_value, [line.strip()] * threads, range(first, first + threads)
                        )
                    )
                ),
                flush=True,
            )


if __name__ == "__main__":
    main()
