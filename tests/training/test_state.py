"""The whole state of a training in one call."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from one_of_several import on_threads
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader
from trained import groups, net, steps

import shardckpt
from shardckpt import PerProcess
from shardckpt.errors import (
    DtypeMismatchError,
    LeafError,
    MismatchError,
    NamesMismatchError,
    OptionError,
    StructureMismatchError,
)


class Pair(NamedTuple):
    a: object
    b: object


class Counted:
    """An object with a state of any kind."""

    def __init__(self, state):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def test_step_metadata_and_values_come_back_with_the_objects(tmp_path):
    state = shardckpt.train_state(
        step=7, metadata={"git": "abc"}, tokens=12_345, schedule=[1, (2, 3)], rng=False
    )
    state.step += 1
    shardckpt.save(tmp_path / "c", state)
    fresh = shardckpt.train_state(tokens=0, schedule=[0, (0, 0)], rng=False)
    assert shardckpt.restore(tmp_path / "c", fresh) is fresh
    assert (fresh.step, fresh.metadata) == (8, {"git": "abc"})
    assert fresh.values == {
        "step": 8,
        "metadata": {"git": "abc"},
        "tokens": 12_345,
        "schedule": [1, (2, 3)],
    }


def test_a_state_without_a_step_says_so():
    with pytest.raises(AttributeError, match="has no step"):
        _ = shardckpt.train_state().step


def test_values_may_be_tensors_of_any_framework_which_are_filled_in_place(tmp_path):
    queue = np.arange(6.0)
    shardckpt.save(tmp_path / "c", shardckpt.train_state(queue=queue, rng=False))
    other = np.zeros(6)
    state = shardckpt.train_state(queue=other, rng=False)
    shardckpt.restore(tmp_path / "c", state)
    assert state.values["queue"] is other
    assert other.tolist() == queue.tolist()


def test_all_of_it_is_saved_in_the_background_as_it_was(tmp_path):
    model = net()
    optimizer = torch.optim.AdamW(groups(model), lr=0.01)
    steps(model, optimizer, 0, 2)
    state = shardckpt.train_state(model=model, optimizer=optimizer, step=2)
    handle = shardckpt.save_async(tmp_path / "c", state)
    state.step = 3
    followed = steps(model, optimizer, 2, 5)
    handle.wait()
    fresh = net()
    other = torch.optim.AdamW(groups(fresh), lr=0.01)
    restored = shardckpt.train_state(model=fresh, optimizer=other)
    shardckpt.restore(tmp_path / "c", restored)
    assert restored.step == 2
    assert steps(fresh, other, 2, 5) == followed


def test_it_restores_without_like_as_plain_containers(tmp_path):
    model = net()
    shardckpt.save(tmp_path / "c", shardckpt.train_state(model=model, step=1))
    restored = shardckpt.restore(tmp_path / "c")
    assert list(restored) == ["model", "rng", "step"]
    assert restored["model"]["first.weight"].tolist() == model.first.weight.tolist()
    assert len(restored["rng"]) == 1


def test_an_object_takes_back_what_is_stored_whatever_its_own_state_looks_like_now(tmp_path):
    stored = {
        "seen": Counter({3: 2, 5: 1}),
        "queue": [1.5, None, {"x": (True, "y")}],
        "pair": Pair(1, 2),
        "best": float("inf"),
    }
    shardckpt.save(tmp_path / "c", shardckpt.train_state(sampler=Counted(stored), rng=False))
    sampler = Counted({"seen": Counter(), "pair": Pair(None, None)})
    shardckpt.restore(tmp_path / "c", shardckpt.train_state(sampler=sampler, rng=False))
    assert sampler.state == stored
    assert type(sampler.state["seen"]) is Counter
    assert type(sampler.state["pair"]) is Pair


def test_tensors_that_an_object_has_none_of_yet_come_as_torchs(tmp_path):
    stored = {"window": torch.arange(4, dtype=torch.bfloat16), "shape": torch.zeros(2, 3)}
    shardckpt.save(tmp_path / "c", shardckpt.train_state(meter=Counted(stored), rng=False))
    meter = Counted({"shape": torch.ones(5)})
    shardckpt.restore(tmp_path / "c", shardckpt.train_state(meter=meter, rng=False))
    assert torch.equal(meter.state["window"], stored["window"])
    assert torch.equal(meter.state["shape"], stored["shape"])


def test_a_gradient_scaler_goes_on_where_it_was(tmp_path):
    def made():
        return torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)

    def step(scaler, bad):
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        loss = model(torch.randn(8, 5)).sum() * (float("inf") if bad else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return scaler.get_scale()

    ours, fresh = made(), made()
    for bad in (True, False, True, False):
        step(ours, bad)
    shardckpt.save(tmp_path / "c", shardckpt.train_state(scaler=ours, rng=False))
    shardckpt.restore(tmp_path / "c", shardckpt.train_state(scaler=fresh, rng=False))
    assert ours.get_scale() == fresh.get_scale() != made().get_scale()
    pattern = (False, False, True, False)
    assert [step(fresh, bad) for bad in pattern] == [step(ours, bad) for bad in pattern]


class Absent(torch.utils.data.Dataset):
    """Data that are in no checkpoint."""

    def __len__(self):
        return 1

    def __getitem__(self, index):
        raise shardckpt.errors.NotFoundError("there is no checkpoint at runs/1.")


@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")
def test_an_error_in_a_worker_of_a_loader_keeps_its_message():
    loader = torch.utils.data.DataLoader(Absent(), num_workers=1)
    with pytest.raises(shardckpt.errors.NotFoundError, match=r"there is no checkpoint at runs/1\."):
        list(loader)


# By JAX, where another test has imported it; the loader forks.
@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")
@pytest.mark.parametrize(
    ("workers", "saved_at"), [(0, 0), (0, 1), (0, 3), (0, 5), (0, 7), (2, 0), (2, 3)]
)
def test_a_loader_goes_on_at_its_place_and_every_number_drawn_is_the_one_that_would_have_been(
    tmp_path, workers, saved_at
):
    """Without a generator of its own it shuffles by torch's, from which the model draws as well."""

    def made():
        loader = StatefulDataLoader(range(10), batch_size=2, shuffle=True, num_workers=workers)
        return loader, shardckpt.train_state(loader=loader, step=0)

    def run(loader, state, last):
        """Batches, and a random number after each; saved after some of them."""
        while state.step < last:
            if state.step == saved_at == 0 and not (tmp_path / "c").exists():
                shardckpt.save(tmp_path / "c", state)
            for batch in loader:
                state.step += 1
                yield batch.tolist(), torch.rand(()).item()
                if state.step == saved_at and not (tmp_path / "c").exists():
                    shardckpt.save(tmp_path / "c", state)
                if state.step == last:
                    break

    torch.manual_seed(4)
    whole = list(run(*made(), 12))
    torch.manual_seed(99)
    loader, state = made()
    shardckpt.restore(tmp_path / "c", state)
    assert list(run(loader, state, 12)) == whole[saved_at:]


