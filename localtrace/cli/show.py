"""`localtrace show`: one trajectory as a person would read it."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from localtrace.cli.options import store_option
from localtrace.codec import to_json
from localtrace.errors import QueryError
from localtrace.schema import FINISH_NAMES, SAMPLED_OUT
from localtrace.terminal import escape
from localtrace.tokens import shared_prefix

if TYPE_CHECKING:
    from localtrace.reader import Store
    from localtrace.types import Outcome, Span, Trajectory

_VALUE_MAX = 300
"""Characters of an argument or a result; texts and messages are printed whole."""


@click.command()
@click.argument("trace_id")
@click.option("--ids", is_flag=True, help="Print token ids too.")
@click.option("--logprobs", is_flag=True, help="Print each generated id's log-probability too.")
@store_option
def command(trace_id: str, ids: bool, logprobs: bool, store_path: Path) -> None:
    """Show one trajectory: its calls in order, with messages, texts and outcomes.

    TRACE_ID may be cut short, as long as it means one trajectory.
    """
    from localtrace.reader import open_store

    with open_store(store_path) as store:
        trajectory = store.trajectory(_full_id(store, trace_id))
        for line in (*_head(trajectory), *_calls(store, trajectory, ids, logprobs)):
            click.echo(escape(line))


def _full_id(store: Store, prefix: str) -> str:
    found = store.sql(
        "select trace_id from all_trajectories where starts_with(trace_id, $prefix) limit 2",
        {"prefix": prefix.lower()},
    ).to_dicts()
    if len(found) == 1:
        return str(found[0]["trace_id"])
    if found:
        raise QueryError(f"several trajectories begin with {prefix!r}: give more of the id")
    raise QueryError(f"no trajectory begins with {prefix!r}: list them with localtrace ls")


def _head(trajectory: Trajectory) -> Iterator[str]:
    yield f"trajectory {trajectory.trace_id}"
    yield (
        f"  run {trajectory.run_id}, attempt {trajectory.attempt}, "
        f"{trajectory.project}/{trajectory.experiment}"
    )
    keys = ("step", "sample_index", "rollout_n", "group_id", "name", "agent", "data_source")
    named = {key: getattr(trajectory, key) for key in keys}
    given = [f"{key} {value}" for key, value in named.items() if value is not None]
    yield "  " + ", ".join(given + ["validation"] * trajectory.validate)
    started = datetime.fromtimestamp(trajectory.start_ns / 1e9, UTC)
    took = ""
    if trajectory.end_ns is not None:
        took = f", took {_duration(trajectory.end_ns - trajectory.start_ns)}"
    yield f"  {trajectory.status}, started {started:%Y-%m-%d %H:%M:%S} UTC{took}"
    if trajectory.error:
        yield f"  error: {trajectory.error}"
    if trajectory.reward is not None:
        yield f"  reward {trajectory.reward:.6g}"
    for outcome in trajectory.outcomes:
        yield f"  outcome {outcome.name}: {_outcome_value(outcome)}"
    for name, value in trajectory.attributes.items():
        yield f"  {name}: {_short(value)}"
    if SAMPLED_OUT in trajectory.attributes:
        yield "  its calls were left out: the run's rules for sampling did not choose its group"


def _outcome_value(outcome: Outcome) -> str:
    if outcome.number is not None:
        return f"{outcome.number:.6g}"
    return _short(outcome.values if outcome.text is None else outcome.text)


def _calls(store: Store, trajectory: Trajectory, ids: bool, logprobs: bool) -> Iterator[str]:
    """Every call below its caller's indentation, in the order in which they began."""
    turns = _Turns(store, trajectory)
    depths: dict[str | None, int] = {None: 0}
    for span in trajectory.spans:
        depth = depths.get(span.parent_id, 0)
        depths[span.span_id] = depth + 1
        indent = "  " * depth
        status = "" if span.status == "ok" else f"  {span.status}"
        yield ""
        yield f"{indent}{span.op}  {_duration(span.duration_ns)}{status}"
        body = turns.lines(span) if span.is_turn else _arguments(span)
        if ids and span.output_ids is not None:
            body = [*body, f"output_ids: {span.output_ids}"]
        if logprobs and span.output_logprobs is not None:
            body = [*body, f"logprobs: {[round(value, 4) for value in span.output_logprobs]}"]
        if span.error:
            body = [*body, f"error: {span.error}"]
        for text in body:
            yield from (f"{indent}  {line}" for line in text.splitlines())


