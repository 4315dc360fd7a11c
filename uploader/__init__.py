"""The uploader: replay chosen trajectories into a tracker, exactly once.

    with localtrace.open_store("runs/store") as store:
        receipt = upload(store, Filters(step="3..10"), "http://127.0.0.1:5000")

It reads the store and never changes it. Its own memory, the ledger, lies in LOCALTRACE_STATE_DIR
(by default `~/.local/state/localtrace`), so an upload that was cut off is repeated with the same
call, and nothing is sent twice.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from localtrace.reader import Store
    from localtrace.uploader.receipt import Receipt
    from localtrace.uploader.records import Estimate
    from localtrace.uploader.replay import Progress
    from localtrace.uploader.selection import Selection

__all__ = ["estimate", "upload"]


def upload(
    store: Store,
    selection: Selection,
    target: str,
    *,
    kind: str = "mlflow",
    experiment: str | None = None,
    assessments: bool = False,
    limit: int | None = None,
    patience_s: float = 120.0,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> Receipt:
    """Upload a selection, read it back, and return the receipt, which is also kept as a file.

    Args:
        selection: `Filters`, an SQL query with a column `trace_id`, or trace ids.
        target: where to; for MLflow `http://HOST:PORT`, or `sqlite:///FILE.db`, for which a server
            is started on loopback as long as the upload takes.
        experiment: its name at the target; by default the project of each trajectory.
        assessments: send each reward as an assessment too: one more request per trajectory.
        limit: at most this many trajectories.
        patience_s: how long one request is repeated while the target does not answer.
        on_progress: called after each trajectory.

    Raises:
        QueryError: the selection cannot be read.
        ConfigError: the target's uri cannot be used.
        TargetUnavailable: the target does not answer; the same upload can go on later.
        UploadError: the target can take no record, or another upload to it is running.
    """
    from localtrace.uploader.ledger import Ledger
    from localtrace.uploader.replay import Replay
    from localtrace.uploader.selection import choose
    from localtrace.uploader.state import state_folder
    from localtrace.uploader.targets import open_target

    choice = choose(store, selection, limit)
    folder = state_folder()
    opened = open_target(kind, target, assessments=assessments)
    with closing(Ledger(folder)) as ledger, ledger.claim(opened.uri), closing(opened):
        opened.check()
        replay = Replay(store, choice, opened, ledger, patience_s, on_progress)
        receipt = replay.run(experiment)
    receipt.write(receipt.file_in(folder))
    return receipt


def estimate(
    store: Store,
    selection: Selection,
    target: str,
    *,
    kind: str = "mlflow",
    assessments: bool = False,
    limit: int | None = None,
) -> Estimate:
    """Read and map a selection without contacting the target; arguments as in `upload`.

    Raises:
        QueryError: the selection cannot be read.
        ConfigError: the target's uri cannot be used.
    """
    from localtrace.uploader.records import measure
    from localtrace.uploader.selection import choose
    from localtrace.uploader.targets import open_target

    choice = choose(store, selection, limit)
    with closing(open_target(kind, target, assessments=assessments)) as opened:
        return measure(store, opened, choice)
