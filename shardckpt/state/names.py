"""Containers of a state, names of its leaves, and paths of its arrays.

`container_of` recognises these containers, in this order:

1. dict, OrderedDict, defaultdict, Counter, and list, tuple, deque. Subclasses of these do not
   count, unless one of the following applies: rebuilding them as the base class would lose what
   makes them different.
2. Named tuples: by field.
3. Classes in the pytree registry of torch or JAX: by the registry's keys. The registries are looked
   up, never imported: an object of a registered class exists only if its framework is imported.
4. Dataclasses: by field. They come after the registries, because a registered dataclass (a flax
   TrainState, say) keeps functions and other constants out of the tree. A dataclass that is also a
   dict, list, text or number, or a torch module, has more than its fields, and does not count.

A container of any class is stored in one of three plain forms: dict, list or tuple.

A *name* is for people and for JSON: the keys that lead to a leaf, joined with "/", each rendered so
that no two places of one state share a name (`component_names`).

    ~   → ~0        an empty key       → ~e
    /   → ~1        a lone surrogate   → ~u and its four hex digits
    a key that is not a string → its text (`0`, `True`, `None`), and "~" after it where a string
                                 key beside it reads the same

An *array path* is for storages, which accept less: RFC 3986's unreserved characters only, in
components of at most 200 bytes, none of which is `.`, `..` or `zarr.json`, begins with `__`
(reserved by zarr v3), `.` or `~`, or ends with a dot. `array_path` escapes any string into such a
path, and `name_of_array_path` is its exact inverse:

    any other character   → its UTF-8 bytes, each as "=" and two hex digits (URLs, shells and globs
                          leave "=" alone)
    an empty component    → =-
    a component too long  → several, all but the last with "=" at their end
"""

from __future__ import annotations

import copy
import dataclasses
import re
import sys
from bisect import bisect_left
from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import TYPE_CHECKING, Any, Literal

from shardckpt.errors import FormatError, LeafError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

Form = Literal["dict", "list", "tuple"]
"""The stored form of a container."""

PathKey = str | int | bool | None
"""A key of a container: a dict's key, with its type, or an index into a sequence."""

_UNSAFE_IN_NAME = re.compile("[~/\ud800-\udfff]")
_LARGEST_DECIMAL = 10**20
"""Larger integer keys are written in hex: Python converts long integers to decimal in quadratic
time, or not at all."""


def component_names(keys: Sequence[PathKey]) -> list[str]:
    """The name components of the keys of one container.

    >>> component_names(["a/b", "", "0", 0, True])
    ['a~1b', '~e', '0', '0~', 'True']
    """
    if (
        set(map(type, keys)) <= {str}
        and all(keys)
        and _UNSAFE_IN_NAME.search("".join(keys)) is None  # type: ignore[arg-type]
    ):
        return list(keys)  # type: ignore[arg-type]
    strings = {key for key in keys if isinstance(key, str)}
    return [
        _string_component(key) if isinstance(key, str) else _other_component(key, strings)
        for key in keys
    ]


def _string_component(key: str) -> str:
    if _UNSAFE_IN_NAME.search(key):
        return _UNSAFE_IN_NAME.sub(
            lambda match: {"~": "~0", "/": "~1"}.get(match[0]) or f"~u{ord(match[0]):04x}", key
        )
    return key or "~e"


def _other_component(key: int | bool | None, strings: set[str]) -> str:
    text = str(key) if key is None or abs(key) < _LARGEST_DECIMAL else hex(key)
    return text + "~" if text in strings else text


