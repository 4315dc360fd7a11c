"""Sampling after the rollout: which trajectories keep their spans, decided when a step closes.

A run may have rules (`sampling_rules`), which its processes put into the store. The sealer holds
the journals of such a run back until their steps are closed, decides about all trajectories of a
step together, and syncs the decisions to the disk before it commits anything. Whoever seals the
rest of the step later, or again after a crash, follows them. A group is kept or left out whole, as
far as its trajectories are in one folder of journals.

Only rows of spans are left out. Trajectories, outcomes and metrics stay.
"""

from __future__ import annotations

import contextlib
import errno
import math
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated
from urllib.parse import quote

import msgspec

from localtrace.errors import StoreFormatError
from localtrace.store.files import explained, put_file, read_json, read_small
from localtrace.store.journal.journal_files import JournalFile, JournalName, JournalStatus
from localtrace.store.layout import StoreLayout
from localtrace.store.sealing.sampled_rollouts import Rollout, Rollouts, Step
from localtrace.store.sealing.sampling_rules import Rules, parse_rules

WAIT_MAX_S = 6 * 3600.0
"""A journal that waited longer for its steps to close is sealed with all of its spans."""
DECISIONS_NAME = "sampling.json"


def keep_rules(layout: StoreLayout, run_id: str, attempt: int, text: str) -> None:
    """Put the rules of a run's attempt into the store.

    Raises:
        StoreUnwritable: the store cannot be written.
    """
    path = _rules_path(layout, run_id, attempt)
    with explained(f"cannot write {path}", "free space, or name a store that this user can write"):
        if not path.exists() or read_small(path) != text.encode():
            put_file(path, text.encode())


def rules_of(layout: StoreLayout, run_id: str, attempt: int) -> Rules | None:
    """Read the rules of a run's attempt; None where it has none that this version knows."""
    try:
        return parse_rules(read_small(_rules_path(layout, run_id, attempt)).decode())
    except (FileNotFoundError, StoreFormatError, ValueError):
        return None
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:  # a damaged record, or one that means harm
            return None
        raise


def _rules_path(layout: StoreLayout, run_id: str, attempt: int) -> Path:
    return layout.sampling / f"{quote(run_id, safe='')}.{attempt}"


TraceId = Annotated[str, msgspec.Meta(pattern="^([0-9a-f]{2})*$")]


class Decision(msgspec.Struct):
    """The decision about the trajectories of one step."""

    step: Step
    groups: set[str] = msgspec.field(default_factory=set)
    """Digests of the groups that are kept."""
    kept: set[TraceId] = msgspec.field(default_factory=set)
    """Trace ids of trajectories that keep their spans."""
    left_out: set[TraceId] = msgspec.field(default_factory=set)
    """Trace ids of trajectories whose spans are left out."""

    def add(self, rollouts: Mapping[str, Rollout], groups: Iterable[str]) -> None:
        """Keep these groups too, and decide about these trajectories."""
        self.groups.update(groups)
        for trace_id, rollout in rollouts.items():
            (self.kept if rollout.group in self.groups else self.left_out).add(trace_id)


@dataclass(frozen=True, slots=True)
class Sample:
    """The consequences of the rules for the journals of one folder."""

    held: frozenset[JournalName] = frozenset()
    """Journals that must not be sealed yet."""
    left_out: frozenset[bytes] = frozenset()
    """Trace ids of trajectories whose spans are not wanted."""
    needed_later: list[Decision] | None = None
    """Decisions to save once every other ready journal is sealed; None where no run has rules."""


Journals = Sequence[tuple[JournalFile, JournalStatus]]


