"""A call that generates several answers at once is one call and as many turns, and nothing else."""

from __future__ import annotations

import contextvars
import json
import random
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

import localtrace
from localtrace.cli import main
from localtrace.read.store import Store, open_store
from localtrace.redaction.redaction import Redaction
from localtrace.store.layout import open_layout
from localtrace.store.sealing.seal import seal
from tests.bundled import bundle
from tests.environment import soaks
from tests.recording import Recording

PROMPTS = [[1, 2], [3, 4, 5]]
CHATS = [[{"role": "user", "content": "2 + 2?"}], [{"role": "user", "content": "3 + 3?"}]]
TEXTS = ["2 + 2?", "3 + 3?"]
OUTPUTS: list[dict[str, Any]] = [
    {"output_ids": [7, 8, 9], "output_logprobs": [-0.5, -1.0, -0.25], "text": "four",
     "finish_reason": "stop"},
    {"output_ids": [6], "output_logprobs": [-2.0], "text": "six", "finish_reason": "length"},
]  # fmt: skip
SIDE_BY_SIDE = {name: [output[name] for output in OUTPUTS] for name in OUTPUTS[0]}
CHOICES = {
    "model": "m",
    "choices": [
        {"index": number, "text": output["text"], "token_ids": output["output_ids"],
         "finish_reason": output["finish_reason"],
         "logprobs": {"tokens": ["a"] * len(output["output_ids"]),
                      "token_logprobs": output["output_logprobs"]}}
        for number, output in enumerate(OUTPUTS)
    ],
}  # fmt: skip
RESULTS = {"a list": OUTPUTS, "lists": SIDE_BY_SIDE, "choices": CHOICES}


def generated(name: str, prompts: Any, result: Any) -> None:
    """Call a function that takes its prompts under this name."""
    made: dict[str, Any] = {"op": localtrace.op, "result": result}
    exec(f"@op\ndef generate({name}):\n    return result", made)
    made["generate"](prompts)


def read(store: Recording) -> Store:
    """The store, live and sealed found to be the same."""
    views = (
        "select * from turns order by trace_id, turn",
        "select * from spans order by trace_id, seq",
    )
    localtrace.flush()
    with open_store(store.path) as opened:
        live = [opened.sql(sql).to_dicts() for sql in views]
    localtrace.close()
    seal(open_layout(store.path))
    opened = open_store(store.path)
    assert [opened.sql(sql).to_dicts() for sql in views] == live
    return opened


def column(store: Store, name: str) -> list[Any]:
    """A column of the turns, in their order."""
    rows = store.sql(f"select {name} from turns order by trace_id, turn").to_dicts()
    return [row[name] for row in rows]


# -- what is counted ---------------------------------------------------------------------------


def test_every_prompt_of_a_batch_is_a_turn_of_its_own(store: Recording) -> None:
    names = ("prompts", "prompt_ids", "prompt_token_ids", "input_ids")
    calls = [
        (name, result)
        for number, name in enumerate(names)
        for place, result in enumerate(RESULTS.values())
        if soaks() or place == number % len(RESULTS)
    ]
    for name, result in calls:
        with localtrace.trajectory(step=1):
            generated(name, PROMPTS, result)
    n = len(calls)
    with read(store) as opened:
        rows = opened.trajectories().to_dicts()
        assert [(row["span_count"], row["turn_count"], row["output_tokens"]) for row in rows] == (
            [(1, 2, 4)] * n
        )
        assert column(opened, "prompt_ids") == PROMPTS * n
        assert column(opened, "prompt_tokens") == [2, 3] * n
        assert column(opened, "output_ids") == [[7, 8, 9], [6]] * n
        assert column(opened, "output_logprobs") == [[-0.5, -1.0, -0.25], [-2.0]] * n
        assert column(opened, "output_text") == ["four", "six"] * n
        assert column(opened, "finish_reason") == ["stop", "length"] * n
        assert column(opened, "batch_index") == [0, 1] * n
        assert len(opened.tokens()) == 4 * n
        answers = opened.sql("select output_text, turn from answers").to_dicts()
        assert answers == [{"output_text": "six", "turn": 1}] * n
        detectors = opened.sql("select truncated from detectors").to_dicts()
        assert detectors == [{"truncated": True}] * n
        spans = opened.sql("select kind, kind_derived, batch_size from spans").to_dicts()
        assert spans == [{"kind": "generation", "kind_derived": True, "batch_size": 2}] * n


