"""HTML of the pages: that of `reading.inspection.markup`, which notebooks use too."""

from __future__ import annotations

from shardckpt.reading.inspection.markup import PREFIX, Html, Part, data, el

__all__ = ["PREFIX", "Html", "Part", "data", "el"]
