"""Declarations of options, and the options of a save.

Fast to import, because the command line makes its flags of declarations.

An operation has one subclass of `Options`, whose fields are made by `option`. The flags of the
command line, the parameters of the service and the documentation of the public function are made of
them.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import wraps
from numbers import Integral
from threading import TIMEOUT_MAX
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, Self, TypeVar

from shardckpt.errors import OptionError, ShardckptError, advise
from shardckpt.format.documents import DEEPEST_METADATA, is_choice, is_deeper
from shardckpt.text import Message, file_size, named, shorten

if TYPE_CHECKING:
    import os

    from shardckpt.layout.sharding import Layout

__all__ = [
    "DEFAULT_MEMORY_LIMIT",
    "Option",
    "OptionParts",
    "Options",
    "SaveOptions",
    "check_flag",
    "check_function",
    "check_seconds",
    "check_whole",
    "checked_options",
    "documented",
    "leaves_out_with",
    "option",
    "parse_bytes",
    "parse_duration",
]

DEFAULT_MEMORY_LIMIT = 1 << 30
"""Default limit, in bytes, of the host memory that a save or restore uses beyond the state
itself."""
LEAST_MEMORY_LIMIT = 16 << 20
_CHOICES = {
    "layout": ("packed", "zarr"),
    "compression": (None, "zstd"),
    "host_tensors": ("replicated", "local"),
    "device_copy": ("wait", "overlap"),
    "check_replicas": ("sample", True, False),
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?\s*", re.IGNORECASE)
_SECONDS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
_DURATION = re.compile(r"\s*(\d{1,9}(?:\.\d{1,9})?)\s*(s|m|min|h|d)?\s*", re.ASCII)
_OPTIONS_LINE = re.compile(r"^        options: .*\n(?:            .*\n)*", re.MULTILINE)
F = TypeVar("F", bound=Callable[..., Any])
P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T", bound="Options")
Kind = Literal["text", "texts", "integer", "boolean", "size", "function", "python"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """The declaration of an option, in the metadata of a field of `Options`.

    It says what each front end shows, and how each front end reads a value.
    """

    about: str
    """Meaning of the option."""
    default: Any
    kind: Kind
    """"size": a number of bytes; "function" and "python": objects, which no front end can read."""
    metavar: str | None = None
    """Name of the value in the help of the command line. None: no flag, except for booleans."""
    flags: tuple[str, ...] = ()
    """Flags of the command line; empty: made of the field's name."""
    choices: tuple[str, ...] = ()
    least: int | None = None
    most: int | None = None
    """Bounds of an integer on the command line."""
    served: Literal["text", "texts", "boolean"] | None = None
    """Kind of the service's parameter; None: the service does not have it."""
    example: str | None = None
    parse: Callable[[Any], object] | None = None
    """Makes Python's value of what a front end reads."""
    parts: type[OptionParts] | None = None
    """Options that front ends have in its place."""

    def flags_of(self, name: str) -> tuple[str, ...]:
        """The flags for the field `name`."""
        return self.flags or (f"--{name.strip('_').replace('_', '-')}",)

    def checked(self, name: str, value: Any) -> Any:
        """A value of the field `name`, in the form that the library uses.

        Raises:
            OptionError: the value is invalid.
        """
        if self.kind == "boolean":
            check_flag(value, name)
        elif self.kind == "function":
            check_function(value, name)
        elif self.kind == "size" and not (value is None and self.default is None):
            return parse_bytes(value, name)
        elif self.choices and not is_choice(value, (self.default, *self.choices)):
            words = ", ".join(f'"{choice}"' for choice in self.choices)
            raise OptionError(
                Message(named(name, value), f": use {' or '.join(words.rsplit(', ', 1))}.")
            )
        return value


