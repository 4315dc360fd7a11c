"""What the views hold, column by column: names and types from a store, texts from the schema."""

from __future__ import annotations

import re
from pathlib import Path

import localtrace.views
from localtrace.schema import TABLES, UPLOADS
from tests.snapshots import store_of

_TEXT = Path(localtrace.views.__file__).with_name("views.sql").read_text("utf-8")
_VIEWS = re.compile(r"((?:^--.*\n)+)create (?:view|table) (\w+) as", re.MULTILINE)
_TYPES = {"TIMESTAMP WITH TIME ZONE": "timestamp"}
_TURN = {"turn": "place of the generation in its trajectory, from 0"}
_COMPUTED: dict[str, dict[str, str]] = {
    "runs": {
        "start_ns": "when the first process began to record, ns since the Unix epoch",
        "end_ns": "when the last process closed; null while one has not said that it did",
        "started_at": "start, for people and for SQL dates",
        "ended_at": "end, for people and for SQL dates",
        "processes": "how many began to record",
        "closed_processes": "how many said that they closed",
        "hosts": "names of the hosts",
        "losses": "loss counters of the processes that closed, JSON objects",
    },
    "processes": {
        "started_at": "when it began to record",
        "ended": "whether it said that it closed",
    },
    "trajectories": {
        "reward": "the newest outcome of that name, else the one set inside the rollout",
        "advantage": "the newest outcome of that name",
        "fate": "what training did with it: trained, filtered, stale, aborted or failed",
        "fate_reason": "why, where training says it",
        "trained_step": "the step whose update used it",
        "superseded": "whether a newer attempt did the step again",
    },
    "spans": {
        "kind": "generation, tool, reward, agent or other",
        "kind_derived": "true where nobody said the kind and the place of the call tells it",
    },
    "turns": {
        **_TURN,
        "response_start": "place of its first token in the response; null where unknown",
    },
    "messages": {
        **_TURN,
        "position": "place in the turn's whole list, from 0",
        "role": "who said it",
        "content": "what was said, as text or JSON",
        "message": "the whole message as JSON",
    },
    "tokens": {
        **_TURN,
        "position": "place in the turn's output, from 0",
        "response_position": "place in the trajectory's response, from 0; null where unknown",
        "id": "the token",
        "piece": "what it adds to a text before it; null: unknown",
        "generated": "false where a mask says that the model did not generate it",
        "logprob": "the engine's log-probability, natural log",
        "trainer_logprob": "the trainer's, from old_log_probs",
        "logprob_diff": "trainer_logprob - logprob",
        "ref_logprob": "the reference model's, from ref_log_prob",
        "advantage": "its advantage, from advantages",
    },
    "groups": {
        "n": "how many rollouts",
        "rewards": "how many of them have a reward",
        "mean_reward": "mean of the rewards",
        "min_reward": "smallest of the rewards",
        "max_reward": "largest of the rewards",
        "std_reward": "sample standard deviation of the rewards",
        "zero_variance": "whether several rewards are all the same",
    },
    "answers": {
        **_TURN,
        "reward": "the trajectory's",
        "status": "the trajectory's",
        "finish_reason": "kind of the finish reason, in lower case",
        "cut_off": "whether a limit ended the generation",
        "output_hash": "md5 of the output ids, or of the text where there are none",
    },
    "detectors": {
        "truncated": "a limit cut the last generation off, or the trainer said so",
        "empty": "the answer has no tokens, or nothing but white space",
        "duplicate": "another rollout of the group gave the same answer",
        "tool_errors": "failed calls of tools",
        "repetition": "largest share of repeated 4-grams in the ids of a turn, 0 to 1",
    },
    "engine_calls": {
        "engine_trace_id": "trace id of the engine's record",
        "engine_span_id": "span id of the engine's record",
        "trace_id": "trajectory of the call that asked for it; null: not known",
        "span_id": "the call that asked for it; null: not known",
        "joined": "carried, tokens, or null",
        "output_tokens": "tokens generated",
    },
}  # fmt: skip
_COMPUTED["all_trajectories"] = _COMPUTED["trajectories"]
_STORED = {
    column.name: column.about for table in (*TABLES.values(), UPLOADS) for column in table.columns
}
_OF_TABLE = {
    table.name: {column.name: column.about for column in table.columns}
    for table in (*TABLES.values(), UPLOADS)
}


def views() -> str:
    """Every view: what its rows are, and its columns with types."""
    parts = []
    with store_of() as store:
        for comment, view in _VIEWS.findall(_TEXT):
            about = " ".join(line.removeprefix("--").strip() for line in comment.splitlines())
            rows = (tuple(row.values()) for row in store.sql(f"describe {view}").to_dicts())
            parts += [
                f"### `{view}`",
                "",
                about,
                "",
                "| column | type | what it holds |\n|---|---|---|",
            ]
            parts[-1] += "".join(
                f"\n| `{name}` | {_TYPES.get(kind, kind.lower())} | {_about(view, name)} |"
                for name, kind, *_ in rows
            )
            parts.append("")
    return "\n".join(parts).rstrip()


def _about(view: str, column: str) -> str:
    for known in (_COMPUTED.get(view, {}), _OF_TABLE.get(view, {}), _STORED):
        if column in known:
            return known[column]
    raise SystemExit(f"view {view} has a column {column} that {__file__} does not describe")
