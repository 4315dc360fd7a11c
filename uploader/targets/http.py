"""Requests over HTTP, with three kinds of failure that every target tells apart.

`TryAgain`: the answer is unknown or says "later". `Refused`: the server understood and said no.
`UploadError`: the answer makes no sense. This module knows no routes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import httpx
import msgspec

from localtrace.errors import ConfigError, TargetRejected, TargetUnavailable, UploadError
from localtrace.terminal import escape_line

CONNECT_TIMEOUT_S = 5.0
ANSWER_TIMEOUT_S = 120.0
ANSWER_MAX_BYTES = 64 * 2**20
_LATER = frozenset({408, 425, 429, 500, 502, 503, 504})
_MESSAGE_MAX_CHARS = 300

T = TypeVar("T")


class TryAgain(TargetUnavailable):
    """The request may or may not have been carried out; asking again may help."""

    status: int = 0
    """The HTTP status; 0 where no answer came."""
    retry_after_s: float | None = None
    """How long the server asked to wait."""


class Doubtful(TryAgain):
    """The server failed while it stored records: its own trouble, or something in them."""


class Refused(TargetRejected):
    """The server refused the request and did nothing."""

    status: int = 0


class HttpSession:
    """Connections to one server."""

    def __init__(
        self, base_url: str, explain: Callable[[Refused], UploadError | None], **options: Any
    ) -> None:
        """Prepare the connections; none is opened yet.

        Args:
            explain: gives the error to raise for a refusal that concerns all requests.
            options: more arguments of `httpx.Client`.
        """
        timeout = httpx.Timeout(ANSWER_TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
        self._client = httpx.Client(base_url=base_url, timeout=timeout, **options)
        self._explain = explain

    def call(self, method: str, path: str, **request: Any) -> bytes:
        """Make one request and return the body of a good answer."""
        try:
            with self._client.stream(method, path, **request) as response:
                body = _read(response)
        except httpx.RequestError as error:
            said = printable(f"{type(error).__name__}: {error}")
            raise TryAgain(f"no answer ({said})") from error
        if response.is_success:
            return body
        failure = _failure(response, body)
        explained = self._explain(failure) if isinstance(failure, Refused) else None
        raise explained or failure

    def ask(self, answer: type[T], method: str, path: str, **request: Any) -> T:
        """Make one request and read the JSON answer as a value of this type."""
        body = self.call(method, path, **request)
        try:
            return msgspec.json.decode(body, type=answer)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise UploadError(
                f"{path} did not answer as expected ({error}): check that the uri is right"
            ) from error

    def close(self) -> None:
        """Close all connections."""
        self._client.close()


def http_url(uri: str, what: str) -> httpx.URL:
    """Parse the address of a server.

    Args:
        what: what it should be, and how it looks, for the error.

    Raises:
        ConfigError: it is no http(s) uri; it is not repeated, since it may hold a password.
    """
    try:
        url = httpx.URL(uri)
    except httpx.InvalidURL:
        url = httpx.URL()
    if url.scheme not in ("http", "https") or not url.host:
        raise ConfigError(f"this is no {what}")
    return url


def without_login(url: httpx.URL) -> httpx.URL:
    """An address that can be shown: without user, password, query and fragment."""
    return url.copy_with(userinfo=b"", query=None, fragment=None)


def printable(text: str) -> str:
    """A server's words, safe to show: short, on one line, without control characters."""
    return escape_line(" ".join(text[:_MESSAGE_MAX_CHARS].split()))


def _read(response: httpx.Response) -> bytes:
    body = bytearray()
    for chunk in response.iter_bytes():
        body += chunk
        if len(body) > ANSWER_MAX_BYTES:
            raise UploadError(f"{response.url.path} answered more than {ANSWER_MAX_BYTES} bytes")
    return bytes(body)


def _failure(response: httpx.Response, body: bytes) -> TryAgain | Refused:
    said = f"HTTP {response.status_code}: {printable(_message(body))}"
    failure = TryAgain(said) if response.status_code in _LATER else Refused(said)
    failure.status = response.status_code
    if isinstance(failure, TryAgain):
        seconds = response.headers.get("retry-after", "")
        failure.retry_after_s = float(seconds) if seconds.isdecimal() else None
    return failure


def _message(body: bytes) -> str:
    """The words of an error answer: the usual JSON fields, or the text itself."""
    try:
        answer = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return body.decode("utf-8", "replace")
    if isinstance(answer, dict):
        return str(answer.get("message") or answer.get("detail") or answer.get("reason") or answer)
    return str(answer)
