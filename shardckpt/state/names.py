"""Names of places in a state, and the paths under which their arrays are stored.

A *name* is for people and for JSON: the keys that lead to a leaf, joined with "/", each rendered so that no two
places of one state share a name (`component_names`).

    ~   → ~0        an empty key       → ~e
    /   → ~1        a lone surrogate   → ~u and its four hex digits
    a key that is no string → its text (`0`, `True`, `None`), and "~" after it where a string key beside it reads the same

An *array path* is for storages, which accept less: RFC 3986's unreserved characters only, in components of at most
200 bytes, none of which is `.`, `..` or `zarr.json`, begins with `__` (reserved by zarr v3), `.` or `~`, or ends with
a dot. `array_path` escapes any string into such a path, and `name_of_array_path` is its exact inverse:

    any other character     → its UTF-8 bytes, each as "=" and two hex digits (URLs, shells and globs leave "=" alone)
    an empty component      → =-
    a component too long    → several, all but the last with "=" at their end
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from difflib import SequenceMatcher
from functools import lru_cache

from shardckpt.errors import FormatError, OptionError

PathKey = str | int | bool | None
"""A key of a container: a dict's key, with its type, or an index into a sequence."""

Only = str | Sequence[str] | Callable[[str], bool]
"""A selection of names: a pattern, several patterns, or a function."""

_UNSAFE_IN_NAME = re.compile("[~/\ud800-\udfff]")
_LARGEST_DECIMAL = 10**20
"""Larger integer keys are written in hex: Python converts long integers to decimal in quadratic time, or not at all."""


def component_names(keys: Sequence[PathKey]) -> list[str]:
    """The name components of the keys of one container.

    >>> component_names(["a/b", "", "0", 0, True])
    ['a~1b', '~e', '0', '0~', 'True']
    """
    strings = {key for key in keys if isinstance(key, str)}
    return [_string_component(key) if isinstance(key, str) else _other_component(key, strings) for key in keys]


def _string_component(key: str) -> str:
    if _UNSAFE_IN_NAME.search(key):
        return _UNSAFE_IN_NAME.sub(lambda found: {"~": "~0", "/": "~1"}.get(found[0]) or f"~u{ord(found[0]):04x}", key)
    return key or "~e"


def _other_component(key: int | bool | None, strings: set[str]) -> str:
    text = str(key) if key is None or abs(key) < _LARGEST_DECIMAL else hex(key)
    return text + "~" if text in strings else text


def child_name(parent: str, component: str) -> str:
    """The name of a child; the state itself has the name "", and no component is empty.

    >>> child_name(child_name("", "model"), "w")
    'model/w'
    """
    return f"{parent}/{component}" if parent else component


def shown(name: str) -> str:
    """A name for messages: quoted, at most about 300 characters, and in words for the state itself.

    >>> shown("model/w"), shown("")
    ("'model/w'", 'The state itself')
    """
    if not name:
        return "The state itself"
    return repr(name) if len(name) <= _SHOWN else repr("…" + name[-_SHOWN:])


_SHOWN = 300


# --- array paths ----------------------------------------------------------------------------------------------------

_COMPONENT = r"(?!__)(?!zarr\.json(?:/|$))[A-Za-z0-9_-](?:[A-Za-z0-9._~-]{0,188}[A-Za-z0-9_~-])?"
_PLAIN = re.compile(_COMPONENT, re.ASCII | re.IGNORECASE)
"""Components that need no escape."""
_PLAIN_NAME = re.compile(f"{_COMPONENT}(?:/{_COMPONENT})*", re.ASCII | re.IGNORECASE)
"""Names of which no component needs an escape, which are nearly all."""
_ESCAPED = re.compile(r"(?:[A-Za-z0-9._~-]|=[0-9A-F]{2})+", re.ASCII)
_SAFE = re.compile(r"[A-Za-z0-9._~-]", re.ASCII)
_LONGEST = 190
"""Bytes of a component before it is split; the later additions keep it below 200."""


def array_path(name: str) -> str:
    """The path of the array called `name`, relative to the group that holds all arrays.

    Any string has a path, and different strings have different paths. (Paths may differ in case only, and a storage may
    limit the length of a path: 1,024 bytes on GCS and S3.)

    >>> array_path("model/layers.0.weight")
    'model/layers.0.weight'
    >>> array_path("../é")
    '=2E=2E/=C3=A9'
    """
    if _PLAIN_NAME.fullmatch(name):
        return name
    return "/".join(part if _PLAIN.fullmatch(part) else _escape(part) for part in name.split("/"))


def piece_path(name: str, shape: Sequence[int], start: Sequence[int]) -> str:
    """The path of a piece of a tensor that is stored in pieces. No tensor's `array_path` has such an ending.

    The path contains the row-major position of the piece's first element, which every process knows of its own pieces.

    >>> piece_path("model/w", (4, 6), (2, 3))
    'model/w=p15'
    """
    position = 0
    for n, i in zip(shape, start, strict=True):
        position = position * n + i
    return f"{array_path(name)}=p{position}"


def _escape(component: str) -> str:
    if not component:
        return "=-"
    pieces: list[list[str]] = [[]]
    length = 0
    for character in component:
        token = character if _SAFE.fullmatch(character) else _escaped(character)
        if length + len(token) > _LONGEST:
            pieces.append([])
            length = 0
        pieces[-1].append(token)
        length += len(token)
    return "=/".join(map(_guarded, pieces))


def _escaped(character: str) -> str:
    return "".join(f"={byte:02X}" for byte in character.encode("utf-8", "surrogatepass"))


