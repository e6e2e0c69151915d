"""Reader of the files of torch_xla's `xser.save`, without torch and torch_xla.

    <path>                  torch.save of the state, in which each XLA tensor is a `TensorReference`
                            with a number
    <path>.tensors/         beside it
        tensor_<number>.pt  torch.save of each of these tensors

(torch_xla 2.9, utils/serialization.py.) `xser.load` runs the pickle; this reader runs nothing, and
recognises that class by its name.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from shardckpt.convert.files.file_version import FileVersion, file_at, identity_of
from shardckpt.convert.formats.torch.file import is_torch_file
from shardckpt.convert.formats.torch.objects import PickledTensor
from shardckpt.convert.formats.torch.source import beginning, span_of
from shardckpt.convert.formats.torch.states import open_state_file, state_in
from shardckpt.convert.placed import place_pickled, place_tensors
from shardckpt.errors import FormatError, MissingDataError, NotFoundError
from shardckpt.io.threads import map_on_threads
from shardckpt.text import shorten

if TYPE_CHECKING:
    from shardckpt.convert.files.file_version import Candidate
    from shardckpt.convert.formats.torch.file import TorchFile
    from shardckpt.convert.formats.torch.unpickling import Instance
    from shardckpt.convert.placed import Foreign
    from shardckpt.io.url import Location

_REFERENCE = "torch_xla.utils.serialization.TensorReference"
_TENSORS = ".tensors/"
_TENSOR = re.compile(r"tensor_(\d{1,18})\.pt")


def looks_like(candidate: Candidate) -> str | None:
    """The signs of `xser.save` at a location, in words; None: there are none."""
    file = candidate.file
    if file is None or not is_torch_file(beginning(file)):
        return None
    tensors = [
        name for name in file.store.list_children(file.key + _TENSORS) if _TENSOR.fullmatch(name)
    ]
    return f"{file.key}, and {len(tensors)} tensors in {file.key}{_TENSORS}" if tensors else None


def open_foreign(location: Location, *, trust_pickle: bool = False) -> Foreign:
    """Open the file and all files of tensors.

    Args:
        location: the path that `xser.save` was called with, not its `.tensors` directory.
        trust_pickle: ignored: nothing in the pickles is run.

    Raises:
        NotFoundError: there is no such file.
        FormatError: a file is malformed, or holds something that cannot be stored.
        MissingDataError: the file of a tensor is missing.
        CorruptionError, StorageError: a file is truncated, or cannot be read.
    """
    del trust_pickle
    file = file_at(location)
    if file is None:
        raise NotFoundError(
            f"{location}: there is no such file; give the path that xser.save was given, without "
            f"{_TENSORS[:-1]}."
        )
    folder = file.key + _TENSORS
    lengths = {
        key: n
        for key, n in sorted(file.store.sizes(folder).items())
        if _TENSOR.fullmatch(key.removeprefix(folder))
    }
    versions = map_on_threads(lambda key: FileVersion(file.store, key), lengths)
    opened = map_on_threads(
        lambda version: open_state_file(span_of(version, lengths[version.key])), versions
    )
    tensors = {version.key: one for version, one in zip(versions, opened, strict=True)}

    def tensor(reference: Instance) -> object:
        return _dereference(reference, tensors, file, folder)

    state, left = state_in(open_state_file(span_of(file)), {_REFERENCE: tensor})
    return place_tensors(
        state,
        "xser",
        location,
        identity_of(location, [file, *versions]),
        (f"{len(tensors)} tensors in {folder}", *left),
    )


def _dereference(
    reference: Instance, tensors: dict[str, TorchFile], file: FileVersion, folder: str
) -> object:
    """The tensor of a reference."""
    number = reference.state.get("tid") if isinstance(reference.state, dict) else None
    if type(number) is not int or number < 0:
        raise FormatError(f"is a reference to the tensor {shorten(number)}, which is not a number")
    key = f"{folder}tensor_{number}.pt"
    if key not in tensors:
        raise MissingDataError(
            f"{file} refers to {file.store.path_of(key)}, which is missing; put it back from a "
            "backup."
        )
    tensor = tensors[key].state
    if not isinstance(tensor, PickledTensor):
        raise FormatError(f"lies in {key}, which does not hold a tensor")
    return place_pickled(tensors[key], tensor)
