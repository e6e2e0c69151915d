"""Plain torch tensors as leaves: fetched and filled through numpy views of their memory."""

import subprocess
import sys
import warnings
from itertools import permutations
from math import prod

import numpy as np
import pytest
import torch

import shardckpt
from shardckpt import frameworks
from shardckpt.errors import DtypeError, LeafError
from shardckpt.frameworks.base import Target, dtype_of
from shardckpt.frameworks.torch import array_of, tensor_of
from shardckpt.layout.dtypes import by_name
from shardckpt.state import alias_map
from shardckpt.state.flatten import flatten

F32 = by_name("float32")
DTYPES = (
    *(
        "bool",
        "uint8",
        "uint16",
        "uint32",
        "uint64",
        "int8",
        "int16",
        "int32",
        "int64",
        "float16",
        "float32",
        "float64",
    ),
    *(
        "complex64",
        "complex128",
        "bfloat16",
        "float8_e4m3fn",
        "float8_e5m2",
        "float8_e4m3fnuz",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
    ),
)


def random_bits(dtype, shape):
    itemsize = getattr(torch, dtype).itemsize
    raw = np.random.default_rng(3).integers(
        0, 2 if dtype == "bool" else 256, prod(shape) * itemsize, np.uint8
    )
    return raw, torch.frombuffer(bytearray(raw), dtype=getattr(torch, dtype)).reshape(shape)


def fetched(tensor):
    source = frameworks.source("w", tensor)
    (arrays,) = frameworks.fetch([source])
    assert len(arrays) == len(source.boxes)
    return source, arrays


def seen_in_many_ways(tensor):
    yield tensor
    yield torch.nn.Parameter(tensor)
    yield tensor.clone().requires_grad_()
    yield tensor.t()
    yield tensor[1:, ::2]
    yield tensor[:, None, :1]


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_is_fetched_bit_by_bit_without_a_copy(name):
    raw, tensor = random_bits(name, (4, 6))
    source, (elements,) = fetched(tensor)
    assert (source.dtype.name, elements.dtype, source.staged_bytes) == (
        name,
        by_name(name).numpy,
        0,
    )
    assert elements.tobytes() == raw.tobytes()
    assert elements.__array_interface__["data"][0] == tensor.data_ptr()


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_is_filled_bit_by_bit_where_it_is(name):
    raw, tensor = random_bits(name, (4, 6))
    _, expected = random_bits(name, (4, 6))
    tensor.view(torch.uint8).fill_(1)
    sink = frameworks.target("w", tensor, (4, 6), F32)
    sink.destinations[0][...] = raw.view(by_name(name).numpy).reshape(4, 6)
    assert sink.place(sink.destinations) is tensor
    assert torch.equal(tensor.view(torch.uint8), expected.view(torch.uint8))
    assert (sink.shape, sink.dtype.name) == ((4, 6), name)


@pytest.mark.parametrize("name", DTYPES)
def test_a_scalar_of_every_dtype_goes_there_and_back(name):
    raw, tensor = random_bits(name, ())
    source, (elements,) = fetched(tensor)
    assert (source.shape, elements.shape, elements.tobytes()) == ((), (), raw.tobytes())
    assert tensor_of(array_of(tensor, source.dtype), source.dtype).data_ptr() == tensor.data_ptr()


def test_parameters_gradients_and_strides_do_not_matter():
    for tensor in seen_in_many_ways(torch.arange(24.0).reshape(4, 6)):
        source, (elements,) = fetched(tensor)
        np.testing.assert_array_equal(elements, tensor.detach().numpy())
        assert np.shares_memory(elements, tensor.detach().numpy())
        assert (source.shape, source.layout) == (tuple(tensor.shape), None)
        sink = frameworks.target("w", tensor, tuple(tensor.shape), F32)
        sink.destinations[0][...] = -1
        assert sink.place(sink.destinations) is tensor
        assert bool((tensor == -1).all())


