"""The public interface: what it is, and that importing it costs nothing."""

import pickle
import subprocess
import sys

import pytest

import shardckpt
from shardckpt import errors

HEAVY = [
    "torch",
    "torch_xla",
    "jax",
    "tensorstore",
    "zarr",
    "numpy",
    "fsspec",
    "typer",
    "rich",
    "yaml",
]


def run(code):
    return subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout.strip()


def test_importing_shardckpt_loads_nothing_heavy():
    assert run(f"import sys, shardckpt; print([m for m in {HEAVY} if m in sys.modules])") == "[]"


def test_the_pure_core_needs_numpy_alone():
    modules = [
        "layout.sharding",
        "layout.hybrid_mesh",
        "state",
        "format.record",
        "options",
        "plan.pieces",
        "plan.chunks",
        "reshard.rules",
    ]
    imports = "; ".join(f"import shardckpt.{m}" for m in modules)
    heavy = [m for m in HEAVY if m != "numpy"]
    assert run(f"{imports}; import sys; print([m for m in {heavy} if m in sys.modules])") == "[]"


def test_saving_numpy_arrays_loads_no_framework(tmp_path):
    url = str(tmp_path / "c")
    code = (
        f"import numpy, shardckpt, sys; shardckpt.save({url!r}, {{'w': numpy.ones(3)}}); "
        f"shardckpt.restore({url!r})"
    )
    assert (
        run(f"{code}; print([m for m in ['torch', 'jax', 'torch_xla'] if m in sys.modules])")
        == "[]"
    )


def test_every_public_name_is_there_and_documented():
    for name in shardckpt.__all__:
        value = getattr(shardckpt, name)
        if name != "__version__":
            assert value.__doc__, name
    assert set(shardckpt.__all__) - {"__version__"} == set(shardckpt._HOME)
    assert dir(shardckpt) == sorted(shardckpt.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        shardckpt.nothing


def test_functions_are_functions_whatever_was_imported_first():
    """A submodule of the same name would hide the function."""
    code = (
        "import shardckpt.writing.save, shardckpt.reading.restore, shardckpt.reading.checkpoint, "
        "shardckpt.reshard.plan, shardckpt"
    )
    names = "save", "restore", "open", "reshard"
    assert (
        run(f"{code}; print([callable(getattr(shardckpt, name)) for name in {names}])")
        == "[True, True, True, True]"
    )


def test_the_package_of_resharding_is_the_function_and_imports_nothing_heavy():
    code = "import sys, shardckpt; reshard = shardckpt.reshard; import shardckpt.reshard"
    assert (
        run(
            f"{code}; print(reshard is shardckpt.reshard, [m for m in {HEAVY} if m in sys.modules])"
        )
        == "True []"
    )


def test_errors_have_codes_of_their_own_and_builtin_kin():
    kinds = [getattr(errors, name) for name in errors.__all__]
    assert len({kind.code for kind in kinds}) == len(kinds)
    for kind in kinds:
        assert issubclass(kind, shardckpt.ShardckptError)
        assert kind is shardckpt.ShardckptError or any(
            b.__module__ == "builtins" and b is not Exception for b in kind.__mro__[1:]
        )
        assert str(kind("one sentence.")) == "one sentence."
        by_name = pickle.loads(pickle.dumps(kind(message="one sentence.")))
        assert (type(by_name), str(by_name)) == (kind, "one sentence.")
        assert kind.__name__ in errors.__doc__
        assert f'"{kind.code}"' in errors.__doc__ or kind is shardckpt.ShardckptError
