"""Make the pictures of README.md and the site from real runs: `make pictures`.

A training is killed and started again, and its checkpoints are looked at, in terminals that become
SVG files. The pages of a service over these checkpoints become PNG files, by Chromium. Each picture
is made for light and dark, into docs/pictures.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console
from rich.terminal_theme import DEFAULT_TERMINAL_THEME, TerminalTheme
from rich.text import Text

import shardckpt
from shardckpt import Mesh, PartitionSpec, SaveOptions, Sharding
from shardckpt.runs.pinning import tag

if TYPE_CHECKING:
    from collections.abc import Iterator

TARGET = Path(__file__).parent.parent / "docs" / "pictures"
WIDTH = 96
"""Columns of a terminal."""
DARK = TerminalTheme(
    (24, 29, 37),
    (220, 226, 234),
    [
        (24, 29, 37),
        (240, 113, 120),
        (125, 207, 143),
        (230, 192, 110),
        (112, 170, 245),
        (198, 146, 234),
        (100, 200, 210),
        (220, 226, 234),
    ],
    [
        (120, 130, 142),
        (255, 139, 146),
        (150, 225, 165),
        (245, 210, 130),
        (140, 190, 255),
        (215, 170, 245),
        (130, 220, 230),
        (250,) * 3,
    ],
)
THEMES = {"light": DEFAULT_TERMINAL_THEME, "dark": DARK}
SCHEMES = {"light": 1, "dark": 0}
"""Blink's numbers of preferred colour schemes."""
WINDOW = {"run": (1000, 700), "tensor": (1000, 820)}
PAGES = {
    "run": "/ui/run/lab/llama",
    "tensor": "/ui/tensor/lab/llama/900?name=model/layers.0.attention.weight&values=1",
}
COMMANDS = {
    "info": "shardckpt info runs/llama/900",
    "plan": (
        "shardckpt plan runs/llama/900 llama-tp8 --mesh model=8 "
        "--rule 'model/*weight=(model)' | head -18"
    ),
}
TRAINING = """
import sys, time
import torch, shardckpt
torch.manual_seed(0)
model = torch.nn.Linear(64, 32)
optimizer = torch.optim.AdamW(model.parameters())
state = shardckpt.train_state(model=model, optimizer=optimizer, step=0)
with shardckpt.CheckpointManager("run", every=1, keep=3) as mgr:
    mgr.restore(state)
    print("continues after step", state.step) if state.step else print("starts")
    for step in range(state.step + 1, 7):
        loss = model(torch.randn(16, 64)).square().mean()
        loss.backward(); optimizer.step(); optimizer.zero_grad()
        state.step = step
        mgr.save(step, state)
        mgr.wait()
        print(f"step {step}: loss {loss:.3f}, saved", flush=True)
        if step == int(sys.argv[1]): time.sleep(600)
"""


def main() -> None:
    """Make all pictures."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    if browser is None:
        sys.exit("The pictures of pages need Chromium; install the package chromium.")
    TARGET.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        (place / "train.py").write_text(TRAINING)
        write_terminal(
            "resume",
            [
                ("python train.py", killed(place)),
                ("python train.py", output(place, sys.executable, "train.py", "0")),
            ],
        )
        save_run(place / "runs" / "llama")
        for name, command in COMMANDS.items():
            shown = output(
                place,
                "bash",
                "-c",
                command.replace("shardckpt", f"{sys.executable} -m shardckpt", 1),
            )
            write_terminal(name, [(command, shown.replace(f"{place}/", "/data/"))])
        with served(place / "runs") as url:
            for page, at in PAGES.items():
                for theme in THEMES:
                    take(browser, url + at, page, theme)


def output(place: Path, *command: str) -> str:
    """Output of a program that has a terminal with colours."""
    env = os.environ | {
        "FORCE_COLOR": "1",
        "COLUMNS": str(WIDTH),
        "PYTHONPATH": str(Path(__file__).parent.parent),
    }
    return subprocess.run(
        command, cwd=place, env=env, stdout=subprocess.PIPE, text=True, check=True
    ).stdout


def killed(place: Path) -> str:
    """Output of the training, which is killed after its third save."""
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent)}
    lines = []
    with subprocess.Popen(
        [sys.executable, "train.py", "3"], cwd=place, env=env, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if line.startswith("step 3"):
                process.send_signal(signal.SIGKILL)
    return "".join(lines) + "Killed\n"


def write_terminal(name: str, commands: list[tuple[str, str]]) -> None:
    """Write a picture of commands and their output."""
    with Path(os.devnull).open("w") as nowhere:
        console = Console(
            record=True, width=WIDTH, file=nowhere, force_terminal=True, color_system="truecolor"
        )
        for command, text in commands:
            console.print(Text.assemble(("$ ", "bold green"), (command, "bold")))
            console.print(Text.from_ansi(text.rstrip()), soft_wrap=False)
        for theme, colors in THEMES.items():
            svg = console.export_svg(
                title="", theme=colors, clear=False, unique_id=name, font_aspect_ratio=0.61
            )
            # Nothing is loaded from other hosts.
            svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)
            svg = svg.replace("Fira Code, monospace", "ui-monospace, Menlo, Consolas, monospace")
            (TARGET / f"{name}-{theme}.svg").write_text(
                re.sub(r"[ \t]+$", "", svg, flags=re.MULTILINE).strip() + "\n"
            )


def save_run(run: Path) -> None:
    """Save a run of a small model, whose loss falls, from eight devices."""
    mesh = Mesh((4, 2), ("data", "model"))
    shardings = {"model/*weight": Sharding(mesh, PartitionSpec("data", "model"))}
    rng = np.random.default_rng(0)
    layers = {
        f"layers.{i}.{part}.weight": rng.normal(size=(256, 256)).astype(np.float32)
        for i in range(8)
        for part in ("attention", "mlp")
    }
    for step in range(100, 1300, 100):
        metrics = {"loss": 2.0 + 3 * 0.8 ** (step / 100) + 0.08 * rng.random()}
        options = SaveOptions(shardings=shardings, metadata={"metrics": metrics})
        state = {
            "model": layers | {"embed.weight": rng.normal(size=(1024, 256)).astype(np.float32)},
            "step": step,
        }
        shardckpt.save(run / str(step), state, options=options)
    tag(run / "900", "best")


@contextmanager
def served(runs: Path) -> Iterator[str]:
    """The url of a service over runs."""
    command = [sys.executable, "-m", "shardckpt", "serve", f"lab={runs}", "--port", "0"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().split()[-1]
            time.sleep(5)  # of the first scan
            yield url
        finally:
            process.kill()


def take(browser: str, url: str, name: str, theme: str) -> None:
    """Write a picture of a page."""
    width, height = WINDOW[name]
    flags = [
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        f"--window-size={width},{height}",
    ]
    flags += [
        f"--blink-settings=preferredColorScheme={SCHEMES[theme]}",
        f"--screenshot={TARGET / f'{name}-{theme}.png'}",
    ]
    subprocess.run(
        [browser, *flags, url],
        check=True,
        timeout=120,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


if __name__ == "__main__":
    main()
