"""The hook into verifiers: two of its methods replaced in their classes.

`Env.run_episode` is the call behind every rollout of an environment, whoever asks for it: `eval`,
a server of environments, or a loop of your own. Each agent's trace that it makes is a trajectory.
`Trace.notify` tells after every request to the model that the trace has grown. The replacements
give verifiers its own arguments, results and exceptions, and an error of theirs is counted as a
loss.
"""

from __future__ import annotations

import functools
import inspect
import os
import time
from collections import Counter
from collections.abc import Callable
from types import ModuleType
from typing import Any

from localtrace.record import active
from localtrace.record.session import outcome
from localtrace.trainer_hooks.environment import is_asked_for, record_this_process, refuse
from localtrace.trainer_hooks.harmless import harmless
from localtrace.trainer_hooks.verifiers import prime_rl
from localtrace.trainer_hooks.verifiers.facts import place_of
from localtrace.trainer_hooks.verifiers.recording import OpenTrace, fields_of

SOURCE = "verifiers"
RETRIED = "verifiers ran the agent again"
_RUN_NAMES = ("PRL_RUN_ID", "VF_RUN_ID")
"""Variables in which prime-rl and verifiers name their run to all of its processes."""
PARAMETERS = ("task", "on_trace", "on_discard")
"""Parameters of `Env.run_episode` that the hook needs."""
_MARK = "_localtrace_original"
_open: dict[str, OpenTrace] = {}
"""Traces under way, by verifiers' id."""
_rollouts: Counter[Any] = Counter()
"""Episodes begun so far, by environment and task."""


def record() -> None:
    """Record every episode that environments in this process run from now on.

    Call it once in each process that runs episodes, most simply at the top of the module of your
    taskset or environment, which verifiers imports wherever it runs. Recording starts with the
    first episode, into the store that LOCALTRACE_STORE names, or that `localtrace.init` was given.

    In prime-rl's orchestrator, which imports tasksets too, it adds a monitor to prime-rl's, which
    records episodes and metrics; in its processes that run environments it does nothing.

    Raises:
        ConfigError: this version cannot be recorded, and LOCALTRACE_REQUIRED is set.
    """
    if prime_rl.is_worker():
        return
    if (monitors := prime_rl.monitors()) is not None:
        _record_prime_rl(monitors)
        return
    if missing := lacking():
        refuse(f"verifiers is not recorded: it lacks {', '.join(missing)}; use verifiers 0.4")
        return
    from verifiers.v1.env import Env
    from verifiers.v1.trace import Trace

    if not hasattr(Env.run_episode, _MARK):
        Env.run_episode = _recorded(Env.run_episode)
        Trace.notify = _told(Trace.notify)


def _record_prime_rl(monitors: ModuleType) -> None:
    if missing := prime_rl.lacking(monitors):
        refuse(f"prime-rl is not recorded: its monitors lack {', '.join(missing)}")
    else:
        prime_rl.add_monitor(monitors, _start)


def lacking() -> list[str]:
    """Return the places and parameters that the installed verifiers does not have."""
    try:
        from verifiers.v1 import env, trace
    except ImportError as error:
        return [str(error.name)]
    missing = [] if hasattr(trace.Trace, "notify") else ["Trace.notify"]
    method = getattr(env.Env, "run_episode", None)
    if method is None:
        return ["Env.run_episode", *missing]
    known = inspect.signature(method).parameters
    return missing + [f"Env.run_episode({name})" for name in PARAMETERS if name not in known]


class _Episode:
    """One call of `Env.run_episode`, and the traces that it has made."""

    def __init__(self, env: Any, task: Any) -> None:
        self._env_id = env.config.env_id
        self._traces: dict[str, Any] = {}
        key = self._env_id, task.key
        self._rollout_n = _rollouts[key]
        _rollouts[key] += 1

    @harmless
    def begin(self, trace: Any) -> None:
        """Begin the trajectory of a trace that was just made."""
        recorder = active.recorder
        if recorder is None:
            return
        self._traces[trace.id] = trace
        fields = {"env": {"id": self._env_id}}
        place = place_of(fields_of(trace), fields)._replace(rollout_n=self._rollout_n)
        _open[trace.id] = OpenTrace(recorder, trace.id, place, time.time_ns())

    @harmless
    def discard(self, trace: Any) -> None:
        """End the trajectory of a failed attempt, which another one replaces."""
        opened = self._end(trace, {}, None)
        if opened is not None:
            outcome(opened.trace_id, source=SOURCE, fate="failed", fate_reason=RETRIED)

    @harmless
    def end(self, episode: Any, error: BaseException | None = None) -> None:
        """End the trajectories that are still open."""
        fields = {} if episode is None else fields_of(episode)
        for trace in list(self._traces.values()):
            self._end(trace, fields, error)

    def _end(
        self, trace: Any, episode: dict[str, Any], error: BaseException | None
    ) -> OpenTrace | None:
        self._traces.pop(trace.id, None)
        opened = _open.pop(trace.id, None)
        if opened is not None:
            _record_calls(opened, trace)
            opened.end(fields_of(trace), episode, error)
        return opened


def _recorded(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `Env.run_episode` so that its traces are recorded."""

    @functools.wraps(original)
    async def run_episode(self: Any, task: Any, *args: Any, **kwargs: Any) -> Any:
        _start()
        own = _begin(self, task)
        if own is None:
            return await original(self, task, *args, **kwargs)
        kwargs["on_trace"] = _both(own.begin, kwargs.get("on_trace"))
        kwargs["on_discard"] = _both(own.discard, kwargs.get("on_discard"))
        try:
            episode = await original(self, task, *args, **kwargs)
        except BaseException as error:
            own.end(None, error)
            raise
        own.end(episode)
        return episode

    setattr(run_episode, _MARK, original)
    return run_episode


def _told(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `Trace.notify` so that new requests to the model are recorded."""

    @functools.wraps(original)
    def notify(self: Any) -> Any:
        opened = _open.get(self.id)
        if opened is not None:
            _record_calls(opened, self)
        return original(self)

    return notify


def _both(first: Callable[[Any], None], second: Callable[[Any], Any] | None) -> Callable[..., None]:
    def call(trace: Any) -> None:
        first(trace)
        if second is not None:
            second(trace)

    return call


@harmless
def _record_calls(opened: OpenTrace, trace: Any) -> None:
    opened.record_calls(trace)


@harmless
def _begin(env: Any, task: Any) -> _Episode | None:
    return None if active.recorder is None else _Episode(env, task)


def _start() -> None:
    """Start recording in this process, if it is asked for.

    Raises:
        LocalTraceError: recording cannot start, and LOCALTRACE_REQUIRED is set.
    """
    if active.recorder is not None:
        return
    named = next((os.environ[name] for name in _RUN_NAMES if os.environ.get(name)), None)
    known = {} if named is None or "LOCALTRACE_RUN_ID" in os.environ else {"run_id": named}
    record_this_process("verifiers", **known)
    if active.recorder is None and not is_asked_for():
        refuse("episodes are not recorded: set LOCALTRACE_STORE, or call localtrace.init(...)")
