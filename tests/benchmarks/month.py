"""A month of training on paper: what 8, 64 and 1,024 workers need, from measured shares."""

from __future__ import annotations

from localtrace.record.settings import MIB
from localtrace.store.compacting.choose import FILE_MAX_BYTES
from localtrace.store.sealing.policy import DEFAULT_POLICY
from localtrace.store.tables.delta import REMOVED_KEPT_MINUTES
from localtrace.store.tables.replacing import GRACE_HOURS
from tests.benchmarks.figures import Table
from tests.benchmarks.rollouts import Shape
from tests.benchmarks.shares import Log, Rollout, measure_log, measure_rollouts
from tests.benchmarks.waiting import SHAPES, TOKENS_PER_S, WORKERS_PER_NODE, per_s, waits

WORKERS = (8, 64, 1024)
STEP_S = 300
_MONTH_S = 30 * 24 * 3600
_GB = 10**9
_TABLES = 4
"""Tables that a seal commits to."""
_AGGREGATE_MS = 44
"""Mean reward by step over a million trajectories; see docs/measurements.md."""


def _months(shape: Shape, share: Rollout, log: Log) -> list[list[str]]:
    lines = [_month(shape, share, log, workers) for workers in WORKERS]
    return [[shape.name, what, *(line[what] for line in lines)] for what in lines[0]]


def _month(shape: Shape, share: Rollout, log: Log, workers: int) -> dict[str, str]:
    nodes = workers / WORKERS_PER_NODE
    trajectories = workers * per_s(shape) * _MONTH_S
    node_per_s = WORKERS_PER_NODE * per_s(shape)
    seals, delay_s, waiting = waits(DEFAULT_POLICY, node_per_s * share.journal_bytes)
    day_bytes = trajectories / 30 * share.sealed_bytes
    files = _MONTH_S / STEP_S * max(1, share.sealed_bytes * trajectories * STEP_S / _MONTH_S
                                    / FILE_MAX_BYTES)  # fmt: skip
    replaced = nodes * seals * REMOVED_KEPT_MINUTES / 60
    opening_ms = log.open_ms + (files * log.file_us + _TABLES * replaced * log.replaced_us) / 1000
    recorder = node_per_s * share.record_ms / 1000
    sealer = node_per_s * share.seal_ms / 1000 + seals * log.seal_ms / 3_600_000
    merging = nodes * node_per_s * share.merge_ms / 1000
    return {
        "trajectories": f"{trajectories / 1e6:,.1f} million",
        "disk, sealed": f"{trajectories * share.sealed_bytes / _GB:,.0f} GB",
        "disk, replaced files": f"{day_bytes * GRACE_HOURS / 24 / _GB:,.1f} GB",
        "CPU of recording, a node": f"{recorder:.2%} of a core",
        "CPU of sealing, a node": f"{sealer:.2%} of a core",
        "CPU of compaction, all nodes": f"{merging:.2%} of a core",
        "not sealed, a node": f"{waiting / MIB:.0f} MiB",
        "others see a row after, at most": f"{delay_s / 60:.1f} min",
        "seals an hour, all nodes": f"{nodes * seals:,.0f}",
        "files of spans": f"{files:,.0f}",
        "replaced files that a log names": f"{replaced:,.0f}",
        "CPU of opening": f"{opening_ms / 1000:.2f} s",
        "mean reward by step": f"{trajectories / 1e6 * _AGGREGATE_MS / 1000:,.1f} s",
    }


def measure() -> Table:
    """Disk, CPU, files and query times."""
    log = measure_log()
    rows, notes = [], []
    for shape, number in SHAPES.items():
        share = measure_rollouts(shape, number)
        rows += _months(shape, share, log)
        notes.append(
            f"{shape.name}, each: journal {share.journal_bytes:,.0f} bytes, sealed "
            f"{share.sealed_bytes:,.0f} bytes, recording {share.record_ms:.2f} ms, sealing "
            f"{share.seal_ms:.2f} ms, merging {share.merge_ms:.2f} ms, reading unsealed "
            f"{share.read_ms:.2f} ms of CPU."
        )
    return Table(
        "A month of training",
        ("rollouts", "what", *(f"{workers:,} workers" for workers in WORKERS)),
        rows,
        (
            f"Computed: workers generate {TOKENS_PER_S} tokens a second each, day and night, "
            f"{WORKERS_PER_NODE} on a node, {STEP_S} s a step; every row is merged once.",
            *notes,
            f"A seal of a few rows: {log.seal_ms:.0f} ms. Opening: {log.open_ms:.0f} ms, "
            f"{log.file_us:.1f} us more per file and {log.replaced_us:.1f} us per replaced file "
            "that a log names.",
        ),
    )
