"""The structure of a checkpoint without the bytes.

It has the tree, its small leaves, and how and where each tensor is stored.

A `Structure` is a part of the commit record, and of each host's contents. All input is untrusted:
types, sizes and references are checked before use, and every error names the file.

Tensors may lie in other checkpoints, or follow from theirs (`format.bases`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from shardckpt.errors import DtypeError, FormatError, ShardingError
from shardckpt.format.bases import Base, InBase, bases_of
from shardckpt.format.documents import (
    BASES_VERSION,
    COMPOSITE_VERSION,
    DIFFERENCE_VERSION,
    FORMAT_VERSION,
    LARGEST_DIMENSION,
    LOCAL_VERSION,
    Fields,
    encode,
)
from shardckpt.layout import dtypes
from shardckpt.layout.mesh import Mesh
from shardckpt.layout.op_sharding import OpSharding
from shardckpt.layout.placements import Placements
from shardckpt.layout.records import record
from shardckpt.layout.sharding import Layout, Sharding
from shardckpt.plan.pieces import Piece, coverage_gap
from shardckpt.state import parse as parse_tree
from shardckpt.state import tensor_names
from shardckpt.state.names import array_path, piece_path, shown

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from shardckpt.layout.dtypes import DType
    from shardckpt.state.document import Node

StoredLayout: TypeAlias = Layout | Placements
"""A tensor's layout when it was saved: in GSPMD's form if that can express it, otherwise in
DTensor's."""

_Devices = TypeVar("_Devices", Mesh, StoredLayout)
MOST_DEVICES = 1 << 24
"""Most devices over all meshes, and over all shardings; limits the memory for a short record that
claims many large ones."""


@record
class TensorRecord:
    """One stored tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: DType
    layout: StoredLayout | None
    """Its layout when it was saved; None: a plain host tensor."""
    pieces: tuple[Piece, ...]
    """The zarr arrays that hold it."""
    partial: bool = False
    """Whether the pieces are from one process only, which does not know the other processes'
    pieces."""
    base: InBase | None = None
    """The place of its elements in a base, or None; with a base, `pieces` are cut like the base's,
    under this tensor's own name."""
    difference: bool = False
    """Whether its chunks may be differences from those of the tensor of the same name in the first
    checkpoint of the chain."""
    array: str = field(default="", compare=False)
    """"numpy" or "jax" for an array of that framework in a training state; a hint that readers may
    ignore."""

    @property
    def is_one_array(self) -> bool:
        """Whether it lies in this checkpoint as a single array with its name."""
        return (
            self.base is None
            and not self.partial
            and len(self.pieces) == 1
            and self.pieces[0].path == array_path(self.name)
        )

    def called(self, name: str) -> TensorRecord:
        """A tensor of another name that is stored in the same form; requires `is_one_array`."""
        (piece,) = self.pieces
        return TensorRecord(
            name,
            self.shape,
            self.dtype,
            self.layout,
            (piece.with_path(array_path(name)),),
            difference=self.difference,
            array=self.array,
        )

    def pieces_called(self, name: str) -> tuple[Piece, ...]:
        """Its pieces, as a tensor of another name has them."""
        if [piece.path for piece in self.pieces] == [array_path(self.name)]:
            return (self.pieces[0].with_path(array_path(name)),)
        return tuple([p.with_path(piece_path(name, self.shape, p.start)) for p in self.pieces])

    @property
    def nbytes(self) -> int:
        """Bytes of the stored elements, without padding and checksums."""
        return prod(self.shape) * self.dtype.storage.itemsize

    @property
    def num_chunks(self) -> int:
        """Chunks over all pieces."""
        pieces = self.pieces
        return pieces[0].num_chunks if len(pieces) == 1 else sum(p.num_chunks for p in pieces)


@dataclass(slots=True)
class _KnownTensors:
    """Facts about the tensors of some structures, found once for all of them."""

    text: str = ""
    """All members of the JSON form but the tree, encoded; "": not yet."""
    readable: bool = False
    """Whether that text has been read again without an error."""
    readable_tree: str = ""
    """The last tree that has been read again without an error, as text."""


