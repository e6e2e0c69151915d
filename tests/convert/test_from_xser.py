"""Files that torch_xla's xser.save and xm.save have written are read as torch_xla reads them."""

from __future__ import annotations

import json
import os
import shutil
import sys

import forks
import pytest
from foreign_contents import contents
from foreign_states import described
from paths import CHILDREN

import shardckpt
from shardckpt.convert.detect import detect
from shardckpt.convert.files.file_version import Candidate
from shardckpt.convert.formats.torch import source as from_torch
from shardckpt.convert.formats.xser.source import looks_like, open_foreign
from shardckpt.convert.importing import import_checkpoint
from shardckpt.errors import CorruptionError, FormatError, MissingDataError, NotFoundError
from shardckpt.io.store import Store
from shardckpt.io.url import parse

pytestmark = [pytest.mark.xla, pytest.mark.slow]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A directory, and what torch_xla reads of each of its files."""
    root = tmp_path_factory.mktemp("torch_xla")
    environ = {**os.environ, "PJRT_DEVICE": "CPU"}
    command = [sys.executable, CHILDREN / "xla_saved.py", root]
    done = forks.run(command, env=environ, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-4000:]
    return root, json.loads(done.stdout.splitlines()[-1])


@pytest.fixture
def copied(saved, tmp_path):
    """The files of xser.save, to be damaged."""
    shutil.copytree(saved[0], tmp_path / "copy")
    return tmp_path / "copy" / "xser.pt"


def opened(path):
    return open_foreign(parse(str(path)))


def test_a_directory_of_xser_is_read_as_torch_xla_reads_it(saved):
    root, answers = saved
    foreign = opened(root / "xser.pt")
    assert described(contents(foreign)) == answers["xser.pt"]
    assert foreign.notes == ("6 tensors in xser.pt.tensors/",)


@pytest.mark.parametrize("name", ["xm.pt", "as it is.pt"])
def test_files_of_xm_save_and_of_tensors_on_devices_are_torchs(saved, name):
    root, answers = saved
    assert described(contents(from_torch.open_foreign(parse(str(root / name))))) == answers[name]
    assert looks_like(Candidate.at(parse(str(root / name)))) is None


def test_which_of_the_two_a_file_is_follows_from_the_directory_beside_it(saved):
    detected = {name: detect(parse(str(saved[0] / name))) for name in ("xser.pt", "xm.pt")}
    assert (detected["xser.pt"].format, detected["xm.pt"].format) == ("xser", "torch")
    assert detected["xser.pt"].seen == "xser.pt, and 6 tensors in xser.pt.tensors/"
    with pytest.raises(NotFoundError, match=r"give the path that xser\.save was given"):
        opened(saved[0] / "xser.pt.tensors")


def test_an_import_restores_as_what_was_saved(saved, tmp_path):
    report = import_checkpoint(saved[0] / "xser.pt", tmp_path / "imported")
    assert report.format == "xser"
    assert described(shardckpt.restore(tmp_path / "imported")) == saved[1]["xser.pt"]


def test_in_a_bucket_it_is_read_as_well(saved, cloud):
    root, answers = saved
    store = Store.open(cloud.url("xser"))
    for path in (root / "xser.pt", *(root / "xser.pt.tensors").iterdir()):
        store.write(str(path.relative_to(root)), path.read_bytes())
    location = parse(cloud.url("xser", "xser.pt"))
    assert looks_like(Candidate.at(location)) == "xser.pt, and 6 tensors in xser.pt.tensors/"
    assert described(contents(open_foreign(location))) == answers["xser.pt"]


def test_a_tensor_whose_file_is_missing_or_damaged_is_an_error(copied):
    tensor = copied.parent / "xser.pt.tensors" / "tensor_0.pt"
    data = tensor.read_bytes()
    tensor.write_bytes(data[: len(data) // 2])
    with pytest.raises((FormatError, CorruptionError), match=r"tensor_0\.pt"):
        opened(copied)
    shutil.copy(copied, tensor)
    with pytest.raises(FormatError, match=r"tensor_0\.pt"):
        opened(copied)
    tensor.unlink()
    with pytest.raises(MissingDataError, match=r"tensor_0\.pt, which is missing"):
        opened(copied)


def test_its_identity_is_of_all_of_its_files(copied):
    before = opened(copied).identity
    assert opened(copied).identity == before
    os.utime(copied.parent / "xser.pt.tensors" / "tensor_3.pt", ns=(1, 1))
    assert opened(copied).identity != before
