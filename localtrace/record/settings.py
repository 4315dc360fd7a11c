"""All settings: the type, the default, accepted values and the effect of each.

Each is also a variable, LOCALTRACE_<NAME IN CAPITALS>; `localtrace.record.config` reads them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta, Struct

from localtrace.store.sealing.policy import DEFAULT_POLICY

MIB = 2**20

_PATH = Meta(title="a path")
_SWITCH = Meta(title="1 or 0, true or false, yes or no, on or off")
_BYTES = Meta(ge=0, title="a size such as 500MB or 2GiB, or a whole number of bytes, 0 or more")
_SECONDS = Meta(ge=0, title="a number of seconds, 0 or more")
_SHARE = Meta(ge=0, le=1, title="a share between 0 and 1")
_COUNT = Meta(ge=0, lt=2**31, title="a whole number, 0 or more and below 2147483648")
_NAMES = Meta(title="names with commas between them, or a list of names")


class Settings(Struct, frozen=True):
    """Settings of a recorder, which are also arguments of `init`."""

    store: Annotated[Path, _PATH, Meta(description="Folder of the store")]
    project: Annotated[str, Meta(description="Name of the project; a partition of the tables")] = (
        "default"
    )
    experiment: Annotated[
        str, Meta(description="Name of the experiment; a partition of the tables")
    ] = "default"
    run_id: Annotated[
        str | None, Meta(description="One training job; made by the first process when not given")
    ] = None
    attempt: Annotated[int, _COUNT, Meta(description="Restart counter of the run")] = 0
    resume: Annotated[
        Literal["must"] | None,
        Meta(
            title="must, or leave it out",
            description="`must`: go on with the newest run of this project and experiment, as its "
            "next attempt",
        ),
    ] = None
    worker: Annotated[str | None, Meta(description="A name for this process")] = None
    journal_dir: Annotated[
        Path | None,
        _PATH,
        Meta(description="Local folder for journals; inside the store when not given"),
    ] = None
    queue_max_bytes: Annotated[
        int, _BYTES, Meta(description="Finished records that may wait for the disk")
    ] = 256 * MIB
    flush_interval_s: Annotated[
        float, _SECONDS, Meta(description="How often the writer thread drains the queue")
    ] = 0.01
    fsync_interval_s: Annotated[
        float,
        _SECONDS,
        Meta(description="How often a journal is synced, against a crash of the machine"),
    ] = 5.0
    rotate_max_bytes: Annotated[
        int, _BYTES, Meta(description="A journal is closed, and can be sealed, at this size")
    ] = 64 * MIB
    rotate_interval_s: Annotated[
        float, _SECONDS, Meta(description="A journal is closed, and can be sealed, at this age")
    ] = 60.0
    min_free_bytes: Annotated[
        Annotated[int, _BYTES] | None,
        Meta(
            description="Recording pauses below this much free space; default: the larger of "
            "20 GB and 5%"
        ),
    ] = None
    max_store_bytes: Annotated[
        str | None,
        Meta(
            description="Recording pauses above this size of the store, such as `500GB`; with "
            "rules of `localtrace prune` beside it, such as `500GB,keep-every=10,keep=errors`, the "
            "sealer prunes the oldest calls instead; default: no limit"
        ),
    ] = None
    record_max_bytes: Annotated[
        int,
        _BYTES,
        Meta(description="Inputs or outputs that encode to more are replaced by a placeholder"),
    ] = 64 * MIB
    pinned_max_bytes: Annotated[
        int,
        _BYTES,
        Meta(
            description="Copies on a GPU of tensors on their way into memory; pinned memory takes "
            "at most as much, and at most 16 MiB; 0: no tensor on a GPU is kept"
        ),
    ] = 256 * MIB
    keep: Annotated[
        tuple[str, ...],
        _NAMES,
        Meta(description="Names kept although they are dropped by default, such as routed_experts"),
    ] = ()
    seal: Annotated[
        bool, _SWITCH, Meta(description="Whether the sealer starts in the background")
    ] = True
    seal_interval_s: Annotated[
        float,
        _SECONDS,
        Meta(description="The sealer seals closed journals so often; at the end, at once"),
    ] = DEFAULT_POLICY.interval_s
    seal_max_bytes: Annotated[
        int,
        _BYTES,
        Meta(description="The sealer does not wait with more closed journals than this"),
    ] = DEFAULT_POLICY.max_bytes
    sample: Annotated[
        str | None,
        Meta(
            description="Which groups keep their spans, such as "
            "`errors,truncated,extremes=2,panel=17;42,share=0.1`; all do when not given"
        ),
    ] = None


class HookSettings(Struct, frozen=True):
    """Settings of the hooks of trainers and engines."""

    required: Annotated[
        bool,
        _SWITCH,
        Meta(
            description="Whether a job that cannot be recorded stops at start-up, instead of going "
            "on without"
        ),
    ] = False
    lone_generations: Annotated[
        bool,
        _SWITCH,
        Meta(
            description="Whether what an engine generates outside of every recorded call becomes a "
            "trajectory of its own; the verl hook says 0, since it records the trajectories"
        ),
    ] = True
    trainer_outcomes: Annotated[
        bool,
        _SWITCH,
        Meta(
            description="Whether verl's batches carry trace ids; without them advantages and fates "
            "are not recorded"
        ),
    ] = True
    trainer_tokens: Annotated[
        float,
        _SHARE,
        Meta(
            description="Share of the groups of verl and slime whose per-token values (logprobs, "
            "advantages) are recorded, 0 to 1"
        ),
    ] = 0.02


class UploaderSettings(Struct, frozen=True):
    """Settings of the uploader."""

    state_dir: Annotated[
        Path | None,
        _PATH,
        Meta(
            description="Folder of the uploader's ledger and receipts; `localtrace` in the user's "
            "state folder when not given"
        ),
    ] = None


class TestSettings(Struct, frozen=True):
    """Settings of this project's own tests."""

    test_all: Annotated[
        bool,
        _SWITCH,
        Meta(description="Whether a test of localtrace that cannot run here fails"),
    ] = False
    soak: Annotated[
        bool,
        _SWITCH,
        Meta(description="Whether tests of localtrace repeat kills and faults more often"),
    ] = False


VARIABLES_ONLY: tuple[type[Struct], ...] = (HookSettings, UploaderSettings, TestSettings)
"""Settings that can be given as variables only, not to `init`."""
