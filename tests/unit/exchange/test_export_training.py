"""Rows for supervised fine-tuning, and timelines."""

from __future__ import annotations

import asyncio
import json
import os
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from click.testing import Result

import localtrace
from tests.unit.exchange.rollouts import call_tool, chat, generate

Command = Callable[..., Result]
Recorded = tuple[Path, dict[str, str]]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def test_each_answer_is_a_row_after_all_that_it_was_given(
    recorded: Recorded, tmp_path: Path, command: Command
) -> None:
    out = tmp_path / "sft.jsonl"
    command("export", "sft", "step=1", "--best", "1", "-s", recorded[0], "-o", out)
    asked = [{"role": "user", "content": "question 1"}]
    first = [{"role": "assistant", "content": "answer to question 1"}]
    found = [{"role": "tool", "content": "found it"}]
    second = [{"role": "assistant", "content": "answer to found it"}]
    assert lines(out) == [
        {"prompt": asked, "completion": first},
        {"prompt": asked + first + found, "completion": second},
    ]


def test_a_conversation_is_one_row_where_that_is_asked_for(
    recorded: Recorded, tmp_path: Path, command: Command
) -> None:
    out = tmp_path / "sft.jsonl"
    command("export", "sft", "step=1", "--best", "1", "--rows", "messages", "-s", recorded[0],
            "-o", out)  # fmt: skip
    assert lines(out) == [
        {
            "messages": [
                {"role": "user", "content": "question 1"},
                {"role": "assistant", "content": "answer to question 1", "weight": 1},
                {"role": "tool", "content": "found it"},
                {"role": "assistant", "content": "answer to found it", "weight": 1},
            ]
        }
    ]


def test_a_conversation_that_nothing_continues_is_a_row_of_its_own(
    tmp_path: Path, command: Command
) -> None:
    localtrace.init(tmp_path / "s", min_free_bytes=0, seal=False)
    with localtrace.trajectory():
        chat([{"role": "user", "content": "a"}])
        chat([{"role": "user", "content": "b"}])
    localtrace.close()
    command("export", "sft", "--all", "--rows", "messages", "-s", tmp_path / "s", "-o",
            tmp_path / "o")  # fmt: skip
    assert [row["messages"][0]["content"] for row in lines(tmp_path / "o")] == ["a", "b"]


def test_ids_become_prompt_and_completion_by_the_runs_tokenizer(
    tmp_path: Path, command: Command
) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    words = Tokenizer(WordLevel({f"w{number}": number for number in range(40)}, "w0"))
    words.save(str(tmp_path / "tokenizer.json"))
    localtrace.init(
        tmp_path / "s", min_free_bytes=0, seal=False, tokenizer=tmp_path / "tokenizer.json"
    )
    with localtrace.trajectory():
        generate([10, 11])
        generate([10, 11, 11, 12, 20])
    localtrace.close()
    command("export", "sft", "--all", "-s", tmp_path / "s", "-o", tmp_path / "o")
    assert lines(tmp_path / "o") == [
        {"prompt": "w10 w11", "completion": " w11 w12"},
        {"prompt": "w10 w11 w11 w12 w20", "completion": " w13 w21"},
    ]


def test_turns_without_text_are_counted(
    recorded: Recorded, tmp_path: Path, command: Command
) -> None:
    result = command("export", "sft", "step=3", "-s", recorded[0], "-o", tmp_path / "o")
    assert lines(tmp_path / "o") == []
    assert "2 turns without text" in result.stderr


def test_imported_dumps_become_prompt_and_completion(tmp_path: Path, command: Command) -> None:
    line = {"input": "2 + 2?", "output": "4", "score": 1.0, "step": 1}
    (tmp_path / "1.jsonl").write_text(json.dumps(line))
    command("import", "verl-jsonl", tmp_path / "1.jsonl", "-s", tmp_path / "s")
    command("export", "sft", "--all", "-s", tmp_path / "s", "-o", tmp_path / "o")
    assert lines(tmp_path / "o") == [{"prompt": "2 + 2?", "completion": "4"}]


@localtrace.op
async def slow(query: str) -> str:
    await asyncio.sleep(0.002)
    return query


async def rollout(number: int) -> None:
    with localtrace.trajectory(step=1, sample_index=number) as t:
        await slow("first")
        await asyncio.gather(slow("a"), slow("b"), slow("c"))
        call_tool("q")
        t.set(reward=1.0)


def timeline(command: Command, store: Path, out: Path) -> dict[str, Any]:
    assert command("export", "chrome", "step=1", "-s", store, "-o", out).exit_code == 0
    found: dict[str, Any] = json.loads(out.read_bytes())
    return found


def test_slices_of_one_row_lie_beside_or_inside_one_another(
    tmp_path: Path, command: Command
) -> None:
    async def all_at_once() -> None:
        await asyncio.gather(*(rollout(number) for number in range(5)))

    localtrace.init(tmp_path / "s", min_free_bytes=0, seal=False, worker="rollout-0")
    asyncio.run(all_at_once())
    asyncio.run(all_at_once())
    localtrace.close()
    events = timeline(command, tmp_path / "s", tmp_path / "o")["traceEvents"]
    rows = defaultdict(list)
    for event in events:
        assert event["ph"] in ("X", "M")
        if event["ph"] == "X":
            start_ns, duration_ns = round(event["ts"] * 1000), round(event["dur"] * 1000)
            rows[event["pid"], event["tid"]].append((start_ns, start_ns + duration_ns))
    assert sum(map(len, rows.values())) == 10 * 6
    for slices in rows.values():
        for first in slices:
            for second in slices:
                begin, end = max(first[0], second[0]), min(first[1], second[1])
                assert begin >= end or (begin, end) in (first, second)


def test_workers_are_processes_and_rows_are_used_again(
    recorded: Recorded, tmp_path: Path, command: Command
) -> None:
    found = timeline(command, recorded[0], tmp_path / "o")
    names = {event["name"]: event for event in found["traceEvents"] if event["ph"] == "M"}
    assert f"pid {os.getpid()}" in names["process_name"]["args"]["name"]
    slices = [event for event in found["traceEvents"] if event["ph"] == "X"]
    assert {event["tid"] for event in slices} == {1}
    whole = [event for event in slices if event["cat"] == "trajectory"]
    assert [event["name"] for event in whole] == [
        "step 1, sample 7, rollout 0", "step 1, sample 7, rollout 1",
    ]  # fmt: skip
    assert [event["args"]["reward"] for event in whole] == [0.0, 1.0]
    assert {event["cat"] for event in slices} == {"trajectory", "turn", "tool"}
    assert min(event["ts"] for event in slices) == 0
    assert int(found["otherData"]["start_ns"]) > 10**18
