"""Trajectories before upload: add decoded text, count values left out, and size them.

verl's live tracing adds the text of prompt and response where the run's configuration asks for it.
Recording leaves some values out, and puts placeholders in their place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import PurePath
from typing import Any

from localtrace.field_names import PROMPT_TEXT_NAMES
from localtrace.read.turns import text_field
from localtrace.types import Decode, Span, Trajectory
from localtrace.values.placeholder import Placeholder

_TOKEN2TEXT = ("actor_rollout_ref", "rollout", "trace", "token2text")
_MODELS = (
    ("actor_rollout_ref", "model", "path"),
    ("model_name_or_path",),
    ("model_path",),
    ("model",),
)
"""The model's name in configurations: verl's, TRL's, an engine's, one's own."""


def wants_text(config: Any) -> bool:
    """Return whether a run's recorded configuration asks verl for text beside token ids."""
    return _setting(config, _TOKEN2TEXT) is True


def model_name(config: Any) -> str | None:
    """Return the name of the model in a run's recorded configuration; of a path its last part."""
    found = (_setting(config, names) for names in _MODELS)
    path = next((one for one in found if isinstance(one, str) and one), None)
    return path if path is None or not path.startswith(("/", ".", "~")) else PurePath(path).name


def _setting(config: Any, names: Iterable[str]) -> Any:
    for name in names:
        config = config.get(name) if isinstance(config, Mapping) else None
    return config


def with_text(trajectory: Trajectory) -> Trajectory:
    """Add `prompt_text` and `response_text` to results with token ids, as verl's tracing does.

    The prompt's ids are `prompt_ids` of the result, else of the arguments. The response's ids are
    `response_ids` of the result, else its `token_ids`.
    """
    spans = [_with_text(span, trajectory.decode) for span in trajectory.spans]
    return replace(trajectory, spans=spans)


def _with_text(span: Span, decode: Decode) -> Span:
    if not isinstance(span.outputs, dict):
        return span
    inputs = span.inputs if isinstance(span.inputs, dict) else {}
    prompt = _first(span.outputs.get("prompt_ids"), inputs.get("prompt_ids"))
    response = _first(span.outputs.get("response_ids"), span.outputs.get("token_ids"))
    texts = {}
    for name, ids in (("prompt_text", prompt), ("response_text", response)):
        text = decode(ids) if _are_ids(ids) else None
        if text is not None:
            texts[name] = text
    return replace(span, outputs={**span.outputs, **texts}) if texts else span


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(one) is int for one in value)


def left_out(trajectory: Trajectory) -> Counter[str]:
    """Count the values that recording replaced by placeholders, as `field (reason)`."""
    found: Counter[str] = Counter()
    for value in (trajectory.attributes, *_values(trajectory)):
        found.update(_placeholders(value, ""))
    return found


def _values(trajectory: Trajectory) -> Iterator[Any]:
    for span in trajectory.spans:
        yield span.inputs
        yield span.outputs


def _placeholders(value: Any, field: str) -> Iterator[str]:
    if isinstance(value, Placeholder):
        yield f"{field or 'value'} ({value.reason})"
    elif isinstance(value, dict):
        for name, part in value.items():
            yield from _placeholders(part, str(name))
    elif isinstance(value, list | tuple) and not _are_numbers(value):
        for part in value:
            yield from _placeholders(part, field)


def _are_numbers(values: list[Any] | tuple[Any, ...]) -> bool:
    # The long lists are token ids and log-probabilities: their ends tell the type of all.
    return bool(values) and type(values[0]) in (int, float) and type(values[-1]) in (int, float)


def prompts_bytes(trajectory: Trajectory) -> int:
    """Return the bytes that the prompts of all turns take at least, each written whole as JSON."""
    sizes: dict[int, int] = {}
    """Characters of messages by their `id`: the list of a turn repeats those of the turn before."""

    def of_message(message: Any) -> int:
        known = sizes.get(id(message))
        if known is None:
            known = sizes[id(message)] = _characters(message)
        return known

    total = 0
    for span in trajectory.spans:
        if span.is_turn:
            total += sum(map(of_message, span.messages or ()))
            total += 2 * len(span.prompt_ids or ())
            total += len(text_field(span.inputs, PROMPT_TEXT_NAMES) or "")
    return total


def _characters(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    parts = value.values() if isinstance(value, dict) else value
    return sum(map(_characters, parts)) if isinstance(value, dict | list | tuple) else 0
