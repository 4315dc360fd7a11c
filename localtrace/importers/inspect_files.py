"""Files of Inspect's logs, `.eval` (a zip) and `.json`, read sample by sample within bounds.

Inspect's own reader trusts a file. So members are taken out of the zip here, none larger than a
limit however it was packed, and what a sample refers to is weighed before Inspect puts it in place:
a few bytes may name a long attachment, or a list of messages, very often.
"""

from __future__ import annotations

import struct
import zipfile
import zlib
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import IO, Any

from localtrace.importers.lines import LINE_MAX_BYTES, BadLine, read_json
from localtrace.values.fields import Fields

MEMBER_MAX_BYTES = 256 * 2**20
"""Longest JSON text of one sample, or of one log of the format `.json`."""
_REFERRED_MAX = 10_000_000
"""The most messages that the calls of one sample may refer to together."""
_MESSAGE_BYTES = 200
"""Weight of a message beside its text."""
_ZIP = b"PK\x03\x04"
_HEADERS = ("header.json", "_journal/start.json")
_STORED, _DEFLATED, _ZSTANDARD = 0, 8, 93
_LOCAL_HEADER = struct.Struct("<4s22xHH")
_ATTACHMENTS = ("attachment://", "tc://")


def read_log(path: Path) -> tuple[Fields, Iterator[tuple[str, Fields | BadLine]]]:
    """Return the head of a log, and its samples, each with its place, or why it cannot be read.

    Raises:
        BadLine: the file is no log.
    """
    with path.open("rb") as file:
        is_zip = file.read(len(_ZIP)) == _ZIP
    return _of_zip(path) if is_zip else _of_json(path)


def _of_json(path: Path) -> tuple[Fields, Iterator[tuple[str, Fields | BadLine]]]:
    if path.stat().st_size > MEMBER_MAX_BYTES:
        raise BadLine(
            f"longer than {MEMBER_MAX_BYTES // 2**20} MiB: turn it into .eval by  inspect log "
            f"convert {path.name} --to eval --output-dir FOLDER"
        )
    head = _object(path.read_bytes())
    samples = head.pop("samples", None)
    if not isinstance(samples, list) or not isinstance(head.get("eval"), dict):
        raise BadLine("no log of Inspect, which has eval and samples")

    def each() -> Iterator[tuple[str, Fields | BadLine]]:
        for number, sample in enumerate(samples, 1):
            is_object = isinstance(sample, dict)
            yield f"{path}: sample {number}", sample if is_object else BadLine("no JSON object")

    return head, each()


def _of_zip(path: Path) -> tuple[Fields, Iterator[tuple[str, Fields | BadLine]]]:
    try:
        with zipfile.ZipFile(path) as packed:
            members = {one.filename: one for one in packed.infolist()}
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError, EOFError) as error:
        raise BadLine(f"no whole zip ({error}); inspect log recover may mend it") from None
    name = next((one for one in _HEADERS if one in members), None)
    if name is None:
        raise BadLine("no log of Inspect, which has header.json")
    with path.open("rb") as file:
        head = _object(_member(file, members[name]))
    if not isinstance(head.get("eval"), dict):
        raise BadLine("no log of Inspect: its header has no eval")

    def each() -> Iterator[tuple[str, Fields | BadLine]]:
        with path.open("rb") as file:
            for name, member in members.items():
                if name.startswith("samples/") and name.endswith(".json"):
                    place = f"{path}: {name[:200]}"
                    try:
                        yield place, _object(_member(file, member))
                    except BadLine as error:
                        yield place, error

    return head, each()


