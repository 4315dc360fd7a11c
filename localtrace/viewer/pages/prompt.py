"""One prompt over steps and runs: rewards, lengths, its answers before a step and from it on."""

from __future__ import annotations

import shlex
from collections import Counter
from itertools import zip_longest
from typing import Any

from localtrace.errors import NotFound
from localtrace.read.diff import align, words
from localtrace.viewer.addresses import group_url, url
from localtrace.viewer.charts import chart_of, line
from localtrace.viewer.excerpts import ANSWER_MAX, PROMPT_MAX, cut, excerpts_of
from localtrace.viewer.numbers import is_not_finite, mean, scale
from localtrace.viewer.page import Facts, Page, copies
from localtrace.viewer.page_request import PageRequest

_ROLLOUTS_MAX = 2_000
_DISTINCT_MAX = 12
_COMPARED_MAX = 100_000
"""The characters of an answer that are compared."""
_ALIKE_MAX = 600
"""The characters of a stretch, the same in both answers, that the page holds."""
_SQL = """
select trace_id, run_id, step, sample_index, prompt_hash, validate, reward, output_tokens,
    group_key
from trajectories
where (prompt_hash = $key or (prompt_hash is null and sample_index = $key))
    and ($any or run_id = $run)
order by step nulls last, start_ns
limit $most
"""


