"""The facts that sampling rules look at, read from the journals of one folder.

Only these facts are kept, so that the journals of a step can be read one by one.
"""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from localtrace.store.journal.frames import read_frames
from localtrace.store.journal.journal_files import (
    JournalFile,
    JournalName,
    JournalStatus,
    read_journal,
)
from localtrace.store.journal.plain_values import as_number, outcome_items
from localtrace.store.journal.records import (
    STATUSES,
    Begin,
    Call,
    Closed,
    Context,
    End,
    OutcomeRecord,
    Record,
    TurnCall,
    read_envelopes,
)
from localtrace.store.journal.results import Fields, finish_reason, results
from localtrace.store.sealing.sampling_rules import Rules
from localtrace.values import codec
from localtrace.values.encoded import raw_map

RulesOf = Callable[[str, int], Rules | None]
"""A function from a run and its attempt to their rules; None where there are none."""
_OK = STATUSES.index("ok")
_TRUNCATIONS = frozenset({"length", "max_tokens", "max_new_tokens", "max_length"})


class Step(NamedTuple):
    """The unit of a decision: a step, or one group where no step is known."""

    run_id: str
    attempt: int
    step: int | None
    validate: bool
    group: str | None


@dataclass(slots=True)
class Rollout:
    """The facts about a trajectory that rules look at."""

    step: Step
    group: str
    """Hexadecimal digest that identifies its group."""
    sample_index: str | None = None
    reward: float = math.nan
    """The newest reward; nan where there is none."""
    failed: bool = False
    """True where it, or a call in it, did not end well."""
    truncated: bool = False
    """True where a generation stopped at its length limit."""
    open: bool = False
    """True where it has not ended and its writer lives."""
    labelled: bool = False
    """True where a person rated, tagged or commented it."""
    uploaded: bool = False
    """True where a receipt says that a tracker holds it."""


@dataclass(slots=True)
class _Journal:
    """One journal while it is read."""

    mentions: set[str]
    rules: Rules = field(default_factory=Rules)
    run_id: str | None = None
    unfinished: set[str] = field(default_factory=set)
    """Trace ids that have begun and not ended."""
    closed: bool = False


class Rollouts:
    """Trajectories by trace id, read from journals that are given in the order of each writer."""

    def __init__(self, rules_of: RulesOf) -> None:
        self.by_id: dict[str, Rollout] = {}
        self.rules: dict[tuple[str, int], Rules] = {}
        """Rules by run and attempt."""
        self.mentions: dict[JournalName, set[str]] = defaultdict(set)
        """Trace ids by journal."""
        self._rules_of = rules_of
        self._newest: dict[str, tuple[int, int]] = {}
        """The last attempt and step of each run."""
        self._live_runs: set[str] = set()
        self._outcome_rewards: dict[str, tuple[int, float]] = {}
        """Time and value of the newest reward that came as an outcome, by trace id."""

    def is_closed(self, step: Step, rollouts: Iterable[Rollout]) -> bool:
        """Tell whether these have ended and their step is over.

        A step is over when a later one began, or when no writer of the run lives. A trajectory
        without a step waits for its own end only.
        """
        if any(rollout.open for rollout in rollouts):
            return False
        if step.step is None or step.run_id not in self._live_runs:
            return True
        return self._newest[step.run_id] > (step.attempt, step.step)

    def read(self, file: JournalFile, status: JournalStatus) -> None:
        """Read one journal."""
        journal = _Journal(self.mentions[file.name])
        frames = read_frames(read_journal(file), file.name.marker)
        for envelope in read_envelopes(frames.payloads):
            if envelope is None:
                continue
            try:
                if journal.run_id is None and not self._has_rules(envelope.context, journal):
                    return
                self._note(envelope.context, envelope.record, journal)
            except Exception:
                continue  # not a record of localtrace; sealing counts it
        if status is JournalStatus.LIVE and not journal.closed and journal.run_id is not None:
            self._live_runs.add(journal.run_id)
        for trace_id in journal.unfinished:
            if status is JournalStatus.LAST or journal.closed:
                self.by_id[trace_id].failed = True
            elif status is JournalStatus.LIVE:
                self.by_id[trace_id].open = True

    def _has_rules(self, context: Context, journal: _Journal) -> bool:
        # A writer has one run, so the first record tells it of the whole journal.
        rules = self._rules_of(context.run_id, context.attempt)
        if rules is None:
            return False
        self.rules[context.run_id, context.attempt] = rules
        journal.rules, journal.run_id = rules, context.run_id
        return True

    def _note(self, context: Context, record: Record, journal: _Journal) -> None:
        if isinstance(record, Call):
            trace_id = record.head.trace_id.hex()
            journal.mentions.add(trace_id)
            if trace_id in self.by_id:
                _note_call(self.by_id[trace_id], record, journal.rules)
        elif isinstance(record, Begin):
            self._rollout(context, record, journal)
            journal.unfinished.add(record.head.trace_id.hex())
        elif isinstance(record, End):
            journal.unfinished.discard(record.begin.head.trace_id.hex())
            _note_end(self._rollout(context, record.begin, journal), record)
        elif isinstance(record, OutcomeRecord):
            self._note_rewards(record, journal)
        elif isinstance(record, Closed):
            journal.closed = True

    def _rollout(self, context: Context, begin: Begin, journal: _Journal) -> Rollout:
        trace_id = begin.head.trace_id.hex()
        journal.mentions.add(trace_id)
        if trace_id not in self.by_id:
            self.by_id[trace_id] = rollout = new_rollout(context, begin)
            if begin.head.step is not None:
                now = (context.attempt, begin.head.step)
                self._newest[context.run_id] = max(now, self._newest.get(context.run_id, now))
            return rollout
        return self.by_id[trace_id]

    def _note_rewards(self, record: OutcomeRecord, journal: _Journal) -> None:
        if "reward" not in record.values or not journal.rules.extremes:
            return
        for trace_id, value in outcome_items(record, "reward"):
            journal.mentions.add(trace_id)
            number = as_number(value)
            known = self._outcome_rewards.get(trace_id)
            if number is not None and (known is None or known[0] <= record.time_ns):
                self._outcome_rewards[trace_id] = (record.time_ns, number)

    def take_outcomes(self) -> None:
        """Replace rewards that rollouts set by those that came as outcomes, wherever these were."""
        for trace_id, (_, reward) in self._outcome_rewards.items():
            if trace_id in self.by_id:
                self.by_id[trace_id].reward = reward


