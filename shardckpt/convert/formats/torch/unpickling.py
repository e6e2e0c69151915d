"""A reader of pickles that runs nothing.

A pickle is a program for a small stack machine, and Python's own machine lets it do anything: one
instruction names any object of any module, which is imported, and another calls it. `unpickle` is
another machine for the same programs.

1. Numbers, texts, bytes, tuples, lists and dicts are built as usual.
2. A name in the program is never looked up in a module. It becomes a `Name`, which is a text, or
   its entry in the caller's table.
3. A call in the program is not executed, unless the caller's table has a `Build`, a function of
   this package, under that name. Any other call becomes an `Instance`, a record of the name and the
   arguments. The state and the items of an object are recorded there as well, and nowhere else.
   Sets become such records, too.
4. `only` limits the names that a program may contain. A program is refused as soon as it uses
   another name.

So no pickle can import, call or change anything; at worst it wastes time and memory in proportion
to its size. (Python's own machine, restricted by `find_class`, can still be made to set attributes
of allowed classes, and to fill memory by a large number in a few bytes.) The instructions are those
that protocols 2 to 5 write for such objects; any other is an error.
https://github.com/python/cpython/blob/3.11/Lib/pickletools.py documents each of them.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any, cast

from shardckpt.errors import FormatError
from shardckpt.text import clip, shorten

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Mapping

NEWEST_PROTOCOL = 5
_LEAST_ROOM, _ROOM_PER_BYTE = 1 << 20, 100
"""Bytes that a program may copy and hash: some, and more for each of its own bytes."""
_ITEM_BYTES: dict[type, int] = {str: 1, bytes: 1, list: 8, tuple: 8}
"""Bytes of an item of a sequence, or of a character."""


@dataclass(frozen=True, slots=True)
class Name:
    """A name in a pickle that was not looked up."""

    text: str
    """Module and qualified name, with a dot between."""

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Build:
    """A function that replaces a call in a pickle."""

    function: Callable[..., object]
    """Receives the pickle's arguments. Any exception that it raises counts as an error in the
    pickle."""


@dataclass(slots=True, eq=False, repr=False)
class Instance:
    """A record of a call in a pickle; mostly of a class."""

    name: str
    """Name of the called function or class."""
    arguments: tuple[object, ...]
    state: object = None
    """State that the pickle gives the object: mostly its attributes by name."""
    items: dict[object, object] = field(default_factory=dict)
    """Items, if the object is a dict of its own class."""
    appended: list[object] = field(default_factory=list)
    """Items, if the object is a list or set of its own class."""

    def __repr__(self) -> str:
        return f"a {self.name}"  # arguments and state may be nested without end


def unpickle(
    data: bytes,
    where: str,
    table: Mapping[str, object] | None = None,
    *,
    only: Container[str] | None = None,
    persistent: Callable[[object], object] | None = None,
) -> object:
    """The object that a pickle describes, made only by this module and the functions in `table`.

    Args:
        data: the pickle; bytes after its end are ignored.
        where: the file, for messages.
        table: replacements of the names in the pickle.
        only: the names that the pickle may contain; None: any.
        persistent: returns the object for a persistent id in the pickle. Any exception that it
            raises counts as an error in the pickle.

    Raises:
        FormatError: the pickle is malformed, or contains a name that `only` does not allow.
    """
    machine = _Machine(memoryview(data), {} if table is None else table, only, persistent)
    try:
        return machine.run()
    except _RefusedNameError as e:
        raise FormatError(
            f"{where}: this pickle names {shorten(e.args[0])}, which does not belong in such a "
            "file. A pickle can run code when Python loads it; nothing of this one was run. Ask "
            "the author of the file."
        ) from None
    except FormatError:
        raise
    except (_EndedError, struct.error, IndexError) as e:
        raise FormatError(
            f"{where}: this pickle ends at byte {len(data)}, before its end; replace the file "
            "with a backup."
        ) from e
    except (
        TypeError,
        ValueError,
        KeyError,
        AttributeError,
        OverflowError,
        RecursionError,
        LookupError,
    ) as e:
        reason = clip(str(e) or type(e).__name__)
        raise FormatError(
            f"{where}: this pickle is invalid at byte {machine.at} ({reason}); replace the file "
            "with a backup."
        ) from e


class _RefusedNameError(Exception):
    """A name that `only` does not allow."""


class _EndedError(Exception):
    """The data ends before the program does."""


_INT = struct.Struct("<i")
_UINT2 = struct.Struct("<H")
_UINT4 = struct.Struct("<I")
_UINT8 = struct.Struct("<Q")
_FLOAT = struct.Struct(">d")


_KEYS = frozenset((str, int, bool, float, bytes, type(None), Name, Instance))
"""Types that a key of a dict may have, or an item of a tuple that is a key. A key of another type
becomes an `Instance`."""


class _Machine:
    """Stack, memory and program counter."""

    def __init__(
        self,
        program: memoryview,
        table: Mapping[str, object],
        only: Container[str] | None,
        persistent: Callable[[object], object] | None,
    ) -> None:
        self.program = program
        self.table = table
        self.only = only
        self.persistent = persistent
        self.at = 0
        self.stack: list[Any] = []
        self.marks: list[int] = []
        """Heights of the stack at the marks."""
        self.memo: dict[int, object] = {}
        self.room = _LEAST_ROOM + _ROOM_PER_BYTE * len(program)
        """Bytes that may still be copied or hashed: a program can name one long value many
        times."""

    def run(self) -> object:
        program, instructions = self.program, _INSTRUCTIONS
        while True:
            code = program[self.at]
            self.at += 1
            if code == ord("."):
                return self.pop()
            instruction = instructions.get(code)
            if instruction is None:
                raise ValueError(f"unexpected instruction {code:#04x}")
            instruction(self)

    # --- reading the program ---

    def take(self, n: int) -> memoryview:
        data = self.program[self.at : self.at + n]
        if len(data) != n:
            raise _EndedError
        self.at += n
        return data

    def number(self, form: struct.Struct) -> Any:
        (value,) = form.unpack_from(self.program, self.at)
        self.at += form.size
        return value

    def byte(self) -> int:
        value = self.program[self.at]
        self.at += 1
        return value

    def line(self) -> str:
        start = self.at
        while self.program[self.at] != ord("\n"):
            self.at += 1
        self.at += 1
        return str(self.program[start : self.at - 1], "utf-8")

    def text(self, n: int) -> None:
        self.stack.append(str(self.take(n), "utf-8", "surrogatepass"))

    # --- the stack ---

    def pop(self) -> Any:
        if self.marks and self.marks[-1] == len(self.stack):
            raise ValueError("an instruction takes an item below a mark")
        return self.stack.pop()

    def top(self) -> Any:
        if self.marks and self.marks[-1] == len(self.stack):
            raise ValueError("an instruction changes an item below a mark")
        return self.stack[-1]

    def since_mark(self) -> list[Any]:
        height = self.marks.pop()
        items = self.stack[height:]
        del self.stack[height:]
        return items

    def tuple_of(self, n: int) -> None:
        self.stack.append(tuple(reversed([self.pop() for _ in range(n)])))

    def remember(self, where: int) -> None:
        self.memo[where] = self.top()

    def charge(self, *values: Any) -> None:
        """Count values that are about to be copied or hashed; ValueError if they are too many."""
        for value in values:
            kind = type(value)
            if kind in _ITEM_BYTES:
                self.room -= _ITEM_BYTES[kind] * len(value)
            elif kind is int:
                self.room -= value.bit_length() // 8
        if self.room < 0:
            raise ValueError("it uses long values over and over")

    # --- objects ---

    def name(self, module: object, name: object) -> None:
        if type(module) is not str or type(name) is not str:
            raise TypeError("a name is not text")
        if len(module) + len(name) >= _LONGEST_NAME:
            raise ValueError("a name is too long")
        self.charge(module, name)
        text = f"{module}.{name}"
        if self.only is not None and text not in self.only:
            raise _RefusedNameError(text)
        self.stack.append(self.table.get(text, Name(text)))

    def call(self) -> None:
        arguments, function = self.pop(), self.pop()
        if type(arguments) is not tuple:
            raise TypeError("arguments are not a tuple")
        self.charge(arguments, *arguments)
        if type(function) is Build:
            self.stack.append(function.function(*arguments))
        elif type(function) is Name:
            self.stack.append(
                _member(function.text, arguments) or Instance(function.text, arguments)
            )
        elif type(function) is Instance:  # a method, or what another call returns
            self.stack.append(Instance(function.name, (function, *arguments)))
        else:
            raise TypeError(f"a {type(function).__name__} is called")

    def state(self) -> None:
        state, instance = self.pop(), self.top()
        if type(instance) is dict:
            return  # an OrderedDict's attributes: torch keeps the versions of modules there
        if type(instance) is not Instance:
            raise TypeError(f"a {type(instance).__name__} is given a state")
        instance.state = state

    def call_with_keywords(self) -> None:
        keywords, arguments = self.pop(), self.pop()
        if type(arguments) is not tuple:
            raise TypeError("arguments are not a tuple")
        self.charge(arguments)
        self.stack.append((*arguments, keywords))
        self.call()

    def append(self, values: list[Any]) -> None:
        target = self.top()
        items = target.appended if type(target) is Instance else target
        if type(items) is not list:
            raise TypeError(f"something is appended to a {type(target).__name__}")
        items.extend(values)

    def set_items(self, pairs: list[Any]) -> None:
        target = self.top()
        items = target.items if type(target) is Instance else target
        if type(items) is not dict or len(pairs) % 2:
            raise TypeError(f"a {type(target).__name__} is given items")
        keys = pairs[::2]
        self.charge(*keys)
        self.charge(*chain.from_iterable(key for key in keys if type(key) is tuple))
        items.update(zip(map(_key, keys), pairs[1::2], strict=True))

    def persistent_object(self) -> None:
        if self.persistent is None:
            raise ValueError("it refers to something outside of itself")
        self.stack.append(self.persistent(self.pop()))

    def check_protocol(self) -> None:
        protocol = self.byte()
        if protocol > NEWEST_PROTOCOL:
            raise ValueError(f"protocol {protocol} is newer than {NEWEST_PROTOCOL}")


_GETATTR = ("builtins.getattr", "__builtin__.getattr")
_LONGEST_NAME = 1000


def _member(function: str, arguments: tuple[object, ...]) -> Name | None:
    """The name of a class in a class, or of a member of an enumeration, if a call asks for one.

    Nothing is looked up.
    """
    if function in _GETATTR and len(arguments) == 2:
        owner, name = arguments
        if (
            type(owner) is Name
            and type(name) is str
            and len(owner.text) + len(name) < _LONGEST_NAME
        ):
            return Name(f"{owner.text}.{name}")
    return None


def _key(key: object) -> Any:
    """A key that can be hashed in little time and is equal to no other object's."""
    if type(key) in _KEYS or (type(key) is tuple and all(type(part) in _KEYS for part in key)):
        return key
    if isinstance(key, list | dict):
        raise TypeError(f"a {type(key).__name__} is a key")
    # The hash of a nested tuple recurses as deep as its nesting.
    return Instance(type(key).__name__, (key,))


