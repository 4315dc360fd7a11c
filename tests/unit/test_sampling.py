"""Sampling after the rollout: the rules, whole groups, and steps that are not closed."""

from __future__ import annotations

import math
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

import localtrace
from localtrace.cli import main
from localtrace.errors import ConfigError, NotAFolder
from localtrace.field_names import SAMPLED_OUT
from localtrace.maintain.sealer import seal_until_done
from localtrace.record.config import load_settings
from localtrace.store.layout import create_layout, open_layout
from localtrace.store.sealing import sampling
from localtrace.store.sealing.sampling_rules import Rules, parse_rules
from localtrace.store.sealing.seal import seal
from localtrace.testing import recording, simulate_crash
from tests.crash.found import contents, rows, seal_all
from tests.sampled import kept, look_up, roll_out, rolling, rotate

NOTHING = "share=0"
"""A rule that keeps no group."""


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


# -- the text of rules ---------------------------------------------------------------------


def test_rules_are_read_in_any_order() -> None:
    wanted = Rules(True, True, 2, frozenset({"17", "42"}), 0.05)
    assert parse_rules("errors,truncated,extremes=2,panel=17;42,share=0.05") == wanted
    assert parse_rules(" share = 5e-2, panel=42 ; 17 ,truncated,extremes=2,errors ") == wanted
    assert parse_rules("errors") == Rules(errors=True)


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("failures", "'failures' .*errors, truncated"),
        ("errors,", "'' .*errors, truncated"),
        ("errors=1", "'errors=1' .*errors, truncated"),
        ("errors,share=0.1,errors", "rule errors .*one"),
        ("extremes", "extremes=2"),
        ("extremes=0", "extremes=2"),
        ("extremes=1.5", "extremes=2"),
        ("panel=", "panel=17;42"),
        ("panel=1;;2", "panel=17;42"),
        ("share=", "from 0 to 1.*share=0.05"),
        ("share=1.01", "from 0 to 1.*share=0.05"),
        ("share=-0.1", "from 0 to 1.*share=0.05"),
        ("share=nan", "from 0 to 1.*share=0.05"),
    ],
)
def test_rules_that_cannot_be_used_are_refused_with_the_remedy(text: str, remedy: str) -> None:
    with pytest.raises(ConfigError, match=f"LOCALTRACE_SAMPLE .*{remedy}"):
        load_settings("store", {}, {"LOCALTRACE_SAMPLE": text})


def test_every_process_of_a_run_may_put_its_rules_into_the_store(store: Path) -> None:
    for _ in range(2):
        with recording(store, run_id="a/b", sample="errors"):
            roll_out()
    layout = open_layout(store)
    assert sampling.rules_of(layout, "a/b", 0) == Rules(errors=True)
    assert sampling.rules_of(layout, "a/b", 1) is None
    assert len(list(layout.sampling.iterdir())) == 1


def test_rules_that_cannot_be_put_into_the_store_are_said_at_the_start(store: Path) -> None:
    create_layout(store).sampling.write_text("a file in the way")
    with (
        pytest.raises(NotAFolder, match=rf"{store}/sampling is a file"),
        recording(store, sample="errors"),
    ):
        pass


# -- each rule -----------------------------------------------------------------------------


def test_errors_keep_a_trajectory_that_failed_and_one_with_a_failed_call(store: Path) -> None:
    with recording(store, sample="errors"):
        roll_out()
        call = roll_out(word="missing")
        with pytest.raises(LookupError), localtrace.trajectory(step=1) as failed:
            look_up("missing")
        with pytest.raises(ZeroDivisionError), localtrace.trajectory(step=1) as outside:
            look_up(str(1 / len(look_up(""))))
    seal_all(store)
    assert kept(store) == {call, failed.trace_id, outside.trace_id}


