"""One trace of verifiers as a trajectory: its turns while it runs, or all at once."""

from __future__ import annotations

import hashlib
import os
import time
from asyncio import CancelledError
from collections.abc import Mapping
from typing import Any

import msgspec

from localtrace.record.capture import Beginning, begin_trajectory, end_trajectory
from localtrace.record.propagation import trace_id_of
from localtrace.record.recorder import Recorder
from localtrace.record.scope import Scope
from localtrace.record.signature import generation_called, tool_called
from localtrace.trainer_hooks.environment import record_this_process
from localtrace.trainer_hooks.generations import FinishedCall, put_call
from localtrace.trainer_hooks.verifiers.facts import end_of, interval_of, values_of
from localtrace.trainer_hooks.verifiers.graph import Failure, Graph, GraphCall

OP = "verifiers.generate"
_RUN_NAMES = ("PRL_RUN_ID", "VF_RUN_ID")
"""Variables in which prime-rl and verifiers name their run to all of its processes."""
_EXCLUDED = {"nodes", "calls", "state"}


def start_recording() -> None:
    """Start recording in this process, if it is asked for.

    Raises:
        CannotRecord: recording cannot start, and LOCALTRACE_REQUIRED is set.
    """
    named = next((os.environ[name] for name in _RUN_NAMES if os.environ.get(name)), None)
    record_this_process("verifiers", who="the environment", run_id=named)


class OpenTrace:
    """A trace whose trajectory has begun."""

    def __init__(
        self, recorder: Recorder, trace_id: str, beginning: Beginning, start_ns: int
    ) -> None:
        key = bytes.fromhex(trace_id_of(trace_id))
        self.trace_id = key.hex()
        self.graph = Graph()
        self._calls = 0
        """Requests to the model that were recorded."""
        self._recorder = recorder
        ago_ns = time.time_ns() - start_ns if start_ns else 0
        self._state = begin_trajectory(recorder, key, beginning, ago_ns)

    def record_calls(self, trace: Any) -> None:
        """Record the turns, and tools that they used, since the last call of this."""
        nodes, calls = trace.nodes[len(self.graph.nodes) :], trace.calls[self._calls :]
        self.graph.add(nodes)
        self._calls += len(calls)
        for one in self.graph.turns(calls):
            self._record(one)

    def end(
        self, fields: Mapping[str, Any], episode: Mapping[str, Any], error: BaseException | None
    ) -> None:
        """Record what is left of the trace, and its end.

        Args:
            fields: fields of the trace.
            episode: fields of its episode.
            error: what stopped the episode from outside; None: the trace says how it ended.
        """
        for one in self.graph.rest():
            self._record(one)
        for name, value in values_of(fields, episode, self.graph).items():
            self._state.values[name] = msgspec.Raw(self._recorder.values.encode(value))
        failure = end_of(fields)
        _, end_ns = interval_of(fields)
        ago_ns = max(0, time.time_ns() - end_ns) if end_ns else 0
        outside = error if error is not None and not fields.get("is_completed") else None
        end_trajectory(self._recorder, self._state, outside or _exception(failure), ago_ns)
        self._state.ended = True

    def _record(self, one: GraphCall) -> None:
        signature = generation_called(OP) if one.tool is None else tool_called(one.tool)
        call = FinishedCall(signature.op, one.start_ns, one.duration_ns, one.inputs, one.outputs)
        scope, span_id = Scope(self._state, None), span_id_of(self.trace_id, self._state.next_seq)
        put_call(self._recorder, signature, scope, call, _exception(one.error), span_id)


def span_id_of(trace_id: str, seq: int) -> int:
    """Return the id of a call, the same when a trace is recorded and when its file is imported."""
    digest = hashlib.sha256(f"span-{trace_id}-{seq}".encode()).digest()
    return int.from_bytes(digest[:8], "big")


def fields_of(found: Any) -> dict[str, Any]:
    """Return the fields of a trace or an episode, with the ends of requests, without messages."""
    fields: dict[str, Any] = found.model_dump(exclude={*_EXCLUDED, "traces"}, exclude_none=True)
    calls = getattr(found, "calls", None) or ()
    fields["calls"] = [
        {"error": one.error is not None, "finish_reason": one.finish_reason} for one in calls
    ]
    return fields


def _exception(failure: Failure | None) -> BaseException | None:
    """Return an exception whose text in a record is that of verifiers' own."""
    if failure is None:
        return None
    if failure.status == "cancelled":
        return CancelledError(failure.message)
    kind: type[Exception] = type(failure.type, (Exception,), {})
    return kind(failure.message)