def match_keys(stored: Sequence[PathKey], own: Sequence[PathKey]) -> Sequence[PathKey]:
    """The keys of a stored dict, each as the key of one's own dict that it matches.

    A key without a match is unchanged.

    A stored text that is not among one's own keys matches the key of another type that has this
    text: formats that write all keys as text cannot tell the two apart.

    >>> match_keys(["0", "1"], [0, "1", 1])
    [0, '1']
    """
    others = [key for key in own if type(key) is not str]
    if not others:
        return stored
    typed = {(type(key), key) for key in stored}
    texts = {_other_component(key, set()): key for key in others if (type(key), key) not in typed}  # type: ignore[arg-type]
    own_texts = {key for key in own if type(key) is str}
    return [
        texts.get(key, key) if type(key) is str and key not in own_texts else key for key in stored
    ]


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


# --- containers -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Container:
    """One level of a container."""

    form: Form
    """The stored form."""
    keys: Sequence[PathKey]
    """Keys of the children; 0, 1, … unless the form is dict."""
    children: Sequence[object]
    """Children, one per key."""
    rebuild: Callable[[list[object]], object]
    """Makes a container of the same class and other attributes from as many new children."""


def container_of(value: object, where: str) -> Container | None:
    """Split a container into keys and children; None if `value` is not a container.

    Args:
        value: any object.
        where: its name, for messages.

    Raises:
        LeafError: a key is neither str, int, bool nor None, or occurs twice.
    """
    kind = type(value)
    if value is None:  # a leaf here; to JAX, a node without children
        return None
    if kind in _DICTS:
        return _of_dict(value, where)  # type: ignore[arg-type]
    if kind in _SEQUENCES:
        return _of_sequence(value)  # type: ignore[arg-type]
    if isinstance(value, tuple) and hasattr(kind, "_fields") and hasattr(kind, "_make"):
        return Container("dict", kind._fields, value, kind._make)
    return _of_torch_node(value, where) or _of_jax_node(value, where) or _of_dataclass(value)


_DICTS = frozenset({dict, OrderedDict, defaultdict, Counter})
_SEQUENCES = frozenset({list, tuple, deque})
_CONTENTS = (dict, list, tuple, deque, set, frozenset, str, bytes, bytearray, int, float, complex)
"""Classes whose objects have contents beside their attributes."""
_KEYS = frozenset({str, int, bool, type(None)})


def is_key(key: object) -> bool:
    """Whether a dict in a state may have a key."""
    return type(key) in _KEYS


def _of_dict(value: dict[Any, object], where: str) -> Container:
    for key in value:
        if type(key) not in _KEYS:
            raise LeafError(
                f"{shown(where)} has a key of type {type(key).__qualname__}{_key_text(key)}; "
                f"keys are str, int, bool or None. Convert it to one of these first."
            )

    def rebuild(children: list[object]) -> object:
        new: dict[Any, object] = (
            defaultdict(value.default_factory) if isinstance(value, defaultdict) else type(value)()
        )
        # Attributes of the dict are kept: torch's Module.load_state_dict looks for `_metadata`.
        if hasattr(value, "__dict__"):
            vars(new).update(vars(value))
        for key, child in zip(value, children, strict=True):
            new[key] = child  # noqa: PERF403  # a Counter's constructor and update() count
        return new

    return Container("dict", list(value), list(value.values()), rebuild)


def _of_sequence(value: list[object] | tuple[object, ...] | deque[object]) -> Container:
    def rebuild(children: list[object]) -> object:
        return deque(children, value.maxlen) if isinstance(value, deque) else type(value)(children)

    return Container(
        "tuple" if isinstance(value, tuple) else "list", range(len(value)), value, rebuild
    )


def _of_dataclass(value: object) -> Container | None:
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return None
    if isinstance(value, _CONTENTS) or hasattr(value, "named_parameters"):
        return None
    names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]

    def rebuild(children: list[object]) -> object:
        # Neither __init__ nor __post_init__ runs: the stored values are final field values.
        new = copy.copy(value)
        for name, child in zip(names, children, strict=True):
            object.__setattr__(new, name, child)  # works for frozen dataclasses, too
        return new

    return Container("dict", names, [getattr(value, name) for name in names], rebuild)


def _key_text(key: object) -> str:
    # Only of these types is repr() known to be short and free of side effects.
    return f", {key!r}" if isinstance(key, int | float | str) else ""


