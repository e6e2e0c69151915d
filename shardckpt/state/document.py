"""The tree document of a state as nodes: parsing it, with all checks, and writing it.

`parse` checks the complete document and turns it into nodes, with names; all other functions walk
the nodes. It limits the depth, checks the type of every part, and refuses two equal keys in a dict
and a tied tensor whose stored name is not a tensor. `write` is its inverse.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from types import EllipsisType
from typing import TYPE_CHECKING, TypeAlias

from shardckpt.errors import FormatError
from shardckpt.layout.records import record
from shardckpt.state import leaves, names
from shardckpt.state.names import shown

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from shardckpt.state.leaves import JSON
    from shardckpt.state.names import Form, PathKey

LONGEST_MEANING = 256
"""Most characters of a meaning."""
MAX_DEPTH = 200
"""Most containers around a leaf: more is a mistake, or an attack on the reader's stack."""

Meaning = Callable[[object], str | EllipsisType | None]
"""Returns the meaning of a tensor leaf's elements to its framework: None for plain numbers, `...`
for a leaf that does not say."""


@record
class Tensor:
    """A tensor."""

    name: str
    """Its name."""
    meaning: str | None = None
    """Meaning of the elements to a framework, e.g. `jax.key:threefry2x32`; None: plain numbers."""

    @property
    def stored(self) -> str:
        """The name that the tensor is stored under: this one."""
        return self.name


@record
class Tied:
    """Another name of a tensor."""

    name: str
    """This further name."""
    stored: str
    """The name that the tensor is stored under."""


@record
class Small:
    """A small leaf, not decoded yet."""

    name: str
    """Its name."""
    content: JSON
    """The JSON that `leaves.encode` wrote."""


@record
class Custom:
    """A leaf of a registered type, not decoded yet."""

    name: str
    """Its name."""
    type_name: str
    """The name under which its type is registered."""
    content: Node
    """Its encoded form; every node in it has the leaf's own name."""


@record
class Owned:
    """A place where every process has a value of its own, which is stored elsewhere."""

    name: str
    """Its name."""


@record
class Composite:
    """Description of a tensor made of other tensors, such as quantized data and their scales."""

    type_name: str
    """The name of its class. It is compared and shown; a class is never looked up by it, except
    among registered ones."""
    shape: tuple[int, ...]
    """Shape of the complete tensor."""
    context: Node
    """Everything except the tensors: small leaves in dicts, lists and tuples; every node in it has
    the tensor's own name."""


@record
class Branch:
    """A container."""

    name: str
    """Its name; "" for the state itself."""
    form: Form
    """The stored form."""
    keys: Sequence[PathKey]
    """One per child; 0, 1, … unless the form is dict."""
    children: Sequence[Node]
    """In order."""
    composite: Composite | None = None
    """Set if the container has the parts of one tensor, by the names of its attributes; the form is
    dict."""
    local: bool = False
    """Whether the children belong to the processes with the numbers in `keys`; the form is dict."""


Node = Tensor | Tied | Small | Custom | Owned | Branch
Tree: TypeAlias = "JSON | Node"
"""A tree document, or its nodes as `parse` returns them, so that several queries need only one
parse."""


# --- parsing --------------------------------------------------------------------------------------


def parse(tree: Tree, root: str = "") -> Node:
    """Parse a tree document.

    Small leaves are recognised but not decoded: `decode_leaf` may still refuse one.

    Args:
        tree: the document; a node, parsed before, is returned unchanged.
        root: the name of the document's root, if it is a part of a larger state (see `flatten`).

    Raises:
        FormatError: the document is not a valid tree document.
    """
    if isinstance(tree, Node):
        return tree
    parser = _Parser()
    node = parser.parse(tree, root, 0)
    for tied in parser.tied:
        if tied.stored not in parser.tensors:
            raise FormatError(
                f"{shown(tied.name)} is tied to {tied.stored[:200]!r}, which is not a tensor; the "
                "checkpoint's record is damaged."
            )
    return node


