"""Exact JSON encoding of leaves that are not tensors, and decoding.

A value that JSON has is written as itself; any other is an object with one key that begins with
"$". The JSON is strict: no NaN or Infinity tokens, no integer that another language would round
(except in an extent of a torch.Size), no lone surrogates.

    null, true, false       None, bool
    42                      int, absolute value below 2^53   {"$int": "-1f"} in hex beyond that
    0.001, 1e-08, 1.0       float, always with a fraction or an exponent
    {"$float": "7ff8…"}     float that is not finite: its 64 bits in hex, a NaN's payload included
    {"$complex": [re, im]}  complex; both parts are written like floats
    "text"                  str; if it begins with "$", another "$" comes first
    {"$str": "6ced…"}       str with surrogates: its UTF-8 in hex, each surrogate as three bytes
    {"$bytes": "…"}         bytes, base64
    {"$numpy": ["int8", "ff"]}
                            numpy or ml_dtypes scalar: dtype and little-endian bytes in hex;
                            datetime64[unit], timedelta64[unit], str (UTF-8) and bytes likewise
    {"$torch.dtype": "int8"}, {"$torch.device": "cuda:0"}, {"$torch.Size": [2, 3]}

Decoding trusts no input: anything unexpected is a FormatError. A leaf of a registered type
(`register_leaf`) is encoded as a tree by `shardckpt.state.flatten`; this module keeps the register.
"""

from __future__ import annotations

import base64
import binascii
import math
import re
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np

from shardckpt.errors import FormatError, MissingExtraError, OptionError
from shardckpt.state.names import imported_module, shown
from shardckpt.state.registered import check_registration
from shardckpt.state.scalars import decode_scalar, encode_scalar, from_hex
from shardckpt.text import clip, shorten

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

JSON = None | bool | int | float | str | list["JSON"] | dict[str, "JSON"]
"""Values that `json.dumps` accepts; in this package they never contain a NaN or an infinity."""

T = TypeVar("T")


# --- the register ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LeafType:
    """A type registered with `register_leaf`."""

    type: type
    """The exact type; subclasses need their own registration."""
    name: str
    """Name of the type in checkpoints; it must never change."""
    encode: Callable[[Any], object]
    """Returns the object as a tree of small leaves, dicts, lists and tuples."""
    decode: Callable[[Any], object]
    """The inverse of `encode`."""


_BY_TYPE: dict[type, LeafType] = {}
_BY_NAME: dict[str, LeafType] = {}


class _Named(Protocol):
    @property
    def type(self) -> type: ...
    @property
    def name(self) -> str: ...


R = TypeVar("R", bound=_Named)


def register(entry: R, by_type: dict[type, R], by_name: dict[str, R], function: str) -> None:
    """Add a class to a registry.

    A new definition of the same class, and a new name of it, replace the earlier entry.

    Raises:
        OptionError: the name belongs to another class; the message names the public `function`.
    """
    kind, registered = entry.type, by_name.get(entry.name)
    if registered is not None and (registered.type.__module__, registered.type.__qualname__) != (
        kind.__module__,
        kind.__qualname__,
    ):
        other = f"{registered.type.__module__}.{registered.type.__qualname__}"
        raise OptionError(
            f"{function}({kind.__qualname__}): the name {entry.name!r} belongs to {other}; choose "
            "another."
        )
    previous = by_type.pop(kind, None)
    if previous is not None:
        by_name.pop(previous.name, None)
    by_type[kind] = by_name[entry.name] = entry


def register_leaf(
    type: type[T],  # noqa: A002
    *,
    name: str,
    encode: Callable[[T], object],
    decode: Callable[[Any], T],
) -> None:
    """Let objects of exactly this type be leaves of a state.

    Registering a type again, or a new definition of the same class, replaces its functions.

    Args:
        type: the class; neither one that can be stored anyway nor a container.
        name: name of the type in checkpoints, e.g. `"mypackage.Schedule"`. A program that restores
            must register the same name.
        encode: returns a tree of small leaves, dicts, lists, tuples and bytes that describes the
            object completely.
        decode: returns an equal object from such a tree. The tree may come from a checkpoint of
            another author.

    Raises:
        OptionError: the name belongs to another type, the type needs no registration, or an
            argument is invalid.
    """
    check_registration("register_leaf", type, encode=encode, decode=decode)
    if not isinstance(name, str) or not name:
        raise OptionError(
            f"register_leaf({type.__qualname__}): name= takes a text that is not empty, not "
            f"{shorten(name)}."
        )
    if type in {*_ENCODERS, tuple, list, dict} or issubclass(type, np.generic):
        raise OptionError(
            f"register_leaf({type.__qualname__}): this type is supported already; register a "
            "class of your own."
        )
    register(LeafType(type, name, encode, decode), _BY_TYPE, _BY_NAME, "register_leaf")


