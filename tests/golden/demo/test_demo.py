"""Queries, views and tokens are right on the demo's own multi-turn rollouts with a calculator."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import localtrace
from localtrace.cli import main
from localtrace.demo import train as training
from localtrace.demo.train import DemoConfig
from localtrace.demo.vocabulary import decode, tokenizer
from localtrace.read.filters import Filters
from localtrace.read.store import Store, open_store
from localtrace.store.layout import open_layout
from localtrace.store.sealing.seal import seal
from localtrace.uploader.bundles.build import build_bundle
from tests.golden.comparing import differences
from tests.golden.demo.truth import Seen, by_step

CONFIG = DemoConfig(
    warm_up_steps=250, steps=3, problems_per_step=8, group_size=4, validate_every=2,
    validation_problems=4,
)  # fmt: skip
QUERIES = (
    "reward_by_step", "length_by_step", "tool_calls_by_step", "entropy_by_step", "group_spread",
    "recording_gaps",
)  # fmt: skip


@dataclasses.dataclass
class Golden:
    """A store and the truth about it."""

    store: Store
    seen: list[Seen]


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Golden]:
    folder = tmp_path_factory.mktemp("demo")
    seen: dict[str, Seen] = {}
    update = training.update

    def learn(policy: Any, optimizer: Any, rollouts: Any, step: int) -> float:
        for one in rollouts:
            facts = {
                name: getattr(one, name) for name in
                ("trace_id", "group_id", "validate", "ids", "mask", "logprobs", "reward",
                 "tool_errors")
            }  # fmt: skip
            seen[one.trace_id] = Seen(step=step, **facts)
        return learned(policy, optimizer, rollouts, step)

    def noting(policy: Any, optimizer: Any, rollouts: Any, weights: Any) -> Any:
        change = update(policy, optimizer, rollouts, weights)
        for one, logprobs in zip(rollouts, change.logprobs, strict=True):
            seen[one.trace_id].trainer = logprobs
        return change

    torch.set_num_threads(1)
    tokenizer().save(str(folder / "tokenizer.json"))
    with pytest.MonkeyPatch.context() as patch:
        learned = training._learn
        patch.setattr(training, "_learn", learn)
        patch.setattr(training, "update", noting)
        localtrace.init(
            folder / "store",
            tokenizer=folder / "tokenizer.json",
            min_free_bytes=0,
            run_id="demo",
            seal=False,
        )
        try:
            training.train(training.warm_up(CONFIG), CONFIG)
        finally:
            localtrace.close()
    seal(open_layout(folder / "store"))
    with open_store(folder / "store") as store:
        yield Golden(store, list(seen.values()))


@pytest.mark.parametrize("name", QUERIES)
def test_the_query_tells_the_truth(golden: Golden, name: str) -> None:
    wanted = by_step(golden.seen, decode)[name]
    assert wanted
    assert differences(golden.store.query(name).to_dicts(), wanted) == []


def test_every_token_has_its_own_values(golden: Golden) -> None:
    rows = golden.store.sql("from tokens order by trace_id, turn, position").to_dicts()
    found: dict[str, list[dict[str, Any]]] = {one.trace_id: [] for one in golden.seen}
    for row in rows:
        found[row["trace_id"]].append(row)
    assert any(one.trainer is not None and len(one.turns) > 1 for one in golden.seen)
    for one in golden.seen:
        tokens = found[one.trace_id]
        assert [row["id"] for row in tokens] == [each for ids, _ in one.turns for each in ids]
        engine = [value for _, of in one.turns for value in of]
        assert [row["logprob"] for row in tokens] == pytest.approx(engine, rel=1e-6)
        trainer = [row["trainer_logprob"] for row in tokens]
        if one.trainer is None:
            assert trainer == [None] * len(tokens)
        else:
            assert trainer == pytest.approx(one.trainer, rel=1e-6)


def test_engine_and_trainer_agree_because_they_have_the_same_weights(golden: Golden) -> None:
    (row,) = golden.store.sql(
        "select max(abs(logprob_diff)) as largest, count(logprob_diff) as n from tokens"
    ).to_dicts()
    assert row["n"] == sum(len(one.trainer) for one in golden.seen if one.trainer is not None)
    assert row["largest"] < 1e-4


def test_the_place_in_the_response_is_that_of_the_trainers_list(golden: Golden) -> None:
    starts: dict[str, list[int]] = {}
    for row in golden.store.sql("from tokens order by trace_id, turn, position").to_dicts():
        starts.setdefault(row["trace_id"], []).append(row["response_position"])
    for one in golden.seen:
        written = [place for place, mask in enumerate(one.mask) if mask]
        assert starts[one.trace_id] == [place - written[0] for place in written]


def test_failed_calls_are_found_by_the_filter(golden: Golden) -> None:
    rows = golden.store.trajectories(tool_errors="1..").to_dicts()
    wanted = {one.trace_id for one in golden.seen if one.tool_errors}
    assert {row["trace_id"] for row in rows} == wanted
    assert wanted


# -- commands ------------------------------------------------------------------------------


def run(golden: Golden, *args: str) -> str:
    done = CliRunner().invoke(main, [*args, "-s", str(golden.store.path)])
    assert done.exit_code == 0, done.output
    return done.stdout


def longest(golden: Golden) -> Seen:
    """A rollout with as many turns as any."""
    return max(golden.seen, key=lambda one: len(one.turns))


def test_show_tells_every_turn_and_every_token(golden: Golden) -> None:
    one = longest(golden)
    said = run(golden, "show", one.trace_id, "--messages")
    for ids, _ in one.turns:
        assert decode(ids) in said
    tokens = json.loads(run(golden, "show", one.trace_id, "--tokens", "--format", "json"))
    assert [row["id"] for row in tokens] == [each for ids, _ in one.turns for each in ids]


def test_group_tells_the_rewards_of_all_of_its_rollouts(golden: Golden) -> None:
    one = longest(golden)
    members = [other for other in golden.seen if other.group_id == one.group_id]
    said = run(golden, "group", one.group_id, "--format", "json")
    rewards = sorted(row["reward"] for row in json.loads(said))
    assert rewards == sorted(other.reward for other in members)


def test_exports_hold_the_ids_that_the_trainer_learned_from(golden: Golden) -> None:
    lines = run(golden, "export", "jsonl", "--all", "-o", "-").splitlines()
    rows = [json.loads(line) for line in lines]
    turns = {
        row["trace_id"]: [span["output_ids"] for span in row["spans"] if span["is_turn"]]
        for row in rows
    }
    assert turns == {one.trace_id: [ids for ids, _ in one.turns] for one in golden.seen}
    tools = [span for row in rows for span in row["spans"] if span["kind"] == "tool"]
    assert len(tools) == sum(one.tool_calls(decode) for one in golden.seen)
    failed = [span for span in tools if span["status"] == "error"]
    assert len(failed) == sum(one.tool_errors for one in golden.seen)


def test_a_bundle_holds_the_same(golden: Golden, tmp_path: Path) -> None:
    chosen = [one for one in golden.seen if one.step == 2 and not one.validate]
    build_bundle(golden.store, Filters(step=2, validate=False), tmp_path / "bundle")
    with open_store(tmp_path / "bundle") as store:
        rows = store.sql(
            "select trace_id, list(id order by turn, position) as ids from tokens group by 1"
        )
        found = {row["trace_id"]: row["ids"] for row in rows.to_dicts()}
        assert found == {one.trace_id: [i for ids, _ in one.turns for i in ids] for one in chosen}
        wanted = by_step(chosen, decode)["tool_calls_by_step"]
        assert differences(store.query("tool_calls_by_step").to_dicts(), wanted) == []