def imported_module(name: str) -> Any:
    """A module that the program has imported.

    None if it has not, or if another thread is still importing it.

    An object of the module's own types exists only after the import.
    """
    module = sys.modules.get(name)
    return None if getattr(getattr(module, "__spec__", None), "_initializing", False) else module


def _of_torch_node(value: object, where: str) -> Container | None:
    pytree = imported_module("torch.utils._pytree")
    node = getattr(pytree, "SUPPORTED_NODES", {}).get(type(value))
    if node is None:
        return None
    if node.flatten_with_keys_fn is None:
        children, context = node.flatten_fn(value)
        entries: Iterable[object] = [None] * len(children)
    else:
        pairs, context = node.flatten_with_keys_fn(value)
        pairs = list(pairs)
        entries, children = [entry for entry, _ in pairs], [child for _, child in pairs]
    return _of_node(entries, children, lambda children: node.unflatten_fn(children, context), where)


def _of_jax_node(value: object, where: str) -> Container | None:
    tree_util = imported_module("jax.tree_util")
    # Older versions of JAX without `is_tree_node` flatten any value; newer ones warn about
    # iterators.
    if tree_util is None or not getattr(tree_util, "is_tree_node", lambda _kind: True)(type(value)):
        return None
    pairs, structure = tree_util.tree_flatten_with_path(
        value, is_leaf=lambda node: node is not value
    )
    if any(not path for path, _ in pairs):  # JAX treats `value` as a leaf: the path is empty
        return None
    return _of_node(
        [path[0] for path, _ in pairs], [child for _, child in pairs], structure.unflatten, where
    )


def _of_node(
    entries: Iterable[object],
    children: Sequence[object],
    rebuild: Callable[[list[object]], object],
    where: str,
) -> Container:
    """A registered node: a list if its registry only numbers the children, otherwise a dict."""
    entries = list(entries)
    if children and all(
        entry is None or hasattr(entry, "idx") or type(entry).__name__ == "FlattenedIndexKey"
        for entry in entries
    ):
        return Container("list", range(len(children)), children, rebuild)
    keys = [_plain_key(entry) for entry in entries]
    if len({(type(key), key) for key in keys}) != len(keys):
        raise LeafError(
            f"{shown(where)} is a pytree node whose registry gives two children the same key: "
            f"{keys[:10]!r}; give them different keys."
        )
    return Container("dict", keys, children, rebuild)


def _plain_key(entry: object) -> PathKey:
    for attribute in ("key", "idx", "name"):
        key = getattr(entry, attribute, entry)
        if type(key) in _KEYS:
            return key  # type: ignore[return-value]
    return str(entry)


# --- array paths ----------------------------------------------------------------------------------

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

    Any string has a path, and different strings have different paths. (Paths may differ in case
    only, and a storage may limit the length of a path: 1,024 bytes on GCS and S3.)

    >>> array_path("model/layers.0.weight")
    'model/layers.0.weight'
    >>> array_path("../é")
    '=2E=2E/=C3=A9'
    """
    if _PLAIN_NAME.fullmatch(name):
        return name
    return "/".join(part if _PLAIN.fullmatch(part) else _escape(part) for part in name.split("/"))


def piece_path(name: str, shape: Sequence[int], start: Sequence[int]) -> str:
    """The path of a piece of a tensor that is stored in pieces.

    No tensor's `array_path` has such an ending.

    The path contains the row-major position of the piece's first element, which every process knows
    of its own pieces.

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
        token = character if _SAFE.fullmatch(character) else _escape_of(character)
        if length + len(token) > _LONGEST:
            pieces.append([])
            length = 0
        pieces[-1].append(token)
        length += len(token)
    return "=/".join(map(_guard, pieces))


def _escape_of(character: str) -> str:
    return "".join(f"={byte:02X}" for byte in character.encode("utf-8", "surrogatepass"))


