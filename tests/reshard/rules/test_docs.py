"""The statements and the code of docs/rules.md hold."""

import re

from paths import DOCS

from shardckpt import Rules
from shardckpt.reshard.rules.families import FAMILIES
from shardckpt.reshard.rules.hf_config import MODEL_TYPES

DOCUMENT = (DOCS / "rules.md").read_text()


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", DOCUMENT, re.MULTILINE | re.DOTALL)


def test_its_code_runs_and_says_what_it_shows(capsys):
    variables = {}
    for code in blocks("python"):
        for line in code.split("\n"):
            assert len(line) < 140
        exec(compile(code, "docs/rules.md", "exec"), variables)
        shown = [line.split("  # ") for line in code.split("\n") if "  # " in line]
        assert [eval(expression, variables) for expression, _ in shown] == [
            eval(value) for _, value in shown
        ]
    assert capsys.readouterr().out == blocks("text")[0]


def test_its_files_say_the_same(tmp_path):
    (toml,), (yaml,) = blocks("toml"), blocks("yaml")
    (tmp_path / "a.toml").write_text(toml)
    (tmp_path / "a.yaml").write_text(yaml)
    rules = Rules.from_file(tmp_path / "a.toml")
    assert rules == Rules.from_file(tmp_path / "a.yaml")
    texts = ["**/layers.*.w1.weight=(None,model)", "**/layers.*.w2.weight=(model,None)"]
    assert rules == Rules.parse(texts, mesh="data=2,model=4", unmatched="error").then(
        Rules.preset("llama/tp")
    )


def test_every_family_and_model_type_is_in_its_table():
    rows = dict(re.findall(r"^\| `(\w+)` \| .* \| ([\w, ]+) \|$", DOCUMENT, re.MULTILINE))
    listed = {kind: family for family in FAMILIES for kind in rows[family].split(", ")}
    assert listed == MODEL_TYPES
