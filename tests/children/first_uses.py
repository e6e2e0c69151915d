"""First uses of names in several threads at once. Prints the errors.

Arguments: a delay between the threads, and what each does; or a directory, for a first save beside
first restores.
"""

import subprocess
import sys
import threading
import time

import shardckpt

OLD, NEW = "old", "new"


def use(statement, start, seconds):
    start.wait()
    time.sleep(seconds)
    try:
        exec(statement, {"shardckpt": shardckpt})
    except BaseException as e:
        print(statement, type(e).__name__, e)


def use_all(statements, delay):
    start = threading.Barrier(len(statements))
    threads = [
        threading.Thread(target=use, args=(what, start, i * delay))
        for i, what in enumerate(statements)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def save_beside_restores(place):
    import numpy as np

    state = {"w": np.ones((300, 300), np.float32)}
    shardckpt.save(f"{place}/{OLD}", state, options=shardckpt.SaveOptions(compression="zstd"))
    restore = f"shardckpt.restore('{place}/{OLD}')"
    for i in range(6):
        save = (
            f"import numpy; shardckpt.save('{place}/{NEW}{i}', {{'w': numpy.ones((300, 300), "
            "'float32')})"
        )
        program = [sys.executable, __file__, "1", save, restore, restore, restore]
        print(subprocess.run(program, stdout=subprocess.PIPE, text=True, check=True).stdout, end="")


if len(sys.argv) > 2:
    use_all(sys.argv[2:], int(sys.argv[1]) * 0.02)
else:
    save_beside_restores(sys.argv[1])
