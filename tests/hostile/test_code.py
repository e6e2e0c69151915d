"""Nothing that a checkpoint holds is run."""

import ast
import copy
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from flip_bits import file_kinds
from forgery import seal, use_in_every_way

import shardckpt
from shardckpt import errors
from shardckpt.reading.naming.mapping_file import read_mapping
from shardckpt.reading.naming.renaming import read_names
from shardckpt.serve.client import Client

PACKAGE = Path(shardckpt.__file__).parent
FORBIDDEN_MODULES = {
    "pickle",
    "cPickle",
    "_pickle",
    "dill",
    "cloudpickle",
    "joblib",
    "marshal",
    "shelve",
    "code",
    "codeop",
    "runpy",
    "yaml",
}
FORBIDDEN_CALLS = {
    "eval",
    "exec",
    "compile",
    "__import__",
    "load",
    "loads",
    "system",
    "popen",
    "allow_pickle",
    "execfile",
}
HARMLESS = {"json.loads", "tomllib.loads", "re.compile"}
WRITTEN_BY_HAND = PACKAGE / "io" / "config_files.py"
"""Reads files that the user has written by hand, YAML among them, with a loader that makes plain
data and nothing else."""
HARMLESS_IN = {WRITTEN_BY_HAND: {"yaml.load"}, PACKAGE / "serve" / "server.py": {"config.load"}}
"""Calls allowed in one file: the second is uvicorn's, which opens the certificate of a server whose
application is an object."""


def test_the_package_neither_unpickles_nor_evaluates_anything():
    for path in sorted(PACKAGE.rglob("*.py")):
        modules = FORBIDDEN_MODULES - {"yaml"} if path == WRITTEN_BY_HAND else FORBIDDEN_MODULES
        harmless = HARMLESS | HARMLESS_IN.get(path, set())
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                assert not {alias.name.partition(".")[0] for alias in node.names} & modules, path
            elif isinstance(node, ast.ImportFrom):
                assert (node.module or "").partition(".")[0] not in modules, path
            elif isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert called in harmless or called.rpartition(".")[2] not in FORBIDDEN_CALLS, (
                    f"{path}: {called}"
                )
                assert "allow_pickle" not in {keyword.arg for keyword in node.keywords}, path


@pytest.mark.parametrize(
    "text",
    [
        "!!python/object/apply:os.mkdir ['{}']",
        "rules: !!python/object/new:os.mkdir ['{}']",
        "!!python/name:os.mkdir {}",
    ],
)
def test_a_rules_file_runs_nothing(tmp_path, text):
    (tmp_path / "rules.yaml").write_text(text.format(tmp_path / "made"))
    with pytest.raises(errors.OptionError, match=r"rules\.yaml"):
        shardckpt.Rules.from_file(tmp_path / "rules.yaml")
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("read", [read_mapping, read_names])
def test_a_mapping_file_and_a_file_of_names_run_nothing(tmp_path, read):
    (tmp_path / "file.yaml").write_text(f"!!python/object/apply:os.mkdir ['{tmp_path / 'made'}']")
    with pytest.raises(errors.OptionError, match=r"file\.yaml"):
        read(tmp_path / "file.yaml")
    assert not (tmp_path / "made").exists()


BEGIN = "import sys; sys.path.remove('')"
"""A program begins so if it is a script elsewhere, as the command is: the working directory is not
on the module path."""
COMMAND = f"{BEGIN}; from shardckpt.cli import main; sys.exit(main())"
RESHARD = (
    f"{BEGIN}; import shardckpt; shardckpt.reshard('c', 'd', layout='zarr', workers=2, "
    "task_bytes='1MiB')"
)


@pytest.fixture
def trapped(tmp_path):
    """A checkpoint, in a directory with files that are named as modules and say if they are run."""
    place = tmp_path / "of somebody"
    shardckpt.save(place / "c", {"a": np.zeros((512, 512)), "b": np.ones((512, 512))})
    reporting = f"open({str(tmp_path / 'executed')!r}, 'a').write(__name__ + ' ')"
    for name in ("numpy", "secrets", "json", "socket", "selectors", "signal", "threading"):
        (place / f"{name}.py").write_text(reporting)
    yield place
    executed = tmp_path / "executed"
    assert not executed.exists(), executed.read_text()


@pytest.mark.parametrize(
    "arguments", [[COMMAND, "doctor", "."], [RESHARD]], ids=["doctor", "reshard"]
)
def test_a_command_runs_no_module_of_the_working_directory(trapped, arguments):
    subprocess.run([sys.executable, "-c", *arguments], cwd=trapped, check=True)


def test_a_service_runs_no_module_of_its_working_directory(trapped, tmp_path):
    add = ["token", "ann", "--token-file", "tokens", "--scope", "operate"]
    command = [sys.executable, "-P", "-m", "shardckpt"]
    token = subprocess.check_output([*command, *add], cwd=tmp_path, text=True).strip()
    flags = ["--port", "0", "--state", tmp_path / "state", "--token-file", tmp_path / "tokens"]
    with subprocess.Popen(
        [sys.executable, "-c", COMMAND, "serve", f"lab={trapped}", *flags],
        cwd=trapped,
        stdout=subprocess.PIPE,
        text=True,
    ) as service:
        try:
            with Client(service.stdout.readline().split()[-1], token=token) as client:
                assert client.statistics("lab/c", "a")["zeros"] == 512 * 512
                client.wait(client.start("verify", checkpoint="lab/c")["number"])
        finally:
            service.kill()


class Bomb:
    def __reduce__(self):
        return os.mkdir, (Bomb.proof,)


@pytest.mark.parametrize("layout", ["packed", "zarr"])
def test_a_pickle_in_place_of_any_file_is_not_opened(of_three_hosts, tmp_path, layout):
    forgery = of_three_hosts(layout)
    Bomb.proof = str(tmp_path / "exploded")
    bomb = pickle.dumps(Bomb())
    for paths in file_kinds(forgery.url, layout).values():
        before = paths[0].read_bytes()
        paths[0].write_bytes(bomb)
        use_in_every_way(forgery.url)
        paths[0].write_bytes(before)
    forgery.unpublish()
    (forgery.attempt / "records" / "00001.json").write_bytes(bomb)
    assert [outcome.state for outcome in shardckpt.commit(forgery.url)] == ["refused"]
    assert not Path(Bomb.proof).exists()
    pickle.loads(bomb)
    assert Path(Bomb.proof).exists(), "it would not have exploded anyway"


@pytest.mark.parametrize(
    "leaf",
    [
        {"$leaf": ["os.system", "true"]},
        {"$leaf": ["builtins.eval", "1"]},
        {"$object": "os"},
        {"$numpy": ["object", "00"]},
        {"$numpy": ["float32", "00"]},
        {"$torch.dtype": "load"},
        {"$torch.dtype": "onnx"},
        {"$torch.device": "cuda:0; true"},
        {"$tied": "no such tensor"},
        {"$bytes": "%%"},
        "$unknown",
    ],
)
def test_a_leaf_that_is_none_is_refused(forgery, leaf):
    tree = {**forgery.commit["tree"], "leaves": [leaf]}
    forgery.write_raw(seal({**forgery.commit, "tree": tree}))
    with pytest.raises(errors.FormatError):
        shardckpt.restore(forgery.url)
    # The same inside of what a process owns by itself.
    values = copy.deepcopy(forgery.values[0])
    values["values"]["own"]["tree"] = [leaf]
    values["values"]["own"]["arrays"] = {}
    forgery.write(values={0: values})
    with pytest.raises(errors.FormatError):
        shardckpt.restore(forgery.url)