@pytest.mark.parametrize("keyword", ["model", "optimizer", "scheduler", "scaler", "ema", "loader"])
def test_an_object_without_a_state_is_refused_by_its_keyword(keyword):
    with pytest.raises(
        OptionError,
        match=rf"train_state\({keyword}=…\): a object has no state_dict and load_state_dict",
    ):
        shardckpt.train_state(**{keyword: object()})


def test_a_plain_data_loader_is_refused_with_what_to_use_instead():
    with pytest.raises(OptionError, match=r"torchdata\.stateful_dataloader\.StatefulDataLoader"):
        shardckpt.train_state(loader=DataLoader([1, 2]))


def test_rng_is_a_choice_of_three():
    with pytest.raises(
        OptionError, match=r"train_state\(rng='no'\): give True, False or \"exact\""
    ):
        shardckpt.train_state(rng="no")


def test_a_value_that_cannot_be_stored_is_refused_by_name(tmp_path):
    with pytest.raises(LeafError, match="'callback' is a builtin_function_or_method"):
        shardckpt.save(tmp_path / "c", shardckpt.train_state(callback=print))
    with pytest.raises(LeafError, match=r"'sampler/rng' is a numpy\.random"):
        shardckpt.save(
            tmp_path / "c", shardckpt.train_state(sampler=Counted({"rng": np.random.default_rng()}))
        )


def test_an_object_that_refuses_its_state_is_named(tmp_path):
    shardckpt.save(
        tmp_path / "c",
        shardckpt.train_state(scaler=torch.amp.GradScaler("cpu", enabled=False), rng=False),
    )
    with pytest.raises(
        MismatchError, match=r"scaler cannot load its stored state \(RuntimeError: .*disabled"
    ):
        shardckpt.restore(
            tmp_path / "c", shardckpt.train_state(scaler=torch.amp.GradScaler("cpu"), rng=False)
        )


