"""What every target offers, and how one is opened.

A target is the only part that knows a tracker. The pipeline asks it, for each trajectory, for a
`Place` and a `Record`, and hands records back in batches of one place. Everything else is the same
for all trackers and lives in `replay.py`: the ledger, batches, retries, bad records, receipts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from localtrace.errors import ConfigError
from localtrace.types import Run, Trajectory


@dataclass(frozen=True, slots=True)
class Place:
    """Where in a target the trajectories of one run belong."""

    destination: str
    """Identity of the container at the target: a part of every id, and the ledger's first key.

    It must not depend on how the target is reached, and must change when the container is made
    anew.
    """
    experiment: str
    """The target's id of that container."""
    run: str
    """The target's id of the run."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A trajectory at a target: what the ledger and the receipt remember of a record."""

    place: Place
    trace_id: str
    remote_id: str
    """The target's id of it, a function of the destination and the trace id."""
    digest: str
    """sha256 of everything that is sent."""
    assessment_id: str | None
    """The target's id of the assessment that goes with it, if one does."""


@dataclass(frozen=True, slots=True)
class Record:
    """One trajectory as a target takes it: byte-stable for the same trajectory and place."""

    entry: Entry
    body: bytes
    assessment: bytes | None
    """A second request that carries the reward as an assessment, where it was asked for."""

    @property
    def size_bytes(self) -> int:
        """What the record adds to a request."""
        return len(self.body) + len(self.assessment or b"")


class Target(Protocol):
    """One tracker.

    Every method may raise `UploadError` (nothing can go on), `TargetRejected` (these records are
    refused for good) or `http.TryAgain` (the answer is unknown; asking again may help).
    """

    uri: str
    """Where it is, without secrets."""
    batch_max_records: int
    batch_max_bytes: int
    record_max_bytes: int

    def check(self) -> None:
        """Reach the tracker and make sure that it can take records; the first call made."""

    def place(self, run: Run, experiment: str) -> Place:
        """Find the experiment of this name and this run at the tracker, or make them."""

    def encode(self, trajectory: Trajectory, place: Place) -> Record:
        """Build the record; asks the tracker nothing."""

    def complete(self, entries: Sequence[Entry]) -> set[str]:
        """Ask which entries are there, with the same digest; return their trace ids."""

    def send(self, records: Sequence[Record]) -> None:
        """Send records of one place. Returning means that all of them are stored."""

    def verify(self, entries: Sequence[Entry]) -> set[str]:
        """Read entries of one place back, in their run; return the trace ids found there."""

    def close(self) -> None:
        """End connections, and whatever was started for the upload."""


KINDS = ("mlflow",)
"""What `--to` accepts."""


def open_target(kind: str, uri: str, *, assessments: bool = False) -> Target:
    """Prepare a target; nothing is contacted or started before `check`.

    Raises:
        ConfigError: the kind or the form of the uri is not known.
    """
    if kind not in KINDS:
        raise ConfigError(f"no target is called {kind!r}: choose one of {', '.join(KINDS)}")
    from localtrace.uploader.targets.mlflow import MlflowTarget

    return MlflowTarget(uri, assessments=assessments)
