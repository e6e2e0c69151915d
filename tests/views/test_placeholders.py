"""Copies that a model makes of placeholders arrive as those of tensors would, and little else is
read."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import shardckpt
from shardckpt.errors import OptionError
from shardckpt.views.model_view import ModelView
from shardckpt.views.placeholders import Placeholder, Recorder, storage_addresses

SHAPE = (12, 8, 6)


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "c"
    rng = np.random.default_rng(0)
    state = {
        "w": torch.from_numpy(rng.standard_normal(SHAPE, np.float32)),
        "m": torch.from_numpy(rng.standard_normal((1024, 512), np.float32)).bfloat16(),
        "scalar": torch.tensor(3.5),
        "none": torch.zeros(0, 4),
    }
    shardckpt.save(path, state)
    return path, state


def recorder(url):
    made = Recorder(ModelView(url))
    return made, dict(made.placeholders())


VIEWS = {
    "narrow": lambda t, d, n: t.narrow(
        d, n % t.shape[d], 1 + (n // 3) % (t.shape[d] - n % t.shape[d])
    ),
    "chunk": lambda t, d, n: t.chunk(1 + n % 3, d)[-1],
    "split": lambda t, d, n: t.split(1 + n % t.shape[d], d)[0],
    "transpose": lambda t, d, n: t.transpose(d, n % t.dim()),
    "step": lambda t, d, n: t.movedim(d, 0)[n % t.shape[d] :: 1 + n % 3],
    "select": lambda t, d, n: t.select(d, n % t.shape[d]),
    "unsqueeze": lambda t, d, _: t.unsqueeze(d),
    "flatten": lambda t, d, _: t.flatten(d),
    "reshape": lambda t, d, n: t.reshape(
        *t.shape[:d], -1, *([2] if t.shape[d] % 2 == 0 and n % 2 else [1]), *t.shape[d + 1 :]
    ),
    "permute": lambda t, d, _: t.permute(*range(d, t.dim()), *range(d)),
    "expand": lambda t, _d, n: t.expand(1 + n % 3, *t.shape),
    "ellipsis": lambda t, _d, n: t[..., n % t.shape[-1] :],
}


@settings(deadline=None, max_examples=400)
@given(
    st.lists(
        st.tuples(st.sampled_from([*VIEWS]), st.integers(0, 2), st.integers(0, 50)), max_size=5
    ),
    st.sampled_from(["same", "double", "strided"]),
)
def test_any_chain_of_views_copies_what_it_would_copy_of_the_tensor(url, steps, into):
    place, state = url
    recorded, placeholders = recorder(place)
    real, stand_in = state["w"], placeholders["w"]
    for name, d, n in steps:
        if real.dim() and real.numel() and real.dim() < 6:
            real, stand_in = (VIEWS[name](t, d % real.dim(), n) for t in (real, stand_in))
    assert real.shape == stand_in.shape
    if into == "strided" and real.dim() > 1:
        target = torch.zeros(real.shape[::-1]).permute(*range(real.dim())[::-1])
    else:
        target = torch.zeros(real.shape, dtype=torch.float64 if into == "double" else torch.float32)
    target.copy_(stand_in)
    if isinstance(stand_in, Placeholder):
        assert not target.any()
    recorded.fill()
    assert torch.equal(target, real.to(target.dtype))


def test_fused_parameters_of_one_rank_read_hardly_more_than_they_keep(url):
    place, state = url
    view = ModelView(place)
    recorded = Recorder(view)
    m = dict(recorded.placeholders())["m"]
    fused, rows, transposed = (
        torch.zeros(512, 512, dtype=torch.bfloat16),
        torch.zeros(256, 512),
        torch.zeros(512, 128, dtype=torch.bfloat16),
    )
    fused[:256].copy_(m.narrow(0, 256, 256))
    fused.narrow(0, 256, 256).copy_(m[768:])
    rows.copy_(m[:256])  # converted
    transposed.copy_(m.t()[:, 512:640])
    assert not fused.any()
    recorded.fill()
    whole = state["m"]
    assert torch.equal(fused, torch.cat([whole[256:512], whole[768:]]))
    assert torch.equal(rows, whole[:256].float())
    assert torch.equal(transposed, whole.t()[:, 512:640])
    assert not recorded.read_at_once
    kept = 2 * (fused.numel() + rows.numel() + transposed.numel())
    assert view.checkpoint.stats.bytes_read <= 1.05 * kept


def test_an_operation_on_elements_reads_them_and_is_counted(url):
    place, state = url
    recorded, placeholders = recorder(place)
    assert torch.equal(placeholders["w"][2:4] * 2, state["w"][2:4] * 2)
    assert float(placeholders["scalar"]) == 3.5
    assert torch.equal(
        torch.cat([placeholders["m"][:2], placeholders["m"][4:6]]),
        torch.cat([state["m"][:2], state["m"][4:6]]),
    )
    assert sum(recorded.read_at_once.values()) == 4
    assert placeholders["none"].sum() == 0
    target = torch.zeros(0, 4)
    target.copy_(placeholders["none"])
    recorded.fill()


def test_of_two_copies_to_one_place_the_later_stays(url):
    place, state = url
    recorded, placeholders = recorder(place)
    target = torch.zeros(8, 6)
    for i in (3, 7, 5):
        target.copy_(placeholders["w"][i])
    target[2:4].copy_(placeholders["w"][0, 2:4])
    recorded.fill()
    assert torch.equal(target[:2], state["w"][5, :2])
    assert torch.equal(target[2:4], state["w"][0, 2:4])


def test_a_parameter_is_filled_as_a_module_loads_it(url):
    place, state = url
    recorded, placeholders = recorder(place)
    module = torch.nn.Linear(512, 1024, bias=False, dtype=torch.bfloat16)
    module.weight.data.copy_(placeholders["m"])
    other = torch.nn.Linear(512, 1024, bias=False, dtype=torch.bfloat16)
    with torch.no_grad():
        other.load_state_dict({"weight": placeholders["m"]})
    recorded.fill()
    assert torch.equal(module.weight, state["m"])
    assert torch.equal(other.weight, state["m"])


def test_what_a_model_does_with_a_parameter_after_a_copy_sees_the_copy(url):
    place, state = url
    recorded = Recorder(ModelView(place))
    one, other, norm = torch.zeros(1024, 512), torch.zeros(512, 512), torch.zeros(())

    def load_weights(weights):
        placeholders = dict(weights)
        one.data.copy_(placeholders["m"])
        other.copy_(one[:512])  # reads what was copied
        one.data[:2].add_(1)  # changes it
        one[4:6].copy_(torch.ones(2, 512))  # replaces it
        one[4].copy_(placeholders["m"][9])
        norm.copy_(one.norm())
        return {"one"}

    assert recorded.run(load_weights) == {"one"}
    whole = state["m"].float()
    assert torch.equal(other, whole[:512])
    whole[:2] += 1
    whole[5] = 1
    whole[4] = state["m"][9]
    assert torch.equal(one, whole)
    assert norm == whole.norm()
    assert not recorded.read_at_once


@pytest.mark.parametrize(
    "change",
    [lambda t: t.add_(1), lambda t: t[1:3].zero_(), lambda t: t.copy_(torch.ones(1024, 512))],
)
def test_a_model_that_changes_what_it_is_given_gets_tensors(url, change, caplog):
    place, state = url
    recorded = Recorder(ModelView(place))
    into = torch.zeros(1024, 512, dtype=torch.bfloat16)

    def load_weights(weights):
        for name, tensor in weights:
            if name == "m":
                change(tensor)
                into.copy_(tensor)

    recorded.run(load_weights)
    change(expected := state["m"].clone())
    assert torch.equal(into, expected)
    assert "changes a tensor in place" in caplog.text
    assert sum(recorded.read_at_once.values()) == 4
    assert recorded.changes_tensors
    again = Recorder(ModelView(place))
    again.run(lambda weights: load_weights((name, one.clone()) for name, one in weights))
    assert torch.equal(into, expected)
    assert not again.changes_tensors


def test_a_fused_parameter_that_lacks_a_part_is_named(url):
    place, _ = url
    recorded = Recorder(ModelView(place))
    module = torch.nn.ParameterDict(
        {
            "full": torch.zeros(6, 8),
            "part": torch.zeros(16, 6),
            "padded": torch.zeros(9, 6),
            "none": torch.zeros(3),
        }
    )

    def load_weights(weights):
        w = dict(weights)["w"]
        module["full"].data.copy_(w[0].t())
        module["part"].data.narrow(0, 8, 8).copy_(w[1])
        module["padded"].data[:8].copy_(w[2])
        module["padded"].data[8:].fill_(0)

    before = storage_addresses(module.named_parameters())
    recorded.run(load_weights)
    assert recorded.filled_in_part(module.named_parameters()) == ["part"]
    assert recorded.unwritten(module.named_parameters(), before) == ["none"]
    module["none"].data = torch.ones(3)
    assert not recorded.unwritten(module.named_parameters(), before)


def test_what_a_program_does_to_tensors_without_an_operation_changes_no_copy(url):
    place, state = url
    recorded = Recorder(ModelView(place))
    q, bits, late, other = (
        torch.zeros(8, 6),
        torch.zeros(1024, 512, dtype=torch.int16),
        torch.zeros(8, 6),
        torch.zeros(8, 6),
    )
    memory = q.data

    def load_weights(weights):
        placeholders = dict(weights)
        q.data.copy_(placeholders["w"][0])
        q.data = torch.zeros(8, 6)
        bits.copy_(placeholders["m"].view(torch.int16))
        thread = threading.Thread(target=lambda: other.copy_(placeholders["w"][1]).mul_(2))
        thread.start()
        thread.join()
        with pytest.raises(RuntimeError, match="must match"):
            torch.zeros(5).copy_(placeholders["w"])
        return placeholders

    placeholders = recorded.run(load_weights)
    late.copy_(placeholders["w"][3])
    assert torch.equal(memory, state["w"][0])
    assert torch.equal(bits, state["m"].view(torch.int16))
    assert torch.equal(other, state["w"][1] * 2)
    assert torch.equal(late, state["w"][3])


def test_copies_in_several_threads_stay_in_their_order(url):
    place, state = url
    recorded = Recorder(ModelView(place))
    one, other = torch.zeros(8, 6), torch.zeros(8, 6)

    def load_weights(weights):
        w = dict(weights)["w"]
        one.copy_(w[0])
        thread = threading.Thread(target=lambda: other.copy_(one[2].copy_(w[1, 2])))
        thread.start()
        thread.join()
        other.copy_(w[3])
        thread = threading.Thread(target=lambda: one[4].copy_(other[4]))
        thread.start()
        thread.join()

    before = storage_addresses([("one", one)])
    recorded.run(load_weights)
    assert torch.equal(one[:2], state["w"][0, :2])
    assert torch.equal(one[2], state["w"][1, 2])
    assert torch.equal(one[4], state["w"][3, 4])
    assert torch.equal(other, state["w"][3])
    assert not recorded.unwritten([("one", one)], before)


def test_a_copy_in_another_thread_waits_for_those_noted_before(url):
    place, state = url
    target, threads, is_filling = torch.zeros(8, 6, dtype=torch.float64), [], threading.Event()

    def wait(*_):
        if not is_filling.is_set():
            is_filling.set()
            threads[0].join(0.5)

    def load_weights(weights):
        w = dict(weights)["w"]
        target.copy_(w[0])

        def copy():
            is_filling.wait()
            target.copy_(w[1])

        threads.append(threading.Thread(target=copy))
        threads[0].start()

    Recorder(ModelView(place), wait).run(load_weights)
    threads[0].join()
    assert torch.equal(target, state["w"][1].double())


def test_a_parameter_that_is_a_placeholder_still_is_named(url):
    place, _ = url
    recorded = Recorder(ModelView(place))
    module = torch.nn.Module()
    recorded.run(
        lambda weights: module.register_parameter(
            "kept", torch.nn.Parameter(dict(weights)["w"], requires_grad=False)
        )
    )
    assert recorded.filled_in_part(module.named_parameters()) == ["kept"]
    with pytest.raises(TypeError, match="has no memory"):
        torch.from_dlpack(dict(Recorder(ModelView(place)).placeholders())["w"])


def test_a_parameter_that_is_given_a_placeholder_as_its_data_is_named_or_filled(url):
    place, state = url
    module = torch.nn.Linear(512, 1024, bias=False)

    def give(weights):
        module.weight.data = dict(weights)["m"]

    def use(weights):
        give(weights)
        module.weight.data = module.weight.data * 2

    before = storage_addresses(module.named_parameters())
    recorded = Recorder(ModelView(place))
    recorded.run(give)
    assert recorded.filled_in_part(module.named_parameters()) == ["weight"]
    assert not recorded.unwritten(module.named_parameters(), before)
    Recorder(ModelView(place)).run(use)
    assert torch.equal(module.weight, state["m"] * 2)


@pytest.mark.parametrize("part", [lambda t: t[500:], lambda t: t])
def test_a_view_inside_of_a_placeholder_as_data_is_named_or_filled(url, part):
    place, state = url
    module = torch.nn.Linear(512, 1024, bias=False)
    sums = []

    def give(weights):
        module.weight.data = part(dict(weights)["m"])

    def use(weights):
        give(weights)
        sums.append(module.weight[10:].sum())

    recorded = Recorder(ModelView(place))
    recorded.run(give)
    assert recorded.filled_in_part(module.named_parameters()) == ["weight"]
    Recorder(ModelView(place)).run(use)
    assert sums == [part(state["m"])[10:].sum()]


def test_a_placeholder_that_is_kept_for_the_second_call_is_refused(url):
    place, _ = url
    module, kept = torch.nn.Linear(512, 1024, bias=False), {}

    def give(weights):
        m = dict(weights)["m"]
        module.weight.data.copy_(m)
        module.weight.data = m
        module.weight.data.add_(1)

    def keep(weights):
        kept.setdefault("m", dict(weights)["m"]).add_(1)

    for load, named in (give, r"aten.copy_ after `data =` of \(1024, 512\)"), (keep, "aten.add_"):
        with pytest.raises(OptionError, match=f"{named} changes a placeholder .* from its first"):
            Recorder(ModelView(place)).run(load)


def test_a_rehearsal_on_the_meta_device_notes_the_boxes_and_reads_nothing(url):
    place, _ = url
    view = ModelView(place)
    recorded = Recorder(view)
    full, half, lacking = (
        torch.empty(shape, device="meta") for shape in [SHAPE, (6, *SHAPE[1:]), SHAPE]
    )

    def load(tensors):
        w = dict(tensors)["w"]
        full.copy_(w)
        half.copy_(w[6:])
        lacking[:4].copy_(w[:4])

    before = view.checkpoint.stats.bytes_read
    recorded.run(load)
    (number,) = {number for number, _ in recorded.boxes}
    assert view.arrays()[number].name == "w"
    assert {(box.start[0], box.stop[0]) for _, box in recorded.boxes} == {(0, 12), (6, 12), (0, 4)}
    assert view.checkpoint.stats.bytes_read == before
    assert recorded.filled_in_part([("full", full), ("half", half), ("lacking", lacking)]) == [
        "lacking"
    ]


def test_copies_that_are_made_at_once_are_there_for_what_torch_does_not_dispatch(url):
    place, state = url
    seen, target = [], torch.zeros(SHAPE)

    def load(tensors):
        target.copy_(dict(tensors)["w"])
        seen.append(target.numpy().copy())

    Recorder(ModelView(place), copy_at_once=True).run(load)
    assert (seen[0] == state["w"].numpy()).all()
