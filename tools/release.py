"""The release, tried as users get it: `make release`.

1. A wheel and an sdist are built into dist/, and a wheel from the sdist: both wheels hold the same
   files, the C extension of this platform too. Without the extension a wheel for every platform is
   built.
2. The wheel is installed into an empty environment with the core dependencies alone: `import
   shardckpt` takes at most 0.1 s, `shardckpt --help` at most 0.4 s (the quickest of nine runs), and
   `python -m shardckpt` and shell completion work.
3. For each extra an environment with that extra alone: its feature is used (`FEATURES`).

    python tools/release.py                  everything
    python tools/release.py --extra s3 …     these extras only
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
import zipfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from emulators import azure_emulator, child_server, gcs_emulator, s3_emulator

if TYPE_CHECKING:
    from collections.abc import Mapping

ROOT = Path(__file__).parents[1]
UV = Path(sys.executable).with_name("uv")
IMPORT_S, HELP_S = 0.1, 0.4

SAVE = (
    "import numpy as np, shardckpt; shardckpt.save({url}, {{'w': np.arange(8.0)}}); assert "
    "shardckpt.restore({url})['w'][7] == 7"
)
"""A round trip with the core alone; `{url}` is a Python expression."""
HERE = "'checkpoint'"
BUCKET = "__import__('os').environ['PLACE']"
TORCH = """
import torch, shardckpt
model = torch.nn.Linear(4, 2)
state = shardckpt.train_state(model=model, step=0)
with shardckpt.CheckpointManager("run", every=1) as manager:
    manager.save(1, state)
assert shardckpt.open("run/1")["model/weight"].shape == (2, 4)
"""
FEATURES = {
    "torch": TORCH,
    "xla": """
import numpy as np, torch, torch_xla, shardckpt
import torch_xla.distributed.spmd as xs, torch_xla.runtime as xr
xr.use_spmd()
mesh = xs.Mesh(np.arange(8), (8,), ("data",))
weight = torch.arange(16.0).to(torch_xla.device())
xs.mark_sharding(weight, mesh, ("data",))
shardckpt.save("checkpoint", {"w": weight})
assert shardckpt.restore("checkpoint", {"w": torch.zeros(16)})["w"][15] == 15
""",
    "jax": """
import jax, shardckpt
shardckpt.save("checkpoint", {"w": jax.numpy.arange(8.0)})
assert shardckpt.restore("checkpoint", {"w": jax.ShapeDtypeStruct((8,), "float32")})["w"][7] == 7
""",
    "gcs": SAVE.format(url=BUCKET),
    "s3": SAVE.format(url=BUCKET),
    "azure": SAVE.format(url=BUCKET),
    "http": "import os, shardckpt; assert shardckpt.restore(os.environ['PLACE'])['w'][7] == 7",
    "fsspec": f"""
{SAVE.format(url=HERE)}
import fsspec
with fsspec.open("shardckpt://checkpoint/model.safetensors") as file:
    assert file.read()[-8:] == np.float64(7).tobytes()
""",
    "convert": """
import os, msgpack, numpy as np, shardckpt
array = np.arange(8.0)
packed = msgpack.packb([array.shape, "float64", array.tobytes()])
os.mkdir("orbax")
with open("orbax/checkpoint", "wb") as file:
    file.write(msgpack.packb({"w": msgpack.ExtType(1, packed)}))
assert shardckpt.open("orbax")["w"][7] == 7
""",
    "metrics": """
import numpy as np, shardckpt
from prometheus_client import CollectorRegistry, generate_latest
from shardckpt.training.metrics import Prometheus
registry = CollectorRegistry()
with shardckpt.CheckpointManager("run", every=1, on_event=Prometheus(registry)) as manager:
    manager.save(1, {"w": np.ones(8)})
assert b"shardckpt" in generate_latest(registry)
""",
    "hf": """