def leaf_type(value: object) -> LeafType | None:
    """The registration of this object's type, if there is one."""
    return _BY_TYPE.get(type(value))


def leaf_type_named(name: str, where: str) -> LeafType:
    """The registration under a name.

    Raises:
        FormatError: there is none; the message names the registration that the leaf `where` needs.
    """
    registration = _BY_NAME.get(name)
    if registration is None:
        raise FormatError(
            f"{shown(where)} is a leaf of a registered type; call shardckpt.register_leaf(…, "
            f"name={name[:100]!r}) first."
        )
    return registration


# --- encoding -------------------------------------------------------------------------------------

_LARGEST_BARE_INT = 2**53
_SURROGATE = re.compile("[\ud800-\udfff]")


def is_small(value: object) -> bool:
    """Whether `encode` can write a value.

    Subclasses of its types do not count: they would come back as another class.
    """
    return (
        type(value) in _ENCODERS or isinstance(value, np.generic) or _torch_kind(value) is not None
    )


def encode(value: object, where: str) -> JSON:
    """Encode a small leaf as JSON.

    Args:
        value: a leaf for which `is_small` is true.
        where: its name, for messages.

    Raises:
        LeafError: the dtype of a numpy scalar cannot be stored.
    """
    encoder = _ENCODERS.get(type(value))
    if encoder is not None:
        return encoder(value)
    if isinstance(value, np.generic):
        return {"$numpy": encode_scalar(value, where)}
    kind = _torch_kind(value)
    assert kind is not None, (
        f"{where!r}: encode() was given a {type(value).__qualname__}, of which is_small() is false"
    )
    if kind == "Size":
        return {"$torch.Size": [int(extent) for extent in value]}  # type: ignore[attr-defined]
    return {f"$torch.{kind}": str(value).removeprefix("torch.")}


def _encode_int(value: int) -> JSON:
    return value if abs(value) < _LARGEST_BARE_INT else {"$int": format(value, "x")}


def _encode_float(value: float) -> JSON:
    return value if math.isfinite(value) else {"$float": struct.pack(">d", value).hex()}


def _encode_complex(value: complex) -> JSON:
    return {"$complex": [_encode_float(value.real), _encode_float(value.imag)]}


def _encode_bytes(value: bytes) -> JSON:
    return {"$bytes": base64.b64encode(value).decode()}


def _itself(value: bool | None) -> JSON:
    return value


def encode_text(value: str) -> JSON:
    """Encode a str, as leaf or as key."""
    if value.isascii() or not _SURROGATE.search(value):
        return "$" + value if value.startswith("$") else value
    return {"$str": value.encode("utf-8", "surrogatepass").hex()}


_ENCODERS: dict[type, Callable[[Any], JSON]] = {
    type(None): _itself,
    bool: _itself,
    int: _encode_int,
    float: _encode_float,
    complex: _encode_complex,
    str: encode_text,
    bytes: _encode_bytes,
}
"""Encoders by exact type."""


def _torch_kind(value: object) -> str | None:
    """The kind of a torch object (`dtype`, `device` or `Size`), without importing torch.

    If such an object exists, torch is already imported.
    """
    torch = imported_module("torch")
    if torch is None or not type(value).__module__.startswith("torch"):
        return None
    return next(
        (kind for kind in ("dtype", "device", "Size") if type(value) is getattr(torch, kind, None)),
        None,
    )


# --- decoding -------------------------------------------------------------------------------------


def decode(node: JSON, where: str) -> object:
    """Decode a small leaf from JSON.

    Args:
        node: the result of `encode`, or any other JSON.
        where: the leaf's name, for messages.

    Raises:
        FormatError: the JSON is not a small leaf.
        MissingExtraError: the leaf is torch's, and torch is not installed.
    """
    try:
        return _decode(node)
    except MissingExtraError as error:
        raise MissingExtraError(f"{shown(where)} is a leaf of torch's: {error}") from error
    except (ValueError, TypeError, KeyError, OverflowError, RuntimeError):
        raise _refusal(node, where) from None


def decode_text(node: JSON, where: str) -> str:
    """Decode a str, as leaf or as key.

    Raises:
        FormatError: the JSON is not a str.
    """
    value = decode(node, where)
    if type(value) is not str:
        raise _refusal(node, where)
    return value


def _refusal(node: object, where: str) -> FormatError:
    # Never use the node's repr: for a hostile node it may be endless.
    what = next(iter(node), "{}") if isinstance(node, dict) else type(node).__name__
    return FormatError(
        f"{shown(where)}: {clip(str(what), _SHOWN)!r} is not a valid leaf; the checkpoint's "
        "record is damaged, or not written by shardckpt."
    )


