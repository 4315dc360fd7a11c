"""`localtrace diff`: trajectories beside each other, turn by turn."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from itertools import zip_longest
from pathlib import Path
from string import ascii_uppercase
from typing import TYPE_CHECKING, Any

import click

from localtrace.cli.options import store_option
from localtrace.cli.picking import PICK_HELP
from localtrace.terminal import escape

if TYPE_CHECKING:
    from localtrace.compare import Difference, Part, Stretch, Turn
    from localtrace.types import Trajectory

_CONTEXT = 24
"""Words, spaces and signs, or ids, that are shown on each side of a difference."""


@click.command(epilog=PICK_HELP)
@click.argument("trajectories", nargs=-1, metavar="A B [C]...")
@click.option("--text/--no-text", default=True, help="Compare texts word by word (or not).")
@click.option("--ids", is_flag=True, help="Compare generated token ids too.")
@click.option("--logprobs", is_flag=True, help="Compare the log-probabilities of equal ids too.")
@store_option
def command(
    trajectories: tuple[str, ...],
    text: bool,
    ids: bool,
    logprobs: bool,
    store_paths: tuple[Path, ...],
) -> None:
    """Compare two or more trajectories turn by turn, and mark where they first differ.

    The first one is compared with each of the others. Words that only it has are red on a
    terminal and [-so-] elsewhere; words that only the other has are green, and {+so+} elsewhere.
    """
    if not 2 <= len(trajectories) <= len(ascii_uppercase):
        raise click.UsageError("name two trajectories or more: localtrace diff A B")
    from localtrace.cli.picking import find_trajectory
    from localtrace.cli.show import conversation_of
    from localtrace.compare import turn_parts
    from localtrace.reader import open_store

    with open_store(*store_paths) as store:
        trace_ids = [find_trajectory(store, name) for name in trajectories]
        whole = [store.trajectory(trace_id) for trace_id in trace_ids]
        turns = [turn_parts(one, conversation_of(store, one)) for one in whole]
    for letter, one in zip(ascii_uppercase, whole, strict=False):
        click.echo(f"{letter}  {escape(_about(one))}")
    kinds = [
        kind for kind, asked in (("text", text), ("ids", ids), ("logprobs", logprobs)) if asked
    ]
    for letter, one, theirs in zip(ascii_uppercase[1:], whole[1:], turns[1:], strict=False):
        click.echo()
        if one.trace_id == whole[0].trace_id:
            click.echo(f"A and {letter} are the same trajectory")
            continue
        for line in _compared(letter, turns[0], theirs, kinds):
            click.echo(line)


def _about(one: Trajectory) -> str:
    places = ((key, getattr(one, key)) for key in ("step", "sample_index", "rollout_n", "reward"))
    given = [f"{key} {value}" for key, value in places if value is not None]
    turns = sum(span.is_turn for span in one.spans)
    return f"{one.trace_id}  {', '.join([*given, f'{turns} turns', one.status])}"


def _compared(letter: str, ours: list[Turn], theirs: list[Turn], kinds: list[str]) -> Iterator[str]:
    from localtrace.compare import first_difference, pairs

    difference = first_difference(ours, theirs)
    if difference is None:
        said = f"{len(ours)} turns" if ours else "no turns and no calls"
        yield f"A and {letter} are identical: {said}"
        return
    yield f"A and {letter} first differ {_place(difference)}"
    for number, (left, right) in enumerate(zip_longest(ours, theirs)):
        mark = "  <- first difference" if number == difference.turn else ""
        if left is None or right is None:
            yield f"turn {number}  only in {letter if left is None else 'A'}{mark}"
            continue
        parts = [pair for pair in pairs(left, right) if pair[0].text or pair[1].text]
        lines = [line for one, other in parts for line in _part(one, other, kinds)]
        yield f"turn {number}{'' if lines else '  the same'}{mark}"
        yield from (f"  {line}" for text in lines for line in text.split("\n"))


def _place(difference: Difference) -> str:
    if difference.part == "turn":
        return f"at turn {difference.turn}, which only one has"
    at = [f"{unit} {n}" for unit, n in (("token", difference.token), ("word", difference.word))
          if n is not None]  # fmt: skip
    counted = f" at {', '.join(at)} (counted from 0)" if at else ""
    return f"in turn {difference.turn}, {difference.part}{counted}"


def _part(one: Part, other: Part, kinds: list[str]) -> Iterator[str]:
    """What to say of a part; nothing where there is no difference to show."""
    from localtrace.compare import align, words

    if one.text != other.text and "text" in kinds:
        yield f"{one.name}: {_inline(align(words(one.text), words(other.text)), ''.join)}"
    if one.ids is None or other.ids is None:
        if "text" not in kinds and one.text != other.text and one.name == "output":
            yield "output: differs, and not both have token ids"
        return
    if one.ids != other.ids and "ids" in kinds:
        yield f"{one.name} ids: {_inline(align(one.ids, other.ids), _joined)}"
    elif one.ids != other.ids and one.text == other.text:
        yield f"{one.name}: the token ids differ, the text does not (see --ids)"
    if "logprobs" in kinds:
        yield from _logprobs(one, other)


def _joined(ids: list[int]) -> str:
    return " ".join(map(str, ids)) + " "


def _logprobs(one: Part, other: Part) -> Iterator[str]:
    """How far the logprobs of the ids before the first difference are apart."""
    from localtrace.tokens import shared_prefix

    ours, theirs = one.logprobs or [], other.logprobs or []
    shared = min(shared_prefix(one.ids or [], other.ids or []), len(ours), len(theirs))
    apart = [abs(ours[place] - theirs[place]) for place in range(shared)]
    if apart:
        largest = max(range(shared), key=apart.__getitem__)
        yield (
            f"logprobs of the {shared} tokens before any difference: mean distance "
            f"{sum(apart) / shared:.4g}, largest {apart[largest]:.4g} at token {largest}"
        )
    if shared < min(len(ours), len(theirs)):
        yield (
            f"logprobs at token {shared}: A {(one.ids or [])[shared]} ({ours[shared]:.4g}), "
            f"other {(other.ids or [])[shared]} ({theirs[shared]:.4g})"
        )
    if not (ours and theirs):
        yield "logprobs: not recorded for both"


def _inline(stretches: list[Stretch], joined: Callable[[Any], str]) -> str:
    """Both sides as one text in which the differences are marked."""
    paint = _painter()
    parts = []
    for number, stretch in enumerate(stretches):
        if not stretch.compared:
            cut = f"not compared, it is too long: {len(stretch.left)} and {len(stretch.right)} more"
            parts.append(f"… ({cut}) …")
        elif stretch.is_same:
            parts.append(
                _shortened(stretch.left, joined, number == 0, number == len(stretches) - 1)
            )
        else:
            parts.append(paint(joined(stretch.left), joined(stretch.right)))
    return "".join(parts)


def _shortened(units: Any, joined: Callable[[Any], str], first: bool, last: bool) -> str:
    before, after = 0 if first else _CONTEXT, 0 if last else _CONTEXT
    left_out = len(units) - before - after
    if left_out <= _CONTEXT:
        return escape(joined(units))
    end = joined(units[len(units) - after :]) if after else ""
    return escape(joined(units[:before])) + f" …({left_out} the same)… " + escape(end)


def _painter() -> Callable[[str, str], str]:
    coloured = sys.stdout.isatty() and "NO_COLOR" not in os.environ

    def paint(left: str, right: str) -> str:
        left, right = escape(left), escape(right)
        if coloured:
            gone = click.style(left, fg="red", strikethrough=True) if left else ""
            return gone + (click.style(right, fg="green") if right else "")
        return (f"[-{left}-]" if left else "") + (f"{{+{right}+}}" if right else "")

    return paint
