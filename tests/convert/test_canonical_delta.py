"""Versions of a publisher as directories of differences, applied by a reader that is written from
the format's rules alone."""

from __future__ import annotations

import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import time
import zlib
from contextlib import contextmanager
from hashlib import sha256
from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest
import xxhash
import zstandard
from blake3 import blake3

import shardckpt
from shardckpt.errors import (
    AlreadyExistsError,
    CorruptionError,
    FormatError,
    NamesMismatchError,
    NotFoundError,
    OptionError,
    ReplacedError,
    StorageError,
    StructureMismatchError,
)
from shardckpt.io.store import Store

NAMED = {"include": "model/**", "strip_prefix": "model."}
DIGESTS = {
    "adler32": lambda data: f"{zlib.adler32(data):08x}",
    "xxh3-128": lambda data: xxhash.xxh3_128(data).hexdigest(),
    "blake3": lambda data: blake3(data).hexdigest(),
}


# --- the reader


def entries(file):
    """The entries of a safetensors file, and its metadata."""
    data = file.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header, at = json.loads(data[8 : 8 + length]), 8 + length
    texts = header.pop("__metadata__", {})
    return {
        name: (one, data[at + one["data_offsets"][0] : at + one["data_offsets"][1]])
        for name, one in header.items()
    }, texts


def base(root):
    """The tensors of version 0, as bytes."""
    tensors = {}
    for file in (root / "weight_v000000").glob("*.safetensors"):
        tensors |= {name: bytearray(data) for name, (_, data) in entries(file)[0].items()}
    return tensors


def apply(root, number, tensors):
    """Bring tensors from the version before to this one; return the names that changed."""
    place = root / f"weight_v{number:06d}"
    index = json.loads((place / "model.safetensors.index.json").read_text())
    metadata = index["metadata"]
    assert metadata["compression_format"] == "zstd"
    assert (metadata["version"], metadata["base_version"]) == (f"{number:06d}", f"{number - 1:06d}")
    files = {name: {*entries(place / name)[0]} for name in {*index["weight_map"].values()}}
    assert {file.name for file in place.glob("*.safetensors")} == {*files}
    assert {tensor: name for name, held in files.items() for tensor in held} == index["weight_map"]
    for name in files:
        tensors_of_file, digests = entries(place / name)
        assert digests.keys() == tensors_of_file.keys()
        for tensor, (one, frame) in tensors_of_file.items():
            assert (one["dtype"], one["shape"]) == ("U8", [len(frame)])
            old = np.frombuffer(tensors[tensor], np.uint8)
            with zstandard.ZstdDecompressor().stream_reader(
                frame, read_across_frames=False
            ) as reader:
                plain = np.frombuffer(reader.read(8 * old.nbytes + 8), np.uint8)
            if metadata["delta_encoding"] == "xor":
                assert plain.nbytes == old.nbytes
                old ^= plain
            else:
                (count,) = plain[:4].view("<u4")
                old[plain[4 : 4 + 4 * count].view("<u4")] = plain[4 + 4 * count :]
            assert DIGESTS[metadata["checksum_format"]](bytes(old)) == digests[tensor]
    return {*index["weight_map"]}


# --- the versions


def changed(array, rng, count=9):
    copy = array.copy()
    flat = copy.reshape(-1).view(np.uint8)
    flat[rng.choice(flat.size, min(count, flat.size), replace=False)] ^= np.uint8(3)
    return copy


class Training:
    """A state of which some tensors change in each step."""

    def __init__(self, url, **options):
        self.rng = np.random.default_rng(0)
        embedding = self.rng.standard_normal((96, 40)).astype(ml_dtypes.bfloat16)
        self.model = {
            "embed.weight": embedding,
            "head.weight": embedding,  # tied
            "w": self.rng.standard_normal((70, 333)).astype(np.float32),
            "bias": self.rng.standard_normal(7).astype(np.float32),
            "frozen": np.arange(10),
            "nothing": np.zeros((0, 3), np.float32),
        }
        self.publisher = shardckpt.Publisher(url, anchor_every=4, **options)

    def publish(self, step, names=("embed.weight", "w")):
        for name in names:
            self.model[name] = changed(self.model[name], self.rng)
        self.model["head.weight"] = self.model["embed.weight"]
        self.publisher.publish(
            step, {"model": self.model, "optimizer": {"m": np.full(5, step)}, "step": step}
        )
        self.publisher.wait()


