"""Messages of the library, which name arguments of Python, in the words of the command line."""

import pickle
import re

import numpy as np
import pytest
from safetensors.numpy import save_file
from typer.main import get_command

from shardckpt.cli.app import app
from shardckpt.cli.options import as_flag
from shardckpt.convert.options import AnyExportOptions, ImportOptions
from shardckpt.errors import AlreadyExistsError, OptionError
from shardckpt.reshard.options import ReshardOptions
from shardckpt.serve.problems import text_of
from shardckpt.text import Message, named

DECLARED = (AnyExportOptions, ImportOptions, ReshardOptions)
ARGUMENT = re.compile(
    rf"(?<![\w-])(?:{'|'.join(name for declared in DECLARED for name in declared.declared())})="
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory, saver):
    """A directory with two checkpoints and a file, for commands that are refused and change
    nothing."""
    top = tmp_path_factory.mktemp("places")
    saver(top / "a")
    saver(top / "b")
    save_file({"w": np.ones(4, np.float32)}, top / "model.safetensors")
    return top


@pytest.fixture
def places(saved, monkeypatch):
    """That directory, which becomes the working directory."""
    before = sorted(saved.rglob("*"))
    monkeypatch.chdir(saved)
    yield saved
    assert sorted(saved.rglob("*")) == before


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("export a x.safetensors --include nope", "--include nope selects none of its 5 tensors"),
        ("export a x.safetensors --exclude **", "--exclude '**' selects none of its 5 tensors"),
        ("export a x --to torch --include n", "--include n selects none of its names"),
        (
            "export a x.safetensors --memory-limit 3",
            "--memory-limit 3B is too little to read chunks of ",
        ),
        ("export a x.safetensors --max-shard-size 3", "--max-shard-size makes several files"),
        ("export a x --to nope", "--to nope: give 'safetensors'"),
        ("export a x --to torch --optimizer nope", "--optimizer nope: give 'names'"),
        ("export a x.safetensors --dtype int8", "as in --dtype '**/position_ids=int8'."),
        (
            "export a x.safetensors --dtype model/**",
            "after a pattern comes =DTYPE, as in 'model/**=bfloat16'",
        ),
        ("export a x.safetensors --ties nope", '--ties nope: use "auto"'),
        (
            "export a x.pt --to torch --max-shard-size 5GB",
            "--to torch does not have the option --max-shard-size, which",
        ),
        ("export a model.safetensors", "or replace it with --overwrite."),
        (
            "export a x.safetensors --strip-prefix nope",
            "--strip-prefix nope: it matches none of 5 names",
        ),
        ("import model.safetensors z --from nope", "--from nope: use 'auto'"),
        ("import model.safetensors z --into a//b", "--into a//b: "),
        ("reshard a y --memory-limit 3", "--memory-limit 3B is too little for 1 worker"),
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
        (
            "reshard a y --preset llama/tp --from-hf-config c.json",
            "give one of --preset and --from-hf-config.",
        ),
        ("reshard a y --engine nope", "--engine nope: give ray://"),
        ("reshard a y --engine ray://h:1 --worker 0/2", "--engine ray://h:1, --worker 0/2: "),
        ("reshard a y --workers 0", "--workers 0: give a number"),
        ("reshard a y --worker 9/3", "--worker 9/3: K must be less than N"),
        ("reshard a b", "or replace it with --overwrite."),
        ("export a x.safetensors --rename nope", "--rename nope: write it as sed does"),
        ("plan a --mesh model=2 --rate much", "--rate much: give bytes"),
        ("diff a b --memory-limit 3", "--memory-limit 3B: comparing takes at least 1 MiB"),
        ("plan a --only model/embed --explain model/norm", "--only does not select"),
    ],
)
def test_a_message_speaks_of_options(run, places, command, words):
    answer = run(*command.split())
    assert words in answer.err
    assert not ARGUMENT.search(answer.err)
    assert words in run(*command.split(), "--json").json["error"]["message"]


@pytest.mark.parametrize(
    "flag",
    [
        "worker",
        "mesh",
        "from",
        "into",
        "preset",
        "like",
        "unmatched",
        "layout",
        "engine",
        "memory-limit",
    ],
)
def test_an_import_with_an_empty_value_is_refused_and_not_done_without_it(run, places, flag):
    """As `--worker "$SHARE"`, where nothing has set the variable."""
    assert run("import", "model.safetensors", "new", f"--{flag}", "").status == 2
    assert not (places / "new").exists()


def test_every_declared_option_is_a_flag_or_only_for_python():
    known = {
        flag
        for command in get_command(app).commands.values()
        for parameter in command.params
        for flag in parameter.opts
    }
    for declared in DECLARED:
        for name, option in declared.declared().items():
            flag = as_flag(named(name))
            assert (flag in known) == (
                option.metavar is not None or option.kind == "boolean" or option.parts is not None
            )


def test_names_and_paths_in_a_message_stay_as_they_are():
    message = Message(
        "run/only=a/1: 'only=[1]' is not a name; leave it out with ", named("exclude"), "."
    )
    assert str(message) == "run/only=a/1: 'only=[1]' is not a name; leave it out with exclude=."
    assert (
        message.worded(as_flag)
        == "run/only=a/1: 'only=[1]' is not a name; leave it out with --exclude."
    )
    assert (
        text_of(OptionError(Message(named("from_", "x"), ": ", named("rules", ...))))
        == "from='x': rule=…"
    )


def test_a_value_is_written_as_it_is_typed():
    assert as_flag(named("only", ["a b", "c"])) == "--only 'a b' --only c"
    assert as_flag(named("only", list("abcdefghij"))).endswith("--only h --only '…'")
    assert as_flag(named("dtype", {"**/w": "int8"})) == "--dtype '**/w=int8'"
    assert as_flag(named("worker", (0, 8))) == "--worker 0/8"
    assert as_flag(named("compression", "x")) == "--compress x"
    assert as_flag(named("--grace", "x")) == "--grace x"


def test_an_error_of_another_process_names_its_options_too():
    error = pickle.loads(
        pickle.dumps(AlreadyExistsError(Message("there; ", named("overwrite", True), ".")))
    )
    assert str(error) == "there; overwrite=True."
    assert error.message.worded(as_flag) == "there; --overwrite."