def test_a_stored_number_meets_a_tensor_by_the_rules_of_the_restore(tmp_path):
    shardckpt.save(
        tmp_path / "c", shardckpt.train_state(counter=Counted({"count": 0.5}), rng=False)
    )
    mine = Counted({"count": torch.tensor(3)})
    state = shardckpt.train_state(counter=mine, rng=False)
    with pytest.raises(DtypeMismatchError, match=r"counter/count.*0\.5.*cast=True"):
        shardckpt.restore(tmp_path / "c", state)
    shardckpt.restore(tmp_path / "c", state, cast=True)
    assert torch.equal(mine.state["count"], torch.tensor(0))


class GivesNoState:
    def __init__(self, error):
        self.error = error

    def state_dict(self):
        raise self.error

    def load_state_dict(self, _state):
        pass


@pytest.mark.parametrize(
    ("key", "make", "match"),
    [
        ("model", lambda: torch.nn.LazyLinear(3), "uninitialized parameter"),
        ("ema", lambda: GivesNoState(ValueError("call step() first")), r"ValueError: call step"),
        ("loader", lambda: shardckpt.PerProcess(GivesNoState(KeyError("ab"))), "KeyError: 'ab'"),
        ("other", lambda: GivesNoState(NotImplementedError("not yet")), "not yet"),
    ],
)
def test_an_object_that_cannot_give_its_state_is_named(tmp_path, key, make, match):
    state = shardckpt.train_state(**{key: make()}, rng=False)
    with pytest.raises(LeafError, match=f"^{key} cannot give its state .*{match}"):
        shardckpt.save(tmp_path / "c", state)


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("no memory"), RuntimeError("Connection closed by peer")]
)
def test_an_error_of_the_machine_stays_what_it_is_and_names_the_object(tmp_path, error):
    state = shardckpt.train_state(ema=GivesNoState(error), rng=False)
    with pytest.raises(RuntimeError) as caught:
        shardckpt.save(tmp_path / "c", state)
    assert caught.value is error
    assert error.__notes__ == ["train_state was collecting the state of ema."]


@pytest.mark.parametrize("key", ["optimizer", "other"])
def test_a_class_is_refused_where_an_instance_belongs(key):
    with pytest.raises(OptionError, match=rf"{key}=…\): Adam is a class"):
        shardckpt.train_state(**{key: torch.optim.Adam})


def test_entries_that_only_one_side_has_are_errors_unless_told_otherwise(tmp_path):
    shardckpt.save(
        tmp_path / "c",
        shardckpt.train_state(sampler=Counted({"n": 1}), steps=Counted({"k": 5}), rng=False),
    )
    other, both = Counted({"m": 2}), Counted({"k": 0})
    state = shardckpt.train_state(meter=other, steps=both, rng=False)
    with pytest.raises(
        NamesMismatchError, match=r"'meter/m'.*in the checkpoint but not in `like`: 'sampler/n'"
    ):
        shardckpt.restore(tmp_path / "c", state)
    shardckpt.restore(tmp_path / "c", state, strict=False)
    assert (other.state, both.state) == ({"m": 2}, {"k": 5})


def test_a_part_of_an_object_cannot_be_put_back(tmp_path):
    shardckpt.save(
        tmp_path / "c", shardckpt.train_state(sampler=Counted({"n": 1, "m": 2}), rng=False)
    )
    with pytest.raises(
        OptionError, match="selects a part of 'sampler', which can only be restored as a whole"
    ):
        shardckpt.restore(
            tmp_path / "c",
            shardckpt.train_state(sampler=Counted({"n": 0, "m": 0}), rng=False),
            only="sampler/n",
        )


def test_what_each_process_owns_is_marked_by_the_one_who_knows(tmp_path):
    mine = Counted({"seen": [1, 2]})
    shardckpt.save(
        tmp_path / "c",
        shardckpt.train_state(sampler=PerProcess(mine), note=PerProcess("p0"), rng=False),
    )
    tree = shardckpt.open(tmp_path / "c").tree
    assert tree == {"sampler": {"$per_process": None}, "note": {"$per_process": None}}
    fresh = Counted({})
    state = shardckpt.train_state(sampler=PerProcess(fresh), note=PerProcess(""), rng=False)
    shardckpt.restore(tmp_path / "c", state)
    assert fresh.state == {"seen": [1, 2]}
    assert state.values["note"].value == "p0"
    with pytest.raises(StructureMismatchError, match="'sampler' is a value of each process's own"):
        shardckpt.restore(
            tmp_path / "c",
            shardckpt.train_state(sampler=Counted({}), note=PerProcess(""), rng=False),
        )


