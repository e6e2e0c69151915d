"""Start Python programs as forks of a process that has imported torch.

This takes milliseconds instead of seconds.

`Forked` is a `subprocess.Popen`: the program is a child of this process, with a pid, signals and an
exit status of its own. It is for programs whose subject is not the start of Python, an import, or
how much memory a process has. What a fork cannot do as a new interpreter does starts one: another
interpreter or option, or another value of a variable that is read as libraries are loaded.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import types
import warnings
from functools import cache
from pathlib import Path
from typing import Any

PRELOADED = (
    "functorch.compile",
    "numpy",
    "scipy.optimize",
    "tensorstore",
    "torch",
    "torch._dynamo",
    "torch._inductor.fx_passes.post_grad",
    "torch._inductor.lowering",
    "torch.distributed.checkpoint",
    "torch.distributed.device_mesh",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.distributed.tensor.parallel",
)
"""Modules that take most of the time to import torch and torch_xla; not jax and torch_xla, by which
shardckpt decides."""

_AT_LOADING = (
    "CUDA",
    "GLIBC_",
    "GOMP_",
    "KMP_",
    "LD_",
    "MALLOC_",
    "MKL_",
    "OMP_",
    "OPENBLAS_",
    "PYTHON",
    "PYTORCH_",
    "TORCH",
)
_IN_TIME = ("PYTHONWARNINGS", "PYTORCH_NVML_BASED_CUDA_CHECK", "TORCHINDUCTOR_CACHE_DIR")
"""Of these, what takes effect later. Libraries set the last two in the process that imports or uses
them."""

_TORCH = re.compile(r"^\s*(import|from) (torch|torch_xla|transformers)\b", re.MULTILINE)
_SET_CHILD_SUBREAPER = 36
_LONGEST = 1 << 22


def _at_loading(environment: dict[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(_AT_LOADING) and name not in _IN_TIME
    }


class ForkServer:
    """The process that is forked."""

    def __init__(self) -> None:
        self.environment, self._lock, self._owner = dict(os.environ), threading.Lock(), os.getpid()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())], pass_fds=[theirs.fileno()]
            )
        atexit.register(self.close)

    def close(self) -> None:
        """End it; programs that it has started go on."""
        if os.getpid() == self._owner:  # and not a fork of that process
            self._socket.shutdown(socket.SHUT_RDWR)
            self._socket.close()
            self._process.wait()

    def start(self, request: dict[str, Any], streams: list[int]) -> int:
        """The pid of a new child of this process."""
        # A message that is passed with descriptors has a bounded length; what follows has none.
        body, (ours, theirs) = json.dumps(request).encode(), socket.socketpair()
        with self._lock, ours, theirs:
            ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            try:
                socket.send_fds(self._socket, [b"start"], [theirs.fileno(), *streams])
                theirs.close()
                ours.sendall(body)
                ours.shutdown(socket.SHUT_WR)
                answer = ours.recv(100)
            finally:
                ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        if not answer:
            raise RuntimeError(
                "the fork server started no program; what it wrote to stderr says why"
            )
        return int(answer)


@cache
def server() -> ForkServer:
    """The one of this process, which starts with the first program."""
    return ForkServer()


class Forked(subprocess.Popen[Any]):
    """A Python program, as `subprocess.Popen` starts it.

    Its arguments are `[sys.executable, "-W", …, script, argument, …]`.
    """

    def _execute_child(
        self,
        args: Any,
        executable: Any,
        preexec_fn: Any,
        close_fds: Any,
        pass_fds: Any,
        cwd: Any,
        env: Any,
        *others: Any,
    ) -> None:
        _startup, _creation, shell, *streams, _restore, gid, gids, uid, umask, session, group = (
            others
        )
        own = (
            executable is None
            and preexec_fn is None
            and not (pass_fds or shell or isinstance(args, (str, bytes)))
        )
        own = own and (gid, gids, uid, umask, group) == (None, None, None, -1, -1)
        environment = dict(os.environ if env is None else env)
        request = _request([os.fspath(one) for one in args], cwd, environment) if own else None
        if request is None or _at_loading(environment) != _at_loading(server().environment):
            super()._execute_child(
                args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *others
            )  # type: ignore[misc]
            return
        ends = enumerate((streams[0], streams[3], streams[5]))
        self.pid = server().start(
            request | {"session": session}, [number if end == -1 else end for number, end in ends]
        )
        self._child_created = True
        self._close_pipe_fds(*streams)  # type: ignore[attr-defined]


def run(
    command: Any,
    *,
    timeout: float,
    input: str | None = None,  # noqa: A002  (its name in subprocess)
    check: bool = False,
    capture_output: bool = False,
    **options: Any,
) -> subprocess.CompletedProcess[Any]:
    """As `subprocess.run` does it."""
    if input is not None:
        options["stdin"] = subprocess.PIPE
    if capture_output:
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with Forked(command, **options) as process:
        try:
            out, err = process.communicate(input, timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(process.args, process.returncode, out, err)
    if check:
        done.check_returncode()
    return done


def _request(args: list[str], cwd: Any, environment: dict[str, str]) -> dict[str, Any] | None:
    """Arguments and surroundings of the program, or None if it takes a new interpreter."""
    python, *rest = args
    options = []
    while len(rest) > 1 and rest[0] == "-W":
        options.append(rest[1])
        del rest[:2]
    if (
        python != sys.executable
        or not rest
        or not rest[0].endswith(".py")
        or not any(map(_imports_torch, rest))
    ):
        return None
    directory = Path(os.curdir if cwd is None else cwd).absolute()
    return {
        "argv": rest,
        "warnings": options,
        "directory": str(directory),
        "environment": environment,
    }


@cache
def _imports_torch(argument: str) -> bool:
    """Whether it is a module that imports torch, or what imports it."""
    return argument.endswith(".py") and _TORCH.search(Path(argument).read_text()) is not None


def _serve(connection: socket.socket) -> None:
    """Fork for each request; returns in the fork, as the program that was asked for."""
    while True:
        message, descriptors, *_ = socket.recv_fds(connection, 16, 4)
        if not message:
            sys.exit()
        with socket.socket(fileno=descriptors[0]) as own:
            middle = os.fork()
            if middle == 0:
                middle = os.getpid()
                if os.fork():
                    os._exit(0)
                while os.getppid() == middle:  # until it is a child of the process that asked
                    time.sleep(0.0002)
                connection.close()
                _become(own, descriptors[1:])
                return
            for one in descriptors[1:]:
                os.close(one)
            os.waitpid(middle, 0)


def _become(own: socket.socket, streams: list[int]) -> None:
    """Be as a new interpreter is before its program begins."""
    for number, one in enumerate(streams):
        os.dup2(one, number)
    for one in streams:
        if one > 2:
            os.close(one)
    body = b""
    while part := own.recv(_LONGEST):
        body += part
    request = json.loads(body)
    if request["session"]:
        os.setsid()
    own.sendall(str(os.getpid()).encode())
    own.close()
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["directory"])
    sys.argv[:] = request["argv"]
    sys.orig_argv[:] = [sys.executable, *request["argv"]]
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    sys.warnoptions[:] = [
        *filter(None, os.environ.get("PYTHONWARNINGS", "").split(",")),
        *request["warnings"],
    ]
    warnings._processoptions(sys.warnoptions)  # type: ignore[attr-defined]


def _run() -> None:
    """Run the program as `__main__`."""
    main = types.ModuleType("__main__")
    main.__file__, main.__builtins__ = sys.argv[0], __builtins__  # type: ignore[attr-defined]
    sys.modules["__main__"] = main
    exec(compile(Path(sys.argv[0]).read_bytes(), sys.argv[0], "exec"), main.__dict__)


if __name__ == "__main__":
    # The process that has started this one ends it.
    interrupts = signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in PRELOADED:
        importlib.import_module(name)
    gc.freeze()
    with socket.socket(fileno=int(sys.argv[1])) as listening:
        _serve(listening)
    signal.signal(signal.SIGINT, interrupts)
    _run()