def _member(file: IO[bytes], member: zipfile.ZipInfo) -> bytes:
    """Return what a member of a zip holds.

    Raises:
        BadLine: it is too large, damaged, or packed in an unknown way.
    """
    if max(member.file_size, member.compress_size) > MEMBER_MAX_BYTES:
        raise BadLine(f"longer than {MEMBER_MAX_BYTES // 2**20} MiB")
    try:
        file.seek(member.header_offset)
        mark, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
        file.seek(name_bytes + extra_bytes, 1)
        packed = file.read(member.compress_size)
        if mark != _ZIP or member.flag_bits & 1:
            raise BadLine("damaged or encrypted")
        data = _unpacked(packed, member.compress_type, member.file_size)
    except (struct.error, zlib.error, ValueError, OSError) as error:
        raise BadLine(f"damaged ({error})") from None
    if len(data) != member.file_size or zlib.crc32(data) != member.CRC:
        raise BadLine("damaged: its checksum does not fit")
    return data


def _unpacked(packed: bytes, how: int, size: int) -> bytes:
    """Unpack, one byte more than the size at most."""
    if how == _STORED:
        return packed
    if how == _DEFLATED:
        return zlib.decompressobj(-zlib.MAX_WBITS).decompress(packed, size + 1)
    if how != _ZSTANDARD:
        raise BadLine(f"packed by the unknown method {how}")
    import zstandard

    try:
        unpacking = zstandard.ZstdDecompressor(max_window_size=2**27)
        with unpacking.stream_reader(packed, read_across_frames=True) as reader:
            return reader.read(size + 1)
    except zstandard.ZstdError as error:
        raise BadLine(f"damaged ({error})") from None


def _object(data: bytes) -> Fields:
    found = read_json(data)
    if not isinstance(found, dict):
        raise BadLine("no JSON object")
    return found


def weigh(sample: Fields) -> int:
    """Return about how many bytes a sample has once its references are put in place.

    Raises:
        BadLine: it is too large, or its references are none.
    """
    attachments = sample.get("attachments") or {}
    if not isinstance(attachments, dict):
        raise BadLine("its attachments are none")
    data = sample.get("events_data") or {}
    pool = data.get("messages") if isinstance(data, dict) else None
    weights = [_weight(one, attachments) for one in pool] if isinstance(pool, list) else []
    sums = [0, *accumulate(weights)]
    referred, total = 0, 0
    for event in sample.get("events") or ():
        refs = event.get("input_refs") if isinstance(event, dict) else None
        weight = _weight(event, attachments)
        for first, end in _ranges(refs, len(weights)):
            referred += end - first
            weight += sums[end] - sums[first]
            if weight > LINE_MAX_BYTES or referred > _REFERRED_MAX:
                raise BadLine("a call in it refers to too many messages")
        if weight > LINE_MAX_BYTES:
            raise BadLine(f"an event in it is longer than {LINE_MAX_BYTES // 2**20} MiB")
        total += weight
    weight = _weight(sample.get("messages"), attachments)
    if weight > LINE_MAX_BYTES:
        raise BadLine(f"its messages are longer than {LINE_MAX_BYTES // 2**20} MiB")
    return total + weight


def _ranges(refs: Any, count: int) -> Iterator[tuple[int, int]]:
    for ref in refs if isinstance(refs, list) else ():
        if not (isinstance(ref, list) and len(ref) == 2 and all(type(one) is int for one in ref)):
            raise BadLine("references to messages that are none")
        first, end = (min(max(one, 0), count) for one in ref)
        if min(ref) < 0 or first > end:
            raise BadLine("references to messages that are none")
        yield first, end


def _weight(value: Any, attachments: Fields) -> int:
    """Return about how many bytes a value has once its attachments are in place."""
    weight, waiting = 0, [value]
    while waiting:
        one = waiting.pop()
        weight += _MESSAGE_BYTES if isinstance(one, dict) else 8
        if isinstance(one, dict):
            waiting += one.values()
        elif isinstance(one, list):
            waiting += one
        elif isinstance(one, str):
            weight += len(one)
            mark = next((mark for mark in _ATTACHMENTS if one.startswith(mark)), None)
            if mark is not None:
                text = attachments.get(one[len(mark) :])
                weight += len(text) if isinstance(text, str) else 0
    return weight