def is_meaning(text: object) -> bool:
    """Whether a text is valid as a tensor's meaning."""
    return isinstance(text, str) and 0 < len(text) <= LONGEST_MEANING and text.isprintable()


class _Parser:
    """The state of parsing one document."""

    def __init__(self) -> None:
        self.tensors: set[str] = set()
        self.tied: list[Tied] = []
        self.in_leaf = False

    def parse(self, node: JSON, name: str, depth: int) -> Node:
        if isinstance(node, list):
            return self.branch("list", range(len(node)), node, name, depth)
        if isinstance(node, dict):
            tag = next(iter(node), None) if len(node) == 1 else None
            if isinstance(tag, str) and tag.startswith("$") and not tag.startswith("$$"):
                return self.tagged(tag, node[tag], node, name, depth)
            return self.branch(
                "dict", [_text(key, name) for key in node], list(node.values()), name, depth
            )
        if node == "$tensor" and not self.in_leaf:
            self.tensors.add(name)
            return Tensor(name)
        if isinstance(node, str):
            _text(node, name)  # refuses other "$" words, which a later format may define
            return Small(name, node)
        if node is None or isinstance(node, bool | int | float):
            return Small(name, node)
        raise _refusal(node, name)

    def tagged(self, tag: str, content: JSON, node: JSON, name: str, depth: int) -> Node:
        if tag in leaves.TAGS:
            return Small(name, node)
        stored = None if self.in_leaf else self.stored_elsewhere(tag, content, name)
        if stored is not None:
            return stored
        if isinstance(content, dict) and not self.in_leaf:
            return self.described(tag, content, node, name, depth)
        if isinstance(content, list):
            if tag == "$tuple":
                return self.branch("tuple", range(len(content)), content, name, depth)
            if tag == "$dict" and all(
                isinstance(pair, list) and len(pair) == 2 for pair in content
            ):
                keys = [_key(pair[0], name) for pair in content]  # type: ignore[index]
                return self.branch("dict", keys, [pair[1] for pair in content], name, depth)  # type: ignore[index]
            if tag == "$leaf" and len(content) == 2 and isinstance(content[0], str):
                return self.custom(content[0], content[1], name, depth)
        raise _refusal(node, name)

    def stored_elsewhere(self, tag: str, content: JSON, name: str) -> Tensor | Tied | Owned | None:
        if tag == "$tensor" and is_meaning(content):
            self.tensors.add(name)
            return Tensor(name, str(content))
        if tag == "$tied" and isinstance(content, str):
            self.tied.append(Tied(name, content))
            return self.tied[-1]
        return Owned(name) if tag == "$per_process" and content is None else None

    def branch(
        self, form: Form, keys: Sequence[PathKey], nodes: Sequence[JSON], name: str, depth: int
    ) -> Branch:
        if depth >= MAX_DEPTH:
            raise FormatError(
                f"{shown(name)} lies in more than {MAX_DEPTH} containers; the checkpoint's record "
                "is damaged, or not written by shardckpt."
            )
        # Keys are equal as in Python's dicts, where True == 1.
        if len(set(keys)) != len(keys):
            raise FormatError(
                f"{shown(name)} is a dict with the same key twice; the checkpoint's record is "
                "damaged, or not written by shardckpt."
            )
        children: list[Node] = []
        for component, node in zip(names.component_names(keys), nodes, strict=True):
            own = name if self.in_leaf else names.child_name(name, component)
            if node == "$tensor" and not self.in_leaf:  # most nodes are; without a call for each
                self.tensors.add(own)
                children.append(Tensor(own))
            else:
                children.append(self.parse(node, own, depth + 1))
        return Branch(name, form, keys, children)

    def described(
        self, tag: str, content: dict[str, JSON], node: JSON, name: str, depth: int
    ) -> Branch:
        """A composite tensor, or the values of the processes."""
        if tag == "$local" and content and all(map(_PROCESS.fullmatch, content)):
            branch = self.branch(
                "dict", [int(process) for process in content], list(content.values()), name, depth
            )
            return replace(branch, local=True)
        if tag != "$composite" or content.keys() != _OF_COMPOSITE:
            raise _refusal(node, name)
        kind, shape, parts = content["type"], content["shape"], content["parts"]
        sizes = (
            shape
            if isinstance(shape, list) and all(type(n) is int and 0 <= n < 2**63 for n in shape)
            else None
        )
        if (
            not isinstance(kind, str)
            or not is_meaning(kind)
            or sizes is None
            or not isinstance(parts, dict)
            or not parts
        ):
            raise _refusal(node, name)
        branch = self.branch(
            "dict", [_text(key, name) for key in parts], list(parts.values()), name, depth
        )
        context = self.custom(kind, content["context"], name, depth).content
        return replace(branch, composite=Composite(kind, tuple(sizes), context))  # type: ignore[arg-type]

    def custom(self, type_name: str, content: JSON, name: str, depth: int) -> Custom:
        if depth >= MAX_DEPTH:
            raise _refusal(content, name)
        outer, self.in_leaf = self.in_leaf, True
        parsed = self.parse(content, name, depth + 1)
        self.in_leaf = outer
        return Custom(name, type_name, parsed)


