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
NO_NAMES = {"found", "wanted", "told", "said", "taken", "some"}
"""Words that name no value: a noun says what was found, and a verb what a function does."""
PUBLIC_NAMES = {
    "shardckpt/training/policies.py": {"wanted"},  # `Policy.wanted`
    "shardckpt/training/state.py": {"wanted"},  # a parameter of `TrainState`
    "shardckpt/state/flatten.py": {"wanted"},  # the same parameter of `StateOwner`
}


def docstrings(source):
    """Strings that stand alone: docstrings, and those of attributes; with their lines."""
    for node in ast.walk(ast.parse(source)):
        for statement in (
            getattr(node, "body", None) or []
            if not isinstance(node, ast.Lambda | ast.IfExp)
            else []
        ):
            if (
                isinstance(statement, ast.Expr)
                and isinstance(statement.value, ast.Constant)
                and isinstance(statement.value.value, str)
            ):
                yield statement.lineno, statement.value.value.strip()


def comments(source):
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("# ")


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_docstring_or_comment_opens_as_a_question(folder):
    """An editor shows the first line of a docstring alone: it is a noun phrase or begins with a
    verb."""
    questions = []
    for path in (ROOT / folder).rglob("*.py"):
        source = path.read_text()
        opening = [
            *docstrings(source),
            *(
                (line, text)
                for line, text in comments(source)
                if re.match(r"Wh(o|at|oever|ose)\b", text)
            ),
        ]
        questions += [
            f"{path.relative_to(ROOT)}:{line}: {text.splitlines()[0]}"
            for line, text in opening
            if QUESTION.match(text)
        ]
    assert questions == []


def bindings(tree):
    """Names of variables, attributes, parameters and functions where they are bound, with their
    lines."""
    for node in ast.walk(tree):
        match node:
            case (
                ast.Name(id=name, ctx=ast.Store())
                | ast.Attribute(attr=name, ctx=ast.Store())
                | ast.arg(arg=name)
            ):
                yield node.lineno, name
            case (
                ast.FunctionDef(name=name)
                | ast.AsyncFunctionDef(name=name)
                | ast.MatchAs(name=str(name))
                | ast.alias(asname=str(name))
            ):
                yield node.lineno, name


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_name_is_a_participle_that_says_nothing_of_its_value(folder):
    names = []
    for path in (ROOT / folder).rglob("*.py"):
        refused = NO_NAMES - PUBLIC_NAMES.get(str(path.relative_to(ROOT)), set())
        bound = bindings(ast.parse(path.read_text()))
        names += [
            f"{path.relative_to(ROOT)}:{line}: {name}"
            for line, name in bound
            if name.lstrip("_") in refused
        ]
    assert names == []
