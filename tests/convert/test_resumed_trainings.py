"""A training of another library goes on from its imported checkpoint: the next ten losses are those
of that library's own resume.

Lightning's trainings are in tests/training/integrations/test_lightning.py, whole programs in
test_migrating.py beside it.
"""

from __future__ import annotations

import json
import re
import shlex
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
import pytest
import torch
import torch.distributed.checkpoint as dcp
from paths import DOCS, GOLDEN
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn import functional
from typer.testing import CliRunner

import shardckpt
from shardckpt.cli.app import app

BEFORE, AFTER = 5, 10
"""Steps before the checkpoint, and after it."""
IN_ONE_PROCESS = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


# --- torch and DCP ---


class Training:
    """A model with buffers, an optimizer with several groups, and a schedule with integer keys."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        layers = (
            torch.nn.Linear(8, 16),
            torch.nn.BatchNorm1d(16),
            torch.nn.Tanh(),
            torch.nn.Linear(16, 1),
        )
        self.model = torch.nn.Sequential(*layers)
        groups = [
            {"params": layers[0].parameters()},
            {"params": [*layers[1].parameters(), *layers[3].parameters()], "lr": 0.02},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=0.05, amsgrad=True)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [3, 8, 11], 0.5)

    def losses(self, first: int, steps: int) -> list[float]:
        losses = []
        for step in range(first, first + steps):
            batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
            self.optimizer.zero_grad()
            loss = (self.model(batch) - batch.sum(1, keepdim=True)).square().mean()
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            losses.append(loss.item())
        return losses

    def state(self) -> dict[str, Any]:
        return {
            name: getattr(self, name).state_dict() for name in ("model", "optimizer", "scheduler")
        }

    def load(self, state: dict[str, Any]) -> None:
        for name in ("model", "optimizer", "scheduler"):
            getattr(self, name).load_state_dict(state[name])


def trained() -> Training:
    training = Training(0)
    training.losses(0, BEFORE)
    return training


def begun() -> Training:
    """A new training whose optimizer has state, so that its dicts have all names."""
    training = Training(1)
    training.losses(100, 1)
    return training


def saved_by_torch(training, place):
    torch.save(training.state(), place)
    resumed = Training(1)
    resumed.load(torch.load(place))
    return resumed


def saved_by_dcp(training, place):
    dcp.save(training.state(), checkpoint_id=place)
    resumed = begun()
    state = resumed.state()
    dcp.load(state, checkpoint_id=place)
    resumed.load(state)
    return resumed


def saved_by_dcp_with_its_state_dict(training, place):
    model, optimizer = get_state_dict(training.model, training.optimizer)
    dcp.save(
        {"model": model, "optimizer": optimizer, "scheduler": training.scheduler.state_dict()},
        checkpoint_id=place,
    )
    resumed = Training(1)
    model, optimizer = get_state_dict(resumed.model, resumed.optimizer)
    state = {"model": model, "optimizer": optimizer, "scheduler": resumed.scheduler.state_dict()}
    dcp.load(state, checkpoint_id=place)
    set_state_dict(
        resumed.model,
        resumed.optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    resumed.scheduler.load_state_dict(state["scheduler"])
    return resumed


@IN_ONE_PROCESS
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("saved", [saved_by_torch, saved_by_dcp])
def test_a_dict_of_state_dicts_goes_on_as_after_the_librarys_own_resume(tmp_path, saved, strict):
    whole = trained()
    expected = saved(whole, tmp_path / "old").losses(BEFORE, AFTER)
    shardckpt.import_checkpoint(tmp_path / "old", tmp_path / "new", trust_pickle=True)
    resumed = begun()
    resumed.load(shardckpt.restore(tmp_path / "new", resumed.state(), strict=strict))
    assert resumed.losses(BEFORE, AFTER) == expected == whole.losses(BEFORE, AFTER)


@IN_ONE_PROCESS
@pytest.mark.parametrize("saved", [saved_by_torch, saved_by_dcp, saved_by_dcp_with_its_state_dict])
def test_a_new_training_goes_on_as_after_the_librarys_own_resume(tmp_path, saved):
    whole = trained()
    expected = saved(whole, tmp_path / "old").losses(BEFORE, AFTER)
    shardckpt.import_checkpoint(tmp_path / "old", tmp_path / "new", trust_pickle=True)
    resumed = Training(1)
    parts = {"model": resumed.model, "optimizer": resumed.optimizer, "scheduler": resumed.scheduler}
    shardckpt.restore(tmp_path / "new", shardckpt.train_state(**parts, rng=False))
    assert resumed.losses(BEFORE, AFTER) == expected == whole.losses(BEFORE, AFTER)


# --- Orbax ---


class TrainState(NamedTuple):
    """A state of the kind that JAX programs have."""

    step: jax.Array
    params: Any
    opt_state: Any


def optimizers():
    labels = {"layers": {0: "slow", 1: "fast"}, "head": "slow"}
    return {
        "adamw": optax.adamw(1e-2),
        "chain": optax.chain(
            optax.clip_by_global_norm(1.0), optax.adamw(optax.cosine_decay_schedule(1e-2, 20))
        ),
        "masked": optax.masked(optax.adam(1e-2), {"layers": {0: True, 1: False}, "head": True}),
        "parts": optax.multi_transform({"slow": optax.sgd(1e-2), "fast": optax.adam(1e-2)}, labels),
        "steps": optax.MultiSteps(optax.adam(1e-2), 2),
        "injected": optax.inject_hyperparams(optax.adamw)(learning_rate=1e-2),
    }


def new_state(seed, optimizer):
    one, two, three = jax.random.split(jax.random.key(seed), 3)
    # Integer keys, as the lists of a flax nnx state have.
    params = {
        "layers": {0: jax.random.normal(one, (8, 8)), 1: jax.random.normal(two, (8, 8))},
        "head": jax.random.normal(three, (8,)),
    }
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params))


def losses_of(state, optimizer, steps):
    def loss_of(params, step):
        batch = jax.random.normal(jax.random.key(step), (4, 8))
        hidden = jnp.tanh(jnp.tanh(batch @ params["layers"][0]) @ params["layers"][1])
        return jnp.mean((hidden @ params["head"] - batch.sum(1)) ** 2)

    @jax.jit
    def one(state):
        loss, gradient = jax.value_and_grad(loss_of)(state.params, state.step)
        updates, opt_state = optimizer.update(gradient, state.opt_state, state.params)
        return TrainState(
            state.step + 1, optax.apply_updates(state.params, updates), opt_state
        ), loss

    losses = []
    for _ in range(steps):
        state, loss = one(state)
        losses.append(float(loss))
    return state, losses


@pytest.mark.long
@pytest.mark.parametrize("name", optimizers())
@pytest.mark.parametrize("strict", [True, False])
def test_a_state_of_optax_goes_on_as_after_orbaxs_own_resume(tmp_path, name, strict):
    optimizer = optimizers()[name]
    state, _ = losses_of(new_state(0, optimizer), optimizer, BEFORE)
    fresh = new_state(1, optimizer)
    with ocp.CheckpointManager(tmp_path / "old") as manager:
        manager.save(BEFORE, args=ocp.args.StandardSave(state))
        manager.wait_until_finished()
        expected = losses_of(
            manager.restore(BEFORE, args=ocp.args.StandardRestore(fresh)), optimizer, AFTER
        )[1]
    shardckpt.import_checkpoint(tmp_path / "old" / str(BEFORE), tmp_path / "run" / str(BEFORE))
    with shardckpt.CheckpointManager(tmp_path / "run") as manager:
        abstract = jax.eval_shape(lambda: fresh)
        resumed = manager.restore(abstract, strict=strict).state
    assert jax.tree.structure(resumed) == jax.tree.structure(state)
    assert (
        losses_of(resumed, optimizer, AFTER)[1] == expected == losses_of(state, optimizer, AFTER)[1]
    )


@pytest.mark.long
def test_several_items_of_orbax_go_on_as_one_state(tmp_path):
    optimizer = optimizers()["chain"]
    state, _ = losses_of(new_state(0, optimizer), optimizer, BEFORE)
    with ocp.CheckpointManager(tmp_path / "old") as manager:
        manager.save(
            BEFORE,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(state), loader=ocp.args.JsonSave({"epoch": 3})
            ),
        )
        manager.wait_until_finished()
    shardckpt.import_checkpoint(tmp_path / "old" / str(BEFORE), tmp_path / "new")
    like = {"state": new_state(1, optimizer), "loader": {"epoch": 0}}
    resumed = shardckpt.restore(tmp_path / "new", like)
    assert resumed["loader"] == {"epoch": 3}
    assert losses_of(resumed["state"], optimizer, AFTER)[1] == losses_of(state, optimizer, AFTER)[1]


# --- Megatron ---

HIDDEN, HEADS, LAYERS, VOCABULARY, LENGTH = 16, 2, 2, 32, 8
"""Sizes of the model of tools/megatron_training.py."""
LR, LAST = 0.02, 20
PAGE = (
    (DOCS / "import.md").read_text().partition("**Megatron-Core.**")[2].partition("**Orbax.**")[0]
)


class NormAndLinear(torch.nn.Linear):
    """A linear layer that normalizes its input, with the names of Megatron's keys."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__(before, after, bias=False)
        self.layer_norm_weight = torch.nn.Parameter(torch.ones(before))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return super().forward(
            functional.rms_norm(values, values.shape[-1:], self.layer_norm_weight, 1e-5)
        )


