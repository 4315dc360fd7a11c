"""`localtrace gather`: bring what is new in the stores of other nodes into one."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import click

from localtrace.errors import StoreBusy
from localtrace.printing import say


@click.command()
@click.argument("folders", nargs=-1, type=click.Path(path_type=Path), metavar="[FOLDER]...")
@click.option("--into", type=click.Path(path_type=Path), required=True, metavar="STORE",
              help="Store that gets the rows; made where there is none.")  # fmt: skip
@click.option("--ray", "ray_path", metavar="PATH",
              help="Gather from every node of the Ray cluster: the store at this path on its disk, "
              "with ~ and $VARIABLES of the node. All nodes must see STORE.")  # fmt: skip
@click.pass_context
def command(
    context: click.Context, folders: tuple[Path, ...], into: Path, ray_path: str | None
) -> None:
    """Bring what is new in the stores of other nodes into one, exactly once.

    FOLDER is another node's store, mounted or copied here, for example by rsync. Its journals stay
    where they are: their rows come once they are sealed. With --ray, each node seals its own first.

    Whatever is there already is passed over. So gather as often as you like, also while training
    writes, and again after it was interrupted. The exit code is 1 if a store could not be gathered
    or a node did not answer; each is named.
    """
    from localtrace.cli.progress import print_notes, print_problems, progress_bar
    from localtrace.cli.sizes import show_size
    from localtrace.cluster.gather import gather
    from localtrace.cluster.ray_nodes import gather_nodes
    from localtrace.store.compacting.compact import compact
    from localtrace.store.layout import create_layout

    if not folders and ray_path is None:
        raise click.UsageError("name the stores to gather from: their folders, or --ray PATH")
    layout = create_layout(into)
    with progress_bar("gathering", " stores") as progress:
        report = gather(folders, layout, progress)
    if ray_path is not None:
        gather_nodes(ray_path, layout, report)
    rows = ", ".join(f"{count} {name}" for name, count in report.rows.items() if count)
    new = f"{rows} in {show_size(report.size_bytes)}" if rows else "nothing new"
    say(f"gathered {report.stores} of {report.stores + report.failed} stores: {new}")
    print_notes(report.notes)
    with suppress(StoreBusy):  # another gathering merges the small files that came
        report.problems += compact(layout, everything=False).problems
    print_problems(context, report.problems)
