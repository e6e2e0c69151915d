"""All errors that shardckpt raises on purpose.

```
ShardckptError
├── UrlError             (ValueError)        "url"               not a place to store to
├── NotFoundError        (FileNotFoundError) "not-found"         no committed checkpoint there
│   ├── UncommittedError                     "uncommitted"       an attempt that was never committed
│   └── ReplacedError                        "replaced"          replaced or deleted while read
├── AlreadyExistsError   (FileExistsError)   "exists"            a committed checkpoint is there
├── FormatError          (ValueError)        "format"            a record that is not understood
│   └── VersionError                         "version"           written by a newer major version
├── CorruptionError      (ValueError)        "corrupt"           stored bytes were not written so
│   └── MissingDataError                     "missing-data"      stored bytes are gone
├── MismatchError        (ValueError)        "mismatch"          not what the caller asked for
│   ├── NamesMismatchError                   "names"             missing or unexpected names
│   ├── StructureMismatchError               "structure"         other containers or leaf kinds
│   ├── ShapeMismatchError                   "shape"
│   └── DtypeMismatchError                   "dtype"
├── ShardingError        (ValueError)        "sharding"          an invalid mesh, spec or OpSharding
├── LeafError            (TypeError)         "leaf"              a leaf that cannot be stored
│   └── DtypeError                           "unsupported-dtype" a dtype that cannot be stored
├── OptionError          (ValueError)        "option"            an option with an invalid value
├── BudgetError          (ValueError)        "memory"            limit too small, or no memory left
├── CommitError          (RuntimeError)      "commit"            incomplete: nothing is published
├── OtherJobError        (RuntimeError)      "other-job"         another job saves to the root
├── CoordinationError    (TimeoutError)      "coordination"      processes of the job do not answer
├── StorageError         (OSError)           "storage"           the storage refused or failed
└── MissingExtraError    (ImportError)       "extra"             a dependency is not installed
```

Every message names the tensor and the file or url, and says what was expected, what was found, and
what to do next. `code` is stable: the command line maps it to `--json` output and to an exit
status.
"""

from __future__ import annotations

from functools import wraps
from os import PathLike
from typing import TYPE_CHECKING, ClassVar, ParamSpec, TypeVar

from shardckpt.text import Message

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardckpt.text import NamedOption

__all__ = [
    "AlreadyExistsError",
    "BudgetError",
    "CommitError",
    "CoordinationError",
    "CorruptionError",
    "DtypeError",
    "DtypeMismatchError",
    "FormatError",
    "LeafError",
    "MismatchError",
    "MissingDataError",
    "MissingExtraError",
    "NamesMismatchError",
    "NotFoundError",
    "OptionError",
    "OtherJobError",
    "ReplacedError",
    "ShapeMismatchError",
    "ShardckptError",
    "ShardingError",
    "StorageError",
    "StructureMismatchError",
    "UncommittedError",
    "UrlError",
    "VersionError",
]

P = ParamSpec("P")
T = TypeVar("T")
E = TypeVar("E", bound="ShardckptError")


class ShardckptError(Exception):
    """The base of all errors: `except ShardckptError` catches every error raised on purpose."""

    code: ClassVar[str] = "error"
    of_one_tensor: bool = False
    """Whether the operation would succeed without one tensor, which the message names."""
    _appended: int = 0
    """Parts of the message that `extend` has put behind the error's own."""

    def __init__(self, *args: object, message: str | None = None) -> None:
        """Make an error; `message` may be given by name, as by a DataLoader of torch."""
        super().__init__(*(args if message is None else (message,)))

    def __str__(self) -> str:
        # OSError and its subclasses format two arguments as "[Errno …]"; our errors always have one
        # sentence.
        return str(self.message)

    @property
    def message(self) -> Message:
        """The message, with the options that it names: a front end names them in its own way."""
        text = self.args[0] if self.args else self.code
        return text if isinstance(text, Message) else Message(str(text))


class UrlError(ShardckptError, ValueError):
    """A url that is not a place to store to."""

    code = "url"


class NotFoundError(ShardckptError, FileNotFoundError):
    """No committed checkpoint at the url."""

    code = "not-found"


class UncommittedError(NotFoundError):
    """A save was begun at the url and never committed."""

    code = "uncommitted"


class ReplacedError(NotFoundError):
    """The open checkpoint was replaced or deleted while read."""

    code = "replaced"


class AlreadyExistsError(ShardckptError, FileExistsError):
    """A committed checkpoint exists already; `overwrite=True` replaces it."""

    code = "exists"


