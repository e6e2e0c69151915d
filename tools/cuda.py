"""Run tests/cuda and `tools.bench --cuda` on this machine's GPU.

They use the Python that runs this, which has torch.

    python3 tools/cuda.py [--tests | --bench] [arguments of the bench]
    python3 tools/cuda.py --cores [arguments of the bench]  `tools.bench --cores` instead, which
                                                            needs no GPU

Packages that this Python lacks come from .cuda-wheels/ (`tools/cuda_wheels.py`); nothing is
installed, and no network is used.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import zipfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).parents[1]
WHEELS, PACKAGES = ROOT / ".cuda-wheels", ROOT / "build" / "cuda-packages"


def unpacked() -> list[str]:
    """Unpack the wheels of distributions that are not installed; their names."""
    names = []
    for wheel in sorted(WHEELS.glob("*.whl")):
        name = wheel.name.split("-")[0]
        try:
            version(name)
        except PackageNotFoundError:
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(PACKAGES)
            names.append(name)
    return names


def main() -> int:
    """Run both; 1 if one fails, or if there is no GPU."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tests", action="store_true", help="the tests alone")
    parser.add_argument("--bench", action="store_true", help="the bench alone")
    parser.add_argument("--cores", action="store_true", help="the bench on all cores instead")
    asked, of_bench = parser.parse_known_args()
    try:
        import torch
    except ImportError:
        print(f"{sys.executable} has no torch; run this with one that has torch for CUDA")
        return 1
    if not asked.cores and not torch.cuda.is_available():
        print(f"torch {torch.__version__} finds no GPU here; tests/cuda needs one")
        return 1
    if names := unpacked():
        print(f"from {WHEELS.name}: {', '.join(names)}")
    # These packages are installed nowhere else, so their place in the path does not matter.
    # Fixtures of other tests need more packages.
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(
            filter(None, [str(ROOT), str(PACKAGES), os.environ.get("PYTHONPATH")])
        ),
    }
    commands = [[sys.executable, "-m", "tools.bench", "--cores", *of_bench]] if asked.cores else []
    if not asked.bench and not asked.cores:
        commands.append(
            [
                sys.executable,
                "-m",
                "pytest",
                "--noconftest",
                "-W",
                "default",
                "-p",
                "no:cacheprovider",
                "-rs",
                "tests/cuda",
            ]
        )
    if not asked.tests and not asked.cores:
        commands.append([sys.executable, "-m", "tools.bench", "--cuda", *of_bench])
    return max(
        subprocess.run(command, cwd=ROOT, env=env, check=False).returncode for command in commands
    )


if __name__ == "__main__":
    sys.exit(main())
