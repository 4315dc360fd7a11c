"""The calls inside a rollout, recorded as spans: generations, parsers, tools and scoring."""

from __future__ import annotations

import contextvars
import functools
import inspect
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from localtrace.record.op import record_calls
from localtrace.record.signature import Signature
from localtrace.trainer_hooks.calls import recorded_call
from localtrace.trainer_hooks.generations import record_generation
from localtrace.trainer_hooks.harmless import harmless
from localtrace.trainer_hooks.seams import Part
from localtrace.trainer_hooks.verl import job
from localtrace.trainer_hooks.verl.agent_loops import mark_output, note_output
from localtrace.trainer_hooks.verl.seams import around, is_entered, on_import

_AGENT_LOOP = "verl.experimental.agent_loop.agent_loop"
_MARK = "__localtrace_recorded__"
_KINDS = {
    "generate": "generation", "run": "agent", "execute": "tool", "extract_tool_calls": "other",
}  # fmt: skip
"""Kind of span by method name: of server clients, agent loops, tools and parsers."""
Function = Callable[..., Any]

_ABORTED = ("aborted", "abort")


@dataclass(slots=True)
class _Generation:
    client: Any
    was_aborted: bool = False
    """Whether the engine aborted it for newer weights. The client then continues it."""


_generating: contextvars.ContextVar[_Generation | None] = contextvars.ContextVar(
    "generating", default=None
)


def recorded(function: Function, is_async: bool | None = None) -> Function:
    """Return a function that records every call of the given one.

    A `generate` that calls its base class's `generate` is one generation. The fully asynchronous
    client does so to continue after an interruption.

    Args:
        is_async: whether the function is a coroutine function, if verl's own decorator marks it.
            verl's backend for MLflow names the two kinds differently.
    """
    return _decorated(function, is_async) or function


@harmless
def _decorated(function: Function, is_async: bool | None) -> Function:
    kind = _KINDS.get(function.__name__)
    decorated = record_calls(function, Signature(function, None, kind, is_async))
    if function.__name__ == "generate" and inspect.iscoroutinefunction(function):
        decorated = _once(function, decorated)
    setattr(decorated, _MARK, True)
    return decorated


def _once(function: Function, decorated: Function) -> Function:
    @functools.wraps(function)
    async def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        outer = _generating.get()
        if outer is not None and outer.client is self:  # called by an overriding `generate`
            start_ns, mono_ns = time.time_ns(), time.perf_counter_ns()
            output = await function(self, *args, **kwargs)
            _note_segment(outer, function, output, start_ns, time.perf_counter_ns() - mono_ns)
            return output
        token = _generating.set(_Generation(self))
        try:
            return await decorated(self, *args, **kwargs)
        finally:
            _generating.reset(token)

    return generate


@harmless
def _note_segment(
    outer: _Generation, function: Function, output: Any, start_ns: int, duration_ns: int
) -> None:
    """Record one engine call of a generation that took several, as counts without tokens."""
    is_aborted = output.stop_reason in _ABORTED
    if is_aborted or outer.was_aborted:
        outer.was_aborted = True
        record_generation(
            function.__qualname__,
            start_ns=start_ns,
            duration_ns=duration_ns,
            inputs={},
            outputs={
                "output_tokens": len(output.token_ids),
                "stop_reason": output.stop_reason,
                "global_steps": output.extra_fields.get("global_steps"),
            },
        )


def _record_subclasses(base: Any, method: str, decorate: Callable[[Function], Function]) -> None:
    """Decorate a method in every subclass that is defined from now on and overrides it."""
    own = vars(base).get("__init_subclass__")

    def __init_subclass__(cls: Any, /, **kwargs: Any) -> None:
        begin = super(base, cls).__init_subclass__ if own is None else own.__get__(None, cls)
        begin(**kwargs)
        function = cls.__dict__.get(method)
        if inspect.isfunction(function):
            setattr(cls, method, decorate(function))

    base.__init_subclass__ = classmethod(__init_subclass__)


@on_import(_AGENT_LOOP, "AgentLoopBase")
def _agent_loops(module: ModuleType) -> None:
    _record_subclasses(module.AgentLoopBase, "run", _with_output)


def _with_output(function: Function) -> Function:
    decorated = function if hasattr(function, _MARK) else recorded(function)

    @functools.wraps(function)
    async def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = await decorated(self, *args, **kwargs)
        _note_run(output)
        return output

    return run


def _note_run(output: Any) -> None:
    # A function of its own: Ray sends an agent loop of a script as code, with all that the code
    # of `run` names, and the seams cannot be sent.
    note_output(output)
    if not is_entered(_AGENT_LOOP, "AgentLoopWorker._compute_score"):
        mark_output()  # with `_compute_score`, only after it: reward functions see no mark


@on_import("verl.tools.base_tool", "BaseTool")
def _tools(module: ModuleType) -> None:
    _record_subclasses(
        module.BaseTool,
        "execute",
        lambda function: function if hasattr(function, _MARK) else recorded(function),
    )


@around("verl.tools.function_tool", "FunctionTool.call", optional=True)
def _function_tool(self: Any, parameters: Any) -> Part:
    with recorded_call(_tool_signature(self), parameters=parameters) as span:
        span.result = yield


@harmless
def _tool_signature(tool: Any) -> Signature | None:
    return _signature(f"FunctionTool.{tool.name}")


@functools.cache
def _signature(name: str) -> Signature:
    return Signature(lambda parameters: None, name, "tool")


_score_signature = Signature(
    lambda data_source=None, ground_truth=None: None, "AgentLoopWorker._compute_score", "reward"
)


@around(_AGENT_LOOP, "AgentLoopWorker._compute_score", optional=True)
def _score(self: Any, kwargs: Any, outputs: Any = None, output: Any = None) -> Part:
    outputs = output if outputs is None else outputs  # its name before verl 0.8
    note_output(outputs)
    inputs = _score_inputs(self, outputs, kwargs)
    with recorded_call(None if inputs is None else _score_signature, **(inputs or {})) as span:
        yield
        span.result = _score_of(outputs)
    mark_output()


@harmless
def _score_inputs(worker: Any, outputs: Any, fields: Any) -> dict[str, Any] | None:
    """Return the inputs of scoring; None if verl will not score here."""
    last = outputs[-1] if isinstance(outputs, list) else outputs
    if last.reward_score is not None or not getattr(worker, "reward_loop_worker_handles", True):
        return None
    fields = fields or {}
    truth = job.select(fields.get("reward_model"), "ground_truth")
    return {"data_source": fields.get("data_source"), "ground_truth": truth}


@harmless
def _score_of(outputs: Any) -> dict[str, Any]:
    last = outputs[-1] if isinstance(outputs, list) else outputs
    extra = last.extra_fields.get("reward_extra_info")
    return {"reward_score": last.reward_score, "reward_extra_info": extra}