class FormatError(ShardckptError, ValueError):
    """Metadata that this reader does not understand, or whose digest does not match."""

    code = "format"


class VersionError(FormatError):
    """Metadata written by a newer major version of the format."""

    code = "version"


class CorruptionError(ShardckptError, ValueError):
    """Stored bytes are not the bytes that were written."""

    code = "corrupt"


class MissingDataError(CorruptionError):
    """Stored bytes are gone."""

    code = "missing-data"


class MismatchError(ShardckptError, ValueError):
    """The checkpoint does not hold what the caller asked for."""

    code = "mismatch"


class NamesMismatchError(MismatchError):
    """Names that are missing from the checkpoint, or that were not requested."""

    code = "names"


class StructureMismatchError(MismatchError):
    """A name has another kind of container or leaf than requested."""

    code = "structure"


class ShapeMismatchError(MismatchError):
    """A name has another shape than requested."""

    code = "shape"


class DtypeMismatchError(MismatchError):
    """A name has another dtype than requested, and `cast=True` was not given."""

    code = "dtype"


class ShardingError(ShardckptError, ValueError):
    """A mesh, partition spec or OpSharding that contradicts itself or the tensor."""

    code = "sharding"


class LeafError(ShardckptError, TypeError):
    """A leaf of the state that cannot be stored."""

    code = "leaf"


class DtypeError(LeafError):
    """A dtype that cannot be stored."""

    code = "unsupported-dtype"


class OptionError(ShardckptError, ValueError):
    """An option with an invalid value."""

    code = "option"


class BudgetError(ShardckptError, ValueError):
    """The operation cannot be done within the memory limit, or the system has no more memory."""

    code = "memory"


class CommitError(ShardckptError, RuntimeError):
    """The attempt is incomplete, so nothing was published."""

    code = "commit"


class OtherJobError(ShardckptError, RuntimeError):
    """Another live job saves to the same root, so this one no longer publishes there."""

    code = "other-job"


class CoordinationError(ShardckptError, TimeoutError):
    """Processes of the job do not answer each other, or this one was forked from one of them.

    Processes that do not answer each other cannot agree.
    """

    code = "coordination"


class StorageError(ShardckptError, OSError):
    """The storage refused an operation, or failed."""

    code = "storage"


class MissingExtraError(ShardckptError, ImportError):
    """An optional dependency is not installed."""

    code = "extra"


def of_one_tensor(error: E) -> E:
    """Mark an error: without this tensor the operation would succeed.

    Its message ends with other advice, and a full stop.
    """
    error.of_one_tensor = True
    return error


def by_code(code: object) -> type[ShardckptError]:
    """The class with a code that another process has sent; CoordinationError if no class has it."""
    kinds = (globals()[name] for name in __all__)
    return next((kind for kind in kinds if kind.code == code), CoordinationError)


def error_document(error: BaseException) -> dict[str, str | None]:
    """An error as a document for other processes, which raise it by `by_code`."""
    return {
        "code": error.code if isinstance(error, ShardckptError) else None,
        "message": str(error) or type(error).__name__,
    }


def extend(error: ShardckptError, *, before: str = "", after: str = "") -> None:
    """Put text before or after an error's message, and keep all else that it carries."""
    error.args = (Message(before, error.message, after),)
    error._appended += len(Message(after).parts)  # noqa: SLF001


def advise(error: ShardckptError, *advice: str | NamedOption) -> None:
    """Put advice at the end of an error's own message, before what was put behind it."""
    parts = error.message.parts
    end = len(parts) - error._appended  # noqa: SLF001
    error.args = (Message(Message(*parts[:end]).without_stop(), *advice, *parts[end:]),)


def out_of_memory_is_typed(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function to raise BudgetError when the system gives this process no memory."""

    @wraps(function)
    def typed(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except MemoryError as e:
            given = [*args, *kwargs.values()]
            first = next(
                (
                    value
                    for value in given
                    if hasattr(value, "location") or isinstance(value, str | PathLike)
                ),
                "",
            )
            place = str(getattr(first, "location", first))
            raise out_of_memory(place, e) from e

    return typed


def out_of_memory(place: str, error: MemoryError) -> BudgetError:
    """The error that names the checkpoint for which the system gave no memory."""
    return BudgetError(
        f"{place}: the system gave this process no more memory ({error or 'MemoryError'}); lower "
        "memory_limit, end other programs, or raise the limit that the process runs under "
        "(ulimit -v, its container's)."
    )
