"""Optimizers of a `train_state`, exported for torch and imported from it: real optimizers, FSDP2
and stages of a pipeline."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp
from processes import Processes
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from trained import groups, net, steps
from typer.testing import CliRunner

import shardckpt
from shardckpt import errors
from shardckpt.cli.app import app

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
FORMS = ("names", "numbers", "flat")
SCHEDULERS = {
    "LambdaLR": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "MultiStepLR": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [1, 4, 4, 5], 0.5),
    "SequentialLR": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [
            torch.optim.lr_scheduler.LinearLR(o, 0.1, 1, 3),
            torch.optim.lr_scheduler.ExponentialLR(o, 0.9),
        ],
        milestones=[2],
    ),
}


def made(scheduler="LambdaLR", *, order=1, kind=torch.optim.AdamW, **settings):
    model = net()
    optimizer = kind(groups(model, order=order), **{"lr": 0.01, "betas": (0.8, 0.99), **settings})
    return model, optimizer, SCHEDULERS[scheduler](optimizer)


def state_of(model, optimizer, scheduler, step=0):
    return shardckpt.train_state(
        model=model, optimizer=optimizer, scheduler=scheduler, step=step, rng=False
    )


def go_on(model, optimizer, scheduler):
    """Losses of three more steps, and the rates: any difference between two trainings would show in
    them."""
    return steps(model, optimizer, 3, 6, scheduler), sorted(
        group["lr"] for group in optimizer.param_groups
    )


@pytest.fixture(scope="module", params=SCHEDULERS)
def saved(request, tmp_path_factory):
    """A checkpoint of three steps, which no test changes, the kind of its scheduler, and how the
    training goes on."""
    run, checkpoint = made(request.param), tmp_path_factory.mktemp("saved") / "c"
    steps(*run[:2], 0, 3, run[2])
    shardckpt.save(checkpoint, state_of(*run, step=3))
    return checkpoint, request.param, go_on(*run)


def as_torch_has_it(model, optimizer, flat):
    return get_state_dict(
        model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=flat)
    )


@pytest.mark.parametrize("form", FORMS)
def test_torch_goes_on_bit_by_bit_with_an_exported_file(saved, tmp_path, form):
    checkpoint, scheduler, expected = saved
    shardckpt.export(
        checkpoint,
        tmp_path / "state.pt",
        to="torch",
        **({} if form == "names" else {"optimizer": form}),
    )
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    run = made(scheduler)
    if form == "numbers":
        run[0].load_state_dict(state["model"])
        run[1].load_state_dict(state["optimizer"])
    else:
        set_state_dict(
            *run[:2], model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
    run[2].load_state_dict(state["scheduler"])
    assert state["step"] == 3
    assert go_on(*run) == expected


@pytest.mark.long
@pytest.mark.parametrize("form", FORMS)
def test_torch_goes_on_bit_by_bit_with_an_exported_directory_of_dcp(saved, tmp_path, form):
    checkpoint, scheduler, expected = saved
    shardckpt.export(checkpoint, tmp_path / "dcp", to="dcp", optimizer=form)
    model, optimizer, schedule = made(scheduler)
    steps(model, optimizer, 8, 9, schedule)  # DCP fills what is there
    of_model, of_optimizer = as_torch_has_it(model, optimizer, form == "flat")
    state = {
        "model": of_model,
        "optimizer": optimizer.state_dict() if form == "numbers" else of_optimizer,
        "scheduler": schedule.state_dict(),
    }
    dcp.load(state, checkpoint_id=tmp_path / "dcp")
    if form == "numbers":
        optimizer.load_state_dict(state["optimizer"])
    else:
        options = StateDictOptions(flatten_optimizer_state_dict=form == "flat")
        set_state_dict(
            model,
            optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=options,
        )
    schedule.load_state_dict(state["scheduler"])
    assert go_on(model, optimizer, schedule) == expected


@pytest.mark.long
@pytest.mark.parametrize("to", ["torch", "dcp"])
@pytest.mark.parametrize(
    ("form", "order"),
    # Numbers are places in the optimizer.
    [("names", 1), ("names", -1), ("numbers", 1), ("flat", 1), ("flat", -1)],
    ids=[
        "names",
        "names, groups in another order",
        "numbers",
        "flat",
        "flat, groups in another order",
    ],
)
def test_a_training_goes_on_bit_by_bit_with_what_torch_saved(saved, tmp_path, form, order, to):
    checkpoint, scheduler, expected = saved
    run = made(scheduler)
    shardckpt.restore(checkpoint, state_of(*run))
    of_model, of_optimizer = as_torch_has_it(*run[:2], form == "flat")
    state = {
        "model": of_model,
        "optimizer": of_optimizer,
        "scheduler": run[2].state_dict(),
        "step": 3,
    }
    if form == "numbers":
        state["optimizer"] = run[1].state_dict()
    dcp.save(state, checkpoint_id=tmp_path / "saved") if to == "dcp" else torch.save(
        state, tmp_path / "saved"
    )
    shardckpt.import_checkpoint(
        tmp_path / "saved", tmp_path / "imported", trust_pickle=True, workers=1
    )
    fresh = made(scheduler, order=order)
    state = state_of(*fresh)
    shardckpt.restore(tmp_path / "imported", state)
    assert state.step == 3
    assert go_on(*fresh) == expected


def test_an_export_comes_back_as_it_was(saved, tmp_path):
    checkpoint, scheduler, expected = saved
    shardckpt.export(checkpoint, tmp_path / "dcp", to="dcp")
    shardckpt.import_checkpoint(tmp_path / "dcp", tmp_path / "again", trust_pickle=True, workers=1)
    run = made(scheduler, order=-1)
    shardckpt.restore(tmp_path / "again", state_of(*run))
    assert go_on(*run) == expected


@pytest.mark.long
def test_optimizers_of_several_modules_have_the_names_of_their_own(tmp_path):
    def pair():
        generator, critic = net(), net()
        return (
            generator,
            critic,
            torch.optim.Adam(generator.parameters(), lr=0.01),
            torch.optim.Adam(groups(critic), lr=0.02),
        )

    def of(generator, critic, generators, critics):
        return shardckpt.train_state(
            model=generator, optimizer=generators, critic=critic, critics=critics, rng=False
        )

    ours, fresh, back = pair(), pair(), pair()
    steps(ours[1], ours[3], 0, 2)
    steps(ours[0], ours[2], 0, 1)
    shardckpt.save(tmp_path / "c", of(*ours))
    shardckpt.export(tmp_path / "c", tmp_path / "state.pt", to="torch")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    set_state_dict(
        fresh[1], fresh[3], model_state_dict=state["critic"], optim_state_dict=state["critics"]
    )
    shardckpt.import_checkpoint(tmp_path / "state.pt", tmp_path / "again", workers=1)
    shardckpt.restore(tmp_path / "again", of(*back))
    expected = steps(ours[1], ours[3], 2, 4)
    assert steps(fresh[1], fresh[3], 2, 4) == expected
    assert steps(back[1], back[3], 2, 4) == expected
    assert steps(back[0], back[2], 1, 3) == steps(ours[0], ours[2], 1, 3)


def test_an_optimizer_alone_has_the_names_that_it_has_beside_its_module(tmp_path):
    policy = net()
    optimizer = torch.optim.Adam(policy.parameters())
    steps(policy, optimizer, 0, 1)
    state = shardckpt.train_state(policy=policy, optimizer=optimizer, rng=False)
    shardckpt.save(tmp_path / "c", state)
    shardckpt.export(tmp_path / "c", tmp_path / "a.pt", to="torch")
    shardckpt.export(tmp_path / "c", tmp_path / "b.pt", to="torch", include="optimizer/**")
    a, b = (torch.load(tmp_path / name, weights_only=True) for name in ("a.pt", "b.pt"))
    assert b.keys() == {"optimizer"}
    assert b["optimizer"]["state"].keys() == a["optimizer"]["state"].keys()
    assert set(b["optimizer"]["state"]) == {name for name, _ in policy.named_parameters()}


def test_settings_in_tensors_and_nested_settings_are_exported(tmp_path):
    run = made(lr=torch.tensor(0.01))
    steps(*run[:2], 0, 2)
    shardckpt.save(tmp_path / "c", state_of(*run))
    for form in FORMS:
        shardckpt.export(tmp_path / "c", tmp_path / f"{form}.pt", to="torch", optimizer=form)
    flat = torch.load(tmp_path / "flat.pt", weights_only=True)["optimizer"]
    assert flat["param_groups.first.weight.lr"] is flat["param_groups.last.weight.lr"]
    assert flat["param_groups.scale.betas"] == (0.8, 0.99)
    numbered = torch.load(tmp_path / "numbers.pt", weights_only=True)["optimizer"]
    assert [group["params"] for group in numbered["param_groups"]] == [
        group["params"] for group in run[1].state_dict()["param_groups"]
    ]
    assert torch.equal(numbered["param_groups"][0]["lr"], run[1].param_groups[0]["lr"])


def test_a_part_of_an_optimizer_is_exported_as_it_is_stored(saved, tmp_path):
    checkpoint, _, _ = saved
    report = shardckpt.export(
        checkpoint,
        tmp_path / "state.pt",
        to="torch",
        include="optimizer/state/**",
        optimizer="numbers",
    )
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    assert state["optimizer"]["state"].keys() == {name for name, _ in net().named_parameters()}
    (note,) = report.notes
    assert note.startswith("'optimizer' is written without optimizer/param_groups/")


def test_a_note_says_what_an_optimizer_in_another_form_lacks(saved, tmp_path):
    report = shardckpt.export(
        saved[0],
        tmp_path / "state.pt",
        to="torch",
        include="optimizer/**",
        exclude="optimizer/state/*/exp_avg",
        optimizer="numbers",
    )
    state = torch.load(tmp_path / "state.pt", weights_only=True)["optimizer"]
    assert {name for of in state["state"].values() for name in of} == {"step", "exp_avg_sq"}
    form, part = report.notes
    assert form.startswith("'optimizer' is written as Optimizer.load_state_dict loads it")
    assert part.startswith("'optimizer' is written without optimizer/state/")
    assert "exp_avg_sq" not in part


def test_the_command_writes_the_form_that_is_asked_for_and_says_so(saved, tmp_path):
    checkpoint, _, _ = saved
    result = CliRunner().invoke(
        app,
        [
            "export",
            str(checkpoint),
            str(tmp_path / "s.pt"),
            "--to",
            "torch",
            "--optimizer",
            "numbers",
        ],
    )
    assert result.exit_code == 0
    assert "by the numbers of parameters" in " ".join(result.stdout.split())
    assert set(torch.load(tmp_path / "s.pt", weights_only=True)["optimizer"]["state"]) == set(
        range(7)
    )
    with pytest.raises(
        errors.OptionError, match=r"optimizer='number': give 'names', 'numbers', 'flat'"
    ):
        shardckpt.export(checkpoint, tmp_path / "t.pt", to="torch", optimizer="number")
    with pytest.raises(errors.OptionError, match="is only for torch, dcp and orbax"):
        shardckpt.export(checkpoint, tmp_path / "t.safetensors", optimizer="numbers")


# --- several processes ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ranks():
    """Runs functions of `training_forms` in two ranks of a gloo job."""
    with Processes("training_forms", env={"PYTHONWARNINGS": "ignore"}) as processes:

        def run(function, *arguments):
            answers = processes.run(function, 2, *arguments, timeout=250)
            assert not [answer for answer in answers if isinstance(answer, dict)], answers
            return answers

        yield run


@pytest.mark.long
@pytest.mark.parametrize(
    "flat", [pytest.param(False, id="names"), pytest.param(True, id="flat", marks=pytest.mark.slow)]
)
def test_trainings_under_fsdp2_go_both_ways(ranks, tmp_path, flat):
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    expected = ranks("saves", "FSDP2", ours, theirs, flat)
    shardckpt.export(ours, tmp_path / "exported", to="dcp", optimizer="flat" if flat else "names")
    assert ranks("loads_export", "FSDP2", tmp_path / "exported", flat) == expected
    shardckpt.import_checkpoint(theirs, tmp_path / "imported", trust_pickle=True, workers=1)
    assert ranks("restores", "FSDP2", tmp_path / "imported") == expected


@pytest.mark.long
@pytest.mark.parametrize(
    "whole", [False, True], ids=["the same groups", "a group for each parameter"]
)
def test_stages_of_a_pipeline_with_groups_of_their_own_go_both_ways(ranks, tmp_path, whole):
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    expected = ranks("saves", "stages", ours, theirs, True)
    assert expected[0] != expected[1]
    shardckpt.export(ours, tmp_path / "exported", to="dcp", optimizer="flat")
    assert ranks("loads_export", "stages", tmp_path / "exported", True, whole) == expected
    shardckpt.import_checkpoint(theirs, tmp_path / "imported", trust_pickle=True, workers=1)
    assert ranks("restores", "stages", tmp_path / "imported", whole) == expected