_OF_COMPOSITE = frozenset({"type", "shape", "context", "parts"})
_PROCESS = re.compile(r"0|[1-9][0-9]{0,6}", re.ASCII)


def _text(node: JSON, name: str) -> str:
    """Decode a text; it is the str itself, unless it is escaped."""
    return (
        node if type(node) is str and not node.startswith("$") else leaves.decode_text(node, name)
    )


def _key(node: JSON, name: str) -> PathKey:
    if (
        node is None
        or isinstance(node, bool | int | str)
        or (isinstance(node, dict) and set(node) in ({"$int"}, {"$str"}))
    ):
        key = leaves.decode(node, name)
        assert key is None or isinstance(key, str | int)
        return key
    raise _refusal(node, name)


def _refusal(node: JSON, name: str) -> FormatError:
    what = next(iter(node), "{}") if isinstance(node, dict) else type(node).__name__
    return FormatError(
        f"{shown(name)}: {str(what)[:60]!r} is not a valid node of a tree here; "
        f"the checkpoint's record is damaged, or not written by shardckpt."
    )


# --- writing --------------------------------------------------------------------------------------


def write(node: Node) -> JSON:
    """Write the document of a node: the inverse of `parse`."""
    document: JSON
    if isinstance(node, Branch):
        document = _write_branch(node)
    elif isinstance(node, Tensor):
        document = "$tensor" if node.meaning is None else {"$tensor": node.meaning}
    elif isinstance(node, Tied):
        document = {"$tied": node.stored}
    elif isinstance(node, Small):
        document = node.content
    elif isinstance(node, Custom):
        document = {"$leaf": [node.type_name, write(node.content)]}
    else:
        document = {"$per_process": None}
    return document


def _write_branch(node: Branch) -> JSON:
    nodes = [write(child) for child in node.children]
    if node.composite is not None:
        kind, shape, context = (
            node.composite.type_name,
            list(node.composite.shape),
            write(node.composite.context),
        )
        return write_composite(kind, shape, context, node.keys, nodes)
    if node.local:
        return {"$local": dict(zip(map(str, node.keys), nodes, strict=True))}
    if node.form == "dict":
        return write_dict(node.keys, nodes, node.name)
    return nodes if node.form == "list" else {"$tuple": nodes}


def _is_plain(text: str) -> bool:
    """Whether a text needs no escape, like nearly all keys."""
    return text.isascii() and not text.startswith("$")


