"""`localtrace doctor`: check settings, and whether a job here would be recorded."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from localtrace.printing import say, say_text

if TYPE_CHECKING:
    from localtrace.trainer_hooks.findings import Finding

_INDENT = " " * 20


@click.command()
@click.option(
    "--ray",
    "address",
    is_flag=False,
    flag_value="auto",
    metavar="[ADDRESS]",
    help="Check a worker on every node of the Ray cluster at ADDRESS; without ADDRESS, of the "
    "cluster of this node.",
)
@click.option(
    "--format",
    "form",
    type=click.Choice(["table", "json"]),
    default="table",
    show_default=True,
    help="Output format.",
)
@click.pass_context
def command(context: click.Context, address: str | None, form: str) -> None:
    """Check the settings, and whether a job here would be recorded.

    Prints the LOCALTRACE_* variables and the effect of each, names that are mistyped, and for every
    trainer and engine that is installed whether its version was tested, whether the places are
    there that its hook enters, whether the hook is on, and what to do where it is not. For verl,
    prints where rollouts would be recorded. Only verl is imported, in a process of its own.
    """
    import msgspec

    from localtrace.trainer_hooks import examination
    from localtrace.trainer_hooks.verl.doctor import examine_nodes

    found = [*examination.examine(), *_upkeep()] if address is None else examine_nodes(address)
    if form == "json":
        text = msgspec.json.format(msgspec.json.encode([asdict(one) for one in found])).decode()
        say_text(text)
    else:
        _print(found)
    if any(one.state == "problem" for one in found):
        context.exit(1)


def _upkeep() -> list[Finding]:
    """Return what the sealer tries in vain on the store of the settings."""
    from localtrace.errors import ConfigError
    from localtrace.maintain.upkeep import troubles
    from localtrace.trainer_hooks.findings import Finding
    from localtrace.trainer_hooks.verl.checks import store_path

    try:
        found = troubles(store_path())
    except ConfigError:
        return []  # the settings are a finding of their own
    remedy = "run localtrace verify, and localtrace compact or prune by hand"
    return [
        Finding("upkeep", "problem", f"{name} failed {one.times} times since {one.since}: "
                f"{one.message}", remedy)
        for name, one in found.items()
    ]  # fmt: skip


def _print(found: list[Finding]) -> None:
    node = None
    for one in found:
        if one.node != node:
            node = one.node
            say(f"{node}:")
        say(f"{one.state:9}{one.check:11}{one.text}")
        if one.remedy is not None:
            say(f"{_INDENT}→ {one.remedy}")
