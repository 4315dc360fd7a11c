"""Prompts and message lists stored as what each turn adds.

`DeltaWriter` works in the writer thread on encoded bytes: it never decodes a list that simply goes
on from an earlier one. `DeltaReader` puts whole lists back together from the records of one
journal. A base is always in the same journal and was written before the turn that names it. After
sixteen links a list is whole again, unless it is far longer than what the links added: so all lists
of a trajectory together take a few times the room of what its turns added, however many they are.

Each crc32 is that of a list's elements, which are its MessagePack bytes without the header.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from dataclasses import dataclass
from itertools import accumulate

import msgspec

from localtrace.field_names import MESSAGE_NAMES, PROMPT_NAMES
from localtrace.store.journal.checksum import crc32
from localtrace.store.journal.records import Call, Delta, Kind, TurnCall
from localtrace.store.journal.results import Fields, output_elements
from localtrace.store.journal.turns import TurnTotals
from localtrace.values.arrays import Bytes
from localtrace.values.encoded import (
    first_named,
    is_list_of_lists,
    list_bytes,
    list_elements,
    raw_map,
)

CHAIN_MAX = 16
"""A chain of turns, from its whole prompt on, has at most this many links, if they add enough."""
WHOLE_PER_ADDED = 4
"""A whole list that ends a chain is at most this many times as long as what its links added."""
_BASES_PER_TRAJECTORY = 8
_WORTH_BYTES = 64
_NIL = msgspec.Raw(b"\xc0")
_LIST_DECODER = msgspec.msgpack.Decoder(list[msgspec.Raw])


class _NamedCall(TurnCall, array_like=True, tag=int(Kind.TURN)):
    inputs: Fields  # type: ignore[assignment]


_NAMED_DECODER = msgspec.msgpack.Decoder(_NamedCall)
_TURN_DECODER = msgspec.msgpack.Decoder(TurnCall)
_ENCODER = msgspec.msgpack.Encoder()


@dataclass(frozen=True, slots=True)
class _Base:
    """A list that later turns may continue."""

    span_id: int
    name: str
    count: int
    elements: bytes
    """Elements of the list and, for prompts, of the ids generated after it."""
    list_bytes: int
    """Size of the elements of the list alone."""
    links: int
    """Length of the chain that ends here; 1 for a whole list."""
    added_bytes: int
    """Size of what the links of the chain added to its whole list, generated ids included."""


class DeltaWriter:
    """A rewriter of turn records that stores lists as deltas; one for each journal writer."""

    def __init__(self, cache_max_bytes: int = 64 * 2**20) -> None:
        self._cache_max_bytes = cache_max_bytes
        self._cached_bytes = 0
        self._bases: OrderedDict[bytes, list[_Base]] = OrderedDict()

    def forget_all(self) -> None:
        """Drop every base; called when a new journal begins."""
        self._bases.clear()
        self._cached_bytes = 0

    def forget(self, key: bytes) -> None:
        """Drop the bases of a trajectory that ended."""
        for base in self._bases.pop(key, ()):
            self._cached_bytes -= len(base.elements)

    def rewrite(
        self, key: bytes, record: Bytes, totals: TurnTotals, *, counted: bool = False
    ) -> bytes:
        """Replace the prompt and the messages of a call by deltas, and count it if it is a turn.

        The lists become bases for later turns at once; when the record then does not reach its
        journal, the next journal begins, and `forget_all` with it.

        Args:
            key: trace id of the trajectory.
            record: the encoded call.
            totals: of the turns of the trajectory.
            counted: True where the totals must not count the call, or have done so before.
        """
        call, inputs = _read_call(record)
        outputs = raw_map(call.outputs)
        made = totals.settle(call, inputs, outputs)
        call.deltas = self._deltas(key, call, inputs, output_elements(outputs))
        if call.deltas:
            rest = inputs | dict.fromkeys((delta.name for delta in call.deltas), _NIL)
            call.inputs = msgspec.Raw(_ENCODER.encode(rest))
        if not counted:
            totals.add(call, inputs, made)
        return _ENCODER.encode(call)

    def _deltas(
        self, key: bytes, call: TurnCall, inputs: Fields, output: tuple[int, bytes] | None
    ) -> list[Delta]:
        deltas, bases = [], []
        for names, following in ((PROMPT_NAMES, output), (MESSAGE_NAMES, None)):
            name = first_named(inputs, names)
            listed = list_elements(bytes(inputs[name])) if name else None
            if name is None or listed is None or is_list_of_lists(inputs[name]):
                continue
            delta, links, added_bytes = self._delta(key, name, *listed)
            deltas.append(delta)
            count, elements = listed
            alone_bytes = len(elements)
            if following is not None:
                count, elements = count + following[0], elements + following[1]
            bases.append(
                _Base(call.span_id, name, count, elements, alone_bytes, links, added_bytes)
            )
        if bases:
            self._remember(key, bases)
        return deltas

    def _remember(self, key: bytes, bases: list[_Base]) -> None:
        known = self._bases.setdefault(key, [])
        self._bases.move_to_end(key)
        known.extend(bases)
        self._cached_bytes += sum(len(base.elements) for base in bases)
        while len(known) > _BASES_PER_TRAJECTORY:
            self._cached_bytes -= len(known.pop(0).elements)
        while self._cached_bytes > self._cache_max_bytes and self._bases:
            self.forget(next(iter(self._bases)))

    def _delta(self, key: bytes, name: str, count: int, elements: bytes) -> tuple[Delta, int, int]:
        """Return a list as a delta, the length of its chain, and the bytes that the chain added."""
        crc = crc32(elements)
        best, shared = self._best_base(key, name, elements)
        if best is not None:
            kept, kept_bytes = _whole_elements(best, shared, count, elements)
            added_bytes = best.added_bytes + len(elements) - min(kept_bytes, best.list_bytes)
            is_due = best.links >= CHAIN_MAX and len(elements) <= WHOLE_PER_ADDED * added_bytes
            if kept_bytes >= _WORTH_BYTES and not is_due:
                new = list_bytes(count - kept, elements[kept_bytes:])
                delta = Delta(name, best.span_id, kept, msgspec.Raw(new), crc)
                return delta, best.links + 1, added_bytes
        return Delta(name, None, 0, msgspec.Raw(list_bytes(count, elements)), crc), 1, 0

    def _best_base(self, key: bytes, name: str, elements: bytes) -> tuple[_Base | None, int]:
        """Return the base that a list continues best; forget those of which it continues all."""
        best, longest = None, 0
        known = self._bases.get(key, [])
        for base in known[::-1]:
            if base.name != name or len(base.elements) <= longest:
                continue
            shared = _shared_prefix(base.elements, elements)
            if shared > longest:
                best, longest = base, shared
            if shared == len(base.elements):
                # The list, which becomes a base itself, serves every later list as well.
                known.remove(base)
                self._cached_bytes -= shared
        return best, longest


def _read_call(record: Bytes) -> tuple[TurnCall, Fields]:
    """Return a call, and its arguments by name, still encoded; none where they have no names."""
    try:
        # In one pass, because even to pass over a long prompt takes time.
        call = _NAMED_DECODER.decode(record)
    except msgspec.MsgspecError:
        return _TURN_DECODER.decode(record), {}
    return call, call.inputs


def _shared_prefix(left: bytes, right: bytes) -> int:
    """Return the length of the common prefix in bytes."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if right.startswith(left[low:middle], low):
            low = middle
        else:
            high = middle - 1
    return low


