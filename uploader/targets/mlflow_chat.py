"""Chat attributes for spans at MLflow, beside what live tracing would have written.

Only attributes are added, and types named that live tracing leaves open. Where the trace had
neither inputs nor outputs, it gets the prompt and the answer with the reward, which MLflow lists.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from opentelemetry.proto.trace.v1.trace_pb2 import Span as OtlpSpan

from localtrace.types import Span, Trajectory
from localtrace.uploader.targets import otlp_values
from localtrace.uploader.transcripts import Chat, Message, Transcript

_INPUTS, _OUTPUTS, _TYPE = "mlflow.spanInputs", "mlflow.spanOutputs", "mlflow.spanType"


def read_root(root: OtlpSpan, trajectory: Trajectory, transcript: Transcript) -> None:
    """Add the conversation, the prompt, and the answer with the reward."""
    values: dict[str, Any] = {}
    if transcript.conversation:
        values["mlflow.chat.messages"] = list(map(_shown, transcript.conversation))
    present = {attribute.key for attribute in root.attributes}
    if _INPUTS not in present and transcript.prompt is not None:
        is_known = isinstance(transcript.prompt, list)
        values[_INPUTS] = {"messages" if is_known else "prompt": transcript.prompt}
    if _OUTPUTS not in present and transcript.answer is not None:
        values[_OUTPUTS] = {"answer": transcript.answer} | _reward(trajectory.reward)
    _add(root, values, "AGENT")


def read_call(shown: OtlpSpan, span: Span, transcript: Transcript) -> None:
    """Add the messages, tools and model of a turn."""
    chat = transcript.chats.get(span.span_id)
    values = {} if chat is None else _chat(chat)
    _add(shown, values, "CHAIN")


def _chat(chat: Chat) -> dict[str, Any]:
    said = [] if chat.said is None else [chat.said]
    values: dict[str, Any] = {}
    if messages := [*chat.given, *said]:
        values["mlflow.chat.messages"] = list(map(_shown, messages))
    if tools := [tool for tool in chat.tools if _is_tool(tool)]:
        values["mlflow.chat.tools"] = tools
    if chat.usage is not None:
        read, made = chat.usage
        total = {"input_tokens": read, "output_tokens": made, "total_tokens": read + made}
        values["mlflow.chat.tokenUsage"] = total
    if chat.model is not None:
        values["mlflow.llm.model"] = otlp_values.utf8(chat.model)
    return values


def _shown(message: Message) -> Message:
    """Return a message with its reasoning under the name that MLflow's page reads."""
    rest = {name: value for name, value in message.items() if name != "reasoning_content"}
    thought = message.get("reasoning_content")
    return rest if thought is None else rest | {"reasoning": thought}


def _is_tool(tool: Any) -> bool:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    return isinstance(function, Mapping) and isinstance(function.get("name"), str)


def _reward(reward: float | None) -> dict[str, Any]:
    if reward is None:
        return {}
    return {"reward": reward if math.isfinite(reward) else str(reward)}


def _add(shown: OtlpSpan, values: dict[str, Any], usual_type: str) -> None:
    for attribute in shown.attributes:
        if attribute.key == _TYPE and attribute.value.string_value == "UNKNOWN":
            attribute.value.string_value = usual_type
    otlp_values.put(shown, values)