def test_filling_a_tensor_keeps_its_gradient_setting_and_tells_autograd():
    weight = torch.nn.Parameter(torch.ones(2))
    loss = (weight * weight).sum()
    sink = frameworks.target("w", weight, (2,), F32)
    sink.place([np.full(2, 3, np.float32)])
    assert (weight.requires_grad, weight.is_leaf, weight.tolist()) == (True, True, [3, 3])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_an_inference_tensor_is_filled_too():
    with torch.inference_mode():
        tensor = torch.zeros(2)
    frameworks.target("w", tensor, (2,), F32).place([np.ones(2, np.float32)])
    assert tensor.tolist() == [1, 1]


@pytest.mark.parametrize("shape", [(0,), (3, 0)])
def test_a_tensor_without_elements_has_no_boxes(shape):
    tensor = torch.zeros(shape)
    source, arrays = fetched(tensor)
    assert (source.shape, arrays, frameworks.identity(tensor)) == (shape, [], None)
    assert frameworks.target("w", tensor, shape, F32).place([]) is tensor


def test_conjugate_and_negative_views_are_fetched_as_what_they_say():
    tensor = torch.tensor([1 + 2j, 3 - 4j])
    for view in tensor.conj(), tensor.conj().imag:
        source, (elements,) = fetched(view)
        np.testing.assert_array_equal(elements, view.resolve_conj().resolve_neg().numpy())
        assert source.staged_bytes == elements.nbytes
        with pytest.raises(
            LeafError, match="'w': this tensor is a lazily conjugated or negated view"
        ):
            frameworks.target("w", view, (2,), F32)


def test_a_meta_tensor_becomes_a_new_tensor_on_the_cpu():
    for leaf in (
        torch.empty(2, 3, dtype=torch.bfloat16, device="meta"),
        torch.nn.Parameter(torch.empty(2, 3, device="meta")),
    ):
        sink = frameworks.target("w", leaf, (), F32)
        sink.destinations[0][...] = 2
        tensor = sink.place(sink.destinations)
        assert (type(tensor), tensor.device.type, tensor.dtype, tensor.requires_grad) == (
            torch.Tensor,
            "cpu",
            leaf.dtype,
            False,
        )
        assert tensor.tolist() == [[2] * 3] * 2


def test_a_meta_tensor_has_nothing_to_save():
    with pytest.raises(LeafError, match="'w': a meta tensor has no data"):
        frameworks.source("w", torch.empty(2, device="meta"))


def quantized():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)


def nested():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


