"""Short texts of values, names and numbers for people, safe for any value.

Pure, and fast to import.

A value from a checkpoint or a caller may be long, deep or a number of a million digits. The message
that refuses it must still be short, and the code that makes it must not raise. Names, metadata and
messages may come from another person's checkpoint. `visible` makes them safe for a terminal: its
result cannot move the cursor, change a colour or reverse the direction of writing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from reprlib import Repr
from typing import NamedTuple, Self


class _Short(Repr):
    """Shows an array or a tensor by its kind and shape: its elements may be on a device."""

    def repr_instance(self, x: object, level: int) -> str:
        if isinstance(x, dict):  # such as an OrderedDict, which a module's state is
            return self.repr_dict(x, level)
        with suppress(Exception):  # of a nested tensor, which has no shape
            shape = getattr(x, "dtype", None) and getattr(x, "shape", ())
            if isinstance(shape, tuple) and shape and not isinstance(x, type):
                return f"a {type(x).__name__} of shape {shape_text(shape)}"
        return super().repr_instance(x, level)


_SHORT = _Short()
_SHORT.maxlevel = 3
_SHORT.maxtuple = _SHORT.maxlist = _SHORT.maxdict = _SHORT.maxset = 8
_SHORT.maxstring = _SHORT.maxlong = _SHORT.maxother = 60


def shorten(value: object, limit: int = 120) -> str:
    """The value's repr, truncated to `limit` characters.

    >>> shorten(list(range(100)))
    '[0, 1, 2, 3, 4, 5, 6, 7, ...]'
    """
    try:
        text = _SHORT.repr(value)
    except (ValueError, RecursionError):  # Python does not print integers of more than 4,300 digits
        text = f"a {type(value).__name__}"
    return clip(text, limit)


def clip(text: str, limit: int = 120) -> str:
    """The text, truncated to `limit` characters.

    >>> clip("a long story", 7)
    'a long…'
    """
    return text if len(text) <= limit else text[: limit - 1] + "…"


def few(names: Sequence[str], most: int = 5) -> str:
    """The first names, and the number of the others.

    >>> few(["a", "b", "c", "d"], 2)
    'a, b and 2 more'
    """
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(clip(name) for name in names[:most])}{more}"


def numbered(what: str, numbers: Sequence[int]) -> str:
    """Hosts or processes by their ascending numbers, as text for people.

    >>> numbered("host", [0, 1, 2, 5]), numbered("process", [3])
    ('hosts 0-2, 5', 'process 3')
    """
    runs: list[list[int]] = []
    for p in numbers:
        if runs and p == runs[-1][1] + 1:
            runs[-1][1] = p
        else:
            runs.append([p, p])
    listed = [str(a) if a == b else f"{a}-{b}" for a, b in runs[:10]]
    plural = ("es" if what.endswith("s") else "s") if len(numbers) != 1 else ""
    return f"{what}{plural} {', '.join(listed)}" + (", …" if len(runs) > len(listed) else "")


class NamedOption(NamedTuple):
    """An option in a message. Python names it `overwrite=True`, the command line `--overwrite`."""

    field: str
    """Name of the argument in Python."""
    shown: str = ""
    """Value as text for people."""
    typed: tuple[str, ...] = ()
    """Value as it is typed on a command line, a text for each repetition of the option."""

    def __str__(self) -> str:
        """The option as in Python."""
        return f"{self.field}={self.shown}"


def named(field: str, *value: object) -> NamedOption:
    """An option for a message, with its value if there is one; `...` is a value that is not shown.

    >>> str(named("only", ["a", "b"])), named("only", ["a", "b"]).typed
    ("only=['a', 'b']", ('a', 'b'))
    >>> str(named("dtype", ...)), str(named("exclude"))
    ('dtype=…', 'exclude=')
    """
    if not value:
        return NamedOption(field)
    (one,) = value
    if one is ...:
        return NamedOption(field, "…")
    several = isinstance(one, list | tuple) and all(isinstance(text, str) for text in one)
    texts = (
        [one]
        if isinstance(one, str)
        else list(one)
        if several and isinstance(one, Sequence)
        else [shorten(one)]
    )
    if one is True:
        texts = []
    elif isinstance(one, Mapping):
        shown = {key: of if isinstance(of, str) else shorten(of) for key, of in one.items()}
        texts = [f"{key}={of}" for key, of in shown.items()]
    elif isinstance(one, tuple) and not several:  # worker 0 of 8
        texts = ["/".join(map(shorten, one))]
    most = _SHORT.maxlist
    return NamedOption(
        field, shorten(one), (*map(clip, texts[:most]), *["…"] * (len(texts) > most))
    )


def named_size(field: str, nbytes: int) -> NamedOption:
    """An option for a message, whose value is a number of bytes."""
    return NamedOption(field, file_size(nbytes), (file_size(nbytes).replace(" ", ""),))


class Message(str):
    """A message that names options. As text, it names them as Python does.

    >>> Message("replace it with ", named("overwrite", True), ".")
    'replace it with overwrite=True.'
    """

    __slots__ = ("parts",)
    parts: tuple[str | NamedOption, ...]

    def __new__(cls, *parts: str | NamedOption) -> Self:
        """Join texts, options and other messages."""
        flat = [
            one
            for part in parts
            for one in (part.parts if isinstance(part, Message) else (part,))
            if one != ""
        ]
        made = super().__new__(cls, "".join(map(str, flat)))
        made.parts = tuple(flat)
        return made

    def without_stop(self) -> Message:
        """The message without a full stop at its end."""
        *parts, last = self.parts or ("",)
        return Message(*parts, last.removesuffix(".") if isinstance(last, str) else last)

    def __reduce__(self) -> tuple[type[Message], tuple[str | NamedOption, ...]]:
        """Keep the options where a worker's error is pickled."""
        return Message, self.parts

    def worded(self, word: Callable[[NamedOption], str]) -> str:
        """The message, with `word(option)` for each option."""
        return "".join(word(part) if isinstance(part, NamedOption) else part for part in self.parts)


