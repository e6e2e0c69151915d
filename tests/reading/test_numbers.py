"""Numbers, numpy scalars and arrays without dimensions take each other's place: a counter may begin
as one and go on as another."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch

import shardckpt
from shardckpt import Target, errors

FORMS = {
    "int": int,
    "float": float,
    "numpy scalar": np.int64,
    "bfloat16 scalar": ml_dtypes.bfloat16,
    "ndarray": lambda n: np.array(n, np.int32),
    "torch": lambda n: torch.tensor(float(n)),
    "torch meta": lambda n: torch.tensor(n, device="meta"),
    "jax": lambda n: jnp.asarray(n, jnp.int32),
    "eval_shape": lambda n: jax.ShapeDtypeStruct((), jnp.float32),
    "target": lambda n: Target(),
}


SCALARS = {"int", "float", "numpy scalar", "bfloat16 scalar"}


@pytest.mark.parametrize(
    "stored", [name for name in FORMS if name not in {"torch meta", "eval_shape", "target"}]
)
@pytest.mark.parametrize("form", FORMS)
def test_a_number_of_any_form_is_restored_into_any_other_and_the_form_is_like_s(
    tmp_path, stored, form
):
    shardckpt.save(tmp_path / "c", {"step": FORMS[stored](7), "w": np.ones(3)})
    like = {"step": FORMS[form](0), "w": np.zeros(3)}
    both_arrays = stored in {"ndarray", "torch", "jax"} and form not in {
        "int",
        "float",
        "numpy scalar",
        "bfloat16 scalar",
    }
    restored = shardckpt.restore(tmp_path / "c", like, cast=both_arrays)["step"]
    kinds = {
        "torch meta": torch.Tensor,
        "eval_shape": jax.Array,
        "target": np.ndarray,
        "jax": jax.Array,
    }
    # Of two Python numbers, or two numpy scalars, the stored one stays as it is.
    if not (stored in SCALARS and form in SCALARS):
        assert isinstance(restored, kinds.get(form, type(like["step"])))
    assert isinstance(restored, np.generic) == isinstance(like["step"], np.generic)
    assert float(restored) == 7
    if form in {"ndarray", "torch"}:
        assert restored is like["step"]
    if hasattr(like["step"], "dtype") and form != "target" and form not in SCALARS:
        assert str(restored.dtype) == str(like["step"].dtype)


ABSENT = [
    (2**40, np.int32),
    (-1, np.uint8),
    (0.5, np.int64),
    (0.5, ml_dtypes.int4),
    (2**70, np.int64),
    (2**24 + 1, np.float32),
    (np.int16(1001), ml_dtypes.bfloat16),
    (300000.0, np.float16),
    (np.float64(1e300), np.float32),
    (1000.0, ml_dtypes.float8_e4m3fn),
    (-np.inf, ml_dtypes.float8_e4m3fn),
    (np.nan, ml_dtypes.float4_e2m1fn),
    (1j, np.float32),
    pytest.param(10**400, np.float32, id="400 digits"),
    pytest.param(10**5000, np.float64, id="5000 digits"),
]


@pytest.mark.parametrize(("number", "dtype"), ABSENT)
@pytest.mark.parametrize(
    "form", [lambda dtype: np.zeros((), dtype), lambda dtype: Target(None, (), dtype)]
)
def test_a_number_that_the_dtype_does_not_have_is_refused_by_name_before_anything_is_read(
    tmp_path, number, dtype, form
):
    shardckpt.save(tmp_path / "c", {"layer": {"step": number}, "w": np.ones(3)})
    like = {"layer": {"step": form(np.dtype(dtype).name)}, "w": np.zeros(3)}
    with pytest.raises(
        errors.DtypeMismatchError,
        match=r"'layer/step' is the number .* which \w+ in `like` does not have",
    ) as refused:
        shardckpt.restore(tmp_path / "c", like)
    assert len(str(refused.value)) < 300
    assert like["w"].tolist() == [0, 0, 0]


def test_with_cast_a_number_is_converted_as_a_tensor_is_and_complex_to_real_is_refused(tmp_path):
    for number, dtype in ((2**24 + 1, np.float32), (1e300, np.float16), (-1, np.uint8)):
        shardckpt.save(
            tmp_path / "c",
            {"a": number, "b": np.array(number)},
            options=shardckpt.SaveOptions(overwrite=True),
        )
        like = {"a": np.zeros((), dtype), "b": np.zeros((), dtype)}
        shardckpt.restore(tmp_path / "c", like, cast=True)
        assert like["a"].item() == like["b"].item()
    for name, number in (("z", 1j), ("half", ml_dtypes.complex32(1j))):
        shardckpt.save(tmp_path / name, {"a": number})
        with pytest.raises(errors.DtypeMismatchError, match=r"'a' is the number .*1j"):
            shardckpt.restore(tmp_path / name, {"a": np.zeros(())}, cast=True)


def test_a_float_is_rounded_and_a_value_that_the_form_lacks_keeps_its_own(tmp_path):
    shardckpt.save(tmp_path / "c", {"rate": 0.1, "scale": np.float32(0.5), "flag": np.array(True)})
    rate = torch.zeros(())
    restored = shardckpt.restore(tmp_path / "c", {"rate": rate, "scale": 1, "flag": False})
    assert (restored["rate"].item(), restored["scale"], restored["flag"]) == (
        np.float32(0.1).item(),
        0.5,
        True,
    )


@pytest.mark.parametrize(
    ("stored", "form"),
    [
        (2**53 + 1, np.float64),
        (2**53 + 1, np.complex128),
        (np.array(2**53 + 1), np.float64),
        (np.array(2**64 - 1, np.uint64), np.float64),
        (np.array(2**64 - 1, np.uint64), ml_dtypes.bfloat16),
        (np.array(complex(np.nan, 5)), np.float64),
        (np.array(complex(np.nan, 0.1)), np.complex64),
    ],
    ids=repr,
)
@pytest.mark.filterwarnings("ignore:Casting complex")
def test_a_number_that_a_numpy_scalar_s_form_would_round_keeps_its_own(tmp_path, stored, form):
    shardckpt.save(tmp_path / "c", {"n": stored})
    restored = shardckpt.restore(tmp_path / "c", {"n": form(0)})["n"]
    np.testing.assert_equal(restored.item(), np.asarray(stored).item())


def test_a_nan_takes_the_form_of_a_numpy_scalar(tmp_path):
    shardckpt.save(tmp_path / "c", {"n": np.array(np.nan), "same": float("nan")})
    restored = shardckpt.restore(tmp_path / "c", {"n": np.float32(0), "same": np.float32(0)})
    assert [(type(n), np.isnan(n)) for n in restored.values()] == [(np.float32, True)] * 2


def test_tensors_with_dimensions_and_other_leaves_do_not_match_numbers(tmp_path):
    shardckpt.save(tmp_path / "c", {"a": np.ones(1), "b": "text", "n": 3})
    for like, words in (
        (
            {"a": 0, "b": "", "n": 0},
            r"'a' is a tensor of shape \(1,\) in the checkpoint, and in `like` a number \(int\)",
        ),
        (
            {"a": np.zeros(1), "b": np.zeros(()), "n": 0},
            r"'b' is a leaf of type str in the checkpoint, and in `like` a tensor",
        ),
        (
            {"a": np.zeros(1), "b": "", "n": np.zeros(1)},
            r"'n' is a leaf of type int in the checkpoint, and in `like` a tensor",
        ),
    ):
        with pytest.raises(errors.StructureMismatchError, match=words):
            shardckpt.restore(tmp_path / "c", like)


def test_a_number_is_not_written_into_memory_that_another_leaf_has(tmp_path):
    shardckpt.save(tmp_path / "c", {"step": 7, "last": 8, "w": np.arange(4.0)})
    memory = np.full(4, -1.0)
    for like in (
        {"step": memory[0:1].reshape(()), "w": memory},
        {"step": torch.from_numpy(memory)[0], "w": torch.from_numpy(memory)},
        {"step": memory[0:1].reshape(()), "last": memory[0:1].reshape(())},
    ):
        with pytest.raises(errors.StructureMismatchError, match="shares memory with"):
            shardckpt.restore(tmp_path / "c", like, strict="like", cast=True)
    assert (memory == -1).all()


@pytest.mark.parametrize(
    "leaf", [torch.zeros(()), np.zeros((), np.float32)], ids=["torch", "numpy"]
)
def test_equal_numbers_go_into_one_tensor_of_several_names_and_different_ones_are_refused(
    tmp_path, leaf
):
    shardckpt.save(tmp_path / "c", {"a": 0.5, "b": 0.5, "c": 0.25, "w": np.ones(3)})
    like = {"a": leaf, "b": leaf, "w": np.zeros(3)}
    restored = shardckpt.restore(tmp_path / "c", like, strict="like")
    assert restored["a"] is restored["b"] is leaf
    assert leaf.item() == 0.5
    like = {"a": leaf, "b": leaf.reshape(()), "w": np.zeros(3)}
    restored = shardckpt.restore(tmp_path / "c", like, strict="like")
    assert (restored["a"], restored["b"]) == (0.5, 0.5)
    with pytest.raises(
        errors.StructureMismatchError,
        match=r"'a' and 'c' are one tensor in `like`, .* the numbers 0.5 and 0.25 for them; give",
    ):
        shardckpt.restore(tmp_path / "c", {"a": leaf, "c": leaf}, strict="like")
    assert leaf.item() == 0.5
    with pytest.raises(errors.StructureMismatchError, match="shares memory with"):
        shardckpt.restore(tmp_path / "c", {"a": leaf, "c": leaf.reshape(())}, strict="like")


def test_numbers_of_an_optimizer_go_into_the_tensor_that_its_groups_share(tmp_path):
    def state(rate):
        modules = [torch.nn.Linear(2, 2) for _ in range(2)]
        groups = [{"params": list(module.parameters())} for module in modules]
        model = torch.nn.ModuleList(modules)
        optimizer = torch.optim.AdamW(groups, lr=rate)
        return shardckpt.train_state(model=model, optimizer=optimizer, rng=False), optimizer

    shardckpt.save(tmp_path / "c", state(0.5)[0])
    fresh, optimizer = state(torch.tensor(0.1))
    shardckpt.restore(tmp_path / "c", fresh)
    assert [float(group["lr"]) for group in optimizer.param_groups] == [0.5, 0.5]


def test_a_training_s_counter_and_scale_may_change_their_form(tmp_path):
    shardckpt.save(
        tmp_path / "c",
        shardckpt.train_state(step=jnp.asarray(5), scale=2.0, count=np.int64(4), rng=False),
    )
    fresh = shardckpt.train_state(step=0, scale=torch.tensor(1.0), count=torch.tensor(0), rng=False)
    shardckpt.restore(tmp_path / "c", fresh)
    assert (fresh.step, fresh.values["scale"], fresh.values["count"]) == (
        5,
        torch.tensor(2.0),
        torch.tensor(4),
    )
    assert type(fresh.step) is int


@pytest.mark.parametrize("form", ["numpy scalar", "ndarray", "jax", "int"])
def test_a_step_may_be_an_integer_of_any_form(tmp_path, form):
    with shardckpt.CheckpointManager(tmp_path, every=1) as manager:
        assert manager.save(FORMS[form](3), {"w": np.ones(3)})
        assert manager.save(torch.tensor(4), {"w": np.ones(3)})
        manager.wait()
        assert manager.all_steps() == [3, 4]
        for wrong in (
            torch.tensor(5.0),
            jnp.asarray([6]),
            np.array(True),
            torch.tensor(True),
            "7",
            jnp.asarray(-1),
        ):
            with pytest.raises(errors.OptionError, match="give an int from 0"):
                manager.save(wrong, {"w": np.ones(3)})
