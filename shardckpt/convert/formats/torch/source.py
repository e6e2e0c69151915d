"""Files of `torch.save` and `xm.save`, read without torch.

They are a single file, or the files of a Hugging Face directory (`pytorch_model.bin`).

1. A file holds a state, or one tensor (`torch.states`). Tensors are read by their offsets in it:
   the complete file is never read.
2. A directory has `pytorch_model.bin`, or several files and `pytorch_model.bin.index.json`, which
   names the file of each tensor. The state is then one dict of all tensors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardckpt.convert.files.file_version import FileVersion, file_at, identity_of
from shardckpt.convert.formats.safetensors.hf_index import (
    check_index,
    is_part,
    note_of_part,
    parts_of_only_model,
    read_weight_map,
)
from shardckpt.convert.formats.torch.deepspeed import note_of_file, refuse_directory
from shardckpt.convert.formats.torch.file import is_torch_file
from shardckpt.convert.formats.torch.states import open_state_file, state_in
from shardckpt.convert.placed import place_tensors
from shardckpt.convert.span import Span
from shardckpt.errors import FormatError, NotFoundError
from shardckpt.io.store import Store
from shardckpt.io.threads import map_on_threads
from shardckpt.state.names import shown

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardckpt.convert.files.file_version import Candidate
    from shardckpt.convert.formats.torch.file import TorchFile
    from shardckpt.convert.placed import Foreign
    from shardckpt.io.url import Location

_BIN, _INDEX_SUFFIX = "pytorch_model.bin", ".bin.index.json"
_BEGINNING = 512
"""First bytes of a file by which its format is detected."""
_BEFORE_1_6 = b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19"
"""The pickle of a magic number at the start of the format before torch 1.6, which torch.save still
writes on request."""


def looks_like(candidate: Candidate) -> str | None:
    """The signs of files of `torch.save` at a location, in words; None: there are none."""
    file = candidate.file
    if file is None:
        names = candidate.names
        models = [
            name
            for name in (_BIN, _BIN.removesuffix(".bin") + _INDEX_SUFFIX, *_parts(names))
            if name in names
        ]
        return f"{models[0]} in the directory" if models else None
    if file.key.endswith(_INDEX_SUFFIX):
        return f"{file.key}, an index of split files"
    head = beginning(file)
    if _is_old(head):
        return f"{file.key}, a file of torch.save before torch 1.6"
    return (
        f"{file.key}, a zip archive that begins with data.pkl"
        if is_torch_file(head) and b"/data.pkl" in head
        else None
    )


def open_foreign(location: Location, *, trust_pickle: bool = False) -> Foreign:
    """Open a file, or the files of a directory.

    Args:
        location: a file, an index, or a directory.
        trust_pickle: ignored: nothing in the pickles is run.

    Raises:
        FormatError: a file is malformed, is in torch's format before 1.6, or holds something that
            cannot be stored; or files and index disagree.
        MissingDataError: a file that the index names is missing.
        NotFoundError: there is no such file in the directory.
        OptionError: the files of several models are there.
        CorruptionError, StorageError: a file is truncated, or cannot be read.
    """
    del trust_pickle
    file = file_at(location)
    if file is None:
        store = Store.open(location)
        names = store.list_children()
        file = next(
            (
                FileVersion(store, name)
                for name in (_BIN, _BIN.removesuffix(".bin") + _INDEX_SUFFIX)
                if name in names
            ),
            None,
        )
        if file is None and (parts := _parts(names)):
            joined = parts_of_only_model(parts, names, store)
            return _join_parts(location, [FileVersion(store, name) for name in joined])
        if file is None:
            refuse_directory(store, names)
            raise NotFoundError(
                f"{location}: there is no {_BIN} in this directory, and no index of split files; "
                "give the path of a file."
            )
    if not file.key.endswith(_INDEX_SUFFIX):
        notes = note_of_part(file.key) or note_of_file(str(file))
        state, left = state_in(_open(file))
        return place_tensors(
            state, "torch", location, identity_of(location, [file]), (*notes, *left)
        )
    weight_map = read_weight_map(file)
    versions = [FileVersion(file.store, name) for name in sorted(set(weight_map.values()))]
    states, left = _states(versions)
    members = {key: part if isinstance(part, dict) else () for key, part in states.items()}
    check_index(str(file), weight_map, members)
    state = {name: states[key][name] for name, key in weight_map.items()}
    notes = [f"{len(versions)} files, by {file.key}", *left]
    return place_tensors(state, "torch", location, identity_of(location, [file, *versions]), notes)


def _states(versions: Sequence[FileVersion]) -> tuple[dict[str, Any], list[str]]:
    """File → its state; and the notes on all files."""
    states = map_on_threads(lambda version: state_in(_open(version)), versions)
    notes = [
        f"{version.key}: {line}"
        for version, (_, left) in zip(versions, states, strict=True)
        for line in left
    ]
    return {version.key: state for version, (state, _) in zip(versions, states, strict=True)}, notes


def _parts(names: Sequence[str]) -> list[str]:
    """Names of files of a split model without an index."""
    return sorted(
        name
        for name in names
        if name.startswith("pytorch_model-") and name.endswith(".bin") and is_part(name)
    )


def _join_parts(location: Location, versions: Sequence[FileVersion]) -> Foreign:
    """All files of a split model without an index, as one dict of their tensors."""
    state: dict[str, Any] = {}
    states, left = _states(versions)
    for version, part in zip(versions, states.values(), strict=True):
        if not isinstance(part, dict):
            raise FormatError(
                f"{version} has no dict of tensors, as each file of a split model has; get new "
                "copies of all files."
            )
        again = next((name for name in part if name in state), None)
        if again is not None:
            raise FormatError(
                f"{version}: {shown(str(again))} is in another file of the model, too; get new "
                "copies of all files."
            )
        state |= part
    notes = [f"{len(versions)} files of a split model", *left]
    return place_tensors(state, "torch", location, identity_of(location, versions), notes)


def span_of(file: FileVersion, nbytes: int | None = None) -> Span:
    """All bytes of a file; `nbytes` is its size if that is known."""
    length = file.store.sizes(file.key).get(file.key, 0) if nbytes is None else nbytes
    return Span(file, 0, length)


def beginning(file: FileVersion) -> bytes:
    """The first bytes of a file, or all if it is short."""
    span = span_of(file)
    return bytes(span.read(0, min(_BEGINNING, len(span))))


def _open(file: FileVersion) -> TorchFile:
    if _is_old(beginning(file)):
        raise FormatError(
            f"{file} is in the format of torch before 1.6, whose tensors cannot be found without "
            "running its pickle. Load it with torch.load(weights_only=True) and save it again "
            "with torch.save."
        )
    return open_state_file(span_of(file))


def _is_old(head: bytes) -> bool:
    """Whether a file is a sequence of torch's pickles, or one of its even older tar archives."""
    return head.startswith(_BEFORE_1_6) or (
        head[257:262] == b"ustar" and head.startswith((b"sys_info\0", b"storages\0", b"pickle\0"))
    )
