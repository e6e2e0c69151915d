"""Messages of the library with the command line's options: `only=['a']` becomes `--only a`.

The library's messages name the arguments of its functions, which is right for its callers. Only this module knows the option of
each argument.
"""

from __future__ import annotations

import ast
import re
from shlex import quote

_SAME = """
    add_prefix config dtype engine exclude grace include into invert_mapping layout like mapping max_shard_size memory_limit mesh only
    optimizer overwrite rate rename rename_file strip_prefix ties to trust_pickle unmatched verify worker workers
"""
OPTIONS = {name: f"--{name.replace('_', '-')}" for name in _SAME.split()}
OPTIONS |= {"compression": "--compress", "from_": "--from", "rules": "--rule"}
"""The option of each argument."""

_QUOTED = r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\""
_VALUE = rf"{_QUOTED}|\[[^\]]*\]|\{{[^}}]*\}}|\([^)]*\)|…|True|-?[\d.,]*\d(?:[ ]?(?:B|[KMGT]iB)\b)?"
_PATTERN = re.compile(
    rf"""(?<!\w)(?:{_QUOTED})(?!\w)  # a name or a path, which stays as it is
      | (?<![\w./=-])(?P<call>(?:Rules|SaveOptions|export)\()?(?P<name>{"|".join(OPTIONS)})=(?P<value>{_VALUE})?(?(call)\))
    """,
    re.VERBOSE,
)


def with_options(message: str) -> str:
    """The message with command-line options instead of Python arguments.

    >>> with_options("run/1: only=['a b', 'c'] selects none of its names")
    "run/1: --only 'a b' --only c selects none of its names"
    >>> with_options("replace it with overwrite=True, or leave it out with exclude=.")
    'replace it with --overwrite, or leave it out with --exclude.'
    >>> with_options("export(to='torch') takes no max_shard_size=, and 'only=x' is a name")
    "--to torch takes no --max-shard-size, and 'only=x' is a name"
    >>> with_options("only=['a', ...] selects none of its names")
    "--only a --only '…' selects none of its names"
    """
    return _PATTERN.sub(_in_options, message)


def _in_options(found: re.Match[str]) -> str:
    """An option with its value as it is typed, or the option alone if the message has no value."""
    if found["name"] is None:
        return found[0]
    option, text = OPTIONS[found["name"]], found["value"]
    if text in (None, "…", "True"):
        return option
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):  # it was truncated, or is a size
        return f"{option} {text}"
    return " ".join(f"{option} {quote(one)}" for one in _typed(value))


def _typed(value: object) -> list[str]:
    """A value as texts, one for each repetition of the option."""
    if isinstance(value, dict):
        return [f"{key}={one}" for key, one in value.items()]
    if isinstance(value, tuple):  # worker 0 of 8
        return ["/".join(map(str, value))]
    return ["…" if one is Ellipsis else str(one) for one in (value if isinstance(value, list) else [value])]
