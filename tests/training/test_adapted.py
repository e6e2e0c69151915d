"""Trainings that go on in other models: renamed, with another vocabulary, with experts joined or
split. Losses are those of the same surgery by hand, on torch's own state dicts.
"""

from __future__ import annotations

import pytest
import torch
from adapted import EXPERTS, STACK, VOCABULARY, Run
from ranks import asked
from torch import nn

import shardckpt
from shardckpt import errors


def padded(tensor, rows):
    return (
        torch.cat([tensor, torch.zeros(rows - len(tensor), *tensor.shape[1:])])
        if rows > len(tensor)
        else tensor[:rows].clone()
    )


def renamed(name):
    return name.replace("tokens.", "embed.")


def expert(name, number=0):
    return f"{name}.{number}.weight" if name.endswith("experts") else name


EXCHANGE = "".join(
    "[[map]]\n"
    f'from = "layers.{a}.experts.{{e}}.weight"\n'
    f'to = "layers.{b}.experts.{{e}}.weight"\n'
    "transpose = true\n"
    for a, b in ((0, 1), (1, 0))
)


def exchanged(name):
    return (
        name.replace("layers.0", "layers.x")
        .replace("layers.1", "layers.0")
        .replace("layers.x", "layers.1")
    )


SURGERIES = {
    "layers exchanged and transposed": (
        {},
        {},
        {"mapping": EXCHANGE},
        exchanged,
        lambda n, old: old(exchanged(n)).T.clone() if "layers" in n else old(n).clone(),
    ),
    "renamed": (
        {},
        {"tokens": "tokens"},
        {"rename": r"s/^model\/embed\./model\/tokens./"},
        renamed,
        lambda n, old: old(renamed(n)).clone(),
    ),
    "renamed wherever it is called so": (
        {},
        {"tokens": "tokens"},
        {"rename": r"s/embed\./tokens./"},
        renamed,
        lambda n, old: old(renamed(n)).clone(),
    ),
    "larger vocabulary": (
        {},
        {"vocabulary": 8},
        {"fit": {"model/embed.weight": "pad"}},
        str,
        lambda n, old: old(n).clone() if "layers" in n else padded(old(n), 8),
    ),
    "larger vocabulary, head of its own": (
        {"tied": False},
        {"tied": False, "vocabulary": 9},
        {"fit": {"model/embed.weight": "pad", "**/head.*": "pad"}},
        str,
        lambda n, old: old(n).clone() if "layers" in n else padded(old(n), 9),
    ),
    "padding cut off": (
        {"vocabulary": 8},
        {},
        {"fit": {"model/*": "slice"}},
        str,
        lambda n, old: old(n).clone() if "layers" in n else padded(old(n), VOCABULARY),
    ),
    "experts joined": (
        {},
        {"stacked": True},
        {"mapping": STACK},
        expert,
        lambda n, old: (
            torch.stack([old(expert(n, i)) for i in range(EXPERTS)])
            if n.endswith("experts")
            else old(n).clone()
        ),
    ),
    "experts split": (
        {"stacked": True},
        {},
        {"mapping": STACK, "invert_mapping": True},
        lambda n: n.partition(".experts")[0] + ".experts" if "experts" in n else n,
        lambda n, old: (
            old(n.split(".experts")[0] + ".experts")[int(n.split(".")[3])].clone()
            if "experts" in n
            else old(n).clone()
        ),
    ),
    "everything": (
        {},
        {"stacked": True, "tokens": "tokens", "vocabulary": 8},
        {"mapping": STACK, "rename": ["s/embed/tokens/"], "fit": {"model/tokens.weight": "pad"}},
        lambda n: expert(renamed(n)),
        lambda n, old: (
            torch.stack([old(expert(n, i)) for i in range(EXPERTS)])
            if n.endswith("experts")
            else (old(renamed(n)).clone() if "layers" in n else padded(old(renamed(n)), 8))
        ),
    ),
}


def options_of(given, tmp_path):
    if "mapping" not in given:
        return given
    file = tmp_path / "experts.toml"
    file.write_text(given["mapping"])
    return {**given, "mapping": file}


