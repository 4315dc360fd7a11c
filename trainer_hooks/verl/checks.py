"""The checks of `localtrace doctor`, run in a process that has tried to import verl."""

from __future__ import annotations

import importlib
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path

from localtrace.errors import LocalTraceError
from localtrace.record.config import load_settings
from localtrace.record.losses import REMEDIES
from localtrace.record.settings import Settings
from localtrace.record.variables import look_over
from localtrace.store.journal.disk import DiskWatch
from localtrace.store.layout import on_network, open_layout
from localtrace.store.retention_rules import pause_above
from localtrace.trainer_hooks.findings import Finding, State
from localtrace.trainer_hooks.verl import installed, job, seams
from localtrace.trainer_hooks.verl.callers import callers_past_the_hook

HOOK = "localtrace.trainer_hooks.verl"
_VERSION = "use a version of verl that this hook was tested with"
_DEFAULT_CHECKPOINTS = "checkpoints/<project_name>/<experiment_name>"


def look(failure: BaseException | None, loaded: bool) -> Iterator[Finding]:
    yield from _settings()
    if isinstance(failure, ModuleNotFoundError) and failure.name == "verl":
        yield Finding(
            "verl",
            "note",
            f"not installed for {sys.executable}",
            "to record a job of verl, run this in the environment that trains",
        )
        if "LOCALTRACE_STORE" in os.environ:
            yield from _store()
        return
    if failure is not None:
        reason = f"cannot be imported: {type(failure).__name__}: {failure}"
        yield Finding("verl", "problem", reason, "make `import verl` work first")
        return
    verl = installed.imported_verl()
    release = tuple(int(part) for part in re.findall(r"\d+", verl.version)[:2])
    yield Finding("verl", "ok" if verl.is_tested else "note", verl.describe())
    yield _hook(release, loaded)
    yield _places()
    yield from _arguments()
    yield from _callers()
    yield _trainer(release)
    yield _key(release)
    yield from _store()


def _hook(release: tuple[int, ...], loaded: bool) -> Finding:
    modules = os.environ.get("VERL_USE_EXTERNAL_MODULES", "")
    policy = os.environ.get("VERL_USE_EXTERNAL_PLUGINS", "auto")
    if loaded:
        way = f"VERL_USE_EXTERNAL_MODULES={modules}" if HOOK in modules else "its entry point"
        return Finding("hook", "ok", f"verl loads it, through {way}")
    text = "verl does not load it"
    set_modules = f"set VERL_USE_EXTERNAL_MODULES={HOOK} in the job's environment"
    if release < (0, 6):
        remedy = (
            "add +ray_kwargs.ray_init.runtime_env.worker_process_setup_hook="
            f"{HOOK}.setup_worker to the job's command"
        )
        return Finding("hook", "problem", f"{text}: this version has no plugins", remedy)
    if release < (0, 9):
        return Finding("hook", "problem", f"{text}: this version has no entry points", set_modules)
    if not entry_points(group="verl.plugins", name="localtrace"):
        remedy = f"install localtrace with pip, or {set_modules}"
        return Finding("hook", "problem", f"{text}: it has no entry point here", remedy)
    remedy = "unset VERL_USE_EXTERNAL_PLUGINS, or add localtrace to it"
    return Finding("hook", "problem", f"{text}: VERL_USE_EXTERNAL_PLUGINS={policy}", remedy)


def _places() -> Finding:
    errors: dict[str, Exception] = {}
    for module in dict.fromkeys(seam.module for seam in seams.status()):
        try:
            importlib.import_module(module)
        except Exception as error:
            errors[module] = error
    places = seams.status()
    missing = [one for one in places if not one.applied and not one.optional]
    if not missing:
        entered = sum(one.applied for one in places)
        return Finding("places", "ok", f"the hook has entered {entered} places in verl")
    names = ", ".join(f"{one.module}.{one.attribute}" for one in missing)
    reasons = dict.fromkeys(
        f" ({type(error).__name__}: {error})"
        for module, error in errors.items()
        if any(one.module == module for one in missing)
    )
    return Finding(
        "places",
        "problem",
        f"the hook could not enter {names}{''.join(reasons)}",
        f"{_VERSION}, with all that it needs",
    )


