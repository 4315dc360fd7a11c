"""What every target offers, and how one is opened.

A target is the only part that knows a tracker. The pipeline asks it, for each trajectory, for a
`Place` and a `Record`, and hands records back in batches of one place. Everything else is the same
for all trackers and lives in `replay.py`: the ledger, batches, retries, bad records, receipts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from localtrace.errors import ConfigError, MissingDependency
from localtrace.types import Run, Trajectory


@dataclass(frozen=True, slots=True)
class Place:
    """Where in a target the trajectories of one run belong."""

    destination: str
    """Identity of the container at the target: a part of every id, and the ledger's first key.

    It must not depend on how the target is reached.
    """
    experiment: str
    """The target's id of that container."""
    run: str
    """The target's id of the run."""
    container: str = ""
    """The container's name, for people."""
    ids_from: str = ""
    """What ids are derived from, where it is not the destination: what it was called before."""

    @property
    def seed(self) -> str:
        """What the ids of a trajectory here are derived from, beside its own."""
        return self.ids_from or self.destination


@dataclass(frozen=True, slots=True)
class Entry:
    """A trajectory at a target: what the ledger and the receipt remember of a record."""

    place: Place
    trace_id: str
    remote_id: str
    """The target's id of it, a function of the place's seed and the trace id."""
    digest: str
    """sha256 of everything that is sent."""
    span_count: int
    """How many spans or calls the target shows for it, the trajectory itself included."""
    assessment_id: str | None = None
    """The target's id of the assessment that goes with it, if one does."""


@dataclass(frozen=True, slots=True)
class Cut:
    """A value that was shortened, because the target takes no longer one."""

    where: str
    """The span and the field, such as `generate: outputs.text`."""
    kept_bytes: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Record:
    """One trajectory as a target takes it: byte-stable for the same trajectory and place."""

    entry: Entry
    parts: tuple[bytes, ...]
    """What goes into a request, in this order: one part per call at Weave, one in all elsewhere."""
    assessment: bytes | None = None
    """A second request that carries the reward as an assessment, where it was asked for."""
    cuts: tuple[Cut, ...] = ()

    @property
    def size_bytes(self) -> int:
        """What the record adds to requests."""
        return sum(map(len, self.parts)) + len(self.assessment or b"")


@dataclass(frozen=True, slots=True)
class Metric:
    """One value of a run's metric."""

    name: str
    step: int
    value: float
    time_ns: int


class Target(Protocol):
    """One tracker.

    Every method may raise `UploadError` (nothing can go on), `TargetRejected` (these records are
    refused for good) or `http.TryAgain` (the answer is unknown; asking again may help). `complete`
    and `send` are called from several threads, the others from one.
    """

    kind: str
    uri: str
    """Where it is, without secrets."""
    opening: str
    """What `check` does, for people, where they have to wait for it; else empty."""
    batch_max_parts: int
    batch_max_bytes: int
    record_max_bytes: int
    connections: int
    """How many requests it takes at a time without becoming slower."""
    usual_trajectories_per_s: float
    """How fast it is as a rule, for estimates before anything was sent to it."""
    reads_back: bool
    """Whether it can be asked what it holds; else a receipt says accepted, not verified."""
    starts_slowly: bool
    """Whether the first trajectory of an empty place goes alone, before there is any other."""

    def check(self) -> None:
        """Reach the tracker and make sure that it can take records; the first call made."""

    def place(self, run: Run, container: str | None) -> Place:
        """Find the container of this name and this run at the tracker, or make them.

        Args:
            container: an MLflow experiment or a Weave project; None: the project of the run.
        """

    def expected(self, run: Run, container: str | None) -> Place:
        """The place of a run as far as it is known without asking; arguments as in `place`."""

    def is_empty(self, place: Place) -> bool:
        """Whether the place is known to hold no trajectory yet, so that none need be asked for."""

    def encode(self, trajectory: Trajectory, place: Place) -> Record:
        """Build the record; asks the tracker nothing."""

    def recognise(self, place: Place, run_id: str, trace_ids: Sequence[str]) -> Mapping[str, Entry]:
        """Ask which trajectories of a run are there under other ids than they would get now.

        Returns:
            By trace id an entry whose place has the seed of those ids, or no destination where
            that cannot be known.
        """

    def find(self, entries: Sequence[Entry]) -> Mapping[str, bool]:
        """Ask which entries are whole there; return by trace id whether with the same digest."""

    def send(self, records: Sequence[Record]) -> Mapping[str, int]:
        """Send records of one place. Returning means that all of them are stored.

        Returns:
            By trace id how many bytes of a record were sent, where that may be less than all.
        """

    def verify(self, entries: Sequence[Entry]) -> set[str]:
        """Read entries of one place back, in their run; return the trace ids found there."""

    def close(self) -> None:
        """End connections, and whatever was started for the upload."""


@runtime_checkable
class MergingTarget(Protocol):
    """A target that shows what was sent again as further rows, until it merges them."""

    def double_rows(self, entries: Sequence[Entry]) -> int:
        """Count the rows that it shows now of entries of one place, beyond one per call."""


@runtime_checkable
class MetricsTarget(Protocol):
    """A target that takes the metrics of a run too."""

    def send_metrics(self, place: Place, metrics: Sequence[Metric]) -> dict[str, str]:
        """Send values to the place's run; sending them again changes nothing.

        Returns:
            By recorded name the name at the target, where that differs.
        """

    def count_metrics(self, place: Place, names: Iterable[str]) -> dict[str, int]:
        """Read back how many values the run holds of each recorded name."""


@dataclass(frozen=True, slots=True)
class TargetOptions:
    """What can be asked of some targets."""

    assessments: bool = False
    """mlflow: each reward as an assessment too, which costs a request per trajectory."""
    wandb_run: str | None = None
    """weave: `entity/project/run` of the W&B run that the trajectories sit on."""


KINDS = ("mlflow", "otlp", "weave")
"""What `--to` accepts."""


def open_target(kind: str, uri: str | None, options: TargetOptions | None = None) -> Target:
    """Prepare a target; nothing is contacted or started before `check`.

    Args:
        uri: where it is; None: where the tracker's own environment variables say.

    Raises:
        ConfigError: the kind or the form of the uri is not known, or no variable names one.
        MissingDependency: a package that the target needs is not installed.
    """
    if kind not in KINDS:
        raise ConfigError(f"no target is called {kind!r}: choose one of {', '.join(KINDS)}")
    try:
        return _opened(kind, uri, options or TargetOptions())
    except ModuleNotFoundError as error:
        raise MissingDependency.for_extra(error.name or "a package", kind) from None


def _opened(kind: str, uri: str | None, options: TargetOptions) -> Target:
    if kind == "weave":
        from localtrace.uploader.targets.weave import WeaveTarget

        return WeaveTarget(uri, wandb_run=options.wandb_run)
    if kind == "otlp":
        from localtrace.uploader.targets.otlp import OtlpTarget

        return OtlpTarget(uri)
    from localtrace.uploader.targets.mlflow import MlflowTarget

    return MlflowTarget(uri, assessments=options.assessments)
