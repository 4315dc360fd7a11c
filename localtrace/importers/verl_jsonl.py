"""Rollouts that verl dumped: `trainer.rollout_data_dir` and `trainer.validation_data_dir`.

verl writes a file `STEP.jsonl` per step, with one line per rollout:

    input, output   text of the prompt and of everything after it, special tokens removed
    gts             ground truth                  -> attribute ground_truth
    score           sum of the token scores       -> reward
    step            training step                 -> step
    uid             V1: GROUP_SESSION_OUTPUT      -> group_id, rollout_n; kept as an attribute too
    request_id, …   V0, and what the reward function returned  -> attributes of the same names

There are no token ids, turns, times or sample indexes, and nothing tells a validation rollout from
others. The one call of each trajectory, `verl.rollout`, has the texts; its time is the file's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from localtrace.importers.intake import Report
from localtrace.importers.lines import BadLine, Line
from localtrace.importers.rollouts import CallIn, Rollout, digest_id

PATTERN = "*.jsonl"
OP = "verl.rollout"


def default_run_id(paths: Iterable[Path]) -> str:
    """The run's id where none is given: the same whenever the same folder is named."""
    first = next(iter(paths)).resolve()
    folder = first if first.is_dir() else first.parent
    return f"verl-{digest_id(6, str(folder)).hex()}"


def read_rollouts(
    lines: Iterable[Line], run_id: str, *, validate: bool, report: Report
) -> Iterator[Rollout]:
    """Yield the trajectory of each line; lines that hold none are counted in the report.

    Its id follows from the run, the number of the line and its text.
    """
    for line in lines:
        try:
            yield _rollout(line, run_id, validate)
        except BadLine as error:
            report.refuse(line.place, str(error))


def _rollout(line: Line, run_id: str, validate: bool) -> Rollout:
    fields = line.fields()
    prompt, answer = fields.pop("input", None), fields.pop("output", None)
    if not isinstance(prompt, str) or not isinstance(answer, str):
        raise BadLine("no text under input and output, which every line of verl's dumps has")
    step = fields.pop("step", None)
    if type(step) is not int:
        step = int(line.path.stem) if line.path.stem.isdecimal() else None
    place = (run_id, str(validate), str(line.number), line.data)
    group_id, rollout_n = _group(fields.get("uid"))
    source = fields.get("data_source")
    call = CallIn(
        span_id=int.from_bytes(digest_id(8, "span", *place), "big"),
        op=OP,
        start_ns=line.modified_ns,
        duration_ns=0,
        inputs={"prompt": prompt},
        outputs={"text": answer},
    )
    return Rollout(
        trace_id=digest_id(16, "trace", *place).hex(),
        calls=(call,),
        start_ns=line.modified_ns,
        step=step,
        rollout_n=rollout_n,
        group_id=group_id,
        validate=validate,
        data_source=source if isinstance(source, str) else None,
        values=_values(fields),
        size_bytes=len(line.data),
    )


def _values(fields: dict[str, Any]) -> dict[str, Any]:
    values = {("ground_truth" if name == "gts" else name): item for name, item in fields.items()}
    score = values.pop("score", values.get("reward"))
    if "reward" in values and values["reward"] != score:
        values["reward_column"] = values["reward"]  # validation repeats the score there
    return values if score is None else values | {"reward": score}


def _group(uid: Any) -> tuple[str | None, int | None]:
    """Group and rollout of V1's keys, such as `0a1b_2_0`."""
    parts = uid.rsplit("_", 2) if isinstance(uid, str) else []
    if len(parts) == 3 and parts[1].isdecimal() and parts[2].isdecimal():
        return parts[0], int(parts[1])
    return (uid, None) if isinstance(uid, str) else (None, None)
