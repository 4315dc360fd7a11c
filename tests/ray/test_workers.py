"""The processes of a job that record, their names and ids."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import ray

import localtrace
from tests.ray import actors
from tests.ray.actors import AsyncWorker, Worker
from tests.ray.conftest import ROOT, Job

CALLS = ["generate", "generate"]


def test_a_task_records_with_the_node_and_the_job(job: Job) -> None:
    pid, trace_id = ray.get(actors.task.remote("task"))
    row = job.trajectory(trace_id)
    context = ray.get_runtime_context()
    assert (row["status"], row["reward"], row["ops"]) == ("ok", 1.0, CALLS)
    assert (row["node_id"], row["job_id"]) == (context.get_node_id(), context.get_job_id())
    assert (row["pid"], row["actor_id"], row["worker"]) == (pid, None, None)
    assert row["run_id"] == localtrace.run_id()


def test_an_actor_is_called_by_its_name_or_its_class_and_has_its_id(job: Job) -> None:
    named = ray.remote(Worker).options(name="rollout 0").remote()
    unnamed = ray.remote(Worker).remote()
    for handle, name in ((named, "rollout 0"), (unnamed, "Worker")):
        row = job.trajectory(ray.get(handle.roll_out.remote(name)))
        assert (row["worker"], row["actor_id"]) == (name, handle._actor_id.hex())
        (span,) = job.sql(
            "select distinct actor_id, node_id, job_id from spans where trace_id = $trace_id",
            trace_id=row["trace_id"],
        )
        assert span == {name: row[name] for name in ("actor_id", "node_id", "job_id")}


def test_an_async_actor_records_rollouts_that_run_at_once(job: Job) -> None:
    handle = ray.remote(AsyncWorker).remote()
    trace_ids = ray.get([handle.roll_out.remote(f"async {n}") for n in range(20)])
    for number, trace_id in enumerate(trace_ids):
        row = job.trajectory(trace_id)
        assert (row["sample_index"], row["worker"]) == (f"async {number}", "AsyncWorker")
        assert row["ops"] == ["generate_slowly"] * 3


def test_a_threaded_actor_records_as_one_process(job: Job) -> None:
    handle = ray.remote(Worker).options(max_concurrency=4).remote()
    trace_ids = ray.get([handle.roll_out.remote(f"threads {n}") for n in range(20)])
    rows = [job.trajectory(trace_id) for trace_id in trace_ids]
    assert all(row["ops"] == CALLS for row in rows)
    assert {row["worker"] for row in rows} == {"Worker"}
    assert len({row["writer_id"] for row in rows}) == 1


def test_tasks_that_share_a_process_share_its_recording(job: Job) -> None:
    found = ray.get([actors.task.remote(f"reused {n}") for n in range(12)])
    writers: dict[int, set[str]] = {}
    for pid, trace_id in found:
        writers.setdefault(pid, set()).add(job.trajectory(trace_id)["writer_id"])
    assert len(writers) < len(found)
    assert all(len(ids) == 1 for ids in writers.values())


def test_a_task_of_a_task_records_too(job: Job) -> None:
    for trace_id in ray.get(actors.outer_task.remote("nested")):
        assert job.trajectory(trace_id)["ops"] == CALLS


def test_an_actor_with_variables_of_its_own_records_too(job: Job) -> None:
    own = {"env_vars": {"SOME_VARIABLE": "1"}}
    handle = ray.remote(Worker).options(runtime_env=own).remote()
    assert job.trajectory(ray.get(handle.roll_out.remote("own")))["ops"] == CALLS


def test_a_process_that_records_nothing_leaves_nothing_in_the_store(job: Job) -> None:
    def pid_of() -> int:
        import os

        return os.getpid()

    pids = {ray.get(ray.remote(pid_of).options(runtime_env=env).remote()) for env in FRESH}
    assert len(pids) == len(FRESH)
    assert not pids & {row["pid"] for row in job.sql("select pid from processes")}


FRESH = [{"env_vars": {"FRESH": str(number)}} for number in range(2)]
"""Each asks Ray for a process that has run nothing yet."""


def test_a_call_carried_to_an_actor_is_a_child_of_its_caller(job: Job) -> None:
    handle = ray.remote(Worker).remote()
    trace_id, place = ray.get(actors.call_actor.remote(handle, "carried"))
    of_both = "from spans where trace_id = $trace_id qualify count(*) over () = 3"
    spans = {row["op"]: row for row in job.sql_until_there(of_both, trace_id=trace_id)}
    assert set(spans) == {"ask", "_serve", "generate"}
    assert spans["_serve"]["parent_id"] == spans["ask"]["span_id"]
    assert spans["generate"]["parent_id"] == spans["_serve"]["span_id"]
    assert spans["_serve"]["actor_id"] == handle._actor_id.hex()
    assert spans["ask"]["actor_id"] is None
    assert place is not None
    assert place.startswith(f"lt1-{trace_id}-{spans['_serve']['span_id']}-1-")


def test_the_drivers_own_rollouts_are_of_the_same_run(job: Job) -> None:
    trace_id = actors.roll_out("driver")
    localtrace.flush()
    row = job.trajectory(trace_id)
    assert (row["worker"], row["run_id"]) == ("driver", localtrace.run_id())
    _, other = ray.get(actors.task.remote("beside the driver"))
    assert job.trajectory(other)["run_id"] == row["run_id"]


def test_the_doctor_looks_at_every_node_as_a_worker_of_a_job(job: Job, tmp_path: Path) -> None:
    address = ray.get_runtime_context().gcs_address
    environ = {"VERL_USE_EXTERNAL_PLUGINS": "none", "LOCALTRACE_STORE": "mine"}
    done = subprocess.run(
        [sys.executable, "-m", "localtrace", "doctor", "--ray", address, "--format", "json"],
        env={**os.environ, **environ, "PYTHONPATH": str(ROOT)},
        cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    found = json.loads(done.stdout)
    assert {one["node"].split()[0] for one in found} == {os.uname().nodename}
    # What the driver knows is what its workers are told.
    assert [one["text"] for one in found if one["check"] == "store"] == [f"{tmp_path}/mine"]
    (problem,) = [one for one in found if one["state"] == "problem"]
    assert problem["text"].endswith("VERL_USE_EXTERNAL_PLUGINS=none")
    assert {"trl", "ray"} <= {one["check"] for one in found}
    assert done.returncode == 1
