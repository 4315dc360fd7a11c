"""Rules that say whose spans are pruned, as text: `500GB,older-than=14d,keep-every=10,keep=errors`.

What `keep` names is written as the rules of sampling are.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from localtrace.quantities import parse_age, parse_size
from localtrace.store.sealing.sampling_rules import Rules, parse_rules, whole_number

_FORMS = "500GB, older-than=14d, keep-every=10, gathered, keep=errors,truncated,extremes=2"


@dataclass(frozen=True, slots=True)
class Retention:
    """Rules of pruning. A group of trajectories is pruned only where none of them keeps it."""

    to_size_bytes: int | None = None
    """Prune the oldest first, until the store takes no more than this; None: prune all."""
    older_than_s: float | None = None
    """Prune only what ended longer ago."""
    keep_every: int | None = None
    """Keep the steps that are multiples of this, and trajectories without a step."""
    gathered: bool = False
    """Prune only what another store has gathered."""
    keep: Rules = field(default_factory=Rules)
    text: str = ""
    """The rules as they were written."""

    @property
    def is_empty(self) -> bool:
        """True where it says nothing."""
        return self == Retention(text=self.text)


def parse_retention(text: str) -> Retention:
    """Read rules separated by commas, each at most once.

    Raises:
        ValueError: a rule is unknown, repeated or incomplete; the text says what to write.
    """
    found: dict[str, str] = {}
    keep: list[str] = []
    for part in filter(None, map(str.strip, text.split(","))):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if name[:1].isdecimal() and not equals:
            name, value = "to-size", name
        if name in found:
            raise ValueError(f"the rule {name} is there twice: keep one")
        if name in ("to-size", "older-than", "keep-every") or (name == "gathered" and not equals):
            found[name] = value
        elif name == "keep" or keep:
            keep.append(value if name == "keep" else part)
        else:
            raise ValueError(f"{part!r} is no rule: use some of {_FORMS}")
    return Retention(
        parse_size(found["to-size"]) if "to-size" in found else None,
        parse_age(found["older-than"]) if "older-than" in found else None,
        whole_number(found["keep-every"], "keep-every=10") if "keep-every" in found else None,
        "gathered" in found,
        parse_rules(",".join(keep), later=True) if keep else Rules(),
        ",".join(filter(None, map(str.strip, text.split(",")))),
    )


def parse_quota(text: str) -> tuple[int, Retention | None]:
    """Read a limit of a store's size: bytes, and rules of pruning if any stand beside it.

    Raises:
        ValueError: there is no size, or a rule is unknown, repeated or incomplete.
    """
    retention = parse_retention(text)
    if retention.to_size_bytes is None:
        raise ValueError(f"it needs a size, such as 500GB or {_FORMS.replace(', ', ',')}")
    alone = Retention(retention.to_size_bytes, text=retention.text)
    return retention.to_size_bytes, None if retention == alone else retention


def pause_above(text: str | None) -> int | None:
    """Return the size of a store above which recording pauses; None: it does not.

    With rules it does not: the sealer prunes instead.
    """
    if text is None:
        return None
    size_bytes, retention = parse_quota(text)
    return size_bytes if retention is None else None