def option(about: str, default: Any = None, *, kind: Kind = "text", **more: Any) -> Any:
    """A field of `Options`; `more` are further members of its `Option`.

    A default of True or False makes a flag.
    """
    kind = "boolean" if isinstance(default, bool) else kind
    return field(
        default=default, metadata={Option: Option(about=about, default=default, kind=kind, **more)}
    )


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of an operation.

    A subclass declares each once; public signatures repeat name, type and default, which a test
    compares.
    """

    def __post_init__(self) -> None:
        """Check each option alone."""
        for name, one in self.declared().items():
            object.__setattr__(self, name, one.checked(name, getattr(self, name)))

    @classmethod
    def declared(cls) -> dict[str, Option]:
        """Name → declaration of each option."""
        return {one.name: one.metadata[Option] for one in fields(cls)}

    @classmethod
    def typed(cls) -> dict[str, Option]:
        """Name → declaration of the options that front ends read."""
        options: dict[str, Option] = {}
        for name, one in cls.declared().items():
            options |= (
                one.parts.declared()
                if one.parts is not None
                else {name: one}
                if one.kind not in ("function", "python")
                else {}
            )
        return options

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> Self:
        """The options among the arguments of a call, which may have others."""
        return cls(**{name: arguments[name] for name in cls.declared()})

    @classmethod
    def arguments(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments in Python, from what a front end has read; without those that have the default.

        Raises:
            OptionError, ShardingError: a text cannot be parsed.
        """
        values: dict[str, Any] = {}
        for name, one in cls.declared().items():
            value = given.get(name)
            if one.parts is not None:
                value = one.parts(
                    **{part: given.get(part) for part in one.parts.declared()}
                ).whole()
            elif value in (None, [], one.default):
                continue
            elif one.parse is not None:
                value = one.parse(value)
            if value is not None:
                values[name] = value
        return values

    def nbytes(self, name: str) -> int:
        """The value of an option of kind "size", in bytes."""
        nbytes = getattr(self, name)
        assert isinstance(nbytes, int)
        return nbytes

    def part(self, kind: type[T], **changes: Any) -> T:
        """The options of a base class, some of them changed."""
        return kind(**{name: getattr(self, name) for name in kind.declared()} | changes)


@dataclass(frozen=True, kw_only=True)
class OptionParts(Options):
    """Options that make the value of another one."""

    def whole(self) -> Any:
        """The value that they make; None: nothing is given."""
        raise NotImplementedError


def documented(*declared: type[Options]) -> Callable[[F], F]:
    """Decorate a function: the docstring's line `options: …` becomes one per declared option."""

    def decorate(function: F) -> F:
        texts = {name: one.about for kind in declared for name, one in kind.declared().items()}
        lines = "".join(f"        {name}: {text}\n" for name, text in texts.items())
        function.__doc__ = _OPTIONS_LINE.sub(lambda _match: lines, function.__doc__ or "", count=1)
        return function

    return decorate


