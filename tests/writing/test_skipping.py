"""Saves that leave tensors in a base checkpoint, and what reads them again."""

import json
import pickle
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from many_hosts import state as job_state
from processes import Processes

import shardckpt
from shardckpt import Mesh, OpSharding, PartitionSpec, SaveOptions, Sharding, errors
from shardckpt.format.documents import BASES_VERSION, seal
from shardckpt.runs.collecting import collect, delete
from shardckpt.state.names import array_path
from shardckpt.state.select import matches
from shardckpt.writing.background import Saver

MESH = Mesh((2, 2), ("x", "y"))
EMBED = np.arange(300 * 40, dtype=np.float32).reshape(300, 40)


def model(step=0):
    return {
        "model": {"embed": EMBED, "w": EMBED[:50] + step},
        "lora": np.full((40, 4), step, np.float32),
        "step": step,
    }


def equal(actual, expected):
    assert actual.keys() == expected.keys()
    for key, value in expected.items():
        if isinstance(value, dict):
            equal(actual[key], value)
        elif isinstance(value, np.ndarray):
            assert (actual[key].dtype, actual[key].shape, actual[key].tobytes()) == (
                value.dtype,
                value.shape,
                value.tobytes(),
            ), key
        else:
            assert actual[key] == value
    return True


def data_bytes(checkpoint):
    """Of all data files of a checkpoint in layout "packed"."""
    return sum(
        file.stat().st_size
        for file in Path(checkpoint).glob("*/hosts/*/*/d/*")
        if file.name.isdecimal()
    )


@pytest.fixture
def root(tmp_path):
    """A base called 0, and 1, which has left the embedding in it."""
    shardckpt.save(tmp_path / "0", model())
    shardckpt.save(
        tmp_path / "1", model(1), options=SaveOptions(base=tmp_path / "0"), skip="model/embed"
    )
    return tmp_path


def resealed(path, change):
    """Rewrite a commit record, as somebody might who wants us to read what we should not."""
    record = json.loads(path.read_bytes())["record"]
    change(record)
    path.write_bytes(seal(record, BASES_VERSION))


# --- saving ---------------------------------------------------------------------------------------

LEAVES = ("a", "b/w", "b/x", "b/y/0", "c")
arrays = st.tuples(
    st.sampled_from([np.float32, np.int8, ml_dtypes.bfloat16, np.bool_]),
    st.lists(st.integers(0, 9), max_size=3).map(tuple),
    st.integers(0, 99),
)
layouts = st.sampled_from(
    [PartitionSpec("x"), PartitionSpec(None, "y"), PartitionSpec(("x", "y")), None]
)


def nested(leaves):
    state = {}
    for name, (dtype, shape, seed) in leaves.items():
        *above, last = name.split("/")
        inside = state
        for key in above:
            inside = inside.setdefault(key, {})
        inside[last] = np.random.default_rng(seed).integers(0, 2, shape).astype(dtype)
    return state


def shardings(drawn, leaves):
    specs = {
        name: spec
        for name, spec in drawn.items()
        if name in leaves and spec is not None and len(spec) <= len(leaves[name][1])
    }
    return {name: Sharding(MESH, spec) for name, spec in specs.items()}


def tensors(state, prefix=""):
    for key, value in state.items():
        yield from (
            tensors(value, f"{prefix}{key}/")
            if isinstance(value, dict)
            else [(prefix + key, value)]
        )