def test_every_conversation_of_a_batch_is_a_turn_of_its_own(store: Recording) -> None:
    system = {"role": "system", "content": "Be brief."}
    chats = [[system, *chat] for chat in CHATS]
    for name in ("messages", "prompts", "raw_prompt"):
        with localtrace.trajectory(step=1):
            generated(name, chats, [{"content": "four"}, {"content": "six"}])
    with read(store) as opened:
        rows = opened.sql(
            "select turn, content, generated from messages order by trace_id, turn, position"
        ).to_dicts()
        assert [tuple(row.values()) for row in rows] == 3 * [
            (0, "Be brief.", False), (0, "2 + 2?", False), (0, "four", True),
            (1, "Be brief.", False), (1, "3 + 3?", False), (1, "six", True),
        ]  # fmt: skip


def test_every_text_of_a_batch_is_a_turn_of_its_own(store: Recording) -> None:
    for name in ("prompt", "prompts"):
        with localtrace.trajectory(step=1):
            generated(name, TEXTS, [{"text": "four"}, {"text": "six"}])
    with read(store) as opened:
        ids = [row["trace_id"] for row in opened.trajectories()]
        turns = [[turn.inputs for turn in opened.trajectory(name).turns] for name in ids]
        assert turns == [[{"prompt": text} for text in TEXTS]] * 2
        assert column(opened, "output_text") == ["four", "six"] * 2


def test_several_choices_of_one_prompt_are_turns_that_share_it(store: Recording) -> None:
    with localtrace.trajectory(step=1):
        generated("prompt_ids", [1, 2, 3], CHOICES)
        generated("messages", CHATS[0], CHOICES)
    with read(store) as opened:
        (row,) = opened.trajectories().to_dicts()
        assert (row["turn_count"], row["output_tokens"]) == (4, 8)
        turns = opened.trajectory(row["trace_id"]).turns
        assert [turn.prompt_ids for turn in turns[:2]] == [[1, 2, 3]] * 2
        assert [turn.messages for turn in turns[2:]] == [CHATS[0]] * 2
        whole = opened.sql(f"select prompt_ids from whole_prompts('{row['trace_id']}')").to_dicts()
        assert [turn["prompt_ids"] for turn in whole] == [[1, 2, 3]] * 3
        messages = opened.sql("select content from messages where not generated").to_dicts()
        assert messages == [{"content": "2 + 2?"}]
        assert column(opened, "response_start") == [0, None, None, None]


def test_several_samples_of_each_prompt_follow_one_another(store: Recording) -> None:
    with localtrace.trajectory(step=1):
        generated("prompts", PROMPTS, [{"output_ids": [number]} for number in range(4)])
    with read(store) as opened:
        assert column(opened, "prompt_ids") == [PROMPTS[0], PROMPTS[0], PROMPTS[1], PROMPTS[1]]


def test_answers_of_which_nobody_knows_whose_they_are_have_no_prompt(store: Recording) -> None:
    with localtrace.trajectory(step=1):
        generated("prompts", PROMPTS, [*OUTPUTS, OUTPUTS[0]])
    with read(store) as opened:
        assert column(opened, "prompt_ids") == [None] * 3
        assert column(opened, "output_text") == ["four", "six", "four"]


def test_an_item_that_failed_leaves_the_others_their_place(store: Recording) -> None:
    with localtrace.trajectory(step=1):
        generated("prompts", [*PROMPTS, [6]], [OUTPUTS[0], None, OUTPUTS[1]])
    with read(store) as opened:
        assert column(opened, "batch_index") == [0, 2]
        assert column(opened, "prompt_ids") == [PROMPTS[0], [6]]


def test_a_batch_of_one_is_one_turn_with_its_prompt(store: Recording) -> None:
    with localtrace.trajectory(step=1):
        ids = [1, 2]
        for number in range(3):
            generated("prompts", [ids], [{"output_ids": [number + 7]}])
            ids = [*ids, number + 7, 0]
    with read(store) as opened:
        assert column(opened, "prompt_tokens") == [2, 4, 6]
        assert column(opened, "response_start") == [0, 2, 4]


