"""A store in plain Python: what was recorded, in order, and what each store must answer of it.

It shares no code with localtrace. It knows in which journal each record was written, since seals
and gatherings take whole journals, and a crash cuts the last one.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

Answers = dict[str, Any]


class Place(NamedTuple):
    """What a trajectory began with."""

    run: str
    attempt: int
    step: int | None
    sample_index: str
    rollout_n: int
    group_id: str | None
    validate: bool

    @property
    def group_key(self) -> str:
        return f"sample {self.sample_index}" if self.group_id is None else f"group {self.group_id}"


class Call(NamedTuple):
    """One call; a generation has the whole prompt and the output."""

    op: str
    status: str
    prompt: tuple[int, ...] | None = None
    output: tuple[int, ...] | None = None
    cut_off: bool = False


@dataclass(frozen=True, eq=False)
class Event:
    """One record: a trajectory began (a `Place`), a call, an end, an outcome, a label, ….

    The bytes of its journal from `start` to `end` hold it.
    """

    kind: str
    trace_id: str
    value: Any
    journal: str
    start: int = 0
    end: int = 0


@dataclass
class Held:
    """What one store holds: whole journals, less the calls that were pruned."""

    journals: set[str] = field(default_factory=set)
    pruned_calls: set[Event] = field(default_factory=set)
    pruned: set[str] = field(default_factory=set)
    """Trajectories that say so."""


@dataclass
class Row:
    """A trajectory as a store shows it."""

    trace_id: str
    place: Place
    status: str
    reward: float | None
    fate: str | None
    counts: tuple[int | None, int | None]
    """Calls and turns, by the record of its end."""
    pruned: bool
    superseded: bool = False

    def shown(self) -> tuple[Any, ...]:
        flags = (self.pruned, self.superseded)
        return (*self.place, self.status, number(self.reward), self.fate, *self.counts, *flags)


def number(value: float | None) -> str | None:
    """A number that is equal to itself, also where it is NaN."""
    return None if value is None else repr(float(value))


def known(reward: float | None) -> bool:
    return reward is not None and math.isfinite(reward)


def writer_of(journal: str) -> str:
    return journal.partition("-")[0]


class Model:
    """Everything that was recorded and not lost, and what each store holds of it."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.main, self.into = Held(), Held()
        self.ended_writers: dict[str, str] = {}
        """The last journal of each writer that is gone."""
        self.torn: set[str] = set()
        """Journals that end in the middle of a record."""

    # -- what happens ------------------------------------------------------------------------

    def lose(self, journal: str, count: int) -> list[Event]:
        """Forget the last records of a journal, but not that its process began."""
        there = [e for e in self.events if e.journal == journal and e.kind != "process"]
        lost = there[len(there) - min(count, len(there)) :]
        self.events = [event for event in self.events if event not in lost]
        return lost

    def gather(self) -> None:
        new = self.main.journals - self.into.journals
        self.into.pruned_calls |= {
            event for event in self.main.pruned_calls if event.journal in new
        }
        self.into.pruned |= {
            trace_id for trace_id in self.main.pruned if self._row_journal(trace_id) in new
        }
        self.into.journals |= new

    def prune(
        self,
        held: Held,
        considered: Collection[str],
        keep: Collection[str],
        keep_every: int | None,
    ) -> set[str]:
        """Take the calls of groups away of which nothing has to stay; return the trajectories."""
        rows, calls = self.rows(held), self._calls(held)
        kept = {row.trace_id for row in rows.values() if self._keeps(row, keep, held, calls)}
        if "extremes=1" in keep:
            kept |= _extremes(rows.values())
        groups: dict[Any, list[Row]] = defaultdict(list)
        for row in rows.values():
            p = row.place
            groups[p.run, p.attempt, p.validate, p.step, p.group_key].append(row)
        gone = set()
        for (_, _, _, step, _), members in groups.items():
            ids = {row.trace_id for row in members}
            is_stride = keep_every is not None and (step is None or step % keep_every == 0)
            if (
                ids <= set(considered)
                and not ids & kept
                and not is_stride
                and all(self._is_sealed(trace_id, held) for trace_id in ids)
            ):
                gone |= {trace_id for trace_id in ids if calls[trace_id]}
        held.pruned |= gone
        held.pruned_calls |= {call for trace_id in gone for call in calls[trace_id]}
        return gone

    def _keeps(
        self, row: Row, keep: Collection[str], held: Held, calls: Mapping[str, list[Event]]
    ) -> bool:
        made: list[Call] = [event.value for event in calls[row.trace_id]]
        failed = row.status != "ok" or any(call.status != "ok" for call in made)
        labelled = any(label[0] == row.trace_id for label in self.labels(held))
        return (
            ("errors" in keep and failed)
            or ("truncated" in keep and any(call.cut_off for call in made))
            or ("labelled" in keep and labelled)
            or (f"panel={row.place.sample_index}" in keep)
        )

    # -- what is there ------------------------------------------------------------------------

    def visible(self, held: Held) -> list[Event]:
        """The records of a store: in its own, also those of journals that are not sealed."""
        return [
            event
            for event in self.events
            if (held is self.main or event.journal in held.journals)
            and event not in held.pruned_calls
        ]

    def _calls(self, held: Held) -> dict[str, list[Event]]:
        calls = defaultdict(list)
        for event in self.visible(held):
            if event.kind == "call":
                calls[event.trace_id].append(event)
        return calls

    def count_calls(self, held: Held) -> int:
        return sum(map(len, self._calls(held).values()))

    def _row_journal(self, trace_id: str) -> str | None:
        """The journal whose seal gives a trajectory its row; None: its writer goes on."""
        begun = next(e for e in self.events if (e.kind, e.trace_id) == ("begun", trace_id))
        for event in self.events:
            if (event.kind, event.trace_id) == ("ended", trace_id):
                return event.journal
        return self.ended_writers.get(writer_of(begun.journal))

    def _is_sealed(self, trace_id: str, held: Held) -> bool:
        journals = {e.journal for e in self.visible(held)
                    if (e.kind, e.trace_id) == ("call", trace_id)}  # fmt: skip
        return {self._row_journal(trace_id), *journals} <= held.journals

    def rows(self, held: Held) -> dict[str, Row]:
        newest = self.outcomes(held)
        ends = {e.trace_id: e.value for e in self.events if e.kind == "ended"}
        rows = {}
        for event in self.events:
            trace_id, journal = event.trace_id, None
            if event.kind != "begun":
                continue
            journal = self._row_journal(trace_id)
            if held is not self.main and journal not in held.journals:
                continue
            status, reward, counts = "running" if journal is None else "interrupted", None, None
            if trace_id in ends:
                status, reward, counts = ends[trace_id]
            rows[trace_id] = Row(
                trace_id, event.value, status, newest.get((trace_id, "reward"), reward),
                newest.get((trace_id, "fate")), counts or (None, None), trace_id in held.pruned,
            )  # fmt: skip
        for row in rows.values():
            row.superseded = any(_redoes(other.place, row.place) for other in rows.values())
        return rows

    def outcomes(self, held: Held) -> dict[tuple[str, str], Any]:
        """The newest value by trajectory and name."""
        events = [event for event in self.visible(held) if event.kind == "outcome"]
        return {(i, name): value for event in events for i, name, value in event.value}

    def labels(self, held: Held) -> dict[tuple[str, ...], Any]:
        """Tags, ratings and comments by trajectory and person that were not taken away."""
        newest = {}
        for event in self.visible(held):
            if event.kind == "label":
                who, name, value = event.value
                if name == "tag":
                    newest[event.trace_id, who, "tag", value.lstrip("-")] = value[0] != "-"
                else:
                    newest[event.trace_id, who, name] = value
        return {key: value for key, value in newest.items() if value not in ("", False)}

    def find(
        self,
        held: Held,
        *,
        step: int | None = None,
        above: float | None = None,
        below: float | None = None,
        run: str | None = None,
        superseded: bool | None = None,
    ) -> list[Row]:
        return [
            row
            for row in self.rows(held).values()
            if (step is None or row.place.step == step)
            and (above is None or (known(row.reward) and row.reward > above))  # type: ignore[operator]
            and (below is None or (known(row.reward) and row.reward < below))  # type: ignore[operator]
            and (run is None or row.place.run == run)
            and (superseded is None or row.superseded == superseded)
        ]

    def answers(self, held: Held, only: Iterable[str] | None = None) -> Answers:
        """All that is asked of a store, or of a bundle of some trajectories of it."""
        rows, calls = self.rows(held), self._calls(held)
        ids = set(rows) if only is None else set(only)
        runs = {rows[trace_id].place.run for trace_id in ids}
        of_all = only is None
        if not of_all:  # rows are superseded only by those that are there
            rows = {trace_id: row for trace_id, row in rows.items() if trace_id in ids}
            for row in rows.values():
                row.superseded = any(_redoes(other.place, row.place) for other in rows.values())
        return {
            "trajectories": {trace_id: row.shown() for trace_id, row in rows.items()},
            "calls": {i: [call.value[:4] for call in calls[i]] for i in rows},
            "outcomes": {
                key: number(value) if isinstance(value, float) else value
                for key, value in self.outcomes(held).items()
                if of_all or key[0] in ids
            },
            "labels": {
                key: value for key, value in self.labels(held).items() if of_all or key[0] in ids
            },
            "groups": _groups(rows.values()),
            "processes": self._processes(held, None if of_all else runs),
        }

    def _processes(self, held: Held, runs: Collection[Any] | None) -> dict[Any, list[int]]:
        counts: dict[Any, list[int]] = defaultdict(lambda: [0, 0])
        for event in self.visible(held):
            if event.kind == "process" and (runs is None or event.value[0] in runs):
                counts[event.value[:2]][event.value[2] == "end"] += 1
        return dict(counts)