def new_rollout(context: Context, begin: Begin) -> Rollout:
    """Return the facts that are known when a trajectory begins."""
    step, sample_index = begin.head.step, begin.head.sample_index
    group = group_digest(
        (context.run_id, context.attempt, step, begin.validate),
        begin.group_id,
        sample_index,
        trace_id=begin.head.trace_id.hex(),
    )
    alone = group if step is None else None
    key = Step(context.run_id, context.attempt, step, begin.validate, alone)
    return Rollout(key, group, sample_index)


def group_digest(
    of: tuple[str, int, int | None, bool],
    group_id: str | None,
    sample_index: str | None,
    prompt_hash: str | None = None,
    *,
    trace_id: str,
) -> str:
    """Return the identity of a trajectory's group, as hexadecimal digits.

    Args:
        of: run, attempt, step, and whether it is validation.
        group_id: the group's id; the other arguments tell it where this is None, in their order.
        sample_index: identity of the dataset row.
        prompt_hash: identity of the first prompt.
        trace_id: the trajectory, which is a group of its own where nothing else is known.
    """
    keys = {"group": group_id, "sample": sample_index, "prompt": prompt_hash}
    named = next(((kind, key) for kind, key in keys.items() if key is not None), None)
    known_by = [*of, *(named or ("trajectory", trace_id))]
    return hashlib.sha256(msgspec.json.encode(known_by)).hexdigest()[:32]


def _note_call(rollout: Rollout, call: Call, rules: Rules) -> None:
    rollout.failed |= call.status != _OK
    if rules.truncated and isinstance(call, TurnCall):
        rollout.truncated |= any(map(_is_cut_off, results(call.outputs)))


def _is_cut_off(fields: Fields) -> bool:
    reason = finish_reason(fields)
    if isinstance(reason, dict):  # SGLang's
        reason = reason.get("type")
    return str(reason).lower() in _TRUNCATIONS


def _note_end(rollout: Rollout, end: End) -> None:
    values = raw_map(end.values) or {}
    rollout.failed |= end.status != _OK
    rollout.truncated |= "truncated" in values and codec.decode(values["truncated"]) is True
    if "reward" in values:
        reward = as_number(codec.decode(values["reward"]))
        rollout.reward = math.nan if reward is None else reward