NO_GENERATIONS: dict[str, tuple[str, Any, Any]] = {
    "template": ("messages", CHATS, [[1, 2], [3]]),
    "template as text": ("messages", CHATS, ["<user>2 + 2?", "<user>3 + 3?"]),
    "padding": ("prompts", PROMPTS, [[1], [3]]),
    "search": ("messages", CHATS[0], [{"text": "found"}, {"text": "it"}]),
    "stream": ("prompt_ids", [1, 2], [{"output_ids": [7]}, {"output_ids": [7, 8]}]),
    "scores": ("prompts", PROMPTS, [{"score": 1.0}, {"score": 0.0}]),
    "nothing": ("prompts", [], []),
}


def test_lists_that_say_no_generation_are_no_turns(store: Recording) -> None:
    for name, call in NO_GENERATIONS.items():
        with localtrace.trajectory(agent=name):
            generated(*call)
    with read(store) as opened:
        assert column(opened, "turn") == []
        rows = opened.trajectories().to_dicts()
        assert {row["agent"]: (row["span_count"], row["turn_count"]) for row in rows} == (
            dict.fromkeys(NO_GENERATIONS, (1, 0))
        )


@pytest.mark.parametrize(
    ("prompts", "result"),
    [(PROMPTS, [[7, 8], [9]]), (torch.tensor([[1, 2], [3, 4]]), torch.tensor([[7, 8], [6, 0]]))],
    ids=["lists", "as generate of transformers gives them"],
)
def test_bare_rows_are_turns_where_the_code_says_so(
    store: Recording, prompts: Any, result: Any
) -> None:
    @localtrace.op(kind="generation")
    def generate(input_ids: Any) -> Any:
        return result

    with localtrace.trajectory(step=1):
        generate(prompts)
    with read(store) as opened:
        assert column(opened, "output_ids") == [list(map(int, row)) for row in result]
        assert column(opened, "prompt_ids") == [list(map(int, row)) for row in prompts]


# -- what is read back, replayed and carried away ----------------------------------------------


def test_the_call_is_read_back_as_it_was_made_and_replayed_as_one(store: Recording) -> None:
    for form, result in RESULTS.items():
        with localtrace.trajectory(step=1, agent=form):
            generated("prompts", PROMPTS, result)
    with read(store) as opened:
        rows = opened.trajectories().to_dicts()
        assert len(opened.sql("from spans")) == len(rows) == len(RESULTS)
        for row in rows:
            whole = opened.trajectory(row["trace_id"])
            (call,) = whole.spans
            assert (call.inputs, call.outputs) == ({"prompts": PROMPTS}, RESULTS[row["agent"]])
            assert [turn.parent_id for turn in whole.generations] == [call.span_id] * 2
            assert Redaction.load(None).trajectory(whole).spans == [call]


def test_what_must_not_leave_is_taken_out_of_every_generation(
    store: Recording, tmp_path: Path
) -> None:
    key = "sk-ant-api03-" + "X" * 40
    with localtrace.trajectory(step=1):
        generated("prompts", TEXTS, [{"text": f"it is {key}"}, {"text": "six"}])
    localtrace.close()
    built = bundle(store.path, tmp_path / "bundle")
    with open_store(built.path) as opened:
        rows = opened.sql("select * from stored.spans").to_dicts()
        assert key not in str(rows)
        assert column(opened, "output_text")[1] == "six"


def test_copies_of_a_store_give_each_generation_once(store: Recording, tmp_path: Path) -> None:
    with localtrace.trajectory(step=1):
        generated("prompts", PROMPTS, OUTPUTS)
    localtrace.close()
    shutil.copytree(store.path, tmp_path / "copy")
    seal(open_layout(store.path))
    with open_store(store.path, tmp_path / "copy") as opened:
        assert column(opened, "batch_index") == [0, 1]


def test_show_and_diff_tell_every_generation_of_a_batch(store: Recording) -> None:
    ids = []
    for texts in (["four", "six"], ["four", "seven"]):
        with localtrace.trajectory(step=1) as t:
            generated("messages", CHATS, [{"content": text} for text in texts])
        ids.append(t.trace_id)
    localtrace.flush()
    for words in (["show", ids[0]], ["show", ids[0], "--messages"]):
        shown = CliRunner().invoke(main, [*words, "-s", str(store.path)]).output
        lines = [line.strip() for line in shown.splitlines()]
        assert [line for line in lines if line.startswith(("user:", "assistant:"))] == [
            "user: 2 + 2?", "assistant: four", "user: 3 + 3?", "assistant: six",
        ]  # fmt: skip
    shown = CliRunner().invoke(main, ["diff", *ids, "-s", str(store.path)]).output
    assert "turn 1, output" in shown