def _push(value: object) -> Callable[[_Machine], None]:
    return lambda m: m.stack.append(value)


def _long(m: _Machine, n: int) -> None:
    m.stack.append(int.from_bytes(m.take(n), "little", signed=True))


_INSTRUCTIONS: dict[int, Callable[[_Machine], object]] = {
    0x80: _Machine.check_protocol,
    0x95: lambda m: m.take(8),  # the length of a frame, not needed when all data is in memory
    ord("("): lambda m: m.marks.append(len(m.stack)),
    ord("0"): _Machine.pop,
    ord("1"): _Machine.since_mark,
    ord("N"): _push(None),
    0x88: _push(True),
    0x89: _push(False),
    ord("J"): lambda m: m.stack.append(m.number(_INT)),
    ord("K"): lambda m: m.stack.append(m.byte()),
    ord("M"): lambda m: m.stack.append(m.number(_UINT2)),
    0x8A: lambda m: _long(m, m.byte()),
    0x8B: lambda m: _long(m, m.number(_UINT4)),
    ord("G"): lambda m: m.stack.append(m.number(_FLOAT)),
    ord("X"): lambda m: m.text(m.number(_UINT4)),
    0x8C: lambda m: m.text(m.byte()),
    0x8D: lambda m: m.text(m.number(_UINT8)),
    ord("B"): lambda m: m.stack.append(bytes(m.take(m.number(_UINT4)))),
    ord("C"): lambda m: m.stack.append(bytes(m.take(m.byte()))),
    0x8E: lambda m: m.stack.append(bytes(m.take(m.number(_UINT8)))),
    ord(")"): _push(()),
    0x85: lambda m: m.tuple_of(1),
    0x86: lambda m: m.tuple_of(2),
    0x87: lambda m: m.tuple_of(3),
    ord("t"): lambda m: m.stack.append(tuple(m.since_mark())),
    ord("]"): lambda m: m.stack.append([]),
    ord("a"): lambda m: m.append([m.pop()]),
    ord("e"): lambda m: m.append(m.since_mark()),
    ord("}"): lambda m: m.stack.append({}),
    0x8F: lambda m: m.stack.append(Instance("builtins.set", ())),
    0x90: lambda m: m.append(m.since_mark()),
    0x91: lambda m: m.stack.append(Instance("builtins.frozenset", (m.since_mark(),))),
    0x96: lambda m: m.stack.append(
        Instance("builtins.bytearray", (bytes(m.take(m.number(_UINT8))),))
    ),
    ord("s"): lambda m: m.set_items(list(reversed((m.pop(), m.pop())))),
    ord("u"): lambda m: m.set_items(m.since_mark()),
    ord("q"): lambda m: m.remember(m.byte()),
    ord("r"): lambda m: m.remember(m.number(_UINT4)),
    0x94: lambda m: m.remember(len(m.memo)),
    ord("h"): lambda m: m.stack.append(m.memo[m.byte()]),
    ord("j"): lambda m: m.stack.append(m.memo[m.number(_UINT4)]),
    ord("c"): lambda m: m.name(m.line(), m.line()),
    0x93: lambda m: m.name(*cast("tuple[object, object]", tuple(reversed((m.pop(), m.pop()))))),
    ord("R"): _Machine.call,
    0x81: _Machine.call,
    0x92: _Machine.call_with_keywords,
    ord("b"): _Machine.state,
    ord("Q"): _Machine.persistent_object,
}