def read(request: PageRequest) -> Facts:
    """Return the prompt, its curve, and its answers before a step and from it on."""
    key, run = request.required("key"), request.required("run")
    params = {"key": key, "run": run, "any": request.values.get("runs") == "all",
              "most": _ROLLOUTS_MAX}  # fmt: skip
    rows = request.rows(_SQL, params)
    if not rows:
        raise NotFound(f"no rollout has the prompt {key}: it may belong to another run or store")
    known = sorted({row["step"] for row in rows if row["step"] is not None})
    at = request.number("at", known[len(known) // 2] if known else 0)
    texts = excerpts_of(request, {row["trace_id"]: row["step"] for row in rows})
    rows = [row | {"answer": texts[row["trace_id"]].answer} for row in rows]
    prompts = (one.prompt for one in texts.values() if one.prompt is not None)
    steps = _steps(rows)
    before = [row for row in rows if row["step"] is not None and row["step"] < at]
    after = [row for row in rows if row["step"] is not None and row["step"] >= at]
    sides = _answers(before), _answers(after)
    name = "prompt_hash" if rows[0]["prompt_hash"] == key else "sample_index"
    of_run = "" if params["any"] else f" run={shlex.quote(run)}"
    return {
        "title": f"Prompt of sample {rows[0]['sample_index']}" if rows[0]["sample_index"]
        else "Prompt",
        "key": key,
        "run_id": run,
        "is_every_run": params["any"],
        "runs_url": url("/prompt", run=run, key=key, at=at, runs=None if params["any"] else "all"),
        "prompt": cut(next(prompts, None), PROMPT_MAX),
        "rollouts": len(rows),
        "is_cut": len(rows) == _ROLLOUTS_MAX,
        "at": at,
        "known_steps": known,
        "steps": steps,
        **scale(one["mean_reward"] for one in steps),
        "charts": _charts(rows, steps),
        "pairs": pairs_of(*(side["answers"] for side in sides)),
        "before": _shortened(sides[0]),
        "after": _shortened(sides[1]),
        "copies": copies(
            request,
            _SQL,
            params,
            f"query same_prompt {shlex.quote(f'{name}={key}')}{of_run}",
        ),
    }  # fmt: skip


def _steps(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each step at which the prompt was asked."""
    places = dict.fromkeys((row["run_id"], row["step"], row["validate"]) for row in rows)
    made = []
    for run, step, validate in places:
        here = [
            row
            for row in rows
            if (row["run_id"], row["step"], row["validate"]) == (run, step, validate)
        ]
        made.append(
            {
                "run_id": run, "step": step, "validate": validate, "rollouts": len(here),
                "mean_reward": mean(row["reward"] for row in here),
                "not_finite": _not_finite(here),
                "mean_tokens": mean(row["output_tokens"] for row in here),
                "url": group_url(here[0]) or f"/trajectory/{here[0]['trace_id']}",
            }
        )  # fmt: skip
    return made


def _charts(rows: list[dict[str, Any]], steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    runs = list(dict.fromkeys(row["run_id"] for row in rows))
    links = {str(one["step"]): one["url"] for one in steps if one["step"] is not None}

    def chart(title: str, column: str) -> dict[str, Any]:
        lines = [
            line(
                ("validation" if validate else "training") + ("" if len(runs) == 1 else f" {run}"),
                [(one["step"], one[column]) for one in steps
                 if (one["run_id"], one["validate"]) == (run, validate)],
                at,
                dashed=validate,
            )
            for at, run in enumerate(runs)
            for validate in (False, True)
        ]  # fmt: skip
        odd = _not_finite(rows) if column == "mean_reward" else 0
        return chart_of(title, lines, links, why="not recorded", not_finite=odd)

    return [chart("Mean reward", "mean_reward"), chart("Generated tokens", "mean_tokens")]


def _answers(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the distinct answers with their counts, the most frequent first."""
    counts = Counter(row["answer"] for row in rows)
    made = []
    for answer, count in counts.most_common(_DISTINCT_MAX):
        here = [row for row in rows if row["answer"] == answer]
        made.append(
            {
                "answer": answer,
                "count": count,
                "share": count / len(rows),
                "mean_reward": mean(row["reward"] for row in here),
                "not_finite": _not_finite(here),
                "url": f"/trajectory/{here[-1]['trace_id']}",
            }
        )
    return {
        "rollouts": len(rows),
        "distinct": len(counts),
        "mean_reward": mean(row["reward"] for row in rows),
        "not_finite": _not_finite(rows),
        "answers": made,
    }


def _not_finite(rows: list[dict[str, Any]]) -> int:
    return sum(is_not_finite(row["reward"]) for row in rows)


def _shortened(side: dict[str, Any]) -> dict[str, Any]:
    answers = [one | {"answer": cut(one["answer"], ANSWER_MAX)} for one in side["answers"]]
    return side | {"answers": answers}


def pairs_of(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the answers of both sides next to each other, those that both gave first.

    The others are paired by how frequent they are; each pair comes with its differences in words.
    """
    place = {one["answer"]: at for at, one in enumerate(after)}
    both = [(at, place[one["answer"]]) for at, one in enumerate(before) if one["answer"] in place]
    gone = [at for at in range(len(before)) if at not in {left for left, _ in both}]
    new = [at for at in range(len(after)) if at not in {right for _, right in both}]
    made = []
    for left, right in [*both, *zip_longest(gone, new)]:
        one = None if left is None else before[left]["answer"]
        other = None if right is None else after[right]["answer"]
        is_alone = left is None or right is None
        made.append({"before": left, "after": right, "is_same": not is_alone and one == other,
                     "stretches": None if is_alone or one is None or other is None
                     else _stretches(one, other)})  # fmt: skip
    return made


def _stretches(before: str, after: str) -> list[dict[str, Any]]:
    """Return two answers as stretches of words that are the same or differ."""
    compared = align(words(before[:_COMPARED_MAX]), words(after[:_COMPARED_MAX]))
    made = [_stretch("".join(one.left), "".join(one.right), one.is_same, one.compared)
            for one in compared]  # fmt: skip
    rest = before[_COMPARED_MAX:], after[_COMPARED_MAX:]
    return [*made, _stretch(*rest, is_same=False, compared=False)] if any(rest) else made


def _stretch(before: str, after: str, is_same: bool, compared: bool) -> dict[str, Any]:
    most = _ALIKE_MAX if is_same else ANSWER_MAX
    return {"is_same": is_same, "compared": compared, "before": cut(before, most),
            "after": cut(after, most)}  # fmt: skip


PAGE = Page("/prompt", "prompt.html", read)
