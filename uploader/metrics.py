"""Read a run's recorded metrics in pages, send them in batches, and count what arrived."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

from tenacity import Retrying

from localtrace.errors import TargetRejected
from localtrace.uploader.targets import Metric, MetricsTarget, Place

if TYPE_CHECKING:
    from localtrace.read.store import Store

PAGE_ROWS = 10_000
BATCH_VALUES = 1000
NO_STEP = 0
"""The step of a value that was recorded without one: trackers require a step."""

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
        page = store.own_sql(_PAGE, {"run_id": run_id, "attempt": attempt, **after}).to_dicts()
        for row in page:
            yield Metric(row["name"], row["step"], row["value"], row["time_ns"])
        if len(page) < PAGE_ROWS:
            return
        # Each page starts after the last row of the one before, so all cost the same.
        after = {name: page[-1][name] for name in after}


@dataclass(frozen=True, slots=True)
class MetricsDelivery:
    """The result of sending a run's metrics."""

    counts: dict[str, int] = field(default_factory=dict)
    """Number of values at the target, by recorded name."""
    names: dict[str, str] = field(default_factory=dict)
    """Name at the target by recorded name, where they differ."""
    problem: str | None = None
    """Reason why some are missing at the target."""


def send_metrics(
    found: Iterable[Metric], target: MetricsTarget, place: Place, patiently: Retrying
) -> MetricsDelivery:
    """Send values to a place's run, and count those it holds then.

    A refusal is not raised: it becomes the result's `problem`.
    """
    names: dict[str, str] = {}
    seen: set[str] = set()
    values = iter(found)
    try:
        while batch := list(islice(values, BATCH_VALUES)):
            seen.update(metric.name for metric in batch)
            names |= patiently(target.send_metrics, place, batch)
        return MetricsDelivery(patiently(target.count_metrics, place, sorted(seen)), names)
    except TargetRejected as error:
        return MetricsDelivery({}, names, f"the metrics were refused: {error}")
