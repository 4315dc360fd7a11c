"""Logs of Inspect AI: `.eval` and `.json`, read by Inspect's own models.

    sample, epoch       -> trajectory; rollouts of one sample are a group
    model event         -> turn; where a log has no events: message of the assistant
    tool event          -> call of this tool; span of an agent: a call around its calls
    scores              -> attributes: numbers under the names of their scorers
    error, limit        -> status and fate
    target, metadata    -> attribute ground_truth, attributes

Letters of a score are numbers, as Inspect counts them: C 1, P 0.5, I and N 0. The reward is the one
score, or the sum of those that `--reward` names. What localtrace exported keeps its trace ids,
places and rewards.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from localtrace.errors import ConfigError, MissingDependency
from localtrace.importers.exported import take_fields
from localtrace.importers.imported_rollouts import OutcomeIn, Rollout, digest_id, folder_run_id
from localtrace.importers.inspect_files import check_references, read_log
from localtrace.importers.inspect_scores import names_of_scores, reward_of, scores_of
from localtrace.importers.lines import BadLine
from localtrace.importers.source import Source
from localtrace.values.fields import Fields, known

if TYPE_CHECKING:
    from inspect_ai.log import EvalSample

PATTERN = "**/*.eval"
_TRACE_ID = re.compile(r"[0-9a-f]{32}")
_SAMPLE_BYTES = 2**20
"""Size of a sample in memory, about."""
_NO_REWARD = "rewards: several scores may be it, so name those that add up to it by --reward"
_HEAD = "heads of logs, of which only task, model, data set and solver are kept"
_LEFT = {
    "error_retries": "attempts before the last one of a sample", "store": "stores of samples",
    "timelines": "timelines of samples", "sandbox": "sandboxes of samples",
    "files": "lists of files of samples", "invalidation": "invalidations of samples",
}  # fmt: skip
_READ_EVENTS = frozenset({"model", "tool", "span_begin", "span_end"})
_MARKS = frozenset({"sample_init", "score", "error", "sample_limit", "step"})
"""Events that say what the sample says as well."""


def default_run_id(paths: Iterable[Path]) -> str:
    """Return the run id for the folder of the first log."""
    return folder_run_id("inspect", paths)


def read_rollouts(source: Source, *, rewards: Collection[str]) -> Iterator[Rollout]:
    """Yield the trajectory of each sample; what is none is counted in the report.

    A trace id is that of localtrace's export, else derived from the run, the log and the sample's
    ids: a log that was scored again, or written as `.json`, holds the same rollouts.

    Args:
        rewards: scorers whose scores add up to the reward; without any, the only one.

    Raises:
        MissingDependency: the package inspect-ai is not installed.
        ConfigError: no score of a log is called as one of `rewards`.
    """
    try:
        import inspect_ai.log  # noqa: F401
    except ImportError:
        raise MissingDependency.for_extra("inspect-ai", "inspect") from None
    for path in source.whole_files():
        try:
            head, samples = read_log(path)
        except BadLine as error:
            source.report.refuse(str(path), str(error))
        else:
            yield from _Log(path, head, source, rewards).rollouts(samples)


class _Log:
    """One log."""

    def __init__(self, path: Path, head: Fields, source: Source, rewards: Collection[str]) -> None:
        spec = head["eval"]
        self._modified_ns = path.stat().st_mtime_ns
        self._run_id = source.run_id
        self._rewards = rewards
        self._report = source.report
        self._task, self._model, self._solver = (
            _text(spec.get(name)) for name in ("task", "model", "solver")
        )
        data_set = spec.get("dataset")
        self._data_set = _text(data_set.get("name")) if isinstance(data_set, dict) else None
        ids = (_text(spec.get(name)) or "" for name in ("eval_id", "run_id", "task_id", "created"))
        self._id = next(filter(None, ids), "")
        self._is_own = _is_own(spec)
        if not self._is_own:
            self._report.left_out[_HEAD] += 1
        self._known_scores = names_of_scores(head)
        missing = [one for one in rewards if self._known_scores and one not in self._known_scores]
        if missing:
            raise ConfigError(
                f"{path} has no score {missing[0]}: name others by --reward, of "
                f"{', '.join(sorted(self._known_scores))}"
            )

    def rollouts(self, samples: Iterable[tuple[str, Fields | BadLine]]) -> Iterator[Rollout]:
        """Yield the trajectories of samples."""
        for place, fields in samples:
            try:
                if isinstance(fields, BadLine):
                    raise fields
                yield self._rollout(fields)
            except BadLine as error:
                self._report.refuse(place, str(error))

    def _rollout(self, fields: Fields) -> Rollout:
        from localtrace.importers.inspect_calls import Calls

        fields = self._current(fields)
        check_references(fields)
        sample = self._sample(fields)
        key = (self._run_id, self._id, str(sample.id), str(sample.epoch), str(sample.uuid))
        trace_id = digest_id(16, "trace", *key).hex()
        exported = sample.metadata if self._is_own else {}
        if self._is_own and _TRACE_ID.fullmatch(str(exported.get("trace_id"))):
            trace_id = str(exported["trace_id"])
        calls = Calls(sample, trace_id, self._modified_ns)
        self._report.left_out.update(calls.left_out)
        place: Fields = {
            "sample_index": str(sample.id),
            "rollout_n": max(0, sample.epoch - 1),
            "group_id": f"{self._id}/{sample.id}",
            "name": self._task, "agent": self._solver, "data_source": self._data_set,
            "status": "ok" if sample.error is None else "error",
        } | take_fields(dict(exported), but="error")  # fmt: skip
        numbers, scored = scores_of(sample)
        rewards = ["reward"] if self._is_own and not self._rewards else self._summed(numbers)
        values = _values(sample) | scored | {"model": self._model}
        return Rollout(
            trace_id=trace_id,
            calls=tuple(calls.calls),
            start_ns=calls.start_ns,
            duration_ns=max(0, calls.end_ns - calls.start_ns),
            error=None if sample.error is None else sample.error.message,
            outcomes=tuple(_fates(sample, calls.end_ns)),
            values=known(values | {"reward": reward_of(numbers, rewards)}),
            is_export=bool(exported),
            size_bytes=_SAMPLE_BYTES,
            **place,
        )

    def _summed(self, numbers: Collection[str]) -> Collection[str]:
        """Return the names of the scores that add up to the reward."""
        if self._rewards:
            return self._rewards
        self._report.left_out[_NO_REWARD] += len(numbers) > 1
        return numbers if len(numbers) == 1 else ()

    def _sample(self, fields: Fields) -> EvalSample:
        """Read a sample by Inspect's models.

        Raises:
            BadLine: it is none.
        """
        from inspect_ai.log import EvalSample, resolve_sample_attachments
        from pydantic import ValidationError

        try:
            # As Inspect's own reader does, which makes no new ids then.
            found = EvalSample.model_validate(fields, context={"deserializing": True})
            return resolve_sample_attachments(found, "full")
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            place = ".".join(str(one) for one in first["loc"][:6])
            raise BadLine(f"no sample of Inspect ({place}: {first['msg']})") from None
        except (TypeError, ValueError, KeyError, AttributeError, RecursionError) as error:
            raise BadLine(f"no sample of Inspect ({type(error).__name__}: {error})") from None

    def _current(self, fields: Fields) -> Fields:
        """Return the fields as Inspect names them today, without those that are not read."""
        fields = dict(fields)
        transcript = fields.pop("transcript", None)
        if isinstance(transcript, dict):
            fields |= {"events": transcript.get("events"), "attachments": transcript.get("content")}
        if "score" in fields:
            scorer = min(self._known_scores, default="score")
            fields["scores"] = {scorer: fields.pop("score")}
        for name, what in _LEFT.items():
            if fields.pop(name, None):
                self._report.left_out[what] += 1
        events = fields.get("events")
        if not isinstance(events, list | None):
            raise BadLine("its events are no list")
        kept = []
        for event in events or ():
            kind = event.get("event") if isinstance(event, dict) else None
            if kind in _READ_EVENTS:
                kept.append({name: one for name, one in event.items() if name != "call"})
                if "call" in event:
                    self._report.left_out["requests to models as they were sent"] += 1
            elif kind not in _MARKS:
                self._report.left_out[f"events of kind {str(kind)[:40]}"] += 1
        return fields | {"events": kept}


def _values(sample: EvalSample) -> Fields:
    """Return what becomes attributes of a sample that localtrace did not write."""
    limit = None if sample.limit is None else sample.limit.model_dump(exclude_none=True)
    usage = {name: one.model_dump(exclude_none=True) for name, one in sample.model_usage.items()}
    found = {
        "ground_truth": sample.target or None, "choices": sample.choices,
        "description": sample.description, "setup": sample.setup,
        "model_usage": usage or None, "limit": limit,
        "working_time": sample.working_time,
    }  # fmt: skip
    return {**sample.metadata, **{name: one for name, one in found.items() if one is not None}}


def _fates(sample: EvalSample, time_ns: int) -> Iterator[OutcomeIn]:
    """Yield why a sample ended early."""
    if sample.error is not None:
        fate, reason = "failed", sample.error.message
    elif sample.limit is not None:
        fate, reason = "limited", sample.limit.reason or f"limit: {sample.limit.type}"
    else:
        return
    for name, value in (("fate", fate), ("fate_reason", reason)):
        yield OutcomeIn(name, value, time_ns, source="inspect")


def _is_own(spec: Fields) -> bool:
    """Return whether `localtrace export inspect` wrote a log."""
    metadata = spec.get("metadata")
    return isinstance(metadata, dict) and metadata.get("localtrace") is True


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None
