"""Queries that an upload makes about the calls in a Weave project."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec

from localtrace.errors import UploadError
from localtrace.uploader.targets import Entry, Place, in_batches
from localtrace.uploader.targets.http import HttpSession, Refused

IDS_MAX = 1000
"""Most ids in one filter."""
ANSWER_MAX_CALLS = 40_000
"""Most calls in one answer, at some 600 bytes each."""
ROOTS_MAX = 100
"""Most roots in one answer, which has their attributes; these may be long."""
_QUERY = "/calls/stream_query"

T = TypeVar("T")


class _CallId(msgspec.Struct):
    id: str
    trace_id: str


class Facts(msgspec.Struct):
    """Facts with which localtrace identifies a record."""

    trace_id: str = ""
    digest: str = ""
    call_digests: str = ""
    ids_from: str = ""
    span_count: int = 0


class _Attributes(msgspec.Struct):
    localtrace: Facts = msgspec.field(default_factory=Facts)


class Root(msgspec.Struct):
    """The root call of a trajectory."""

    id: str
    attributes: _Attributes = msgspec.field(default_factory=_Attributes)

    @property
    def facts(self) -> Facts:
        """Facts that identify the record."""
        return self.attributes.localtrace


class Reading:
    """Queries for calls at one server."""

    def __init__(self, http: HttpSession, refusal: Callable[[Place, Refused], UploadError]) -> None:
        """Prepare, without a request.

        Args:
            refusal: returns the error to raise if the server refuses to list a project's calls.
        """
        self._http = http
        self._refusal = refusal

    def is_empty(self, place: Place) -> bool:
        """Return whether the project has no call at all."""
        return not self._calls(place, _CallId, ["id", "trace_id"], limit=1)

    def ids(self, entries: Sequence[Entry]) -> defaultdict[str, set[str]]:
        """Return the ids of the calls that are there, by the trajectory's id at Weave."""
        found: defaultdict[str, set[str]] = defaultdict(set)
        columns = ["id", "trace_id"]
        for call in self._calls(entries[0].place, _CallId, columns, filter=_traces(entries)):
            found[call.trace_id].add(call.id)
        return found

    def roots(self, entries: Sequence[Entry]) -> dict[str, Root]:
        """Return the trajectories' root calls that are there, by id."""
        found: dict[str, Root] = {}
        for start in range(0, len(entries), ROOTS_MAX):
            part = entries[start : start + ROOTS_MAX]
            roots = {"call_ids": [entry.remote_id for entry in part]}
            answer = self._calls(part[0].place, Root, ["id", "attributes"], filter=roots)
            found |= {root.id: root for root in answer}
        return found

    def holds_run(self, place: Place, run_id: str) -> bool:
        """Return whether any trajectory of a run is there, under any id."""
        query = _where("$eq", "run_id", {"$literal": run_id})
        return bool(self._roots_where(place, query, limit=1))

    def roots_of(self, place: Place, trace_ids: Sequence[str]) -> Iterator[Root]:
        """Yield the root calls of trajectories, under any ids, ordered by id in each query."""
        for start in range(0, len(trace_ids), ROOTS_MAX):
            part = [{"$literal": trace_id} for trace_id in trace_ids[start : start + ROOTS_MAX]]
            found = self._roots_where(place, _where("$in", "trace_id", part))
            yield from sorted(found, key=lambda root: root.id)

    @contextmanager
    def _listing(self, place: Place) -> Iterator[None]:
        try:
            yield
        except Refused as error:
            # The records are not at fault, so the upload ends instead of rejecting them.
            raise self._refusal(place, error) from error

    def _roots_where(self, place: Place, query: dict[str, Any], **limit: int) -> list[Root]:
        roots = {"trace_roots_only": True}
        return self._calls(place, Root, ["id", "attributes"], filter=roots, query=query, **limit)

    def _calls(self, place: Place, kind: type[T], columns: list[str], **query: Any) -> list[T]:
        query |= {"project_id": place.experiment, "columns": columns, "latest_only": True}
        with self._listing(place):
            return self._http.ask_lines(kind, "POST", _QUERY, json=query)


def askable(entries: Sequence[Entry]) -> Iterator[Sequence[Entry]]:
    """Yield the entries in parts, each for one answer."""
    return in_batches(entries, lambda entry: entry.span_count, IDS_MAX, ANSWER_MAX_CALLS)


def _traces(entries: Sequence[Entry]) -> dict[str, list[str]]:
    return {"trace_ids": [entry.remote_id for entry in entries]}


def _where(operator: str, fact: str, value: Any) -> dict[str, Any]:
    """Return a condition on a fact under `attributes.localtrace` of a root call."""
    return {"$expr": {operator: [{"$getField": f"attributes.localtrace.{fact}"}, value]}}
