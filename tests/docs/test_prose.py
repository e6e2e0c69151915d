"""The rules of prose that a program can check."""

from __future__ import annotations

import ast
import io
import re
import tokenize

import pytest
from paths import ROOT

QUESTION = re.compile(r"(Who|Whoever|Whose|What|Whatever|How|Why|Where|When|Which)\b")
FOLDERS = ["shardckpt", "tools", "examples", "tests"]


def docstrings(source):
    """Strings that stand alone: docstrings, and those of attributes; with their lines."""
    for node in ast.walk(ast.parse(source)):
        for statement in getattr(node, "body", None) or [] if not isinstance(node, ast.Lambda | ast.IfExp) else []:
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant) and isinstance(statement.value.value, str):
                yield statement.lineno, statement.value.value.strip()


def comments(source):
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("# ")


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_docstring_or_comment_opens_as_a_question(folder):
    """An editor shows the first line of a docstring alone: it is a noun phrase or begins with a verb."""
    questions = []
    for path in (ROOT / folder).rglob("*.py"):
        source = path.read_text()
        opening = [*docstrings(source), *((line, text) for line, text in comments(source) if re.match(r"Wh(o|at|oever|ose)\b", text))]
        questions += [f"{path.relative_to(ROOT)}:{line}: {text.splitlines()[0]}" for line, text in opening if QUESTION.match(text)]
    assert questions == []