@dataclass(frozen=True, slots=True)
class SaveOptions:
    """Options of `shardckpt.save`."""

    layout: Literal["packed", "zarr"] = "packed"
    """Layout of the storage. "packed": chunks in a few large data files (OCDBT). "zarr": every
    chunk is an object in a zarr group."""
    compression: Literal["zstd"] | None = None
    """Compression of chunks. The default is None, because trained weights hardly compress."""
    shardings: Mapping[str, Layout] = field(default_factory=dict)
    """Layouts by name pattern. Plain tensors with matching names are chunked and recorded as if
    they had this layout."""
    host_tensors: Literal["replicated", "local"] = "replicated"
    """Owners of plain tensors (CPU `torch.Tensor`, ndarray) of 64 KiB or more, in a job of several
    processes. "replicated": all processes have equal tensors, and write a part each. "local": one
    process has the tensor, and writes it. Smaller tensors may be on any processes; if several have
    one, their values are compared."""
    reduce_partial: bool = False
    """Whether to save the reduced value of DTensors with a `Partial` placement. This runs a
    collective on all processes of their mesh. Without it such a tensor is a LeafError."""
    commit_timeout: float = 600.0
    """Seconds that the committing process waits for the other processes. These wait for the commit,
    a minute longer. In the first call of a job, also the seconds that each process waits for the
    others to join."""
    overwrite: bool = False
    """Whether to replace an existing checkpoint, atomically. Without it an existing one is an
    AlreadyExistsError. A checkpoint that is pinned, tagged, or the base of checkpoints beside it is
    not replaced: an OptionError."""
    memory_limit: int | str = DEFAULT_MEMORY_LIMIT
    """Limit of host memory for staging buffers and chunks: bytes, or a string such as "512MiB"."""
    device_copy: Literal["wait", "overlap"] = "wait"
    """Order of later device work while a background save copies CUDA tensors. "wait": work on the
    current stream starts on the device after the copies; the host does not wait. "overlap": work
    runs during the copies, and only the update of an `Optimizer.step` waits. If a version counter
    shows another change of a saved tensor, the save fails with a CommitError. docs/cuda.md lists
    the changes that version counters do not show."""
    background_threads: int | None = None
    """Most threads of this process that write at a time in a background save to a local disk. By
    default half of its cores, so that training keeps the others. docs/performance.md says how cores
    are counted."""
    fingerprint: bool = False
    """Whether to record the fingerprint of the tensors (`Checkpoint.fingerprint`). It takes 0.1
    seconds per GB and thread."""
    check_replicas: Literal["sample"] | bool = "sample"
    """Comparison of what several processes hold and write together: replicated DTensors and JAX
    arrays, and large plain tensors. A difference is a CommitError. "sample": up to 256 elements of
    each shard, evenly distributed, except on devices other than CUDA's. True: all elements, which
    every process reads before the call returns; `fingerprint=True` compares all, too. False: none,
    and the process of the lowest number writes its copy as a whole."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """JSON object to store with the checkpoint; `shardckpt.open(url).metadata` returns it."""
    base: str | os.PathLike[str] | None = None
    """Path or url of the checkpoint that holds the skipped tensors, in the same kind of storage. It
    must stay there."""
    skip: str | Sequence[str] = ()
    """Name patterns of tensors to leave in the base: they are neither copied nor written. The base
    must have tensors of the same names, shapes and dtypes. Their elements are not compared: skip
    only frozen tensors."""

    def __post_init__(self) -> None:
        """Check every option."""
        for option, choices in _CHOICES.items():
            value = getattr(self, option)
            if not is_choice(value, choices):
                words = " or ".join(
                    f'"{choice}"' if isinstance(choice, str) else str(choice) for choice in choices
                )
                raise OptionError(f"SaveOptions({option}={shorten(value)}): use {words}.")
        object.__setattr__(self, "memory_limit", parse_bytes(self.memory_limit, "memory_limit"))
        check_flag(self.overwrite, "overwrite")
        check_flag(self.reduce_partial, "reduce_partial")
        check_flag(self.fingerprint, "fingerprint")
        if self.background_threads is not None:
            threads = check_whole(self.background_threads, "SaveOptions(background_threads")
            object.__setattr__(self, "background_threads", threads)
        check_seconds(self.commit_timeout, "SaveOptions(commit_timeout")
        _check_shardings(self.shardings)
        object.__setattr__(self, "skip", _patterns(self.skip, self.base))
        if self.budget < LEAST_MEMORY_LIMIT:
            raise OptionError(
                f"SaveOptions(memory_limit={file_size(self.budget)}): at least "
                f"{file_size(LEAST_MEMORY_LIMIT)} are needed."
            )
        if is_deeper(self.metadata, DEEPEST_METADATA):
            raise OptionError(
                "SaveOptions(metadata=…): dicts and lists are nested more than "
                f"{DEEPEST_METADATA} deep; flatten it."
            )
        try:
            same = json.loads(json.dumps(self.metadata, allow_nan=False))
        except (TypeError, ValueError, RecursionError) as e:
            raise OptionError(
                f"SaveOptions(metadata=…): not a JSON object ({e}); use strings, finite numbers, "
                "lists and dicts."
            ) from e
        if not isinstance(same, dict):
            raise OptionError(
                f"SaveOptions(metadata=…): a {type(self.metadata).__name__} is not a JSON object; "
                "give a dict."
            )
        if same != self.metadata:
            raise OptionError(
                "SaveOptions(metadata=…): it would change when stored as JSON; use string keys, "
                "and lists instead of tuples."
            )
        object.__setattr__(self, "metadata", same)

    @property
    def budget(self) -> int:
        """`memory_limit` in bytes."""
        assert isinstance(self.memory_limit, int)
        return self.memory_limit


def checked_options(
    options: SaveOptions | None, skip: str | Sequence[str] | None = None
) -> SaveOptions:
    """A caller's `options`, or the defaults; with `skip` replaced if it is given.

    Raises:
        OptionError: `options` is neither None nor a SaveOptions; or `skip` is invalid.
    """
    options = SaveOptions() if options is None else options
    if not isinstance(options, SaveOptions):
        raise OptionError(
            f"save(options=…): a {type(options).__name__} is not a SaveOptions; give "
            "shardckpt.SaveOptions(…)."
        )
    return options if skip is None else replace(options, skip=skip)


def leaves_out_with(option: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function that can leave tensors out: errors of one tensor name its `option`."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def advised(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return function(*args, **kwargs)
            except ShardckptError as e:
                if e.of_one_tensor:
                    e.of_one_tensor = False  # a function that calls this one has nothing to add
                    advise(e, ", or leave the tensor out with ", named(option), ".")
                raise

        return advised

    return decorate


def parse_bytes(value: int | str, what: str) -> int:
    """A number of bytes, from an int or from text.

    Examples:
        >>> parse_bytes("512MiB", "memory_limit"), parse_bytes("1.5 GB", "memory_limit")
        (536870912, 1500000000)

    Raises:
        OptionError: neither a whole number nor a valid text; names the option, `what`.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() < 1024:
        return value
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    size = math.inf
    if match is not None:
        size = float(match[1]) * (1024 if match[3] else 1000) ** " KMGT".index(
            match[2].upper() or " "
        )
    if math.isinf(size):  # as a number of too many digits is
        advice = ': give bytes as a whole number, or as text such as "512MiB".'
        raise OptionError(Message(named(what, value), advice))
    return int(size)


