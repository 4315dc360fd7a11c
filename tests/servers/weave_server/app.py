"""The HTTP routes of the trace server, of the W&B API beside it, and those of the tests."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated, Any, get_type_hints

from fastapi import FastAPI, Form, HTTPException, Request, Response, UploadFile
from fastapi.concurrency import run_in_threadpool
from pydantic import BaseModel
from starlette.responses import JSONResponse
from weave.shared.errors import get_registered_error_classes, handle_server_exception
from weave.trace_server import trace_server_interface as tsi

from .gate import Fault, Gate
from .store import Ids, StrictTraceServer, TraceServer

ROUTES = {
    "/call/read": "call_read",
    "/calls/query_stats": "calls_query_stats",
    "/calls/delete": "calls_delete",
    "/feedback/create": "feedback_create",
    "/feedback/purge": "feedback_purge",
    "/feedback/query": "feedback_query",
    "/feedback/replace": "feedback_replace",
    "/obj/create": "obj_create",
    "/obj/read": "obj_read",
    "/refs/read_batch": "refs_read_batch",
    "/table/create": "table_create",
    "/v2/{entity}/{project}/call/start": "call_start_v2",
    "/v2/{entity}/{project}/call/end": "call_end_v2",
}
"""Paths whose body and answer are those of a method."""
USERNAME = "tester"
ENTITY = "team"


class Switches(BaseModel):
    """The settings that tests may change; None leaves one as it is."""

    forbidden: list[str] | None = None
    """Projects that the key may not use."""
    shows_duplicates: bool | None = None


class GraphQL(BaseModel):
    """A request to the W&B API."""

    query: str
    variables: dict[str, Any] | None = None


class WeaveApp:
    """The application; `gate` is what uvicorn serves."""

    def __init__(self, key: str, folder: str | None = None) -> None:
        """Set up the routes.

        Args:
            key: the API key that the server takes.
            folder: where ClickHouse keeps its tables; by default everything is in memory.
        """
        self._store: Any
        if folder is None:
            self._store = StrictTraceServer()
            self._store.setup_tables()
        else:
            from .clickhouse import EmbeddedClickHouse

            self._store = EmbeddedClickHouse(folder)
        self._ids = Ids()
        self._server = TraceServer(self._store, self._ids)
        self._accepted: dict[str, list[tuple[str, str]]] = {}
        self._projects: set[str] = set()
        self.routes = app = FastAPI()
        for error in get_registered_error_classes():
            app.exception_handler(error)(_explained)
        self.gate = Gate(app, key)
        for path, method in ROUTES.items():
            app.post(path)(_endpoint(getattr(self._server, method)))
        app.post("/v2/{entity}/{project}/calls/complete")(self._calls_complete)
        app.post("/calls/stream_query")(self._stream_query)
        app.post("/file/create")(self._file_create)
        app.post("/graphql")(self._graphql)
        app.get("/server_info")(_server_info)
        app.get("/health")(lambda: {"status": "ok"})
        app.get("/test/log")(lambda: self.gate.requests)
        app.get("/test/accepted")(self._accepted_calls)
        app.post("/test/fault")(self._fault)
        app.post("/test/sql")(lambda sql: self._store.rows(sql))
        app.post("/test/switches")(self._switch)

    async def _calls_complete(
        self, entity: str, project: str, req: tsi.CallsUpsertCompleteReq, request: Request
    ) -> Response:
        place = f"{entity}/{project}"
        if any(call.project_id != place for call in req.batch):
            raise HTTPException(400, "a call names another project than the path")
        body, sent = await request.body(), (await request.json())["batch"]
        if rb"\ud" in body.lower() and not _is_unicode(sent):
            raise HTTPException(400, "half of a surrogate pair: the call could not be read back")
        await run_in_threadpool(self._server.calls_complete, req, with_references=b"weave" in body)
        self._projects.add(place)
        self._accepted.setdefault(place, []).extend(
            (call["id"], call["started_at"]) for call in sent
        )
        return Response("{}", media_type="application/json")

    def _stream_query(self, req: tsi.CallsQueryReq) -> Response:
        lines = [f"{call.model_dump_json()}\n" for call in self._server.calls_query_stream(req)]
        return Response("".join(lines), media_type="application/jsonl")

    def _file_create(self, project_id: Annotated[str, Form()], file: UploadFile) -> Response:
        content = file.file.read()
        request = tsi.FileCreateReq(
            project_id=project_id, name=file.filename or "", content=content
        )
        return _json(self._server.file_create(request))

    def _graphql(self, request: GraphQL) -> dict[str, Any]:
        named = request.variables or {}
        entity = named.get("entityName") or named.get("entity") or ENTITY
        project = f"{entity}/{named.get('name')}"
        if "upsertModel" in request.query:
            if project in self._ids.forbidden:
                return {"data": None, "errors": [{"message": "permission denied"}]}
            self._projects.add(project)
            model = {"name": named.get("name"), "description": None}
            return {"data": {"upsertModel": {"model": model}}}
        if "project(" in request.query:
            known = project in self._projects - self._ids.forbidden
            return {"data": {"project": {"name": named.get("name")} if known else None}}
        viewer = {"username": USERNAME, "defaultEntity": {"name": ENTITY}}
        return {"data": {"viewer": viewer, "serverInfo": {"frontendHost": None}}}

    def _accepted_calls(self, project: str) -> list[tuple[str, str]]:
        return self._accepted.get(project, [])

    async def _fault(self, fault: Fault | None = None) -> None:
        self.gate.set_fault(fault)

    def _switch(self, switches: Switches) -> None:
        if switches.forbidden is not None:
            self._ids.forbidden = set(switches.forbidden)
        if switches.shows_duplicates is not None:
            self._store.shows_duplicates = switches.shows_duplicates


def _endpoint(method: Callable[[Any], BaseModel]) -> Callable[..., Response]:
    def call(req: Any) -> Response:
        return _json(method(req))

    call.__annotations__["req"] = get_type_hints(method)["req"]
    return call


def _is_unicode(value: Any) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _json(answer: BaseModel) -> Response:
    return Response(answer.model_dump_json(), media_type="application/json")


def _server_info() -> dict[str, str]:
    return {"min_required_weave_python_version": "0.50.0", "trace_server_version": "0.53.12"}


def _explained(request: Request, error: Exception) -> Response:
    answer = handle_server_exception(error)
    return JSONResponse(answer.message, answer.status_code)
