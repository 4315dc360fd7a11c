"""Pruning takes whole groups' calls and nothing else, whatever the rules are.

What should go is worked out with pandas from the tables, as deltalake reads them.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from deltalake import DeltaTable
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from localtrace.maintain.prunable import choose
from localtrace.maintain.prune import alone, give_back, prune
from localtrace.maintain.verify import verify
from localtrace.read.filters import Filters
from localtrace.read.store import Store, open_store
from localtrace.store.layout import open_layout
from localtrace.store.retention_rules import parse_retention
from tests.environment import examples
from tests.synthetic import BEGAN_NS, Size, write_store

HOUR_S = 3600
NOW_NS = BEGAN_NS + 24 * HOUR_S * 10**9
LIMITS = {"length", "max_tokens", "max_new_tokens", "max_length"}
STEP = ["run_id", "attempt", "step", "validate"]
CURVES = ("reward_by_step", "length_by_step", "pass_at_k")
Frames = dict[str, pd.DataFrame]

KEPT = st.lists(
    st.sampled_from(
        ["errors", "truncated", "extremes=1", "extremes=3", "panel=3;17", "share=0.2", "labelled"]
    ),
    unique_by=lambda rule: rule.partition("=")[0],
    max_size=3,
)
OLDER = st.none() | st.integers(24 * 60 - 14, 24 * 60 + 1).map(lambda minutes: f"{minutes}m")
EVERY = st.none() | st.integers(1, 5)
FILTERS = st.sampled_from(
    [(), ("step=2..7",), ("run=run-a",), ("validate=false",), ("reward<0.5",), ("attempt=0",),
     ("where=superseded",)]
)  # fmt: skip


class Made:
    """A store that is copied and pruned, and what it held before."""

    def __init__(self, folder: Path) -> None:
        write_store(folder, Size(500, steps=12, steps_per_file=3, seed=1))
        self.folder = folder
        self.tables = frames(folder)
        self.facts = facts(self.tables)
        with open_store(folder) as store:
            self.curves = curves(store)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(tmp_path_factory.mktemp("made") / "store")


def frames(folder: Path) -> Frames:
    """All rows, without localtrace."""
    names = ("trajectories", "spans", "outcomes", "metrics", "runs")
    return {
        name: DeltaTable(folder / "tables" / name).to_pyarrow_table().to_pandas()
        for name in names
        if (folder / "tables" / name).exists()
    }


def curves(store: Store) -> dict[str, Any]:
    """Rows of queries that read no calls; sums of floats depend on the order of rows."""
    counts = "select run_id, step, count(*) as n, sum(turn_count) as turns from trajectories"
    found = {"counts": store.sql(f"{counts} group by all order by all").to_dicts()}
    for name in CURVES:
        given = {"threshold": 0.5} if name.startswith("pass_at_k") else {}
        found[name] = store.query(name, **given).to_dicts()
    return {
        name: [
            {
                key: f"{value:.9g}" if isinstance(value, float) else value
                for key, value in row.items()
            }
            for row in rows
        ]
        for name, rows in found.items()
    }


def facts(tables: Frames) -> pd.DataFrame:
    """Facts about each trajectory, by rules of this module's own."""
    rows = tables["trajectories"].set_index("trace_id", drop=False)
    spans, outcomes = tables["spans"], tables["outcomes"]
    newest = outcomes.sort_values(["time_ns", "writer_id", "writer_seq"]).groupby(
        ["trace_id", "name"]
    )
    last = newest.tail(1).set_index("trace_id")
    late = last[last.name == "reward"].number
    rows["true_reward"] = late.reindex(rows.index).fillna(rows.reward)
    rows["calls"] = spans.groupby("trace_id").size().reindex(rows.index).fillna(0)
    bad = set(spans[spans.status != "ok"].trace_id)
    rows["errors"] = (rows.status != "ok") | rows.index.isin(bad)
    cut = spans[spans.is_turn & spans.finish_reason.map(_is_cut)].trace_id
    attributes = [json.loads(text) if isinstance(text, str) else {} for text in rows.attributes]
    said = [one.get("truncated") is True for one in attributes]
    rows["truncated"] = rows.index.isin(set(cut)) | said
    rows["labelled"] = rows.index.isin(set(last[last.name.isin(["comment", "tag"])].index))
    rows["group"] = [
        f"g{row.group_id}" if isinstance(row.group_id, str)
        else f"s{row.sample_index}" if isinstance(row.sample_index, str)
        else f"p{row.prompt_hash}" if isinstance(row.prompt_hash, str)
        else f"t{row.trace_id}"
        for row in rows.itertuples()
    ]  # fmt: skip
    rows["superseded"] = [
        row.run_id == "run-a" and row.attempt == 0 and row.step >= _first(rows, row.validate)
        for row in rows.itertuples()
    ]
    return rows


def _first(rows: pd.DataFrame, validate: bool) -> float:
    again = rows[(rows.run_id == "run-a") & (rows.attempt == 1) & (rows.validate == validate)]
    return float(again.step.min())