def parse_duration(text: str, what: str) -> float:
    """Seconds from text such as "24h", "30min" or "1.5 d"; only 0 needs no unit.

    Examples:
        >>> parse_duration("24h", "--grace"), parse_duration("0", "--grace")
        (86400.0, 0.0)

    Raises:
        OptionError: the text is invalid; names the option, `what`.
    """
    match = _DURATION.fullmatch(text)
    if match is None or (match[2] is None and float(match[1])):
        raise OptionError(
            f'{what} {text!r}: give a number and a unit (s, min, h, d), such as "24h".'
        )
    return float(match[1]) * _SECONDS[match[2] or "s"]


def check_flag(value: object, what: str) -> None:
    """Refuse a value that is not a bool, because a text such as "no" would count as true.

    Raises:
        OptionError: not a bool; names the option, `what`.
    """
    if not isinstance(value, bool):
        raise OptionError(Message(named(what, value), ": give True or False."))


def check_function(value: object, what: str) -> None:
    """Refuse, by an OptionError, a value that is neither a function nor None."""
    if value is not None and not callable(value):
        raise OptionError(Message(named(what, value), ": give a function, or None."))


def check_whole(value: object, what: str, least: int = 1) -> int:
    """The whole number of at least `least`, also of one of numpy's.

    Raises:
        OptionError: names the argument, `what`, such as "Latest(n".
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise OptionError(f"{what}={shorten(value)}): give a whole number of at least {least}.")
    return int(value)


def check_seconds(value: object, what: str) -> None:
    """Refuse a value that is not a positive number, or longer than Python can wait.

    Raises:
        OptionError: names the argument, `what`, as for `check_whole`.
    """
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < value <= TIMEOUT_MAX:  # type: ignore[operator]
        raise OptionError(
            f"{what}={shorten(value)}): give a positive number of seconds, at most "
            f"{TIMEOUT_MAX:.2g}."
        )


def _patterns(skip: object, base: object) -> tuple[str, ...]:
    """The patterns of `skip`, checked."""
    if base is not None and not isinstance(base, str) and not hasattr(base, "__fspath__"):
        raise OptionError(
            f"SaveOptions(base={shorten(base)}): give the path or url of a checkpoint."
        )
    patterns = (skip,) if isinstance(skip, str) else skip
    if not isinstance(patterns, Sequence) or not all(
        isinstance(pattern, str) for pattern in patterns
    ):
        raise OptionError(f"skip={shorten(skip)}: give patterns of tensor names, as text.")
    if patterns and base is None:
        raise OptionError(
            f"skip={shorten(skip)} needs a base that has those tensors; add SaveOptions(base=url)."
        )
    return tuple(patterns)


def _check_shardings(shardings: object) -> None:
    """Refuse anything but a mapping of patterns to layouts."""
    if not isinstance(shardings, Mapping):
        raise OptionError(
            f"SaveOptions(shardings=…): a {type(shardings).__name__} is not a mapping; give a "
            "dict of pattern → layout."
        )
    for pattern, layout in shardings.items():
        if not isinstance(pattern, str):
            raise OptionError(
                f"SaveOptions(shardings=…): the key {shorten(pattern)} is not a pattern; give a "
                "pattern of names, as text."
            )
        # Checked by an attribute of both kinds: importing them here would import numpy.
        if not hasattr(layout, "device_boxes"):
            raise OptionError(
                f"SaveOptions(shardings=…): {shorten(pattern)} has a {type(layout).__name__}; give "
                "a shardckpt Sharding or OpSharding."
            )
