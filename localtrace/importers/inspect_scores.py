"""Scores of a sample of Inspect as numbers, and the reward among them."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from localtrace.values.fields import Fields

if TYPE_CHECKING:
    from inspect_ai.log import EvalSample

_LETTERS = {"C": 1.0, "P": 0.5, "I": 0.0, "N": 0.0}
_WORDS = {"yes": 1.0, "true": 1.0, "no": 0.0, "false": 0.0}


def scores_of(sample: EvalSample) -> tuple[dict[str, float], Fields]:
    """Return the scores that are numbers, and all scores as attributes."""
    numbers: dict[str, float] = {}
    found: Fields = {}
    for name, score in (sample.scores or {}).items():
        parts = score.value if isinstance(score.value, dict) else {None: score.value}
        for part, value in parts.items():
            whole = name if part is None else f"{name}.{part}"
            number = _number(value)
            if number is not None:
                numbers[whole] = found[whole] = number
            elif isinstance(value, str | list | tuple):
                found[whole] = list(value) if isinstance(value, tuple) else value
    notes = {
        name: score.model_dump(mode="json", exclude_none=True, exclude_defaults=True)
        for name, score in (sample.scores or {}).items()
    }
    return numbers, found | ({"scores": notes} if notes else {})


def reward_of(numbers: dict[str, float], names: Collection[str]) -> float | None:
    """Return the sum of the named scores; None: the sample has none of them."""
    found = [numbers[name] for name in names if name in numbers]
    return sum(found) if found else None


def _number(value: Any) -> float | None:
    """Return a score as Inspect's metrics count it; None: it is no number, or not scored."""
    if isinstance(value, str):
        known = _LETTERS.get(value, _WORDS.get(value.lower()))
        try:
            value = float(value) if known is None else known
        except ValueError:
            return None
    if isinstance(value, bool | int | float):
        try:
            number = float(value)
        except OverflowError:
            return None
        return None if math.isnan(number) else number
    return None


def names_of_scores(head: Fields) -> set[str]:
    """Return the names of the scores in a log, as its results tell them."""
    results = head.get("results")
    scores = results.get("scores") if isinstance(results, dict) else None
    found = set()
    for score in scores if isinstance(scores, list) else ():
        name, scorer = (_text(score, one) for one in ("name", "scorer"))
        if name is not None:
            found |= {name, *([f"{scorer}.{name}"] if scorer not in (None, name) else [])}
    return found


def _text(fields: Any, name: str) -> str | None:
    value = fields.get(name) if isinstance(fields, dict) else None
    return value if isinstance(value, str) and value else None