@contextmanager
def published(url):
    """A training that has published six versions."""
    made = Training(url)
    with made.publisher:
        for step in (30, 40, 41):
            made.publish(step)
        made.publish(50, ["bias"])
        made.publish(51, [])
        made.publish(60, ["w", "bias"])
        yield made


@pytest.fixture
def training(tmp_path):
    with published(tmp_path / "policy") as made:
        yield made


def plain(tmp_path, step, **options):
    """The bytes of each tensor in the plain export of a version."""
    where = tmp_path / f"plain-{step}" / "model.safetensors"
    if not where.exists():
        shardckpt.export_safetensors(tmp_path / "policy" / str(step), where, **options)
    return {name: data for name, (_, data) in entries(where)[0].items()}


def check(tmp_path, out, steps, **options):
    """The reader gets each version's tensors from its directory, which has those tensors alone that
    changed."""
    tensors = base(out)
    assert tensors == plain(tmp_path, steps[0], **options)
    for number, (before, step) in enumerate(pairwise(steps), 1):
        old, new = plain(tmp_path, before, **options), plain(tmp_path, step, **options)
        assert apply(out, number, tensors) == {name for name in new if new[name] != old[name]}
        assert tensors == new
    assert len([*out.iterdir()]) == len(steps)


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
@pytest.mark.parametrize("digest", [*DIGESTS])
def test_a_reader_of_the_format_gets_each_version(training, tmp_path, encoding, digest):
    options = {"delta_encoding": encoding, "checksum_format": digest}
    report = shardckpt.export(
        tmp_path / "policy", tmp_path / "out", to="canonical-delta", since=40, **NAMED, **options
    )
    assert report.files == tuple(f"weight_v{number:06d}" for number in range(5))
    check(tmp_path, tmp_path / "out", [40, 41, 50, 51, 60], **NAMED)
    assert (
        json.loads((tmp_path / "out/weight_v000003/model.safetensors.index.json").read_text())[
            "weight_map"
        ]
        == {}
    )


def test_tensors_that_are_renamed_and_converted_are_those_of_the_plain_export(training, tmp_path):
    (tmp_path / "map.toml").write_text('[[map]]\nfrom = "w"\nto = "wt"\ntranspose = true\n')
    options = {
        **NAMED,
        "mapping": tmp_path / "map.toml",
        "dtype": {"x.bias": "float16"},
        "rename": "s/^frozen$/ice/",
        "add_prefix": "x.",
    }
    shardckpt.export(
        tmp_path / "policy", tmp_path / "out", to="canonical-delta", since=30, **options
    )
    check(tmp_path, tmp_path / "out", [30, 40, 41, 50, 51, 60], **options)


def test_a_later_call_continues_and_reads_differences_alone(training, tmp_path):
    out = tmp_path / "out"
    options = {"to": "canonical-delta", "since": 40, **NAMED}
    shardckpt.export(tmp_path / "policy", out, **options)
    assert shardckpt.export(tmp_path / "policy", out, **options).files == ()
    seen = []
    training.publish(61)
    assert shardckpt.export(tmp_path / "policy", out, **options, on_version=seen.append).files == (
        "weight_v000005",
    )
    check(tmp_path, out, [40, 41, 50, 51, 60, 61], **NAMED)
    assert [(one.version, one.step, one.tensors) for one in seen] == [(5, 61, 2)]


def test_what_a_killed_export_left_is_no_version_and_is_replaced(training, tmp_path):
    out = tmp_path / "out"
    options = {"to": "canonical-delta", "since": 40, **NAMED}
    shardckpt.export(tmp_path / "policy", out, **options)
    (out / "weight_v000004/model.safetensors.index.json").unlink()
    shutil.copy(
        out / "weight_v000001/model-00001.safetensors",
        out / "weight_v000004/model-00007.safetensors",
    )
    assert shardckpt.export(tmp_path / "policy", out, **options).files == ("weight_v000004",)
    check(tmp_path, out, [40, 41, 50, 51, 60], **NAMED)


