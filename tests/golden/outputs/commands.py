"""What commands print: rollouts, groups, lists, counts and queries."""

from __future__ import annotations

import json
from typing import Any

from tests.golden.outputs.golden import Golden, Output, pretty_lines


def _of(command: str, *arguments: str) -> Output:
    """Return what a command prints; `{name}` stands for the trace id of a rollout."""
    return lambda golden: golden.run(command, *(one.format(**golden.ids) for one in arguments))


def _rows(command: str, *arguments: str) -> Output:
    """Return the rows that a command prints as JSON."""

    def output(golden: Golden) -> str:
        rows: list[dict[str, Any]] = json.loads(golden.run(command, *arguments, "--format", "json"))
        return pretty_lines({name: v for name, v in row.items() if v is not None} for row in rows)

    return output


def _stats(golden: Golden) -> str:
    # How many files and bytes rows take is no promise.
    rows = json.loads(golden.run("stats", "--format", "json"))
    sizes = ("files", "size_bytes")
    return pretty_lines({k: v for k, v in row.items() if k not in sizes} for row in rows)


_QUERIES = ("reward_by_step", "recording_gaps", "staleness", "time_by_kind", "tool_errors")
_TURNS = """
select trace_id[:8] as trajectory, turn, response_start, op, status, error, prompt_tokens,
    prompt_base, prompt_kept, prompt_ids, output_ids, output_logprobs, response_mask, prompt_text,
    output_text, messages_base, messages_kept, finish_reason, weight_version
from turns order by start_ns, seq
"""
_MESSAGES = """
select trace_id[:8] as trajectory, turn, position, role, content, generated, message
from messages where role <> 'prompt' order by all
"""
_TOKENS = """
select rollout_n, turn, position, response_position, id, piece, generated, logprob, trainer_logprob,
    ref_logprob, advantage
from tokens where step = 1 and sample_index = '17' order by all
"""
_SPANS = """
select trace_id[:8] as trajectory, seq, op, kind, kind_derived, is_turn, parent_id, status, error
from spans order by start_ns, seq
"""
_COLUMNS = "place,status,reward,fate,labels,prompt,answer"
OUTPUTS: dict[str, Output] = {
    "show-tools": _of("show", "{tools}"),
    "show-tree": _of("show", "{sub_agents}", "--tree"),
    "show-messages": _of("show", "{tools}", "--messages"),
    "show-tokens": _of("show", "{turns_of_tokens}", "--tokens"),
    "show-odd": _of("show", "{odd_values}"),
    "show-texts": _of("show", "{texts}"),
    "show-aborted": _of("show", "{aborted}"),
    "group": _of("group", "g-17"),
    "group-messages": _of("group", "g-capital"),
    "diff": _of("diff", "{turns_of_tokens}", "{odd_logprobs}"),
    "diff-messages": _of("diff", "{tools}", "{pictures}", "{texts}"),
    # As CSV, of which a longer value changes one line.
    "ls": _of("ls", "--limit", "0", "--columns", _COLUMNS, "--format", "csv"),
    "ls-json": _rows("ls", "--limit", "0", "--sort", "started_at"),
    "runs": _rows("runs"),
    "stats": _stats,
    "sql-turns": _rows("sql", _TURNS),
    "sql-messages": _rows("sql", _MESSAGES),
    "sql-tokens": _rows("sql", _TOKENS),
    "sql-spans": _rows("sql", _SPANS),
    "sql-groups": _rows("sql", "select * from groups order by all"),
    **{f"query-{name}": _rows("query", name) for name in _QUERIES},
}
