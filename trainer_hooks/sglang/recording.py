"""One call of `generate_request`, from its request until each of its generations is recorded.

The hook sees each item before the caller does. Most callers drop the generator after its last item,
so a generation is recorded as soon as a chunk has its finish reason.
"""

from __future__ import annotations

import contextvars
import time
from asyncio import CancelledError
from typing import Any, Self

from localtrace.trainer_hooks.generations import record_generation
from localtrace.trainer_hooks.harmless import harmless
from localtrace.trainer_hooks.sglang.chunks import Generation, IncrementalGeneration
from localtrace.trainer_hooks.sglang.requests import Request

OP = "sglang.generate"
_LEFT = "disconnected from the client"
"""Part of the error that SGLang raises when the client of an HTTP request has gone."""
_INCREMENTAL = ("incremental_streaming_output", "stream_output")
"""Names, by SGLang version, of the setting that makes chunks hold only what is new."""
_handed_over: contextvars.ContextVar[int | None] = contextvars.ContextVar(
    "localtrace_sglang_handed_over", default=None
)
"""`id()` of the request that is recorded and now handed to SGLang; None after its first item.

With both the plugin and `wrap` in place, a request reaches the hook twice at that moment. Later its
object may come again, as another request."""


def is_handed_over(obj: Any) -> bool:
    """Return whether a request is recorded already and is now on its way to SGLang."""
    return id(obj) == _handed_over.get()


class Recording:
    """The recording of one request: one generation for each prompt and sample.

    Args:
        manager: SGLang's tokenizer manager.
        obj: its `GenerateReqInput`.
        http: the HTTP request that brought it, or None.
    """

    def __init__(self, manager: Any, obj: Any, http: Any) -> None:
        self._manager = manager
        self._obj = obj
        # A stream that its caller drops ends in whatever context Python frees it.
        self._context = contextvars.copy_context()
        self._is_incremental = bool(obj.stream) and _is_incremental(manager)
        self._open: dict[int, Generation] = {}
        self._recorded: set[int] = set()
        self._request = Request(manager, obj, http)

    def begin(self) -> Self:
        """Ask SGLang for what the record needs, as the request is now handed over."""
        _handed_over.set(id(self._obj))
        harmless(self._request.ask_for_prompt)()
        return self

    def _arrived(self) -> None:
        if is_handed_over(self._obj):
            _handed_over.set(None)

    @harmless
    def take(self, item: Any) -> None:
        """Take one item, and record the generations that end with it."""
        self._arrived()
        if isinstance(item, list):  # a batch arrives at once
            for index, chunk in enumerate(item):
                self._take(index, chunk)
        else:
            self._take(item.get("index", 0), item)

    def _take(self, index: int, chunk: dict[str, Any]) -> None:
        take = dict.pop if self._request.hides_prompt else dict.get
        prompt_ids = take(chunk, "prompt_token_ids", None)
        generation = self._open.get(index) or self._generation(index)
        generation.prompt_ids = prompt_ids
        generation.add(chunk)
        if generation.is_finished or not self._request.is_stream:
            self._record(index, None)

    @harmless
    def end(self, error: BaseException | None) -> None:
        """Record the generations that have not finished.

        Args:
            error: the exception that ended the call; GeneratorExit if the caller takes no more.
        """
        self._arrived()
        self._request.restore()
        for index in range(self._request.count):
            if index not in self._recorded:
                generation = self._generation(index)
                self._add_unseen(generation, index)
                self._record(index, error)

    def _generation(self, index: int) -> Generation:
        kind = IncrementalGeneration if self._is_incremental else Generation
        return self._open.setdefault(index, kind())

    @harmless
    def _add_unseen(self, generation: Generation, index: int) -> None:
        request = self._request
        state = self._manager.rid_to_state.get(generation.rid or request.rid(index))
        if state is None or not state.output_ids:
            return
        # Another request may have this id, unless it is one that SGLang made for a sample.
        is_own = generation.rid is not None if request.samples > 1 else request.owns(state.obj)
        if is_own:
            generation.prompt_ids = getattr(state, "prompt_token_ids", None)
            generation.add_unseen(state)

    def _record(self, index: int, error: BaseException | None) -> None:
        request = self._request
        generation = self._open.pop(index)
        self._recorded.add(index)
        if len(self._recorded) == request.count:
            request.restore()  # before the caller has the last item, and may use the object again
        is_cancelled = _is_cancellation(error)
        self._context.run(
            record_generation,
            OP,
            rid=generation.rid or request.rid(index),
            header=request.place(index),
            start_ns=request.start_ns,
            duration_ns=time.perf_counter_ns() - request.mono_ns,
            inputs=request.inputs(index, generation.prompt_ids),
            outputs=generation.outputs(),
            error=None if is_cancelled else error,
            cancelled=is_cancelled,
        )


def _is_incremental(manager: Any) -> bool:
    owners = (manager, getattr(manager, "server_args", None))
    return any(getattr(owner, name, False) for owner in owners for name in _INCREMENTAL)


def _is_cancellation(error: BaseException | None) -> bool:
    return isinstance(error, CancelledError | GeneratorExit) or (
        isinstance(error, ValueError) and _LEFT in str(error)
    )
