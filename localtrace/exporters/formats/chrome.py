"""A timeline for Perfetto or chrome://tracing, in the Trace Event Format.

Every recording process is a process of the timeline, named by host, pid and worker. A trajectory
is a slice in a row (a thread) of that process, with its calls as slices below it: turns, agents,
tools, rewards, others. Calls that overlap get further rows. Two trajectories never share a row at
the same time. Times are microseconds since the first trajectory began; `otherData.start_ns` holds
that beginning in ns since the Unix epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, BinaryIO

from localtrace.read.filters import Filters
from localtrace.types import Span, Trajectory
from localtrace.values.codec import to_json
from localtrace.values.fields import known

if TYPE_CHECKING:
    from localtrace.exporters.source import Source
    from localtrace.read.store import Store

_TEXT_MAX = 200
"""Characters of a text in the details of a slice."""
_ORDERED = f"""
select t.trace_id, t.host, t.pid, r.worker
from {Filters().relation(with_superseded=True)} as t
left join processes as r on r.writer_id = t.writer_id
where t.trace_id in (select unnest($trace_ids))
order by t.start_ns, t.trace_id
"""


def write(source: Source, file: BinaryIO) -> None:
    """Write a timeline for Perfetto or chrome://tracing.

    Each process has a row for each trajectory that ran at the same time, and slices for its calls.
    """
    workers = in_start_order(source.store, source.choice.trace_ids, source.redaction.text)
    timeline = Timeline(workers)
    file.write(timeline.begin())
    source.each(lambda trajectory: file.write(timeline.events(trajectory)), workers)
    file.write(timeline.end())


@dataclass(frozen=True, slots=True)
class Worker:
    """A process that recorded."""

    host: str | None
    pid: int | None
    name: str | None

    def __str__(self) -> str:
        parts = (self.host, None if self.pid is None else f"pid {self.pid}", self.name)
        return " ".join(part for part in parts if part) or "unknown process"


def in_start_order(
    store: Store, trace_ids: Sequence[str], redacted: Callable[[str], str]
) -> dict[str, Worker]:
    """Return the trace ids in the order in which the trajectories began, each with its process.

    Args:
        redacted: the function that redacts names of hosts and workers.
    """
    safe = cache(lambda name: None if name is None else redacted(name))
    table = store.own_sql(_ORDERED, {"trace_ids": list(trace_ids)}).to_arrow()
    return {
        row["trace_id"]: Worker(safe(row["host"]), row["pid"], safe(row["worker"]))
        for batch in table.to_batches(max_chunksize=1000)
        for row in batch.to_pylist()
    }


@dataclass(slots=True)
class Timeline:
    """The events of a timeline; trajectories must be added in the order in which they began."""

    workers: dict[str, Worker]
    """The process of every trajectory, by trace id."""
    _base_ns: int | None = None
    _pids: dict[Worker, int] = field(default_factory=dict)
    _rows: dict[int, list[int]] = field(default_factory=dict)
    """For each process id: the time (ns) until which each of its rows is taken."""

    def begin(self) -> bytes:
        """Return the bytes that precede all events."""
        return b'{"displayTimeUnit":"ms","traceEvents":['

    def events(self, trajectory: Trajectory) -> bytes:
        """Return the slices of a trajectory, and the names of processes and rows that are new."""
        separator = b",\n"
        if self._base_ns is None:
            self._base_ns = _start(trajectory)
            separator = b"\n"
        lines = [to_json(event).encode() for event in self._events(trajectory)]
        return separator + b",\n".join(lines)

    def end(self) -> bytes:
        """Return the bytes that follow all events."""
        other = {"recorded_by": "localtrace", "start_ns": str(self._base_ns or 0)}
        return b'\n],"otherData":' + to_json(other).encode() + b"}\n"

    def _events(self, trajectory: Trajectory) -> Iterator[dict[str, Any]]:
        worker = self.workers[trajectory.trace_id]
        pid = self._pids.get(worker)
        if pid is None:
            pid = self._pids[worker] = len(self._pids) + 1
            yield _meta("process_name", pid, 0, str(worker))
        start_ns = _start(trajectory)
        ends = [span.end_ns for span in trajectory.spans]
        end_ns = max([trajectory.end_ns or start_ns, *ends])
        spans = sorted(trajectory.spans, key=lambda span: (span.start_ns, -span.duration_ns))
        lanes = _lanes(spans, end_ns)
        rows = self._take(pid, max(lanes, default=0) + 1, start_ns, end_ns)
        for row in rows:
            if row.is_new:
                yield _meta("thread_name", pid, row.number, f"rollouts {row.number}")
        about = (_title(trajectory), "trajectory", _facts(trajectory))
        yield self._slice(pid, rows[0].number, start_ns, end_ns - start_ns, *about)
        for span, lane in zip(spans, lanes, strict=True):
            about = (span.op, _category(span), _details(span))
            yield self._slice(pid, rows[lane].number, span.start_ns, span.duration_ns, *about)

    def _take(self, pid: int, count: int, start_ns: int, end_ns: int) -> list[_Row]:
        """Take `count` rows of a process that are free at `start_ns`, new ones if need be."""
        taken = self._rows.setdefault(pid, [])
        free = [row for row, until_ns in enumerate(taken) if until_ns <= start_ns][:count]
        rows = [_Row(row + 1, is_new=False) for row in free]
        while len(rows) < count:
            taken.append(0)
            rows.append(_Row(len(taken), is_new=True))
        for one in rows:
            taken[one.number - 1] = end_ns
        return rows

    def _slice(
        self, pid: int, tid: int, start_ns: int, duration_ns: int, name: str, category: str,
        args: dict[str, Any],
    ) -> dict[str, Any]:  # fmt: skip
        return {
            "ph": "X",
            "name": name,
            "cat": category,
            "pid": pid,
            "tid": tid,
            "ts": (start_ns - (self._base_ns or 0)) / 1000,
            "dur": duration_ns / 1000,
            "args": args,
        }


@dataclass(frozen=True, slots=True)
class _Row:
    number: int
    """From 1."""
    is_new: bool


def _start(trajectory: Trajectory) -> int:
    return min([trajectory.start_ns, *(span.start_ns for span in trajectory.spans)])


def _lanes(spans: Sequence[Span], end_ns: int) -> list[int]:
    """Return for each call the number of its row, relative to the first row of the trajectory.

    Slices of one row have to nest, so a call goes to the first row where it either begins after
    the open slices have ended, or ends before the innermost of them. The outermost slice of row 0
    is the trajectory itself.

    Args:
        spans: the calls in the order in which they began; of two that began together, the longer
            first.
        end_ns: the end of the trajectory.
    """
    # For each row the ends of the slices that are still open, the innermost last.
    lanes = [[end_ns]]
    found = []
    for span in spans:
        for number, ends in enumerate([*lanes, []]):
            while len(ends) > (number == 0) and ends[-1] <= span.start_ns:
                ends.pop()
            if not ends or span.end_ns <= ends[-1]:
                break
        if number == len(lanes):
            lanes.append(ends)
        ends.append(span.end_ns)
        found.append(number)
    return found


def _meta(name: str, pid: int, tid: int, value: str) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": pid, "tid": tid, "args": {"name": value}}


def _title(trajectory: Trajectory) -> str:
    place = (("step", trajectory.step), ("sample", trajectory.sample_index),
             ("rollout", trajectory.rollout_n))  # fmt: skip
    named = [f"{word} {value}" for word, value in place if value is not None]
    return ", ".join(named) or trajectory.name or trajectory.trace_id[:8]


def _facts(trajectory: Trajectory) -> dict[str, Any]:
    names = ("trace_id", "run_id", "step", "sample_index", "rollout_n", "group_id", "validate",
             "agent", "data_source", "status", "error", "reward", "spans_pruned")  # fmt: skip
    facts = {name: getattr(trajectory, name) for name in names}
    outcomes = {
        outcome.name: outcome.value for outcome in trajectory.outcomes if outcome.values is None
    }
    return known({**outcomes, **facts})


def _category(span: Span) -> str:
    return "turn" if span.is_turn else span.kind


def _details(span: Span) -> dict[str, Any]:
    details: dict[str, Any] = {"status": span.status, "error": span.error, "seq": span.seq}
    if span.is_turn:
        details |= {
            "prompt_tokens": None if span.prompt_ids is None else len(span.prompt_ids),
            "output_tokens": span.generated_count,
            "finish_reason": span.finish_reason,
            "output": _short(span.output_text),
        }
    else:
        details |= {
            "inputs": _short(to_json(span.inputs)),
            "outputs": _short(to_json(span.outputs)),
        }
    return known(details)


def _short(text: str | None) -> str | None:
    return text if text is None or len(text) <= _TEXT_MAX else f"{text[:_TEXT_MAX]}…"
