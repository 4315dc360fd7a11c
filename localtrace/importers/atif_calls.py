"""The calls of one ATIF document: its turns, each after the messages before it, and its tools."""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any

from localtrace.importers.atif_document import Document, Metrics, Result, Step, ToolCall
from localtrace.importers.imported_rollouts import (
    MESSAGE_BYTES,
    REPEATED_MAX_BYTES,
    CallIn,
    derived_span_id,
)
from localtrace.importers.lines import BadLine
from localtrace.importers.times import is_time, parsed_ns
from localtrace.store.journal.records import STATUSES
from localtrace.values.fields import Fields, known
from localtrace.values.tagged_json import from_tagged

OP = "atif.step"
_USAGE = ("prompt_tokens", "completion_tokens", "cached_tokens", "cost_usd", "extra")
_HOLD_ANSWERS = {"choices", "message"}
"""Fields of recorded outputs that hold the whole answer."""
_SPAN_ID = re.compile(r"[0-9a-f]{16}")
_ENDED = STATUSES[:-1]
_REFERENCES = "references to trajectories of subagents: those in their document name it themselves"


class Calls:
    """The calls of one document, made step by step.

    Args:
        time_ns: the time of steps before the first that says its own.
        left_out: counts of what the calls do not hold.
        is_own: whether localtrace wrote the document, so that extras hold what was recorded.

    Raises:
        BadLine: a time is none, or the messages of all turns are too large together.
    """

    def __init__(
        self, document: Document, trace_id: str, time_ns: int, left_out: Counter[str], *,
        is_own: bool,
    ) -> None:  # fmt: skip
        self.made: list[CallIn] = []
        self._trace_id = trace_id
        self._agent = document.agent
        self._left_out = left_out
        self._is_own = is_own
        self._span_ids: set[int] = set()
        self._messages: list[Any] = []
        self._sizes_bytes = self._repeated_bytes = 0
        for step in document.steps:
            time_ns = time_ns if step.timestamp is None else parsed_ns(step.timestamp)
            self._add_step(step, time_ns)

    def _add_step(self, step: Step, time_ns: int) -> None:
        extra = self._extra(step.extra)
        if step.source != "agent":
            role = extra.get("role")
            self._say({
                "role": role if isinstance(role, str) else step.source,
                "content": step.message, **self._of_message(extra),
            })  # fmt: skip
        else:
            if step.is_turn:
                self._add_turn(step, extra, time_ns)
            said = {"role": "assistant", **self._said(step, extra)}
            again = extra.get("repeated") if self._is_own else None
            self._say(again if isinstance(again, dict) else said | self._of_message(extra))
        if not self._is_own and not step.is_turn:
            self._left_out["extras of steps that are no turn"] += step.extra is not None
            self._left_out["metrics of copied steps"] += step.metrics is not None
        self._add_answers(step, time_ns)

    def _add_turn(self, step: Step, extra: Fields, time_ns: int) -> None:
        metrics = step.metrics or Metrics()
        messages = extra.get("messages") if self._is_own else None
        if isinstance(messages, list):
            self._messages, self._sizes_bytes = [], 0
            for message in messages:
                self._say(message)
        self._repeated_bytes += self._sizes_bytes
        if self._repeated_bytes > REPEATED_MAX_BYTES:
            raise BadLine(
                f"its turns repeat more than {REPEATED_MAX_BYTES // 2**30} GiB of messages"
            )
        given: Fields = {
            "messages": list(self._messages) or None, "prompt_ids": metrics.prompt_token_ids,
            "reasoning_effort": step.reasoning_effort,
        }  # fmt: skip
        ids = {"output_ids": metrics.completion_token_ids, "output_logprobs": metrics.logprobs}
        said = self._said(step, extra) | {"finish_reason": extra.get("finish_reason")}
        if self._is_own:
            given |= _fields(extra.get("inputs"))
            recorded = _fields(extra.get("outputs"))
            said = {**({} if recorded.keys() & _HOLD_ANSWERS else said), **recorded}
        else:
            usage = known({name: getattr(metrics, name) for name in _USAGE})
            given["tools"] = self._agent.tool_definitions
            said |= {
                "model": step.model_name or self._agent.model_name, "usage": usage or None,
                "llm_call_count": step.llm_call_count if step.llm_call_count != 1 else None,
                "extra": extra or None,
            }  # fmt: skip
        op = extra.get("op") if self._is_own else None
        self._add(
            op if isinstance(op, str) else OP, time_ns, extra,
            inputs=known(given), outputs=known(said | ids),
        )  # fmt: skip

    def _add_answers(self, step: Step, time_ns: int) -> None:
        """Add the messages of tools, and the calls that they answer."""
        asked = {call.tool_call_id: call for call in step.tool_calls or ()}
        for result in step.observation.results if step.observation else ():
            call = asked.get(result.source_call_id or "")
            extra = self._extra(result.extra)
            self._left_out[_REFERENCES] += len(result.subagent_trajectory_ref or ())
            if not (self._is_own and extra.get("is_message") is False):
                self._say(self._answer(result, call, extra))
            if self._is_own:
                if "span_id" in extra:
                    self._add_recorded(result, extra, time_ns)
                continue
            self._left_out["extras of observations"] += result.extra is not None
            if call is not None:
                self._left_out["extras of tool calls"] += call.extra is not None
                self._add(
                    call.function_name, time_ns, {},
                    inputs=call.arguments, outputs=result.content, takes_prompt=False, kind="tool",
                )  # fmt: skip

    def _answer(self, result: Result, call: ToolCall | None, extra: Fields) -> Fields:
        call_id = result.source_call_id if call is None else self._call_id(call)
        role = extra.get("role") if self._is_own else None
        message = {
            "role": role if isinstance(role, str) else "tool",
            "tool_call_id": call_id, "content": result.content,
        }  # fmt: skip
        return known(message) | self._of_message(extra)

    def _add_recorded(self, result: Result, extra: Fields, time_ns: int) -> None:
        """Add a tool's call that localtrace recorded."""
        op = extra.get("op")
        outputs = extra.get("outputs", result.content)
        status = extra.get("status", "ok")
        self._add(
            op if isinstance(op, str) else OP, time_ns, extra, inputs=_fields(extra.get("inputs")),
            outputs=outputs if status == "ok" else None, takes_prompt=False, kind="tool",
        )  # fmt: skip

    def _add(self, op: str, time_ns: int, extra: Fields, **fields: Any) -> None:
        seq = len(self.made)
        given = extra if self._is_own else {}
        span_id = _hex_id(given.get("span_id"))
        if span_id is None or span_id in self._span_ids:
            span_id = derived_span_id("span", self._trace_id, str(seq))
        parent_id = _hex_id(given.get("parent_id"))
        status, error = given.get("status"), given.get("error")
        start_ns, duration_ns = given.get("start_ns"), given.get("duration_ns")
        self.made.append(
            CallIn(
                span_id=span_id,
                op=op,
                seq=seq,
                parent_id=parent_id if parent_id in self._span_ids else None,
                start_ns=start_ns if is_time(start_ns) else time_ns,
                duration_ns=duration_ns if is_time(duration_ns) else 0,
                status=status if status in _ENDED else "ok",
                error=error if isinstance(error, str) else None,
                **fields,
            )
        )
        self._span_ids.add(span_id)

    def _said(self, step: Step, extra: Fields) -> Fields:
        """Return what the agent said; calls of tools as recorded, if they were."""
        said = {"content": step.message, "reasoning_content": step.reasoning_content}
        calls = [
            {"id": self._call_id(call), "type": "function",
             "function": {"name": call.function_name, "arguments": self._arguments(call)}}
            for call in step.tool_calls or ()
        ]  # fmt: skip
        recorded = _fields(extra.get("outputs")).get("tool_calls") if self._is_own else None
        return known(said | {"tool_calls": recorded or calls or None})

    def _call_id(self, call: ToolCall) -> str:
        own_id = self._extra(call.extra).get("id") if self._is_own else None
        return own_id if isinstance(own_id, str) else call.tool_call_id

    def _arguments(self, call: ToolCall) -> Any:
        own = self._extra(call.extra) if self._is_own else {}
        return own.get("arguments", call.arguments)

    def _of_message(self, extra: Fields) -> Fields:
        """Return the fields of a recorded message that stand in an extra."""
        if not self._is_own:
            return {}
        given = {name: extra.get(name) for name in ("content", "tool_call_id")}
        return _fields(extra.get("message")) | known(given)

    def _extra(self, extra: Fields | None) -> Fields:
        return _fields(from_tagged(extra)) if self._is_own else extra or {}

    def _say(self, message: Any) -> None:
        """Add a message to the prompts of the turns that follow."""
        self._messages.append(message)
        self._sizes_bytes += MESSAGE_BYTES + len(json.dumps(message, default=str))


def _hex_id(value: Any) -> int | None:
    return int(value, 16) if isinstance(value, str) and _SPAN_ID.fullmatch(value) else None


def _fields(value: Any) -> Fields:
    return value if isinstance(value, dict) else {}
