"""The generations in a call's result, whatever form the result has.

A result is a map of one generation, a message, the answer of an OpenAI-compatible server (raw, or
as the body of an HTTP response), a list of such, or a map of lists. Here each generation becomes
one map with the names of `field_names`. Values stay encoded, so long lists are not decoded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from localtrace.field_names import (
    DETAIL_NAMES,
    FINISH_NAMES,
    LOGPROB_NAMES,
    MASK_NAMES,
    OUTPUT_NAMES,
    OUTPUT_TEXT_NAMES,
    REASONING_NAMES,
)
from localtrace.store.journal.choices import of_openai, of_sglang
from localtrace.values import codec
from localtrace.values.encoded import (
    first_named,
    is_list,
    is_list_of_lists,
    is_list_of_texts,
    listed_elements,
    raw_items,
    raw_map,
)
from localtrace.values.token_lists import TokenList, read_ids, read_logprobs, read_mask

Fields = dict[str, msgspec.Raw]
"""Arguments or a result by name, still encoded."""
GENERATIONS_MAX = 65_536
"""Most generations of one call; a larger list is taken for something else."""
_EMPTY = b"\x90"
_BESIDE_IDS = frozenset({*LOGPROB_NAMES, *MASK_NAMES})


@dataclass(frozen=True, slots=True)
class Message:
    """The generated text, reasoning and tool calls."""

    text: str | None
    """None where the result has none."""
    reasoning: str | None
    tool_calls: list[Any]
    """In the form of OpenAI's; empty where there are none."""

    @property
    def is_empty(self) -> bool:
        """True where nothing is known of it."""
        return self.text is None and self.reasoning is None and not self.tool_calls

    def parts(self) -> dict[str, Any] | None:
        """Return the content of the column `output_message`; None where there is only text."""
        if not self.tool_calls and self.reasoning is None:
            return None
        return {
            "role": "assistant",
            "content": self.text,
            "reasoning": self.reasoning,
            "tool_calls": self.tool_calls or None,
        }


class TokenLists(NamedTuple):
    """The lists of a generation that have one number per generated id."""

    ids: TokenList | None = None
    """None where the result lists none that can be used; then the others are None, too."""
    logprobs: TokenList | None = None
    """None also where they are not as many as the ids; likewise the mask."""
    mask: TokenList | None = None
    unusable: int = 0
    """Lists that were recorded and cannot be used."""

    @property
    def generated(self) -> int | None:
        """Ids that the model generated, without those that a mask excludes; None: no ids."""
        if self.ids is None:
            return None
        excluded = 0 if self.mask is None else self.mask.values.count(0)
        return len(self.ids.values) - excluded


def results(outputs: bytes | msgspec.Raw) -> list[Fields]:
    """Return the fields of each generation that a result may hold, in order.

    An item that is no generation gets empty fields, so that the others keep their places.
    """
    fields = raw_map(outputs)
    if fields is not None:
        return of_map(fields)
    items = raw_items(outputs)
    if not items or len(items) > GENERATIONS_MAX:
        return []
    maps = [raw_map(item) for item in items]
    found: list[list[Fields]] = [[{}] if one is None else of_map(one) for one in maps]
    return [one for several in found for one in several]


def of_map(fields: Fields) -> list[Fields]:
    """Return the fields of each generation that a map may hold; a single one is the map itself."""
    if "status_code" in fields and "body" in fields:  # an HTTP response
        fields = raw_map(fields["body"]) or {}
    for name in ("choices", "outputs"):
        items = raw_items(fields[name]) if name in fields else None
        if items and len(items) <= GENERATIONS_MAX and raw_map(items[0]) is not None:
            found = _choices(fields) if name == "choices" else [raw_map(i) or {} for i in items]
            return found or [fields]
    return _side_by_side(fields) or [fields]


def with_details(fields: Fields) -> Fields:
    """Return the fields of a result, with those that engines and trainers put one level deeper."""
    found: Fields = {}
    for name in DETAIL_NAMES:
        if name in fields:
            found |= raw_map(fields[name]) or {}
    return found | fields


def named_value(fields: Fields, names: tuple[str, ...]) -> Any:
    """Return the first of `names` that is a field, decoded; None where none is."""
    name = first_named(fields, names)
    return None if name is None else codec.decode(fields[name])


def named_text(fields: Fields, names: tuple[str, ...]) -> str | None:
    """Return the first field of `names` that is a text; None where none is."""
    values = (codec.decode(fields[name]) for name in names if name in fields)
    return next((value for value in values if isinstance(value, str)), None)


def finish_reason(fields: Fields) -> Any:
    """Return why a generation stopped; None where its result does not say so."""
    return named_value(with_details(fields), FINISH_NAMES)


def has_ids(fields: Fields | None) -> bool:
    """Tell whether a result lists the generated ids, even if there are none."""
    name = first_named(fields, OUTPUT_NAMES)
    if fields is None or name is None:
        return False
    return is_list(fields[name]) and not is_list_of_lists(fields[name])


def output_elements(fields: Fields | None) -> tuple[int, bytes] | None:
    """Return count and bytes of the generated ids of a result; None where it lists none."""
    name = first_named(fields, OUTPUT_NAMES)
    if fields is None or name is None or is_list_of_lists(fields[name]):
        return None
    return listed_elements(fields[name])


