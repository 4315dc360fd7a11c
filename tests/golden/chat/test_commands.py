"""Commands print and write the truth of a custom loop in OpenAI's chat format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from localtrace.cli import main
from localtrace.store.layout import open_layout
from localtrace.store.sealing.seal import seal
from localtrace.testing import recording
from tests.atif_rules import check
from tests.golden.chat.loop import record
from tests.golden.chat.script import ADD

Ids = dict[tuple[int, str, int], str]
ASKED = {"type": "function", "function": {"name": "calculator"}}


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ids]:
    folder = tmp_path_factory.mktemp("chat") / "store"
    with recording(folder, run_id="golden"):
        ids = record()
    seal(open_layout(folder))
    return folder, ids


def run(golden: tuple[Path, Ids], *args: str) -> str:
    done = CliRunner().invoke(main, [*args, "-s", str(golden[0])])
    assert done.exit_code == 0, done.output
    return done.stdout


def written(golden: tuple[Path, Ids], *args: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run(golden, "export", *args, "-o", "-").splitlines()]


@pytest.mark.parametrize("form", ["--messages", "--tree", None])
def test_show_tells_what_the_model_asked_of_tools(
    golden: tuple[Path, Ids], form: str | None
) -> None:
    trace_id = golden[1][1, "add", 2]
    said = run(golden, "show", trace_id, *([form] if form else []))
    assert "calculator" in said
    assert "run_python" in said
    if form != "--tree":
        assert "print(2+3)" in said


def test_show_tells_the_reasoning(golden: tuple[Path, Ids]) -> None:
    assert "I should add the numbers." in run(golden, "show", golden[1][1, "add", 0], "--messages")
    assert "The lexicon says plus." in run(golden, "show", golden[1][1, "add", 1], "--messages")


def test_group_shows_the_question_and_every_rollout(golden: tuple[Path, Ids]) -> None:
    said = run(golden, "group", "step=1", "sample_index=add")
    assert ADD in said
    for text in ("The answer is 5.", "Maybe 6."):
        assert text in said


def test_diff_finds_where_two_rollouts_part(golden: tuple[Path, Ids]) -> None:
    ids = golden[1]
    said = run(golden, "diff", ids[1, "add", 0], ids[1, "add", 1])
    assert "look_up" in said
    same = run(golden, "diff", ids[1, "double", 0], ids[1, "double", 1])
    assert "look_up" not in same


@pytest.mark.parametrize(
    ("options", "conversations", "answers"),
    [
        # Seven training rollouts, of which three have two turns, and one of validation; two said
        # the same to the same question.
        (["run=golden"], 7, 10),
        (["run=golden", "--validate"], 8, 11),
        (["run=golden", "--dedupe"], 6, 9),
        (["reward>0.9"], 3, 4),
        (["step=2"], 2, 2),
        (["step=2", "empty=false"], 1, 1),
    ],
)
def test_rows_for_fine_tuning_are_the_training_rollouts(
    golden: tuple[Path, Ids], options: list[str], conversations: int, answers: int
) -> None:
    assert len(written(golden, "sft", *options)) == answers
    assert len(written(golden, "sft", "--rows", "messages", *options)) == conversations


def test_rows_for_fine_tuning_hold_the_calls_of_a_last_turn(golden: tuple[Path, Ids]) -> None:
    rows = written(golden, "sft", "step=1", "sample_index=add", "rollout_n=2")
    roles = [[message["role"] for message in row["prompt"]] for row in rows]
    assert roles == [["user"], ["user", "assistant", "tool"]]
    (call,) = rows[-1]["completion"][0]["tool_calls"]
    assert call["function"]["name"] == "run_python"


def test_lines_hold_every_call_with_its_kind(golden: tuple[Path, Ids]) -> None:
    rows = written(golden, "jsonl", "run=golden")
    assert len(rows) == 8
    tools = [span for row in rows for span in row["spans"] if span["kind"] == "tool"]
    assert sorted(span["op"] for span in tools) == [
        "calculator", "calculator", "calculator", "look_up", "run_python",
    ]  # fmt: skip
    assert all(span["kind_derived"] for span in tools)


def test_documents_of_atif_tell_what_was_asked_answered_and_earned(
    golden: tuple[Path, Ids],
) -> None:
    documents = {one["trajectory_id"]: one for one in written(golden, "atif", "run=golden")}
    for document in documents.values():
        check(document)
    of = {key: documents[trace_id] for key, trace_id in golden[1].items()}
    asked, tools, last = of[1, "add", 1]["steps"]
    assert (asked["source"], asked["message"]) == ("user", ADD)
    assert tools["tool_calls"] == [
        {"tool_call_id": "call_0", "function_name": "calculator",
         "arguments": {"expression": "1/0"}},
        {"tool_call_id": "call_1", "function_name": "look_up", "arguments": {"word": "sum"}},
    ]  # fmt: skip
    assert tools["observation"]["results"] == [
        {"source_call_id": "call_0", "content": "error: float division by zero"},
        {"source_call_id": "call_1", "content": "sum: plus"},
    ]
    assert (last["reasoning_content"], last["message"]) == ("The lexicon says plus.", "Maybe 6.")
    extra = of[1, "add", 1]["extra"]
    assert (extra["reward"], extra["group_id"], extra["step"]) == (0.5, "1-add", 1)
    outcomes = {one["name"]: one["value"] for one in extra["outcomes"]}
    assert outcomes == {"advantage": 0.0, "fate": "trained", "trained_step": 1}
    # No prompt holds the answer to the last call: it stands in the tool's recorded call alone.
    (refused,) = of[1, "add", 2]["steps"][-1]["observation"]["results"]
    assert refused["source_call_id"] == "call_0"
    assert refused["content"] == "PermissionError: no sandbox for 10 characters"
    assert [len(of[key]["steps"]) for key in ((1, "add", 0), (1, "double", 0))] == [3, 2]


def test_spans_of_opentelemetry_are_of_the_same_kinds(golden: tuple[Path, Ids]) -> None:
    spans = [
        {one["key"]: one["value"].get("stringValue") for one in span["attributes"]}
        for request in written(golden, "otlp", "run=golden")
        for part in request["resourceSpans"]
        for scope in part["scopeSpans"]
        for span in scope["spans"]
    ]
    counted = [span.get("gen_ai.operation.name") for span in spans]
    assert counted.count("execute_tool") == 5
    assert counted.count("chat") == 11


@pytest.mark.parametrize("filters", [[], ["run=golden"], ["attempt=0"], ["run=latest"]])
def test_a_limit_holds_with_every_filter(golden: tuple[Path, Ids], filters: list[str]) -> None:
    rows = json.loads(run(golden, "ls", "--limit", "3", "--format", "json", *filters))
    assert len(rows) == 3
    assert len(written(golden, "jsonl", "--limit", "3", *(filters or ["step=1"]))) == 3


def test_the_best_of_each_group_is_chosen(golden: tuple[Path, Ids]) -> None:
    rows = written(golden, "jsonl", "--best", "1", "step=1", "sample_index=add")
    assert [row["trace_id"] for row in rows] == [golden[1][1, "add", 0]]
