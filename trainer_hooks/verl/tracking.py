"""verl's metrics: a logger `localtrace`, and counts of what is recorded for verl's loggers."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from localtrace.record.session import flush
from localtrace.trainer_hooks.environment import record_numbers, say
from localtrace.trainer_hooks.harmless import harmless
from localtrace.trainer_hooks.seams import Part
from localtrace.trainer_hooks.verl import job, workers
from localtrace.trainer_hooks.verl.job import VERL

_MODULE = "verl.utils.tracking"
_FIRST_ANSWERS_WITHIN_S = 5.0

_survey = workers.Survey()
_counted: weakref.WeakSet[Any] = weakref.WeakSet()
"""`Tracking` objects of jobs whose rollouts are recorded."""
_announced = False


class MetricsLogger:
    """A logger of verl that records every metric that is a number."""

    @harmless
    def log(self, data: Mapping[Any, Any], step: Any) -> None:
        """Record the metrics of a step, leaving out what is not a number, as verl's loggers do."""
        record_numbers(data, step)

    @harmless
    def finish(self) -> None:
        """Wait until the metrics are on disk."""
        flush()


@VERL.on_import(_MODULE, "Tracking.supported_backend")
def _support(module: ModuleType) -> None:
    tracking = module.Tracking
    tracking.supported_backend = [*tracking.supported_backend, job.BACKEND]


@VERL.around(_MODULE, "Tracking.__init__")
def _init(
    self: Any, project_name: Any, experiment_name: Any, default_backend: Any, config: Any
) -> Part:
    yield
    backends = default_backend or ()
    chosen = job.BACKEND in ([backends] if isinstance(backends, str) else backends)
    if chosen:
        self.logger[job.BACKEND] = MetricsLogger()
    if job.records_rollouts(config):
        _counted.add(self)
    if chosen or job.wanted(config):
        project = job.named(config, "project") or project_name
        experiment = job.named(config, "experiment") or experiment_name
        job.start_recording(config, project=project, experiment=experiment, worker="trainer")


@VERL.around(_MODULE, "Tracking.log")
def _log(self: Any, data: Any, step: Any) -> Part:
    """Add the counts of what is recorded, while any worker records."""
    counts = _counts(step) if self in _counted else None
    yield None if counts is None else {"data": {**data, **counts}}


def _counts(step: Any) -> dict[str, int] | None:
    global _announced
    _survey.listen()
    _survey.ask()
    # verl's steps begin with 1. It may validate before, at step 0.
    announce = not _announced and (step or 0) >= 1
    if announce:
        _survey.listen(_FIRST_ANSWERS_WITHIN_S)
    statuses = _survey.statuses()
    if announce:
        _announced = True
        say(workers.summary(statuses))
    return workers.counts(statuses)


@VERL.around(_MODULE, "Tracking.finish", without="")
def _finish(self: Any) -> Part:
    yield
    logger = getattr(self, "logger", {}).get(job.BACKEND)
    if logger is not None:
        logger.finish()
