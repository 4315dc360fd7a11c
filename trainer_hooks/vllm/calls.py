"""Replacements for vLLM's own functions. They record and change no result."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from localtrace.record.signature import Signature
from localtrace.trainer_hooks.streams import RecordedStream
from localtrace.trainer_hooks.vllm import waiting
from localtrace.trainer_hooks.vllm.generation import OP, begin


def generate(original: Callable[..., Any]) -> Callable[..., Any]:
    """Make the replacement of `AsyncLLM.generate`, also for other engine clients."""
    signature = Signature(original, OP)

    @functools.wraps(original)
    def recorded(self: Any, *args: Any, **kwargs: Any) -> RecordedStream:
        return RecordedStream(
            lambda: begin(self, signature.bind((self, *args), kwargs)),
            lambda: original(self, *args, **kwargs),
        )

    return recorded


def add_request(original: Callable[..., Any]) -> Callable[..., Any]:
    """Make the replacement of `LLMEngine.add_request`, which returns the internal id."""
    signature = Signature(original, OP)

    @functools.wraps(original)
    def recorded(self: Any, *args: Any, **kwargs: Any) -> Any:
        request = begin(self, signature.bind((self, *args), kwargs))
        try:
            internal_id = original(self, *args, **kwargs)
        except BaseException as error:
            if request is not None:
                request.end(error)
            raise
        if request is not None:
            waiting.add(self, request, internal_id)
        return internal_id

    return recorded


def step(original: Callable[..., Any]) -> Callable[..., Any]:
    """Make the replacement of `LLMEngine.step`, which returns the new outputs of all requests."""

    @functools.wraps(original)
    def recorded(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            outputs = original(self, *args, **kwargs)
        except Exception as error:
            waiting.fail(self, error)
            raise
        waiting.take(self, outputs)
        return outputs

    return recorded


def abort_request(original: Callable[..., Any]) -> Callable[..., Any]:
    """Make the replacement of `LLMEngine.abort_request`, which ends requests without output."""

    @functools.wraps(original)
    def recorded(self: Any, request_ids: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, request_ids, *args, **kwargs)
        waiting.abort(self, request_ids)
        return result

    return recorded
