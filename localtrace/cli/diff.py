"""`localtrace diff`: compare trajectories turn by turn."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from string import ascii_uppercase
from typing import TYPE_CHECKING, Any

import click

from localtrace.cli.options import store_option
from localtrace.cli.resolve import PICK_HELP
from localtrace.printing import draw, say
from localtrace.terminal import escape, escape_line

if TYPE_CHECKING:
    from localtrace.read.diff import Difference, Part, Stretch, Turn
    from localtrace.read.store import Store
    from localtrace.types import Trajectory

_CONTEXT = 24
"""Words, spaces and signs (or ids) shown on each side of a difference."""


@click.command(epilog=PICK_HELP)
@click.argument("trajectories", nargs=-1, metavar="A B [C]...")
@click.option("--text/--no-text", default=True, help="Compare texts word by word, or not at all.")
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

    The first one is compared with each of the others. A terminal shows words of the first only in
    red and words of the other only in green; elsewhere they are printed as [-first-] and {+other+}.
    """
    if len(trajectories) < 2:
        raise click.UsageError("name two trajectories or more: localtrace diff A B")
    from localtrace.cli.resolve import find_trajectory
    from localtrace.read.store import open_store

    asked = (("text", text), ("ids", ids), ("logprobs", logprobs))
    with open_store(*store_paths) as store:
        trace_ids = [find_trajectory(store, name) for name in trajectories]
        print_comparison(store, trace_ids, [kind for kind, is_asked in asked if is_asked])


def print_comparison(store: Store, trace_ids: Sequence[str], kinds: Sequence[str]) -> None:
    """Print how each trajectory differs from the first.

    Args:
        store: the store that holds them.
        trace_ids: two or more whole ids.
        kinds: the parts to compare: text, ids, logprobs.
    """
    from localtrace.read.diff import turn_parts
    from localtrace.read.unseen import why_no_calls

    whole = list(store.read(trace_ids))
    for number, one in enumerate(whole):
        say(f"{_letter(number)}  {_about(one)}")
    first = turn_parts(whole[0])
    for number, one in enumerate(whole[1:], start=1):
        say()
        if one.trace_id == whole[0].trace_id:
            say(f"A and {_letter(number)} are the same trajectory")
            continue
        if gone := [n for n in (0, number) if whole[n].spans_pruned is not None]:
            for place in gone:
                say(f"{_letter(place)} cannot be compared: {why_no_calls(whole[place])}")
            continue
        theirs = turn_parts(one)
        for line in _compared(_letter(number), first, theirs, kinds):
            draw(line)


def _letter(number: int) -> str:
    """Return the letter of a trajectory: A to Z, then A1, B1 and so on."""
    round_, place = divmod(number, len(ascii_uppercase))
    return f"{ascii_uppercase[place]}{round_ or ''}"


def _about(one: Trajectory) -> str:
    places = ((key, getattr(one, key)) for key in ("step", "sample_index", "rollout_n", "reward"))
    given = [f"{key} {value}" for key, value in places if value is not None]
    turns = "calls pruned" if one.spans_pruned is not None else f"{len(one.turns)} turns"
    return f"{one.trace_id}  {', '.join([*given, turns, one.status])}"


def _compared(
    letter: str, ours: list[Turn], theirs: list[Turn], kinds: Sequence[str]
) -> Iterator[str]:
    from localtrace.read.diff import first_difference, turn_pairs

    difference = first_difference(ours, theirs)
    if difference is None:
        count = sum(not turn.is_end for turn in ours)
        said = f"{count} turns" if ours else "no turns and no calls"
        yield f"A and {letter} are identical: {said}"
        return
    yield f"A and {letter} first differ {escape_line(_place(difference))}"
    for name, left, right in turn_pairs(ours, theirs):
        mark = "  <- first difference" if name == difference.turn else ""
        if left is None or right is None:
            yield f"{name}  only in {letter if left is None else 'A'}{mark}"
            continue
        lines = list(_turn(letter, left, right, kinds))
        yield f"{name}{'' if lines else '  the same'}{mark}"
        yield from (f"  {line}" for text in lines for line in text.split("\n"))


def _turn(letter: str, left: Turn, right: Turn, kinds: Sequence[str]) -> Iterator[str]:
    """Yield the lines about two turns; none if no difference is to be shown."""
    from localtrace.read.diff import pairs
    from localtrace.read.turns import shortened

    for one, other in pairs(left, right):
        if one is not None and other is not None:
            yield from _part(one, other, kinds)
        elif (known := one or other) and known.text:
            whose = letter if one is None else "A"
            yield f"{escape_line(known.name)}  only in {whose}: {escape(shortened(known.text))}"


def _place(difference: Difference) -> str:
    if difference.part == "turn":
        return f"at {difference.turn}, which only one has"
    where = difference.turn if difference.turn.startswith("after") else f"in {difference.turn}"
    if difference.alone:
        return f"{where}, {difference.part}, which only one has"
    at = [f"{unit} {n}" for unit, n in (("token", difference.token), ("word", difference.word))
          if n is not None]  # fmt: skip
    counted = f" at {', '.join(at)} (counted from 0)" if at else ""
    return f"{where}, {difference.part}{counted}"


def _part(one: Part, other: Part, kinds: Sequence[str]) -> Iterator[str]:
    """Yield the lines about two parts of turns; none if no difference is to be shown."""
    from localtrace.read.diff import align, words

    if one.text != other.text and "text" in kinds:
        aligned = align(words(one.text), words(other.text))
        yield f"{escape_line(one.name)}: {_inline(aligned, ''.join)}"
    if one.ids is None or other.ids is None:
        if "text" not in kinds and one.text != other.text and one.name == "output":
            yield "output: differs; token ids are not recorded for both"
        return
    if one.ids != other.ids and "ids" in kinds:
        yield f"{one.name} ids: {_inline(align(one.ids, other.ids), _joined)}"
    elif one.ids != other.ids and one.text == other.text:
        yield f"{one.name}: only the token ids differ (see --ids)"
    if "logprobs" in kinds:
        yield from _logprobs(one, other)


def _joined(ids: list[int]) -> str:
    return " ".join(map(str, ids)) + " "


def _logprobs(one: Part, other: Part) -> Iterator[str]:
    """Yield how far the logprobs of equal ids, up to the first difference, are apart."""
    from localtrace.store.whole_prompts import shared_prefix

    ours, theirs = one.logprobs or [], other.logprobs or []
    shared = min(shared_prefix(one.ids or [], other.ids or []), len(ours), len(theirs))
    apart = {
        place: abs(own - others)
        for place, (own, others) in enumerate(zip(ours[:shared], theirs[:shared], strict=True))
        if own is not None and others is not None
    }
    if apart:
        largest = max(apart, key=apart.__getitem__)
        yield (
            f"logprobs of the {shared} tokens before any difference: mean distance "
            f"{sum(apart.values()) / len(apart):.4g}, largest {apart[largest]:.4g} "
            f"at token {largest}"
        )
    if shared < min(len(ours), len(theirs)):
        own, others = ours[shared], theirs[shared]
        yield (
            f"logprobs at token {shared}: A {(one.ids or [])[shared]} ({_number(own)}), "
            f"other {(other.ids or [])[shared]} ({_number(others)})"
        )
    if not (ours and theirs):
        yield "logprobs: not recorded for both"


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.4g}"


def _inline(stretches: list[Stretch], joined: Callable[[Any], str]) -> str:
    """Return both sides as one text with the differences marked."""
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