def test_exports_hold_every_generation(store: Recording, tmp_path: Path) -> None:
    with localtrace.trajectory(step=1):
        generated("messages", CHATS, [{"content": "four"}, {"content": "six"}])
    localtrace.flush()
    path = tmp_path / "out"
    for kind in ("sft", "jsonl"):
        result = CliRunner().invoke(
            main, ["export", kind, "--all", "-o", str(path), "-s", str(store.path)]
        )
        assert result.exit_code == 0, result.output
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        path.unlink()
        if kind == "sft":
            assert [row["completion"][0]["content"] for row in rows] == ["four", "six"]
        else:
            assert [turn["output_text"] for turn in rows[0]["generations"]] == ["four", "six"]
            assert len(rows[0]["spans"]) == 1


# -- one of a batch in its own trajectory ------------------------------------------------------


def test_a_turn_of_a_batch_is_recorded_where_it_belongs(store: Recording) -> None:
    for number, (prompt, output) in enumerate(zip(PROMPTS, OUTPUTS, strict=True)):
        with localtrace.trajectory(step=1, sample_index=number):
            localtrace.record_turn(
                output, prompt_ids=prompt, start_ns=10**18, duration_ns=5, name="sample",
                inputs={"temperature": 1.0},
            )  # fmt: skip
    with read(store) as opened:
        rows = opened.sql(
            "select sample_index, op, prompt_ids, output_ids, output_text, start_ns, end_ns "
            "from turns order by sample_index"
        ).to_dicts()
        assert all(row.pop("end_ns") >= 10**18 + 5 for row in rows)
        assert [tuple(row.values()) for row in rows] == [
            ("0", "sample", [1, 2], [7, 8, 9], "four", 10**18),
            ("1", "sample", [3, 4, 5], [6], "six", 10**18),
        ]
        calls = opened.sql("select kind, kind_derived, inputs from spans").to_dicts()
        assert [tuple(call.values()) for call in calls] == [
            ("generation", False, '{"temperature":1.0}')
        ] * 2


@pytest.mark.parametrize(("output", "ids", "text"), [([7, 8], [7, 8], None), ("4", None, "4")])
def test_a_recorded_turn_may_be_bare_ids_or_text(
    store: Recording, output: Any, ids: Any, text: Any
) -> None:
    with localtrace.trajectory(step=1):
        localtrace.record_turn(output, messages=CHATS[0])
    with read(store) as opened:
        rows = opened.sql("select output_ids, output_text from turns").to_dicts()
        assert rows == [{"output_ids": ids, "output_text": text}]


def test_recording_a_turn_does_no_harm_without_a_recorder_or_with_nonsense(
    store: Recording,
) -> None:
    localtrace.record_turn(object(), prompt_ids=object(), start_ns="now", duration_ns=None)  # type: ignore[arg-type]
    assert [row["turn_count"] for row in store.rows("trajectories")] == [0]
    localtrace.record_turn("4", prompt="2 + 2?", inputs=7)  # type: ignore[arg-type]
    assert localtrace.parent() is None
    localtrace.close()
    localtrace.record_turn("4", prompt="2 + 2?")


# -- threads -----------------------------------------------------------------------------------


