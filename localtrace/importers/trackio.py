"""Metrics and traces from the SQLite files that Trackio keeps, one per project.

    metrics, system_metrics   each number -> a row of the table `metrics`; system's without a step
    traces                    -> a trajectory with one call: its messages, the last one as result;
                                 spans -> calls below it; metadata -> attributes
    configs                   -> the run's configuration, secrets left out

Trackio's run becomes a run of the same id, under its project, with the run's name as experiment.
Values that are not numbers (tables, images, histograms, text) stay in Trackio and are counted.
Trackio gives all rows of one write the same time; they are set one nanosecond apart, in order.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from localtrace.errors import ConfigError
from localtrace.field_names import MESSAGE_NAMES
from localtrace.importers.imported_rollouts import (
    CallIn,
    Logged,
    Rollout,
    derived_span_id,
    digest_id,
)
from localtrace.importers.intake import Report
from localtrace.importers.lines import BadLine, read_json

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_NUMBERS = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}
"""The texts that Trackio writes for numbers that JSON does not have."""
_NS_MAX = 2**63 - 10**18
"""The largest start time: with 10**18 ns (31 years) for the call, its end still fits in int64."""
_OTHER_FILES = "registry-"
_RUNS = """
select run_id, max(run_name) as name from ({}) group by run_id order by min(first), run_id
"""
_ROWS = """
select {columns}, timestamp, row_number() over (partition by timestamp order by rowid) - 1 as place
from {table} where run_id = ? order by rowid
"""


@dataclass(frozen=True, slots=True)
class TrackioRun:
    """One run of a project."""

    run_id: str
    name: str
    config: Any


def default_folder() -> Path:
    """Return the folder where Trackio keeps its files: TRACKIO_DIR, else below HF_HOME."""
    if named := os.environ.get("TRACKIO_DIR"):
        return Path(named)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "huggingface"
    return Path(os.environ.get("HF_HOME") or cache) / "trackio"


def find_projects(folder: Path, wanted: tuple[str, ...]) -> list[Path]:
    """Return the files of the wanted projects; of all projects when none is named.

    Raises:
        ConfigError: the folder holds no project, or not a wanted one.
    """
    found = {
        file.stem: file
        for file in sorted(folder.glob("*.db"))
        if not file.stem.startswith(_OTHER_FILES)
    }
    if not found:
        raise ConfigError(
            f"{folder} holds no Trackio project: name Trackio's folder with --dir or TRACKIO_DIR"
        )
    for name in wanted:
        if name not in found:
            raise ConfigError(f"{folder} has no project {name!r}: there are {', '.join(found)}")
    return [found[name] for name in wanted or found]


class Project:
    """A project's file, opened for reading.

    Raises:
        ConfigError: the file is not a database of Trackio.
    """

    def __init__(self, file: Path) -> None:
        self.name = file.stem
        self._file = file
        self._connection = sqlite3.connect(f"{file.resolve().as_uri()}?mode=ro", uri=True)
        self._connection.row_factory = sqlite3.Row
        with self._explained():
            found = self._connection.execute("select name from sqlite_master where type = 'table'")
            self._tables = {row["name"] for row in found}
        if "metrics" not in self._tables:
            raise ConfigError(f"{file} is not a Trackio project: name another with --project")

    def close(self) -> None:
        """Close the file."""
        self._connection.close()

    def count(self) -> int:
        """Return the number of rows to read."""
        tables = self._tables & {"metrics", "system_metrics", "traces"}
        with self._explained():
            return sum(self._connection.execute(f"select count(*) from {table}").fetchone()[0]
                       for table in tables)  # fmt: skip

    def runs(self) -> list[TrackioRun]:
        """Return the runs in the order of their first rows."""
        tables = sorted(self._tables & {"metrics", "system_metrics", "traces", "configs"})
        stamped = {"configs": "created_at"}
        parts = [
            f"select run_id, run_name, {stamped.get(table, 'timestamp')} as first from {table}"
            for table in tables
        ]
        with self._explained():
            rows = self._connection.execute(_RUNS.format(" union all ".join(parts))).fetchall()
            return [TrackioRun(row["run_id"], row["name"], self._config(row[0])) for row in rows]

    def logged(self, run_id: str, report: Report, on_row: Callable[[], None]) -> Iterator[Logged]:
        """Yield the metrics of a run, then its system metrics."""
        for table, columns in (("metrics", "step, metrics"), ("system_metrics", "metrics")):
            for number, row in self._rows(table, columns, run_id):
                on_row()
                try:
                    values = _numbers(read_json(row["metrics"]), report)
                    time_ns = _time_ns(row["timestamp"]) + row["place"]
                    step = _step(row["step"]) if table == "metrics" else None
                except BadLine as error:
                    report.refuse(f"{self._file}: {table} {number} of {run_id}", str(error))
                    continue
                if values:
                    yield Logged(time_ns, step, values)

    def rollouts(
        self, run_id: str, report: Report, on_row: Callable[[], None]
    ) -> Iterator[Rollout]:
        """Yield the traces of a run."""
        columns = "id, step, key, messages, metadata"
        if "traces" in self._tables and "spans" in self._columns("traces"):
            columns += ", spans"
        for number, row in self._rows("traces", columns, run_id):
            on_row()
            try:
                yield _rollout(row, self.name)
            except BadLine as error:
                report.refuse(f"{self._file}: traces {number} of {run_id}", str(error))

    def _rows(self, table: str, columns: str, run_id: str) -> Iterator[tuple[int, sqlite3.Row]]:
        if table in self._tables:
            with self._explained():
                query = _ROWS.format(columns=columns, table=table)
                yield from enumerate(self._connection.execute(query, (run_id,)), 1)

    def _columns(self, table: str) -> set[str]:
        with self._explained():
            return {row["name"] for row in self._connection.execute(f"pragma table_info({table})")}

    def _config(self, run_id: str) -> Any:
        if "configs" not in self._tables:
            return None
        query = "select config from configs where run_id = ?"
        row = self._connection.execute(query, (run_id,)).fetchone()
        with contextlib.suppress(BadLine):
            return None if row is None else read_json(row["config"])
        return None

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise ConfigError(
                f"{self._file} cannot be read ({error}): close Trackio, or import a copy"
            ) from error


def _numbers(metrics: Any, report: Report) -> dict[str, float]:
    if not isinstance(metrics, dict):
        raise BadLine("not a JSON object")
    numbers = {}
    for name, value in metrics.items():
        value = _NUMBERS.get(value, value) if isinstance(value, str) else value
        if isinstance(value, int | float):
            with contextlib.suppress(OverflowError):
                numbers[name.encode("utf-8", "replace").decode()] = float(value)
                continue
        report.left_out["values that are not numbers"] += 1
    return numbers


def _time_ns(text: Any) -> int:
    try:
        found = datetime.fromisoformat(text)
    except (TypeError, ValueError):
        raise BadLine("its time is not an ISO 8601 time") from None
    found = found if found.tzinfo else found.replace(tzinfo=UTC)
    try:
        time_ns = (found - _EPOCH) // timedelta(microseconds=1) * 1000
    except OverflowError:
        time_ns = _NS_MAX + 1
    if abs(time_ns) > _NS_MAX:
        raise BadLine("its time is out of range: only years from 1710 to 2230 can be recorded")
    return time_ns


def _step(step: Any) -> int | None:
    if step is not None and type(step) is not int:
        raise BadLine("its step is not an integer")
    return step


def _rollout(row: sqlite3.Row, project: str) -> Rollout:
    messages, metadata = read_json(row["messages"]), read_json(row["metadata"])
    spans = read_json(row["spans"]) if "spans" in row.keys() else []  # noqa: SIM118
    if not isinstance(messages, list) or not isinstance(metadata, dict):
        raise BadLine("messages is not a list, or metadata is not an object")
    start_ns = _time_ns(row["timestamp"]) + row["place"]
    place = ("trackio", project, str(row["id"]))
    answers = bool(messages) and _role(messages[-1]) == "assistant"
    root = CallIn(
        span_id=derived_span_id(*place),
        op=_as_text(row["key"]) or "",
        start_ns=start_ns,
        duration_ns=0,
        inputs={MESSAGE_NAMES[0]: messages[:-1] if answers else messages},
        outputs=messages[-1] if answers else None,
        **_verdict(metadata),
    )
    inner = [one for one in spans if isinstance(one, dict)] if isinstance(spans, list) else []
    return Rollout(
        trace_id=digest_id(16, *place).hex(),
        calls=(root, *_calls(inner, root, place)),
        start_ns=start_ns,
        step=_step(row["step"]),
        sample_index=_as_text(metadata.get("sample_index")),
        rollout_n=_as_int(metadata.get("rollout_n")),
        validate=metadata.get("validate") is True,
        name=_as_text(row["key"]),
        values=metadata,
        size_bytes=len(row["messages"]) + len(row["metadata"]),
        **_verdict(metadata),
    )


def _calls(spans: list[dict[str, Any]], root: CallIn, place: tuple[str, ...]) -> Iterator[CallIn]:
    ids = {str(span.get("id")): _span_id(place, span) for span in spans}
    for seq, span in enumerate(spans, 1):
        start_ns = root.start_ns
        with contextlib.suppress(BadLine):
            start_ns = _time_ns(span.get("start_time"))
        duration_ms = span.get("duration_ms")
        known = isinstance(duration_ms, int | float) and 0 <= duration_ms < 1e12
        rest = {name: item for name, item in span.items() if name not in ("input", "output")}
        yield CallIn(
            span_id=_span_id(place, span),
            op=str(span.get("name") or span.get("kind") or "span"),
            start_ns=start_ns,
            duration_ns=int(duration_ms * 1e6) if known and duration_ms else 0,
            inputs={"input": span.get("input"), **rest},
            outputs=span.get("output"),
            parent_id=ids.get(str(span.get("parent_id")), root.span_id),
            seq=seq,
            takes_prompt=False,
            **_verdict(span),
        )


def _span_id(place: tuple[str, ...], span: dict[str, Any]) -> int:
    return derived_span_id(*place, str(span.get("id")))


def _verdict(fields: dict[str, Any]) -> dict[str, Any]:
    error = fields.get("error") or fields.get("exception")
    failed = error is not None or fields.get("status") in ("error", "failed")
    return {"status": "error" if failed else "ok", "error": _as_text(error)}


def _role(message: Any) -> Any:
    return message.get("role") if isinstance(message, dict) else None


def _as_text(value: Any) -> str | None:
    return None if value is None else str(value)


def _as_int(value: Any) -> int | None:
    return value if type(value) is int else None
