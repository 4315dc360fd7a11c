"""An answer is empty where a model said nothing, whatever mark of the end it gave."""

from __future__ import annotations

from pathlib import Path

import pytest

import localtrace
from tests.recording import recording


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", True),
        (" \n\u00a0", True),
        ("<|im_end|>", True),
        ("\n<|eot_id|> <|endoftext|>", True),
        ("<｜end▁of▁sentence｜>", True),
        ("</s>", True),
        ("<end_of_turn>", True),
        ("0<|im_end|>", False),
        ("<answer></answer>", False),
        ("a < b | c > d", False),
        ("<|im_end|>.", False),
    ],
)
def test_marks_of_the_end_say_nothing(tmp_path: Path, text: str, expected: bool) -> None:
    @localtrace.op
    def generate(prompt_ids: list[int]) -> dict[str, object]:
        return {"output_text": text, "output_ids": [7]}

    with recording(tmp_path / "store"):
        with localtrace.trajectory(step=1, sample_index=0):
            generate([1, 2])
        localtrace.flush()
        with localtrace.open_store(tmp_path / "store") as store:
            (row,) = store.sql("select says_nothing($text) as empty", {"text": text}).to_dicts()
            assert row["empty"] is expected
