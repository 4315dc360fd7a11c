"""The calls of one ATIF document: its turns, each after the messages before it, and its tools."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from localtrace.importers.atif_document import Document, Metrics, Result, Step
from localtrace.importers.imported_rollouts import (
    MESSAGE_BYTES,
    REPEATED_MAX_BYTES,
    CallIn,
    derived_span_id,
)
from localtrace.importers.lines import BadLine
from localtrace.importers.times import parsed_ns
from localtrace.values.fields import Fields, known

OP = "atif.step"
_USAGE = ("prompt_tokens", "completion_tokens", "cached_tokens", "cost_usd", "extra")
_REFERENCES = "references to trajectories of subagents: those in their document name it themselves"


class Calls:
    """The calls of one document, made step by step.

    Args:
        time_ns: the time of steps before the first that says its own.
        left_out: counts of what the calls do not hold.

    Raises:
        BadLine: a time is none, or the messages of all turns are too large together.
    """

    def __init__(
        self, document: Document, trace_id: str, time_ns: int, left_out: Counter[str]
    ) -> None:
        self.made: list[CallIn] = []
        self._trace_id = trace_id
        self._agent = document.agent
        self._left_out = left_out
        self._messages: list[Any] = []
        self._size_bytes = self._repeated_bytes = 0
        for step in document.steps:
            time_ns = time_ns if step.timestamp is None else parsed_ns(step.timestamp)
            self._add_step(step, time_ns)

    def _add_step(self, step: Step, time_ns: int) -> None:
        if step.source != "agent":
            role = (step.extra or {}).get("role", step.source)
            self._add_message({"role": role, "content": step.message})
        else:
            answer = _answer(step)
            if step.is_turn:
                self._add_turn(step, answer, time_ns)
            self._add_message({"role": "assistant", **answer})
        if not step.is_turn:
            self._left_out["extras of steps that are no turn"] += step.extra is not None
            self._left_out["metrics of copied steps"] += step.metrics is not None
        self._add_results(step, time_ns)

    def _add_turn(self, step: Step, answer: Fields, time_ns: int) -> None:
        metrics, extra = step.metrics or Metrics(), dict(step.extra or {})
        self._repeated_bytes += self._size_bytes
        if self._repeated_bytes > REPEATED_MAX_BYTES:
            raise BadLine(
                f"its turns repeat more than {REPEATED_MAX_BYTES // 2**30} GiB of messages"
            )
        inputs: Fields = {
            "messages": list(self._messages) or None,
            "prompt_ids": metrics.prompt_token_ids,
            "reasoning_effort": step.reasoning_effort,
            "tools": self._agent.tool_definitions,
        }
        outputs = answer | {
            "finish_reason": extra.pop("finish_reason", None),
            "output_ids": metrics.completion_token_ids,
            "output_logprobs": metrics.logprobs,
            "model": step.model_name or self._agent.model_name,
            "usage": known({name: getattr(metrics, name) for name in _USAGE}) or None,
            "llm_call_count": step.llm_call_count if step.llm_call_count != 1 else None,
            "extra": extra or None,
        }
        self._add(OP, time_ns, inputs=known(inputs), outputs=known(outputs))

    def _add_results(self, step: Step, time_ns: int) -> None:
        """Add the messages of tools, and the calls that they answer."""
        calls = {call.tool_call_id: call for call in step.tool_calls or ()}
        for result in step.observation.results if step.observation else ():
            call = calls.get(result.source_call_id or "")
            self._left_out[_REFERENCES] += len(result.subagent_trajectory_ref or ())
            self._left_out["extras of observations"] += result.extra is not None
            self._add_message(_tool_message(result))
            if call is not None:
                self._left_out["extras of tool calls"] += call.extra is not None
                self._add(
                    call.function_name, time_ns,
                    inputs=call.arguments, outputs=result.content, takes_prompt=False, kind="tool",
                )  # fmt: skip

    def _add(self, op: str, time_ns: int, **fields: Any) -> None:
        seq = len(self.made)
        span_id = derived_span_id("span", self._trace_id, str(seq))
        self.made.append(
            CallIn(span_id=span_id, op=op, seq=seq, start_ns=time_ns, duration_ns=0, **fields)
        )

    def _add_message(self, message: Any) -> None:
        """Add a message to the prompts of the turns that follow."""
        self._messages.append(message)
        self._size_bytes += MESSAGE_BYTES + len(json.dumps(message, default=str))


def _answer(step: Step) -> Fields:
    """Return what the agent said."""
    calls = [
        {"id": call.tool_call_id, "type": "function",
         "function": {"name": call.function_name, "arguments": call.arguments}}
        for call in step.tool_calls or ()
    ]  # fmt: skip
    answer = {"content": step.message, "reasoning_content": step.reasoning_content}
    return known(answer | {"tool_calls": calls or None})


def _tool_message(result: Result) -> Fields:
    call_id = result.source_call_id
    return known({"role": "tool", "tool_call_id": call_id, "content": result.content})