@pytest.mark.parametrize("output", ["full", "closed"])
def test_a_process_that_follows_and_cannot_print_ends_with_the_status_of_that(
    training, tmp_path, output
):
    command = [sys.executable, "-m", "shardckpt", "export", tmp_path / "policy", tmp_path / "out"]
    command += ["--to", "canonical-delta", "--since", "40", "--follow", "--json"]
    reading, writing = os.pipe() if output == "closed" else (None, os.open("/dev/full", os.O_RDWR))
    if reading is not None:
        os.close(reading)
    done = subprocess.run(
        command, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=60, check=False
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (
        (141, "")
        if output == "closed"
        else (6, "error: cannot write to standard output: No space left on device\n")
    )


@pytest.mark.long
def test_a_process_that_follows_and_is_killed_again_and_again_leaves_a_chain(training, tmp_path):
    """Killed by SIGKILL at any instant, then started again with the same command."""
    out = tmp_path / "out"
    command = [
        sys.executable,
        "-m",
        "shardckpt",
        "export",
        str(tmp_path / "policy"),
        str(out),
        "--to",
        "canonical-delta",
        "--since",
        "40",
    ]
    command += ["--include", "model/**", "--strip-prefix", "model.", "--follow"]
    steps = [40, 41, 50, 51, 60]
    for step in range(70, 78):
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        training.publish(step)
        steps.append(step)
        time.sleep(float(training.rng.uniform(1.2, 2.5)))
        process.kill()
        assert process.communicate() is not None
        assert process.returncode == -signal.SIGKILL
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    training.publish(
        78
        # The killed processes may have written all before; this one is written by a process that
        # runs.
    )
    steps.append(78)
    last = out / f"weight_v{len(steps) - 1:06d}/model.safetensors.index.json"
    deadline = time.monotonic() + 60
    while not last.exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "run the same command again to continue" in errors
    check(tmp_path, out, steps, **NAMED)


def test_training_that_goes_back_is_one_more_version(training, tmp_path):
    out = tmp_path / "out"
    options = {"to": "canonical-delta", "since": 40, **NAMED}
    shardckpt.export(tmp_path / "policy", out, **options)
    before = plain(tmp_path, 60, **NAMED)
    training.publish(50)
    report = shardckpt.export(tmp_path / "policy", out, **options)
    assert report.files == ("weight_v000005",)
    tensors = {name: bytearray(data) for name, data in before.items()}
    apply(out, 5, tensors)
    shutil.rmtree(tmp_path / "plain-50", ignore_errors=True)
    assert tensors == plain(tmp_path, 50, **NAMED)


def test_a_bucket_gets_the_same_directories(training, tmp_path, store):
    """On each kind of storage that takes safetensors files."""
    url = str(store)
    if url.startswith("memory"):
        pytest.skip("a model's files are not written to memory://")
    options = {"to": "canonical-delta", "since": 40, **NAMED}
    shardckpt.export(tmp_path / "policy", url, **options)
    shardckpt.export(tmp_path / "policy", tmp_path / "out", **options)
    for file in sorted((tmp_path / "out").glob("weight_v*/*")):
        key = f"{file.parent.name}/{file.name}"
        assert store.read(key) == file.read_bytes(), key


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_place_that_takes_no_safetensors_is_refused_before_it_changes(tmp_path, overwrite):
    shardckpt.save(tmp_path / "policy" / "0", {"w": np.ones(3)})
    out = Store.open(f"memory://delta-{overwrite}")
    out.write("weight_v000000/model.safetensors", b"mine")
    with pytest.raises(OptionError, match="safetensors files are written to a local disk"):
        shardckpt.export(
            tmp_path / "policy", str(out), to="canonical-delta", since=0, overwrite=overwrite
        )
    assert out.list() == ["weight_v000000/model.safetensors"]


def test_what_receivers_could_not_apply_is_refused(training, tmp_path):
    options = {"to": "canonical-delta", "since": 40, **NAMED}
    policy, out = tmp_path / "policy", tmp_path / "out"
    shardckpt.export(policy, out, **options)
    for more, error, message in [
        ({"since": 99}, NotFoundError, r"there is no version 99 .*the newest last"),
        ({"since": None}, OptionError, "canonical-delta needs since=…: give the step"),
        ({"since": 30}, AlreadyExistsError, "version 0 there is step 40; continue with since=40"),
        ({"ties": "copies"}, OptionError, "receivers have tied tensors once"),
        ({"delta_encoding": "add"}, OptionError, 'use "xor" or "overwrite"'),
        ({"dtype": "float16"}, StructureMismatchError, r"are not those of version 0 \(step 40\)"),
        ({"optimizer": "flat"}, OptionError, "is only for torch, dcp and orbax"),
    ]:
        target = tmp_path / "new" if more == {"since": 99} else out
        with pytest.raises(error, match=message):
            shardckpt.export(policy, target, **(options | more))
    with pytest.raises(OptionError, match="since=40 is only for to='canonical-delta'"):
        shardckpt.export(policy / "40", tmp_path / "f.safetensors", since=40)
    training.model["w"] = training.model["w"][:3]
    training.publish(61)
    with pytest.raises(StructureMismatchError, match="receivers only change bytes"):
        shardckpt.export(policy, out, **options)
    shutil.rmtree(policy / "60")
    with pytest.raises(
        NotFoundError, match=r"version 60 is gone, and .*weight_v000004 was written from it"
    ):
        shardckpt.export(policy, out, **options)
    assert len([*out.iterdir()]) == 5
    assert not (tmp_path / "new").exists()


def test_tensors_of_one_shape_that_take_each_other_s_names_are_refused(tmp_path):
    square, out = np.arange(9.0).reshape(3, 3), tmp_path / "out"
    options = {"to": "canonical-delta", "since": 0}
    with shardckpt.Publisher(tmp_path / "policy") as publisher:
        publisher.publish(0, {"a": square, "b": square + 20})
        publisher.wait()
        shardckpt.export(tmp_path / "policy", out, **options)
        publisher.publish(1, {"a": square, "b": square + 30})
        publisher.wait()
    rename = ["s/^a$/tmp/", "s/^b$/a/", "s/^tmp$/b/"]
    with pytest.raises(StructureMismatchError, match="sources of its tensors are not those of"):
        shardckpt.export(tmp_path / "policy", out, **options, rename=rename)
    note = out / "weight_v000000" / "shardckpt-version.json"
    described = [[name, "float64", [3, 3]] for name in ("a", "b")]
    before_views = json.loads(note.read_text()) | {
        "forms": sha256(json.dumps(described).encode()).hexdigest()
    }
    note.write_text(json.dumps(before_views))
    shardckpt.export(tmp_path / "policy", out, **options)
    assert len([*out.iterdir()]) == 2


@pytest.mark.parametrize("follows", [True, False])
def test_versions_whose_tensors_have_other_stored_names_continue(tmp_path, follows):
    embedding, out = np.arange(6.0).reshape(2, 3), tmp_path / "out"
    options = {"to": "canonical-delta", "since": 0, "rename": r"s/^(model|module)\.//"}
    states = [
        {"model": {"embed.weight": embedding, "lm_head.weight": embedding, "w": np.zeros(4)}},
        {"model": {"lm_head.weight": embedding, "embed.weight": embedding, "w": np.zeros(4)}},
        {"module": {"w": np.ones(4), "embed.weight": (b := embedding + 1), "lm_head.weight": b}},
        {"module": {"w": np.ones(4), "embed.weight": (c := embedding + 2), "lm_head.weight": c}},
    ]
    with shardckpt.Publisher(tmp_path / "policy") as publisher:
        for step, state in enumerate(states):
            publisher.publish(step, state)
            publisher.wait()
            if not follows:
                shardckpt.export(tmp_path / "policy", out, **options)
    shardckpt.export(tmp_path / "policy", out, **options)
    check(tmp_path, out, [0, 1, 2, 3], rename=options["rename"])


def test_a_version_that_was_replaced_is_no_base(training, tmp_path):
    options = {"to": "canonical-delta", "since": 40, **NAMED}
    shardckpt.export(tmp_path / "policy", tmp_path / "out", **options)
    training.publish(60)
    with pytest.raises(
        ReplacedError, match=r"version 60 was replaced, and .*weight_v000004 was written from it"
    ):
        shardckpt.export(tmp_path / "policy", tmp_path / "out", **options)
    shardckpt.export(tmp_path / "policy", tmp_path / "out", **options, overwrite=True)
    check(tmp_path, tmp_path / "out", [40, 41, 50, 51, 60], **NAMED)


@pytest.mark.long
@pytest.mark.parametrize(
    ("more", "error"),
    [({"since": 99}, NotFoundError), ({"include": "nothing/**"}, NamesMismatchError)],
)
def test_overwrite_deletes_nothing_if_version_0_cannot_be_written(
    training, tmp_path, store, more, error
):
    url = str(store)
    if url.startswith("memory"):
        pytest.skip("a model's files are not written to memory://")
    options = {"to": "canonical-delta", "since": 40, **NAMED}
    shardckpt.export(tmp_path / "policy", url, **options)
    before = {key: store.read(key) for key in store.list()}
    with pytest.raises(error):
        shardckpt.export(tmp_path / "policy", url, **(options | more), overwrite=True)
    assert {key: store.read(key) for key in store.list()} == before
    report = shardckpt.export(tmp_path / "policy", url, **(options | {"since": 51}), overwrite=True)
    assert report.files == ("weight_v000000", "weight_v000001")
    assert {key.partition("/")[0] for key in store.list()} == {"weight_v000000", "weight_v000001"}


@pytest.mark.long
def test_overwrite_on_a_disk_deletes_nothing_if_the_source_is_damaged(training, tmp_path):
    out = tmp_path / "out"
    options = {"to": "canonical-delta", "since": 40, **NAMED}
    shardckpt.export(tmp_path / "policy", out, **options)
    before = {file: file.read_bytes() for file in out.rglob("*") if file.is_file()}
    largest = max(
        (file for file in (tmp_path / "policy/30").rglob("*") if file.is_file()),
        key=lambda file: file.stat().st_size,
    )
    kept = largest.read_bytes()
    largest.write_bytes(bytes(len(kept)))
    with pytest.raises(CorruptionError):
        shardckpt.export(tmp_path / "policy", out, **(options | {"since": 30}), overwrite=True)
    assert (
        before.items()
        <= {file: file.read_bytes() for file in out.rglob("*") if file.is_file()}.items()
    )
    largest.write_bytes(kept)
    assert shardckpt.export(tmp_path / "policy", out, **options).files == ()
    check(tmp_path, out, [40, 41, 50, 51, 60], **NAMED)
    shardckpt.export(tmp_path / "policy", out, **(options | {"since": 50}), overwrite=True)
    check(tmp_path, out, [50, 51, 60], **NAMED)


def test_a_second_export_to_a_directory_is_refused_while_the_first_lasts(training, tmp_path):
    out = tmp_path / "out"
    options = {"to": "canonical-delta", "since": 40, **NAMED}
    refused = []

    def again(version):
        for overwrite in (False, True):
            with pytest.raises(StorageError, match=r"out: another export is writing there"):
                shardckpt.export(tmp_path / "policy", out, **options, overwrite=overwrite)
            refused.append(version.version)

    shardckpt.export(tmp_path / "policy", out, **options, on_version=again)
    assert refused == [number for number in range(5) for _ in range(2)]
    check(tmp_path, out, [40, 41, 50, 51, 60], **NAMED)


def test_an_export_that_ends_with_an_error_leaves_no_lease_and_no_lock(training, tmp_path):
    out = tmp_path / "out"
    options = {"to": "canonical-delta", "since": 40, **NAMED}

    def fail(version):
        if version.version == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as raised:
        shardckpt.export(tmp_path / "policy", out, **options, on_version=fail)
    assert not [*(tmp_path / "policy/leases").glob("*")], raised
    assert sorted(file.name for file in out.iterdir()) == [
        f"weight_v{number:06d}" for number in range(3)
    ]
    shardckpt.export(tmp_path / "policy", out, **options)
    assert not [*(tmp_path / "policy/leases").glob("*")]
    check(tmp_path, out, [40, 41, 50, 51, 60], **NAMED)


NOTE, INDEX = "shardckpt-version.json", "model.safetensors.index.json"


def noted(**changes):
    """Damage to a note."""
    return lambda file: file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def first_bytes(count):
    """Damage to a file: only its first bytes are there."""
    return lambda file: file.write_bytes(file.read_bytes()[:count])


def delete(file):
    """Damage: the file is not there."""
    file.unlink()


@pytest.fixture(scope="module")
def behind(tmp_path_factory):
    """A policy, directories with all of its versions but the last, and the options of their export;
    nothing there is changed."""
    place = tmp_path_factory.mktemp("behind")
    options = {"to": "canonical-delta", "since": 40, **NAMED}
    with published(place / "policy") as made:
        shardckpt.export(place / "policy", place / "out", **options)
        made.publish(61)
    return place / "policy", place / "out", options


@pytest.mark.parametrize(
    ("number", "name", "damage"),
    [
        (0, "model.safetensors", first_bytes(0)),
        (0, "model.safetensors", first_bytes(-1)),
        (1, "model-00001.safetensors", delete),
        (4, "model-00001.safetensors", delete),
        (4, "model-00001.safetensors", first_bytes(-1)),
        (4, INDEX, lambda file: file.write_text("{}")),
        (4, INDEX, lambda file: file.write_bytes(b"x" * file.stat().st_size)),
        (4, INDEX, lambda file: file.write_bytes(b"{}".ljust(file.stat().st_size))),
        (2, INDEX, lambda file: file.write_text("{}")),
        *(
            (number, NOTE, damage)
            for number in (0, 4)
            for damage in (delete, first_bytes(0), first_bytes(9))
        ),
        *((4, NOTE, noted(step=step)) for step in ("60", -1, True, None, 1.5)),
        (4, NOTE, noted(attempt=3)),
        (4, NOTE, noted(contents=None)),
        *(
            (4, NOTE, noted(files=files))
            for files in ([1], {"model-00001.safetensors": "1"}, {}, None)
        ),
        *((0, NOTE, noted(before=before)) for before in ([1], {"x": "a"}, {"1": 2}, {"-1": "a"})),
        (0, NOTE, noted(forms=1)),
        (0, NOTE, lambda file: file.write_text("[" * 100_000)),
    ],
)
def test_damage_in_written_directories_is_named_before_anything_is_written(
    behind, tmp_path, number, name, damage
):
    policy, whole, options = behind
    out = shutil.copytree(whole, tmp_path / "out")
    damage(out / f"weight_v{number:06d}" / name)
    with pytest.raises(
        FormatError, match=rf"weight_v{number:06d}/{name}.*(directory|copy|damaged)"
    ):
        shardckpt.export(policy, out, **options)
    assert len([*out.iterdir()]) == 5


KILLED = """
import os, sys, shardckpt
from shardckpt.convert.formats.canonical_delta import directories
die = lambda *_: os.kill(os.getpid(), 9)
exchange, delete = directories.exchange, directories.VersionDirectories._delete
{patch}
shardckpt.export(
    sys.argv[1], sys.argv[2], to="canonical-delta", since=51, include="model/**",
    strip_prefix="model.", overwrite=True,
)
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("patch", "left", "since"),
    [
        ("directories.VersionDirectories.finish_first = die", 5, 40),
        (
            (
                "directories.VersionDirectories._delete = lambda self, numbers: die(delete(self, "
                "numbers[-1:]))"
            ),
            4,
            40,
        ),
        ("directories.exchange = die", 1, 40),
        ("directories.exchange = lambda *names: die(exchange(*names))", 1, 51),
    ],
)
def test_overwrite_killed_at_any_point_leaves_a_chain_that_continues(
    training, tmp_path, patch, left, since
):
    out = tmp_path / "out"
    shardckpt.export(tmp_path / "policy", out, to="canonical-delta", since=40, **NAMED)
    ended = subprocess.run(
        [sys.executable, "-c", KILLED.format(patch=patch), tmp_path / "policy", out], check=False
    )
    assert ended.returncode == -signal.SIGKILL
    assert len([*out.glob("weight_v*")]) == left
    shardckpt.export(tmp_path / "policy", out, to="canonical-delta", since=since, **NAMED)
    check(tmp_path, out, [40, 41, 50, 51, 60] if since == 40 else [51, 60], **NAMED)
