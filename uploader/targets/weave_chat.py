"""Prompt, answer and messages for calls at Weave, beside what live tracing would have written.

The root's arguments and result, which live tracing lacks, are the prompt and the answer. The
messages of turns are in `attributes.localtrace.chat`, so that arguments and results stay those of
the call.
"""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from localtrace.types import Span, Trajectory
from localtrace.uploader.targets.weave_call import Call
from localtrace.uploader.targets.weave_values import plain, text
from localtrace.uploader.transcripts import Transcript

NAME_MAX_CHARS = 1024
"""Longest display name that Weave takes."""


def read_root(root: Call, trajectory: Trajectory, transcript: Transcript, *, is_lone: bool) -> Call:
    """Return the trajectory's call with its prompt and answer, unless it has its own."""
    facts = {
        "step": trajectory.step, "sample": trajectory.sample_index, "rollout": trajectory.rollout_n,
    }  # fmt: skip
    named = [f"{name} {value}" for name, value in facts.items() if value is not None]
    shown = text(", ".join(named))[:NAME_MAX_CHARS] or None
    root = replace(root, display_name=shown, attributes=_of_kind(root.attributes, "agent"))
    if is_lone or transcript.prompt is None:
        return root
    is_known = isinstance(transcript.prompt, list)
    prompt = {"messages" if is_known else "prompt": plain(transcript.prompt)}
    answer = {"answer": plain(transcript.answer)}
    return replace(root, inputs=prompt, output=answer | root.output)


def read_call(call: Call, span: Span, transcript: Transcript, number: int | None) -> Call:
    """Return a turn's call with its messages and its number; other calls as they are."""
    chat = transcript.chats.get(span.span_id)
    if chat is None:
        return call
    said = [] if chat.said is None else [chat.said]
    facts = call.attributes["localtrace"]
    if messages := [*chat.given, *said]:
        facts = facts | {"chat": plain(messages)}
    shown = text(f"{span.op}, turn {number}")[:NAME_MAX_CHARS]
    return replace(call, display_name=shown, attributes=call.attributes | {"localtrace": facts})


def _of_kind(attributes: dict[str, Any], kind: str) -> dict[str, Any]:
    return attributes if "weave" in attributes else attributes | {"weave": {"kind": kind}}