class Unknown(torch.Tensor):
    """Computes its elements when it is asked for them, and does not say from what."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return super().__torch_dispatch__(func, types, args, kwargs or {})


class Named(torch.Tensor):
    """Elements, and what an instance has beside them."""


def named(**attributes):
    tensor = torch.arange(2.0).as_subclass(Named)
    vars(tensor).update(attributes)
    return tensor


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: torch.ones(2).to_sparse(), "sparse_coo cannot be stored"),
        (lambda: torch.ones(2, 2).to_sparse_csr(), "sparse_csr cannot be stored"),
        (quantized, "quantized tensors cannot be stored"),
        (nested, "nested tensors cannot be stored"),
        (lambda: torch.ones(2).as_subclass(Unknown), "Unknown computes its elements"),
        (torch.nn.parameter.UninitializedParameter, "no shape and no data yet"),
    ],
)
@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_kinds_of_tensors_that_cannot_be_stored_are_refused_by_name(make, words):
    leaf = make()
    assert frameworks.is_tensor(leaf)
    assert frameworks.identity(leaf) is None
    with pytest.raises(LeafError, match=f"'layer/w': .*{words}"):
        frameworks.source("layer/w", leaf)
    with pytest.raises(LeafError, match=f"'layer/w': .*{words}"):
        frameworks.target("layer/w", leaf, (2,), F32)


def test_a_subclass_without_operations_of_its_own_is_stored_as_its_elements_and_filled_in_place():
    leaf = named(note="x", order=(1, 2), loader=print)
    (box,) = frameworks.fetch([frameworks.source("w", leaf)])[0]
    assert box.tolist() == [0.0, 1.0]
    assert frameworks.identity(leaf) == frameworks.identity(leaf.as_subclass(torch.Tensor))
    sink = frameworks.target("w", leaf, (2,), F32)
    sink.destinations[0][...] = [5, 6]
    assert sink.place(sink.destinations) is leaf
    assert leaf.tolist() == [5.0, 6.0]
    new = frameworks.target("w", torch.empty(2, device="meta").as_subclass(Named), (2,), F32)
    assert type(new.place(new.destinations)) is Named


@pytest.mark.parametrize("more", [{"scale": torch.ones(1)}, {"state": object()}])
def test_a_subclass_with_more_than_its_elements_is_refused_by_the_attribute(more):
    with pytest.raises(
        LeafError,
        match=rf"'w': this .*Named has the attribute '{next(iter(more))}' beside its elements",
    ):
        frameworks.source("w", named(**more))


def freed(keep=0, view=lambda tensor: tensor):
    tensor = view(torch.arange(12.0).reshape(3, 4))
    tensor.untyped_storage().resize_(keep)
    return tensor


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (freed, "take 48 bytes of its storage, which has 0: its memory was freed"),
        (lambda: torch.nn.Parameter(freed()), "its memory was freed"),
        (lambda: freed(44), "take 48 bytes of its storage, which has 44"),
        (
            lambda: freed(44, lambda tensor: tensor[1:, 2:]),
            "take 48 bytes of its storage, which has 44",
        ),
        (lambda: freed(44, torch.t), "take 48 bytes of its storage, which has 44"),
        (lambda: torch._efficientzerotensor(3), "represents zeros without memory"),
    ],
)
def test_a_tensor_whose_memory_was_freed_is_refused_by_name(make, words):
    leaf = make()
    assert frameworks.identity(leaf) is None or "has 44" in words, (
        "two tensors without any memory are not tied"
    )
    with pytest.raises(LeafError, match=f"'layer/w': .*{words}"):
        frameworks.source("layer/w", leaf)
    with pytest.raises(LeafError, match=f"'layer/w': .*{words}"):
        frameworks.target("layer/w", leaf, tuple(leaf.shape), F32)


def test_a_tensor_within_what_is_left_of_its_storage_is_saved_and_filled():
    part = freed(32, lambda tensor: tensor[:2])
    assert fetched(part)[1][0].tolist() == part.tolist()
    frameworks.target("w", part, (2, 4), F32).destinations[0][...] = 5
    assert part.tolist() == [[5] * 4] * 2


def test_a_tensor_within_a_transform_of_torch_func_is_refused_by_name():
    with pytest.raises(LeafError, match="'w': this tensor has no memory of its own"):
        torch.vmap(lambda row: frameworks.source("w", row))(torch.ones(2, 3))
    with pytest.raises(LeafError, match=r"'w': this tensor is one of .*functionalize"):
        torch.func.functionalize(lambda row: frameworks.source("w", row))(torch.ones(2, 3))


@pytest.mark.parametrize("name", DTYPES)
def test_storages_can_be_freed_after_a_save_and_a_restore(name):
    _, tensor = random_bits(name, (4, 6))
    tensor = tensor.clone()  # of a buffer that torch did not allocate, no storage can be resized
    arrays = [*fetched(tensor)[1], *frameworks.target("w", tensor, (4, 6), F32).destinations]
    assert all(array.__array_interface__["data"][0] == tensor.data_ptr() for array in arrays)
    del arrays
    assert tensor.untyped_storage().resizable()
    tensor.untyped_storage().resize_(0)


def test_training_that_frees_storages_goes_on_after_saves_and_restores(tmp_path):
    weight = torch.nn.Parameter(torch.arange(12.0).reshape(3, 4))
    state = {"weight": weight, "step": shardckpt.PerProcess(torch.tensor(7))}
    shardckpt.save(tmp_path / "at once", state)
    shardckpt.save_async(tmp_path / "behind", state).wait()
    for saved in "at once", "behind":
        weight.data.untyped_storage().resize_(0)
        with pytest.raises(LeafError, match=r"'weight': .* its memory was freed"):
            shardckpt.save(tmp_path / "never", state)
        with pytest.raises(LeafError, match=r"'weight': .* its memory was freed"):
            shardckpt.restore(tmp_path / saved, state)
        weight.data.untyped_storage().resize_(48)
        shardckpt.restore(tmp_path / saved, state)
        assert weight.sum() == 66
    assert state["step"].value.untyped_storage().resizable()


def test_an_array_keeps_the_memory_that_it_shows():
    tensor = torch.full((1000,), 7.0)
    array = array_of(tensor, F32)[10:]
    del tensor
    assert (torch.zeros(1000) == 0).all()
    assert (array == 7).all()


@pytest.mark.parametrize("dtype", [torch.complex32, torch.float4_e2m1fn_x2])
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_dtypes_that_cannot_be_stored_are_refused_by_name(dtype):
    leaf = torch.empty(2, dtype=dtype)
    with pytest.raises(DtypeError, match=f"'w': {dtype} cannot be stored"):
        frameworks.source("w", leaf)


def test_a_tensor_whose_elements_share_memory_is_refused_by_name():
    expanded = torch.zeros(3, 1).expand(3, 4)
    assert fetched(expanded)[1][0].shape == (3, 4)
    with pytest.raises(LeafError, match="'w': elements of this tensor share memory"):
        frameworks.target("w", expanded, (3, 4), F32)


def test_identity_is_the_same_for_aliases_and_not_for_equal_elements():
    module = torch.nn.Linear(3, 3, bias=False)
    weight = module.weight
    same = [weight, weight.detach(), weight.data, module.state_dict()["weight"], weight[:]]
    other = [
        weight.t(),
        weight[1:],
        weight.detach().clone(),
        weight.detach().view(torch.int32),
        torch.zeros(3, 3, device="meta"),
    ]
    assert len({frameworks.identity(t) for t in same}) == 1
    assert len({frameworks.identity(t) for t in [weight, *other]}) == 1 + len(other)


def test_one_leaf_named_twice_is_one_place_and_two_leaves_are_two():
    tensor, meta = torch.zeros(2), torch.zeros(2, device="meta")

    def key(leaf):
        return frameworks.target("w", leaf, (2,), F32).tie_key

    assert key(tensor) == key(tensor)
    assert key(tensor) != key(tensor[:])
    assert key(meta) == key(torch.zeros(2, device="meta"))
    assert key(meta) != key(meta.double())


def test_a_target_takes_torch_dtypes():
    assert dtype_of(torch.float8_e4m3fn).name == "float8_e4m3fn"
    assert Target(dtype=torch.bfloat16) == Target(dtype="bfloat16")


def test_leaves_of_several_frameworks_are_fetched_in_their_order():
    leaves = {"a": torch.zeros(1), "b": np.ones(1), "c": torch.full((1,), 2.0)}
    fetched = frameworks.fetch(list(frameworks.sources(leaves).values()))
    assert [float(arrays[0][0]) for arrays in fetched] == [0, 1, 2]


def test_a_state_without_torch_imports_no_framework():
    code = (
        "import sys, numpy as np; from shardckpt import frameworks; s = frameworks.source('w', "
        "np.zeros(2)); frameworks.fetch([s]);frameworks.is_tensor(object()); assert not "
        "{'torch', 'torch_xla', 'jax'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.long
def test_a_state_of_plain_torch_tensors_imports_nothing_else_of_torch_s():
    code = (
        "import sys, torch; from shardckpt import frameworks; s = frameworks.source('w', "
        "torch.zeros(2)); frameworks.fetch([s]);assert not {'torch_xla', 'jax', "
        "'torch.distributed.tensor'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.long
def test_jax_imported_beside_torch_is_not_made_to_look_for_devices():
    code = (
        "import jax, torch, numpy as np; from jax._src import xla_bridge; from shardckpt import "
        "frameworks\n"
        "leaves = {'a': torch.ones(2), 'b': np.ones(2)}\n"
        "(a,), (b,) = frameworks.fetch(list(frameworks.sources(leaves).values()))\n"
        "assert (a == b).all() and not frameworks.is_tensor(object()) and not "
        "xla_bridge.backends_are_initialized()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_ties_are_the_same_whether_tensors_at_one_address_are_asked_for_first_or_all():
    w, weight = torch.arange(12.0), torch.nn.Parameter(torch.ones(3, 4))
    turned = torch.view_as_complex(torch.arange(8.0).reshape(4, 2)).conj()
    state = {
        "w": w,
        "same": w.data,
        "row": w[:4],
        "row again": w[:4],
        "matrix": w.reshape(3, 4),
        "array": array_of(w, F32),
        "empty": [torch.empty(0), torch.empty(0)],
        "inside": {"weight": weight, "detached": weight.detach(), "turned": weight.t()},
        "conjugated": (turned, turned, turned.conj()),
        "steps": [torch.tensor(1.0), torch.tensor(1.0)],
        "words": "text",
    }
    for leaf in (w, weight):
        assert frameworks.is_tensor(leaf)  # from then on its class is known
    asked = frameworks.is_tensor, frameworks.identity, frameworks.meaning
    slow = flatten(state, *asked, composite=frameworks.composite)
    quick = flatten(state, *asked, composite=frameworks.composite, addresses=frameworks.ADDRESSES)
    assert {torch.Tensor, torch.nn.Parameter} <= frameworks.ADDRESSES.keys()
    assert (quick.tree, [*quick.tensors]) == (
        slow.tree,
        [*slow.tensors],
    )
    assert all(quick.tensors[name] is slow.tensors[name] for name in slow.tensors)
    assert alias_map(slow.tree) == {
        "same": "w",
        "row again": "row",
        "array": "w",
        "inside/detached": "inside/weight",
        "conjugated/1": "conjugated/0",
    }
    backwards = dict(reversed(state.items()))
    slow, quick = (
        flatten(backwards, *asked, addresses=addresses)
        for addresses in (None, frameworks.ADDRESSES)
    )
    assert (quick.tree, [*quick.tensors]) == (
        slow.tree,
        [*slow.tensors],
    )

    class Own(torch.nn.Parameter):
        """Not among the known classes."""

    values = [
        w,
        w.data,
        array_of(w, F32),
        w.reshape(3, 4),
        Own(w),
        array_of(w, F32)[:4],
        weight,
        torch.nn.Parameter(w),
    ]
    for leaves in permutations(values, 3):
        for known in (frameworks.ADDRESSES, {torch.Tensor: frameworks.ADDRESSES[torch.Tensor]}):
            slow, quick = (
                flatten([*leaves], *asked, composite=frameworks.composite, addresses=addresses)
                for addresses in (None, known)
            )
            assert (quick.tree, [*quick.tensors]) == (
                slow.tree,
                [*slow.tensors],
            )


@pytest.mark.long
def test_tied_parameters_of_a_class_that_a_save_meets_for_the_first_time_are_restored(tmp_path):
    """A save before it has met another class."""
    code = (
        "import sys, torch, shardckpt; from torch.nn import Parameter\n"
        "shardckpt.save(sys.argv[1] + '/1', {'x': torch.ones(3)})\n"
        "p = Parameter(torch.ones(3)); state = {'emb': p, 'head': p}\n"
        "shardckpt.save(sys.argv[1] + '/2', state); shardckpt.restore(sys.argv[1] + '/2', state)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
