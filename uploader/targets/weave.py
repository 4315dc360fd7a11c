"""W&B Weave, through its HTTP routes: the only file that knows them.

Finished calls go to `calls/complete`, up to a thousand in one request, which is stored as a whole
or not at all. The service shows a call twice that was sent twice, so what is there is asked for by
id and left out, also where only a part of a trajectory arrived.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from threading import Lock
from typing import Any, TypeVar
from urllib.parse import quote

import httpx

from localtrace.errors import ConfigError, TargetUnavailable, UploadError
from localtrace.types import Run, Trajectory
from localtrace.uploader.targets import Entry, Place, Record
from localtrace.uploader.targets.http import HttpSession, Refused, TryAgain, printable
from localtrace.uploader.targets.wandb import (
    PUBLIC_URL,
    api_key,
    api_url,
    existing_project,
    names,
    server_url,
)
from localtrace.uploader.targets.weave_answers import CallId, Root, ServerInfo, read_lines
from localtrace.uploader.targets.weave_calls import call_id, encode

CALLS_MAX = 1000
REQUEST_MAX_BYTES = 30 * 2**20
"""The service refuses requests above 32 MiB."""
JSON = {"content-type": "application/json"}
IDS_MAX = 1000
"""Of one filter."""
ANSWER_MAX_CALLS = 40_000
"""Each is some 600 bytes of an answer."""
ROOTS_MAX = 100
"""Asked for at once with their attributes, which may be long."""

T = TypeVar("T")


class WeaveTarget:
    """A Weave service: W&B's own, or one beside a W&B server of one's own."""

    kind = "weave"
    batch_max_parts = CALLS_MAX
    batch_max_bytes = REQUEST_MAX_BYTES
    record_max_bytes = 256 * 2**20
    connections = 2
    usual_trajectories_per_s = 100.0
    reads_back = True

    def __init__(self, uri: str | None, *, wandb_run: str | None) -> None:
        """Prepare; nothing is contacted.

        Args:
            uri: by default WF_TRACE_SERVER_URL, else that of WANDB_BASE_URL, else W&B's.
            wandb_run: `ENTITY/PROJECT/RUN`, the W&B run that the trajectories sit on.

        Raises:
            ConfigError: the uri or the run has another form.
        """
        self._url = server_url(uri)
        self.uri = str(self._url)
        self._api_url = api_url()
        if wandb_run is not None and len(names(wandb_run)) != 3:
            raise ConfigError("this is no W&B run: give ENTITY/PROJECT/RUN")
        self._run = wandb_run or ""
        self._doubt = ""
        """Why it is not known whether the project exists."""
        self._newest: dict[str, Any] = {"latest_only": True}
        self._stored: defaultdict[str, set[str]] = defaultdict(set)
        """By trajectory the calls that must not be sent again, while the rest is missing."""
        self._lock = Lock()
        self._opened = ExitStack()
        self._http: HttpSession
        self._api: HttpSession

    def check(self) -> None:
        """Find the key and reach the server."""
        login = httpx.BasicAuth("api", api_key(self._api_url.host))
        self._http = self._session(self.uri, login)
        self._api = self._session(str(self._api_url), login)
        try:
            self._http.ask(ServerInfo, "GET", "/server_info")
        except (Refused, TryAgain) as error:
            raise TargetUnavailable(
                f"no Weave server at {self.uri}: {error}; start it, or correct the uri"
            ) from error

    def _session(self, url: str, login: httpx.BasicAuth) -> HttpSession:
        session = HttpSession(url, self._explain, auth=login)
        return self._opened.enter_context(closing(session))

    def place(self, run: Run, container: str | None) -> Place:
        """Find the project, or make it; see whether the key may use it."""
        entity, name = self._project(run, container)
        if self.uri == PUBLIC_URL or os.environ.get("WANDB_BASE_URL"):
            try:
                name = existing_project(self._api, entity, name)
            except (Refused, TryAgain) as error:
                # It may exist all the same, so this is told only where calls are refused.
                self._doubt = f" ({self._api_url} could not be asked for the project: {error})"
        project = f"{entity}/{name}"
        server = f"{self._url.netloc.decode()}{self._url.path}".rstrip("/")
        place = Place(f"weave:{server}:{project}", project, self._run)
        self.is_empty(place)
        return place

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
        """Whether the project has no call at all."""
        return not self._calls(place, CallId, ["id", "trace_id"], limit=1)

    def encode(self, trajectory: Trajectory, place: Place) -> Record:
        """Build the calls, the trajectory's own last."""
        return encode(trajectory, place)

    def complete(self, entries: Sequence[Entry]) -> set[str]:
        """Ask which trajectories are there: all of their calls, and this content in the root."""
        done: set[str] = set()
        for part in _askable(entries):
            calls = self._ids(part)
            roots = [entry for entry in part if entry.remote_id in calls[entry.remote_id]]
            digests = self._digests(roots)
            for entry in part:
                found = calls[entry.remote_id]
                same = digests.get(entry.remote_id) == entry.digest
                if same and len(found) >= entry.span_count:
                    done.add(entry.trace_id)
                    found = set()
                elif entry.remote_id in digests and not same:
                    found = set()  # older content: all of it is sent anew
                self._remember(entry, found)
        return done

    def _remember(self, entry: Entry, calls: set[str]) -> None:
        with self._lock:
            self._stored.pop(entry.remote_id, None)
            if calls:
                self._stored[entry.remote_id] = calls

    def _ids(self, entries: Sequence[Entry]) -> defaultdict[str, set[str]]:
        """The ids of the calls that are there, by trajectory."""
        traces = {"trace_ids": [entry.remote_id for entry in entries]}
        found: defaultdict[str, set[str]] = defaultdict(set)
        for call in self._calls(entries[0].place, CallId, ["id", "trace_id"], filter=traces):
            found[call.trace_id].add(call.id)
        return found

    def _digests(self, entries: Sequence[Entry]) -> dict[str, str]:
        digests: dict[str, str] = {}
        for start in range(0, len(entries), ROOTS_MAX):
            part = entries[start : start + ROOTS_MAX]
            roots = {"call_ids": [entry.remote_id for entry in part]}
            answer = self._calls(part[0].place, Root, ["id", "attributes"], filter=roots)
            digests |= {root.id: root.attributes.localtrace.digest for root in answer}
        return digests

    def _calls(self, place: Place, kind: type[T], columns: list[str], **query: Any) -> list[T]:
        query |= {"project_id": place.experiment, "columns": columns}
        try:
            body = self._query(query)
        except Refused as error:
            # No fault of the records that are asked for, so none of them is given up.
            raise UploadError(
                f"{self.uri} does not list the calls of {place.experiment}: {error}; name "
                f"another project with --project{self._doubt}"
            ) from error
        return read_lines(body, kind)

    def _query(self, query: dict[str, Any]) -> bytes:
        newest = self._newest
        try:
            return self._http.call("POST", "/calls/stream_query", json={**query, **newest})
        except Refused as error:
            if error.status != 422 or not newest:
                raise
        self._newest = {}  # an older server; it may show calls twice, which does no harm here
        return self._query(query)

    def send(self, records: Sequence[Record]) -> None:
        """Send the calls that are not known to be there, in as many requests as they need."""
        entity, _, name = records[0].entry.place.experiment.partition("/")
        path = f"/v2/{quote(entity)}/{quote(name)}/calls/complete"
        for request in _requests(list(self._missing(records))):
            body = b'{"batch":[' + b",".join(part for _, part in request) + b"]}"
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
                for entry, part in request:
                    self._stored[entry.remote_id].add(call_id(part))
        for record in records:
            self._remember(record.entry, set())

    def _missing(self, records: Sequence[Record]) -> Iterator[tuple[Entry, bytes]]:
        for record in records:
            with self._lock:
                stored = frozenset(self._stored.get(record.entry.remote_id, ()))
            for part in record.parts:
                if call_id(part) not in stored:
                    yield record.entry, part

    def _ask_again(self, records: Sequence[Record]) -> None:
        """Note what is there: the service may store the start of a batch that is too large."""
        done = self.complete([record.entry for record in records])
        for record in records:
            if record.entry.trace_id in done:
                self._remember(record.entry, set(map(call_id, record.parts)))

    def verify(self, entries: Sequence[Entry]) -> set[str]:
        """Read back which trajectories are there with their content."""
        return self.complete(entries)

    def close(self) -> None:
        """Close connections."""
        self._opened.close()

    def _explain(self, refused: Refused) -> UploadError | None:
        """What a refusal means that every other request would get too."""
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


def _askable(entries: Sequence[Entry]) -> Iterator[Sequence[Entry]]:
    """Entries that one answer can hold."""
    part: list[Entry] = []
    count = 0
    for entry in entries:
        if part and (len(part) == IDS_MAX or count + entry.span_count > ANSWER_MAX_CALLS):
            yield part
            part, count = [], 0
        part.append(entry)
        count += entry.span_count
    if part:
        yield part


def _requests(parts: Iterable[tuple[Entry, bytes]]) -> Iterator[list[tuple[Entry, bytes]]]:
    """Calls that one request can hold, in their order."""
    request: list[tuple[Entry, bytes]] = []
    size_bytes = 0
    for entry, part in parts:
        if request and (len(request) == CALLS_MAX or size_bytes + len(part) > REQUEST_MAX_BYTES):
            yield request
            request, size_bytes = [], 0
        request.append((entry, part))
        size_bytes += len(part)
    if request:
        yield request
