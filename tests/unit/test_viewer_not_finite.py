"""The viewer's pages and rewards that are NaN or infinite."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean, stdev

import pytest

import localtrace
from localtrace.read.store import open_store
from localtrace.testing import recording
from tests.unit.test_viewer_pages import Pages

GROUPS = {
    "mixed": [math.nan, 0.25, math.inf, None, 1.0],
    "flat": [0.5, math.nan, 0.5],
    "odd": [math.nan, math.nan],
    "plain": [0.9, 0.0],
}
FINITE = {name: [one for one in given if one is not None and math.isfinite(one)]
          for name, given in GROUPS.items()}  # fmt: skip
ODD = 5


@localtrace.op
def generate(prompt_ids: list[int]) -> dict[str, object]:
    return {"output_text": "say more", "output_ids": [1, 2], "output_logprobs": [-0.5, math.nan]}


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pages]:
    folder: Path = tmp_path_factory.mktemp("viewed") / "store"
    with recording(folder, run_id="run", project="p", experiment="e"):
        for name, rewards in GROUPS.items():
            for n, reward in enumerate(rewards):
                with localtrace.trajectory(step=1, sample_index=name, rollout_n=n) as t:
                    generate([1])
                if reward is not None:
                    localtrace.outcome(t.trace_id, reward=reward, advantage=reward)
    with open_store(folder) as store:
        yield Pages(store, {})


def test_lists_put_what_is_not_finite_last_and_mark_it(pages: Pages) -> None:
    for sort in ("reward", "-reward", "advantage", "-advantage"):
        rows = pages.facts(f"/trajectories?sort={sort}")["rows"]
        known = [row["reward"] for row in rows][:6]
        finite = [one for rewards in FINITE.values() for one in rewards]
        assert known == sorted(finite, reverse=sort.startswith("-"))
        assert {row["reward"] for row in rows[6:]} == {"NaN", "Infinity", None}
    marked = pages.facts("/trajectories/rows")["rows"]
    for row in marked:
        assert ("reward not finite" in row["badges"]) == isinstance(row["reward"], str)
    assert "reward not finite" in pages.html("/trajectories/rows")


def test_the_filter_finds_them_in_an_address(pages: Pages) -> None:
    rows = pages.facts("/trajectories?q=reward=not_finite")["rows"]
    assert len(rows) == ODD
    assert len(pages.facts("/trajectories?q=reward>0.9")["rows"]) == 1


def test_groups_sum_up_finite_rewards_and_count_the_others(pages: Pages) -> None:
    facts = pages.facts("/groups")
    rows = {row["sample_index"]: row for row in facts["groups"]}
    for name, finite in FINITE.items():
        row = rows[name]
        assert row["rewards"] == len(finite)
        assert row["not_finite"] == sum(
            one is not None and not math.isfinite(one) for one in GROUPS[name]
        )
        assert row["mean_reward"] == (fmean(finite) if finite else None)
        assert row["max_reward"] == max(finite, default=None)
        assert row["std_reward"] == (pytest.approx(stdev(finite)) if len(finite) > 1 else None)
        assert row["zero_variance"] == (None if len(finite) < 2 else name == "flat")
    every = [one for finite in FINITE.values() for one in finite]
    assert facts["mean_reward"] == pytest.approx(fmean(every))
    assert facts["not_finite"] == ODD
    assert f"{ODD} not finite" in pages.html("/groups")
    spread = [row["sample_index"] for row in pages.facts("/groups?sort=spread")["groups"]]
    assert spread == ["plain", "mixed", "flat", "odd"]
    best = [row["sample_index"] for row in pages.facts("/groups?sort=-reward")["groups"]]
    assert best == ["mixed", "flat", "plain", "odd"]


@pytest.mark.parametrize("name", GROUPS)
def test_a_group_page_has_a_best_rollout_among_the_finite_ones(pages: Pages, name: str) -> None:
    path = f"/group?run=run&step=1&validate=false&key=sample {name}"
    facts = pages.facts(path)
    finite = sorted(FINITE[name], reverse=True)
    columns = facts["columns"]
    assert [one["reward"] for one in columns][: len(finite)] == finite
    marks = [one["mark"] for one in columns]
    assert marks.count("best") == (len(set(finite)) > 1)
    assert facts["rewards"]["not_finite"] == sum(
        one is not None and not math.isfinite(one) for one in GROUPS[name]
    )
    assert facts["rewards"]["zero_variance"] == (name == "flat")
    assert facts["rewards"]["mean"] == (fmean(finite) if finite else None)
    assert ("not finite" in pages.html(path)) == (name != "plain")


def test_the_run_and_the_runs_count_them(pages: Pages) -> None:
    facts = pages.facts("/run/run")
    (step,) = facts["steps"]
    every = [one for finite in FINITE.values() for one in finite]
    assert step["mean_reward"] == pytest.approx(fmean(every))
    assert step["not_finite"] == ODD
    assert f"{ODD} rewards not finite" in step["badge"]["why"]
    assert facts["fates"][0]["not_finite"] == ODD
    (run,) = pages.facts("/runs")["runs"]
    assert run["not_finite"] == ODD
    assert f"{ODD} not finite" in pages.html("/runs")


def test_a_rollout_shows_the_value_and_a_mark(pages: Pages) -> None:
    for row in pages.facts("/trajectories?q=reward=not_finite")["rows"]:
        page = pages.html(f"/trajectory/{row['trace_id']}")
        assert "not finite</span>" in page
        assert ("NaN" if row["reward"] == "NaN" else "Infinity") in page


def test_a_prompt_averages_finite_rewards(pages: Pages) -> None:
    rows = pages.facts("/trajectories?q=sample_index=mixed")["rows"]
    (found,) = pages.store.sql(
        "select any_value(prompt_hash) as prompt_hash from trajectories"
    ).to_dicts()
    facts = pages.facts(f"/prompt?run=run&key={found['prompt_hash']}")
    every = [one for finite in FINITE.values() for one in finite]
    assert facts["steps"][0]["mean_reward"] == pytest.approx(fmean(every))
    assert len(rows) == 5


def test_no_token_without_a_finite_logprob_is_the_most_surprising(pages: Pages) -> None:
    tokens = pages.facts("/tokens?sort=surprise")["tokens"]
    assert {one["logprob"] for one in tokens} == {-0.5}


def test_search_averages_finite_rewards(pages: Pages) -> None:
    (chart,) = [one for one in pages.facts("/search?find=say+more")["charts"]
                if one["title"] == "Mean reward"]  # fmt: skip
    points = [point for line in chart["series"] for point in line["points"]]
    every = [one for finite in FINITE.values() for one in finite]
    assert [1, pytest.approx(fmean(every))] in points
    assert all(isinstance(y, float) for _, y in points if y is not None)
