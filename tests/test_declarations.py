"""Options are declared once: public signatures, flags and parameters of the service agree with the
declarations."""

from dataclasses import fields
from inspect import Parameter, signature

import pytest

import shardckpt
from shardckpt.convert.options import (
    AnyExportOptions,
    ImportOptions,
    SafetensorsOptions,
    StateOptions,
    ToOptions,
)
from shardckpt.options import Options
from shardckpt.reshard.execute import reshard
from shardckpt.reshard.options import ReshardOptions
from shardckpt.serve.jobs.operations import OPERATIONS

PUBLIC = [
    (shardckpt.import_checkpoint, (ImportOptions,)),
    (shardckpt.export_safetensors, (SafetensorsOptions,)),
    (shardckpt.export, (StateOptions, ToOptions)),
    (reshard, (ReshardOptions,)),
]


@pytest.mark.parametrize(("function", "declared"), PUBLIC)
def test_a_public_signature_has_the_names_types_and_defaults_of_the_declaration(function, declared):
    """Editors and type checkers read the signature."""
    given = [
        one for one in signature(function).parameters.values() if one.kind is Parameter.KEYWORD_ONLY
    ]
    expected = {one.name: (one.type, one.default) for kind in declared for one in fields(kind)}
    assert {one.name: (one.annotation, one.default) for one in given} == expected


@pytest.mark.parametrize(("function", "declared"), PUBLIC)
def test_help_describes_every_argument(function, declared):
    text = function.__doc__
    for kind in declared:
        for name, one in kind.declared().items():
            assert f"        {name}: {one.about}\n" in text
    assert "        options: " not in text


@pytest.mark.parametrize("declared", [AnyExportOptions, ImportOptions, ReshardOptions])
def test_a_front_end_that_is_given_nothing_leaves_all_defaults(declared):
    assert declared.arguments({}) == {}
    assert declared.arguments({name: one.default for name, one in declared.typed().items()}) == {}


def test_a_job_has_the_parameters_of_its_operation():
    for operation in OPERATIONS.values():
        names = [one.name for one in operation.parameters]
        assert len(names) == len(set(names))
        served = [
            name
            for name, one in operation.options.typed().items()
            if one.served and name not in operation.without
        ]
        assert (operation.options is Options) == (served == [])
        assert names == [*(one.name for one in operation.own), *served]


def test_options_of_a_base_class_are_taken_without_the_others():
    options = ImportOptions(
        into="model",
        only="a",
        dtype="bfloat16",
        rename="s/a/b/",
        engine="ray://h:1",
        progress=print,
    )
    assert options.of_job() == ReshardOptions(only="a", dtype="bfloat16")
    assert (options.names().rename, options.names().dtype) == (("s/a/b/",), None)
