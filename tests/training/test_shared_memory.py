"""States whose tensors share memory or cannot be written, in objects of a training: what saves,
resumes into itself."""

from __future__ import annotations

import logging
import tracemalloc

import numpy as np
import pytest
import torch
from hooked import hooked
from torch import nn

import shardckpt
from shardckpt.errors import LeafError, StructureMismatchError


def state_of(**objects):
    return shardckpt.train_state(**objects, rng=False)


class Viewing(nn.Module):
    """Tensors over one memory of 40 elements."""

    def __init__(self, kind):
        super().__init__()
        flat = torch.randn(40)
        wide = flat.view(8, 5)
        if kind == "disjoint":
            self.a, self.b = nn.Parameter(flat[:20].view(4, 5)), nn.Parameter(flat[20:].view(4, 5))
        elif kind == "interleaved":
            self.a, self.b = nn.Parameter(wide[::2]), nn.Parameter(wide[1::2])
        elif kind == "overlapping in part":
            self.a, self.b = nn.Parameter(flat[:30]), nn.Parameter(flat[10:])
        elif kind == "fused and its parts":
            self.q, self.k = nn.Parameter(wide[:4]), nn.Parameter(wide[4:])
            self.qkv = nn.Parameter(wide)
        else:
            self.w = nn.Parameter(wide)
            views = {
                "a part": self.w.detach()[0],
                "transposed": self.w.detach().T,
                "expanded": flat[:1].expand(4),
                "windows": flat.unfold(0, 8, 4),
                "as bytes": self.w.detach().view(torch.uint8),
            }
            self.register_buffer("view", views[kind])


VIEWS = [
    *("disjoint", "interleaved", "overlapping in part", "fused and its parts"),
    *("a part", "transposed", "expanded", "windows", "as bytes"),
]


@pytest.mark.parametrize("kind", VIEWS)
def test_a_module_with_views_of_its_own_tensors_resumes_into_itself_and_into_another(
    tmp_path, kind
):
    model = Viewing(kind)
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    addresses = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    shardckpt.save(tmp_path / "c", state_of(model=model))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    for into in (model, Viewing(kind)):
        shardckpt.restore(tmp_path / "c", state_of(model=into))
        assert all(
            torch.equal(expected[name], tensor) for name, tensor in into.state_dict().items()
        )
    assert {name: tensor.data_ptr() for name, tensor in model.state_dict().items()} == addresses


def test_a_view_alone_is_restored_where_it_is(tmp_path):
    model = Viewing("transposed")
    expected = model.w.detach().clone()
    shardckpt.save(tmp_path / "c", state_of(model=model))
    with torch.no_grad():
        model.w.zero_()
    shardckpt.restore(tmp_path / "c", state_of(model=model), only="model/view")
    assert torch.equal(model.w, expected)


@pytest.mark.parametrize(
    "kind", ["transposed", "expanded", "overlapping in part", "fused and its parts"]
)
def test_values_that_one_memory_cannot_hold_are_refused(tmp_path, kind):
    model = Viewing(kind)
    apart = {
        name: torch.randn_like(tensor.contiguous()) for name, tensor in model.state_dict().items()
    }
    shardckpt.save(tmp_path / "c", {"model": apart})
    with pytest.raises(
        StructureMismatchError,
        match=r"'model': other tensors of the module share memory with .+, and the checkpoint has",
    ):
        shardckpt.restore(tmp_path / "c", state_of(model=model))


def tied(*names, seed=0, device="cpu"):
    """Layers with a weight each, of which those of `names` share the first one's."""
    torch.manual_seed(seed)
    with torch.device(device):
        layers = nn.ModuleDict({name: nn.Linear(4, 4, bias=False) for name in "abc"})
    for name in names[1:]:
        layers[name].weight = layers[names[0]].weight
    return layers


class Buffers(nn.Module):
    """Two buffers, which are one if they are `tied`."""

    def __init__(self, tied, device="cpu"):
        super().__init__()
        self.register_buffer("x", torch.randn(3, device=device))
        self.register_buffer("y", self.x if tied else torch.randn(3, device=device))


class Array:
    """An object over an array, which it fills when it loads its state, or replaces."""

    def __init__(self, array, fills=True):
        self.array, self.fills = array, fills

    def state_dict(self):
        return {"array": self.array}

    def load_state_dict(self, state):
        if self.fills:
            self.array[...] = state["array"]
        else:
            self.array = state["array"]


