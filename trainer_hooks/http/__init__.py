"""Recording at the HTTP client, for engines that cannot load a hook: `record(client)`."""

from __future__ import annotations

from localtrace.trainer_hooks.http.hook import record
from localtrace.trainer_hooks.seams import System

_SWITCH = "call localtrace.trainer_hooks.http.record(client)"
HTTPX = System("http", "httpx", ("0.28.1",), _SWITCH)
HTTPX.needs("httpx._client", "Client")
HTTPX.needs("httpx._transports.base", "BaseTransport.handle_request", reads=("request",))
HTTPX.needs("httpx._transports.base", "AsyncBaseTransport.handle_async_request", reads=("request",))
AIOHTTP = System("http", "aiohttp", ("3.14.5",), _SWITCH)
for _event in ("start", "headers_sent", "chunk_sent", "end", "exception"):
    AIOHTTP.needs("aiohttp.tracing", f"TraceConfig.on_request_{_event}")
SYSTEMS = (HTTPX, AIOHTTP)
__all__ = ["record"]
