"""What do reward functions record beside rewards?  What they give `log_metric` and `log_extra`, as in TRL."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any


class Logged:
    """What the functions of one call recorded. count: of the answers that they were called for."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._metrics: dict[str, list[float]] = {}
        self._columns: dict[str, list[Any]] = {}

    def log_metric(self, name: str, value: float) -> None:
        """Record one number about all answers of the call.

        Raises:
            ValueError: it is not a finite number.
        """
        number = float(value)
        if not math.isfinite(number):
            raise ValueError(f"log_metric({name!r}): {number} is not a finite number")
        self._metrics.setdefault(str(name), []).append(number)

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """Record one value for each answer, which is written beside it; what JSON has no form for as a text.

        Raises:
            ValueError: the number of values is not that of the answers.
        """
        values = list(values)
        if len(values) != self.count:
            raise ValueError(f"log_extra({column!r}): {len(values)} values for {self.count} answers")
        self._columns[str(column)] = [_written(value) for value in values]

    def metrics(self) -> dict[str, float]:
        """Return the mean of what was recorded under each name."""
        return {name: sum(values) / len(values) for name, values in list(self._metrics.items())}

    def extra(self, place: int) -> dict[str, Any]:
        """Return what was recorded beside an answer."""
        return {column: values[place] for column, values in list(self._columns.items())}


def _written(value: Any) -> Any:
    plain = value is None or isinstance(value, str | bool | int) or (isinstance(value, float) and math.isfinite(value))
    return value if plain else str(value)