@pytest.mark.long
@given(
    leaves=st.dictionaries(st.sampled_from(LEAVES), arrays, min_size=1),
    patterns=st.lists(st.sampled_from([*LEAVES, "b/*", "**", "b/**"]), max_size=3, unique=True),
    places=st.tuples(*[st.dictionaries(st.sampled_from(LEAVES), layouts)] * 2),
    kinds=st.tuples(
        *[st.tuples(st.sampled_from(["packed", "zarr"]), st.sampled_from([None, "zstd"]))] * 2
    ),
)
@settings(max_examples=25, deadline=None)
def test_what_is_restored_is_the_state_and_what_is_written_is_what_was_not_skipped(
    leaves, patterns, places, kinds, tmp_path_factory
):
    root, state = tmp_path_factory.mktemp("root"), nested(leaves)
    patterns = [pattern for pattern in patterns if any(matches(pattern, name) for name in leaves)]
    (base, own), (in_base, here) = kinds, (shardings(drawn, leaves) for drawn in places)
    shardckpt.save(
        root / "0",
        state,
        options=SaveOptions(layout=base[0], compression=base[1], shardings=in_base),
    )
    options = SaveOptions(
        layout=own[0], compression=own[1], shardings=here, base=root / "0", skip=patterns
    )
    report = shardckpt.save_async(root / "1", state, options=options).wait()

    skipped = {name for name in leaves if any(matches(pattern, name) for pattern in patterns)}
    assert report.nbytes == sum(
        array.nbytes for name, array in tensors(state) if name not in skipped
    )
    checkpoint = shardckpt.open(root / "1")
    assert {
        name for name in checkpoint.names() if checkpoint.info(name).base == str(root / "0")
    } == skipped
    assert {name: checkpoint.info(name).layout for name in here} == here
    assert equal(shardckpt.restore(root / "1"), state)
    assert checkpoint.verify().damage == []
    group = zarr.open_group(checkpoint.zarr_store(), mode="r")
    for name, array in tensors(state):
        if len(checkpoint.tensor(name).pieces) == 1:
            assert np.asarray(group[array_path(name)][...]).tobytes() == array.tobytes()


def test_a_skipped_tensor_costs_no_chunk_and_no_byte(root):
    record = shardckpt.open(root / "1").record

    rest = model(1)["model"]["w"].nbytes + model(1)["lora"].nbytes
    assert (
        rest < data_bytes(root / "1") == record.totals["stored_bytes"] < rest + EMBED.nbytes // 10
    )
    assert record.totals["bytes"] == rest + EMBED.nbytes
    assert not [path for path in root.glob("1/**/*") if "embed" in path.name]


def test_a_skipped_tensor_need_not_be_there_at_all(root):
    """A meta tensor has no elements that anybody could copy."""
    state = {"model": {"embed": torch.empty(300, 40, device="meta"), "w": torch.ones(3)}}
    shardckpt.save(root / "2", state, options=SaveOptions(base=root / "0", skip="model/embed"))

    assert np.array_equal(shardckpt.restore(root / "2")["model"]["embed"], EMBED)
    with pytest.raises(errors.LeafError, match="meta tensor has no data to save"):
        shardckpt.save(root / "3", state, options=SaveOptions(base=root / "0"))


def test_the_base_is_not_asked_on_the_thread_that_saves(root):
    """That it is not there, the handle tells."""
    handle = shardckpt.save_async(
        root / "2", model(2), options=SaveOptions(base=root / "missing"), skip=["model/embed"]
    )

    with pytest.raises(
        errors.NotFoundError,
        match=r"2 cannot be saved with skip=, because its base is not there: .*missing",
    ):
        handle.wait()


def test_skipping_takes_a_base_and_patterns_that_match(root):
    with pytest.raises(errors.OptionError, match="needs a base"):
        shardckpt.save(root / "2", model(), skip="model/*")
    for wrong in (1, [1], {"a"}):
        with pytest.raises(errors.OptionError, match=r"skip=.*patterns"):
            SaveOptions(base="x", skip=wrong)
    with pytest.raises(errors.OptionError, match="base=1"):
        SaveOptions(base=1)
    with pytest.raises(errors.OptionError, match="'model/embde' matches no tensor"):
        shardckpt.save(
            root / "2",
            model(),
            options=SaveOptions(base=root / "0", skip=("model/embed", "model/embde")),
        )
    with pytest.raises(errors.OptionError, match="cannot be its own base"):
        shardckpt.save(
            root / "0",
            model(),
            options=SaveOptions(base=root / "0", overwrite=True),
            skip="model/*",
        )
    with pytest.raises(errors.OptionError, match="another kind of storage"):
        shardckpt.save(
            root / "2", model(), options=SaveOptions(base="memory://a/0"), skip="model/*"
        )
    assert not (root / "2").exists()


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        (
            {"embed": EMBED[:10]},
            errors.ShapeMismatchError,
            r"with shape \(10, 40\) and dtype float32, and its base .*/0 has shape \(300, 40\)",
        ),
        (
            {"embed": EMBED.astype(np.float16)},
            errors.DtypeMismatchError,
            r"dtype float16, and its base .*/0 has dtype float32",
        ),
        (
            {"embed": EMBED, "embed2": EMBED + 1},
            errors.NamesMismatchError,
            r"'model/embed2': .*/2 skips it.* lacks it: .*/0: no tensor",
        ),
    ],
)
def test_what_the_base_has_not_is_an_error_that_names_both_and_nothing_is_published(
    root, change, error, says
):
    with pytest.raises(error, match=says):
        shardckpt.save(
            root / "2", {"model": change}, options=SaveOptions(base=root / "0"), skip="model/*"
        )
    with pytest.raises(errors.NotFoundError):
        shardckpt.open(root / "2")
    assert [*(root / "2").glob("*")] == []