def test_state_dict_and_load_state_dict_are_inverse_without_a_checkpoint():
    model = net()
    optimizer = torch.optim.AdamW(groups(model), lr=0.01)
    steps(model, optimizer, 0, 2)
    state = shardckpt.train_state(model=model, optimizer=optimizer, step=2)
    fresh = net()
    other = torch.optim.AdamW(groups(fresh), lr=0.01)
    other_state = shardckpt.train_state(model=fresh, optimizer=other)
    other_state.load_state_dict(state.state_dict())
    assert other_state.step == 2
    assert torch.equal(fresh.first.weight, model.first.weight)


def test_a_program_without_torch_saves_and_restores_without_it(tmp_path):
    code = f"""
import sys, numpy as np, random, shardckpt
state = shardckpt.train_state(weights={{"w": np.arange(3.0)}}, step=4)
shardckpt.save({str(tmp_path / "c")!r}, state)
after = random.random(), np.random.rand()
other = shardckpt.train_state(weights={{"w": np.zeros(3)}})
shardckpt.restore({str(tmp_path / "c")!r}, other)
assert (random.random(), np.random.rand()) == after
assert other.values["weights"]["w"].tolist() == [0, 1, 2] and other.step == 4
assert not {{"torch", "jax"}} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=200)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_local_pattern_may_select_an_array_on_a_device_of_the_process(tmp_path, processes):
    device = jax.devices()[0]

    def resume(coordinator):
        def state(fill):
            array = jax.device_put(jnp.full(4, fill), device)
            return shardckpt.train_state(a=array, rng=False, local="a")

        number = coordinator.world.process + 3
        shardckpt.save(tmp_path / "c", state(number), coordinator=coordinator)
        fresh = state(0)
        shardckpt.restore(tmp_path / "c", fresh, coordinator=coordinator)
        return fresh.values["a"].tolist()

    assert on_threads(processes, resume) == [[3] * 4, [4] * 4][:processes]


@pytest.mark.parametrize("place", [0, 1])
def test_a_process_without_a_list_gets_its_shared_items_by_their_indices(tmp_path, place):
    def resume(coordinator):
        caches = Counted({"l": [np.arange(2), np.arange(2)]} if coordinator.world.process else {})
        state = shardckpt.train_state(caches=caches, rng=False, local=f"caches/l/{place}")
        shardckpt.save(tmp_path / "c", state, coordinator=coordinator)
        shardckpt.restore(tmp_path / "c", state, coordinator=coordinator)
        return str(caches.state["l"])

    assert on_threads(2, resume) == [
        f"{{{1 - place}: array([0, 1])}}",
        "[array([0, 1]), array([0, 1])]",
    ]


def test_a_local_pattern_that_selects_nothing_is_refused_by_the_first_save_in_which_it_could(
    tmp_path,
):
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters())

    def save(name, *local):
        shardckpt.save(
            tmp_path / name,
            shardckpt.train_state(model=model, optimizer=optimizer, rng=False, local=local),
        )

    with pytest.raises(OptionError, match="the pattern 'model/wieght' selects no value"):
        save("a", "model/weight", "model/wieght")
    # Before the first step, nothing is known of the state.
    save("b", "model/bias", "optimizer/state/*/exp_avg", "**/exp_avg_sq")
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    save(
        "c",
        "model/bias",
        "optimizer/state/*/exp_avg",
        "**/exp_avg_sq",
        "optimizer/state/weight",
        "optimizer/state/weight/step",
    )
    with pytest.raises(OptionError, match=r"'optimizer/state/\*/exp_avgs'"):
        save("d", "optimizer/state/*/exp_avgs")


def test_arrays_come_back_as_arrays_where_a_new_training_has_nothing_yet(tmp_path):
    class Statistics:
        def __init__(self, mean=None, weight=None):
            self.mean, self.weight = mean, weight

        def state_dict(self):
            return {"mean": self.mean, "weight": self.weight}

        def load_state_dict(self, state):
            self.mean, self.weight = state["mean"], state["weight"]

    saved = Statistics(np.arange(3.0), torch.ones(2))
    shardckpt.save(
        tmp_path / "c",
        shardckpt.train_state(model=torch.nn.Linear(2, 2), of=saved, history=np.arange(70_000)),
    )
    fresh = Statistics()
    state = shardckpt.train_state(model=torch.nn.Linear(2, 2), of=fresh, history=None)
    shardckpt.restore(tmp_path / "c", state)
    assert [type(value) for value in (fresh.mean, fresh.weight, state.values["history"])] == [
        np.ndarray,
        torch.Tensor,
        np.ndarray,
    ]
    assert (fresh.mean.tolist(), state.values["history"][-1]) == ([0, 1, 2], 69_999)
    record = shardckpt.open(tmp_path / "c").record
    assert [name for name, tensor in record.structure.tensors.items() if tensor.array] == [
        "of/mean",
        "history",
    ]
    assert record.version == (1, 0)


@pytest.mark.parametrize(
    "options",
    [
        {"mesh": shardckpt.Mesh((2,), ("x",)), "rules": ["history=(x)"]},
        {"dtype": "bfloat16"},
        {"only": ["model/**", "again"]},
    ],
    ids=["another layout", "another width", "another name"],
)
def test_arrays_come_back_as_arrays_from_a_resharded_checkpoint(tmp_path, options):
    model, history = torch.nn.Linear(2, 2), np.arange(6.0)
    state = shardckpt.train_state(model=model, history=history, again=history, rng=False)
    shardckpt.save(tmp_path / "c", state)
    shardckpt.reshard(tmp_path / "c", tmp_path / "d", workers=1, **options)
    state = shardckpt.train_state(model=model, history=None, again=None, rng=False)
    shardckpt.restore(tmp_path / "d", state, only="again", cast=True)
    assert isinstance(state.values["again"], np.ndarray)


@pytest.mark.long
def test_jax_arrays_and_keys_come_back_as_such_where_a_new_training_has_nothing_yet(tmp_path):
    import jax
    import jax.numpy as jnp

    class Statistics:
        def __init__(self, mean=None):
            self.mean = mean

        def state_dict(self):
            return {"mean": self.mean}

        def load_state_dict(self, state):
            self.mean = state["mean"]

    keys, model = jax.random.split(jax.random.key(3), 2), torch.nn.Linear(2, 2)
    values = {
        "history": jnp.ones((2, 3), jnp.bfloat16),
        "keys": keys,
        "count": np.arange(3),
        "weight": torch.ones(2),
    }
    shardckpt.save(
        tmp_path / "c", shardckpt.train_state(model=model, of=Statistics(jnp.arange(3.0)), **values)
    )
    fresh = Statistics()
    state = shardckpt.train_state(model=model, of=fresh, **dict.fromkeys(values))
    shardckpt.restore(tmp_path / "c", state)
    values_restored = state.values
    assert all(
        isinstance(array, jax.Array)
        for array in (fresh.mean, values_restored["history"], values_restored["keys"])
    )
    assert (type(values_restored["count"]), type(values_restored["weight"])) == (
        np.ndarray,
        torch.Tensor,
    )
    assert (
        values_restored["history"].dtype,
        values_restored["keys"].dtype,
        fresh.mean.tolist(),
    ) == (jnp.bfloat16, keys.dtype, [0, 1, 2])
    assert (jax.random.key_data(values_restored["keys"]) == jax.random.key_data(keys)).all()
    assert shardckpt.open(tmp_path / "c").record.version == (1, 0)

    program = """
