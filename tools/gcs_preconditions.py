"""Whether a request to Google Cloud Storage's JSON API may go ahead.

This depends on the present generation of its object.

The rules are those of the API's documentation ("Request preconditions") and of Google's own test
bench:

- The target of a read, stat or delete must exist, or the answer is 404, whatever the preconditions.
- `ifGenerationMatch=G`: the object has generation G; 0: there is no such object. Otherwise 412.
- `ifGenerationNotMatch=G`: the object has not generation G; 0: there is such an object. Otherwise
  304.
- The preconditions of a resumable upload are given when it begins and hold when it ends; of a copy
  or a composition they are about the destination.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fault_requests import Operation

__all__ = ["Preconditions"]

_NEEDS_OBJECT = {"read", "stat", "delete"}


@dataclass(frozen=True, slots=True)
class Preconditions:
    """Conditions that must hold for a request to go ahead."""

    match: int | None = None
    not_match: int | None = None
    needs_object: bool = False

    @classmethod
    def of(cls, operation: Operation) -> Preconditions | None:
        """Those of a request; None if it has none.

        Raises:
            NotImplementedError: it has others than of an object's own generation.
            ValueError: one is not a number.
        """
        given = {key: value for key, value in operation.query.items() if key.startswith("if")}
        unknown = given.keys() - {"ifGenerationMatch", "ifGenerationNotMatch"}
        if unknown:
            raise NotImplementedError(f"this proxy does not enforce {', '.join(sorted(unknown))}")
        if not given or operation.kind == "list":
            return None
        match, not_match = (
            int(given[key]) if key in given else None
            for key in ("ifGenerationMatch", "ifGenerationNotMatch")
        )
        return cls(match, not_match, operation.kind in _NEEDS_OBJECT)

    def refusal(self, generation: int) -> int | None:
        """The code of the refusal, None if the request may go ahead.

        Args:
            generation: the object's present one, 0 if there is none.
        """
        if self.needs_object and not generation:
            return 404
        if self.match is not None and self.match != generation:
            return 412
        if self.not_match is not None and self.not_match == generation:
            return 304
        return None
