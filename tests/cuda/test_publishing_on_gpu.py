"""Versions of CUDA tensors on a real GPU. `make cuda` runs them; without a GPU they are skipped,
which is their purpose."""

from __future__ import annotations

import pytest
import torch

import shardckpt

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.timeout(300),
]

DEVICE = "cuda"
KINDS = ("float32", "bfloat16", "float8_e4m3fn", "float64", "int16", "bool")


def state():
    generator = torch.Generator(DEVICE).manual_seed(0)
    tensors = {
        name: torch.randint(0, 2, (700, 300), device=DEVICE, generator=generator).to(
            getattr(torch, name)
        )
        for name in KINDS
    }
    return {
        **tensors,
        "gaps": torch.randn(300, 700, device=DEVICE, generator=generator).t(),
        "small": torch.zeros(3, device=DEVICE),
    }


def change(tensors, step):
    """Change some elements in place, on the present stream."""
    for name, tensor in tensors.items():
        if name != "small":
            tensor[step * 7 : step * 7 + 5] = (
                tensor[step * 7 : step * 7 + 5].to(torch.float32) == 0
            ).to(tensor.dtype)


def bits(tensor):
    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("snapshot", ["device", "host"])
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_each_version_has_the_elements_at_its_publish_and_is_followed_and_proved(
    tmp_path, snapshot, dtype
):
    tensors, expected = state(), []
    with shardckpt.Publisher(
        tmp_path, snapshot=snapshot, dtype=dtype, anchor_every=4, keep=None
    ) as publisher:
        for step in range(6):
            change(tensors, step)
            cast = {
                name: t.bfloat16()
                if dtype and name in ("float32", "float64", "gaps", "small")
                else t.clone()
                for name, t in tensors.items()
            }
            expected.append({name: bits(tensor) for name, tensor in cast.items()})
            publisher.publish(step, tensors)
            change(tensors, step + 40)  # training goes on
            publisher.wait()
    like = {
        name: torch.empty_like(tensor, memory_format=torch.contiguous_format)
        for name, tensor in cast.items()
    }
    with shardckpt.follow(tmp_path, like, mode="each") as follower:
        for step, elements in enumerate(expected):
            version = follower.poll().prepare()
            version.apply()
            assert (version.step, set(version.prove())) == (step, {*like})
            assert all(torch.equal(bits(like[name]), elements[name]) for name in like), step
    stored = [shardckpt.open(tmp_path / str(step)).record for step in range(6)]
    assert [record.compression == "difference" for record in stored] == [
        step not in (0, 4) for step in range(6)
    ]
