"""The messages of exceptions."""

from __future__ import annotations

from types import WrapperDescriptorType
from typing import Any

from localtrace.values.kinds import declared
from localtrace.values.placeholder import type_name
from localtrace.values.plain import Budget, TooLarge, is_plain

_ARGUMENTS_MAX_BYTES = 2**20
_ARGUMENTS_STEPS = 500
_arguments: Any = BaseException.__dict__["args"].__get__


def message_of(error: BaseException) -> str:
    """Return the text of an exception.

    A class of exceptions that writes its own text is asked for it, as every traceback does: this
    alone is code of a value that runs while it is recorded. Other objects are named by their types.

    Raises:
        ValueError: it has no text.
    """
    arguments = _arguments(error)
    if type(declared(type(error), "__str__")) is WrapperDescriptorType and not _is_small(arguments):
        return ", ".join(map(_text_of, arguments))
    try:
        return str.__str__(str(error))
    except BaseException:  # whatever it raises, KeyboardInterrupt too, is not the caller's
        raise ValueError("no text") from None


def _is_small(arguments: Any) -> bool:
    budget = Budget(_ARGUMENTS_MAX_BYTES)
    budget.steps = _ARGUMENTS_STEPS
    try:
        return is_plain(arguments, budget)
    except TooLarge:
        return False


def _text_of(argument: Any) -> str:
    return str(argument) if _is_small(argument) else f"<{type_name(argument)}>"