@pytest.mark.parametrize("used", [False, True], ids=["new", "after steps"])
@pytest.mark.parametrize("case", SURGERIES)
def test_a_training_goes_on_as_after_the_same_surgery_by_hand(tmp_path, case, used):
    made, changed, given, names, change = SURGERIES[case]
    old = Run(**made)
    old.steps(3)
    shardckpt.save(tmp_path / "c", old.state(step=3))
    oracle, new = Run(1, **changed), Run(2, **changed)
    if used:
        new.steps(2)
    oracle.by_hand(old, names, change)
    state = new.state(step=0)
    shardckpt.restore(tmp_path / "c", state, **options_of(given, tmp_path))
    assert state.step == 3
    moments = (
        [new.optimizer.state[p] for p in new.model.parameters()],
        [oracle.optimizer.state[p] for p in oracle.model.parameters()],
    )
    for mine, theirs in zip(*moments, strict=True):
        assert all(torch.equal(mine[key], theirs[key]) for key in theirs)
    assert new.scheduler.get_last_lr() == oracle.scheduler.get_last_lr()
    assert new.steps(4) == oracle.steps(4)


@pytest.mark.parametrize("form", ["listed", "numbered with names"])
def test_a_state_in_torchs_own_form_is_renamed_and_joined_too(tmp_path, form):
    old, new, same = (
        Run(),
        Run(2, stacked=True, tokens="tokens"),
        Run(3, stacked=True, tokens="tokens"),
    )
    named = form == "numbered with names"
    old.optimizer = torch.optim.AdamW(
        old.model.named_parameters() if named else old.model.parameters(), lr=0.01
    )
    old.scheduler = torch.optim.lr_scheduler.StepLR(old.optimizer, 2, 0.5)
    for run in (new, same):
        run.optimizer = torch.optim.AdamW(run.model.parameters(), lr=0.01)
        run.scheduler = torch.optim.lr_scheduler.StepLR(run.optimizer, 2, 0.5)
    old.steps(3)
    given = options_of(
        {"mapping": STACK, "rename": "s/embed/tokens/", "only": ["model/**", "optimizer/**"]},
        tmp_path,
    )
    plain = {"model": old.model.state_dict(), "optimizer": old.optimizer.state_dict()}
    if form == "listed":
        from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

        plain["optimizer"] = get_optimizer_state_dict(old.model, old.optimizer)
    shardckpt.save(tmp_path / "plain", plain)
    shardckpt.save(tmp_path / "ours", old.state(step=3))
    shardckpt.restore(tmp_path / "plain", new.state(step=0), strict=False, **given)
    shardckpt.restore(tmp_path / "ours", same.state(step=0), strict=False, **given)
    assert new.steps(3) == same.steps(3)


def test_a_module_under_another_keyword_gets_its_optimizers_state(tmp_path):
    old, new = Run(), Run(1, vocabulary=8)
    old.steps(2)
    shardckpt.save(
        tmp_path / "c", shardckpt.train_state(net=old.model, optimizer=old.optimizer, step=2)
    )
    state = shardckpt.train_state(model=new.model, optimizer=new.optimizer, step=0)
    shardckpt.restore(
        tmp_path / "c",
        state,
        strict="like",
        rename="s/^net/model/",
        fit={"model/embed.weight": "pad"},
    )
    for (name, mine), theirs in zip(
        new.model.named_parameters(), old.model.parameters(), strict=True
    ):
        moment = old.optimizer.state[theirs]["exp_avg"]
        assert torch.equal(
            new.optimizer.state[mine]["exp_avg"],
            padded(moment, 8) if name == "embed.weight" else moment,
        )


def test_the_names_of_averaged_weights_follow_a_rule_that_matches_them(tmp_path):
    old, new = Run(), Run(1, tokens="tokens", vocabulary=8)
    old.steps(2)
    ema = torch.optim.swa_utils.AveragedModel(old.model)
    shardckpt.save(tmp_path / "c", old.state(ema=ema, step=1))
    averaged = torch.optim.swa_utils.AveragedModel(new.model)
    rules = {"rename": "s/embed/tokens/", "fit": {"**/tokens.weight": "pad"}}
    shardckpt.restore(tmp_path / "c", new.state(ema=averaged, step=0), **rules)
    assert torch.equal(averaged.module.tokens.weight, padded(old.model.embed.weight, 8))


