"""Labels: what people say of trajectories, written as outcomes into a journal of its own.

Each call makes one journal in each store that holds some of the trajectories, syncs and closes it:
what was said is on disk when the call returns, and no writer stays open. Readers see it at once.
The sealer is started as recorders start it, unless one runs; it seals the journals together once
nobody has labelled for a while.
"""

from __future__ import annotations

import contextlib
import errno
import getpass
import math
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from localtrace.errors import ConfigError, NotFound
from localtrace.record.config import load_settings
from localtrace.record.start_sealer import start_sealer
from localtrace.store.files import explained
from localtrace.store.journal.folders import choose_journal_folder
from localtrace.store.journal.records import Context, Kind
from localtrace.store.journal.writer import Item, JournalSeries
from localtrace.store.layout import StoreLayout, create_layout, network_of
from localtrace.store.sealing.policy import SealPolicy
from localtrace.terminal import escape_line

if TYPE_CHECKING:
    from localtrace.read.store import Store

TAG_MAX_CHARS = 100
COMMENT_MAX_CHARS = 10_000
_TAKEN_AWAY = ""
_REST_S = 60.0
"""The time without further labels after which they are sealed, where no process records."""
_ROWS_SQL = """
select trace_id, project, experiment, run_id, attempt, step from stored.trajectories
where trace_id in (select unnest($ids::varchar[]))
"""
_encode = msgspec.msgpack.Encoder().encode
_Said: TypeAlias = Sequence[tuple[str, str | float]]
"""Names of outcomes and their values, in order."""


@dataclass(frozen=True, slots=True)
class _Rollout:
    """A trajectory that is labelled, and the run that it belongs to."""

    trace_id: str
    context: Context
    step: int | None


def label(
    store: Store,
    trace_ids: Iterable[str],
    *,
    who: str | None = None,
    tags: Iterable[str] = (),
    untag: Iterable[str] = (),
    rating: float | str | None = None,
    comment: str | None = None,
) -> int:
    """Label trajectories, and return how many.

    A person has one rating and one comment for a trajectory, and any number of tags. The store
    shows the labels after `refresh()`.

    Args:
        store: the opened store.
        trace_ids: their ids, or beginnings that each belong to one id only.
        who: the person's name; the user of the login when not given.
        tags: tags to add; a comma separates several.
        untag: tags of this person to take away.
        rating: a number; empty text takes the person's rating away.
        comment: a text; empty text takes the person's comment away.

    Raises:
        ConfigError: nothing is said, or a text is too long, or cannot be a tag or a name.
        QueryError: there is no such trajectory.
        StoreUnwritable: the store is a bundle, or its folder or its disk refuses the journal.
    """
    said = _said(tags, untag, rating, comment)
    name = person(who)
    given = list(trace_ids)
    whole = store.whole_ids(given)
    ids = list(dict.fromkeys(whole.get(one, one) for one in given))
    for root, rollouts in _by_store(store, ids).items():
        _write(root, rollouts, said, name)
    return len(ids)


def person(who: str | None) -> str:
    """Return the name of who labels: the one that is given, else that of the login.

    Raises:
        ConfigError: there is none, or it cannot be a name.
    """
    name = (who or "").strip() or login()
    if not name:
        raise ConfigError("this login has no name: say who labels")
    return _checked(name, "the name", TAG_MAX_CHARS, is_line=True)


def why_unwritable(root: Path) -> str | None:
    """Return why no label can be written into a store, as far as that shows before; None: it can.

    The text is the beginning of a sentence.
    """
    layout = StoreLayout(root)
    with contextlib.suppress(OSError):
        if os.statvfs(root).f_flag & os.ST_RDONLY:
            return f"{root} is on a file system that can only be read"
    if not os.access(layout.journals if layout.journals.exists() else root, os.W_OK | os.X_OK):
        return f"This user may not write to {root}"
    kind = network_of(layout.journals)
    if kind and load_settings(root, {}).journal_dir is None:
        return (
            f"{root} is on {kind}, where journals cannot be, and LOCALTRACE_JOURNAL_DIR names no "
            "folder on a local disk"
        )
    return None


def login() -> str | None:
    """Return the user of the login; None where the system has no name for it."""
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return None


