"""Help of the commands: examples, plain metavars, and hints for names that other tools have."""

from __future__ import annotations

EXAMPLES: dict[str, tuple[str, ...]] = {
    "ls": ("shardckpt ls runs", "shardckpt ls -a gs://bucket/run"),
    "info": (
        "shardckpt info run/100",
        "shardckpt info run/100 model/embed",
        "shardckpt info model.safetensors --depth 2",
    ),
    "verify": ("shardckpt verify run/100",),
    "diff": ("shardckpt diff run/100 run/200", "shardckpt diff run/100 exported/ --structure"),
    "stats": ("shardckpt stats run/100 --only '**/bias'", "shardckpt stats run/100 run/200"),
    "fingerprint": ("shardckpt fingerprint run/100",),
    "plan": ("shardckpt plan run/100 --mesh fsdp=4,tp=2 --preset llama/fsdp+tp",),
    "reshard": (
        "shardckpt reshard run/100 run-tp4 --mesh tp=4 --rule '**/weight=(tp)'",
        "shardckpt reshard run/100 half --dtype bfloat16",
    ),
    "export": (
        "shardckpt export run/100 model.safetensors --include 'model/**'",
        "shardckpt export run/100 state.pt --to torch",
        "shardckpt export policy out --to canonical-delta --since 42 --follow",
    ),
    "import": (
        "shardckpt import hf/llama run/0 --into model",
        "shardckpt import dcp/step-10 run/10 --trust-pickle",
    ),
    "commit": ("shardckpt commit run",),
    "gc": ("shardckpt gc run --dry-run", "shardckpt gc run --grace 2h"),
    "rm": ("shardckpt rm run/100",),
    "fold": ("shardckpt fold gs://bucket/policy",),
    "pin": ("shardckpt pin run/100",),
    "unpin": ("shardckpt unpin run/100",),
    "tag": ("shardckpt tag best run/100",),
    "untag": ("shardckpt untag best run/100",),
    "doctor": ("shardckpt doctor s3://bucket/run",),
    "serve": (
        "shardckpt serve lab=/data/runs",
        "shardckpt serve lab=gs://bucket/runs --token-file tokens --state state",
    ),
    "token": ("shardckpt token ann --token-file tokens --scope operate",),
    "jobs": ("shardckpt jobs --server https://HOST:8470 --state running",),
    "start": (
        "shardckpt job start verify checkpoint=lab/run-7/100 --wait --server https://HOST:8470",
    ),
    "show": ("shardckpt job show 7 --server https://HOST:8470",),
    "wait": ("shardckpt job wait 7 --timeout 30min --server https://HOST:8470",),
    "cancel": ("shardckpt job cancel 7 --server https://HOST:8470",),
}
"""Command → examples of its use."""

_RESTORE = (
    "shardckpt.restore(URL, like=…) in Python restores a state; `shardckpt export` writes files "
    "that other libraries load"
)
_COPY = (
    "`shardckpt reshard SRC DST` copies a checkpoint, also between storages, and compares what "
    "it wrote"
)
HINTS = {
    "cp": _COPY,
    "copy": _COPY,
    "mv": f"{_COPY}; `shardckpt rm` deletes the old one",
    "restore": _RESTORE,
    "load": _RESTORE,
    "save": "shardckpt.save(URL, state) in Python saves a state; `shardckpt import` takes over "
    "checkpoints of other formats",
    "convert": "`shardckpt import` reads other formats, `shardckpt export` writes them, `shardckpt "
    "reshard` changes dtypes",
    "list": "`shardckpt ls` lists checkpoints",
    "show": "`shardckpt info` shows a checkpoint",
    "inspect": "`shardckpt info` shows a checkpoint, `shardckpt stats` its values",
    "cat": "`shardckpt info URL NAME` shows a tensor; shardckpt.open(URL)[NAME][:] in Python reads "
    "it",
    "delete": "`shardckpt rm` deletes a checkpoint",
    "check": "`shardckpt verify` compares checksums",
    "compare": "`shardckpt diff` compares two checkpoints",
}
"""Names that are not commands → what to use."""


def server_first(args: list[str]) -> list[str]:
    """The arguments with `--server URL` before the command, wherever it was given.

    Without a URL they are `--server` alone, so that the error is that it lacks one.
    """
    end = args.index("--") if "--" in args else len(args)
    moved: list[str] = []
    left: list[str] = []
    i = 0
    while i < end:
        if args[i] == "--server" and (i + 1 == end or args[i + 1].startswith("-")):
            return ["--server"]
        if args[i] == "--server":
            moved += args[i : i + 2]
            i += 2
            continue
        (moved if args[i].startswith("--server=") else left).append(args[i])
        i += 1
    return [*moved, *left, *args[end:]]