def _arguments(span: Span) -> list[str]:
    result = "" if span.outputs is None else f" -> {_short(span.outputs)}"
    return [f"{_short(span.inputs)}{result}"]


class _Turns:
    """Says of each turn only what no earlier turn of the trajectory has said."""

    def __init__(self, store: Store, trajectory: Trajectory) -> None:
        self._store = store
        self._run_id = trajectory.run_id
        self._messages: list[list[Any]] = []
        self._prompts: list[list[int]] = []
        self._said = ""
        rows = store.sql(
            "select span_id, prompt_text from turns where trace_id = $trace",
            {"trace": trajectory.trace_id},
        )
        self._stored_texts = {row["span_id"]: row["prompt_text"] for row in rows.to_dicts()}

    def lines(self, span: Span) -> list[str]:
        """The new messages or prompt text, then what the model generated."""
        if span.messages is not None:
            texts = self._new_messages(span.messages)
            self._messages.append(span.messages)
        elif span.prompt_ids is not None:
            texts = [f"prompt: {self._new_prompt(span, span.prompt_ids)}"]
            self._prompts.append(span.prompt_ids + (span.output_ids or []))
        else:
            texts = ["(the prompt cannot be rebuilt)"]
        self._said = _generated(span)
        stop = f"  [{span.finish_reason}]" if span.finish_reason else ""
        return [*texts, f"assistant: {self._said}{stop}"]

    def _new_messages(self, messages: list[Any]) -> list[str]:
        known = max((shared_prefix(messages, earlier) for earlier in self._messages), default=0)
        return [_message(message) for message in messages[known:] if not self._repeats(message)]

    def _repeats(self, message: Any) -> bool:
        """Whether a message is what the model generated last, put back into the conversation."""
        if not isinstance(message, dict) or message.get("role") != "assistant":
            return False
        content = message.get("content")
        return isinstance(content, str) and content.strip() in self._said

    def _new_prompt(self, span: Span, ids: list[int]) -> str:
        known = max((shared_prefix(ids, earlier) for earlier in self._prompts), default=0)
        text = self._store.decode(self._run_id, ids[known:])
        if text is None:
            text = self._stored_texts.get(span.span_id)
        return f"{len(ids) - known} token ids" if text is None else text


def _generated(span: Span) -> str:
    """What a turn generated, as text where there is text."""
    if span.output_text is not None:
        return span.output_text
    if not isinstance(span.outputs, dict):
        return _short(span.outputs)
    rest = {
        name: value
        for name, value in span.outputs.items()
        if name not in FINISH_NAMES and not isinstance(value, list)
    }
    count = [f"{len(span.output_ids)} token ids"] if span.output_ids else []
    return " ".join([*count, *([_short(rest)] if rest else [])])


def _message(message: Any) -> str:
    if not isinstance(message, dict):
        return f"message: {_text(message)}"
    rest = {key: value for key, value in message.items() if key not in ("role", "content")}
    more = f"  {_text(rest)}" if rest else ""
    return f"{message.get('role', 'message')}: {_text(message.get('content', ''))}{more}"


def _text(value: Any) -> str:
    return value if isinstance(value, str) else to_json(value)


def _short(value: Any) -> str:
    text = _text(value)
    return text if len(text) <= _VALUE_MAX else f"{text[:_VALUE_MAX]}… ({len(text)} characters)"


def _duration(nanoseconds: int) -> str:
    seconds = nanoseconds / 1e9
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