def _said(
    tags: Iterable[str], untag: Iterable[str], rating: float | str | None, comment: str | None
) -> _Said:
    said: list[tuple[str, str | float]] = [("tag", tag) for tag in _split(tags)]
    said += [("tag", f"-{tag}") for tag in _split(untag)]
    if rating is not None:
        said.append(("rating", _rated(rating)))
    if comment is not None:
        said.append(("comment", _checked(comment.strip(), "the comment", COMMENT_MAX_CHARS)))
    if not said:
        raise ConfigError("nothing is said: give a tag, a rating or a comment")
    return said


def _split(texts: Iterable[str]) -> list[str]:
    parts = [part.strip() for text in texts for part in text.split(",")]
    for part in filter(None, parts):
        _checked(part, "a tag", TAG_MAX_CHARS, is_line=True)
        if part.startswith("-"):
            raise ConfigError(f"{part!r} is no tag: one begins with another sign than a minus")
    return [part for part in parts if part]


def _rated(rating: float | str) -> float | str:
    if rating == _TAKEN_AWAY:
        return _TAKEN_AWAY
    try:
        number = float(rating)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ConfigError(f"the rating {str(rating)[:40]!r} is no number: give one such as 4")
    return number


def _checked(text: str, what: str, max_chars: int, *, is_line: bool = False) -> str:
    if len(text) > max_chars:
        raise ConfigError(f"{what} has {len(text):,} characters: give at most {max_chars:,}")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{what} is not valid Unicode text") from None
    if is_line and (text != escape_line(text) or "\t" in text):
        raise ConfigError(f"{what} {text!r} holds signs that are not seen: leave them out")
    return text


def _by_store(store: Store, ids: list[str]) -> dict[Path, list[_Rollout]]:
    """Return the trajectories by the folder of the store that holds each; bundles come last."""
    paths = sorted(store.paths, key=lambda path: path in store.bundles)
    found: dict[Path, list[_Rollout]] = {}
    left = dict.fromkeys(ids)
    for path in paths:
        rollouts = [one for one in _held(store, path, list(left)) if one.trace_id in left]
        for one in rollouts:
            left.pop(one.trace_id, None)
        if rollouts:
            found[path] = rollouts
    if left:
        raise NotFound(f"no trajectory has the id {next(iter(left))}: list them with localtrace ls")
    return found


def _held(store: Store, path: Path, ids: list[str]) -> list[_Rollout]:
    from localtrace.read.store import open_store

    if not ids:
        return []
    if len(store.paths) == 1:
        rows = store.own_sql(_ROWS_SQL, {"ids": ids}).to_dicts()
    else:
        with open_store(path) as one:
            rows = one.own_sql(_ROWS_SQL, {"ids": ids}).to_dicts()
    return [
        _Rollout(
            row["trace_id"],
            Context(row["project"], row["experiment"], row["run_id"], row["attempt"]),
            row["step"],
        )
        for row in rows
    ]


def _write(root: Path, rollouts: list[_Rollout], said: _Said, who: str) -> None:
    """Write one journal with what is said of trajectories, and sync it."""
    layout = create_layout(root)
    settings = load_settings(root, {})
    folder = choose_journal_folder(layout, settings.journal_dir)
    groups: dict[tuple[Context, int | None], list[str]] = {}
    for one in rollouts:
        groups.setdefault((one.context, one.step), []).append(one.trace_id)
    refused: list[str] = []
    series = JournalSeries(
        folder,
        rollouts[0].context,
        settings.rotate_max_bytes,
        settings.rotate_interval_s,
        lambda kind, count: refused.append(kind),
        lambda: folder,
    )
    then = "free space, or ask for permission to write there, then say it again"
    try:
        with explained(f"not everything that was said is in {root}", then):
            series.open()
            for (context, step), ids in groups.items():
                series.set_context(context)
                series.write([_item(ids, step, name, value, who) for name, value in said])
                if series.pending or refused:
                    raise OSError(series.error or errno.EIO, "refused", str(folder))
    finally:
        series.close()
        if settings.seal:
            policy = SealPolicy(settings.seal_interval_s, settings.seal_max_bytes, _REST_S)
            with contextlib.suppress(OSError):  # what was said is on disk, sealed or not
                start_sealer(root, folder, policy)  # without a quota: a label deletes nothing


def _item(ids: list[str], step: int | None, name: str, value: str | float, who: str) -> Item:
    values = {name: msgspec.Raw(_encode(value))}
    record = (int(Kind.OUTCOME), ids, False, step, time.time_ns(), who, values)
    return Item(Kind.OUTCOME, b"", _encode(record))