import shardckpt, transformers
from shardckpt.training.integrations.hf_trainer import ShardckptCallback
config = transformers.LlamaConfig(
    hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=32
)
model = transformers.LlamaForCausalLM(config)
model.save_pretrained("model")
shardckpt.import_checkpoint("model", "checkpoint")
again = shardckpt.from_pretrained(transformers.LlamaForCausalLM, "checkpoint")
assert (again.lm_head.weight == model.lm_head.weight).all()
ShardckptCallback("run")
""",
    "lightning": f"""
{TORCH}
import lightning
from shardckpt.training.integrations.lightning import ShardckptIO
lightning.Trainer(plugins=[ShardckptIO()], logger=False, accelerator="cpu")
""",
    "ray": f"""
{SAVE.format(url=HERE)}
import os, ray
ray.init(address="local", num_cpus=2, include_dashboard=False)
shardckpt.reshard(
    os.path.abspath("checkpoint"),
    os.path.abspath("other"),
    mesh=shardckpt.Mesh((2,), ("model",)),
    engine="ray://auto",
)
assert shardckpt.restore("other")["w"][7] == 7
""",
    "dask": f"""
if __name__ == "__main__":  # workers import this file
    {SAVE.format(url=HERE)}
    import os
    from distributed import LocalCluster
    with LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address=None) as cluster:
        engine = cluster.scheduler_address.replace("tcp", "dask")
        shardckpt.reshard(
            os.path.abspath("checkpoint"),
            os.path.abspath("other"),
            mesh=shardckpt.Mesh((2,), ("model",)),
            engine=engine,
        )
    assert shardckpt.restore("other")["w"][7] == 7
""",
    "serve": f"""
{SAVE.format(url="'runs/run/1'")}
import subprocess, sys, time
command = [sys.executable, "-u", "-m", "shardckpt", "serve", "lab=runs", "--port", "0"]
with subprocess.Popen(
    command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
) as service:
    url = next(word for line in service.stdout for word in line.split() if word.startswith("http://"))
    deadline = time.monotonic() + 30
    while not (found := list(shardckpt.Client(url).checkpoints())) and time.monotonic() < deadline:
        time.sleep(0.2)
    service.terminate()
assert found, "the service lists no checkpoint"
""",
}
"""Extra → a program that uses its feature, in an environment with nothing else."""


def main() -> int:
    """Build, install and use; 1 if anything failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--extra", action="append", choices=sorted(FEATURES), help="only these; may be repeated"
    )
    chosen = parser.parse_args().extra or list(FEATURES)
    declared = set(
        tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    ) - {"all"}
    assert declared == set(FEATURES), (
        f"extras without a feature here, or the reverse: {declared ^ set(FEATURES)}"
    )
    wheel = built()
    failed = []
    with tempfile.TemporaryDirectory(prefix="release-") as scratch, ExitStack() as servers:
        folder = Path(scratch)
        python = environment(folder / "core", str(wheel))
        core(python, folder)
        for extra in chosen:
            began = time.monotonic()
            python = environment(folder / extra, f"{wheel}[{extra}]")
            done = run(
                [python, program(folder / extra, FEATURES[extra])],
                folder / extra,
                variables(extra, servers, folder),
            )
            print(
                f"{extra:10} {'ok' if done.returncode == 0 else 'FAILED'}, "
                f"{time.monotonic() - began:.0f} s",
                flush=True,
            )
            if done.returncode:
                failed.append(extra)
                print(done.stderr[-3000:])
            shutil.rmtree(folder / extra)
    return 1 if failed else 0


