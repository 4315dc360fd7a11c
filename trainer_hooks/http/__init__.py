"""Recording at the HTTP client, for engines that cannot load a hook: `record(client)`."""

from __future__ import annotations

from localtrace.trainer_hooks.http.hook import AIOHTTP, HTTPX, record

__all__ = ["record"]
SYSTEMS = (HTTPX, AIOHTTP)