def _guard(tokens: list[str]) -> str:
    """One component, with beginnings and endings escaped that a storage or zarr reserves."""
    if tokens[-1] == ".":
        tokens[-1] = _escape_of(".")
    if (
        tokens[0] in {".", "~"}
        or tokens[:2] == ["_", "_"]
        or "".join(tokens).lower() == "zarr.json"
    ):
        tokens[0] = _escape_of(tokens[0])
    return "".join(tokens)


def name_of_array_path(path: str) -> str:
    """The name whose `array_path` is `path`.

    Raises:
        FormatError: `path` is not the `array_path` of any name.
    """
    name = "/".join(_unescape(part, path) for part in path.replace("=/", "").split("/"))
    if array_path(name) != path:
        raise FormatError(
            f"Array path {path!r} is not how an array's name is escaped; shardckpt did not write "
            "it."
        )
    return name


def _unescape(component: str, path: str) -> str:
    if component == "=-":
        return ""
    if not _ESCAPED.fullmatch(component):
        raise FormatError(
            f"Array path {path!r}: the component {component[:80]!r} is not an escaped name; "
            "shardckpt did not write it."
        )
    data = re.sub(rb"=(..)", lambda match: bytes.fromhex(match[1].decode()), component.encode())
    try:
        return data.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        raise FormatError(
            f"Array path {path!r}: the component {component[:80]!r} is not UTF-8; shardckpt did "
            "not write it."
        ) from None


# --- suggestions ----------------------------------------------------------------------------------

_SHORTLIST = 100
"""Most names that are compared with a name."""
_COMPARED = 200
"""Most characters of a name that are compared."""


class Candidates:
    """Names that may be suggested, sorted once for many questions."""

    def __init__(self, candidates: Iterable[str]) -> None:
        names = list(candidates)
        self._names = names
        self._sorted = [
            sorted((name[:_COMPARED], name) for name in names),
            sorted((_backwards(name), name) for name in names),
        ]
        """The names by their beginnings, and by their ends."""

    def nearest(self, name: str) -> str | None:
        """The candidate that is most similar to `name`, or None if none is similar.

        A good comparison of texts is slow, so a shortlist comes first: of many candidates, those
        beside the name in both orders, among which are those with the longest common beginning and
        end.
        """
        best, best_ratio = None, 0.6
        for candidate in self._shortlist(name):
            matcher = SequenceMatcher(
                None, name[-_COMPARED:], candidate[-_COMPARED:], autojunk=False
            )
            if matcher.quick_ratio() > best_ratio and matcher.ratio() > best_ratio:
                best, best_ratio = candidate, matcher.ratio()
        return best

    def _shortlist(self, name: str) -> Iterable[str]:
        if len(self._names) <= _SHORTLIST:
            return self._names
        beside: dict[str, None] = {}
        for names, end in zip(self._sorted, (name[:_COMPARED], _backwards(name)), strict=True):
            at = bisect_left(names, (end, ""))
            near = names[max(0, at - _SHORTLIST // 4) : at + _SHORTLIST // 4]
            beside.update(dict.fromkeys(candidate for _, candidate in near))
        return beside


def _backwards(name: str) -> str:
    return name[: -_COMPARED - 1 : -1]


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """The end of a message about a missing name: " (did you mean …?)", or empty."""
    return suggested(Candidates(candidates).nearest(name))


def suggested(name: str | None) -> str:
    """A suggestion in a message; empty if there is none."""
    return "" if name is None else f" (did you mean {shown(name)}?)"


def natural_key(name: str) -> list[tuple[int, int, str]]:
    """Sort key that orders numbers inside names by value.

    >>> sorted(["10", "9", "step-2"], key=natural_key)
    ['9', '10', 'step-2']
    """
    digits = [(part.isdecimal(), part) for part in re.split(r"(\d+)", name) if part]
    return [
        (0, len(part.lstrip("0")), part.lstrip("0")) if is_number else (1, 0, part)
        for is_number, part in digits
    ]