def built() -> Path:
    """The wheel in dist/, after the sdist's own wheel was compared with it."""
    dist = ROOT / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    # The sdist, and the wheel from it.
    subprocess.run([UV, "build", "--quiet", "--out-dir", dist, ROOT], check=True)
    (sdist,), (wheel,) = dist.glob("*.tar.gz"), dist.glob("*.whl")
    with tempfile.TemporaryDirectory() as scratch:
        subprocess.run([UV, "build", "--quiet", "--wheel", "--out-dir", scratch, ROOT], check=True)
        (direct,) = Path(scratch).glob("*.whl")
        assert zipfile.ZipFile(direct).namelist() == zipfile.ZipFile(wheel).namelist()
        assert "-cp311-abi3-" in wheel.name, "a release has the extension; is there no C compiler?"
        without = Path(scratch) / "without"
        command = [UV, "build", "--quiet", "--wheel", "--out-dir", without, ROOT]
        subprocess.run(command, check=True, env=os.environ | {"SHARDCKPT_NO_EXTENSION": "1"})
        assert [
            path.name.partition("-")[2].partition("-")[2] for path in without.glob("*.whl")
        ] == ["py3-none-any.whl"]
    print(
        f"{wheel.name}: {wheel.stat().st_size / 1e6:.2f} MB, {sdist.name}: "
        f"{sdist.stat().st_size / 1e6:.2f} MB"
    )
    return wheel


def environment(place: Path, requirement: str) -> Path:
    """The Python of a new environment with this requirement."""
    subprocess.run([UV, "venv", "--quiet", "--python", sys.executable, place], check=True)
    python = place / "bin" / "python"
    constraints = ["--constraint", str(ROOT / "constraints.txt")]
    subprocess.run(
        [
            UV,
            "pip",
            "install",
            "--quiet",
            "--compile-bytecode",
            "--python",
            python,
            *constraints,
            requirement,
        ],
        check=True,
    )
    return python


def core(python: Path, folder: Path) -> None:
    """Use what the core dependencies give, and time what every user waits for."""
    shardckpt = python.with_name("shardckpt")
    imports = quickest_s([python, "-c", "import shardckpt"]) - quickest_s([python, "-c", "pass"])
    helps = quickest_s([shardckpt, "--help"])
    print(
        f"core: import {imports:.3f} s (at most {IMPORT_S}), --help {helps:.3f} s (at most "
        f"{HELP_S})"
    )
    assert imports <= IMPORT_S
    assert helps <= HELP_S
    assert "with its C extension" in run([shardckpt, "--version"], folder, {}).stdout
    for command in (
        [python, program(folder / "core", SAVE.format(url=HERE))],
        [python, "-m", "shardckpt", "verify", "checkpoint"],
        [shardckpt, "reshard", "checkpoint", "other", "--mesh", "model=2"],
        [shardckpt, "diff", "checkpoint", "other"],
    ):
        run(command, folder, {}).check_returncode()
    completed = run(
        [shardckpt],
        folder,
        {"_SHARDCKPT_COMPLETE": "complete_bash", "COMP_WORDS": "shardckpt ver", "COMP_CWORD": "1"},
    )
    assert "verify" in completed.stdout, completed


def quickest_s(command: list[str | Path]) -> float:
    """Seconds that a command takes: the least of nine runs, as the machine may be busy."""
    times = []
    for _ in range(9):
        began = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        times.append(time.perf_counter() - began)
    return min(times)


def program(place: Path, text: str) -> Path:
    """A file with the program, in a directory of its own.

    So no file beside it can be imported in place of a library.
    """
    path = place / "program.py"
    path.write_text(text)
    return path


def variables(extra: str, servers: ExitStack, folder: Path) -> Mapping[str, str]:
    """The environment variables that an extra's program needs.

    Starts the server that it talks to.
    """
    emulators = {"gcs": gcs_emulator, "s3": s3_emulator, "azure": azure_emulator}
    if extra in emulators:
        emulator = servers.enter_context(emulators[extra]())
        return emulator.env() | {"PLACE": emulator.url("checkpoint")}
    # The service of the environment that runs this, over the checkpoint of `core`.
    if extra == "http":
        command = [sys.executable, "-m", "shardckpt", "serve", f"lab={folder}", "--port"]
        port = servers.enter_context(child_server(lambda port: [*command, str(port)]))
        return {"PLACE": f"http://127.0.0.1:{port}/raw/lab/checkpoint"}
    return {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "8"} if extra == "xla" else {}


def run(
    command: list[str | Path], folder: Path, more: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    """A command in a directory, with these variables."""
    return subprocess.run(
        command,
        cwd=folder,
        env=os.environ | more,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


if __name__ == "__main__":
    sys.exit(main())
