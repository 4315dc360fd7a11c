"""Rewards, labels and expected answers as assessments of a trace at MLflow.

All of a trajectory go in one request. Their ids are derived, so that sending them twice stores them
once.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

from opentelemetry.proto.trace.v1.trace_pb2 import Span as OtlpSpan

from localtrace.types import FAILED_STATUSES, Outcome, Trajectory
from localtrace.uploader.identity import derive_id
from localtrace.uploader.targets import Place, iso, otlp_values

SOURCE_MAX_CHARS = 250
VALUE_MAX_CHARS = 4096
_EXPECTED = "ground_truth"
"""Attribute of a trajectory that holds the right answer."""


def of_reward(trajectory: Trajectory, place: Place, end_ns: int) -> list[Any]:
    """Return a finite reward as feedback."""
    reward = trajectory.reward
    if reward is None or not math.isfinite(reward):
        return []
    reward_id = _id("reward", place, trajectory)
    found = _assessment(reward_id, "reward", "CODE", "localtrace", end_ns)
    return [found | {"feedback": {"value": reward}, "valid": True}]


def of_labels(trajectory: Trajectory, place: Place) -> Iterator[dict[str, Any]]:
    """Yield the labels of a trajectory as feedback."""
    for label in trajectory.labels:
        value = _value(label)
        if value is None:
            continue
        # Several people may give the same tag, and one person several tags.
        told_apart = (label.source or "", str(value) if label.name == "tag" else "")
        source = _short(label.source or "localtrace")[:SOURCE_MAX_CHARS]
        yield _assessment(
            _id("label", place, trajectory, label.name, *told_apart),
            label.name, "HUMAN", source, label.time_ns,
        ) | {"feedback": {"value": value}, "valid": True}  # fmt: skip


def expectations(trajectory: Trajectory, place: Place, end_ns: int) -> list[Any]:
    """Return the right answer, if one was recorded as a short value."""
    value = trajectory.attributes.get(_EXPECTED)
    if isinstance(value, str):
        value = _short(value)
    elif type(value) not in (int, bool) and not (type(value) is float and math.isfinite(value)):
        return []
    expected = _assessment(
        _id("expectation", place, trajectory), _EXPECTED, "CODE", "localtrace", end_ns
    )
    return [expected | {"expectation": {"value": value}}]


def body(
    trajectory: Trajectory,
    place: Place,
    remote_id: str,
    spans: Sequence[OtlpSpan],
    found: list[Any],
) -> bytes:
    """Return the body of the request that attaches assessments.

    MLflow overwrites the trace's times and state with those of this body. They therefore equal
    what it computes from the spans, in whole milliseconds.
    """
    start_ns = min(span.start_time_unix_nano for span in spans)
    end_ns = max(span.end_time_unix_nano for span in spans)
    info = {
        "trace_id": remote_id,
        "trace_location": {
            "type": "MLFLOW_EXPERIMENT",
            "mlflow_experiment": {"experiment_id": place.experiment},
        },
        "request_time": iso(start_ns, 3),
        "execution_duration": f"{(end_ns // 10**6 - start_ns // 10**6) / 1000:.3f}s",
        "state": "ERROR" if trajectory.status in FAILED_STATUSES else "OK",
        "assessments": [{**assessment, "trace_id": remote_id} for assessment in found],
    }
    return json.dumps({"trace": {"trace_info": info}}).encode()


def _value(label: Outcome) -> float | str | None:
    if label.number is not None and math.isfinite(label.number):
        return label.number
    return None if label.text is None else _short(label.text)


def _short(text: str) -> str:
    shown = otlp_values.utf8(text)
    return shown if len(shown) <= VALUE_MAX_CHARS else shown[: VALUE_MAX_CHARS - 1] + "…"


def _assessment(
    assessment_id: str, name: str, source_type: str, source_id: str, time_ns: int
) -> dict[str, Any]:
    time = iso(time_ns, 3)
    return {
        "assessment_id": assessment_id,
        "assessment_name": name,
        "source": {"source_type": source_type, "source_id": source_id},
        "create_time": time,
        "last_update_time": time,
    }


def _id(kind: str, place: Place, trajectory: Trajectory, *parts: str) -> str:
    ids = (place.destination, trajectory.trace_id, *parts)
    return f"a-{derive_id(16, f'mlflow {kind}', *ids).hex()}"
