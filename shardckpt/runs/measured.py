"""A step's metrics in a checkpoint's metadata, with infinities and NaN as text.

JSON has neither infinities nor NaN.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf, isfinite
from typing import Any

from shardckpt.errors import OptionError
from shardckpt.text import shorten

METRICS = "metrics"
"""The key in the metadata."""


def encode_metrics(metrics: Mapping[str, Any]) -> dict[str, float | str]:
    """Metrics as JSON, with infinities and NaN as text.

    >>> encode_metrics({"loss": 0.25, "grad_norm": float("inf")})
    {'loss': 0.25, 'grad_norm': 'inf'}

    Raises:
        OptionError: a name that is not text, or a value that is not a number; a tensor of one
            element counts as a number.
    """
    if not isinstance(metrics, Mapping):
        raise OptionError(f"metrics={shorten(metrics)}: give a dict of numbers by name.")
    encoded: dict[str, float | str] = {}
    for name, value in metrics.items():
        if not isinstance(name, str):
            raise OptionError(f"metrics: the key {shorten(name)} is not text; give names as str.")
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError, RuntimeError) as e:
            raise OptionError(
                f"metrics[{shorten(name)}]={shorten(value)}: no number ({e}); give one, or a "
                "tensor of one element."
            ) from e
        encoded[name] = number if isfinite(number) else str(number)
    return encoded


def decode_metrics(values: object) -> dict[str, float]:
    """The metrics of a checkpoint's metadata; what is not a number by name is ignored.

    >>> decode_metrics({"loss": "nan", "tag": "a"})
    {'loss': nan}
    """
    metrics = {}
    for name, value in values.items() if isinstance(values, dict) else ():
        try:
            metrics[str(name)] = float(value)
        except OverflowError:  # an integer of hundreds of digits
            metrics[str(name)] = inf if value > 0 else -inf
        except (TypeError, ValueError):
            continue
    return metrics
