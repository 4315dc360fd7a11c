"""Rules that say which trajectories lose their calls, as text, and the rules of a store's runs.

A run says what to keep: `errors,extremes=2,share=0.05`. `localtrace prune` and a limit of a store's
size say it after `keep=`, beside other rules: `500GB,older-than=14d,keep-every=10,keep=errors`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, TypeVar
from urllib.parse import quote, unquote

import msgspec
from msgspec import Meta

from localtrace.errors import StoreFormatError
from localtrace.quantities import parse_age, parse_size
from localtrace.store.files import SMALL_MAX_BYTES, explained, put_file, read_file
from localtrace.store.layout import StoreLayout

T = TypeVar("T")
_FROM_1 = Annotated[int, Meta(ge=1)]
_PARSERS: dict[str, Callable[[str], Any]] = {
    "to_size": parse_size,
    "older_than": parse_age,
    "panel": lambda text: [value.strip() for value in text.split(";")],
}
_KEEP_EXAMPLES = "errors, truncated, extremes=2, panel=17;42, share=0.05, labelled, uploaded"
_EXAMPLES = "500GB, older-than=14d, keep-every=10, gathered, keep=errors"


class Rules(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A group of trajectories keeps its calls where one rule matches one of its members."""

    errors: bool = False
    """Whether to keep a trajectory that failed, or in which a call failed."""
    truncated: bool = False
    """Whether to keep a trajectory with a generation that stopped at its length limit."""
    extremes: _FROM_1 = 0
    """Number of the highest, and of the lowest, rewards of a step to keep."""
    panel: frozenset[Annotated[str, Meta(min_length=1)]] = frozenset()
    """Values of sample_index to keep."""
    share: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """Share of all groups to keep, from 0 to 1, picked by a hash of the group."""
    labelled: bool = False
    """Whether to keep a trajectory that a person rated, tagged or commented."""
    uploaded: bool = False
    """Whether to keep a trajectory that a receipt in the store says is at a tracker."""


class _Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The rules of pruning that are no rules of what to keep."""

    to_size: int | None = None
    """Prune the oldest first, until the store takes no more bytes than this; None: prune all."""
    older_than: float | None = None
    """Prune only what ended more seconds ago."""
    keep_every: _FROM_1 | None = None
    """Keep the steps that are multiples of this, and trajectories without a step."""
    gathered: bool = False
    """Prune only what another store has gathered."""


class Retention(_Limits, frozen=True):
    """Rules of pruning. A group of trajectories is pruned only where none of them keeps it."""

    keep: Rules = Rules()
    text: str = ""
    """The rules as they were written."""

    @property
    def is_empty(self) -> bool:
        """True where it says nothing."""
        return self == Retention(text=self.text)


def parse_rules(text: str) -> Rules:
    """Read what to keep: rules separated by commas, each at most once.

    Raises:
        ValueError: a rule is unknown, repeated or cannot be used; the text says what to write.
    """
    return _parsed(Rules, text.split(","), _KEEP_EXAMPLES)


def parse_retention(text: str) -> Retention:
    """Read rules of pruning, separated by commas; after `keep=`, more rules of what to keep.

    Raises:
        ValueError: a rule is unknown, repeated or cannot be used; the text says what to write.
    """
    own: list[str] = []
    kept: list[str] = []
    parts = [part.strip() for part in text.split(",") if part.strip()]
    for part in parts:
        if part.startswith("keep="):
            kept.append(part.removeprefix("keep="))
        elif part[0].isdecimal():
            own.append(f"to-size={part}")
        else:
            (kept if kept and _name_of(part) in Rules.__struct_fields__ else own).append(part)
    limits = msgspec.structs.asdict(_parsed(_Limits, own, _EXAMPLES))
    return Retention(**limits, keep=_parsed(Rules, kept, _KEEP_EXAMPLES), text=",".join(parts))


def _parsed(kind: type[T], parts: Iterable[str], examples: str) -> T:
    values: dict[str, Any] = {}
    for part in parts:
        name, (_, equals, value) = _name_of(part), map(str.strip, part.partition("="))
        if name in values:
            raise ValueError(f"{part!r} repeats a rule: write it once")
        values[name] = _PARSERS.get(name, str)(value) if equals else "true"
        try:
            msgspec.convert({name: values[name]}, kind, strict=False)
        except msgspec.ValidationError:
            raise ValueError(f"{part!r} is not a rule: use some of {examples}") from None
    return msgspec.convert(values, kind, strict=False)


def _name_of(part: str) -> str:
    return part.partition("=")[0].strip().replace("-", "_")


def parse_quota(text: str) -> tuple[int, Retention | None]:
    """Read a limit of a store's size: bytes, and rules of pruning if any stand beside it.

    Raises:
        ValueError: there is no size, or a rule is unknown, repeated or cannot be used.
    """
    retention = parse_retention(text)
    if retention.to_size is None:
        raise ValueError(f"it needs a size, such as {_EXAMPLES.replace(', ', ',')}")
    alone = Retention(retention.to_size, text=retention.text)
    return retention.to_size, None if retention == alone else retention


def pause_above(text: str | None) -> int | None:
    """Return the size of a store above which recording pauses; None: it does not.

    With rules it does not: the sealer prunes instead.
    """
    if text is None:
        return None
    size_bytes, retention = parse_quota(text)
    return size_bytes if retention is None else None


def keep_rules(layout: StoreLayout, run_id: str, attempt: int, text: str) -> None:
    """Put the rules of a run's attempt into the store.

    Raises:
        StoreUnwritable: the store cannot be written.
    """
    path = layout.sampling / f"{quote(run_id, safe='')}.{attempt}"
    with explained(f"cannot write {path}", "free space, or name a store that this user can write"):
        put_file(path, text.encode())


def rules_of_runs(layout: StoreLayout) -> Iterator[tuple[Path, str, int, Retention]]:
    """Yield the file, run id, attempt and rules of each attempt of a run that has rules.

    An attempt whose rules this version does not know keeps everything.
    """
    for path in sorted(layout.sampling.glob("*")):
        run_id, _, attempt = path.name.rpartition(".")
        try:
            rules = parse_retention(f"keep={read_file(path, SMALL_MAX_BYTES).decode()}")
            yield path, unquote(run_id), int(attempt), rules
        except (StoreFormatError, ValueError):
            continue
