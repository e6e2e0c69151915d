"""Versions of a publisher, applied by ModelExpress: its stock receiver, which reads from S3."""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np
import pytest

import shardckpt

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),  # of ModelExpress and what it imports
    pytest.mark.skipif(
        find_spec("modelexpress_rl") is None,
        reason="ModelExpress is in the environment of vLLM: run `make vllm`",
    ),
]
STEPS = [7, 8, 20, 21, 22]


@pytest.fixture
def s3(monkeypatch):
    """A bucket on a server of moto."""
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    endpoint = "http://{}:{}".format(*server.get_host_and_port())
    for name, value in {
        "ACCESS_KEY_ID": "a",
        "SECRET_ACCESS_KEY": "b",
        "DEFAULT_REGION": "us-east-1",
        "ENDPOINT_URL": endpoint,
    }.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    boto3.client("s3", endpoint_url=endpoint).create_bucket(Bucket="deltas")
    yield endpoint
    server.stop()


def published(url, seed=0):
    """The states of all steps."""
    rng, states = np.random.default_rng(seed), {}
    model = {
        f"layers.{i}.weight": rng.standard_normal((64, 48)).astype(np.float32) for i in range(4)
    }
    with shardckpt.Publisher(url, dtype="bfloat16") as publisher:
        for step in STEPS:
            name = f"layers.{step % 4}.weight"
            if step != 21:  # a version without any difference
                model[name] = model[name] + (rng.random((64, 48)) < 0.02).astype(np.float32)
            publisher.publish(step, {"model": dict(model)})
            publisher.wait()
            states[step] = shardckpt.restore(f"{url}/{step}")["model"]
    return states


def receiver(cache, seed, endpoint):
    from modelexpress_rl import ObjectStorageGeneratorConfig, ObjectStorageType
    from modelexpress_rl.inference.methods import CanonicalDeltaUpdateMethod

    config = ObjectStorageGeneratorConfig(
        storage_type=ObjectStorageType.S3,
        initial_base_version_id="000000",
        seed_checkpoint_path=seed,
        refit_checkpoint_dir=cache,
        endpoint_url=endpoint,
        region_name="us-east-1",
    )
    return CanonicalDeltaUpdateMethod(model_name="m", config=config)


def delta(number, url):
    """A version of ModelExpress, and where it is."""
    from modelexpress_rl import (
        ObjectStorageSource,
        ObjectStorageType,
        WeightPayloadFormat,
        WeightVersion,
        WeightVersionState,
    )
    from modelexpress_rl.inference.plan import ObjectStorageUpdateSource

    kind = WeightPayloadFormat.XOR_DELTA
    place = ObjectStorageSource(
        ObjectStorageType.S3, f"{url}/weight_v{number:06d}/model.safetensors.index.json"
    )
    version = WeightVersion(
        f"{number:06d}", "m", kind, f"{number - 1:06d}", place, (), "", WeightVersionState.READY, 0
    )
    return version, ObjectStorageUpdateSource(place, kind)


def held(prepared):
    """The tensors of a checkpoint that ModelExpress has made."""
    (file,) = prepared.checkpoint.path.glob("*.safetensors")
    checkpoint = shardckpt.open(file)
    return {name: checkpoint.read(name) for name in checkpoint.names()}


def same(tensors, state):
    return tensors.keys() == state.keys() and all(
        tensors[name].tobytes() == state[name].tobytes() for name in state
    )


def test_modelexpress_applies_each_version_and_a_chain_of_versions(tmp_path, s3):
    states = published(tmp_path / "policy")
    url, named = "s3://deltas/run", {"include": "model/**", "strip_prefix": "model."}
    report = shardckpt.export(tmp_path / "policy", url, to="canonical-delta", since=7, **named)
    assert len(report.files) == len(STEPS)
    seed = tmp_path / "seed"
    shardckpt.export_safetensors(tmp_path / "policy/7", seed, **named)

    one = receiver(tmp_path / "cache", seed, s3)
    for number, step in enumerate(STEPS[1:], 1):
        version, source = delta(number, url)
        prepared = one.prepare(version=version, source=source)
        assert same(held(prepared), states[step]), step
        with one.installation_context(prepared):
            pass
        one.release(prepared)
    one.close()

    late = receiver(tmp_path / "late", seed, s3)
    assert same(
        held(late.prepare_chain(tuple(delta(number, url) for number in range(1, len(STEPS))))),
        states[STEPS[-1]],
    )
    late.close()


def test_modelexpress_refuses_a_receiver_that_started_from_other_bytes(tmp_path, s3):
    published(tmp_path / "policy")
    published(tmp_path / "other", seed=1)
    url, named = "s3://deltas/refused", {"include": "model/**", "strip_prefix": "model."}
    shardckpt.export(tmp_path / "policy", url, to="canonical-delta", since=7, **named)
    shardckpt.export_safetensors(tmp_path / "other/7", tmp_path / "seed", **named)
    one = receiver(tmp_path / "cache", tmp_path / "seed", s3)
    with pytest.raises(RuntimeError, match="canonical target checksum differs"):
        one.prepare(version=delta(1, url)[0], source=delta(1, url)[1])
    one.close()