def decide(layout: StoreLayout, folder: Path, journals: Journals) -> Sample:
    """Decide about every step that is closed, and sync the decisions to the disk.

    Args:
        journals: all of the folder, by writer and number; the caller holds the sealer's lock.
    """
    if not layout.sampling.is_dir():
        return Sample()
    rollouts = Rollouts(partial(rules_of, layout))
    for file, status in journals:
        rollouts.read(file, status)
    rollouts.take_outcomes()
    decisions = {decision.step: decision for decision in _saved_decisions(folder)}
    _settle(rollouts, decisions, _overdue(rollouts, journals))
    save_decisions(folder, list(decisions.values()))

    step_of = _decided(decisions)
    held = _held(rollouts, journals, rollouts.by_id.keys() - step_of.keys())
    step_of |= {trace_id: rollout.step for trace_id, rollout in rollouts.by_id.items()}
    staying = [file.name for file, status in journals if file.name in held or not status.is_ready]
    mentioned = {step_of.get(trace_id) for name in staying for trace_id in rollouts.mentions[name]}
    left_out = {bytes.fromhex(one) for decision in decisions.values() for one in decision.left_out}
    needed_later = [decision for step, decision in decisions.items() if step in mentioned]
    return Sample(held, frozenset(left_out), needed_later)


def _decided(decisions: Mapping[Step, Decision]) -> dict[str, Step]:
    """Return the step of each trace id that is decided about."""
    return {
        trace_id: step
        for step, decision in decisions.items()
        for trace_id in decision.kept | decision.left_out
    }


def _overdue(rollouts: Rollouts, journals: Journals) -> set[str]:
    """Return the trace ids in journals that have waited for too long."""
    trace_ids: set[str] = set()
    for file, status in journals:
        with contextlib.suppress(FileNotFoundError):  # closed a moment ago
            if status.is_ready and time.time() - file.path.stat().st_mtime > WAIT_MAX_S:
                trace_ids |= rollouts.mentions[file.name]
    return trace_ids


def _settle(rollouts: Rollouts, decisions: dict[Step, Decision], overdue: Set[str]) -> None:
    """Decide about the trajectories of closed steps, and keep those that are overdue."""
    decided = _decided(decisions)
    waiting: dict[Step, dict[str, Rollout]] = defaultdict(dict)
    for trace_id, rollout in rollouts.by_id.items():
        if trace_id not in decided:
            waiting[rollout.step][trace_id] = rollout
    for step, found in waiting.items():
        if rollouts.is_closed(step, found.values()):
            groups = kept_groups(rollouts.rules[step.run_id, step.attempt], found)
        else:
            found = {trace_id: one for trace_id, one in found.items() if trace_id in overdue}
            groups = {rollout.group for rollout in found.values()}
        if found:
            decisions.setdefault(step, Decision(step)).add(found, groups)


def kept_groups(rules: Rules, rollouts: Mapping[str, Rollout]) -> set[str]:
    """Return the groups of one step that have a member which a rule matches."""
    groups = {
        rollout.group
        for rollout in rollouts.values()
        if (rules.errors and rollout.failed)
        or (rules.truncated and rollout.truncated)
        or (rules.labelled and rollout.labelled)
        or (rules.uploaded and rollout.uploaded)
        or rollout.sample_index in rules.panel
        or int(rollout.group, 16) < rules.share * 16 ** len(rollout.group)
    }
    ranked = sorted(
        (rollout.reward, trace_id)
        for trace_id, rollout in rollouts.items()
        # The trajectories of an unknown step are one group, which would always hold its extremes.
        if rollout.step.step is not None and math.isfinite(rollout.reward)
    )
    for ends in (ranked[: rules.extremes], ranked[len(ranked) - rules.extremes :]):
        groups |= {rollouts[trace_id].group for _, trace_id in ends}
    return groups


def _held(rollouts: Rollouts, journals: Journals, undecided: Set[str]) -> frozenset[JournalName]:
    """Return the journals that wait for a decision, and later ones of the same writers."""
    held: set[JournalName] = set()
    writers: set[str] = set()
    for file, status in journals:
        waits = not rollouts.mentions[file.name].isdisjoint(undecided)
        if status.is_ready and (waits or file.name.writer_id in writers):
            held.add(file.name)
            writers.add(file.name.writer_id)
    return frozenset(held)


def save_decisions(folder: Path, decisions: Sequence[Decision]) -> None:
    """Replace the decisions that are kept beside the journals."""
    path = folder / DECISIONS_NAME
    if decisions:
        put_file(path, msgspec.json.encode(decisions))
    else:
        path.unlink(missing_ok=True)


def _saved_decisions(folder: Path) -> list[Decision]:
    try:
        return read_json(folder / DECISIONS_NAME, list[Decision])
    except (FileNotFoundError, StoreFormatError):
        return []
