"""Owner of each device, from the values of all processes."""

import numpy as np
import pytest

from shardckpt import Coordinator
from shardckpt.errors import OptionError
from shardckpt.frameworks.coordination.devices import given_devices, owners


def owned(given, local):
    return {
        name: dict(zip(o.device_ids.tolist(), o.processes.tolist(), strict=True))
        for name, o in owners(given, local).items()
    }


def test_ids_that_differ_between_all_processes_are_the_jobs():
    local = [{"jax": [0, 1]}, {"jax": [2048, 2049]}]
    assert owned([{}, {}], local) == {"jax": {0: 0, 1: 0, 2048: 1, 2049: 1}}


def test_ids_that_two_processes_found_alike_are_private():
    local = [{"jax": [0, 1], "torch_xla": [0]}, {"jax": [1, 2], "torch_xla": [1]}]
    assert owned([{}, {}], local) == {"torch_xla": {0: 0, 1: 1}}


def test_devices_that_not_all_processes_have_found_are_private():
    assert owned([{}, {}], [{"jax": [0, 1]}, {}]) == {}


def test_what_a_process_was_told_goes_before_what_it_found():
    local = [{"torch_xla": list(range(8))}] * 2
    given = [{"torch_xla": [0, 1, 6]}, {"torch_xla": [3, 7]}]
    assert owned(given, local) == {"torch_xla": {0: 0, 1: 0, 3: 1, 6: 0, 7: 1}}


def test_a_process_may_be_told_that_it_owns_nothing():
    assert owned([{"jax": []}, {"jax": [5]}], [{"jax": [5]}, {"jax": [5]}]) == {"jax": {5: 1}}


@pytest.mark.parametrize("second_told", [{"torch_xla": [2, 1]}, {}])
def test_a_device_of_two_processes_that_were_told_is_an_error_with_both_in_it(second_told):
    local = [{"torch_xla": [0, 1, 2]}] * 3
    given = [{"torch_xla": [3]}, {"torch_xla": [1]}, second_told]
    with pytest.raises(
        OptionError, match="torch_xla device 1 is owned by process 1 and by process 2"
    ):
        owners(given, local)


def test_what_is_told_comes_in_order_and_once():
    assert given_devices({"jax": (i for i in (3, np.int64(1), 3))}) == {"jax": [1, 3]}
    assert given_devices(None) == {}


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        ({"tensorflow": [0]}, "names the framework 'tensorflow'"),
        ({"jax": [0, -1]}, "gives -1 for jax"),
        ({"jax": [True]}, "gives True"),
        ({"torch_xla": ["xla:0"]}, "gives 'xla:0' for torch_xla"),
        ({"jax": 3}, "gives 3 for jax; give a list of device ids"),
        ({"jax": np.array(3)}, r"gives array\(3\) for jax; give a list of device ids"),
        ([0, 1], r"devices=\[0, 1\]: give a dict of framework → device ids"),
        ([], r"devices=\[\]: give a dict"),
        (np.array([0, 1]), r"devices=array\(\[0, 1\]\): give a dict"),
    ],
)
def test_what_is_no_device_is_refused(devices, message):
    with pytest.raises(OptionError, match=message):
        given_devices(devices)
    with pytest.raises(OptionError, match=message):
        Coordinator.current(devices=devices)
