"""Libraries that know nothing of shardckpt read a training's checkpoint, over a web server and from
a bucket."""

from __future__ import annotations

from contextlib import contextmanager

import fsspec
import pytest
import torch
import zarr
from emulators import environment
from safetensors.torch import load
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from web_server import web_server

import shardckpt

MODEL = {"include": "model/**", "strip_prefix": "model/"}


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            vocab_size=96,
        )
    ).eval()


def save(url, model):
    metadata = {"config.json": model.config.to_diff_dict()}
    shardckpt.save(
        url,
        {"model": model.state_dict(), "step": 7},
        options=shardckpt.SaveOptions(metadata=metadata),
    )


@contextmanager
def web(model, tmp_path, _):
    save(tmp_path / "run", model)
    with web_server(tmp_path) as server:
        yield f"{server.url}/run"


@contextmanager
def bucket(model, _, gcs_server):
    with environment(gcs_server.env()):
        url = gcs_server.url("stock")
        save(url, model)
        yield url


@pytest.mark.parametrize("place", [web, bucket])
def test_stock_clients_read_it(place, model, tmp_path, gcs_server):
    with place(model, tmp_path, gcs_server) as url:
        read = load(shardckpt.safetensors_view(url, **MODEL).read())
        assert read.keys() == model.state_dict().keys()
        assert all(torch.equal(read[name], tensor) for name, tensor in model.state_dict().items())
        with fsspec.open(f"shardckpt://model.safetensors::{url}", shardckpt=MODEL) as file:
            assert load(file.read()).keys() == read.keys()
        head = zarr.open_group(f"shardckpt://zarr::{url}", mode="r")["model/lm_head.weight"]
        assert torch.equal(torch.from_numpy(head[8:16]), model.lm_head.weight[8:16])
        loaded = shardckpt.from_pretrained(AutoModelForCausalLM, url, **MODEL)
        tokens = torch.arange(12)[None]
        with torch.no_grad():
            assert torch.equal(loaded(tokens).logits, model(tokens).logits)
