"""The recorded metrics of one run, read a page at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from localtrace.uploader.targets import Metric

if TYPE_CHECKING:
    from localtrace.reader import Store

PAGE_ROWS = 10_000
NO_STEP = 0
"""The step of a value that was recorded without one; trackers have no word for that."""

_PAGE = f"""
    select time_ns, writer_id, writer_seq, name, coalesce(step, {NO_STEP}) as step, value
    from metrics
    where run_id = $run_id and attempt = $attempt
      and (time_ns, writer_id, writer_seq, name) > ($time_ns, $writer_id, $writer_seq, $name)
    order by time_ns, writer_id, writer_seq, name
    limit {PAGE_ROWS}
"""


def run_metrics(store: Store, run_id: str, attempt: int) -> Iterator[Metric]:
    """Yield every value of an attempt's metrics, in the order in which they were recorded."""
    after = {"time_ns": -1, "writer_id": "", "writer_seq": -1, "name": ""}
    while True:
        page = store.sql(_PAGE, {"run_id": run_id, "attempt": attempt, **after}).to_dicts()
        for row in page:
            yield Metric(row["name"], row["step"], row["value"], row["time_ns"])
        if len(page) < PAGE_ROWS:
            return
        # Each page starts behind the last one's end, so it costs no more than the first.
        after = {name: page[-1][name] for name in after}
