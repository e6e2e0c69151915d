"""Parser of mapping files: TOML, or the same in YAML, with a table `map` per rule, in order.

    [values]               # optional: numbers that rules use by name; those of a model's
                           # config.json override them
    num_attention_heads = 32

    [[map]]
    from = ["layers.*.q_proj", "layers.*.k_proj", "layers.*.v_proj"]  # several: they are merged
    to = "h.*.qkv"         # one name or several; if `from` is one and `to` several, it is split
    axis = 0               # dimension of the one along which the several lie; default 0
    ratio = [4, 1, 1]      # or sizes = [4096, 1024, 1024]: lengths along `axis`; equal by default
                           # when splitting
    interleave = 8         # the several alternate, in this many groups
    stack = 0              # dimension of the one that counts the wildcard of the several alone
    transpose = true       # or [1, 0]: for each dimension of the result (except `stack`), its
                           # source dimension
    rotary = {heads = "num_attention_heads", to = "pairs"}  # rows of heads, reordered; or "halves"
    unfold = {axis = 1, count = "num_attention_heads"}      # two dimensions in the one
    optional = true        # may match nothing

All keys but `from` and `to` are optional, and no others are allowed.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources
from typing import TYPE_CHECKING, Any, NoReturn

from shardckpt.errors import OptionError
from shardckpt.io.config_files import parse_text, read_file
from shardckpt.reading.naming.mapping import TensorMapping
from shardckpt.reading.naming.mapping_rule import MappingRule
from shardckpt.reading.naming.name_pattern import NamePattern
from shardckpt.reading.naming.part_layout import Rotary, Unfold
from shardckpt.state.names import did_you_mean
from shardckpt.text import shorten

if TYPE_CHECKING:
    import os

_TOP = ("map", "values")
_KEYS = (
    "from",
    "to",
    "axis",
    "stack",
    "sizes",
    "ratio",
    "interleave",
    "transpose",
    "rotary",
    "unfold",
    "optional",
)
_ENDINGS = (".toml", ".yaml", ".yml")
_FOLDER = resources.files("shardckpt.reading.naming") / "mappings"
PRESETS = tuple(
    sorted(
        entry.name.removesuffix(".toml")
        for entry in _FOLDER.iterdir()
        if entry.name.endswith(".toml")
    )
)
"""Mappings that come with shardckpt, by name."""

Values = Mapping[str, int]


def read_mapping(source: str | os.PathLike[str], values: Values | None = None) -> TensorMapping:
    """Read a mapping file, or a built-in mapping.

    Args:
        source: a file whose name ends with .toml, .yaml or .yml; or one of `PRESETS`.
        values: numbers that its rules use by name, such as those of a model's configuration.

    Raises:
        OptionError: it cannot be read or is invalid; the message names the file and the rule.
    """
    if isinstance(source, str) and source in PRESETS:
        where = f"mapping {source}"
        return parse_mapping(
            parse_text((_FOLDER / f"{source}.toml").read_text("utf-8"), ".toml", where),
            where,
            values,
        )
    try:
        return parse_mapping(read_file(source, "mapping file", _ENDINGS), str(source), values)
    except OptionError as error:
        if isinstance(source, str) and not source.endswith(_ENDINGS):
            listed = ", ".join(PRESETS)
            raise OptionError(
                f"there is no mapping {shorten(source)}{did_you_mean(source, PRESETS)}: give a "
                f"TOML or YAML file, or one of {listed}."
            ) from error
        raise


def parse_mapping(doc: Any, where: str, values: Values | None = None) -> TensorMapping:
    """Parse the document of a mapping file.

    Args:
        doc: the document, as parsed from TOML or YAML.
        where: the file, for messages.
        values: numbers that its rules use by name.

    Raises:
        OptionError: the document is invalid; the message names the rule.
    """
    _refuse_others(doc, _TOP, where)
    own = doc.get("values", {})
    if not isinstance(own, Mapping) or not all(
        isinstance(key, str) and type(value) is int for key, value in own.items()
    ):
        raise OptionError(f"{where}: values is {shorten(own)}; give a table of whole numbers.")
    rules = doc.get("map")
    if not isinstance(rules, list) or not rules:
        raise OptionError(
            f"{where}: there are no rules; write each as a table [[map]] with from and to."
        )
    values = {**own, **(values or {})}
    return TensorMapping(
        tuple(
            _RuleParser(rule, f"{where}, rule {number}", values).parse()
            for number, rule in enumerate(rules, 1)
        )
    )


def _refuse_others(doc: Any, keys: tuple[str, ...], where: str) -> None:
    if not isinstance(doc, Mapping):
        raise OptionError(
            f"{where}: expected keys ({', '.join(keys)}), found a {type(doc).__name__}."
        )
    for key in doc:
        if key not in keys:
            raise OptionError(
                f"{where}: there is no key {shorten(key)}{did_you_mean(str(key), keys)}; there "
                f"are {', '.join(keys)}."
            )


class _RuleParser:
    """Parser of one table of a file."""

    def __init__(self, doc: Any, where: str, values: Values) -> None:
        _refuse_others(doc, _KEYS, where)
        self._doc, self._where, self._values = doc, where, values

    def parse(self) -> MappingRule:
        sources, targets = self._names("from"), self._names("to")
        if len(sources) > 1 and len(targets) > 1:
            self._refuse(
                f"from has {len(sources)} names and to has {len(targets)}; one of them is one name"
            )
        merges = len(targets) == 1 and (
            len(sources) > 1 or len(sources[0].keys) >= len(targets[0].keys)
        )
        parts, (whole,) = (sources, targets) if merges else (targets, sources)
        shares, exact = self._shares()
        return MappingRule(
            parts=parts,
            whole=whole,
            merges=merges,
            axis=self._dimension("axis") or 0,
            stack=self._dimension("stack"),
            shares=shares,
            exact=exact,
            groups=self._number(self._doc.get("interleave", 1), "interleave"),
            permutation=self._permutation(merges=merges),
            rotary=self._rotary(merges=merges),
            unfold=self._unfold(),
            optional=self._flag("optional"),
            origin=self._where,
        )

    def _names(self, key: str) -> tuple[NamePattern, ...]:
        value = self._doc.get(key)
        listed = value if isinstance(value, list) else [value]
        if not listed or not all(isinstance(name, str) for name in listed):
            self._refuse(f"{key} is {shorten(value)}; give a name of tensors, or a list of them")
        try:
            return tuple(map(NamePattern, listed))
        except OptionError as error:
            raise OptionError(f"{self._where}, {key}: {error}") from error

    def _shares(self) -> tuple[tuple[int, ...] | None, bool]:
        given = [key for key in ("sizes", "ratio") if key in self._doc]
        if len(given) > 1:
            self._refuse("sizes and ratio have the same meaning; give only one of them")
        if not given:
            return None, False
        (key,) = given
        value = self._doc[key]
        if not isinstance(value, list):
            self._refuse(
                f"{key} is {shorten(value)}; give a list of whole numbers, one for each part"
            )
        return tuple(self._number(n, key) for n in value), key == "sizes"

    def _number(self, value: Any, key: str) -> int:
        """A positive number, given as itself or by name."""
        if isinstance(value, str):
            if value not in self._values:
                self._refuse(
                    f"{key} names {shorten(value)}, which nothing "
                    f"says{did_you_mean(value, self._values)}; add it to the mapping file in a "
                    "table [values] (a built-in mapping: copy it from "
                    "shardckpt/reading/naming/mappings); or, unless this is a restore, give the "
                    "model's config.json"
                )
            return self._number(self._values[value], f"{key}, {value}")
        if type(value) is not int or value < 1:
            self._refuse(
                f"{key} is {shorten(value)}; give a positive whole number, or the name of one"
            )
        return value

    def _dimension(self, key: str) -> int | None:
        value = self._doc.get(key)
        if value is not None and type(value) is not int:
            self._refuse(
                f"{key} is {shorten(value)}; give the number of a dimension: 0 is the first, -1 "
                "the last"
            )
        return value

    def _permutation(self, *, merges: bool) -> Any:
        value = self._doc.get("transpose", False)
        if isinstance(value, bool):
            return "reverse" if value else None
        if (
            not isinstance(value, list)
            or not all(type(d) is int for d in value)
            or sorted(value) != list(range(len(value)))
        ):
            self._refuse(
                f"transpose is {shorten(value)}; give true, or all dimensions in their new order, "
                "such as [1, 0]"
            )
        return tuple(value) if merges else tuple(map(value.index, range(len(value))))

    def _rotary(self, *, merges: bool) -> Rotary | None:
        value = self._doc.get("rotary")
        if value is None:
            return None
        _refuse_others(value, ("heads", "to"), f"{self._where}, rotary")
        if value.get("to") not in ("pairs", "halves"):
            self._refuse(f'rotary: to is {shorten(value.get("to"))}; use "pairs" or "halves"')
        return Rotary(
            self._number(value.get("heads"), "rotary, heads"),
            pairs_in_whole=(value["to"] == "pairs") == merges,
        )

    def _unfold(self) -> Unfold | None:
        value = self._doc.get("unfold")
        if value is None:
            return None
        _refuse_others(value, ("axis", "count"), f"{self._where}, unfold")
        if type(value.get("axis")) is not int:
            self._refuse(
                f"unfold: axis is {shorten(value.get('axis'))}; give the number of a dimension"
            )
        return Unfold(value["axis"], self._number(value.get("count"), "unfold, count"))

    def _flag(self, key: str) -> bool:
        value = self._doc.get(key, False)
        if not isinstance(value, bool):
            self._refuse(f"{key} is {shorten(value)}; give true or false")
        return value

    def _refuse(self, problem: str) -> NoReturn:
        raise OptionError(f"{self._where}: {problem}.")