def test_a_base_of_a_base_is_named_itself_and_the_one_between_is_needed_for_its_own_tensors_only(
    root,
):
    shardckpt.save(root / "2", model(1), options=SaveOptions(base=root / "1", skip="**"))
    checkpoint = shardckpt.open(root / "2")

    assert {name: Path(checkpoint.info(name).base).name for name in checkpoint.names()} == {
        "model/embed": "0",
        "model/w": "1",
        "lora": "1",
    }
    assert [Path(base).name for base in checkpoint.bases()] == ["0", "1"]
    assert checkpoint.record.totals["stored_bytes"] == 0
    shutil.rmtree(root / "1")
    assert np.array_equal(checkpoint.read("model/embed"), EMBED)


def test_a_tensor_that_is_tied_in_the_base_is_found_by_either_name(tmp_path):
    shardckpt.save(tmp_path / "0", {"embed": EMBED, "head": EMBED})
    tuned = {"embed": EMBED + 1, "head": EMBED.copy()}
    shardckpt.save(tmp_path / "1", tuned, options=SaveOptions(base=tmp_path / "0", skip="head"))
    checkpoint = shardckpt.open(tmp_path / "1")

    assert equal(shardckpt.restore(checkpoint), tuned)
    assert checkpoint.verify().ok
    group = zarr.open_group(checkpoint.zarr_store(), mode="r")
    assert np.array_equal(group["head"][...], EMBED)
    assert np.array_equal(group["embed"][...], EMBED + 1)


def test_a_layout_that_does_not_fit_a_skipped_tensor_is_refused(root):
    options = SaveOptions(
        base=root / "0", shardings={"model/embed": OpSharding.parse("{devices=[2]<=[2]}")}
    )
    with pytest.raises(errors.ShardingError, match=r"^'model/embed': "):
        shardckpt.save(root / "2", model(2), options=options, skip="model/embed")
    assert not (root / "2").exists()


# --- reading --------------------------------------------------------------------------------------


def test_all_ways_to_read_lead_to_the_base(root):
    checkpoint = shardckpt.open(root / "1")

    assert equal(shardckpt.restore(root / "1"), model(1))
    box = shardckpt.Box((10, 5), (20, 8))
    assert np.array_equal(checkpoint.read("model/embed", box), EMBED[10:20, 5:8])
    before = checkpoint.stats.bytes_read
    like = {"model": {"embed": torch.zeros(300, 40), "w": np.zeros((50, 40), np.float32)}}
    shardckpt.restore(checkpoint, like, only="model/**", strict=False)
    assert np.array_equal(like["model"]["embed"].numpy(), EMBED)
    assert checkpoint.stats.bytes_read - before > EMBED.nbytes
    assert shardckpt.restore(root / "1", only="lora").keys() == {"lora"}
    store = pickle.loads(pickle.dumps(checkpoint.zarr_store()))
    assert np.array_equal(zarr.open_group(store, mode="r")["model/embed"][...], EMBED)
    assert checkpoint.stock_spec("model/embed") == shardckpt.open(root / "0").stock_spec(
        "model/embed"
    )


def test_a_tree_that_is_moved_takes_its_bases_along_and_a_link_leads_back_to_them(root):
    (root / "elsewhere").mkdir()
    link = root / "elsewhere" / "latest"
    link.symlink_to(root / "1")
    assert equal(shardckpt.restore(link), model(1))
    link.unlink()

    run = root / "moved"
    run.mkdir()
    for step in ("0", "1"):
        (root / step).rename(run / step)
    assert equal(shardckpt.restore(run / "1"), model(1))
    assert (
        json.loads((run / "1" / "checkpoint.json").read_bytes())["record"]["bases"][0]["url"]
        == "../0"
    )


