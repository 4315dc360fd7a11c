"""Aligning words, ids and turns."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localtrace.compare import Difference, Part, align, first_difference, words


@given(st.text())
def test_words_together_are_the_text(text: str) -> None:
    assert "".join(words(text)) == text


def test_scripts_without_spaces_are_compared_sign_by_sign() -> None:
    assert words("答案是 42.") == ["答", "案", "是", " ", "42", "."]


@given(st.lists(st.integers(0, 3)), st.lists(st.integers(0, 3)), st.integers(1, 8))
def test_stretches_together_are_both_sides(left: list[int], right: list[int], most: int) -> None:
    stretches = align(left, right, most)
    assert [unit for stretch in stretches for unit in stretch.left] == left
    assert [unit for stretch in stretches for unit in stretch.right] == right


def test_what_both_have_is_the_same_and_the_rest_is_not() -> None:
    stretches = align(list("abcd"), list("abXd"))
    assert [stretch.is_same for stretch in stretches] == [True, False, True]
    assert (stretches[1].left, stretches[1].right) == (["c"], ["X"])


def test_what_is_too_much_is_left_out_and_said() -> None:
    cut = [stretch for stretch in align([1] * 10, [2] * 5, 3) if not stretch.compared]
    assert [(len(stretch.left), len(stretch.right)) for stretch in cut] == [(7, 2)]


def test_long_lists_that_repeat_themselves_are_compared() -> None:
    left, right = [n % 7 for n in range(32_000)], [n % 5 for n in range(32_000)]
    assert not all(stretch.is_same for stretch in align(left, right))


def part(text: str, ids: list[int] | None = None) -> dict[str, Part]:
    return {"output": Part("output", text, ids)}


@pytest.mark.parametrize(
    ("left", "right", "where"),
    [
        ([part("a b")], [part("a b")], None),
        ([part("a b")], [part("a c")], Difference(0, "output", word=1)),
        ([part("a"), part("b")], [part("a")], Difference(1, "turn")),
        ([part("a", [1, 2])], [part("a", [1, 3])], Difference(0, "output", token=1)),
        ([part("a", [1])], [part("b")], Difference(0, "output", word=0)),
        ([{}], [part("a")], Difference(0, "output", word=0)),
        ([], [], None),
    ],
)
def test_the_first_difference(
    left: list[dict[str, Part]], right: list[dict[str, Part]], where: Difference | None
) -> None:
    assert first_difference(left, right) == where
