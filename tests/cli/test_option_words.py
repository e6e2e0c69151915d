"""Messages of the library, which name arguments of Python, in the words of the command line."""

import re

import numpy as np
import pytest
from safetensors.numpy import save_file
from typer.main import get_command

from shardckpt.cli.app import app
from shardckpt.cli.option_words import OPTIONS, with_options

ARGUMENT = re.compile(rf"(?<![\w-])(?:{'|'.join(OPTIONS)})=")


@pytest.fixture
def places(tmp_path, saver, monkeypatch):
    monkeypatch.chdir(tmp_path)
    saver(tmp_path / "a")
    saver(tmp_path / "b")
    save_file({"w": np.ones(4, np.float32)}, tmp_path / "model.safetensors")


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("export a x.safetensors --include nope", "--include nope selects none of its 5 tensors"),
        ("export a x.safetensors --exclude **", "--exclude '**' selects none of its 5 tensors"),
        ("export a x --to torch --include n", "--include n selects none of its names"),
        ("export a x.safetensors --memory-limit 3", "--memory-limit 3 B is too little to read chunks of "),
        ("export a x.safetensors --max-shard-size 3", "--max-shard-size makes several files"),
        ("export a x --to nope", "--to nope: give 'safetensors'"),
        ("export a x --to torch --optimizer nope", "--optimizer nope: give 'names'"),
        ("export a x.safetensors --dtype int8", "as in --dtype '**/position_ids=int8'."),
        ("export a x.safetensors --dtype model/**", "after a pattern comes =DTYPE, as in 'model/**=bfloat16'"),
        ("export a x.safetensors --ties nope", '--ties nope: use "auto"'),
        ("export a x.pt --to torch --max-shard-size 5GB", "--to torch does not have the option --max-shard-size, which"),
        ("export a model.safetensors", "or replace it with --overwrite."),
        ("export a x.safetensors --strip-prefix nope", "--strip-prefix nope: it matches none of 5 names"),
        ("import model.safetensors z --from nope", "--from nope: use 'auto'"),
        ("import model.safetensors z --into a//b", "--into a//b: "),
        ("reshard a y --memory-limit 3", "--memory-limit 3 B is too little for 1 worker"),
        ("reshard a y --memory-limit much", "--memory-limit much: give bytes"),
        ("reshard a y --only nope --only n", "--only nope --only n selects none of its names"),
        ("reshard a y --dtype nope=float16", "--dtype: 'nope' matches no tensor"),
        ("reshard a y --layout nope", "--layout nope: use"),
        ("reshard a y --compress nope", "--compress nope: use"),
        (
            "reshard a y --unmatched error",
            "and there are no rules; give --rule or --like.",
        ),
        ("reshard a y --rule model/*=(None) --unmatched nope", "--unmatched nope: use"),
        ("reshard a y --engine nope", "--engine nope: give ray://"),
        ("reshard a y --engine ray://h:1 --worker 0/2", "--engine ray://h:1, --worker 0/2: "),
        ("reshard a y --workers 0", "--workers 0: give a number"),
        ("reshard a y --worker 9/3", "--worker 9/3: K must be less than N"),
        ("reshard a b", "or replace it with --overwrite."),
        ("export a x.safetensors --rename nope", "--rename nope: write it as sed does"),
        ("plan a --mesh model=2 --rate much", "--rate much: give bytes"),
        ("diff a b --memory-limit 3", "--memory-limit 3 B: comparing takes at least 1 MiB"),
        ("plan a --only model/embed --explain model/norm", "--only does not select"),
    ],
)
def test_a_message_speaks_of_options(run, places, command, said):
    answer = run(*command.split())
    assert said in answer.err
    assert not ARGUMENT.search(answer.err)
    assert said in run(*command.split(), "--json").json["error"]["message"]


def test_every_option_that_a_message_may_name_is_one():
    known = {option for command in get_command(app).commands.values() for parameter in command.params for option in parameter.opts}
    assert set(OPTIONS.values()) <= known


@pytest.mark.parametrize(
    "message",
    [
        "run/only=a/1: no checkpoint there.",
        "'only=[1]' is no name; did you mean 'dtype=a'?",
        "--rule model/*=(None): the spec has 2 entries",
        "a tensor of torch's: call jax.config.update('x', True)",
        "Delete those first, or save them again without skip=.",
    ],
)
def test_names_paths_and_what_is_no_option_stay_as_they_are(message):
    assert with_options(message) == message
