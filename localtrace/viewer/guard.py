"""Access to the viewer: who may ask, and what a browser may do with the answers.

The address that the command prints holds a token. It is exchanged for a cookie that scripts cannot
read and other sites cannot send, and leaves the address. The name in the Host header is checked,
because a page of another site can point a name of its own at this machine. Such a page cannot do
so with a number, which is therefore always allowed.
"""

from __future__ import annotations

import ipaddress
import secrets
from collections.abc import Collection
from html import escape
from urllib.parse import urlsplit

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
_ENTERED = """<!doctype html><html lang="en"><meta charset="utf-8"><title>localtrace</title>
<meta http-equiv="refresh" content="0;url={path}"><p><a href="{path}">Open the viewer</a></p></html>
"""
TOKEN = "token"


class Guard:
    """A layer around the pages that lets in whoever holds the token.

    Args:
        app: the pages.
        token: the secret in the printed address.
        port: a part of the cookie's name, as cookies of all ports of a host are sent together.
        names: host names by which the viewer is reached, besides numbers and `localhost`.
    """

    def __init__(self, app: ASGIApp, token: str, port: int, names: Collection[str] = ()) -> None:
        self._app = app
        self._token = token
        self._session = secrets.token_urlsafe(32)
        self._cookie = f"localtrace_{port}"
        self._names = {"localhost", *(name.lower() for name in names)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or pass it on to the pages."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers[name] = value
                # Without a referrer, a browser does not say either where a form comes from.
                headers["Referrer-Policy"] = "same-origin" if answer is None else "no-referrer"
                headers.setdefault("Cache-Control", "no-store")
            await send(message)

        answer = self._refusal(Request(scope))
        await (answer or self._app)(scope, receive, send_guarded)

    def _refusal(self, request: Request) -> Response | None:
        """Return the answer to whoever may not see the pages, or who just showed the token."""
        if not self._is_known(request.headers.get("host", "")):
            return PlainTextResponse(
                "The viewer does not answer to this name: use the printed address.\n", 421
            )
        token = request.query_params.get(TOKEN)
        if token is not None and request.method == "GET":
            if not _same(token, self._token):
                return _locked(
                    "This token is not valid: the viewer makes a new one whenever it starts."
                )
            return self._entered(request)
        if not _same(request.cookies.get(self._cookie, ""), self._session):
            return _locked("The viewer shows its pages only to the browser that has its token.")
        if request.method not in ("GET", "HEAD") and not _is_from_itself(request):
            return _locked("Only the viewer's own pages may write.")
        return None

    def _is_known(self, host: str) -> bool:
        try:
            name = urlsplit(f"//{host}").hostname or ""
            return name in self._names or bool(ipaddress.ip_address(name))
        except ValueError:
            return False

    def _entered(self, request: Request) -> Response:
        # Not a redirect: after a link on another site, it would be followed without the cookie.
        url = request.url.remove_query_params(TOKEN)
        # One slash at the front, as two would name another host.
        path = "/" + url.path.lstrip("/") + (f"?{url.query}" if url.query else "")
        answer = HTMLResponse(_ENTERED.format(path=escape(path)))
        answer.set_cookie(self._cookie, self._session, path="/", httponly=True, samesite="strict")
        return answer


def _is_from_itself(request: Request) -> bool:
    """Tell whether a page of the viewer sent this, and not one of another port of this machine.

    Cookies are the same for all ports, so the browser must say where the request comes from.
    """
    site = request.headers.get("sec-fetch-site")
    if site is not None:
        return site == "same-origin"
    return urlsplit(request.headers.get("origin", "")).netloc == request.headers.get("host")


def _locked(why: str) -> Response:
    return PlainTextResponse(f"{why} Open the address that localtrace view printed.\n", 403)


def _same(secret: str, known: str) -> bool:
    return secrets.compare_digest(secret.encode("utf-8", "replace"), known.encode())
