"""The build of the C extension: hatchling's hook, and a program that builds it beside its source.

A wheel with the extension is for CPython 3.11 and later on the platform that built it
(`cp311-abi3`). Without a C compiler, or for an interpreter without the interpreter lock, a wheel
for every platform is built instead; Python then does the extension's work.

    python tools/build_extension.py  shardckpt/io/_moving.abi3.so
    python tools/build_extension.py --sanitize build/sanitized
                                     a build with AddressSanitizer and UBSan, in that folder
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # run as a program
    BuildHookInterface = object  # type: ignore[assignment,misc]

ROOT = Path(__file__).parents[1]
SOURCES = ("moving_binding.c", "moving.c", "changes.c")
NAME = "_moving.abi3.so"
FLAGS = (
    "-std=gnu11",
    "-O2",
    "-Wall",
    "-Wextra",
    "-fPIC",
    "-fvisibility=hidden",
    "-D_FILE_OFFSET_BITS=64",
)
SANITIZERS = (
    "-g",
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=undefined",
    "-fno-omit-frame-pointer",
)


class ExtensionHook(BuildHookInterface):  # type: ignore[misc]
    """Adds the extension to wheels and to editable installations."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build it before the wheel's files are collected."""
        self.scratch = tempfile.TemporaryDirectory(prefix="shardckpt-")
        root = Path(self.root)
        built = build(
            root, root / "shardckpt" / "io" if version == "editable" else Path(self.scratch.name)
        )
        if built is None:
            return
        if version != "editable":
            build_data["force_include"][str(built)] = f"shardckpt/io/{NAME}"
        build_data["pure_python"] = False
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"cp311-abi3-{platform}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what is not needed any more."""
        del version, build_data, artifact_path
        self.scratch.cleanup()


def build(root: Path, folder: Path, more: tuple[str, ...] = ()) -> Path | None:
    """Compile the extension into a folder.

    None, and a line on stderr, if that cannot be done here.
    """
    why = _obstacle()
    if why is None:
        folder.mkdir(parents=True, exist_ok=True)
        compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")[0]
        draft = folder / f"{NAME}.{os.getpid()}"  # another process may have loaded the old one
        includes = [f"-I{sysconfig.get_path(name)}" for name in ("include", "platinclude")]
        source = root / "shardckpt" / "io" / SOURCES[0]
        try:
            subprocess.run(
                [compiler, *FLAGS, *more, *includes, "-shared", source, "-o", draft], check=True
            )
            return draft.replace(folder / NAME)
        except (OSError, subprocess.CalledProcessError) as e:
            why = f"{compiler} did not compile {source} ({e})"
        finally:
            draft.unlink(missing_ok=True)
    print(
        f"shardckpt is installed without its C extension: {why}. Python does its work, more "
        "slowly.",
        file=sys.stderr,
    )
    return None


def _obstacle() -> str | None:
    """The reason for which no extension is built for this interpreter; None if there is none."""
    if os.environ.get("SHARDCKPT_NO_EXTENSION"):
        return "SHARDCKPT_NO_EXTENSION is set"
    if sys.implementation.name != "cpython" or sysconfig.get_config_var("Py_GIL_DISABLED"):
        return "this interpreter has no stable binary interface with a lock"
    return (
        None if sys.platform.startswith("linux") else f"it is for Linux, and this is {sys.platform}"
    )


def main() -> int:
    """Build it beside its source, or elsewhere with sanitizers."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--sanitize", type=Path, metavar="FOLDER", help="build with sanitizers, in that folder"
    )
    folder = parser.parse_args().sanitize
    built = (
        build(ROOT, ROOT / "shardckpt" / "io")
        if folder is None
        else build(ROOT, folder, SANITIZERS)
    )
    print(built)
    return 1 if built is None else 0


if __name__ == "__main__":
    sys.exit(main())