def _arguments() -> Iterator[Finding]:
    changed = [
        f"{one.module}.{one.attribute} ({', '.join(lacking)})"
        for one in seams.status()
        if one.applied and (lacking := one.lacking())
    ]
    if changed:
        yield Finding(
            "arguments", "problem", f"this verl does not have them: {', '.join(changed)}", _VERSION
        )


def _callers() -> Iterator[Finding]:
    try:
        past = callers_past_the_hook()
    except Exception as error:
        text = f"verl's modules cannot be read ({type(error).__name__}: {error})"
        yield Finding("callers", "note", text, "see whether advantages and fates are recorded")
        return
    if past:
        yield Finding(
            "callers",
            "problem",
            f"verl's own function is still called, past the hook, by {'; '.join(past)}",
            _VERSION,
        )


def _trainer(release: tuple[int, ...]) -> Finding:
    if release >= (0, 9):
        return Finding("trainer", "ok", "V1, the default here, and V0 (trainer.use_v1=false)")
    if release >= (0, 8):
        return Finding("trainer", "ok", "V0, the default here, and V1 (verl.trainer.main_ppo_sync)")
    return Finding("trainer", "ok", "V0, the only one here")


def _key(release: tuple[int, ...]) -> Finding:
    if release < (0, 6):
        return Finding("switch", "ok", "+trainer.rollout_trace.backend=localtrace")
    switch = f"{job.BACKEND_KEY}=localtrace"
    if release < (0, 7):
        # The default mode has no agent loops, and only those are recorded.
        switch += " actor_rollout_ref.rollout.mode=async"
    return Finding("switch", "ok", switch)


def _settings() -> Iterator[Finding]:
    for variable in look_over(os.environ):
        state: State = "ok" if variable.is_usable else "problem"
        yield Finding("settings", state, variable.text, variable.remedy)


def store_path() -> Path:
    return job.store_path({"trainer": {"default_local_dir": _DEFAULT_CHECKPOINTS}})


def _store() -> Iterator[Finding]:
    try:
        path = store_path()
        settings = load_settings(path, {})
        if path.is_dir() and any(path.iterdir()):
            open_layout(path)
    except (LocalTraceError, OSError) as error:
        yield Finding("store", "problem", str(error))
        return
    given = "LOCALTRACE_STORE" in os.environ
    where = f"{path}{'' if given else ', beside trainer.default_local_dir'}"
    yield _writable("store", path, where, "set LOCALTRACE_STORE to a folder that can be written")
    yield _journals(path, settings)


def _writable(check: str, folder: Path, text: str, remedy: str) -> Finding:
    try:
        with tempfile.TemporaryFile(dir=_existing(folder)):
            pass
    except OSError as error:
        reason = error.strerror or error
        return Finding(check, "problem", f"{text} cannot be written ({reason})", remedy)
    return Finding(check, "ok", text)


def _journals(path: Path, settings: Settings) -> Finding:
    folder = settings.journal_dir or path
    remedy = "set LOCALTRACE_JOURNAL_DIR to a folder on a local disk of each node"
    if on_network(folder):
        text = f"{folder} is on a network file system, where journals cannot be"
        if settings.journal_dir is None:
            text += f"; each node keeps them in {tempfile.gettempdir()}"
            return Finding("journals", "note", text, f"{remedy}, if that one is too small")
        return Finding("journals", "problem", text, remedy)
    near = _existing(folder)
    limit = pause_above(settings.max_store_bytes)
    refusal = DiskWatch(near, path, settings.min_free_bytes, limit).refusal()
    status = os.statvfs(near)
    text = f"{folder}, {status.f_bavail * status.f_frsize / 1e9:.1f} GB free"
    if refusal is not None:
        return Finding(
            "journals", "problem", f"{text}: nothing would be recorded", REMEDIES[refusal]
        )
    return _writable("journals", folder, text, remedy)


def _existing(path: Path) -> Path:
    return next(folder for folder in (path, *path.parents) if folder.exists())