def test_a_base_from_elsewhere_is_named_by_its_whole_url_and_by_links_too_if_it_is_beside(
    root, tmp_path_factory
):
    other = tmp_path_factory.mktemp("other") / "a b"
    shardckpt.save(other, model(2), options=SaveOptions(base=root / "0", skip="model/embed"))
    assert shardckpt.open(other).record.structure.bases[0].url == (root / "0").as_uri()
    assert equal(shardckpt.restore(other), model(2))

    alias = tmp_path_factory.mktemp("links") / "run"
    alias.symlink_to(root)
    shardckpt.save(root / "2", model(2), options=SaveOptions(base=alias / "0", skip="model/embed"))
    assert shardckpt.open(root / "2").record.structure.bases[0].url == "../0"


@pytest.mark.parametrize("name", ["latest", "0"])
def test_a_base_beside_is_named_without_links_so_that_it_is_known_what_must_stay(root, name):
    (root / "latest").symlink_to("0")
    shardckpt.save(root / "2", model(2), options=SaveOptions(base=root / name), skip="model/embed")
    assert shardckpt.open(root / "2").record.structure.bases[0].url == "../0"


def test_a_checkpoint_is_not_its_own_base_by_any_other_name(root, tmp_path_factory):
    shardckpt.save(root / "2", model(2))
    links = [root / "latest", tmp_path_factory.mktemp("links") / "latest"]
    for link in links:
        link.symlink_to(root / "2")
        with pytest.raises(errors.OptionError, match="cannot be its own base"):
            shardckpt.save(
                link,
                model(),
                options=SaveOptions(base=root / "2", overwrite=True),
                skip="model/embed",
            )
    assert equal(shardckpt.restore(root / "2"), model(2))


def test_a_checkpoint_is_no_base_of_its_own_replacement_not_even_as_a_copy(root):
    shardckpt.save(root / "2", model(2))
    shutil.copytree(root / "2", root / "copy")
    with pytest.raises(errors.CommitError, match="but this save would replace that base"):
        shardckpt.save(
            root / "2",
            model(),
            options=SaveOptions(base=root / "copy", overwrite=True),
            skip="model/embed",
        )
    assert equal(shardckpt.restore(root / "2"), model(2))


def test_a_base_that_is_gone_is_named_before_anything_is_read(root):
    shutil.rmtree(root / "0")
    like = {
        "lora": np.full((40, 4), 7, np.float32),
        "model": {"embed": np.zeros((300, 40), np.float32)},
    }

    with pytest.raises(
        errors.MissingDataError,
        match=r"'model/embed': .*/1 stores it in its base .*/0 .*no checkpoint is there; put",
    ):
        shardckpt.restore(root / "1", like, strict=False)
    assert (like["lora"] == 7).all()
    assert equal(shardckpt.restore(root / "1", only="lora"), {"lora": model(1)["lora"]})
    report = shardckpt.open(root / "1").verify()
    assert [(damage.tensor, damage.file) for damage in report.damage] == [("model/embed", "../0")]


def test_a_base_that_is_deleted_while_it_is_read_is_named(root):
    checkpoint = shardckpt.open(root / "1")
    checkpoint.open_bases([checkpoint.tensor("model/embed")])
    shutil.rmtree(root / "0")

    with pytest.raises(errors.MissingDataError, match=r"stores it in its base .*/0"):
        checkpoint.read("model/embed")


def test_another_checkpoint_in_the_bases_place_is_never_read_for_it(root):
    shutil.rmtree(root / "0")
    shardckpt.save(root / "0", {"model": {"embed": EMBED * 2}})

    with pytest.raises(
        errors.MissingDataError,
        match=r"'model/embed': .*/1 stores it in its base .*/0 .*another checkpoint",
    ):
        shardckpt.restore(root / "1")
    with pytest.raises(errors.MissingDataError):
        shardckpt.open(root / "1").read("model/embed")
    assert not shardckpt.open(root / "1").verify().ok


