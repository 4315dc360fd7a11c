"""`localtrace group`: the rollouts of one group beside each other."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.commands import answer, record, rows, run


@pytest.fixture
def store(tmp_path: Path) -> Path:
    rollouts = [
        {"reward": reward, "group_id": "group-a", "answers": [answer(text, [4] * length)]}
        for reward, text, length in (
            (0.0, "no idea", 2),
            (1.0, "four, of course", 3),
            (0.5, "4?", 1),
        )
    ]
    alike = [{"reward": 1.0, "sample_index": 18, "answers": [answer("one", [1])]}] * 2
    later = [{"step": 4, "group_id": "group-b"}]
    record(tmp_path / "store", [*rollouts, *alike, *later])
    return tmp_path / "store"


def test_the_rollouts_stand_beside_each_other_with_the_best_and_the_worst_marked(
    store: Path,
) -> None:
    first, second, third = rows("group", "-s", store, "group-a")
    assert [row["mark"] for row in (first, second, third)] == ["worst", "best", None]
    assert (second["output"], second["output_tokens"]) == ("four, of course", 3)
    assert (second["finish_reason"], second["status"], second["turn_count"]) == ("stop", "ok", 1)


def test_the_head_says_where_the_group_stands_and_how_rewards_spread(store: Path) -> None:
    said = run("group", "-s", store, "group-a").stdout.splitlines()
    assert said[0].startswith("group run=run step=3 sample_index=17 group=group-a")
    assert said[1] == "3 rewards: mean 0.5, 0 to 1, standard deviation 0.5"


def test_equal_rewards_are_called_a_group_that_teaches_nothing(store: Path) -> None:
    said = run("group", "-s", store, "step=3", "sample_index=18").stdout
    assert "zero variance" in said
    assert "best" not in said


def test_a_group_is_found_by_the_beginning_of_its_id_and_by_filters(store: Path) -> None:
    assert len(rows("group", "-s", store, "group-b")) == 1
    assert len(rows("group", "-s", store, "reward=0.5")) == 1
    assert len(rows("group", "-s", store, "group-", "step=4")) == 1


def test_a_group_without_rewards_is_shown(store: Path) -> None:
    assert "no rewards yet" in run("group", "-s", store, "step=4").stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["step=3"], "several groups match, narrow it down to one: run=run step=3 sample_index=17"),
        (["group-"], "several groups match"),
        (["step=99"], "nothing has step=99: it is 3..4"),
        (["nowhere"], "no group is called 'nowhere'"),
        (["group-a", "other"], "'other' is not a filter"),
    ],
)
def test_what_is_no_single_group_is_said_in_one_line(
    store: Path, words: list[str], said: str
) -> None:
    result = run("group", "-s", store, *words)
    assert result.exit_code == 2
    assert said in result.stderr
    assert len(result.stderr.splitlines()) == 1