def test_a_mapping_that_renames_both_names_of_a_tied_parameter_moves_its_moments(tmp_path):
    def made(first, second):
        layer = nn.Linear(2, 2)
        model = nn.ModuleDict({first: layer, second: layer})
        return model, torch.optim.Adam(model.parameters())

    model, optimizer = made("a", "b")
    model["b"](torch.ones(2)).sum().backward()
    optimizer.step()
    shardckpt.save(tmp_path / "c", shardckpt.train_state(model=model, optimizer=optimizer))
    (tmp_path / "map.toml").write_text(
        "".join(
            f'[[map]]\nfrom = "{old}.{{of}}"\nto = "{new}.{{of}}"\n'
            for old, new in (("a", "c"), ("b", "d"))
        )
    )
    fresh, its_own = made("c", "d")
    state = shardckpt.train_state(model=fresh, optimizer=its_own)
    shardckpt.restore(tmp_path / "c", state, mapping=tmp_path / "map.toml")
    assert torch.equal(fresh["d"].weight, model["b"].weight)
    moments = its_own.state[fresh["c"].weight]["exp_avg"]
    assert torch.equal(moments, optimizer.state[model["a"].weight]["exp_avg"])


def test_experts_with_other_numbers_of_steps_are_not_joined(tmp_path):
    old, new = Run(), Run(1, stacked=True)
    old.steps(2)
    old.optimizer.state[old.model.layers[1].experts[2].weight]["step"] += 1
    shardckpt.save(tmp_path / "c", old.state(step=2))
    given = options_of({"mapping": STACK}, tmp_path)
    before = [p.clone() for p in new.model.parameters()]
    with pytest.raises(
        errors.StructureMismatchError,
        match=r"layers\.1\.experts/step.*layers\.1\.experts\.0\.weight/step.*only=",
    ):
        shardckpt.restore(tmp_path / "c", new.state(step=0), **given)
    assert all(map(torch.equal, before, new.model.parameters()))
    shardckpt.restore(tmp_path / "c", new.state(step=0), only=["model/**", "step"], **given)
    assert torch.equal(new.model.layers[1].experts[2], old.model.layers[1].experts[2].weight)


def test_experts_of_which_only_some_have_moments_are_not_joined(tmp_path):
    old, new = Run(), Run(1, stacked=True)
    old.steps(2)
    del old.optimizer.state[old.model.layers[0].experts[1].weight]
    shardckpt.save(tmp_path / "c", old.state(step=2))
    with pytest.raises(
        errors.StructureMismatchError, match=r"layers\.0\.experts.*different kinds of state"
    ):
        shardckpt.restore(
            tmp_path / "c", new.state(step=0), **options_of({"mapping": STACK}, tmp_path)
        )


def test_state_not_of_the_parameters_shape_is_refused_where_the_parameter_is_fitted_or_joined(
    tmp_path,
):
    old, new, stacked = Run(), Run(1, vocabulary=8), Run(1, stacked=True)
    for run in (old, new, stacked):
        run.optimizer = torch.optim.Adafactor(run.model.parameters())
        run.scheduler = torch.optim.lr_scheduler.StepLR(run.optimizer, 2)
    old.steps(2)
    shardckpt.save(tmp_path / "c", old.state(step=2))
    with pytest.raises(
        errors.StructureMismatchError,
        match=r"embed\.weight/row_var.*\(6, 1\).*\(6, 4\) to \(8, 4\).*only=",
    ):
        shardckpt.restore(tmp_path / "c", new.state(step=0), fit={"model/embed.weight": "pad"})
    with pytest.raises(errors.StructureMismatchError, match=r"experts/(row|col)_var.*only="):
        shardckpt.restore(
            tmp_path / "c", stacked.state(step=0), **options_of({"mapping": STACK}, tmp_path)
        )


class Parameters(nn.Module):
    """Parameters of given shapes."""

    def __init__(self, **shapes):
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.rand(shape)))


def trained(optimizer, **shapes):
    """A module and its optimizer after three steps."""
    module = Parameters(**shapes)
    used = optimizer(module.parameters(), lr=0.01)
    for _ in range(3):
        for parameter in module.parameters():
            parameter.grad = torch.rand_like(parameter) + 0.1
        used.step()
    return module, used