def test_turns_of_a_thread_pool_are_whole_and_counted_once_each(store: Recording) -> None:
    @localtrace.op
    def generate(prompt_ids: list[int]) -> dict[str, Any]:
        return {"output_ids": [sum(prompt_ids)], "finish_reason": "stop"}

    prompts = [[random.Random(number).randrange(1000) for _ in range(50)] for number in range(300)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with localtrace.trajectory(step=1), ThreadPoolExecutor(8) as pool:
            futures = [
                pool.submit(contextvars.copy_context().run, generate, ids) for ids in prompts
            ]
            assert [call.result()["output_ids"] for call in futures] == [[sum(p)] for p in prompts]
    finally:
        sys.setswitchinterval(before)
    with read(store) as opened:
        (row,) = opened.trajectories().to_dicts()
        assert (row["span_count"], row["turn_count"], row["output_tokens"]) == (300, 300, 300)
        seqs = opened.sql("select seq from spans order by seq").to_dicts()
        assert [span["seq"] for span in seqs] == list(range(300))
        turns = opened.trajectory(row["trace_id"]).turns
        assert sorted(turn.prompt_ids or [] for turn in turns) == sorted(prompts)
        assert all(turn.output_ids == [sum(turn.prompt_ids or [])] for turn in turns)


# -- rows of arrays ----------------------------------------------------------------------------


def test_rows_of_arrays_are_as_many_generations(store: Recording) -> None:
    for make in (np.array, torch.tensor):
        rows = {
            "output_ids": make([[7, 8, 0], [6, 0, 0]]),
            "log_probs": make([[-0.5, -1.0, 0.0], [-2.0, 0.0, 0.0]]),
            "response_mask": make([[True, True, False], [True, False, False]]),
        }
        with localtrace.trajectory(step=1):
            generated("input_ids", make([[1, 2], [3, 4]]), rows)
    with read(store) as opened:
        counts = [(row["turn_count"], row["output_tokens"]) for row in opened.trajectories()]
        assert counts == [(2, 3)] * 2
        assert column(opened, "prompt_ids") == [[1, 2], [3, 4]] * 2
        assert column(opened, "output_ids") == [[7, 8, 0], [6, 0, 0]] * 2
        assert column(opened, "output_logprobs") == [[-0.5, -1.0, 0.0], [-2.0, 0.0, 0.0]] * 2
        assert column(opened, "response_mask") == [[1, 1, 0], [1, 0, 0]] * 2


def test_an_array_of_one_row_is_that_row(store: Recording) -> None:
    for ids in (np.array([[7, 8]]), torch.tensor([[7, 8]]), [[7, 8]]):
        with localtrace.trajectory(step=1):
            generated("prompt_ids", [1, 2], {"output_ids": ids, "log_probs": [-1.0, -2.0]})
            generated("input_ids", ids, {"output_ids": ids[0]})
    with read(store) as opened:
        counts = [(row["turn_count"], row["output_tokens"]) for row in opened.trajectories()]
        assert counts == [(2, 4)] * 3
        assert column(opened, "output_ids") == [[7, 8], [7, 8]] * 3
        assert column(opened, "output_logprobs") == [[-1.0, -2.0], None] * 3


@pytest.mark.parametrize("prompt", [[1, 2], np.array([1, 2])], ids=repr)
def test_a_prompt_stored_as_what_it_adds_is_the_same_live_and_sealed(
    store: Recording, prompt: Any
) -> None:
    with localtrace.trajectory(step=1):
        generated("prompt_ids", prompt, {"output_ids": np.array([[1, 2, 7]])})
    with read(store) as opened:
        (row,) = opened.trajectories().to_dicts()
        (ids,) = column(opened, "output_ids")
        assert row["output_tokens"] == (None if ids is None else len(ids))


@pytest.mark.parametrize("is_named", [False, True])
def test_ids_that_begin_with_their_prompt_are_no_answer(store: Recording, is_named: bool) -> None:
    prompts, rows = torch.tensor([[1, 2], [3, 4]]), torch.tensor([[1, 2, 7], [3, 4, 0]])

    @localtrace.op(kind="generation")
    def generate(input_ids: Any) -> Any:
        return {"output_ids": rows} if is_named else rows

    with localtrace.trajectory(step=1):
        generate(prompts)
    localtrace.flush()
    assert localtrace.losses()["values"] == {"token_list": 2}
    with read(store) as opened:
        (row,) = opened.trajectories().to_dicts()
        assert (row["turn_count"], row["output_tokens"]) == (2, None)
        assert column(opened, "output_ids") == [None, None]


def test_a_mask_tells_the_answer_from_its_prompt(store: Recording) -> None:
    rows = {"output_ids": np.array([[1, 2, 7]]), "response_mask": np.array([[0, 0, 1]])}
    with localtrace.trajectory(step=1):
        generated("prompt_ids", [1, 2], rows)
    with read(store) as opened:
        (row,) = opened.trajectories().to_dicts()
        assert (row["turn_count"], row["output_tokens"]) == (1, 1)
        assert column(opened, "output_ids") == [[1, 2, 7]]


def test_lists_of_the_only_token_of_a_row_are_lists(store: Recording) -> None:
    with localtrace.trajectory(step=1):
        generated(
            "prompt_ids", [1], {"output_ids": [[5]], "log_probs": [-1.0], "response_mask": [0]}
        )
    with read(store) as opened:
        assert column(opened, "response_mask") == [[0]]
        assert column(opened, "output_logprobs") == [[-1.0]]
