"""Gather the wheels that `make cuda` needs on a machine that has torch for CUDA.

Such a machine has neither other packages nor a network.

    python3 tools/cuda_wheels.py [--python 3.12] [--platform x86_64]

They go to .cuda-wheels/, which travels with the repository. torch is not among them.
`tools/cuda.py` unpacks those that are missing there.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

WHEELS = Path(__file__).parents[1] / ".cuda-wheels"
MOST_BYTES = 64 << 20
PACKAGES = (
    *("numpy", "ml_dtypes", "tensorstore", "numcodecs", "crc32c", "typing_extensions"),
    *("pytest", "pytest-timeout", "iniconfig", "pluggy", "packaging", "pygments"),
    "safetensors",  # a peer in the bench
)


def main() -> int:
    """Gather them; 1 if one is missing, or if they are too large."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--python", default="3.12", help="version of Python there; by default 3.12")
    parser.add_argument("--platform", default="x86_64", help="machine there, such as aarch64")
    asked = parser.parse_args()
    shutil.rmtree(WHEELS, ignore_errors=True)
    kinds = [
        f"--platform={kind}_{asked.platform}"
        for kind in ("manylinux_2_28", "manylinux_2_17", "manylinux2014")
    ]
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--only-binary=:all:",
        f"--python-version={asked.python}",
    ]
    failed = subprocess.run(
        [*command, *kinds, f"--dest={WHEELS}", *PACKAGES], check=False
    ).returncode
    size = sum(wheel.stat().st_size for wheel in WHEELS.glob("*.whl"))
    print(
        f"{len([*WHEELS.glob('*.whl')])} wheels, {size / (1 << 20):.1f} MiB of at most "
        f"{MOST_BYTES >> 20}"
    )
    return 1 if failed or size > MOST_BYTES else 0


if __name__ == "__main__":
    sys.exit(main())