def _whole_elements(base: _Base, shared: int, count: int, elements: bytes) -> tuple[int, int]:
    """Return how many whole elements lie in the first `shared` bytes, and their size in bytes."""
    if shared == len(base.elements):
        return base.count, shared
    if shared == len(elements):
        return count, shared
    sizes = [len(bytes(item)) for item in _LIST_DECODER.decode(list_bytes(count, elements))]
    ends = list(accumulate(sizes))
    kept = bisect_right(ends, shared)
    return kept, ends[kept - 1] if kept else 0


@dataclass(frozen=True, slots=True)
class _Link:
    """A list as its record holds it, and the checksums from which those of later lists go on."""

    base: _Link | None
    kept: int
    new: bytes
    count: int
    """Number of elements of the whole list."""
    own: bytes
    """The new elements, and those that the model generated after the list."""
    whole_count: int
    """Number of elements of the whole list and of what follows."""
    kept_crc32: int
    """Checksum of the elements that are kept of the base."""
    whole_crc32: int
    """Checksum of all elements of the whole list and of what follows."""

    def first_crc32(self, count: int) -> int:
        """Return the checksum of the first elements."""
        if count == self.whole_count:
            return self.whole_crc32
        one = self
        while one.base is not None and count <= one.kept:
            one = one.base
        return crc32(one.own_until(count), one.kept_crc32)

    def own_until(self, count: int) -> bytes:
        """Return those of the own elements that are among the first elements of the whole list."""
        if count == self.whole_count:
            return self.own
        items = _LIST_DECODER.decode(list_bytes(self.whole_count - self.kept, self.own))
        return b"".join(bytes(item) for item in items[: count - self.kept])

    def elements(self) -> bytes:
        """Return the elements of the whole list."""
        parts, one = [self.new], self
        count = self.kept
        while one.base is not None:
            one = one.base
            if count > one.kept:
                parts.append(one.own_until(count))
                count = one.kept
        return b"".join(reversed(parts))


class DeltaReader:
    """The lists of one journal, checked and rebuilt from its turns, which are fed in order.

    It holds what the records hold, never the whole lists, so its memory is linear in the journal.
    """

    def __init__(self) -> None:
        self._links: dict[tuple[bytes, int, str], _Link] = {}

    def add(self, call: Call, outputs: Fields | None) -> dict[str, int | None]:
        """Return the whole length of each list argument of a turn; None: it cannot be rebuilt.

        Args:
            call: the turn.
            outputs: the fields of its result; None where it has none.
        """
        if not call.deltas:
            return {}
        output = output_elements(outputs)
        return {delta.name: self._add(call, delta, output) for delta in call.deltas}

    def whole(self, trace_id: bytes, span_id: int, name: str) -> bytes | None:
        """Return one list argument, whole and encoded."""
        link = self._links.get((trace_id, span_id, name))
        return None if link is None else list_bytes(link.count, link.elements())

    def _add(self, call: Call, delta: Delta, output: tuple[int, bytes] | None) -> int | None:
        listed = list_elements(bytes(delta.new))
        if listed is None:
            return None
        base, kept, kept_crc = None, 0, 0
        if delta.base is not None:
            base = self._links.get((call.head.trace_id, delta.base, delta.name))
            if base is None or not 0 <= delta.kept <= base.whole_count:
                return None
            kept, kept_crc = delta.kept, base.first_crc32(delta.kept)
        count, new = kept + listed[0], listed[1]
        crc = crc32(new, kept_crc)
        if crc != delta.crc32:
            return None
        following = output if delta.name in PROMPT_NAMES and output else (0, b"")
        self._links[(call.head.trace_id, call.span_id, delta.name)] = _Link(
            base,
            kept,
            new,
            count,
            new + following[1] if following[1] else new,
            count + following[0],
            kept_crc,
            crc32(following[1], crc),
        )
        return count