def write_dict(keys: Sequence[PathKey], nodes: Sequence[JSON], name: str) -> JSON:
    """The document of a dict called `name`."""
    if set(map(type, keys)) <= {str} and (text := "".join(keys)).isascii() and "$" not in text:  # type: ignore[arg-type]
        return dict(zip(keys, nodes, strict=True))  # type: ignore[arg-type]
    written = [
        key if type(key) is str and _is_plain(key) else leaves.encode(key, name) for key in keys
    ]
    if all(type(key) is str and type(text) is str for key, text in zip(keys, written, strict=True)):
        return dict(zip(written, nodes, strict=True))  # type: ignore[arg-type]
    return {"$dict": [[key, node] for key, node in zip(written, nodes, strict=True)]}


def write_composite(
    kind: str, shape: Sequence[int], context: JSON, keys: Sequence[PathKey], nodes: Sequence[JSON]
) -> JSON:
    """The document of a composite tensor; all keys of its parts are str."""
    parts: JSON = dict(zip(map(leaves.encode_text, keys), nodes, strict=True))  # type: ignore[arg-type]
    return {"$composite": {"type": kind, "shape": [*shape], "context": context, "parts": parts}}


# --- walking --------------------------------------------------------------------------------------


def child(node: Node | None, key: PathKey) -> Node | None:
    """The node under a key; None if there is none."""
    if not isinstance(node, Branch):
        return None
    return next(
        (
            below
            for k, below in zip(node.keys, node.children, strict=True)
            if type(k) is type(key) and k == key
        ),
        None,
    )


def of_process(node: Node, process: int) -> Node | None:
    """A state as one process has it: without the values that belong to other processes.

    A list or tuple that loses an item becomes a dict from index to item, as in `unflatten`. None if
    nothing is left.
    """
    if not isinstance(node, Branch):
        return node
    if node.local:
        return child(node, process)
    left = [
        (key, kept)
        for key, old in zip(node.keys, node.children, strict=True)
        if (kept := of_process(old, process)) is not None
    ]
    if len(left) == len(node.keys) and all(
        kept is old for (_, kept), old in zip(left, node.children, strict=True)
    ):
        return node
    is_shorter = len(left) < len(node.keys)
    if is_shorter and not left and node.form != "dict":
        return None
    return replace(
        node,
        form="dict" if is_shorter else node.form,
        keys=[key for key, _ in left],
        children=[kept for _, kept in left],
    )


def local_branches(node: Node) -> Iterator[Branch]:
    """The values at and below a node that belong to one process each."""
    if isinstance(node, Branch):
        if node.local:
            yield node
        else:
            for below in node.children:
                yield from local_branches(below)


def leaves_of(node: Node) -> Iterator[Tensor | Tied | Small | Custom | Owned]:
    """All leaves at and below a node, in order."""
    stack = [node]
    while stack:
        top = stack.pop()
        if isinstance(top, Branch):
            stack.extend(reversed(top.children))
        else:
            yield top


def ends(node: Node) -> Iterator[Node]:
    """The leaves and the empty containers at and below a node, in order."""
    stack = [node]
    while stack:
        top = stack.pop()
        if isinstance(top, Branch) and top.children:
            stack.extend(reversed(top.children))
        else:
            yield top


def tensor_names(tree: Tree) -> list[str]:
    """The names of the stored tensors, in order; further names of tied tensors are in `alias_map`.

    Raises:
        FormatError: the document is invalid, here and in all functions below.
    """
    return [leaf.name for leaf in leaves_of(parse(tree)) if isinstance(leaf, Tensor)]


def alias_map(tree: Tree) -> dict[str, str]:
    """Further name of a tied tensor → the name under which the tensor is stored, in order."""
    return {leaf.name: leaf.stored for leaf in leaves_of(parse(tree)) if isinstance(leaf, Tied)}


def stored_names(tree: Tree, only: Callable[[str], bool] | None = None) -> list[str]:
    """The names of the stored tensors that `unflatten` needs with the same `only`, each once."""
    ends_of_tree = leaves_of(parse(tree))
    return list(
        dict.fromkeys(
            leaf.stored
            for leaf in ends_of_tree
            if isinstance(leaf, Tensor | Tied) and (only is None or only(leaf.name))
        )
    )