@dataclass(frozen=True, slots=True)
class Structure:
    """The structure of a checkpoint: the tree, its small leaves, and every tensor's record."""

    tree: Any
    """JSON document of `state.flatten`."""
    tensors: dict[str, TensorRecord]
    chain: tuple[Base, ...] = ()
    """The checkpoints that the elements follow from, if chunks are differences: nearest first."""
    _tree_text: str = field(default="", init=False, repr=False, compare=False)
    """The tree as text, once it was encoded."""
    _nodes: Node | None = field(default=None, init=False, repr=False, compare=False)
    """The parsed tree, once it was parsed."""
    _known: _KnownTensors = field(
        default_factory=_KnownTensors, init=False, repr=False, compare=False
    )

    @property
    def bases(self) -> list[Base]:
        """The other checkpoints that this one needs, each once.

        The chain comes first, then the checkpoints that hold tensors of this one.
        """
        return [
            *self.chain,
            *dict.fromkeys(t.base.base for t in self.tensors.values() if t.base is not None),
        ]

    @property
    def is_partial(self) -> bool:
        """Whether a tensor may lack pieces, which other processes have."""
        return any(t.partial for t in self.tensors.values())

    @property
    def version(self) -> tuple[int, int]:
        """The oldest version of the format that can hold it."""
        if self.chain:
            return DIFFERENCE_VERSION
        text = self.encoded_tree  # a search in a text is faster than a walk
        if '{"$composite":{' in text:
            return COMPOSITE_VERSION
        if '{"$local":{' in text:
            return LOCAL_VERSION
        return BASES_VERSION if self.bases else FORMAT_VERSION

    def to_json(self) -> dict[str, Any]:
        """JSON form; equal meshes and shardings appear once."""
        bases: dict[Base, int] = {}
        number, layouts = self.layouts_json()
        tensors = {}
        for name, t in self.tensors.items():
            entry: dict[str, Any] = {"shape": list(t.shape), "dtype": t.dtype.name}
            if t.layout is not None:
                entry["sharding"] = number[t.layout, len(t.shape)]
            if [p.path for p in t.pieces] == [array_path(name)]:
                entry["chunks"] = list(t.pieces[0].chunks)
            else:
                entry["pieces"] = [
                    {"start": list(p.start), "shape": list(p.shape), "chunks": list(p.chunks)}
                    for p in t.pieces
                ]
            if t.array:
                entry["array"] = t.array == "numpy" or t.array
            if t.partial:
                entry["partial"] = True
            if t.difference:
                entry["difference"] = True
            if t.base is not None:
                entry["base"] = bases.setdefault(t.base.base, len(self.chain) + len(bases))
                entry |= {} if t.base.name == name else {"base_name": t.base.name}
            tensors[name] = entry
        return {
            **(
                {"bases": [base.to_json() for base in (*self.chain, *bases)]}
                if self.chain or bases
                else {}
            ),
            **layouts,
            "tensors": tensors,
            "tree": self.tree,
        }

    @property
    def encoded(self) -> str:
        """The members of the JSON form as text.

        It is made once: a lone process writes it into its contents and into the commit record.
        """
        if not self._known.text:
            self._known.text = encode(
                {key: value for key, value in self.to_json().items() if key != "tree"}
            )[1:-1]
        return f"{self._known.text},{self.encoded_tree}"

    @property
    def encoded_tree(self) -> str:
        """The last of these members: the tree."""
        if not self._tree_text:
            object.__setattr__(self, "_tree_text", f'"tree":{encode(self.tree)}')
        return self._tree_text

    @property
    def nodes(self) -> Node:
        """The tree parsed, once, for functions of `shardckpt.state`."""
        if self._nodes is None:
            object.__setattr__(self, "_nodes", parse_tree(self.tree))
        assert self._nodes is not None
        return self._nodes

    @property
    def known_to_be_readable(self) -> bool:
        """Whether these tensors have been read from their JSON form.

        In this case they were read here, or in a structure that this one was made from.
        """
        return self._known.readable

    @property
    def tree_is_known_to_be_readable(self) -> bool:
        """Whether these tensors and this tree have been read together."""
        return self._known.readable and self._known.readable_tree == self.encoded_tree

    def note_readable(self) -> None:
        """Note that the JSON form has been read without an error."""
        self._known.readable, self._known.readable_tree = True, self.encoded_tree

    def with_tree(self, tree: Any) -> Structure:
        """The same tensors in another tree. They are encoded, and found readable, once for both."""
        other = Structure(tree, self.tensors, self.chain)
        object.__setattr__(other, "_known", self._known)
        return other

    def layouts_json(
        self,
    ) -> tuple[dict[tuple[StoredLayout, int], int], dict[str, list[dict[str, Any]]]]:
        """Positions of the distinct layouts, and JSON forms of the layouts and their meshes.

        The positions are by layout and number of dimensions.
        """
        # Layouts hash and compare as objects here, which is cheap; a mesh has as many ids as there
        # are devices.
        distinct = dict.fromkeys(
            (t.layout, len(t.shape)) for t in self.tensors.values() if t.layout is not None
        )
        meshes: dict[Mesh, int] = {}
        shardings = [_layout_json(layout, ndim, meshes) for layout, ndim in distinct]
        return {key: i for i, key in enumerate(distinct)}, {
            "shardings": shardings,
            "meshes": [mesh.to_json() for mesh in meshes],
        }

    @classmethod
    def from_json(
        cls,
        doc: Any,
        where: str,
        *,
        allow_partial: bool = False,
        tensors: dict[str, TensorRecord] | None = None,
    ) -> Structure:
        """Inverse of `to_json`; raises FormatError for any document that `to_json` would not write.

        Args:
            doc: the JSON form.
            where: its file, for messages.
            allow_partial: whether tensors may lack pieces, as in a document from one process.
            tensors: the tensors, for a document of nothing but the tree; None: they are in the
                document.
        """
        read = Fields(doc, where)
        if tensors is None:
            tensors = _tensors(read, where, allow_partial=allow_partial)
        tree = read.value("tree")
        nodes = parse_tree(tree)
        named = tensor_names(nodes)
        if set(named) != set(tensors):
            odd = min(set(named) ^ set(tensors))
            read.fail(f"the tree and the list of tensors disagree about {shown(odd)}")
        chain = (
            tuple(base for base in bases_of(read.doc, where) if base.contents)
            if "bases" in read.doc
            else ()
        )
        if not chain and any(tensor.difference for tensor in tensors.values()):
            read.fail("it has differences, and names no checkpoint that they are from")
        structure = cls(tree, {name: tensors[name] for name in named}, chain)
        object.__setattr__(structure, "_nodes", nodes)
        return structure


