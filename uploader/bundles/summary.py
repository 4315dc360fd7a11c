"""The page for people who inspect a bundle before it leaves, made from the bag's own files."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from localtrace.errors import MissingDependency
from localtrace.schema import TABLES
from localtrace.store.bundle import TEXTS_FILE, TRACE_IDS_FILE, Bag
from localtrace.terminal import escape

if TYPE_CHECKING:
    from jinja2 import Template

_RUNS_SHOWN = 20
_STEPS_SHOWN = 100
_CALLS_SHOWN = 6
_TEXT_SHOWN = 600
_RUN_COLUMNS = ["run_id", "attempt", "project", "experiment", "time_ns", "host", "command"]


def summary_page(bag: Bag) -> str:
    """Render the page as HTML. It loads nothing, and shows hostile text as plain text.

    Raises:
        MissingDependency: jinja2 is not installed.
    """
    runs, steps = _runs(bag), _steps(bag)
    return template().render(
        info=bag.info,
        runs=runs[:_RUNS_SHOWN],
        runs_more=max(0, len(runs) - _RUNS_SHOWN),
        steps=steps[:_STEPS_SHOWN],
        steps_more=max(0, len(steps) - _STEPS_SHOWN),
        tables=[(name, bag.info.counts.get(name, 0), *_sizes(bag, name)) for name in TABLES],
        calls=list(_calls(bag)),
        tokenizers=sum(name.endswith("/tokenizer.json") for name in bag.files),
        texts_file=TEXTS_FILE,
        trace_ids_file=TRACE_IDS_FILE,
    )


@cache
def template() -> Template:
    """Return the page's template, compiled once: that takes longer than a small bag."""
    try:
        from jinja2 import Environment, StrictUndefined
    except ImportError:
        raise MissingDependency.for_extra("jinja2", "bundle") from None
    page = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    page.filters["shown"] = lambda value: escape(str(value))[:_TEXT_SHOWN]
    return page.from_string(Path(__file__).with_name("summary.html").read_text("utf-8"))


def _sizes(bag: Bag, table: str) -> tuple[int, int]:
    sizes = [path.stat().st_size for path in bag.table_files(table)]
    return len(sizes), sum(sizes)


def _read(bag: Bag, table: str, columns: list[str]) -> pa.Table:
    empty = TABLES[table].arrow().empty_table().select(columns)
    files = [pq.read_table(path, columns=columns) for path in bag.table_files(table)]
    return pa.concat_tables([empty, *files])


def _runs(bag: Bag) -> list[dict[str, Any]]:
    runs: dict[tuple[str, int], dict[str, Any]] = {}
    for row in _read(bag, "runs", _RUN_COLUMNS).to_pylist():
        run = runs.setdefault((row["run_id"], row["attempt"]), row)
        run["command"] = run["command"] or row["command"]
    for run in runs.values():
        run["started"] = datetime.fromtimestamp(run["time_ns"] // 10**9, UTC).isoformat()
    return [runs[key] for key in sorted(runs)]


def _steps(bag: Bag) -> list[dict[str, Any]]:
    rows = _read(bag, "trajectories", ["experiment", "step", "reward", "trace_id"])
    is_finite = pc.is_finite(rows["reward"])  # null where there is no reward
    finite = pc.if_else(is_finite, rows["reward"], None)
    rows = rows.set_column(2, "reward", finite)
    rows = rows.append_column("not_finite", pc.invert(is_finite).cast(pa.int64()))
    grouped = rows.group_by(["experiment", "step"], use_threads=False).aggregate(
        [("trace_id", "count"), ("reward", "mean"), ("not_finite", "sum")]
    )
    ordered = grouped.sort_by([("experiment", "ascending"), ("step", "ascending")])
    steps: list[dict[str, Any]] = ordered.to_pylist()
    return steps


def _calls(bag: Bag) -> Iterator[dict[str, Any]]:
    """Yield the first calls, with all their texts."""
    with gzip.open(bag.data / TEXTS_FILE) as lines:
        for number, line in enumerate(lines):
            if number >= _CALLS_SHOWN:
                break
            fields = msgspec.json.decode(line, type=dict[str, msgspec.Raw])
            yield {name: _as_text(bytes(value)) for name, value in fields.items()}


def _as_text(value: bytes) -> str:
    return msgspec.json.decode(value, type=str) if value.startswith(b'"') else value.decode()
