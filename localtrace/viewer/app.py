"""The pages as one application: routes, answers in HTML and JSON, errors."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import threading
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from anyio import CapacityLimiter, to_thread
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

from localtrace.errors import LocalTraceError, NotFound, NothingRecorded
from localtrace.viewer.labelling import PATH, label_route, who_labels
from localtrace.viewer.page import Page, told
from localtrace.viewer.page_request import PageRequest
from localtrace.viewer.pages import PAGES
from localtrace.viewer.rendering import HERE, as_json, render
from localtrace.viewer.shared_store import SharedStore

if TYPE_CHECKING:
    from localtrace.read.store import Store

_log = logging.getLogger("localtrace.viewer")
_AT_ONCE = 2
"""Requests to the same page that are answered side by side; no page waits for another."""


def make_app(shared: SharedStore) -> Starlette:
    """Return the pages of a store, without the guard."""
    routes: list[BaseRoute] = [
        Mount("/static", StaticFiles(directory=HERE / "static")),
        Route("/favicon.ico", lambda _: FileResponse(HERE / "static/icon.svg")),
        label_route(shared, _refused),
    ]
    for page in PAGES:
        places = CapacityLimiter(_AT_ONCE)
        routes += [
            # First the longer address, which the other one's last part would take in.
            Route(
                f"{page.path.rstrip('/') or '/index'}.json", _answering(shared, page, places, True)
            ),
            Route(page.path, _answering(shared, page, places, False)),
        ]
    return Starlette(
        routes=routes,
        exception_handlers={HTTPException: _on_http_error, Exception: _on_failure},
    )


def _answering(
    shared: SharedStore, page: Page, places: CapacityLimiter, is_json: bool
) -> Callable[[Request], Awaitable[Response]]:
    def answer(request: Request, asker: _Asker) -> Response:
        try:
            with shared.reading() as (store, moment):
                asker.waits_for(store)
                page_request = PageRequest(
                    store, request.path_params, request.query_params, moment.kept
                )
                facts = page.read(page_request)
        except (LocalTraceError, OSError) as error:
            return _refused(request, error)
        if "go" in facts and not is_json:
            return Response(status_code=303, headers={"Location": facts["go"]})
        if "file" in facts:
            name = {"Content-Disposition": f'attachment; filename="{facts["file"]["name"]}"'}
            return Response(facts["file"]["data"], 200, name, facts["file"]["media_type"])
        if is_json:
            return Response(as_json(facts), media_type="application/json")
        return _html(request, render(page.template, page=facts, **_around(request, page_request)))

    async def respond(request: Request) -> Response:
        asker = _Asker()
        leaving = asyncio.create_task(asker.leaves(request))
        try:
            return await to_thread.run_sync(answer, request, asker, limiter=places)
        finally:
            leaving.cancel()

    return respond


class _Asker:
    """Whoever asked for a page, and may leave before it is there: then its query is stopped."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._store: Store | None = None
        self._has_left = False

    def waits_for(self, store: Store) -> None:
        """Take note of the store whose queries this request runs."""
        with self._lock:
            self._store = store
            if self._has_left:
                store.stop()

    async def leaves(self, request: Request) -> None:
        """Wait until the browser closes the connection, and stop the query."""
        while (await request.receive())["type"] != "http.disconnect":
            pass
        with self._lock:
            self._has_left = True
            if self._store is not None:
                self._store.stop()


def _around(request: Request, page_request: PageRequest) -> dict[str, object]:
    """Return what the frame of every page needs."""
    path, query = request.url.path, request.url.query
    json_path = f"{'/index' if path == '/' else path}.json" + (f"?{query}" if query else "")
    here = path + (f"?{query}" if query else "")
    return {"q": page_request.values.get("q", "").strip(), "path": path, "here": here,
            "json_path": json_path, "stores": [str(one) for one in page_request.store.paths],
            "values": page_request.values, "who": who_labels(request)}  # fmt: skip


def _html(request: Request, text: str, status: int = 200) -> Response:
    body = text.encode("utf-8", "replace")
    tag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers={"ETag": tag})
    return HTMLResponse(body, status, headers={"ETag": tag})


def _refused(request: Request, error: Exception) -> Response:
    """Return the answer to what cannot be done, as the error says why."""
    if not isinstance(error, LocalTraceError | OSError):
        raise error
    status = 404 if isinstance(error, NothingRecorded | NotFound) else 400
    return _problem(request, told(error), status)


def _problem(request: Request, message: str, status: int) -> Response:
    if request.url.path.endswith(".json"):
        return Response(as_json({"error": message}), status, media_type="application/json")
    around: dict[str, object] = {
        "q": request.query_params.get("q", ""),
        "path": request.url.path,
        "json_path": None,
        "stores": [],
        "values": request.query_params,
    }
    page = {"title": "Problem", "copies": {}}
    text = render("problem.html", message=message, status=status, page=page, **around)
    return _html(request, text, status)


async def _on_http_error(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    message = {404: "There is no such page.", 405: "This page can only be looked at."}
    if request.url.path == PATH and status == 405:
        message[405] = "This address only takes what the viewer's forms send."
    return _problem(request, message.get(status, str(error)), status)


async def _on_failure(request: Request, error: Exception) -> Response:
    _log.error("%s could not be shown", request.url.path, exc_info=error)
    message = "The viewer failed at this page. The terminal where it runs shows the details."
    return _problem(request, message, 500)