class Layer(torch.nn.Module):
    """A layer of a decoder, with the names of Megatron's keys."""

    def __init__(self) -> None:
        super().__init__()
        back = {"linear_proj": torch.nn.Linear(HIDDEN, HIDDEN, bias=False)}
        self.self_attention = torch.nn.ModuleDict(
            {"linear_qkv": NormAndLinear(HIDDEN, 3 * HIDDEN), **back}
        )
        back = {"linear_fc2": torch.nn.Linear(2 * HIDDEN, HIDDEN, bias=False)}
        self.mlp = torch.nn.ModuleDict({"linear_fc1": NormAndLinear(HIDDEN, 2 * HIDDEN), **back})

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        heads = (
            self.self_attention["linear_qkv"](values)
            .unflatten(-1, (HEADS, 3, HIDDEN // HEADS))
            .transpose(1, 2)
        )
        mixed = functional.scaled_dot_product_attention(*heads.unbind(3), is_causal=True)
        values = values + self.self_attention["linear_proj"](mixed.transpose(1, 2).flatten(2))
        return values + self.mlp["linear_fc2"](functional.gelu(self.mlp["linear_fc1"](values)))


class PlainGPT(torch.nn.Module):
    """The model that Megatron trained, in plain torch."""

    def __init__(self) -> None:
        super().__init__()
        embedding = {
            "word_embeddings": torch.nn.Embedding(VOCABULARY, HIDDEN),
            "position_embeddings": torch.nn.Embedding(LENGTH, HIDDEN),
        }
        self.embedding = torch.nn.ModuleDict(embedding)
        layers = torch.nn.ModuleList(Layer() for _ in range(LAYERS))
        self.decoder = torch.nn.ModuleDict(
            {"layers": layers, "final_layernorm": torch.nn.RMSNorm(HIDDEN, 1e-5)}
        )
        self.output_layer = torch.nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        values = (
            self.embedding["word_embeddings"](tokens) + self.embedding["position_embeddings"].weight
        )
        for layer in self.decoder["layers"]:
            values = layer(values)
        return self.output_layer(self.decoder["final_layernorm"](values))


def losses_of_plain_gpt(model, optimizer, done):
    for group in optimizer.param_groups:
        group["initial_lr"] = LR
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: 1 - step / LAST, last_epoch=done - 1
    )
    losses = []
    for step in range(done, done + AFTER):
        tokens = torch.randint(
            VOCABULARY, (4, LENGTH + 1), generator=torch.Generator().manual_seed(step % 2)
        )
        optimizer.zero_grad()
        loss = functional.cross_entropy(
            model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()
        )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return losses


@pytest.mark.long
def test_a_training_of_megatron_goes_on_in_plain_torch_as_after_its_own_resume(
    tmp_path, monkeypatch
):
    """Losses agree within the rounding of other sums: Megatron had two tensor-parallel ranks, and
    another release of torch."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "checkpoints").symlink_to(GOLDEN / "megatron_training")
    (mapping,), (command,), (program,) = (
        re.findall(rf"```{kind}\n(.*?)```", PAGE, re.DOTALL) for kind in ("toml", "bash", "python")
    )
    (tmp_path / "layers.toml").write_text(mapping)
    done = CliRunner().invoke(app, shlex.split(command)[1:])
    assert done.exit_code == 0, done.output

    model = PlainGPT()
    decayed = [[p for p in model.parameters() if (p.ndim > 1) is large] for large in (True, False)]
    groups = [
        {"params": parameters, "weight_decay": decay}
        for parameters, decay in zip(decayed, (0.1, 0.0), strict=True)
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR)
    names = {"shardckpt": shardckpt, "model": model, "optimizer": optimizer}
    exec(compile(program, "docs/import.md", "exec"), names)

    steps = names["common"]["opt_param_scheduler"]["num_steps"]
    expected = json.loads((GOLDEN / "megatron_training/losses.json").read_text())["after"]
    assert len(expected) == AFTER
    assert losses_of_plain_gpt(model, optimizer, steps) == pytest.approx(expected, rel=1e-5)