import sys, numpy as np, torch, shardckpt
state = shardckpt.train_state(
    model=torch.nn.Linear(2, 2), of=None, history=None, keys=None, count=None, weight=None
)
shardckpt.restore(sys.argv[1], state, only=["history", "keys", "count", "weight"])
assert "jax" not in sys.modules
print(
    [type(state.values[name]).__name__ for name in ("history", "keys", "count", "weight")],
    state.values["keys"].dtype,
)
"""
    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path / "c"],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=250,
    )
    assert done.stdout.strip() == "['ndarray', 'ndarray', 'ndarray', 'Tensor'] uint32"


def test_a_manager_takes_a_state_whose_keys_are_of_several_types(tmp_path):
    state = {1: jnp.ones(2), "a": [jnp.zeros(2), {2: jnp.ones(1), "b": None}]}
    with shardckpt.CheckpointManager(tmp_path / "run", every=2) as manager:
        assert not manager.save(1, state)
        assert manager.save(2, state)
    with shardckpt.CheckpointManager(tmp_path / "run", every=2) as manager:
        restored = manager.restore(state)
    assert restored.step == 2
    assert restored.state["a"][1][2] == 1


def test_a_manager_refuses_a_state_that_contains_itself(tmp_path):
    state = {"a": [jnp.ones(2)]}
    state["a"].append(state["a"])
    with shardckpt.CheckpointManager(tmp_path / "run", every=2) as manager:
        assert not manager.save(1, state)
        with pytest.raises(LeafError, match="contains itself"):
            manager.save(2, state)