def following(path, optimizer, shapes, **options):
    """A new module and its optimizer with what is stored, which can make a step."""
    module = Parameters(**shapes)
    new = optimizer(module.parameters(), lr=0.01)
    shardckpt.restore(
        path, shardckpt.train_state(model=module, optimizer=new, rng=False), **options
    )
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    kept = {
        name: {key: value.clone() for key, value in new.state[p].items()}
        for name, p in module.named_parameters()
    }
    new.step()
    return module, kept


def test_a_parameter_that_is_split_gives_each_part_its_moments(tmp_path):
    (tmp_path / "map.toml").write_text(
        '[[map]]\nfrom = ["gate", "up"]\nto = "both"\nratio = [1, 1]\n'
    )
    old, adam = trained(torch.optim.AdamW, both=(8, 3))
    shardckpt.save(tmp_path / "c", shardckpt.train_state(model=old, optimizer=adam, rng=False))
    shapes = {"gate": (4, 3), "up": (4, 3)}
    _, state = following(
        tmp_path / "c",
        torch.optim.AdamW,
        shapes,
        mapping=tmp_path / "map.toml",
        invert_mapping=True,
    )
    for key in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(
            torch.cat([state["gate"][key], state["up"][key]]), adam.state[old.both][key]
        )
    assert state["gate"]["step"] == state["up"]["step"] == 3


@pytest.mark.parametrize(
    "optimizer",
    [
        torch.optim.AdamW,
        torch.optim.NAdam,
        torch.optim.ASGD,
        torch.optim.RMSprop,
        torch.optim.Adagrad,
    ],
)
@pytest.mark.parametrize("shape", [(), (1,), (2,)])
def test_values_that_a_parameter_has_once_are_not_stacked_whatever_its_shape(
    tmp_path, optimizer, shape
):
    (tmp_path / "map.toml").write_text('[[map]]\nfrom = "g{i}"\nto = "g"\nstack = 0\n')
    old, used = trained(optimizer, g0=shape, g1=shape)
    shardckpt.save(tmp_path / "c", shardckpt.train_state(model=old, optimizer=used, rng=False))
    _, state = following(
        tmp_path / "c", optimizer, {"g": (2, *shape)}, mapping=tmp_path / "map.toml"
    )
    for key, value in used.state[old.g0].items():
        once = key in {"step", "mu_product", "eta", "mu"}
        expected = (
            value if once else torch.stack([used.state[old.g0][key], used.state[old.g1][key]])
        )
        assert torch.equal(state["g"][key], expected), key


@pytest.mark.parametrize(
    ("before", "after"), [((1, 4), (3, 4)), ((4, 1), (4, 3)), ((3, 4), (1, 4))]
)
def test_factors_of_adafactor_are_not_fitted_even_if_their_shape_is_the_parameters(
    tmp_path, before, after
):
    old, used = trained(torch.optim.Adafactor, w=before)
    shardckpt.save(tmp_path / "c", shardckpt.train_state(model=old, optimizer=used, rng=False))
    with pytest.raises(errors.StructureMismatchError, match=r"w/(row|col)_var.*only="):
        following(
            tmp_path / "c",
            torch.optim.Adafactor,
            {"w": after},
            fit={"model/w": "pad" if before < after else "slice"},
        )


def test_a_variance_of_adafactor_is_not_stacked_to_a_matrix_which_has_none(tmp_path):
    (tmp_path / "map.toml").write_text('[[map]]\nfrom = "g{i}"\nto = "g"\nstack = 0\n')
    old, used = trained(torch.optim.Adafactor, g0=(3,), g1=(3,))
    shardckpt.save(tmp_path / "c", shardckpt.train_state(model=old, optimizer=used, rng=False))
    with pytest.raises(errors.StructureMismatchError, match=r"g/variance.*only="):
        following(
            tmp_path / "c", torch.optim.Adafactor, {"g": (2, 3)}, mapping=tmp_path / "map.toml"
        )