def test_damage_in_the_base_is_found_by_verifying_what_needs_it(root):
    (file,) = (
        path for path in (root / "0").glob("*/hosts/*/*/d/*") if path.stat().st_size > EMBED.nbytes
    )
    data = bytearray(file.read_bytes())
    data[100] ^= 1
    file.write_bytes(data)

    (damage,) = shardckpt.open(root / "1").verify().damage
    assert damage.tensor == "model/embed"
    assert damage.file.startswith("../0/hosts/")
    with pytest.raises(errors.CorruptionError):
        shardckpt.restore(root / "1")


@pytest.mark.parametrize(
    "url",
    [
        "../",
        "../..",
        "../../0",
        "../a//b",
        "../%2e%2e/0",
        "0",
        "/etc",
        "http://host/0",
        "../0\n",
        "../%ff",
        1,
    ],
)
def test_a_base_is_beside_the_checkpoint_or_a_whole_url_of_a_storage(root, url):
    resealed(root / "1" / "checkpoint.json", lambda record: record["bases"][0].update(url=url))

    with pytest.raises(errors.FormatError):
        shardckpt.open(root / "1").read("model/embed")


@pytest.mark.parametrize("url", ["s3://somebody-elses/0", "gs://somebody-elses/0", "memory://x/0"])
def test_a_checkpoint_cannot_make_us_ask_another_kind_of_storage(root, url):
    resealed(root / "1" / "checkpoint.json", lambda record: record["bases"][0].update(url=url))

    with pytest.raises(errors.FormatError, match="another kind of storage"):
        shardckpt.restore(root / "1")


def test_what_a_base_does_not_hold_as_the_record_says_is_not_read(root):
    shardckpt.save(root / "2", model(2), options=SaveOptions(base=root / "1", skip="model/*"))
    for change in (
        {"shape": [40, 300], "chunks": [40, 300]},
        {"base_name": "model/w"},
        {"base": 1},
        {"dtype": "int32"},
    ):
        shutil.copytree(root / "2", root / "3")
        resealed(
            root / "3" / "checkpoint.json",
            lambda record, change=change: record["tensors"]["model/embed"].update(change),
        )
        with pytest.raises(
            errors.FormatError, match=r"'model/embed': .*but the base has no such tensor"
        ):
            shardckpt.restore(root / "3")
        shutil.rmtree(root / "3")
    resealed(
        root / "2" / "checkpoint.json",
        lambda record: record["tensors"]["model/embed"].update(base=2),
    )
    with pytest.raises(errors.FormatError, match="entry 2 of 2"):
        shardckpt.open(root / "2")


def test_a_reader_of_version_1_refuses_by_the_version_and_older_checkpoints_keep_theirs(root):
    assert (
        (root / "1" / "checkpoint.json")
        .read_bytes()
        .startswith(b'{"format":"shardckpt","version":[2,0]')
    )
    assert (
        (root / "0" / "checkpoint.json")
        .read_bytes()
        .startswith(b'{"format":"shardckpt","version":[1,0]')
    )
    path = root / "1" / "checkpoint.json"
    path.write_bytes(path.read_bytes().replace(b"[2,0]", b"[1,0]", 1))
    assert [damage.file for damage in shardckpt.open(root / "1").verify().damage] == [
        "checkpoint.json"
    ]


# --- publishing and deleting ----------------------------------------------------------------------


@pytest.mark.parametrize("what", ["deleted", "replaced"])
def test_a_base_that_goes_while_the_save_runs_is_noticed_before_it_is_published(root, what):
    def goes():
        if what == "replaced":
            shardckpt.save(root / "9", model(), options=SaveOptions(overwrite=True))
        else:
            shutil.rmtree(root / "9")

    shardckpt.save(root / "9", model())
    handle = Saver().begin(
        root / "2",
        model(2),
        SaveOptions(base=root / "9", skip="model/*"),
        progress=lambda _done, _all: goes(),
    )
    with pytest.raises(
        errors.CommitError,
        match=r"'model/.*': .*/2 stores it in its base .*/9.*Nothing was published",
    ):
        handle.wait()
    with pytest.raises(errors.NotFoundError):
        shardckpt.open(root / "2")
    # Its data is complete, and the base may come back.
    (left,) = collect(root / "2", grace=0)
    assert left.outcome == "kept"
    assert "base" in left.reason