def test_errors_keep_what_a_dead_process_left_unfinished(store: Path, tmp_path: Path) -> None:
    with recording(store, sample="errors"):
        roll_out(1, 0)
        with rolling(1, 1) as trace_id:
            crashed = simulate_crash(store, tmp_path / "crashed")
    seal_all(crashed)
    assert kept(crashed) == {trace_id}


def test_without_errors_what_was_interrupted_is_left_out_like_others(
    store: Path, tmp_path: Path
) -> None:
    with recording(store, sample=NOTHING), rolling(1, 1):
        crashed = simulate_crash(store, tmp_path / "crashed")
    seal_all(crashed)
    assert kept(crashed) == set()
    (row,) = rows(crashed, "trajectories")
    assert row["status"] == "interrupted"


@pytest.mark.parametrize("finish", ["length", "MAX_TOKENS", {"type": "length", "length": 8}])
def test_truncated_keeps_turns_that_stopped_at_their_limit(store: Path, finish: Any) -> None:
    with recording(store, sample="truncated"):
        roll_out(finish={"type": "stop", "matched": 2})
        roll_out(word="missing")
        truncated = roll_out(finish=finish)
    seal_all(store)
    assert kept(store) == {truncated}


def test_truncated_keeps_trajectories_that_were_said_to_be(store: Path) -> None:
    with recording(store, sample="truncated"):
        for truncated in (False, True):
            with localtrace.trajectory(step=1) as t:
                look_up("word")
                t.set(truncated=truncated)
    seal_all(store)
    assert kept(store) == {t.trace_id}


def test_extremes_keep_the_highest_and_lowest_rewards_of_each_step(store: Path) -> None:
    with recording(store, sample="extremes=2"):
        found = {
            (step, reward): roll_out(step, reward=reward)
            for step in (1, 2)
            for reward in (0.5, -1.0, math.inf, 3.0, 0.25, math.nan, -math.inf, 2.0, 1.0)
        }
        roll_out(1)
    seal_all(store)
    assert kept(store) == {found[step, r] for step in (1, 2) for r in (-1.0, 0.25, 2.0, 3.0)}


def test_extremes_prefer_the_newest_reward_that_came_as_an_outcome(store: Path) -> None:
    with recording(store, sample="extremes=1", run_id="run"):
        low, middle, high = (roll_out(reward=reward) for reward in (0.0, 0.5, 1.0))
        localtrace.outcome([low, high], reward=[9.0, 0.5])
    with recording(store, sample="extremes=1", run_id="run"):  # another writer
        localtrace.outcome(low, reward=0.75)
        localtrace.outcome(high, reward=0.6)
    seal_all(store)
    assert kept(store) == {low, middle}


