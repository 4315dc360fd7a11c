"""Trials of Harbor: what a trial's `result.json` says of the trajectories in its folder.

    JOB/TRIAL/result.json
    JOB/TRIAL/agent/trajectory.json
    JOB/TRIAL/steps/STEP/agent/trajectory.json   of a task of several steps

    task_name      -> sample_index and group: the trials of a task are rollouts of one sample
    trial_name     -> name
    source         -> data source
    rewards        -> reward, or the only one; others are attributes of their names
    exception_info -> status error, and its text

A trial's other files, such as those of context that was summarized, have its place, but no reward.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from localtrace.importers.lines import BadLine, read_whole

NAME = "result.json"
_WHOLE = "trajectory.json"
"""The file that holds an agent's whole trajectory."""


class _Verdict(msgspec.Struct):
    rewards: dict[str, float] | None = None


class _Exception(msgspec.Struct):
    exception_type: str
    exception_message: str = ""


class _Ended(msgspec.Struct, kw_only=True):
    verifier_result: _Verdict | None = None
    exception_info: _Exception | None = None


class _Step(_Ended):
    step_name: str


class _Trial(_Ended):
    task_name: str
    trial_name: str
    source: str | None = None
    step_results: list[_Step] | None = None


def trial_of(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the fields and the values of a rollout that a trial gives to a file of trajectories.

    Raises:
        BadLine: the result of the trial cannot be read.
    """
    folder = path.parent.parent
    step_name = folder.name if folder.parent.name == "steps" else None
    file = (folder if step_name is None else folder.parent.parent) / NAME
    if path.parent.name != "agent" or not file.is_file():
        return {}, {}
    trial = _read(file)
    fields = {"sample_index": trial.task_name, "group_id": trial.task_name,
              "name": trial.trial_name, "data_source": trial.source}  # fmt: skip
    of_steps: dict[str | None, _Ended] = {one.step_name: one for one in trial.step_results or ()}
    ended = trial if step_name is None else of_steps.get(step_name)
    if path.name != _WHOLE or ended is None:
        return fields, {}
    if (error := ended.exception_info) is not None:
        text = f"{error.exception_type}: {error.exception_message}".removesuffix(": ")
        fields |= {"status": "error", "error": text}
    return fields, _rewards(ended.verifier_result)


def _read(file: Path) -> _Trial:
    try:
        return msgspec.convert(read_whole(file).fields(), _Trial)
    except (BadLine, msgspec.ValidationError, OSError) as error:
        raise BadLine(
            f"the reward is not known: {file} is no result of a trial ({error})"
        ) from None


def _rewards(verdict: _Verdict | None) -> dict[str, Any]:
    rewards = (verdict and verdict.rewards) or {}
    if len(rewards) == 1:
        return {"reward": next(iter(rewards.values())), **rewards}
    return dict(rewards)