def test_a_base_is_not_deleted_by_a_link_either(root):
    (root / "latest").symlink_to("0")
    with pytest.raises(
        errors.OptionError, match=r"/0 is the base of checkpoints beside it, .*: 1;"
    ):
        delete(root / "latest")
    assert equal(shardckpt.restore(root / "1"), model(1))


def test_a_base_is_not_deleted_before_what_names_it(root):
    shardckpt.save(root / "2", model(2), options=SaveOptions(base=root / "1", skip="model/embed"))
    with pytest.raises(
        errors.OptionError,
        match=r"/0 is the base of checkpoints beside it, which read tensors from it: 1, 2; so",
    ):
        delete(root / "0")
    delete(root / "1")
    assert equal(shardckpt.restore(root / "2"), model(2))
    delete(root / "2")
    delete(root / "0")
    with pytest.raises(errors.NotFoundError):
        shardckpt.open(root / "0")


# --- several processes ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def hosts():
    with Processes("skipping_hosts", "many_hosts", "committing_hosts") as processes:
        yield processes


@pytest.fixture
def job(hosts, tmp_path):
    assert hosts.run("many_hosts:save", 2, tmp_path / "0") == ["saved"] * 2
    return hosts


def test_all_processes_leave_the_same_in_the_base_without_a_word(job, tmp_path):
    options = {"base": str(tmp_path / "0"), "skip": ["large", "small"]}
    answers = job.run("save", 2, tmp_path / "1", [options, options], 5)

    assert [bases for _, bases in answers] == [[str(tmp_path / "0")]] * 2
    expected = {**job_state(5), "large": job_state()["large"], "small": job_state()["small"]}
    assert sum(nbytes for nbytes, _ in answers) == expected["medium"].nbytes
    assert equal(
        shardckpt.restore(tmp_path / "1"), {**expected, "nested": [{"lr": 0.1}, ("a", None)]}
    )
    assert shardckpt.open(tmp_path / "1").verify().damage == []
    assert len([*(tmp_path / "1").glob("*/contents/*")]) == 1  # both say the same


def test_the_checkpoints_of_one_job_are_told_apart_as_bases(job, tmp_path):
    attempts, _ = job.run("save_chain", 2, tmp_path)

    assert len(set(attempts)) == 3
    assert [base.url for base in shardckpt.open(tmp_path / "3").record.structure.bases] == [
        "../1",
        "../2",
    ]
    assert equal(
        shardckpt.restore(tmp_path / "3"), {**job_state(), "nested": [{"lr": 0.1}, ("a", None)]}
    )


def test_processes_that_skip_different_tensors_are_refused(job, tmp_path):
    options = {"base": str(tmp_path / "0"), "skip": ["large"]}
    answers = job.run("save", 2, tmp_path / "1", [options, {**options, "skip": ["medium"]}])

    assert [answer["error"] for answer in answers] == ["CommitError"] * 2
    assert "'large': its base is attempt" in answers[0]["message"]


def test_what_the_base_lacks_fails_on_all_processes(job, tmp_path):
    options = {"base": str(tmp_path / "0"), "skip": ["large"]}
    shardckpt.save(tmp_path / "0", {"other": 1}, options=SaveOptions(overwrite=True))
    answers = job.run("save", 2, tmp_path / "1", [options, options])

    assert {answer["error"] for answer in answers} <= {"NamesMismatchError", "CommitError"}
    assert answers[0]["error"] == "NamesMismatchError"


def test_a_save_whose_committer_died_is_committed_from_the_records_alone_unless_the_base_is_gone(
    job, tmp_path
):
    options = {"base": str(tmp_path / "0"), "skip": ["large", "small"]}
    killed, _ = job.run("committing_hosts:save_and_be_killed", 2, tmp_path / "1", options)
    assert killed == {"signal": 9}
    shutil.copytree(tmp_path / "1", tmp_path / "2")

    (outcome,) = shardckpt.commit(tmp_path / "1")
    assert outcome.state == "committed"
    assert np.array_equal(shardckpt.restore(tmp_path / "1")["large"], job_state()["large"])
    (tmp_path / "0").rename(tmp_path / "gone")
    (outcome,) = shardckpt.commit(tmp_path / "2")
    assert outcome.state == "refused"
    assert "its base" in outcome.reason
