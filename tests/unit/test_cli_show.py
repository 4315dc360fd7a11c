"""`localtrace show`, `tail` and `stats`: the views of a trajectory and of a store."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from localtrace.store.layout import open_layout
from localtrace.store.tokenizers import keep_tokenizer
from tests.commands import answer, record, rows, run
from tests.unit.test_tokenizers import make_tokenizer


@pytest.fixture
def store(tmp_path: Path) -> Path:
    answers = [answer("first", [5, 6], [-0.5, -0.25]), answer("second", [7])]
    rollouts = [{"answers": answers, "tools": ["cat"]}, {"reward": 1.0}, {"step": 5}]
    record(tmp_path / "store", rollouts)
    return tmp_path / "store"


def test_the_tree_names_calls_durations_and_turns(store: Path) -> None:
    said = run("show", "-s", store, "3/17/0", "--tree").stdout.splitlines()
    calls = [line.split("  ") for line in said if line.startswith(("generate", "look_up"))]
    assert [call[0] for call in calls] == ["generate", "look_up", "generate"]
    assert [call[-1] for call in calls if call[0] == "generate"] == [
        "turn 0: 3 -> 2 tokens, stop",
        "turn 1: 6 -> 1 tokens, stop",
    ]


def test_messages_alone_leave_the_calls_out(store: Path) -> None:
    said = run("show", "-s", store, "3/17/0", "--messages").stdout
    assert "assistant: first  [stop]" in said
    assert "look_up" not in said


def test_tokens_are_a_table_in_any_format(store: Path) -> None:
    found = rows("show", "-s", store, "3/17/0", "--tokens")
    assert [(row["turn"], row["position"], row["id"], row["logprob"]) for row in found] == [
        (0, 0, 5, -0.5),
        (0, 1, 6, -0.25),
        (1, 0, 7, None),
    ]
    refused = run("show", "-s", store, "3/17/0", "--format", "json")
    assert refused.exit_code == 2
    assert "--tokens" in refused.stderr


def test_tokens_are_shown_with_their_pieces(store: Path, tmp_path: Path) -> None:
    words = [f"w{number}" for number in range(8)]
    keep_tokenizer(open_layout(store), make_tokenizer(tmp_path / "model", words), "run")
    found = rows("show", "-s", store, "3/17/0", "--tokens")
    assert [(row["piece"], row["generated"]) for row in found] == [
        (" w5", True),
        (" w6", True),
        (" w7", True),
    ]


def test_a_trajectory_without_calls_is_shown(store: Path) -> None:
    for view in (["--tree"], ["--messages"], []):
        assert "reward 1" in run("show", "-s", store, "3/17/1", *view).stdout
    nothing = run("show", "-s", store, "3/17/1", "--tokens")
    assert nothing.exit_code == 0
    assert "no token ids" in nothing.stderr


def test_a_place_that_several_share_lists_their_ids(tmp_path: Path) -> None:
    ids = [record(tmp_path, [{}], run_id=name)[0] for name in ("one", "two")]
    result = run("show", "-s", tmp_path, "3/17/0")
    assert result.exit_code == 2
    assert all(trace_id in result.stderr for trace_id in ids)
    assert "3/17/0" in result.stderr


def test_a_place_where_nothing_is_says_what_there_is(store: Path) -> None:
    said = run("show", "-s", store, "3/99/0").stderr
    assert re.search("3/99/0: .*sample_index=99. .*17$", said)


def test_tail_ends_with_what_there_is_when_it_shall_not_follow(store: Path) -> None:
    lines = run("tail", "-s", store, "--no-follow", "step=3", "-n", "1").stdout.splitlines()
    assert len(lines) == 1
    assert "rollout 1" in lines[0]


def test_stats_say_at_a_glance_what_was_recorded_and_what_lacks(store: Path) -> None:
    said = {row["what"]: row for row in rows("stats", "-s", store)}
    counts = {"status ok": 3, "distinct runs": 1, "distinct steps": 2, "missing steps": 1,
              "turns": 2, "output tokens": 3, "processes that did not close": 0}  # fmt: skip
    assert {what: said[what]["rows"] for what in counts} == counts
    assert said["first record"]["time"] <= said["last record"]["time"]


def test_stats_are_narrowed_by_filters(store: Path) -> None:
    said = {row["what"]: row["rows"] for row in rows("stats", "-s", store, "step=5")}
    assert (said["status ok"], said["trajectories"]) == (1, 3)