def test_an_optimizer_that_numbers_its_parameters_does_not_follow_a_mapping(tmp_path):
    old, new = Run(), Run(1)
    old.steps(2)
    shardckpt.save(
        tmp_path / "c", {"model": old.model.state_dict(), "optimizer": old.optimizer.state_dict()}
    )
    turned = options_of(
        {
            "mapping": "[[map]]\n"
            'from = "layers.{i}.experts.{e}.weight"\n'
            'to = "layers.{i}.experts.{e}.weight"\n'
            "transpose = true"
        },
        tmp_path,
    )
    state = shardckpt.train_state(model=new.model, optimizer=new.optimizer, rng=False)
    with pytest.raises(
        errors.StructureMismatchError,
        match=r"numbers instead of parameter names.*layers\.0\.experts.*only=",
    ):
        shardckpt.restore(tmp_path / "c", state, **turned)
    shardckpt.restore(tmp_path / "c", state, only="model/**", **turned)
    assert torch.equal(
        new.model.layers[1].experts[2].weight, old.model.layers[1].experts[2].weight.T
    )


def test_an_optimizer_with_a_form_of_its_own_does_not_follow(tmp_path):
    old, new = Run(), Run(1, vocabulary=8)
    for run in (old, new):
        run.optimizer.register_state_dict_post_hook(lambda _, state: {"inner": state})
        run.scheduler = None
    old.scheduler = torch.optim.lr_scheduler.StepLR(old.optimizer, 2)
    old.steps(2)
    shardckpt.save(
        tmp_path / "c", shardckpt.train_state(model=old.model, optimizer=old.optimizer, rng=False)
    )
    state = shardckpt.train_state(model=new.model, optimizer=new.optimizer, rng=False)
    with pytest.raises(errors.StructureMismatchError, match=r"'optimizer'.*form of its own.*only="):
        shardckpt.restore(tmp_path / "c", state, fit={"model/**": "pad"})


class Shadow:
    """Averaged weights that are not a module."""

    def __init__(self, model):
        self.weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def state_dict(self):
        return {"weights": self.weights}

    def load_state_dict(self, state):
        self.weights = state["weights"]


def test_tensors_of_other_objects_are_fitted_to_their_own(tmp_path):
    old, new = Run(), Run(1, vocabulary=8)
    shardckpt.save(
        tmp_path / "c", shardckpt.train_state(model=old.model, ema=Shadow(old.model), rng=False)
    )
    shadow = Shadow(new.model)
    shardckpt.restore(
        tmp_path / "c",
        shardckpt.train_state(model=new.model, ema=shadow, rng=False),
        fit={"**/embed.weight": "pad", "**/head.*": "pad"},
    )
    assert torch.equal(shadow.weights["embed.weight"], padded(old.model.embed.weight.detach(), 8))


def test_extra_state_of_another_length_is_restored_as_it_is_stored_whatever_fit_says(tmp_path):
    class Scaled(nn.Linear):
        extra = torch.zeros(2, dtype=torch.uint8)

        def get_extra_state(self):
            return self.extra

        def set_extra_state(self, state):
            self.extra = state

    old, new = Scaled(2, 3), Scaled(2, 2)
    old.extra = torch.arange(5, dtype=torch.uint8)
    shardckpt.save(tmp_path / "c", shardckpt.train_state(model=old, rng=False))
    shardckpt.restore(
        tmp_path / "c", shardckpt.train_state(model=new, rng=False), fit={"model/**": "slice"}
    )
    assert torch.equal(new.extra, old.extra)
    assert torch.equal(new.weight, old.weight[:2])


def test_a_larger_vocabulary_without_fit_is_refused_with_the_advice_to_fit_it(tmp_path):
    old, new = Run(), Run(1, vocabulary=8)
    old.steps(1)
    shardckpt.save(tmp_path / "c", old.state(step=1))
    with pytest.raises(
        errors.ShapeMismatchError,
        match=r"model/.*\(6, 4\).*\(8, 4\).*fit=\{'model/(embed|head).weight': 'pad'\}",
    ):
        shardckpt.restore(tmp_path / "c", new.state(step=0))
    with pytest.raises(errors.ShapeMismatchError, match=r"\(6, 4\).*\(8, 4\).*'slice'"):
        shardckpt.restore(tmp_path / "c", new.state(step=0), fit={"**": "slice"})