def _decode(node: JSON) -> object:
    if isinstance(node, dict):
        ((tag, content),) = node.items()
        return _DECODERS[tag](content)
    return _BARE_DECODERS[type(node)](node)


def _bare_int(node: int) -> int:
    if abs(node) >= _LARGEST_BARE_INT:
        raise ValueError
    return node


def _bare_float(node: float) -> float:
    if not math.isfinite(node):
        raise ValueError
    return node


def _bare_text(node: str) -> str:
    if node.startswith("$"):
        node = node[1:]
        if not node.startswith("$"):
            raise ValueError
    return node


_BARE_DECODERS: dict[type, Callable[[Any], object]] = {
    type(None): _itself,
    bool: _itself,
    int: _bare_int,
    float: _bare_float,
    str: _bare_text,
}

_HEX_INT = re.compile(r"-?[0-9a-f]+", re.ASCII)
_WORD = re.compile(r"[a-z][a-z0-9_]{0,63}(?::[0-9]{1,9})?", re.ASCII)


def _text(content: object) -> str:
    return from_hex(content).decode("utf-8", "surrogatepass")


def _int(content: object) -> int:
    if not isinstance(content, str) or not _HEX_INT.fullmatch(content):
        raise ValueError
    return int(content, 16)


def _float(content: object) -> float:
    try:
        (value,) = struct.unpack(">d", from_hex(content))
    except struct.error:
        raise ValueError from None
    return float(value)


def _complex(content: object) -> complex:
    if not isinstance(content, list) or len(content) != 2:
        raise ValueError
    real, imag = (_decode(part) for part in content)
    if not isinstance(real, float) or not isinstance(imag, float):
        raise TypeError
    return complex(real, imag)


def _bytes(content: object) -> bytes:
    if not isinstance(content, str):
        raise TypeError
    try:
        return base64.b64decode(content.encode("ascii"), validate=True)
    except binascii.Error:
        raise ValueError from None


def _torch() -> ModuleType:
    try:
        import torch
    except ImportError:
        raise MissingExtraError("install torch to read it, or leave it out with only=.") from None
    module: ModuleType = torch
    return module


def _word(content: object) -> str:
    if not isinstance(content, str) or not _WORD.fullmatch(content):
        raise ValueError
    return content


def _extents(content: object) -> list[int]:
    if not isinstance(content, list) or not all(
        type(extent) is int and abs(extent) < 2**63 for extent in content
    ):
        raise ValueError
    return content


def _torch_dtype(content: object) -> object:
    name = _word(content)
    torch = _torch()
    dtype = vars(torch).get(name)  # getattr would import a submodule of that name
    if not isinstance(dtype, torch.dtype):
        raise TypeError
    return dtype


def _torch_device(content: object) -> object:
    name = _word(content)
    device = _torch().device(name)
    if str(device) != name:  # torch keeps 8 bits of an index
        raise ValueError
    return device


def _torch_size(content: object) -> object:
    extents = _extents(content)
    return _torch().Size(extents)


_DECODERS: dict[str, Callable[[object], object]] = {
    "$int": _int,
    "$float": _float,
    "$complex": _complex,
    "$str": _text,
    "$bytes": _bytes,
    "$numpy": decode_scalar,
    "$torch.dtype": _torch_dtype,
    "$torch.device": _torch_device,
    "$torch.Size": _torch_size,
}

TAGS = frozenset(_DECODERS)
"""The keys that mark a JSON object as a small leaf."""


# --- showing --------------------------------------------------------------------------------------


def describe(node: JSON, where: str) -> tuple[str, str]:
    """The kind of a small leaf and a short text of its value, for display.

    Torch is not needed for torch's leaves.

    Raises:
        FormatError: the JSON is not a small leaf.
    """
    if isinstance(node, dict) and len(node) == 1:
        ((tag, content),) = node.items()
        try:
            if tag == "$torch.Size":
                return tag[1:], clip(str(tuple(_extents(content))), _SHOWN)
            if tag in {"$torch.dtype", "$torch.device"}:
                return tag[1:], _word(content)
        except ValueError:
            raise _refusal(node, where) from None
    value = decode(node, where)
    if isinstance(value, np.generic):
        return f"numpy.{encode_scalar(value, where)[0]}", clip(str(value), _SHOWN)
    if isinstance(value, int) and abs(value) >= _LARGEST_BARE_INT:
        return "int", clip(hex(value), _SHOWN)
    kind = "None" if value is None else type(value).__name__
    return kind, clip(repr(value[:100] if isinstance(value, str | bytes) else value), _SHOWN)


_SHOWN = 60
"""Most characters of a leaf in a display or message."""