def sharing(kind, shared):
    """Objects with two names for one memory if it is `shared`."""
    if kind == "names of a module":
        return {"model": tied("a", "b") if shared else tied()}
    if kind == "three names":
        return {"model": tied("a", "b", "c") if shared else tied("a", "b")}
    if kind == "buffers":
        return {"model": Buffers(tied=shared)}
    if kind == "parameters on meta":
        return {"model": tied("a", "b", device="meta") if shared else tied()}
    if kind == "buffers on meta":
        return {"model": Buffers(True, "meta") if shared else Buffers(False)}
    if kind == "objects":
        array = np.zeros(4)
        return {
            "one": Array(array if shared else np.zeros(4)),
            "other": Array(array if shared else np.ones(4)),
        }
    model, other = tied(), tied(seed=1)
    if shared and kind == "two modules":
        other["b"].weight = model["b"].weight
    elif shared:
        other["b"].weight = nn.Parameter(model["b"].weight.detach()[:])
    return {"model": model, "teacher": other}


KINDS = [
    *("names of a module", "three names", "buffers", "parameters on meta", "buffers on meta"),
    *("objects", "two modules", "a view in another module"),
]


@pytest.mark.parametrize("options", [{}, {"strict": False}, {"only": "*/**"}])
@pytest.mark.parametrize("kind", KINDS)
def test_different_values_for_one_memory_are_refused_whatever_names_it_has(tmp_path, kind, options):
    shardckpt.save(tmp_path / "c", state_of(**sharing(kind, shared=False)))
    with pytest.raises(StructureMismatchError, match=r"share memory with .* different values for"):
        shardckpt.restore(tmp_path / "c", state_of(**sharing(kind, shared=True)), **options)


@pytest.mark.parametrize("kind", KINDS)
def test_one_value_under_several_names_is_restored_into_one_memory_and_into_several(tmp_path, kind):
    saved = sharing(kind.replace(" on meta", "").replace("parameters", "names of a module"), True)
    shardckpt.save(tmp_path / "c", state_of(**saved))
    for shared in (True, False):
        restored = sharing(kind, shared)
        shardckpt.restore(tmp_path / "c", state_of(**restored))
        for name, one in saved.items():
            for key, value in one.state_dict().items():
                assert np.array_equal(value, restored[name].state_dict()[key])


def test_equal_values_under_several_names_are_restored_into_one_memory(tmp_path):
    """They were stored twice."""
    for kind in KINDS:
        apart = sharing(kind, shared=False)
        for one in apart.values():
            for value in one.state_dict().values():
                value[...] = 1
        shardckpt.save(tmp_path / kind, state_of(**apart))
        restored = sharing(kind, shared=True)
        shardckpt.restore(tmp_path / kind, state_of(**restored))
        for one in restored.values():
            assert all(bool((value == 1).all()) for value in one.state_dict().values())


def test_objects_that_take_other_arrays_may_share_one_before(tmp_path):
    shardckpt.save(
        tmp_path / "c", state_of(one=Array(np.zeros(4), False), other=Array(np.ones(4), False))
    )
    array = np.full(4, 7.0)
    one, other = Array(array, False), Array(array, False)
    shardckpt.restore(tmp_path / "c", state_of(one=one, other=other))
    assert one.array.tolist() == [0.0] * 4
    assert other.array.tolist() == [1.0] * 4


def test_a_module_of_inference_mode_is_restored(tmp_path):
    with torch.inference_mode():
        model, other = nn.Linear(3, 3), nn.Linear(3, 3)
    shardckpt.save(tmp_path / "c", state_of(model=model))
    shardckpt.restore(tmp_path / "c", state_of(model=other))
    assert torch.equal(model.weight, other.weight)


def test_a_module_of_inference_mode_with_hooks_is_restored(tmp_path):
    with torch.inference_mode():
        model, other = hooked("Fused", loads=True), hooked("Fused", loads=True, seed=1)
    shardckpt.save(tmp_path / "c", state_of(model=model))
    shardckpt.restore(tmp_path / "c", state_of(model=other))
    assert all(map(torch.equal, model.parameters(), other.parameters()))


def test_arrays_that_cannot_be_written_come_back_as_new_ones(tmp_path):
    class Constant:
        def __init__(self, value):
            self.value = value

        def state_dict(self):
            return {
                "row": np.broadcast_to(np.float32(self.value), (4,)),
                "tensor": torch.full((1,), self.value).expand(3),
            }

        def load_state_dict(self, state):
            self.value = float(state["row"][0]) + float(state["tensor"][2])

    shardckpt.save(
        tmp_path / "c", state_of(ema=Constant(2.0), table=np.broadcast_to(np.int64(7), (2, 2)))
    )
    fresh = state_of(ema=Constant(0.0), table=np.broadcast_to(np.int64(0), (2, 2)))
    ema = fresh._objects["ema"]
    shardckpt.restore(tmp_path / "c", fresh)
    assert ema.value == 4.0
    assert isinstance(fresh.values["table"], np.ndarray)
    assert fresh.values["table"].tolist() == [[7, 7], [7, 7]]


