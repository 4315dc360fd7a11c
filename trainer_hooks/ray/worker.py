"""The workers' part: a Ray process starts recording when it first imports localtrace."""

from __future__ import annotations

from collections.abc import Callable

from localtrace.trainer_hooks.environment import ray_worker, record_this_process


def record_worker() -> bool:
    """Start recording in this Ray process if its environment asks; return whether it records.

    Raises:
        CannotRecord: recording cannot start, and LOCALTRACE_REQUIRED is set.
    """
    return record_this_process(ray_worker())


def _sent_as_code() -> Callable[[], None]:
    # Ray sends a nested function as code, but makes the worker import a module's function. That
    # import would end every worker on a node where localtrace is not installed.
    def record_at_import() -> None:
        # Most processes of a cluster never record, and a new one does not know its actor yet.
        # Code that records imports localtrace first, so recording starts at that import.
        import importlib.util
        import os
        import platform
        import sys

        if importlib.util.find_spec("localtrace") is None:
            text = (
                f"localtrace: not installed for {sys.executable} on {platform.node()}, where "
                "nothing is recorded: run  pip install localtrace"
            )
            # The same words as in `record.config`, which cannot be imported here.
            required = os.environ.get("LOCALTRACE_REQUIRED", "").strip().lower()
            if required in ("1", "true", "yes", "on"):
                raise ModuleNotFoundError(text)
            print(text, file=sys.stderr, flush=True)
            return

        def begin(module: object) -> None:
            from localtrace.trainer_hooks.ray import record_worker

            record_worker()

        from wrapt import register_post_import_hook

        register_post_import_hook(begin, "localtrace")

    return record_at_import


record_at_import = _sent_as_code()
"""Setup hook that Ray runs at the start of every worker process of the job."""