def _guarded(tokens: list[str]) -> str:
    """One component, with beginnings and endings escaped that a storage or zarr reserves."""
    if tokens[-1] == ".":
        tokens[-1] = _escaped(".")
    if tokens[0] in {".", "~"} or tokens[:2] == ["_", "_"] or "".join(tokens).lower() == "zarr.json":
        tokens[0] = _escaped(tokens[0])
    return "".join(tokens)


def name_of_array_path(path: str) -> str:
    """The name whose `array_path` is `path`.

    Raises:
        FormatError: `path` is not the `array_path` of any name.
    """
    name = "/".join(_unescape(part, path) for part in path.replace("=/", "").split("/"))
    if array_path(name) != path:
        raise FormatError(f"Array path {path!r} is not how an array's name is escaped; shardckpt did not write it.")
    return name


def _unescape(component: str, path: str) -> str:
    if component == "=-":
        return ""
    if not _ESCAPED.fullmatch(component):
        raise FormatError(f"Array path {path!r}: the component {component[:80]!r} is not an escaped name; shardckpt did not write it.")
    data = re.sub(rb"=(..)", lambda found: bytes.fromhex(found[1].decode()), component.encode())
    try:
        return data.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        raise FormatError(f"Array path {path!r}: the component {component[:80]!r} is no UTF-8; shardckpt did not write it.") from None


# --- choosing names -------------------------------------------------------------------------------------------------


def matches(pattern: Only, name: str) -> bool:
    """Whether `pattern` selects `name`.

    In a pattern `*` stands for any characters within one component and `**` for any characters at all; a component
    that is just `**` stands for any number of components, including none. `?` is one character within a component
    and `[ab]`, `[!ab]` are sets of characters. A sequence of patterns selects the names that any of them selects.

    >>> matches("model/layers.*.weight", "model/layers.0.weight"), matches("model/*", "model/a/b")
    (True, False)
    >>> matches("**/exp_avg", "exp_avg"), matches(["a", "model/**"], "model/a/b")
    (True, True)

    Raises:
        OptionError: `pattern` is neither text, a sequence of texts nor a function.
    """
    return selector(pattern)(name)


def selector(only: Only | None) -> Callable[[str], bool]:
    """A function that returns whether `only` selects a name; None selects all names.

    Raises:
        OptionError: `only` is neither text, a sequence of texts nor a function.
    """
    if only is None:
        return lambda _name: True
    if callable(only):
        return only
    patterns = [only] if isinstance(only, str) else only
    if not isinstance(patterns, Sequence) or not all(isinstance(pattern, str) for pattern in patterns):
        raise OptionError(f"only= takes a pattern, a list of patterns or a function of a name, not {only!r}.")
    compiled = [pattern_regex(pattern) for pattern in patterns]
    return lambda name: any(regex.fullmatch(name) for regex in compiled)


_GLOB = re.compile(
    r"""(?P<components> (?:(?:(?<=/)|^)\*\*/)+ )  # whole components, however many; repeats would only backtrack
      | (?P<all> \*\*+ ) | (?P<star> \* ) | (?P<one> \? )
      | \[ (?P<negated> !? ) (?P<members> \][^\]]* | [^\]]+ ) \]
      | (?P<text> . )""",
    re.VERBOSE | re.DOTALL,
)


@lru_cache(maxsize=1024)
def pattern_regex(pattern: str) -> re.Pattern[str]:
    """A regular expression that fully matches the names that a pattern selects; see `matches`.

    Raises:
        OptionError: `pattern` is not a valid pattern.
    """
    try:
        return re.compile("".join(map(_regex_of, _GLOB.finditer(pattern))), re.DOTALL)
    except re.error as error:
        raise OptionError(f"{pattern!r} is not a pattern of names: {error.msg}. Write a bracket that stands for itself as '[[]'.") from None


def _regex_of(token: re.Match[str]) -> str:
    if token["components"]:
        return "(?:[^/]*/)*"
    if token["all"]:
        return ".*"
    if token["star"]:
        return "[^/]*"
    if token["one"]:
        return "[^/]"
    if token["members"]:
        members = re.sub(r"([\\\[\]^&|~])", r"\\\1", token["members"])
        return f"(?!/)[{'^' if token['negated'] else ''}{members}]"
    return re.escape(token["text"])


# --- suggestions ----------------------------------------------------------------------------------------------------

_SHORTLIST = 100
_COMPARED = 200


def nearest(name: str, candidates: Iterable[str]) -> str | None:
    """The candidate that is most similar to `name`, or None if none is similar.

    A good comparison of texts is slow, so a shortlist comes first: the candidates with the most characters in common at both ends.
    """
    backwards = name[::-1]

    def common_ends(candidate: str) -> int:
        return _common_start(name, candidate) + _common_start(backwards, candidate[::-1])

    best, best_ratio = None, 0.6
    for candidate in sorted(candidates, key=common_ends, reverse=True)[:_SHORTLIST]:
        ratio = SequenceMatcher(None, name[-_COMPARED:], candidate[-_COMPARED:], autojunk=False).ratio()
        if ratio > best_ratio:
            best, best_ratio = candidate, ratio
    return best


def _common_start(one: str, other: str) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """The end of a message about a missing name: " (did you mean …?)", or empty."""
    found = nearest(name, candidates)
    return "" if found is None else f" (did you mean {found!r}?)"


def natural_key(name: str) -> list[tuple[int, int, str]]:
    """Sort key that orders numbers inside names by value.

    >>> sorted(["10", "9", "step-2"], key=natural_key)
    ['9', '10', 'step-2']
    """
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in re.split(r"(\d+)", name) if part]
