"""The set-up of an SQLite file for MLflow, interrupted, and what is said of a half-made one."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest
import sqlalchemy
from mlflow.store.tracking.dbmodels.initial_models import Base

from localtrace.errors import TargetUnavailable
from localtrace.uploader.targets.mlflow_server import EmbeddedServer

UPLOADER = """
import sys
from pathlib import Path
from localtrace.uploader.targets.mlflow_server import EmbeddedServer
EmbeddedServer(Path(sys.argv[1]))
"""
_WAIT_S = 120.0


def _tables(path: Path) -> int:
    try:
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=10)) as opened:
            return int(opened.execute("select count(*) from sqlite_master").fetchone()[0])
    except sqlite3.OperationalError:
        return 0  # it is gone, or locked for longer


def _children(pid: int) -> list[int]:
    return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


def test_a_set_up_that_was_killed_is_done_anew_by_the_next_upload(tmp_path: Path) -> None:
    database = tmp_path / "mlflow.db"
    uploader = subprocess.Popen([sys.executable, "-c", UPLOADER, str(database)])
    give_up = time.monotonic() + _WAIT_S
    while not _tables(database):
        assert uploader.poll() is None
        assert time.monotonic() < give_up
        time.sleep(0.005)
    (keeper,) = _children(uploader.pid)
    uploader.send_signal(signal.SIGKILL)
    uploader.wait()
    while os.path.exists(f"/proc/{keeper}"):  # it ends the set-up, and then itself
        assert time.monotonic() < give_up
        time.sleep(0.05)
    assert list(tmp_path.iterdir()) == []
    with closing(EmbeddedServer(database)):
        assert _tables(database) > 20
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == ["mlflow.db"]


def test_a_half_made_database_of_others_is_named_with_the_real_error(tmp_path: Path) -> None:
    database = tmp_path / "mlflow.db"
    engine = sqlalchemy.create_engine(f"sqlite:///{database}")
    Base.metadata.create_all(engine)
    with engine.begin() as connection:
        connection.execute(sqlalchemy.text("create table experiment_tags (x int)"))
    engine.dispose()
    said = rf"{database}: .*table experiment_tags already exists.*move it away"
    with pytest.raises(TargetUnavailable, match=said):
        EmbeddedServer(database)
