"""Files of Inspect's logs, `.eval` (a zip) and `.json`, read sample by sample within bounds.

Inspect's own reader trusts a file. Here no member of the zip is larger than a limit, however it was
packed, and the messages that the calls of a sample refer to are counted before Inspect puts them in
place: a few bytes may name a list of messages very often. Importing inspect-ai teaches `zipfile` to
read members that are packed by Zstandard.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

from localtrace.importers.lines import BadLine, read_json
from localtrace.values.fields import Fields

MEMBER_MAX_BYTES = 256 * 2**20
"""Longest JSON text of one sample, or of one log of the format `.json`."""
_REFERRED_MAX = 10_000_000
"""The most messages that the calls of one sample may refer to together."""
_ZIP = b"PK\x03\x04"
_HEADERS = ("header.json", "_journal/start.json")


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
            members = {member.filename: member for member in packed.infolist()}
            name = next((name for name in _HEADERS if name in members), None)
            if name is None:
                raise BadLine("no log of Inspect, which has header.json")
            head = _object(_member(packed, members[name]))
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError, EOFError) as error:
        raise BadLine(f"not a whole zip ({error}); inspect log recover may repair it") from None
    if not isinstance(head.get("eval"), dict):
        raise BadLine("no log of Inspect: its header has no eval")

    def each() -> Iterator[tuple[str, Fields | BadLine]]:
        with zipfile.ZipFile(path) as packed:
            for name, member in members.items():
                if name.startswith("samples/") and name.endswith(".json"):
                    place = f"{path}: {name[:200]}"
                    try:
                        yield place, _object(_member(packed, member))
                    except BadLine as error:
                        yield place, error

    return head, each()


def _member(packed: zipfile.ZipFile, member: zipfile.ZipInfo) -> bytes:
    """Return what a member of a zip holds, which is never more than it declares.

    Raises:
        BadLine: it is too large, damaged, or packed in an unknown way.
    """
    if member.file_size > MEMBER_MAX_BYTES:
        raise BadLine(f"longer than {MEMBER_MAX_BYTES // 2**20} MiB")
    try:
        return packed.read(member)
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError, EOFError) as error:
        raise BadLine(f"damaged ({error})") from None


def _object(data: bytes) -> Fields:
    found = read_json(data)
    if not isinstance(found, dict):
        raise BadLine("no JSON object")
    return found


def check_references(sample: Fields) -> None:
    """Check the references of calls to messages of their sample.

    Raises:
        BadLine: they are none, or name too many messages together.
    """
    referred = 0
    for event in sample.get("events") or ():
        refs = event.get("input_refs") if isinstance(event, dict) else None
        for ref in refs if isinstance(refs, list) else ():
            is_range = isinstance(ref, list) and len(ref) == 2 and {*map(type, ref)} == {int}
            if not is_range or not 0 <= ref[0] <= ref[1]:
                raise BadLine("references to messages that are none")
            referred += ref[1] - ref[0]
            if referred > _REFERRED_MAX:
                raise BadLine("the calls in it refer to too many messages")
