"""Compares the rows of a query with rows that are known to be true."""

from __future__ import annotations

import math
from typing import Any


def differences(found: list[dict[str, Any]], truth: list[dict[str, Any]]) -> list[str]:
    """Return where rows differ from the true ones; columns that the truth does not name pass."""
    if len(found) != len(truth):
        return [f"{len(found)} rows instead of {len(truth)}: {found}"]
    return [
        f"row {number}, {name}: {row.get(name)!r} instead of {value!r}"
        for number, (row, wanted) in enumerate(zip(found, truth, strict=True))
        for name, value in wanted.items()
        if name not in row or not _same(row[name], value)
    ]


def _same(found: Any, wanted: Any) -> bool:
    if isinstance(found, float) and isinstance(wanted, int | float):
        return math.isclose(found, wanted, rel_tol=1e-6, abs_tol=1e-9)
    return bool(found == wanted)
