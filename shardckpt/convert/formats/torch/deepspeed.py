"""Recognises checkpoints of DeepSpeed, which are not imported, and says how to convert them.

    latest, zero_to_fp32.py
    global_step5/mp_rank_00_model_states.pt         modules; with ZeRO 3, one file per process
        bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt
                                                    one process's part of all parameters and
                                                    moments, as a flat array
    universal: zero/<parameter>/fp32.pt, exp_avg.pt, …  one parameter each

(DeepSpeed 0.19, runtime/engine.py and checkpoint/ds_to_universal.py.)
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from shardckpt.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardckpt.io.store import Store

_STATES = re.compile(r".*[_-](model|optim)_states\.pt")
_OF_ONE_PROCESS = re.compile(r"(\w+_)?zero_pp_rank_\d+_mp_rank_\d+_(model|optim)_states\.pt")
_TRIED = 3
"""Most directories of parameters in which files are looked for."""
_STEP = re.compile(r"global_step\d+(_universal)?/")
_JOIN = (
    "Join its weights with DeepSpeed's own script, which lies beside the file `latest`: `python "
    "zero_to_fp32.py <directory of latest> joined --safe_serialization`. Then import `joined`. "
    "That does not keep the optimizer's state; DeepSpeed's `ds_to_universal.py` does, with one "
    "file for each parameter and moment (docs/import.md). Without ZeRO, "
    "`mp_rank_00_model_states.pt` has the complete module: import it by its path."
)
_UNIVERSAL = (
    "It has one file of torch.save for each parameter (`zero/<name>/fp32.pt`, under the key "
    "'param') and for each of its moments. Join them into one file, as docs/import.md shows "
    "under DeepSpeed, and import that; or join the weights of the checkpoint that it was made "
    "from with DeepSpeed's `zero_to_fp32.py`."
)


def refuse_directory(store: Store, names: Sequence[str]) -> None:
    """Refuse a directory of a DeepSpeed checkpoint.

    Args:
        store: the directory.
        names: its children.

    Raises:
        FormatError: it is one; the message says how to convert it.
    """
    if "zero/" in names:
        parameters = [name for name in store.list_children("zero/") if name.endswith("/")]
        if any("fp32.pt" in store.list_children(f"zero/{name}") for name in parameters[:_TRIED]):
            raise FormatError(
                f"{store} is a universal checkpoint of DeepSpeed, which cannot be imported as it "
                f"is. {_UNIVERSAL}"
            )
    steps = [name for name in names if _STEP.fullmatch(name)]
    if steps and all(name.endswith("_universal/") for name in steps):
        raise FormatError(
            f"{store} has a universal checkpoint of DeepSpeed, which cannot be imported as it is. "
            f"{_UNIVERSAL}"
        )
    if steps or "zero_to_fp32.py" in names or any(_STATES.fullmatch(name) for name in names):
        raise FormatError(
            f"{store} is a checkpoint of DeepSpeed (ZeRO), which cannot be imported as it is. "
            f"{_JOIN}"
        )


def note_of_file(file: str) -> list[str]:
    """A note that a file is a part of a DeepSpeed checkpoint; empty if its name does not say so.

    Args:
        file: its path.

    Raises:
        FormatError: the file has no tensor as a whole; the message says how to convert the
            checkpoint.
    """
    name = file.rsplit("/", 1)[-1]
    if _OF_ONE_PROCESS.fullmatch(name):
        raise FormatError(
            f"{file} has one process's part of a checkpoint of DeepSpeed (ZeRO), and no complete "
            f"tensors. {_JOIN}"
        )
    return (
        [f"{name} is one file of a checkpoint of DeepSpeed; only it is read."]
        if _STATES.fullmatch(name)
        else []
    )