def token_lists(fields: Fields) -> TokenLists:
    """Return the per-token lists of a generation, each in the one form that columns have.

    A list that holds anything else, or that is not as long as the ids, is left out and counted.
    """
    name = first_named(fields, OUTPUT_NAMES)
    if name is None:
        return TokenLists()
    ids = read_ids(fields[name])
    if ids is None:
        return TokenLists(unusable=_is_unusable(fields[name]))
    size, unusable = len(ids.values), 0
    found: list[TokenList | None] = []
    for names in (LOGPROB_NAMES, MASK_NAMES):
        name = first_named(fields, names)
        one = None
        if name is not None:
            own = fields[name]
            one = read_logprobs(own, ids.values) if names is LOGPROB_NAMES else read_mask(own)
            if one is None or len(one.values) != size:
                one, unusable = None, unusable + _is_unusable(own)
        found.append(one)
    logprobs = found[0] or _engine_logprobs(fields, size)
    return TokenLists(ids, logprobs, found[1], unusable)


def _is_unusable(value: msgspec.Raw) -> bool:
    """Tell whether a value that gives no list is a list, or holds lists, all the same."""
    if is_list(value):
        return memoryview(value) != _EMPTY
    return any(map(is_list, (raw_map(value) or {}).values()))


def _engine_logprobs(fields: Fields, size: int) -> TokenList | None:
    """Return one log-probability per id, where SGLang's `meta_info` alone has them; else None."""
    details = raw_map(fields["meta_info"]) if "meta_info" in fields else None
    if not details or "output_token_logprobs" not in details:
        return None
    known = of_sglang({"meta_info": codec.decode(fields["meta_info"])}).outputs
    logprobs = read_logprobs(codec.encode(known.get("output_logprobs")), ())
    return logprobs if logprobs is not None and len(logprobs.values) == size else None


def message_of(fields: Fields) -> Message:
    """Return text, reasoning and tool calls of one generation's result."""
    own = _values(fields, (*REASONING_NAMES, "tool_calls", "function_call", "content"))
    inner = codec.decode(fields["message"]) if "message" in fields else None
    parts = [own, inner] if isinstance(inner, dict) else [own]
    text = named_text(fields, OUTPUT_TEXT_NAMES)
    texts = (_text(part.get("content")) for part in parts)
    return Message(
        next((one for one in texts if one is not None), None) if text is None else text,
        next(filter(None, map(_reasoning, parts)), None),
        next(filter(None, map(_tool_calls, parts)), []),
    )


# -- forms of results ---------------------------------------------------------------------------


def _choices(fields: Fields) -> list[Fields]:
    """Return the choices of an OpenAI-compatible answer; none if these are pieces of a stream."""
    answer = {name: codec.decode(value) for name, value in fields.items()}
    choices = answer.pop("choices")
    if not all(isinstance(choice, dict) and "delta" not in choice for choice in choices):
        return []
    found = (
        of_openai(choice, answer, index, is_first=False).outputs
        for index, choice in enumerate(choices)
    )
    return [raw_map(codec.encode(one)) or {} for one in found]


def _side_by_side(fields: Fields) -> list[Fields]:
    """Turn a map of lists into a list of maps; return none where it is not such a map."""
    listed = next(
        (
            raw_items(fields[name])
            for name in (*OUTPUT_NAMES, *OUTPUT_TEXT_NAMES)
            if name in fields and _holds_one_each(name, fields[name])
        ),
        None,
    )
    if not listed or len(listed) > GENERATIONS_MAX:
        return []
    found: list[Fields] = [{} for _ in listed]
    for name, value in fields.items():
        items = raw_items(value)
        # The only generation may have its log-probabilities and mask without a list around them.
        is_whole = len(listed) == 1 and name in _BESIDE_IDS and not is_list_of_lists(value)
        if items is None or len(items) != len(listed) or is_whole:
            items = [value] * len(listed)
        for one, item in zip(found, items, strict=True):
            one[name] = item
    return found


def _holds_one_each(name: str, value: msgspec.Raw) -> bool:
    if name in OUTPUT_NAMES:
        return is_list_of_lists(value)
    return is_list_of_texts(value)


# -- parts of messages --------------------------------------------------------------------------


def _values(fields: Fields, names: Iterable[str]) -> dict[str, Any]:
    return {name: codec.decode(fields[name]) for name in names if name in fields}


def _blocks(content: Any, *kinds: str) -> list[Mapping[str, Any]]:
    """Return the blocks of a content that have one of these types."""
    blocks = content if isinstance(content, list) else ()
    return [one for one in blocks if isinstance(one, dict) and one.get("type") in kinds]


def _text(content: Any) -> str | None:
    if isinstance(content, str):
        return content
    texts = [block.get("text") for block in _blocks(content, "text", "output_text")]
    found = [text for text in texts if isinstance(text, str)]
    return "".join(found) if found else None


def _reasoning(message: Mapping[str, Any]) -> str | None:
    blocks = _blocks(message.get("content"), "thinking", "reasoning")
    values = [message.get(name) for name in REASONING_NAMES]
    values += [block.get(name) for block in blocks for name in ("thinking", "text", "reasoning")]
    return "\n".join(value for value in values if isinstance(value, str) and value) or None


def _tool_calls(message: Mapping[str, Any]) -> list[Any]:
    calls = message.get("tool_calls")
    if isinstance(calls, list) and calls:
        return calls
    if isinstance(message.get("function_call"), dict):  # OpenAI's older form
        return [{"type": "function", "function": message["function_call"]}]
    return [
        {
            "id": block.get("id"),
            "type": "function",
            "function": {
                "name": block.get("name"),
                "arguments": codec.to_json(block.get("input")),
            },
        }
        for block in _blocks(message.get("content"), "tool_use")
    ]
