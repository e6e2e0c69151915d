"""Endpoints with typed query parameters, and the OpenAPI document from the same declarations."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import parse_qsl

from starlette.convertors import PathConvertor, register_url_convertor
from starlette.datastructures import QueryParams

from shardckpt._version import __version__
from shardckpt.errors import OptionError
from shardckpt.serve.problems import STATUS
from shardckpt.text import few, shorten

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from starlette.requests import Request

    from shardckpt.options import Options

LONGEST_TEXT = 1000
"""Most characters of a text parameter."""
MOST_TEXTS = 100
PATH = "{path:lines}"
"""A path in a route, with all of its line breaks. Starlette's own `path` matches none of them, and
drops one at the end: another name."""
_INTEGER = re.compile(r"-?\d{1,18}", re.ASCII)


class _Lines(PathConvertor):
    regex = r"[\s\S]*"


register_url_convertor("lines", _Lines())


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A parameter of a query."""

    name: str
    kind: Literal["text", "integer", "boolean", "texts"] = "text"
    about: str
    choices: tuple[str, ...] = ()
    least: int = 0
    most: int = (1 << 53) - 1
    """Bounds of an integer."""
    default: Any = None
    required: bool = False
    example: Any = None

    def parse(self, given: list[str]) -> Any:
        """The value of what a query gives; the default if it gives nothing.

        Raises:
            OptionError: what it gives is invalid.
        """
        if not given:
            if self.required:
                raise OptionError(f"{self.name}= is missing: {self.about}")
            return self.default
        if self.kind == "texts":
            if len(given) > MOST_TEXTS:
                raise OptionError(
                    f"{self.name}= is given {len(given)} times; the limit is {MOST_TEXTS}."
                )
            return [self._text(one) for one in given]
        if len(given) > 1:
            raise OptionError(f"{self.name}= is given {len(given)} times; give it once.")
        return self._value(given[0])

    def _value(self, text: str) -> Any:
        if self.kind == "boolean":
            if text not in ("true", "false"):
                raise OptionError(f"{self.name}={shorten(text)}: give true or false.")
            return text == "true"
        if self.kind == "integer":
            if not _INTEGER.fullmatch(text) or not self.least <= int(text) <= self.most:
                raise OptionError(
                    f"{self.name}={shorten(text)}: give an integer from {self.least} to "
                    f"{self.most}."
                )
            return int(text)
        return self._text(text)

    def _text(self, text: str) -> str:
        if self.choices and text not in self.choices:
            raise OptionError(
                f"{self.name}={shorten(text)}: give one of {', '.join(self.choices)}."
            )
        if len(text) > LONGEST_TEXT or "\0" in text:
            raise OptionError(f"{self.name}: give at most {LONGEST_TEXT} characters, without NUL.")
        return text

    def of_json(self, given: Mapping[str, Any]) -> Any:
        """The value of a member of a JSON object.

        The default if the object has no such member, or null.

        Raises:
            OptionError: the value is missing or invalid.
        """
        value: Any = given.get(self.name)
        if value is None:
            return self.parse([])
        several = isinstance(value, list) and all(type(one) is str for one in value)
        if not (
            several
            if self.kind == "texts"
            else type(value) is {"text": str, "integer": int, "boolean": bool}[self.kind]
        ):
            raise OptionError(
                f"{self.name}: give "
                f"{'a list of texts' if self.kind == 'texts' else f'one {self.kind}'}."
            )
        return (
            value if self.kind == "boolean" else self.parse([*value] if several else [str(value)])
        )

    @property
    def schema(self) -> dict[str, Any]:
        """The JSON schema of its value."""
        text: dict[str, Any] = {"type": "string", "maxLength": LONGEST_TEXT} | (
            {"enum": list(self.choices)} if self.choices else {}
        )
        schema = {
            "text": text,
            "texts": {"type": "array", "items": text, "maxItems": MOST_TEXTS},
            "integer": {"type": "integer", "minimum": self.least, "maximum": self.most},
            "boolean": {"type": "boolean"},
        }[self.kind]
        return schema if self.default is None else schema | {"default": self.default}

    def document(self) -> dict[str, Any]:
        """The parameter in OpenAPI."""
        example = {} if self.example is None else {"example": self.example}
        return {
            "name": self.name,
            "in": "query",
            "required": self.required,
            "description": self.about,
            "schema": self.schema,
            **example,
        }