class Holder:
    """An object that holds tensors, and takes others in their place."""

    def __init__(self, **tensors):
        self.tensors = tensors

    def state_dict(self):
        return self.tensors

    def load_state_dict(self, state):
        self.tensors = dict(state)


def conjugate(value):
    """Views with a pending conjugation, and a negation, of a tensor of a complex value."""
    view = torch.full((4,), value).conj()
    return {"conj": view, "neg": view.imag}


@pytest.mark.parametrize("beside", [False, True])
def test_views_with_a_pending_conjugation_or_negation_are_restored(tmp_path, beside):
    """In an object, and in a module, which may have the tensor itself, too."""

    def made(value):
        module = nn.Module()
        for name, view in conjugate(value).items():
            module.register_buffer(name, view)
        if beside:
            module.register_buffer("itself", module.conj.conj())
        return {"module": module, "object": Holder(**conjugate(value))}

    shardckpt.save(tmp_path / "c", state_of(**made(1 + 2j)))
    restored = made(3 + 4j)
    shardckpt.restore(tmp_path / "c", state_of(**restored))
    for one in (restored["module"].state_dict(), restored["object"].tensors):
        assert one["conj"].tolist() == [1 - 2j] * 4
        assert one["neg"].tolist() == [-2.0] * 4


def growth(action):
    """The most bytes that numpy and Python allocate beside what there is, while an action runs."""
    tracemalloc.start()
    try:
        action()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_large_array_that_cannot_be_written_is_read_once_and_not_copied(tmp_path):
    array = np.ones(16 << 20, np.uint8)
    shardckpt.save(tmp_path / "c", state_of(object=Holder(array=array)))
    array = np.zeros_like(array)
    array.flags.writeable = False
    state = state_of(object=Holder(array=array))
    assert growth(lambda: shardckpt.restore(tmp_path / "c", state)) < 1.5 * array.nbytes


@pytest.mark.parametrize("step", [1, 2])
def test_arrays_that_reach_beyond_a_large_one_take_no_copies_of_it(tmp_path, step):
    """Contiguous, and with gaps."""

    def made(value):
        flat = np.full(step * (8 << 20) + 200, value, np.uint8)
        ends = {f"end{i}": flat[i - 400 :: step] for i in range(20)}
        return flat[:-200:step], Holder(large=flat[:-200:step], **ends)

    large, saved = made(1)
    shardckpt.save(tmp_path / "c", state_of(object=saved))
    _, restored = made(0)
    state = state_of(object=restored)
    assert growth(lambda: shardckpt.restore(tmp_path / "c", state)) < large.nbytes / 2
    assert all((array == 1).all() for array in restored.tensors.values())


def test_an_array_and_a_tensor_over_one_memory_are_stored_once_and_restored_together(tmp_path):
    def made(value):
        array = np.full((4, 4), value, np.float32)
        return {"a": array, "t": torch.from_numpy(array), "rows": torch.from_numpy(array)[1:]}

    saved, fresh = made(3), made(0)
    shardckpt.save(tmp_path / "c", state_of(**saved))
    assert shardckpt.open(tmp_path / "c").info("a").tied_names == ("t",)
    state = state_of(**fresh)
    shardckpt.restore(tmp_path / "c", state)
    assert state.values["a"] is fresh["a"]
    assert state.values["t"] is fresh["t"]
    assert state.values["rows"].tolist() == saved["rows"].tolist()
    assert (fresh["a"] == 3).all()
    plain = made(0)
    del plain["rows"]
    shardckpt.restore(tmp_path / "c", plain, only=["a", "t"])
    assert (plain["t"] == 3).all()


def test_a_plain_state_keeps_its_rule_for_arrays_that_cannot_be_written(tmp_path):
    state = {"a": np.broadcast_to(np.float32(1), (4,))}
    shardckpt.save(tmp_path / "c", state)
    with pytest.raises(LeafError, match="read-only"):
        shardckpt.restore(tmp_path / "c", state)


def test_tensors_that_a_module_does_not_store_are_told_at_the_first_save(tmp_path, caplog):
    model = hooked("Dropped", loads=True)
    with caplog.at_level(logging.WARNING, "shardckpt"):
        for step in range(2):
            shardckpt.save(tmp_path / str(step), state_of(model=model))
    messages = [
        record.getMessage() for record in caplog.records if "leaves out" in record.getMessage()
    ]
    assert [text.partition(",")[0] for text in messages] == [
        "'model': state_dict() leaves out 0.k.weight"
    ]
