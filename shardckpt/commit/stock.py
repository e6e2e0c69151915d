"""Specs and urls with which stock TensorStore opens an array of either layout."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from shardckpt.format.zarr_arrays import plain_key

if TYPE_CHECKING:
    from shardckpt.io.url import Location


def stock_spec(
    location: Location, attempt: str, array_path: str, layout: str = "packed"
) -> dict[str, Any]:
    """The spec with which stock TensorStore opens an array; a missing chunk is an error.

    Raises:
        StorageError: TensorStore has no driver for the place.
    """
    place = location.join(attempt)
    strict = {"fill_missing_data_reads": False, "store_data_equal_to_fill_value": True}
    if layout == "packed":
        return {
            "driver": "zarr3",
            "kvstore": {"driver": "ocdbt", "base": place.kvstore(), "path": f"{array_path}/"},
            **strict,
        }
    return {"driver": "zarr3", "kvstore": place.join(plain_key(array_path)).kvstore(), **strict}


def stock_url(location: Location, attempt: str, array_path: str, layout: str = "packed") -> str:
    """The url with which stock TensorStore opens an array, for people to paste."""
    place = location.join(attempt)
    if layout == "packed":
        return f"{place.url}/|ocdbt:|zarr3:{quote(array_path)}/"
    return f"{place.join(plain_key(array_path)).url}/|zarr3:"
