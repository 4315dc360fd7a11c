"""Turns recorded after they were generated, such as those of a batch."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from localtrace.record import active
from localtrace.record.capture import begin_call, encode_inputs
from localtrace.record.signature import generation_called
from localtrace.values.fields import known
from localtrace.values.objects import mapped


def record_turn(
    output: Any,
    *,
    prompt_ids: Any = None,
    messages: Any = None,
    prompt: str | None = None,
    inputs: Mapping[str, Any] | None = None,
    name: str = "generate",
    start_ns: int | None = None,
    duration_ns: int = 0,
) -> None:
    """Record one model generation that was made elsewhere, such as one of a batch.

    It becomes a turn of the running trajectory, as if it had been generated there alone. Do not
    decorate the function that generated the batch, or its turns are counted twice. Never raises,
    and does nothing before `init`.

    Args:
        output: the generation: a dict or an object as an `op` may return it, a text, or a list of
            token ids.
        prompt_ids: the prompt as token ids.
        messages: the prompt as a list of messages.
        prompt: the prompt as text.
        inputs: more arguments by name, such as sampling parameters.
        name: name of the span.
        start_ns: when the generation began, ns since the Unix epoch; by default it ended now.
        duration_ns: how long it took.
    """
    recorder = active.recorder
    if recorder is None:
        return
    try:
        signature = generation_called(recorder.values.as_text(name) or "generate")
        prompts = {"prompt_ids": prompt_ids, "messages": messages, "prompt": prompt}
        arguments = known(prompts)
        more = mapped(inputs)
        if more is not None:
            arguments |= {key: value for key, value in dict.items(more) if type(key) is str}
        duration_ns = max(recorder.values.as_int(duration_ns) or 0, 0)
        begun_ns = recorder.values.as_int(start_ns)
        # Nothing may fail from here on: a call that has begun must be finished.
        call = begin_call(recorder, signature, (), {})
        if call is None:
            return
        call.inputs = encode_inputs(recorder, arguments, signature)
        call.start_ns = time.time_ns() - duration_ns if begun_ns is None else begun_ns
        call.mono_ns = time.perf_counter_ns() - duration_ns
        call.finish(output)
    except Exception:
        recorder.losses.unusable()
