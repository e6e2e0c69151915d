"""The progress bar in a notebook: a real kernel runs cells, and what it displays is read from its
messages."""

from __future__ import annotations

import pytest
from jupyter_client.manager import start_new_kernel

CELL = """
import numpy as np, shardckpt
with shardckpt.CheckpointManager({root!r}, every=1) as manager:
    manager.save(1, {{"w": np.ones(4_000_000)}})
manager
"""


@pytest.fixture
def cell():
    """Runs a cell in a kernel of its own, and returns the contents of its messages by their
    kinds."""
    manager, client = start_new_kernel(kernel_name="python3")

    def run(code):
        messages = []
        reply = client.execute_interactive(code, timeout=250, output_hook=messages.append)
        assert reply["content"]["status"] == "ok", reply["content"]
        return [(message["msg_type"], message["content"]) for message in messages]

    yield run
    client.stop_channels()
    manager.shutdown_kernel(now=True)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_a_save_shows_a_bar_below_its_cell_and_removes_it(cell, tmp_path):
    messages = cell(CELL.format(root=str(tmp_path / "run")))
    shown = [
        content["data"]["text/html"]
        for kind, content in messages
        if kind in ("display_data", "update_display_data")
    ]
    assert any("saving step 1 <progress" in html for html in shown)
    assert shown[-1] == ""
    assert not any(kind == "stream" and content["name"] == "stderr" for kind, content in messages)
    (result,) = (
        content["data"]["text/plain"] for kind, content in messages if kind == "execute_result"
    )
    assert result.startswith("<shardckpt.CheckpointManager ")
