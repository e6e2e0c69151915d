"""Time of `shardckpt plan` for a model of 405 billion parameters, from the record alone.

The plan goes from 16,384 devices to 4,096.

1. The record is that of all 1,137 parameters as 2,048 hosts of 8 devices would have saved them:
   made from shapes and layouts by the code that a save uses, without any elements. It is written as
   JSON and read back, as `plan` does.
2. The reshard is planned, everything that `plan` shows is counted for 512 hosts of 8 devices, and
   the page of it is drawn.
"""

from __future__ import annotations

import time
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from shardckpt import Mesh, Sharding
from shardckpt.format.documents import seal
from shardckpt.format.record import parse_checkpoint
from shardckpt.format.structure import Structure
from shardckpt.io.url import parse
from shardckpt.layout.dtypes import by_name
from shardckpt.plan.chunks import smallest_chunk
from shardckpt.reshard.forecast.document import document
from shardckpt.reshard.forecast.forecast import forecast
from shardckpt.reshard.forecast.rates import Rate, Rates
from shardckpt.reshard.options import ReshardOptions
from shardckpt.reshard.plan import plan_reshard
from shardckpt.reshard.rules import Rules
from shardckpt.serve.pages.plan import page
from shardckpt.state import flatten
from shardckpt.writing.tensor_storage import tensor_record
from tools.scale.host import commit_record
from tools.scale.layouts import DEVICES_PER_HOST, spec_of
from tools.scale.trees import TREES

if TYPE_CHECKING:
    from collections.abc import Callable

PARAMETERS = 1137
SOURCE = Mesh((16, 128, 8), ("data", "fsdp", "tensor"))
TARGET = Mesh((8, 64, 8), ("data", "fsdp", "tensor"))
RULES = ["**norm.weight=replicated", "**[ov]_proj.weight=(fsdp,tensor)", "**=(tensor,fsdp)"]
"""Not those of the source for all tensors: `v_proj` is laid out the other way round, and so is
`down_proj`."""


def prepared(html: str | None = None) -> Callable[[], dict[str, Any]]:
    """Make the record; what is measured is planning, with everything that `shardckpt plan` shows.

    Args:
        html: a file for the page; None: it is drawn and thrown away.
    """
    state = TREES["405B"].tensors(PARAMETERS)
    smallest = smallest_chunk(sum(prod(t.shape) * by_name(t.dtype).storage.itemsize for t in state))
    tensors = {
        t.name: tensor_record(
            t.name, t.shape, by_name(t.dtype), Sharding(SOURCE, spec_of("FSDP+TP", t)), smallest
        )
        for t in state
    }
    tree = flatten(dict.fromkeys(tensors, 0), lambda leaf: leaf == 0).tree
    data = seal(commit_record(Structure(tree, tensors), SOURCE.size // DEVICES_PER_HOST).to_json())

    def run() -> dict[str, Any]:
        started = time.process_time()
        known = parse_checkpoint(data, "checkpoint.json")
        read = time.process_time()
        source: Any = SimpleNamespace(
            record=known, native=True, location=parse("gs://bucket/llama-405b/step_100000")
        )
        options = ReshardOptions(mesh=TARGET, rules=Rules.parse(RULES))
        reshard = plan_reshard(source, options)
        planned = time.process_time()
        prediction = forecast(
            source,
            reshard,
            Rates(Rate(2 << 30), Rate(1 << 30)),
            options=options,
            devices_per_host=DEVICES_PER_HOST,
        )
        doc = document(prediction)
        counted = time.process_time()
        text = page(prediction, doc)
        drawn = time.process_time()
        if html is not None:
            Path(html).write_text(text, "utf-8")
        return {
            "tensors": len(tensors),
            "chunks": sum(t.num_chunks for t in tensors.values()),
            "record bytes": len(data),
            "seconds to read the record": read - started,
            "seconds to plan the reshard": planned - read,
            "seconds to count everything": counted - planned,
            "seconds to draw the page": drawn - counted,
            "page bytes": len(text.encode()),
            "restore amplification": doc["restore"]["amplification"],
            "reshard amplification": doc["reshard"]["amplification"],
        }

    return run


MEASURED = {"reshard": prepared}
