"""One generation as an engine saw it, recorded under the right parent.

The parent is, in this order:

1. the call that the request names, in its header or request id (`record.propagation`);
2. the call in whose context the generation runs;
3. none. Then the trace id is derived from the request id, and the generation becomes a trajectory
   of its own. With LOCALTRACE_LONE_GENERATIONS=0 it gets no trajectory, because a trainer's hook
   records those; the view `engine_calls` matches the two later.
"""

from __future__ import annotations

import os
from asyncio import CancelledError
from collections import OrderedDict
from typing import Any

from localtrace.record import active
from localtrace.record.capture import (
    Beginning,
    OpenCall,
    begin_trajectory,
    encode_inputs,
    end_trajectory,
    verdict,
)
from localtrace.record.propagation import RemoteScope, find_parent, is_generation, trace_id_of
from localtrace.record.recorder import Recorder
from localtrace.record.scope import Scope, current
from localtrace.record.signature import generation_called, tool_called
from localtrace.trainer_hooks.environment import hook_settings
from localtrace.trainer_hooks.harmless import harmless

_LONE_REMEMBERED = 65_536

_lone: OrderedDict[tuple[object, bytes], None] = OrderedDict()
"""Lone generations that already have a trajectory, as (recording process, trace id).

An engine may use a request id twice; the second generation joins the first one's trajectory."""


@harmless
def record_generation(
    op: str,
    *,
    rid: str | None = None,
    header: str | None = None,
    start_ns: int,
    duration_ns: int,
    inputs: dict[str, Any],
    outputs: dict[str, Any] | None = None,
    error: BaseException | None = None,
    cancelled: bool = False,
) -> None:
    """Record one generation. Its values are encoded before this returns. Never raises.

    Args:
        op: name of the span, such as `sglang.generate`.
        rid: the engine's request id, which may name a parent.
        header: value of the request's `localtrace-parent` header.
        start_ns: start in ns since the Unix epoch.
        duration_ns: duration in ns, from a monotonic clock.
        inputs: `prompt_ids` if known, and other inputs by name.
        outputs: `output_ids`, `output_logprobs`, `finish_reason`, `weight_version` and other
            outputs by name.
        error: the exception that ended it.
        cancelled: whether the caller went away; `outputs` then holds what existed by that time.
    """
    recorder = active.recorder
    if recorder is None:
        return
    scope = find_parent(header, rid) or current.get()
    lone = scope is None
    if scope is None:
        scope = _stand_alone(recorder, op, rid, duration_ns)
    if scope.trajectory.dropped is not None:
        return
    if cancelled and error is None:
        error = CancelledError()
    status, text = verdict(error)
    call = _call(recorder, op, scope, inputs, start_ns)
    call.put(recorder, duration_ns, status, text, outputs, is_generation(scope))
    if lone and not scope.trajectory.ended:
        end_trajectory(recorder, scope.trajectory, error)


@harmless
def record_tool(
    name: str, *, start_ns: int, duration_ns: int, inputs: dict[str, Any], outputs: Any
) -> None:
    """Record a finished call of a tool, or a step of an environment, in the current trajectory."""
    recorder, scope = active.recorder, current.get()
    if recorder is not None and scope is not None and scope.trajectory.dropped is None:
        call = OpenCall(recorder, tool_called(name), scope.trajectory, scope)
        call.inputs = encode_inputs(recorder, inputs, call.signature)
        call.start_ns = start_ns
        call.put(recorder, duration_ns, *verdict(None), outputs)


def _call(
    recorder: Recorder, op: str, scope: Scope, inputs: dict[str, Any], start_ns: int
) -> OpenCall:
    call = OpenCall(recorder, generation_called(op), scope.trajectory, scope)
    call.inputs = encode_inputs(recorder, inputs, call.signature)
    call.start_ns = start_ns
    return call


def _stand_alone(recorder: Recorder, op: str, rid: str | None, duration_ns: int) -> Scope:
    key = bytes.fromhex(trace_id_of(rid)) if rid else os.urandom(16)
    known = recorder.identity, key
    if known in _lone or not hook_settings().lone_generations:
        # A span of a trajectory that has no row, or that the first use of this id has recorded.
        lone = RemoteScope(key, 0, None, False)
        return Scope(lone.trajectory, None)
    _lone[known] = None
    while len(_lone) > _LONE_REMEMBERED:
        _lone.popitem(last=False)
    return Scope(begin_trajectory(recorder, key, Beginning(name=op), duration_ns), None)
