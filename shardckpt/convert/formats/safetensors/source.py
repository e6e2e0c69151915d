"""Reader of safetensors: one file, or several with an index.

Hugging Face's libraries write such files.

A place is recognised as:

1. A file that begins like a safetensors file; or an index, `*.safetensors.index.json`, beside the
   files that it names.
2. A directory with a `model.safetensors`, which `from_pretrained` prefers; otherwise with one
   index, `model.safetensors.index.json` before others; otherwise with one `*.safetensors` file.

The state is one dict with the names of the files. Every tensor of an index must be in the file that
the index names, and in no other. `config.json`, the tokenizer's files and others beside the
weights, and the files' own `__metadata__`, become metadata.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardckpt.convert.files.file_version import FileVersion, file_at, identity_of
from shardckpt.convert.foreign import ForeignPart, row_chunks
from shardckpt.convert.formats.safetensors.header import LENGTH_BYTES, header_bytes, open_header
from shardckpt.convert.formats.safetensors.hf_index import (
    check_index,
    note_of_part,
    parts_of,
    parts_of_only_model,
    read_weight_map,
)
from shardckpt.convert.placed import PlacedTensor, RowMajor, place_tensors
from shardckpt.convert.span import Span
from shardckpt.convert.strict_json import is_json, parse_json
from shardckpt.errors import CorruptionError, FormatError
from shardckpt.format.hf_files import BYTES, CONFIGS, LARGEST_FILE, as_metadata
from shardckpt.io.store import Store
from shardckpt.io.threads import map_on_threads
from shardckpt.text import few

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shardckpt.convert.files.file_version import Candidate
    from shardckpt.convert.formats.safetensors.header import Header, HeaderTensor
    from shardckpt.convert.placed import Foreign
    from shardckpt.io.url import Location

SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
_MODEL = "model"
_LARGEST_CONFIG = 256 << 10
"""Most bytes of a config file that is kept: it goes into every record."""


def looks_like(candidate: Candidate) -> str | None:
    """The signs of safetensors files at a location, in words; None: there are none."""
    file = candidate.file
    if file is None:
        files = [name for name in candidate.names if name.endswith((SUFFIX, INDEX_SUFFIX))]
        return f"{few(files)} in the directory" if files else None
    if file.key.endswith(INDEX_SUFFIX):
        return f"{file.key}, an index of split files"
    if file.key.endswith(SUFFIX):
        return f"{file.key}, by its name"
    try:
        begin = file.read(0, LENGTH_BYTES + 1).tobytes()
        header_bytes(begin[:LENGTH_BYTES], file.key)
    except (FormatError, CorruptionError):
        return None
    return (
        f"{file.key}, which begins with the length of a header and the header"
        if begin[-1:] == b"{"
        else None
    )


def open_foreign(location: Location, *, trust_pickle: bool = False) -> Foreign:
    """Open all files and read their headers.

    Args:
        location: a file, an index, or a directory.
        trust_pickle: ignored: the format has no pickles.

    Raises:
        FormatError: a file is malformed, or index and files contradict each other; the message
            names the tensor.
        MissingDataError: a file that the index names is missing.
        OptionError: there are several models, and no rule chooses one.
        DtypeError: a tensor's dtype cannot be stored.
        StorageError: the storage failed or refused.
    """
    del trust_pickle
    given = file_at(location)
    store = Store.open(location) if given is None else given.store
    beside = _names(store) if given is None else []
    main = _main(beside, store) if given is None else given.key
    index = FileVersion(store, main) if main.endswith(INDEX_SUFFIX) else None
    weight_map = None if index is None else read_weight_map(index, SUFFIX)
    files = parts_of(main, beside, store) if given is None else [main]
    if weight_map is not None:
        files = sorted(set(weight_map.values()))
    versions = map_on_threads(lambda name: FileVersion(store, name), files)
    headers = dict(zip(files, map_on_threads(open_header, versions), strict=True))
    if weight_map is None:
        weight_map = {tensor: file for file, header in headers.items() for tensor in header.tensors}
    names = {file: header.tensors for file, header in headers.items()}
    check_index(str(store if index is None else index), weight_map, names)
    by_file = dict(zip(files, versions, strict=True))
    state = {
        tensor: _place(by_file[file], headers[file].tensors[tensor])
        for tensor, file in weight_map.items()
    }
    configs = {
        name: doc
        for name in CONFIGS
        if name in beside and (doc := _config(store, name)) is not None
    }
    contents = {
        name: data
        for name in BYTES
        if name in beside and (data := _contents(store, name)) is not None
    }
    left = sorted(set(beside) - {*files, *configs, *contents, *([] if index is None else [main])})
    # The importer notes the others.
    kept = [*(name for name, document in configs.items() if is_json(document)), *contents]
    notes = (
        f"{len(state)} tensor{'' if len(state) == 1 else 's'} in {few(files)}"
        + ("" if index is None else f", by {main}"),
        *(note_of_part(main) if given is not None else ()),
        *([f"kept as metadata: {few(kept)}"] if kept else []),
        *([f"left behind: {few(left)}"] if left else []),
    )
    return place_tensors(
        state,
        "safetensors",
        location,
        identity_of(location, [*versions, *([] if index is None else [index])]),
        notes,
        {**_metadata(headers, configs), **as_metadata(contents)},
    )


def _place(file: FileVersion, stored: HeaderTensor) -> PlacedTensor:
    chunks = row_chunks(stored.shape, stored.dtype.itemsize)
    return PlacedTensor(
        stored.shape,
        stored.dtype,
        (ForeignPart.whole(stored.shape, chunks),),
        places=(RowMajor(Span(file, stored.start, stored.stop), stored.shape),),
    )


def _config(store: Store, name: str) -> Any:
    """A small JSON file beside the weights; None if it is not valid JSON or too large."""
    try:
        return parse_json(FileVersion(store, name).read_whole(_LARGEST_CONFIG))
    except (ValueError, FormatError):
        return None


def _contents(store: Store, name: str) -> bytes | None:
    """A small file beside the weights; None if it is too large."""
    try:
        return FileVersion(store, name).read_whole(LARGEST_FILE)
    except FormatError:
        return None


def _main(names: Sequence[str], store: Store) -> str:
    """The file or index of the model, among the names in a directory."""
    if _MODEL + SUFFIX in names:
        return _MODEL + SUFFIX
    for suffix in (INDEX_SUFFIX, SUFFIX):
        models = [name for name in names if name.endswith(suffix)]
        if _MODEL + suffix in models:
            return _MODEL + suffix
        if models:
            parts_of_only_model(models, models, store)
            return models[0]
    raise FormatError(f"{store}: there is no {SUFFIX} file.")


def _metadata(headers: Mapping[str, Header], configs: Mapping[str, Any]) -> dict[str, Any]:
    """Further texts of the files: once if the files agree, otherwise file by file."""
    texts = {file: dict(header.metadata) for file, header in headers.items()}
    first, *others = texts.values()
    agreed = (
        first
        if all(other == first for other in others)
        else {file: one for file, one in texts.items() if one}
    )
    return {**({"safetensors": agreed} if agreed else {}), **configs}


def _names(store: Store) -> list[str]:
    """Names of the files in a directory."""
    return [name for name in store.list_children() if not name.endswith("/")]
