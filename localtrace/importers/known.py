"""The ids that a store already holds, looked up a batch at a time."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from localtrace.errors import StoreNotFound

if TYPE_CHECKING:
    from localtrace.read.store import Store

_LISTED = "trace_id in (select unnest($ids))"
_TRAJECTORIES = f"select trace_id, run_id, step, reward from stored.trajectories where {_LISTED}"
_SPANS = f"select trace_id, span_id from stored.spans where {_LISTED}"
_OUTCOMES = (
    "select trace_id, name, time_ns, source, coalesce(\"text\", '') from stored.outcomes "
    f"where {_LISTED}"
)


class Row(NamedTuple):
    """The row of a trajectory."""

    run_id: str
    step: int | None
    reward: float | None
    """The reward that it ended with; a later one is an outcome."""


class Known:
    """The ids in a store, as of the last `look`."""

    def __init__(self, path: Path) -> None:
        """Open the store; without one, nothing is known."""
        self._path = path
        self._store: Store | None = None
        self.look()

    def look(self) -> None:
        """Read what was written since the last look."""
        from localtrace.read.store import open_store

        if self._store is not None:
            self._store.refresh()
            return
        try:
            self._store = open_store(self._path)
        except StoreNotFound:
            self._store = None

    def close(self) -> None:
        """Close the store."""
        if self._store is not None:
            self._store.close()

    def trajectories(self, trace_ids: Collection[str]) -> dict[str, Row]:
        """Return the rows of those of the trace ids that have a trajectory."""
        return {trace_id: Row(*row) for trace_id, *row in self._rows(_TRAJECTORIES, trace_ids)}

    def spans(self, trace_ids: Collection[str], steps: Collection[int]) -> set[tuple[Any, ...]]:
        """Return the calls of these trajectories as pairs of trace id and span id.

        Args:
            steps: the steps of the trajectories; files of other steps are not read.
        """
        possible = ", ".join(str(step) for step in steps if -(2**63) <= step < 2**63)
        condition = f"and (step is null or step in ({possible or 'null'}))"
        return set(self._rows(f"{_SPANS} {condition}", trace_ids))

    def outcomes(self, trace_ids: Collection[str]) -> set[tuple[Any, ...]]:
        """Return the outcomes of these trajectories: trace id, name, time, source and text."""
        return set(self._rows(_OUTCOMES, trace_ids))

    def _rows(self, query: str, trace_ids: Collection[str]) -> Iterator[tuple[Any, ...]]:
        if self._store is not None and trace_ids:
            for row in self._store.own_sql(query, {"ids": list(trace_ids)}).to_dicts():
                yield tuple(row.values())
