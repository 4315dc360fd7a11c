"""verl's metrics: `localtrace` among its loggers, and what is recorded among its metrics."""

from __future__ import annotations

import contextlib
import inspect
import weakref
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from localtrace import recorder as process
from localtrace.recording import flush, log_metrics
from localtrace.trainer_hooks.harmless import harmless
from localtrace.trainer_hooks.process import say
from localtrace.trainer_hooks.verl import job, workers
from localtrace.trainer_hooks.verl.prometheus import Sampler
from localtrace.trainer_hooks.verl.seams import on_import, seam

_MODULE = "verl.utils.tracking"
_FIRST_ANSWERS_WITHIN_S = 5.0

_sampler = Sampler()
_survey = workers.Survey()
_counted: weakref.WeakSet[Any] = weakref.WeakSet()
"""The trackings of jobs whose rollouts are recorded."""
_announced = False


class MetricsLogger:
    """One of verl's loggers: records every metric that is a number."""

    @harmless
    def log(self, data: Mapping[Any, Any], step: Any) -> None:
        """Record metrics of a step; what is no number, as in verl's own loggers, is left out."""
        numbers = {}
        for name, value in data.items():
            if not isinstance(value, str | bytes):
                with contextlib.suppress(Exception):
                    numbers[name] = float(value)
        log_metrics(numbers, step=step)

    @harmless
    def finish(self) -> None:
        """Wait until the metrics are on disk."""
        flush()


@on_import(_MODULE, "Tracking.supported_backend")
def _support(module: ModuleType) -> None:
    tracking = module.Tracking
    tracking.supported_backend = [*tracking.supported_backend, job.BACKEND]


@seam(_MODULE, "Tracking.__init__")
def _init(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        given = _join(self, signature, args, kwargs)
        if given is not None:
            names = {"project": given["project_name"], "experiment": given["experiment_name"]}
            job.start_recording(given.get("config"), **names, worker="trainer")

    return __init__


@harmless
def _join(
    tracking: Any, signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any] | None:
    """Put the logger where it is asked for; give the arguments where anything is recorded."""
    given = signature.bind(tracking, *args, **kwargs).arguments
    config, backends = given.get("config"), given.get("default_backend") or ()
    chosen = job.BACKEND in ([backends] if isinstance(backends, str) else backends)
    if chosen:
        tracking.logger[job.BACKEND] = MetricsLogger()
    if job.records_rollouts(config):
        _counted.add(tracking)
    return given if chosen or job.wanted(config) else None


@seam(_MODULE, "Tracking.log")
def _log(original: Callable[..., Any]) -> Callable[..., Any]:
    def log(self: Any, data: Any, step: Any, *args: Any, **kwargs: Any) -> Any:
        if process.active is not None:
            _sampler.sample(step)
        more = _with_counts(data, step) if self in _counted else None
        return original(self, data if more is None else more, step, *args, **kwargs)

    return log


@harmless
def _with_counts(data: Mapping[Any, Any], step: Any) -> dict[Any, Any] | None:
    """A copy of the metrics with what is recorded; None while no worker says that it records."""
    global _announced
    _survey.listen()
    _survey.ask()
    # verl's steps begin with 1; it may validate before.
    announce = not _announced and (step or 0) >= 1
    if announce:
        _survey.listen(_FIRST_ANSWERS_WITHIN_S)
    statuses = _survey.statuses()
    if announce:
        _announced = True
        say(workers.summary(statuses))
    found = workers.counts(statuses)
    return None if found is None else {**data, **found}


@seam(_MODULE, "Tracking.finish", optional=True)
def _finish(original: Callable[..., Any]) -> Callable[..., Any]:
    def finish(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        logger = getattr(self, "logger", {}).get(job.BACKEND)
        if logger is not None:
            logger.finish()
        return result

    return finish