def _tensors(read: Fields, where: str, *, allow_partial: bool) -> dict[str, TensorRecord]:
    """The tensors of a structure's JSON form."""
    layouts, bases = _layouts(read), bases_of(read.doc, where) if "bases" in read.doc else []
    tensors: dict[str, TensorRecord] = {}
    known: dict[str, TensorRecord] = {}
    suited: set[tuple[int, int]] = set()
    for name, entry in read.mapping("tensors").items():
        # Among a thousand tensors only some dozen differ in more than their names. The key is text,
        # because 1, 1.0 and True are equal.
        text = repr(entry)
        if text in known:
            tensors[name] = known[text].called(name)
            continue
        inside = Fields(entry, f"{where}: tensor {shown(name)}")
        t = tensors[name] = _tensor(inside, name, layouts, bases, allow_partial=allow_partial)
        if t.is_one_array:
            known[text] = t
        if t.layout is not None and (id(t.layout), len(t.shape)) not in suited:
            try:
                t.layout.parts(len(t.shape))
            except ShardingError as e:
                raise FormatError(f"{where}: tensor {shown(name)}: {e}") from e
            suited.add((id(t.layout), len(t.shape)))
    return tensors


def _layout_json(layout: StoredLayout, ndim: int, meshes: dict[Mesh, int]) -> dict[str, Any]:
    """A layout's JSON form, always with OpSharding text.

    The form also has mesh (by position) and spec if they are known.
    """
    if isinstance(layout, Placements):
        return layout.to_json(meshes.setdefault(layout.mesh, len(meshes)))
    if isinstance(layout, Sharding):
        text = layout.op_sharding(ndim).to_hlo()
        return {**layout.to_json(meshes.setdefault(layout.mesh, len(meshes))), "op_sharding": text}
    doc = layout.to_json()
    return {"op_sharding": doc.pop("hlo"), **doc}


def _layouts(read: Fields) -> list[StoredLayout]:
    """The shardings that tensors refer to by position."""
    # A newer minor version may add members, so only the known ones are picked.
    meshes = _parse_devices(
        read, "meshes", lambda doc: Mesh.from_json(_pick(doc, ("shape", "axes", "devices")))
    )

    def layout(doc: dict[str, Any]) -> StoredLayout:
        if "placements" in doc:
            return Placements.from_json(_pick(doc, ("mesh", "placements")), meshes)
        if "mesh" in doc:
            return Sharding.from_json(_pick(doc, ("mesh", "spec")), meshes)
        return OpSharding.from_json({"hlo": doc.get("op_sharding"), **_pick(doc, ("devices",))})

    return _parse_devices(read, "shardings", layout)


