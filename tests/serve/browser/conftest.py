"""A service over runs with hostile names."""

import numpy as np
import pytest
from serving import serving

import shardckpt
from shardckpt import Mesh, PartitionSpec, SaveOptions, Sharding
from shardckpt.commit.pinning import pin, tag

EVIL = ["</script><img src=x onerror=alert(1)>", "\"'><svg onload=alert(2)>", "&lt;b&gt;\u202e{{7*7}}", "a" * 300, "\ud800"]


@pytest.fixture(scope="session")
def shown(tmp_path_factory):
    """A service over a run with metrics and steps in every state."""
    top = tmp_path_factory.mktemp("shown")
    rng = np.random.default_rng(0)
    shardings = {"model/w*": Sharding(Mesh((4, 2), ("data", "model")), PartitionSpec("data", "model"))}
    for step in range(100, 900, 100):
        state = {"model": {f"w{i}": rng.normal(size=(64, 32)).astype(np.float32) for i in range(3)}, "step": step}
        state["odd"] = {name: np.ones(3) for name in EVIL}
        metrics = {"loss": 300 / step, "</title><b>": step, "worst": "nan"}
        shardckpt.save(top / "llama" / str(step), state, options=SaveOptions(shardings=shardings, metadata={"metrics": metrics}))
    shardckpt.save(top / "<img src=x onerror=alert(5)>" / "1", {"w": np.ones(2)})
    pin(top / "llama" / "300")
    tag(top / "llama" / "200", "best")
    (top / "llama" / "500" / "checkpoint.json").write_text("{}")
    (top / "llama" / "800" / "checkpoint.json").unlink()
    with serving(("lab", top)) as service:
        yield service