def _is_cut(reason: Any) -> bool:
    if isinstance(reason, str) and reason.startswith("{"):
        reason = json.loads(reason)["type"]
    return str(reason).lower() in LIMITS


def extremes(rows: pd.DataFrame, count: int) -> set[str]:
    known = rows[rows.true_reward.notna() & rows.step.notna()]
    found: set[str] = set()
    for _, step in known.groupby(STEP):
        ordered = sorted(zip(step.true_reward, step.trace_id, strict=True))
        found |= {trace_id for _, trace_id in [*ordered[:count], *ordered[-count:]]}
    return found


def kept_by(rules: list[str], rows: pd.DataFrame) -> pd.Series:
    kept = pd.Series(False, rows.index)
    for rule in rules:
        name, _, value = rule.partition("=")
        if name == "extremes":
            kept |= rows.index.isin(extremes(rows, int(value)))
        elif name == "panel":
            kept |= rows.sample_index.isin(value.split(";"))
        elif name in ("errors", "truncated", "labelled"):
            kept |= rows[name]
    return kept


def considered(filters: tuple[str, ...], rows: pd.DataFrame) -> pd.Series:
    every = pd.Series(True, rows.index)
    return {
        (): every,
        ("step=2..7",): rows.step.between(2, 7),
        ("run=run-a",): rows.run_id == "run-a",
        ("validate=false",): ~rows.validate.astype(bool),
        ("reward<0.5",): rows.true_reward < 0.5,
        ("attempt=0",): rows.attempt == 0,
        ("where=superseded",): rows.superseded,
    }[filters]


def to_prune(
    rows: pd.DataFrame, rules: list[str], older_s: float | None, every: int | None, filters: Any
) -> Iterator[str]:
    rows = rows.assign(kept=kept_by(rules, rows), asked=considered(filters, rows))
    for (_, _, step, _, _), group in rows.groupby([*STEP, "group"], dropna=False):
        newest = group.end_ns.fillna(group.start_ns).max()
        if group.kept.any() or not group.asked.all():
            continue
        if older_s is not None and newest > NOW_NS - older_s * 1e9:
            continue
        if every is not None and (pd.isna(step) or step % every == 0):
            continue
        yield from group[group.calls > 0].trace_id


@settings(max_examples=examples(2), deadline=None, phases=[Phase.explicit, Phase.generate])
@example(kept=["errors", "truncated", "extremes=1"], older=None, every=3, filters=())
@example(kept=[], older="1428m", every=None, filters=("where=superseded",))
@given(kept=KEPT, older=OLDER, every=EVERY, filters=FILTERS)
def test_what_the_rules_say_goes_and_every_curve_stays(
    kept: list[str],
    older: str | None,
    every: int | None,
    filters: tuple[str, ...],
    made: Made,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = Path(shutil.copytree(made.folder, tmp_path_factory.mktemp("pruned") / "store"))
    rules = written(kept, older, every)
    layout = open_layout(folder)
    with open_store(folder) as store:
        choice = choose(store, layout, parse_retention(rules), Filters.parse(filters), NOW_NS)
    with alone(layout):
        report = prune(layout, choice)

    gone = set(choice.trace_ids)
    older_s = None if older is None else int(older[:-1]) * 60.0
    wanted = set(to_prune(made.facts, kept, older_s, every, filters))
    shared = any(rule.startswith("share") for rule in kept)  # picked by a hash: some of the others
    assert gone <= wanted if shared else gone == wanted
    assert report.rows == made.tables["spans"].trace_id.isin(gone).sum()
    assert verify(layout).problems == []
    with open_store(folder) as store:
        assert curves(store) == made.curves
        again = choose(store, layout, parse_retention(rules), Filters.parse(filters), NOW_NS)
        assert again.groups == []
    give_back(layout, grace_hours=0)
    check(made.tables, folder, gone)


def written(kept: list[str], older: str | None, every: int | None) -> str:
    rules = [f"older-than={older}"] if older else []
    rules += [f"keep-every={every}"] if every else []
    return ",".join([*rules, *([f"keep={','.join(kept)}"] if kept else [])])


def check(before: Frames, folder: Path, gone: set[str]) -> None:
    """Nothing but the calls of these trajectories is gone, and they say so."""
    after = frames(folder)
    for name in ("outcomes", "metrics", "runs"):
        assert_same(before[name], after[name])
    was, now = before["trajectories"], after["trajectories"]
    assert set(now[now.spans_pruned.notna()].trace_id) == gone
    assert_same(was.drop(columns="spans_pruned"), now.drop(columns="spans_pruned"))
    spans = before["spans"]
    assert_same(spans[~spans.trace_id.isin(gone)], after["spans"])


def assert_same(left: pd.DataFrame, right: pd.DataFrame) -> None:
    assert sorted(left.columns) == sorted(right.columns)
    keys = [
        name for name in ("writer_id", "writer_seq", "span_id", "name", "trace_id") if name in left
    ]
    ordered = [
        one[sorted(left.columns)].sort_values(keys).reset_index(drop=True) for one in (left, right)
    ]
    pd.testing.assert_frame_equal(*ordered, check_dtype=False)
