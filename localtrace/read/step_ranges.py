"""Large selections, cut into ranges of steps that are read one by one."""

from __future__ import annotations

from collections.abc import Sequence

ROWS_MIN = 10_000
"""The size of a large selection; smaller ones are not cut."""
_SLICES_MAX = 16
"""The number of ranges, about; each costs a query of its own."""


def step_slices(counts: Sequence[tuple[int | None, int]], rows_min: int = ROWS_MIN) -> list[str]:
    """Return conditions on `step`, in order; every row meets exactly one of them.

    Args:
        counts: the number of rows of each step, in the order of steps, null last.
        rows_min: up to so many rows, one condition is met by all.
    """
    total = sum(count for _, count in counts)
    if total <= rows_min:
        return ["true"]
    rows_max = max(rows_min, total // _SLICES_MAX)
    slices: list[list[int]] = []
    has_null, rows = False, 0
    for step, count in counts:
        if step is None:
            has_null = True
        elif slices and rows + count <= rows_max:
            slices[-1].append(step)
            rows += count
        else:
            slices.append([step])
            rows = count
    conditions = [f"step between {steps[0]} and {steps[-1]}" for steps in slices]
    return [*conditions, *(["step is null"] if has_null else [])]