def _redoes(later: Place, earlier: Place) -> bool:
    """Whether a newer attempt of a run did the step of an older one again, or one before it."""
    return (
        (later.run, later.validate) == (earlier.run, earlier.validate)
        and later.attempt > earlier.attempt
        and None not in (later.step, earlier.step)
        and later.step <= earlier.step  # type: ignore[operator]
    )


def _extremes(rows: Iterable[Row]) -> set[str]:
    """The best and the worst of each step."""
    steps: dict[Any, list[tuple[float, str]]] = defaultdict(list)
    for row in rows:
        p = row.place
        if p.step is not None and row.reward is not None and math.isfinite(row.reward):
            steps[p.run, p.attempt, p.step, p.validate].append((row.reward, row.trace_id))
    return {trace_id for step in steps.values() for _, trace_id in (min(step), max(step))}


def _groups(rows: Iterable[Row]) -> dict[Any, Any]:
    groups = defaultdict(list)
    for row in rows:
        if not row.superseded and row.fate != "baseline":
            p = row.place
            groups[p.run, p.step, p.validate, p.group_key].append(row.reward)
    answer = {}
    for key, rewards in groups.items():
        finite = [reward for reward in rewards if reward is not None and math.isfinite(reward)]
        mean = sum(finite) / len(finite) if finite else None
        answer[key] = (len(rewards), len(finite), number(mean))
    return answer