def given(**arguments: object) -> Message:
    """The arguments of a call that were given, for a message about them.

    >>> given(include=["model/**"], exclude=None)
    "include=['model/**']"
    """
    options = [named(name, value) for name, value in arguments.items() if value is not None]
    return Message(*[part for option in options for part in (", ", option)][1:])


REPOSITORY = "git+https://github.com/shardckpt/shardckpt"
"""Address from which pip installs shardckpt until it is on an index: `Source` in `[project.urls]`
of pyproject.toml."""


def install_command(*extras: str) -> str:
    """The command that installs shardckpt with some extras.

    >>> install_command("gcs", "torch")
    "pip install 'shardckpt[gcs,torch] @ git+https://github.com/shardckpt/shardckpt'"
    """
    return f"pip install 'shardckpt[{','.join(extras)}] @ {REPOSITORY}'"


def file_size(nbytes: int) -> str:
    """Bytes in the largest fitting binary unit.

    >>> file_size(0), file_size(1536), file_size(13 << 30)
    ('0 B', '1.5 KiB', '13 GiB')
    """
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1000 or unit == "TiB":
            break
        size /= 1024
    digits = 0 if unit == "B" or size >= 100 else 1
    return f"{size:,.{digits}f}".removesuffix(".0") + f" {unit}"


def mebibytes_above(nbytes: int) -> str:
    """A memory limit that is enough for this many bytes, in whole MiB.

    >>> mebibytes_above(8 << 20), mebibytes_above((8 << 20) + 1)
    ('8 MiB', '9 MiB')
    """
    return f"{-(-nbytes >> 20):,} MiB"


def duration_text(seconds: float) -> str:
    """The duration in the largest unit of which it has at least two, rounded down.

    >>> duration_text(3), duration_text(150), duration_text(24 * 3600), duration_text(60 * 3600)
    ('3 s', '2 min', '24 h', '2 d')
    """
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{int(seconds // length):,} {unit}"
    return f"{int(seconds)} s"


def visible(text: str) -> str:
    r"""The text on one line, with unprintable characters escaped as in Python.

    >>> print(visible("größe\n\x1b[2J\u202e"))
    größe\n\x1b[2J\u202e
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def count(n: int, noun: str) -> str:
    """A number with its noun.

    >>> count(1, "tensor"), count(1200, "tensor")
    ('1 tensor', '1,200 tensors')
    """
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"


def shape_text(shape: Sequence[int]) -> str:
    """A shape as text.

    >>> shape_text((4096, 11008)), shape_text(())
    ('4096×11008', 'scalar')
    """
    return "×".join(map(str, shape)) if shape else "scalar"


def index_range(start: int, stop: int) -> str:
    """A half-open range in numpy's notation."""
    return f"{start}:{stop}"
