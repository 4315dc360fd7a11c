"""Read trajectories from a store, and map them to a target's records.

A trajectory that cannot be read or mapped is rejected alone; the others go on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, TypeAlias

from localtrace.redaction.redaction import Redaction
from localtrace.types import Decode, Trajectory
from localtrace.uploader.content import (
    left_out,
    model_name,
    prompts_bytes,
    wants_text,
    with_text,
)
from localtrace.uploader.selection import ChosenRun
from localtrace.uploader.targets import Place, Record, Target
from localtrace.uploader.transcripts import transcript_of

if TYPE_CHECKING:
    from localtrace.read.store import Store

READ_FIRST = 16
READ_MAX = 512
READ_MAX_BYTES = 16 * 2**20
"""Size of the records to read at a time: one trajectory may hold megabytes."""

NOT_IN_STORE = "not in the store"

OnReject: TypeAlias = Callable[[str, str], None]
"""Callback that gets a trace id and the reason why it cannot be uploaded."""
Places: TypeAlias = Callable[[Sequence[str]], Mapping[str, Place]]
"""Function that returns the place of each trajectory. Those without a place are not read."""


@dataclass(frozen=True, slots=True)
class Records:
    """A source of records: trajectories of a store, redacted and encoded for a target."""

    store: Store
    target: Target
    redaction: Redaction
    left_out: Counter[str] = field(default_factory=Counter)
    """Number of values that recording had dropped, by field and reason; of all that was read."""

    def of(self, part: ChosenRun, places: Places, on_reject: OnReject) -> Iterator[Record]:
        """Yield the record of each trajectory that has its calls.

        Those that cannot be read or sent are reported to `on_reject`.
        """
        as_text, model = wants_text(part.run.config), model_name(part.run.config)
        model = None if model is None else self.redaction.text(model)
        remaining = iter(part.whole_ids)

        def unreadable(trace_id: str, error: Exception) -> None:
            on_reject(trace_id, f"cannot be read: {error}")

        batch_size = READ_FIRST
        while trace_ids := list(islice(remaining, batch_size)):
            size_bytes = 0
            goes = places(trace_ids)
            wanted = [trace_id for trace_id in trace_ids if trace_id in goes]
            for trajectory in self.store.read_each(wanted, unreadable):
                place = goes[trajectory.trace_id]
                record = self._encode(trajectory, place, as_text, model, on_reject)
                if record is not None:
                    size_bytes += record.size_bytes
                    yield record
            fitting = READ_MAX_BYTES * len(trace_ids) // max(1, size_bytes)
            batch_size = max(1, min(fitting, 2 * batch_size, READ_MAX))

    def _encode(
        self,
        trajectory: Trajectory,
        place: Place,
        as_text: bool,
        model: str | None,
        on_reject: OnReject,
    ) -> Record | None:
        reject = partial(on_reject, trajectory.trace_id)
        limit = self.target.record_max_bytes
        try:
            self.left_out.update(left_out(trajectory))
            if as_text:
                trajectory = with_text(trajectory, self.store.decode)
            trajectory = self.redaction.trajectory(trajectory, self.store.decode)
            least_bytes = 0 if self.target.shortens_calls else prompts_bytes(trajectory)
            if least_bytes > limit:
                # A record of this size would take gigabytes of memory, only to be refused below.
                reject(f"too large: prompts of {least_bytes} bytes alone, at most {limit} are sent")
                return None
            # Decoded texts are redacted again: a key may show only where the text is cut.
            readable = replace(trajectory, model=model, decode=self._decode(trajectory.run_id))
            transcript = transcript_of(readable)
            record = self.target.encode(trajectory, place, transcript)
        except Exception as error:
            # Recorded values are hostile input: whatever fails here may cost this trajectory only.
            reject(f"cannot be encoded: {type(error).__name__}: {error}")
            return None
        if record.size_bytes > limit:
            reject(f"too large: {record.size_bytes} bytes, at most {limit} are sent")
            return None
        return record

    def _decode(self, run_id: str) -> Decode:
        def decode(ids: list[int], *, skip_special_tokens: bool = False) -> str | None:
            text = self.store.decode(run_id, ids, skip_special_tokens=skip_special_tokens)
            return None if text is None else self.redaction.text(text)

        return decode
