"""Rules that say which trajectories keep their spans, as text: `errors,extremes=2,share=0.05`.

Sampling applies them once a step is closed, pruning later, when labels and receipts are known too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Rules:
    """A group of trajectories keeps its spans where one rule matches one of its members."""

    errors: bool = False
    """Whether to keep a trajectory that failed, or in which a call failed."""
    truncated: bool = False
    """Whether to keep a trajectory with a generation that stopped at its length limit."""
    extremes: int = 0
    """Number of the highest, and of the lowest, rewards of a step to keep."""
    panel: frozenset[str] = frozenset()
    """Values of sample_index to keep."""
    share: float = 0.0
    """Share of all groups to keep, from 0 to 1, picked by a hash of the group."""
    labelled: bool = False
    """Whether to keep a trajectory that a person rated, tagged or commented."""
    uploaded: bool = False
    """Whether to keep a trajectory that a receipt in the store says is at a tracker."""


_SWITCHES = ("errors", "truncated")
_LATER_SWITCHES = ("labelled", "uploaded")
"""Rules about what is only known after a step is closed."""
_FORMS = "errors, truncated, extremes=2, panel=17;42, share=0.05"


def parse_rules(text: str, *, later: bool = False) -> Rules:
    """Read rules separated by commas, each at most once.

    Args:
        later: allow rules about labels and receipts, which sampling cannot know.

    Raises:
        ValueError: a rule is unknown, repeated or incomplete; the text says what to write.
    """
    rules: dict[str, Any] = {}
    switches = (*_SWITCHES, *_LATER_SWITCHES) if later else _SWITCHES
    for part in text.split(","):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if name in rules:
            raise ValueError(f"the rule {name} is there twice: keep one")
        if name in switches and not equals:
            rules[name] = True
        elif name == "extremes":
            rules[name] = whole_number(value, "extremes=2")
        elif name == "panel":
            rules[name] = _panel(value)
        elif name == "share":
            rules[name] = _share(value)
        else:
            forms = ", ".join([_FORMS, *(_LATER_SWITCHES if later else ())])
            raise ValueError(f"{part.strip()!r} is no rule: use some of {forms}")
    return Rules(**rules)


def whole_number(text: str, example: str) -> int:
    """Read the value of a rule that is a whole number from 1.

    Raises:
        ValueError: it is none.
    """
    if not text.isdecimal() or int(text) < 1:
        name = example.partition("=")[0]
        raise ValueError(f"{name} needs a whole number from 1, such as {example}")
    return int(text)


def _panel(text: str) -> frozenset[str]:
    values = frozenset(value.strip() for value in text.split(";"))
    if "" in values:
        raise ValueError("panel needs values of sample_index, such as panel=17;42")
    return values


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:  # also NaN
        raise ValueError("share needs a number from 0 to 1, such as share=0.05")
    return share
