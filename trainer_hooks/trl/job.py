"""Start of recording in every process of a TRL job."""

from __future__ import annotations

import os
from typing import Any

from localtrace.record import active
from localtrace.trainer_hooks.environment import is_asked_for, record_this_process, refuse, say
from localtrace.trainer_hooks.tokenizer import keep_tokenizer


def start_recording(trainer: Any) -> bool:
    """Record in this process, as part of the main process's run; return whether it records.

    Raises:
        LocalTraceError: recording cannot start, and LOCALTRACE_REQUIRED is set.
    """
    accelerator = trainer.accelerator
    worker = f"rank{accelerator.process_index}"
    if accelerator.is_main_process:
        record_this_process(worker)
    if accelerator.num_processes > 1:
        _follow_main_process(worker)
    # If the environment asked for recording, `record_this_process` has reported the reason.
    if active.recorder is None and accelerator.is_main_process and not is_asked_for():
        refuse(
            "the trainer is not recorded: call localtrace.init(...) before record(trainer), or set "
            "LOCALTRACE_STORE"
        )
    keep_tokenizer(trainer.processing_class)
    return active.recorder is not None


def _follow_main_process(worker: str) -> None:
    """Join the main process's run, which is broadcast to all. This is a collective call."""
    from torch import distributed

    told = [_variables()]
    distributed.broadcast_object_list(told, src=0)
    (variables,) = told
    if variables is None:
        return
    if active.recorder is None:
        os.environ.update(variables)
        record_this_process(worker)
    elif active.recorder.context.run_id != variables["LOCALTRACE_RUN_ID"]:
        say(
            f"{worker} records a run of its own: call localtrace.init(...) in the main process "
            "only, or with the same run_id everywhere"
        )


def _variables() -> dict[str, str] | None:
    recorder = active.recorder
    if recorder is None:
        return None
    context = recorder.context
    return {
        "LOCALTRACE_STORE": str(recorder.layout.root),
        "LOCALTRACE_PROJECT": context.project,
        "LOCALTRACE_EXPERIMENT": context.experiment,
        "LOCALTRACE_RUN_ID": context.run_id,
        "LOCALTRACE_ATTEMPT": str(context.attempt),
    }