def parameters(
    declared: type[Options], *, without: Collection[str] = (), **choices: tuple[str, ...]
) -> tuple[Parameter, ...]:
    """The parameters for the options that the service has.

    `choices` allows some values of an option only.
    """
    return tuple(
        Parameter(
            name=name,
            kind=one.served,
            about=one.about,
            choices=choices.get(name, one.choices),
            default=f"{one.default >> 20}MiB"
            if one.kind == "size" and one.default is not None
            else one.default,
            example=one.example,
        )
        for name, one in declared.typed().items()
        if one.served is not None and name not in without
    )


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Handler and description of GET requests to a path."""

    path: str
    """As in OpenAPI; parameters in braces may hold slashes."""
    answer: Callable[..., Any]
    parameters: tuple[Parameter, ...]
    produces: tuple[str, ...] = ("application/json",)
    schema: Mapping[str, Any] = field(default_factory=dict)
    long: bool = False
    """Whether it may wait for a calculation."""

    def parse(self, request: Request) -> dict[str, Any]:
        """The values of all parameters.

        Raises:
            OptionError: a parameter is unknown, missing or invalid, or not UTF-8.
        """
        try:
            query = QueryParams(
                parse_qsl(
                    request.scope["query_string"].decode(), keep_blank_values=True, errors="strict"
                )
            )
        except UnicodeDecodeError:
            raise OptionError(
                "the query is not valid UTF-8; encode it as UTF-8, and then with percent signs."
            ) from None
        names = [parameter.name for parameter in self.parameters]
        odd = next((name for name in query if name not in names), None)
        if odd is not None:
            raise OptionError(
                "there is no parameter "
                f"{shorten(odd)}{'; there are ' + few(names, 20) if names else ''}."
            )
        return {
            parameter.name: parameter.parse(query.getlist(parameter.name))
            for parameter in self.parameters
        }

    def document(self) -> dict[str, Any]:
        """The endpoint in OpenAPI."""
        about = (self.answer.__doc__ or "").strip().partition("\n")
        schema = dict(self.schema) or {"type": "object"}
        content = {
            kind: {"schema": schema if kind == "application/json" else {}} for kind in self.produces
        }
        return {
            "summary": about[0].rstrip("."),
            "operationId": self.answer.__name__,
            "parameters": [
                *path_parameters(self.path),
                *(parameter.document() for parameter in self.parameters),
            ],
            "responses": {
                "200": {"description": "The requested document.", "content": content},
                "default": {"$ref": "#/components/responses/Problem"},
            },
        }


def path_parameters(path: str) -> list[dict[str, Any]]:
    """The parameters in a path, in OpenAPI."""
    schema = {"type": "string", "minLength": 1}
    return [
        {"name": name, "in": "path", "required": True, "schema": schema}
        for name in re.findall(r"\{(\w+)\}", path)
    ]


def posted(
    path: str, answer: Callable[..., Any], parameters: Sequence[Parameter] | None = None
) -> dict[str, Any]:
    """OpenAPI description of POST requests to a path that are answered with 202.

    Args:
        path: its last name is the id.
        answer: its docstring is the summary.
        parameters: members of the JSON object that is sent; None: nothing is sent.
    """
    description: dict[str, Any] = {
        "summary": (answer.__doc__ or "").partition("\n")[0].rstrip("."),
        "operationId": path.rpartition("/")[2],
        "parameters": path_parameters(path),
        "responses": {
            "202": {
                "description": "The new job.",
                "content": {"application/json": {"schema": {"type": "object"}}},
            },
            "default": {"$ref": "#/components/responses/Problem"},
        },
    }
    if parameters is not None:
        members = {
            one.name: {**one.schema, "description": one.about}
            | ({} if one.example is None else {"example": one.example})
            for one in parameters
        }
        required = [one.name for one in parameters if one.required]
        schema = {"type": "object", "properties": members, "additionalProperties": False} | (
            {"required": required} if required else {}
        )
        description["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": schema}},
        }
    return description


def document(
    endpoints: Iterable[Endpoint], posts: Mapping[str, Mapping[str, Any]], *, tokens: bool
) -> dict[str, Any]:
    """The OpenAPI document of some endpoints, and of what answers POST requests, by path."""
    problem = {
        "type": "object",
        "required": ["type", "title", "status", "code", "detail"],
        "properties": {
            "type": {"type": "string"},
            "title": {"type": "string"},
            "status": {"type": "integer"},
            "code": {
                "type": "string",
                "description": f"Stable: {', '.join(STATUS)}, and some of HTTP.",
            },
            "detail": {"type": "string"},
        },
    }
    content = {"application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "shardckpt serve",
            "version": __version__,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": {endpoint.path: {"get": endpoint.document()} for endpoint in endpoints}
        | {path: {"post": post} for path, post in posts.items()},
        "components": {
            "schemas": {"Problem": problem},
            "responses": {
                "Problem": {"description": "Why it was refused, or failed.", "content": content}
            },
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"token": []}] if tokens else [{}],
    }


def number(text: str, what: str) -> float:
    """A finite number in a text.

    Raises:
        OptionError: the text is none.
    """
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise OptionError(f"{what}: {shorten(text)} is not a finite number.")
    return value
