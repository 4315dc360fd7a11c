"""A run's configuration as parameters of the MLflow run.

Names are rewritten as those of metrics are. MLflow never changes a parameter, and refuses every
request that would. So the parameters that are there are read first, and only the others are sent.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from localtrace.uploader.targets import otlp_values
from localtrace.uploader.targets.http import HttpSession
from localtrace.uploader.targets.mlflow_answers import RunAnswer
from localtrace.uploader.targets.mlflow_metrics import MetricNames, log_batches

VALUE_MAX_CHARS = 6000
BATCH_MAX = 100
PARAMETERS_MAX = 5000
_NAMED_MAX = 5
"""Most names in a note."""


def send(
    http: HttpSession, run_id: str, parameters: Sequence[tuple[str, str]]
) -> tuple[int, tuple[str, ...]]:
    """Send the parameters that the run does not have, and read back which it has then."""
    names = MetricNames()
    whole: dict[str, str] = {}
    for recorded, value in parameters[:PARAMETERS_MAX]:
        # Two may have one name, as in {"a.b": 1, "a": {"b": 2}}: the first stays.
        whole.setdefault(names.shown(recorded), otlp_values.utf8(value))
    shown = {name: _short(value) for name, value in whole.items()}
    there = _there(http, run_id)
    new = [{"key": name, "value": shown[name]} for name in shown if name not in there]
    if new:
        log_batches(http, run_id, "params", map(json.dumps, new), BATCH_MAX)
        there = _there(http, run_id)
    others = [name for name in shown if there.get(name) != shown[name]]
    cut = [name for name in shown if shown[name] != whole[name]]
    left_out = len(parameters) - len(whole)
    notes = []
    if others:
        notes.append(f"MLflow holds other values and never changes them: {_listed(others)}")
    if cut:
        notes.append(f"cut at {VALUE_MAX_CHARS:,} characters: {_listed(cut)}")
    if left_out:
        notes.append(
            f"{left_out} left out, of names that others have or beyond {PARAMETERS_MAX:,} in all"
        )
    return len(shown) - len(others), tuple(notes)


def _there(http: HttpSession, run_id: str) -> dict[str, str]:
    answer = http.ask(RunAnswer, "GET", "/api/2.0/mlflow/runs/get", params={"run_id": run_id})
    return {one.key: one.value for one in answer.run.data.params}


def _short(value: str) -> str:
    return value if len(value) <= VALUE_MAX_CHARS else f"{value[: VALUE_MAX_CHARS - 1]}…"


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _NAMED_MAX
    return ", ".join(names[:_NAMED_MAX]) + (f" and {more} more" if more > 0 else "")
