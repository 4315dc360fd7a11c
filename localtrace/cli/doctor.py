"""`localtrace doctor`: check settings, and whether a job here would be recorded."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from localtrace.printing import say, say_text

if TYPE_CHECKING:
    from localtrace.trainer_hooks.doctor import Finding

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

    Prints the LOCALTRACE_* variables and the effect of each, names that are mistyped, the store and
    its disk, and for every trainer and engine that is installed whether its version was tested,
    whether the places are there that its hook enters, whether the hook is on, and what to do where
    it is not. Nothing of them is imported.
    """
    import msgspec

    from localtrace.trainer_hooks import doctor

    findings = doctor.examine_nodes(address) if address else doctor.examine()
    if form == "json":
        text = msgspec.json.encode([asdict(finding) for finding in findings])
        say_text(msgspec.json.format(text).decode())
    else:
        _print(findings)
    if any(finding.state == "problem" for finding in findings):
        context.exit(1)


def _print(findings: list[Finding]) -> None:
    node = None
    for finding in findings:
        if finding.node != node:
            node = finding.node
            say(f"{node}:")
        say(f"{finding.state:9}{finding.check:11}{finding.text}")
        if finding.remedy is not None:
            say(f"{_INDENT}→ {finding.remedy}")