def _parse_devices(
    read: Fields, key: str, parse: Callable[[dict[str, Any]], _Devices]
) -> list[_Devices]:
    """Parse a list of meshes or shardings; refuse it if they have too many devices together."""
    parsed: list[_Devices] = []
    devices = 0
    for entry in read.sequence(key):
        try:
            parsed.append(parse(Fields(entry, read.where).doc))
        except (FormatError, ShardingError) as e:
            raise FormatError(f"{read.where}: an invalid sharding: {e}") from e
        last = parsed[-1]
        if not isinstance(last, OpSharding):
            devices += last.size if isinstance(last, Mesh) else last.num_devices
        elif last.tiles is not None:
            devices += last.tiles.num_devices
        if devices > MOST_DEVICES:
            read.fail(f"its {key} have more than {MOST_DEVICES} devices together")
    return parsed


def _pick(doc: Mapping[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    return {k: doc[k] for k in keys if k in doc}


def _pieces(read: Fields, name: str, shape: tuple[int, ...]) -> tuple[Piece, ...]:
    """The arrays of a tensor."""
    if "pieces" not in read.doc:
        return (
            Piece(array_path(name), (0,) * len(shape), shape, read.dimensions("chunks", least=1)),
        )
    entries = [Fields(p, read.where) for p in read.sequence("pieces")]
    starts = [e.dimensions("start", least=0) for e in entries]
    if any(len(start) != len(shape) for start in starts):
        read.fail(f"its pieces have another rank than its shape {shape}")
    return tuple(
        Piece(
            piece_path(name, shape, start),
            start,
            e.dimensions("shape", least=0),
            e.dimensions("chunks", least=1),
        )
        for e, start in zip(entries, starts, strict=True)
    )


def _in_base(read: Fields, name: str, bases: list[Base], *, of_its_own: bool) -> InBase:
    """The place of a tensor in a base.

    `of_its_own`: it also claims pieces or differences of its own.
    """
    base = InBase(
        read.pick("base", bases), read.string("base_name") if "base_name" in read.doc else name
    )
    if of_its_own:
        read.fail(
            "it lies in another checkpoint, and has only some of its pieces, or differences, of "
            "its own"
        )
    if base.base.contents:
        read.fail(
            "it lies in another checkpoint, which is named by its contents and not by its attempt"
        )
    return base


def _tensor(
    read: Fields, name: str, layouts: list[StoredLayout], bases: list[Base], *, allow_partial: bool
) -> TensorRecord:
    shape = read.dimensions("shape", least=0)
    try:
        dtype = dtypes.by_name(read.string("dtype"))
    except DtypeError as e:
        raise FormatError(f"{read.where}: {e}") from e
    layout = read.pick("sharding", layouts) if "sharding" in read.doc else None
    pieces = _pieces(read, name, shape)
    if any(len(p.shape) != len(shape) for p in pieces):
        read.fail(f"its pieces have another rank than its shape {shape}")
    if any(
        prod(max(n, 1) for n in sides) * dtype.itemsize > LARGEST_DIMENSION
        for sides in (shape, *(p.chunks for p in pieces))
    ):
        read.fail(f"its shape {shape} or its chunks have more bytes than can be addressed")
    partial = read.doc.get("partial") is True
    if partial and not allow_partial:
        read.fail("it has only some of its pieces")
    if len({p.path for p in pieces}) != len(pieces):
        read.fail("two of its pieces start at the same element")
    gap = None if partial else coverage_gap(shape, pieces)
    if gap is not None:
        read.fail(gap)
    if not pieces and not partial:
        # For a tensor without elements, no pieces would pass the coverage check.
        read.fail("it has no pieces")
    difference = read.doc.get("difference") is True
    base = (
        _in_base(read, name, bases, of_its_own=partial or difference)
        if "base" in read.doc
        else None
    )
    kind = read.doc.get("array")
    array = "numpy" if kind is True else "jax" if kind == "jax" else ""
    return TensorRecord(name, shape, dtype, layout, pieces, partial, base, difference, array)
