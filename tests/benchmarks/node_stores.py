"""Stores of many nodes of one run, simulated: one is recorded, the others are its rows anew.

Every store has an identity, a writer and trajectories of its own, and the files and log entries
that its sealer would have written.
"""

from __future__ import annotations

import os
import uuid
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

import localtrace
from localtrace.schema import TABLES
from localtrace.store.layout import LOG, StoreLayout, meta_text, open_layout, read_meta
from localtrace.store.sealing.seal import seal
from localtrace.store.tables.parquet_files import write_rows
from localtrace.testing import recording

STEPS = 8
ROLLOUTS = 10
"""Trajectories of a step in one store."""
_TOKENS = 64


def write_node_stores(folder: Path, count: int) -> list[Path]:
    """Make sealed stores of 80 trajectories and 12 table files each."""
    recorded = folder / "recorded"
    with recording(recorded, project="maths", experiment="grpo", run_id="run"):
        for step in range(STEPS):
            for rollout in range(ROLLOUTS):
                _roll_out(step, rollout)
            localtrace.log_metrics({"loss": 1 / (step + 1)}, step=step)
    template = open_layout(recorded)
    assert not seal(template).problems
    return [_made_anew(template, folder / f"node-{number}", number) for number in range(count)]


@localtrace.op
def _generate(prompt_ids: list[int]) -> dict[str, object]:
    ids = [(7 * sum(prompt_ids) + place) % 997 for place in range(_TOKENS)]
    return {"token_ids": ids, "log_probs": [-0.5] * _TOKENS, "text": f"the answer is {ids[0]}"}


def _roll_out(step: int, rollout: int) -> None:
    with localtrace.trajectory(
        step=step, sample_index=rollout // 5, rollout_n=rollout % 5
    ) as trajectory:
        prompt_ids = list(range(rollout, rollout + _TOKENS))
        for _ in range(2):
            prompt_ids += _generate(list(prompt_ids))["token_ids"]  # type: ignore[arg-type]
    localtrace.outcome(trajectory.trace_id, step=step, reward=rollout / ROLLOUTS, advantage=0.5)


def _made_anew(template: StoreLayout, root: Path, number: int) -> Path:
    layout = StoreLayout(root)
    layout.journals.mkdir(parents=True)
    meta = msgspec.structs.replace(read_meta(template), store_id=uuid.uuid4().hex)
    layout.meta.write_bytes(meta_text(meta))
    for name, schema in TABLES.items():
        theirs, ours = template.table(name), layout.table(name)
        sizes = {}
        for path in theirs.glob("**/v*.parquet"):
            copy = ours / path.relative_to(theirs)
            copy.parent.mkdir(parents=True, exist_ok=True)
            with pq.ParquetFile(path) as file:
                write_rows(copy, schema, [_of_node(file.read(), number)])
            sizes[path.name] = path.stat().st_size, copy.stat().st_size
        (ours / LOG).mkdir(parents=True)
        for entry in (theirs / LOG).glob("*.json"):
            lines = entry.read_text().splitlines()
            actions = [_action_of_node(msgspec.json.decode(line), sizes, number) for line in lines]
            (ours / LOG / entry.name).write_bytes(msgspec.json.Encoder().encode_lines(actions))
    return root


def _of_node(rows: pa.Table, number: int) -> pa.Table:
    for name in ("writer_id", "trace_id"):
        if name in rows.column_names:
            own = pc.utf8_replace_slice(rows[name], 0, 8, f"{number:08x}")
            rows = rows.set_column(rows.column_names.index(name), name, own)
    return rows


def _action_of_node(action: dict[str, dict], sizes: dict, number: int) -> dict[str, dict]:  # type: ignore[type-arg]
    if "txn" in action:
        action["txn"]["appId"] = f"{number:08x}{action['txn']['appId'][8:]}"
    elif "add" in action:
        _, action["add"]["size"] = sizes[os.path.basename(action["add"]["path"])]
    elif "metaData" in action:
        action["metaData"]["id"] = str(uuid.uuid4())
    return action
