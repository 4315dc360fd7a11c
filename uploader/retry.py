"""Retries: requests to a target that does not answer are repeated with growing waits."""

from __future__ import annotations

import logging
from threading import Event

from tenacity import RetryCallState, Retrying, retry_if_exception_type
from tenacity.nap import sleep_using_event
from tenacity.wait import wait_random_exponential

from localtrace.uploader.targets.http import Doubtful, TryAgain

WAIT_MAX_S = 15.0
RETRY_AFTER_MAX_S = 300.0
DOUBT_ATTEMPTS = 4
_log = logging.getLogger("localtrace.uploader")
_spread = wait_random_exponential(multiplier=0.5, max=WAIT_MAX_S)


def patiently(patience_s: float, ended: Event | None = None) -> Retrying:
    """Return a caller that repeats a function while it raises `TryAgain`.

    Waits are random and grow, and are at least a server's Retry-After. `Doubtful` is repeated only
    a few times, because a bad record stays bad. The last error is raised in the end.

    Args:
        patience_s: time after which nothing is repeated any more.
        ended: once set, no wait and no repetition follows.
    """

    def stop(state: RetryCallState) -> bool:
        in_doubt = isinstance(_error(state), Doubtful) and state.attempt_number >= DOUBT_ATTEMPTS
        over = ended is not None and ended.is_set()
        return over or in_doubt or (state.seconds_since_start or 0.0) >= patience_s

    return Retrying(
        retry=retry_if_exception_type(TryAgain),
        stop=stop,
        wait=_wait,
        before_sleep=_tell,
        sleep=sleep_using_event(ended or Event()),
        reraise=True,
    )


def _wait(state: RetryCallState) -> float:
    error = _error(state)
    asked_s = error.retry_after_s if isinstance(error, TryAgain) else None
    # A server that asks for no wait, or for a short one again and again, is not hammered.
    return max(_spread(state), min(asked_s or 0.0, RETRY_AFTER_MAX_S))


def _tell(state: RetryCallState) -> None:
    wait_s = state.next_action.sleep if state.next_action else 0.0
    _log.warning("%s; next try in %.1f s", _error(state), wait_s)


def _error(state: RetryCallState) -> BaseException | None:
    return state.outcome.exception() if state.outcome else None
