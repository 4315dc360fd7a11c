"""Slices of steps: every row in one of them, in the order of steps."""

from __future__ import annotations

import duckdb
from hypothesis import given, settings
from hypothesis import strategies as st

from localtrace.viewer.hits import step_slices

counts = st.dictionaries(st.integers(-5, 20), st.integers(1, 9)).map(lambda by: sorted(by.items()))


@settings(deadline=None)
@given(counts, st.integers(0, 9), st.integers(0, 12))
def test_slices_hold_every_row_once_and_in_order(
    steps: list[tuple[int, int]], unknown: int, rows_max: int
) -> None:
    known: list[tuple[int | None, int]] = [*steps, *([(None, unknown)] if unknown else [])]
    rows = [step for step, count in known for _ in range(count)]
    with duckdb.connect() as connection:
        connection.execute("create table rows (step bigint)")
        for step in rows:
            connection.execute("insert into rows values (?)", [step])
        parts = [
            [step for (step,) in connection.execute(sql).fetchall()]
            for condition in step_slices(known, rows_max)
            for sql in [f"select step from rows where {condition} order by step"]
        ]
    assert [step for part in parts for step in part] == rows
    assert all(len(part) <= rows_max or len(set(part)) == 1 for part in parts)