def test_extremes_take_the_later_of_two_rewards_of_one_moment(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with recording(store, sample="extremes=1", run_id="run"):
        low, _, high = (roll_out(reward=reward) for reward in (0.0, 0.5, 1.0))
        moment = time.time_ns()
        monkeypatch.setattr(time, "time_ns", lambda: moment)
        localtrace.outcome([low, low], reward=[9.0, -9.0])
        monkeypatch.undo()
    seal_all(store)
    assert kept(store) == {low, high}


def test_a_panel_keeps_its_samples_at_every_step(store: Path) -> None:
    with recording(store, sample="panel=17;b"):
        found = {(s, i): roll_out(s, i) for s in (1, 2) for i in (1, 17, "b", None)}
    seal_all(store)
    assert kept(store) == {found[step, sample] for step in (1, 2) for sample in (17, "b")}


@pytest.mark.parametrize(("share", "count"), [("0", 0), ("1", 10)])
def test_a_share_of_nothing_and_of_everything(store: Path, share: str, count: int) -> None:
    with recording(store, sample=f"share={share}"):
        for number in range(10):
            roll_out(1, number)
    seal_all(store)
    assert len(kept(store)) == count


# -- groups, and what stays ----------------------------------------------------------------


def test_a_rule_that_matches_a_member_keeps_its_group_in_all_journals(store: Path) -> None:
    for _ in range(2):  # two writers
        with recording(store, run_id="run", sample="errors"):
            same = [roll_out(1, 7, group_id="a"), roll_out(1, 8, group_id="a")]
            roll_out(1, 7, group_id="b")
            roll_out(2, 7, group_id="a")
            roll_out(1, 7, group_id="a", validate=True)
    with recording(store, run_id="run", sample="errors"):
        bad = roll_out(1, group_id="a", word="missing")
    group = {row["trace_id"] for row in rows(store, "trajectories") if _is_group_a(row)}
    assert group > {*same, bad}
    seal_all(store)
    assert kept(store) == group


def _is_group_a(row: dict[str, Any]) -> bool:
    return (row["step"], row["group_id"], row["validate"]) == (1, "a", False)


def test_without_a_group_id_a_sample_is_a_group_and_without_both_a_trajectory(store: Path) -> None:
    with recording(store, sample="errors"):
        wanted = {roll_out(1, 7, word="missing"), roll_out(1, 7), roll_out(1, word="missing")}
        roll_out(1, 8)
        roll_out(1)
    seal_all(store)
    assert kept(store) == wanted


def test_trajectories_outcomes_and_metrics_stay_and_say_what_was_left_out(store: Path) -> None:
    with recording(store, sample=NOTHING):
        trace_id = roll_out(3, 7, reward=0.5)
        localtrace.outcome(trace_id, advantage=1.5)
        localtrace.log_metrics({"loss": 0.25}, step=3)
    seal_all(store)
    with localtrace.open_store(store) as opened:
        trajectory = opened.trajectory(trace_id)
        (metric,) = opened.sql("select value from metrics").to_dicts()
    assert (trajectory.reward, trajectory.spans) == (0.5, [])
    assert trajectory.attributes == {SAMPLED_OUT: True}
    assert [outcome.number for outcome in trajectory.outcomes] == [1.5]
    assert metric == {"value": 0.25}
    shown = CliRunner().invoke(main, ["show", "-s", str(store), trace_id])
    assert "sampling rules" in shown.stdout


def test_until_it_is_sealed_everything_can_be_read(store: Path) -> None:
    with recording(store, sample=NOTHING):
        trace_id = roll_out()
        localtrace.flush()
        assert kept(store) == {trace_id}


def test_rules_hold_for_their_run_and_attempt_alone(store: Path) -> None:
    with recording(store, run_id="sampled", sample=NOTHING):
        roll_out()
    wanted = set()
    for run in ({"run_id": "sampled", "attempt": 1}, {"run_id": "other"}):
        with recording(store, **run):
            wanted.add(roll_out())
    seal_all(store)
    assert kept(store) == wanted


def test_rules_of_a_later_version_keep_everything(store: Path) -> None:
    with recording(store, run_id="run", sample=NOTHING):
        trace_id = roll_out()
    (store / "sampling" / "run.0").write_text("newest=3")
    seal_all(store)
    assert kept(store) == {trace_id}


def test_without_rules_nothing_waits_and_nothing_is_written(store: Path) -> None:
    with recording(store, rotate_max_bytes=1), rolling(1, 0):
        roll_out(1)
        rotate(store)
        wanted = contents(store)
        report = seal(open_layout(store))
        assert (report.held, report.waiting) == (0, 1)
        assert report.journals > 0
        assert contents(store) == wanted
        assert not (store / "sampling").exists()
        assert not (store / "journals" / sampling.DECISIONS_NAME).exists()


# -- steps that are not closed -------------------------------------------------------------


def test_a_step_waits_for_a_later_one_and_for_what_is_open(store: Path) -> None:
    with recording(store, sample=NOTHING, rotate_max_bytes=1):
        roll_out(1, 0)
        rotate(store)
        assert _sealed(store) == set()
        roll_out(2, 0)
        rotate(store)
        assert _sealed(store) == {1}
        with rolling(2, 1):
            roll_out(3, 0)
            rotate(store)
            assert _sealed(store) == {1}
        roll_out(3, 1)
        rotate(store)
        assert _sealed(store) == {1, 2}
    assert _sealed(store) == {1, 2, 3}
    assert kept(store) == set()
    assert {path.name for path in (store / "journals").iterdir()} == {".sealer"}


def _sealed(store: Path) -> set[int | None]:
    """Seal, and read the steps that have sealed trajectories."""
    seal(open_layout(store))
    with localtrace.open_store(store) as opened:
        files = opened.files("trajectories")
    return {step for file in files for step in pq.read_table(file)["step"].to_pylist()}


def test_what_a_writer_wrote_after_a_journal_that_waits_waits_too(store: Path) -> None:
    with recording(store, sample=NOTHING, rotate_max_bytes=1):
        roll_out(1)
        rotate(store)
        localtrace.log_metrics({"loss": 1.0}, step=1)
        rotate(store)
        report = seal(open_layout(store))
        assert report.held >= 2
        assert report.rows["trajectories"] == report.rows["metrics"] == 0
    seal_all(store)
    assert len(rows(store, "metrics")) == 1


def test_rewards_wait_for_the_step_that_they_belong_to(store: Path) -> None:
    with recording(store, run_id="run", sample="extremes=1"):
        trace_ids = [roll_out(1, reward=0.5) for _ in range(3)]
    with recording(store, run_id="run", sample="extremes=1", rotate_max_bytes=1):
        localtrace.outcome(trace_ids[0], reward=0.0)
        localtrace.outcome(trace_ids[1], reward=1.0)
        rotate(store)
        seal(open_layout(store))
    seal_all(store)
    assert kept(store) == set(trace_ids[:2])


def test_a_run_does_not_wait_for_writers_of_another(store: Path) -> None:
    with recording(store, run_id="ended", sample=NOTHING):
        roll_out(1)
    with recording(store, run_id="other", sample=NOTHING):
        assert _sealed(store) == {1}


def test_a_trajectory_without_a_step_waits_only_for_its_group(store: Path) -> None:
    with recording(store, sample="errors,extremes=1", rotate_max_bytes=1):
        roll_out(None, reward=1.0)
        bad = roll_out(None, word="missing")
        rotate(store)
        assert _sealed(store) == {None}
        assert kept(store) == {bad}


def test_a_journal_that_waited_for_too_long_keeps_its_groups(store: Path) -> None:
    with recording(store, sample=NOTHING, rotate_max_bytes=1):
        wanted = {roll_out(1, 7)}
        rotate(store)
        for journal in (store / "journals").glob("*.done"):
            os.utime(journal, (0, 0))
        wanted.add(roll_out(1, 7))
        roll_out(1, 8)
        rotate(store)
        report = seal(open_layout(store))
        assert report.rows["trajectories"] == 1
        assert report.held > 0
    seal_all(store)
    assert kept(store) == wanted


def test_who_comes_late_follows_its_group_unless_a_rule_keeps_it(store: Path) -> None:
    with recording(store, sample="errors", rotate_max_bytes=1):
        wanted = {roll_out(1, 0, word="missing")}
        roll_out(1, 1)
        roll_out(2)
        rotate(store)
        seal(open_layout(store))  # at least decides
        wanted |= {roll_out(1, 0), roll_out(1, 1, word="missing"), roll_out(1, 1)}
        roll_out(1, 2)
    seal_all(store)
    assert kept(store) == wanted


def test_the_background_sealer_follows_the_rules(store: Path) -> None:
    with recording(store, sample="errors"):
        roll_out()
        bad = roll_out(word="missing")
    seal_until_done(store, store / "journals")
    assert kept(store) == {bad}


def test_a_copy_of_a_store_without_its_rules_keeps_everything(store: Path) -> None:
    with recording(store, sample=NOTHING):
        trace_id = roll_out()
    shutil.rmtree(store / "sampling")
    seal_all(store)
    assert kept(store) == {trace_id}
