"""Trajectories as samples of Inspect AI, built from Inspect's own models.

messages of all turns, each once                 -> the sample's messages
turn: prompt, answer, tools, usage, logprobs     -> model event
call of a tool, reward, any other call           -> tool, score and info event
call that others run in                          -> span around their events
reward, its parts                                -> scores
ids, step, outcomes, labels, attributes          -> metadata, of the sample or of its events
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from inspect_ai.dataset import Sample
from inspect_ai.event import SampleInitEvent, ScoreEvent, SpanBeginEvent, SpanEndEvent
from inspect_ai.log import EvalError, EvalSample
from inspect_ai.model import ChatMessage, ModelOutput
from inspect_ai.scorer import Score

from localtrace.exporters.inspect_events import UNKNOWN, Events, event_at, iso_time
from localtrace.exporters.shape import count_no_turn, plain, trajectory_fields
from localtrace.field_names import DETAIL_NAMES, LABEL_NAMES, WEIGHT_NAMES
from localtrace.read.messages import model_of, sendable
from localtrace.store.tokenizers import Decode
from localtrace.types import FAILED_STATUSES, Span, Trajectory
from localtrace.values.fields import Fields, known

_EXPECTED = "ground_truth"
_SCORES_MAX = 50
_SCORE_NAME = re.compile("reward|score", re.IGNORECASE)
"""Attributes of these names that hold numbers are parts of the reward."""


class Samples:
    """The samples of trajectories, one trajectory at a time.

    Args:
        decode: token ids to text, special tokens included.
        models: names of the models of runs, by run id and attempt.
    """

    def __init__(self, decode: Decode, models: Mapping[tuple[str, int], str | None]) -> None:
        self.left_out: Counter[str] = Counter()
        """Counts of what the samples do not hold, by field."""
        self._decode = decode
        self._models = models

    def sample(self, trajectory: Trajectory, sample_id: str | int, epoch: int) -> EvalSample:
        """Return the sample of a trajectory."""
        turns = trajectory.turns
        if not turns:
            count_no_turn(trajectory, self.left_out)
        model = self._models.get((trajectory.run_id, trajectory.attempt))
        model = model or next(filter(None, map(model_of, turns)), None) or UNKNOWN
        events = Events(trajectory, self._decode, model, self.left_out)
        first, last = (turns[0], turns[-1]) if turns else (None, None)
        expected = plain(trajectory.attributes.get(_EXPECTED))
        target = "" if expected is None else sendable(expected)
        asked = events.prompts[first.span_id, first.batch_index] if first else []
        output = events.outputs[last.span_id, last.batch_index] if last else ModelOutput()
        scores = _scores(trajectory, output.completion)
        start_ns = trajectory.start_ns
        ends = [span.end_ns for span in trajectory.spans]
        end_ns = trajectory.end_ns or max(ends, default=start_ns)
        total_s = max(0, end_ns - start_ns) / 1e9
        return EvalSample(
            id=sample_id,
            epoch=epoch,
            input=list(asked),
            target=target,
            messages=events.conversation(),
            output=output,
            scores=scores,
            metadata=_metadata(trajectory),
            events=[
                _asked(trajectory, asked, sample_id, target),
                *events.of_calls(),
                *_scored(trajectory, scores, end_ns),
            ],
            model_usage=events.usage,
            started_at=iso_time(start_ns),
            completed_at=iso_time(end_ns),
            total_time=total_s,
            working_time=total_s,
            uuid=trajectory.trace_id,
            error=_error(trajectory),
            turn_count=len(turns),
        )


def _asked(
    trajectory: Trajectory, asked: list[ChatMessage], sample_id: str | int, target: str
) -> SampleInitEvent:
    """Return the event before all calls: what was asked."""
    sample = Sample(id=sample_id, input=list(asked) or "", target=target)
    return SampleInitEvent(uuid="init", sample=sample, **event_at(trajectory, trajectory.start_ns))


def _scored(trajectory: Trajectory, scores: Mapping[str, Score], end_ns: int) -> Iterator[Any]:
    """Yield the events after all calls: the scores, within spans as Inspect has them."""
    at = event_at(trajectory, end_ns)
    for name, score in scores.items():
        span_id = f"scorer-{name}"
        within = at | {"span_id": span_id}
        yield SpanBeginEvent(
            uuid=f"{span_id}-begin", id=span_id, name=name, type="scorer", **within
        )
        yield ScoreEvent(uuid=f"{span_id}-score", score=score, scorer=name, **within)
        yield SpanEndEvent(uuid=f"{span_id}-end", id=span_id, **within)


def _scores(trajectory: Trajectory, answer: str) -> dict[str, Score]:
    """Return the reward, then its parts: calls of rewards, and attributes named like them."""
    scores: dict[str, Score] = {}
    if trajectory.reward is not None:
        scores["reward"] = Score(value=trajectory.reward, answer=answer or None)
    for span in trajectory.spans:
        if span.kind != "reward":
            continue
        name = span.op.rpartition(".")[2]
        value = _score_value(span.outputs)
        if value is not None and len(scores) < _SCORES_MAX:
            scores[_free(scores, name if name != "reward" else span.op)] = Score(value=value)
    for name, item in trajectory.attributes.items():
        value = _score_value(item)
        if value is not None and _SCORE_NAME.search(name) and len(scores) < _SCORES_MAX:
            scores[_free(scores, sendable(name))] = Score(value=value)
    return scores


def _score_value(value: Any) -> Any:
    """Return a number, or numbers by name; None: it is neither."""
    if isinstance(value, Mapping):
        numbers = {name: one for name, one in value.items() if type(one) in (int, float, bool)}
        return {sendable(name): one for name, one in numbers.items()} or None
    return value if type(value) in (int, float, bool) else None


def _free(taken: Mapping[str, Any], name: str) -> str:
    number, free = 1, name
    while free in taken:
        number += 1
        free = f"{name} {number}"
    return free


def _metadata(trajectory: Trajectory) -> Fields:
    fields = trajectory_fields(trajectory)
    for name in ("reward", "error", "start_ns", "end_ns"):
        fields.pop(name)
    shown = {
        one.name: one.value for one in trajectory.outcomes
        if one.values is None and one.name not in (*LABEL_NAMES, "reward")
    }  # fmt: skip
    labels = [{"name": one.name, "value": one.value, "who": one.source}
              for one in trajectory.labels]  # fmt: skip
    weights = {one for turn in trajectory.turns if (one := _weights(turn)) is not None}
    fields["start_ns"], fields["end_ns"] = trajectory.start_ns, trajectory.end_ns
    attributes = fields.pop("attributes")
    more = {
        "policy_version": sorted(weights) or None, "labels": labels or None,
        "attributes": attributes or None, "outcomes": fields.pop("outcomes") or None,
    }  # fmt: skip
    found: Fields = plain(known(shown | fields | more))
    return found


def _weights(turn: Span) -> str | None:
    """Return the version of the policy that generated a turn."""
    outputs = turn.outputs if isinstance(turn.outputs, Mapping) else {}
    holders = [outputs, *(outputs.get(name) for name in DETAIL_NAMES)]
    for holder in holders:
        for name in WEIGHT_NAMES:
            if isinstance(holder, Mapping) and holder.get(name) is not None:
                return sendable(plain(holder[name]))
    return None


def _error(trajectory: Trajectory) -> EvalError | None:
    if trajectory.status not in FAILED_STATUSES:
        return None
    message = sendable(trajectory.error or trajectory.status)
    return EvalError(message=message, traceback=message, traceback_ansi=message)
