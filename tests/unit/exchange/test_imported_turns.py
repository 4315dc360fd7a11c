"""Imported turns count as generations, and their prompts are followed like others."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import localtrace
from localtrace import testing
from tests.unit.exchange.test_import_sglang import IDS, TEXT, log

Command = Callable[..., Any]
Rows = Callable[[Path, str], list[dict[str, Any]]]
TRAJECTORIES = "select * from trajectories order by step, reward, trace_id"


def dump(folder: Path, step: int) -> None:
    """Two prompts with two rollouts each, as verl writes them."""
    folder.mkdir(exist_ok=True)
    lines = [
        {"input": f"{number} + 2?", "output": answer, "score": float(answer == f"{number + 2}"),
         "step": step}
        for number in (2, 3) for answer in ("4", "5")
    ]  # fmt: skip
    (folder / f"{step}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_dumps_of_text_have_turns_answers_and_prompts(
    tmp_path: Path, command: Command, rows: Rows
) -> None:
    for step in (1, 2):
        dump(tmp_path / "dumps", step)
    command("import", "verl-jsonl", tmp_path / "dumps", "-s", tmp_path / "s")
    found = rows(tmp_path / "s", TRAJECTORIES)
    assert {(row["turn_count"], row["output_tokens"]) for row in found} == {(1, None)}
    turns = rows(tmp_path / "s", "select * from turns order by output_text")
    assert [row["output_text"] for row in turns] == ["4"] * 4 + ["5"] * 4
    by_hash = rows(
        tmp_path / "s",
        "select prompt_hash, count(*) as rollouts, sum(reward) as right from trajectories "
        "group by prompt_hash",
    )
    assert [(row["rollouts"], row["right"]) for row in by_hash] == [(4, 2.0), (4, 2.0)]


def test_a_dump_and_a_recording_of_the_same_text_have_the_same_hash(
    tmp_path: Path, command: Command, rows: Rows
) -> None:
    @localtrace.op
    def complete(prompt: str) -> dict[str, str]:
        return {"text": "4"}

    with testing.recording(tmp_path / "s", run_id="live"), localtrace.trajectory(step=0):
        complete("2 + 2?")
    dump(tmp_path / "dumps", 1)
    command("import", "verl-jsonl", tmp_path / "dumps", "-s", tmp_path / "s")
    live, *imported = rows(tmp_path / "s", TRAJECTORIES)
    assert [row["prompt_hash"] for row in imported].count(live["prompt_hash"]) == 2


def test_an_engines_log_and_its_hook_agree_on_the_prompt(
    tmp_path: Path, command: Command, rows: Rows
) -> None:
    @localtrace.op
    def generate(prompt_ids: list[int]) -> dict[str, Any]:
        return {"output_ids": [7]}

    with testing.recording(tmp_path / "s", run_id="live"), localtrace.trajectory(step=0):
        generate([1, 2])
    command("import", "sglang-metrics", log(tmp_path / "logs", IDS, TEXT), "-s", tmp_path / "s")
    live, *imported = [row["prompt_hash"] for row in rows(tmp_path / "s", TRAJECTORIES)]
    assert live in imported
    assert None not in imported
    assert len(set(imported)) == 2