def test_a_manager_restores_with_the_same_options_checks_what_it_can_and_notes_what_it_changed(
    tmp_path,
):
    old = Run()
    old.steps(3)
    with shardckpt.CheckpointManager(
        tmp_path / "run", options=shardckpt.SaveOptions(fingerprint=True)
    ) as manager:
        manager.save(3, old.state(step=3))
    new, oracle = (
        Run(1, tokens="tokens", vocabulary=8, stacked=True),
        Run(2, tokens="tokens", vocabulary=8, stacked=True),
    )
    given = options_of(SURGERIES["everything"][2], tmp_path)
    shardckpt.restore(tmp_path / "run" / "3", oracle.state(step=0), **given)
    with shardckpt.CheckpointManager(tmp_path / "run") as manager:
        restored = manager.restore(new.state(step=0), check=True, **given)
    assert new.steps(3) == oracle.steps(3)
    notes = "\n".join(restored.notes)
    assert (
        "model/embed.weight: restored as model/tokens.weight; (6, 4) → (8, 4), pad"
        in notes.replace("'", "")
    )
    assert (
        "optimizer/state/embed.weight/exp_avg: restored as "
        "optimizer/state/tokens.weight/exp_avg; (6, 4) → (8, 4), pad" in notes.replace("'", "")
    )
    assert "(3, 4, 4) made of model/layers.0.experts.0.weight" in notes


def test_check_finds_a_renamed_tensor_that_is_not_what_was_saved(tmp_path):
    old, new = Run(), Run(1, tokens="tokens")
    old.steps(1)
    with shardckpt.CheckpointManager(
        tmp_path / "run", options=shardckpt.SaveOptions(fingerprint=True)
    ) as manager:
        manager.save(1, old.state(step=1))
    new.model.register_load_state_dict_post_hook(
        lambda model, _: [None, nn.init.zeros_(model.tokens.weight)][0]
    )
    with (
        shardckpt.CheckpointManager(tmp_path / "run") as manager,
        pytest.raises(errors.CorruptionError, match=r"model/tokens\.weight"),
    ):
        manager.restore(new.state(step=0), check=True, rename="s/embed/tokens/")


def test_check_compares_only_what_was_selected(tmp_path):
    saved = {"a": torch.ones(3), "b": torch.zeros(3)}
    with shardckpt.CheckpointManager(
        tmp_path / "run", options=shardckpt.SaveOptions(fingerprint=True)
    ) as manager:
        manager.save(1, saved)
    with shardckpt.CheckpointManager(tmp_path / "run") as manager:
        state = manager.restore(
            {"a": torch.full((3,), 7.0), "b": torch.full((3,), 7.0)}, only="a", check=True
        ).state
        assert [tensor[0].item() for tensor in state.values()] == [1, 7]
        manager.restore({"b": torch.full((3,), 7.0)}, only="a", rename="s/a/b/", check=True)


@pytest.fixture(scope="module")
def ranks():
    with asked("adapted_ranks") as run:
        yield run


def test_shards_that_have_only_padding_or_nothing_are_right_too(ranks, tmp_path):
    shardckpt.save(tmp_path / "c", {"w": torch.arange(1.0, 13).reshape(4, 3)})
    cases = [
        ([a, b], mode)
        for mode, sizes in (("pad", (4, 5, 9)), ("slice", (0, 1, 2, 4)))
        for a in sizes
        for b in (3, 7 if mode == "pad" else 1)
    ]
    for wrong in ranks("shards", 2, str(tmp_path / "c"), cases):
        assert wrong == []


@pytest.mark.parametrize("case", SURGERIES)
def test_two_ranks_of_dtensors_go_on_as_one_process(ranks, tmp_path, case):
    made, changed, given, names, change = SURGERIES[case]
    old, oracle = Run(**made), Run(1, **changed)
    old.steps(3)
    shardckpt.save(tmp_path / "c", old.state(step=3))
    oracle.by_hand(old, names, change)
    given = {
        key: str(value) if key == "mapping" else value
        for key, value in options_of(given, tmp_path).items()
    }
    losses = oracle.steps(3)
    for answer in ranks("resume", 2, str(tmp_path / "c"), changed, given, 3):
        assert answer["kinds"] == ["DTensor"]
        assert answer["losses"] == pytest.approx(losses, rel=1e-5)
