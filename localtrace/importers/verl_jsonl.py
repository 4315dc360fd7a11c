"""Rollouts that verl dumped: `trainer.rollout_data_dir` and `trainer.validation_data_dir`.

verl writes a file `STEP.jsonl` per step, with one line per rollout:

    input, output   text of the prompt and of everything after it, special tokens removed
    gts             ground truth                  -> attribute ground_truth
    score           sum of the token scores       -> reward
    step            training step                 -> step
    uid             V1: GROUP_SESSION_OUTPUT      -> group_id, rollout_n; kept as an attribute too
    request_id, …   V0, and what the reward function returned  -> attributes of the same names

The dumps hold no token ids, turns, times or sample indexes, and do not mark validation rollouts.
V1 writes one line per output of a rollout, and further lines for copies that only pad its batch.
An imported rollout is one trajectory with a call `verl.rollout` per output; the copies are left
out. The time of a call is the modification time of the file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

from localtrace.importers.imported_rollouts import (
    CallIn,
    Rollout,
    derived_span_id,
    digest_id,
    folder_run_id,
)
from localtrace.importers.lines import BadLine, Line
from localtrace.importers.source import Source

PATTERN = "*.jsonl"
OP = "verl.rollout"
_PADDING = re.compile(r"pad[0-9a-f]{32}_\d+_\d+")
"""The `uid` of copies that make V1's batches divisible by the number of processes."""
default_run_id = partial(folder_run_id, "verl")


def read_rollouts(source: Source, *, validate: bool) -> Iterator[Rollout]:
    """Yield the trajectory of each rollout; other lines are counted in the report.

    A trace id is derived from the run and from the number and text of the rollout's first line.
    """
    for _, outputs in groupby(_outputs(source), key=lambda one: one.session):
        yield _rollout(list(outputs), source.run_id, validate)


@dataclass(frozen=True, slots=True)
class _Output:
    """One line: one output of an agent loop. Most loops give a single output."""

    line: Line
    prompt: str
    answer: str
    fields: dict[str, Any]
    """All other fields of the line."""
    session: tuple[Any, ...]
    """The key of the rollout; lines of one rollout stand together."""


def _outputs(source: Source) -> Iterator[_Output]:
    for line in source.lines():
        try:
            output = _output(line)
        except BadLine as error:
            source.report.refuse(line.place, str(error))
            continue
        if _PADDING.fullmatch(str(output.fields.get("uid"))):
            source.report.left_out["copies that pad a batch of verl"] += 1
        else:
            yield output


def _output(line: Line) -> _Output:
    fields = line.fields()
    prompt, answer = fields.pop("input", None), fields.pop("output", None)
    if not isinstance(prompt, str) or not isinstance(answer, str):
        raise BadLine("input or output is not text: this is not a line of verl's dumps")
    group_id, rollout_n = _group(fields.get("uid"))
    session = (line.number,) if rollout_n is None else (group_id, rollout_n)
    return _Output(line, prompt, answer, fields, (line.path, *session))


def _rollout(outputs: list[_Output], run_id: str, validate: bool) -> Rollout:
    """Return the trajectory of a rollout; its score is that of the last output."""
    first, fields = outputs[0].line, dict(outputs[-1].fields)
    step = fields.pop("step", None)
    if type(step) is not int:
        step = int(first.path.stem) if first.path.stem.isdecimal() else None
    places = [(run_id, str(validate), str(one.line.number), one.line.data) for one in outputs]
    group_id, rollout_n = _group(fields.get("uid"))
    source = fields.get("data_source")
    calls = tuple(
        CallIn(
            span_id=derived_span_id("span", *place),
            op=OP,
            start_ns=one.line.modified_ns,
            duration_ns=0,
            inputs={"prompt": one.prompt},
            outputs={"text": one.answer},
            seq=seq,
        )
        for seq, (one, place) in enumerate(zip(outputs, places, strict=True))
    )
    if len(outputs) > 1:
        fields["outputs"] = len(outputs)
    return Rollout(
        trace_id=digest_id(16, "trace", *places[0]).hex(),
        calls=calls,
        start_ns=first.modified_ns,
        step=step,
        rollout_n=rollout_n,
        group_id=group_id,
        validate=validate,
        data_source=source if isinstance(source, str) else None,
        values=_values(fields),
        size_bytes=sum(len(one.line.data) for one in outputs),
    )


def _values(fields: dict[str, Any]) -> dict[str, Any]:
    values = {("ground_truth" if name == "gts" else name): item for name, item in fields.items()}
    score = values.pop("score", values.get("reward"))
    if "reward" in values and values["reward"] != score:
        values["reward_column"] = values["reward"]  # validation repeats the score there
    return values if score is None else values | {"reward": score}


def _group(uid: Any) -> tuple[str | None, int | None]:
    """Read group id and rollout_n from a key of V1, such as `0a1b_2_0`."""
    parts = uid.rsplit("_", 2) if isinstance(uid, str) else []
    if len(parts) == 3 and parts[1].isdecimal() and parts[2].isdecimal():
        return parts[0], int(parts[1])
    return (uid, None) if isinstance(uid, str) else (None, None)
