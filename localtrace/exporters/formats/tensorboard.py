"""Metrics as TensorBoard's event files, written by TensorBoard's own package.

TensorBoard keeps scalars as 32-bit floats. A run's configuration is a text called `config`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from localtrace.errors import MissingDependency

if TYPE_CHECKING:
    from localtrace.exporters.metrics import RunMetrics
    from localtrace.types import Run

_CONFIG = "config"


def write_metrics(metrics: RunMetrics, folder: Path) -> list[str]:
    """Write the metrics of runs as event files of TensorBoard.

    Values become 32-bit floats there. The configuration of a run is among the texts.
    """
    try:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter
    except ImportError:
        raise MissingDependency.for_extra("tensorboard", "tensorboard") from None
    for run in metrics.runs:
        writer = EventFileWriter(str(folder / metrics.place_of(run)))
        try:
            _write(writer, metrics, run)
        finally:
            writer.close()
    return ["look at it  tensorboard --logdir {out}"]


def _write(writer: Any, metrics: RunMetrics, run: Run) -> None:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

    start_s = run.start_ns / 1e9
    writer.add_event(Event(wall_time=start_s, summary=Summary(value=[_config(metrics, run)])))
    for step in metrics.steps(run):
        values = [
            Summary.Value(tag=name, simple_value=value) for name, value in step.values.items()
        ]
        summary = Summary(value=values)
        writer.add_event(Event(wall_time=step.time_ns / 1e9, step=step.step, summary=summary))


def _config(metrics: RunMetrics, run: Run) -> Any:
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
    from tensorboard.compat.proto.types_pb2 import DT_STRING
    from tensorboard.plugins.text import metadata

    facts = {
        "project": metrics.redaction.text(run.project),
        "experiment": metrics.redaction.text(run.experiment),
        "run_id": run.run_id,
        "attempt": run.attempt,
        "config": metrics.config(run),
    }
    # Indented text is code in Markdown: none of it is taken for a link or a picture.
    text = msgspec.json.format(msgspec.json.encode(facts), indent=4)
    lines = b"\n".join(b"    " + line for line in text.splitlines())
    return Summary.Value(
        tag=_CONFIG,
        metadata=metadata.create_summary_metadata(display_name=_CONFIG, description=""),
        tensor=TensorProto(dtype=DT_STRING, string_val=[lines], tensor_shape=TensorShapeProto()),
    )
