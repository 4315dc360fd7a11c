"""The target W&B Weave. Routes are in this module, `weave_reading.py` and
`weave_feedback.py` only.

Finished calls go to `calls/complete`, up to a thousand in one request. The service stores all calls
of a request or none. It shows a call twice that was sent twice. The uploader therefore asks for
calls by id and leaves out those that are there, even within one trajectory.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from threading import Lock
from typing import TypeAlias
from urllib.parse import quote

import msgspec

from localtrace.errors import ConfigError, TargetUnavailable, UploadError
from localtrace.types import Run, Trajectory
from localtrace.uploader.targets import CallKey, Entry, Place, Record, Target, in_batches
from localtrace.uploader.targets.http import HttpSession, Refused, TryAgain, printable
from localtrace.uploader.targets.wandb import (
    PUBLIC_URL,
    api_key,
    api_url,
    existing_project,
    names,
    server_url,
)
from localtrace.uploader.targets.weave_calls import (
    encode,
    root_id,
    split_digests,
)
from localtrace.uploader.targets.weave_feedback import (
    digest_of_calls,
    feedback_there,
    is_whole,
    of_labels,
    of_reward,
    send_missing,
    with_feedback,
)
from localtrace.uploader.targets.weave_reading import Reading, askable
from localtrace.uploader.transcripts import Transcript

CALLS_MAX = 1000
REQUEST_MAX_BYTES = 30 * 2**20
"""Largest request; the service refuses those above 32 MiB."""
JSON = {"content-type": "application/json"}


class _ServerInfo(msgspec.Struct):
    min_required_weave_python_version: str


_Call: TypeAlias = tuple[Entry, CallKey, bytes]
"""The entry of a trajectory, and one encoded call of it with its key."""


@dataclass(slots=True)
class _Held:
    """The calls of a trajectory that must not be sent again."""

    ids: set[str] = field(default_factory=set)
    digests: set[str] | None = None
    """Digests of the calls there, if they belong to an earlier version; otherwise None."""

    def has(self, key: CallKey) -> bool:
        """Return whether a call is there with the same content."""
        is_there = key.id in self.ids
        return is_there and (self.digests is None or key.digest in self.digests)

    def add(self, key: CallKey) -> None:
        """Note that a call was stored."""
        self.ids.add(key.id)
        if self.digests is not None:
            self.digests.add(key.digest)


class WeaveTarget(Target):
    """A Weave service: W&B's own, or one that belongs to a private W&B server."""

    kind = "weave"
    batch_max_parts = CALLS_MAX
    batch_max_bytes = REQUEST_MAX_BYTES
    record_max_bytes = 256 * 2**20
    shortens_calls = True
    starts_slowly = True
    """While a project is empty, the service looks up for every single call where it belongs."""

    def __init__(
        self, uri: str | None, *, wandb_run: str | None, assessments: bool = False
    ) -> None:
        """Prepare the target, without contacting it.

        Args:
            uri: by default WF_TRACE_SERVER_URL, else from WANDB_BASE_URL, else W&B's own.
            wandb_run: `ENTITY/PROJECT/RUN` of the W&B run to which the trajectories belong.
            assessments: send rewards as feedback too.

        Raises:
            ConfigError: the uri or the run is malformed.
        """
        self._url = server_url(uri)
        self.uri = str(self._url)
        self._api_url = api_url()
        if wandb_run is not None and len(names(wandb_run)) != 3:
            raise ConfigError("this is no W&B run: give ENTITY/PROJECT/RUN")
        self._run = wandb_run or ""
        self._assessments = assessments
        self._doubt = ""
        """Reason, for errors, why it is not known whether the project exists; else empty."""
        self._runs_held: dict[tuple[str, str], bool] = {}
        self._held: dict[str, _Held] = {}
        """Calls that are there of incomplete trajectories, by the trajectory's id at Weave."""
        self._lock = Lock()
        self._opened = ExitStack()
        self._http: HttpSession
        self._reading: Reading
        self._api: HttpSession

    def check(self) -> None:
        """Find the key, and reach the server."""
        login = ("api", api_key(self._api_url.host))
        self._http = self._session(self.uri, login)
        self._reading = Reading(self._http, self._not_listed)
        self._api = self._session(str(self._api_url), login)
        try:
            self._http.ask(_ServerInfo, "GET", "/server_info")
        except (Refused, TryAgain) as error:
            raise TargetUnavailable(
                f"no Weave server at {self.uri}: {error}; start it, or correct the uri"
            ) from error

    def _session(self, url: str, login: tuple[str, str]) -> HttpSession:
        session = HttpSession(url, self._explain, login=login)
        return self._opened.enter_context(closing(session))

    def place(self, run: Run, container: str | None) -> Place:
        """Find or make the project, and see that the key may use it."""
        entity, name = self._project(run, container)
        if self.uri == PUBLIC_URL or os.environ.get("WANDB_BASE_URL"):
            try:
                name = existing_project(self._api, entity, name)
            except (Refused, TryAgain) as error:
                # The project may exist all the same. Errors mention this if calls are refused.
                self._doubt = f" ({self._api_url} could not be asked for the project: {error})"
        place = self._place(entity, name)
        self.is_empty(place)
        return place

    def expected(self, run: Run, container: str | None) -> Place:
        """Return the project's place as given; W&B may spell its name in another way."""
        return self._place(*self._project(run, container))

    def _place(self, entity: str, name: str) -> Place:
        project = f"{entity}/{name}"
        return Place(f"weave:{project}", project, self._run)

    def _project(self, run: Run, container: str | None) -> tuple[str, str]:
        entity = os.environ.get("WANDB_ENTITY", "")
        beside = self._run.rpartition("/")[0] or f"{entity}/{run.project}"
        project = container or beside
        parts = names(project if "/" in project else f"{entity}/{project}")
        if len(parts) != 2:
            raise ConfigError(
                f"no Weave project is called {printable(project)!r}: give --project ENTITY/NAME, "
                "or set WANDB_ENTITY and give a name without any of  / \\ # ? % :"
            )
        if self._run and names(self._run)[:2] != parts:
            raise ConfigError(
                f"the W&B run {self._run} is in another project: leave --project out, or name "
                f"a run of {project}"
            )
        return parts[0], parts[1]

    def is_empty(self, place: Place) -> bool:
        """Return whether the project has no call at all."""
        return self._reading.is_empty(place)

    def encode(self, trajectory: Trajectory, place: Place, transcript: Transcript) -> Record:
        """Build the calls, with the trajectory's own call last, and the feedback."""
        record = encode(trajectory, place, transcript)
        where = (trajectory, place, record.entry.remote_id)
        return with_feedback(
            record,
            [
                *(of_reward(*where) if self._assessments else ()),
                *of_labels(*where),
            ],
        )

    def recognise(self, place: Place, run_id: str, trace_ids: Sequence[str]) -> dict[str, Entry]:
        """Ask for trajectories by the trace id that localtrace wrote on them.

        Their ids at Weave differ where the project was renamed.
        """
        if not self._holds(place, run_id):
            return {}
        found: dict[str, Entry] = {}
        usual, asked = set(), set(trace_ids)
        for root in self._reading.roots_of(place, trace_ids):
            facts = root.facts
            if facts.trace_id not in asked:
                continue
            if root.id == root_id(place.destination, facts.trace_id):
                usual.add(facts.trace_id)
                continue
            is_known = root_id(facts.ids_from, facts.trace_id) == root.id
            there = msgspec.structs.replace(place, ids_from=facts.ids_from) if is_known else None
            there = there or msgspec.structs.replace(place, destination="")
            count = 1 + facts.span_count
            entry = Entry(there, facts.trace_id, root.id, facts.digest, count)
            found.setdefault(facts.trace_id, entry)
        return {trace_id: entry for trace_id, entry in found.items() if trace_id not in usual}

    def _holds(self, place: Place, run_id: str) -> bool:
        """Return whether the project held any trajectory of the run when first asked."""
        key = (place.experiment, run_id)
        if key not in self._runs_held:
            self._runs_held[key] = self._reading.holds_run(place, run_id)
        return self._runs_held[key]

    def find(self, entries: Sequence[Entry]) -> dict[str, bool]:
        """Ask for the trajectories' calls by id, and compare the digests on their roots."""
        found: dict[str, bool] = {}
        for part in askable(entries):
            calls = self._reading.ids(part)
            roots = self._reading.roots([e for e in part if e.remote_id in calls[e.remote_id]])
            feedback = feedback_there(self._http, [e for e in part if e.remote_id in roots])
            for entry in part:
                held = _Held(calls[entry.remote_id])
                root = roots.get(entry.remote_id)
                if root is not None and root.facts.digest != digest_of_calls(entry):
                    found[entry.trace_id] = False
                    held.digests = set(split_digests(root.facts.call_digests))
                elif (
                    root is not None
                    and len(held.ids) >= entry.span_count
                    and is_whole(entry, feedback)
                ):
                    found[entry.trace_id] = True
                self._remember(entry, held)
        return found

    def _remember(self, entry: Entry, held: _Held) -> None:
        with self._lock:
            self._held.pop(entry.remote_id, None)
            if held.ids:
                self._held[entry.remote_id] = held

    def send(self, records: Sequence[Record]) -> dict[str, int]:
        """Send the calls that are not known to be there, in as many requests as needed."""
        entity, _, name = records[0].entry.place.experiment.partition("/")
        path = f"/v2/{quote(entity)}/{quote(name)}/calls/complete"
        sent_bytes = dict.fromkeys((record.entry.trace_id for record in records), 0)
        missing = list(self._missing(records))
        for request in in_batches(missing, _size, CALLS_MAX, REQUEST_MAX_BYTES):
            body = b'{"batch":[' + b",".join(part for *_, part in request) + b"]}"
            try:
                self._http.call("POST", path, content=body, headers=JSON)
            except Refused as error:
                if error.status == 404:
                    raise UploadError(
                        f"{self.uri} takes no calls for {entity}/{name}: {error}; make the "
                        f"project, or upgrade the server{self._doubt}"
                    ) from error
                if error.status == 413:
                    self._ask_again(records)
                raise
            with self._lock:
                for entry, key, part in request:
                    sent_bytes[entry.trace_id] += len(part)
                    self._held.setdefault(entry.remote_id, _Held()).add(key)
        send_missing(self._http, records)
        for record in records:
            self._remember(record.entry, _Held())
        return sent_bytes

    def _missing(self, records: Sequence[Record]) -> Iterator[_Call]:
        for record in records:
            with self._lock:
                held = self._held.get(record.entry.remote_id, _Held())
            for key, part in zip(record.keys, record.parts, strict=True):
                if not held.has(key):
                    yield record.entry, key, part

    def _ask_again(self, records: Sequence[Record]) -> None:
        """Find what is there: the service may store the start of a batch that is too large."""
        found = self.find([record.entry for record in records])
        for record in records:
            if found.get(record.entry.trace_id):
                self._remember(record.entry, _Held({key.id for key in record.keys}))

    def verify(self, entries: Sequence[Entry]) -> set[str]:
        """Read back which trajectories are there with the same content."""
        return {trace_id for trace_id, same in self.find(entries).items() if same}

    def close(self) -> None:
        """Close connections."""
        self._opened.close()

    def _not_listed(self, place: Place, refused: Refused) -> UploadError:
        return UploadError(
            f"{self.uri} does not list the calls of {place.experiment}: {refused}; name another "
            f"project with --project{self._doubt}"
        )

    def _explain(self, refused: Refused) -> UploadError | None:
        """Return the error for a refusal that would meet every other request too, or None."""
        if refused.status == 401:
            remedy = (
                "set WANDB_API_KEY to a key of this server, for W&B's own from wandb.ai/authorize"
            )
        elif refused.status == 402:
            remedy = "the plan's quota is used up: raise it, or choose less with --max-bytes"
        elif refused.status == 403:
            remedy = (
                "use a key that may write to this project, name another with --project, "
                "or look whether the plan's quota is used up"
            )
        else:
            return None
        return UploadError(f"{self.uri} refused: {refused}; {remedy}{self._doubt}")


def _size(call: _Call) -> int:
    return len(call[2])
