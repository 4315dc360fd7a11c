"""The pages, each a module of its own; a new one is listed here."""

from __future__ import annotations

from localtrace.viewer.page import Page
from localtrace.viewer.pages import (
    chart,
    compare,
    group,
    groups,
    home,
    prompt,
    prompts,
    run,
    search,
    sql,
    tokens,
    trajectories,
    trajectory,
)

PAGES: tuple[Page, ...] = (
    home.PAGE,
    home.RUNS,
    run.PAGE,
    chart.PAGE,
    groups.PAGE,
    group.PAGE,
    compare.PAGE,
    trajectories.PAGE,
    trajectories.ROWS,
    trajectory.PAGE,
    trajectory.CALLS,
    trajectory.CALL,
    prompts.PAGE,
    prompt.PAGE,
    tokens.PAGE,
    tokens.ONE,
    search.PAGE,
    sql.PAGE,
    sql.CSV,
    sql.PARQUET,
)
