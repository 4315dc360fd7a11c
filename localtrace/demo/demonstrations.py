"""Demonstrations for the warm-up, by a demonstrator who knows the format but works carelessly.

Imitating it gives the policy a start as a pretrained model would: it takes turns and copies
numbers, but often guesses before it is done, or writes calls that the calculator refuses.
Reinforcement learning has to find out that neither pays.
"""

from __future__ import annotations

import random

from localtrace.demo.task import Problem, calculate

GUESS = 0.5
"""How often the demonstrator answers with the number at hand instead of calling the calculator."""
SLIP = 0.2
"""How often a call is malformed, and repeated after the error."""


def demonstrate(problem: Problem, rng: random.Random) -> list[tuple[str, bool]]:
    """One conversation as pieces of text, each with whether the model wrote it."""
    pieces = [(f"<user>{problem.question}<assistant>", False)]
    at_hand = str(problem.numbers[0])
    for call in problem.calls():
        if rng.random() < GUESS:
            break
        if rng.random() < SLIP:
            slip = rng.choice((call.replace("+", "++"), call.replace("-", "")))
            pieces += [(f"<call>{slip}<end>", True), ("<tool><error><assistant>", False)]
        at_hand = str(calculate(call))
        pieces += [(f"<call>{call}<end>", True), (f"<tool>{at_hand}<assistant>", False)]
    return [*pieces, (f"<answer>{at_hand}<end>", True)]
