"""Flags made of the declarations of options, and the words for options in messages.

The declarations are in `shardckpt.options`.
"""

from __future__ import annotations

import inspect
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from shardckpt.options import Option, Options
    from shardckpt.text import NamedOption

_TYPES: dict[str, Any] = {"boolean": bool, "integer": int | None, "texts": list[str] | None}
_flags: dict[str, str] = {}
"""Flag of each declared option, for messages. `takes` fills it when the modules of the commands are
imported; no two declarations of a name have different flags."""


def takes(
    declared: type[Options], *, without: Collection[str] = ()
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a command: replace its parameter `given` by one flag per declared option.

    The parameter is a dict that `Options.arguments` reads.
    """
    known = {
        name: one
        for name, one in declared.typed().items()
        if one.metavar is not None or one.kind == "boolean"
    }
    shown = {name: one for name, one in known.items() if name not in without}
    _flags.update({name: one.flags_of(name)[0] for name, one in declared.typed().items()})
    for name, one in declared.declared().items():
        if one.parts is not None:  # a message names the first of the parts
            _flags[name] = next(_flags[part] for part in one.parts.declared())

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command, eval_str=True)
        parameters: list[inspect.Parameter] = []
        for parameter in signature.parameters.values():
            parameters += (
                [_flag(name, one) for name, one in shown.items()]
                if parameter.name == "given"
                else [parameter]
            )

        def run(**values: Any) -> None:
            command(given={name: values.pop(name) for name in shown}, **values)

        typed: Any = run
        typed.__signature__ = signature.replace(parameters=parameters)
        typed.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        typed.__doc__, typed.__name__ = command.__doc__, command.__name__
        return run

    return decorate


def _flag(name: str, one: Option) -> inspect.Parameter:
    flags = one.flags_of(name)
    default: Any = (
        one.default if one.default != "" and isinstance(one.default, bool | int | str) else None
    )
    if one.default is True:
        flags = (f"{flags[0]}/--no-{flags[0].removeprefix('--')}",)
    elif one.kind == "size" and one.default is not None:
        default = f"{one.default >> 20}MiB"
    text = f"{one.about.removesuffix('.')}; may be repeated." if one.kind == "texts" else one.about
    made = typer.Option(*flags, metavar=one.metavar, help=text, min=one.least, max=one.most)
    annotated: Any = Annotated
    annotation = annotated[_TYPES.get(one.kind, str | None), made]
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )


def as_flag(option: NamedOption) -> str:
    """An option of a message as it is typed: `--only a --only b`."""
    flag = _flags.get(
        option.field,
        option.field if option.field.startswith("-") else f"--{option.field.replace('_', '-')}",
    )
    return " ".join(f"{flag} {quote(text)}" for text in option.typed) or flag
