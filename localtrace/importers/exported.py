"""Fields and outcomes of trajectories that localtrace exported, and which of them stay behind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from localtrace.importers.imported_rollouts import OutcomeIn
from localtrace.importers.times import is_time
from localtrace.store.journal.records import STATUSES
from localtrace.values.codec import from_tagged
from localtrace.values.fields import Fields

_OTHER_RUN = "run ids: all trajectories get that of the first one, or of --run"
_OTHER_PLACE = "projects, experiments and attempts: --project and --experiment give new ones"
_DEFAULT_PLACE = {"project": "default", "experiment": "default", "attempt": 0}
_TYPES = {
    "step": int, "sample_index": str, "rollout_n": int, "group_id": str, "validate": bool,
    "name": str, "agent": str, "data_source": str, "status": str, "error": str,
}  # fmt: skip


def take_fields(told: Fields, but: str) -> Fields:
    """Take the fields of a trajectory's row out of what a file tells; one is told elsewhere."""
    found = {
        name: told.pop(name) for name, kind in _TYPES.items()
        if name != but and type(told.get(name)) is kind
    }  # fmt: skip
    if found.get("status") not in STATUSES[:-1]:
        found.pop("status", None)
    return found


def outcomes_of(told: Any) -> Iterator[OutcomeIn]:
    """Yield the outcomes that a file lists."""
    for one in told if isinstance(told, list) else ():
        fields = one if isinstance(one, dict) else {}
        name, time_ns = fields.get("name"), fields.get("time_ns")
        value = from_tagged(fields.get("value"))
        step, source = fields.get("step"), fields.get("source")
        is_value = isinstance(value, int | float | str | list)
        if isinstance(name, str) and is_time(time_ns) and is_value:
            yield OutcomeIn(
                name, value, time_ns,
                step=step if type(step) is int else None,
                source=source if isinstance(source, str) else None,
            )  # fmt: skip


def count_places(told: Fields, run_id: str, left_out: Counter[str]) -> None:
    """Count a run, a project, an experiment or an attempt that a trajectory does not get again."""
    left_out[_OTHER_RUN] += told.get("run_id", run_id) != run_id
    left_out[_OTHER_PLACE] += any(told.get(name) != one for name, one in _DEFAULT_PLACE.items())
