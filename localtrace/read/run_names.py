"""Names that tell runs apart: projects, experiments, or a few values of their configs.

Also the ids of runs that a filter or a parameter names by a name or by the beginning of an id.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from localtrace.errors import QueryError
from localtrace.read.filters import RunName
from localtrace.values.codec import fields_from_json

if TYPE_CHECKING:
    from localtrace.read.store import Store

_PARTS_MAX = 3
_VALUE_MAX = 24
"""Longer values, such as paths, are not used in names."""

_SHOWN_MAX = 6

_Facts = dict[str, str]


def run_names(store: Store) -> dict[str, str]:
    """Return a name for each run id, such as seed=1; none for a single run."""
    # Most stores hold one run, and the view `runs` costs more than to look.
    if len(store.own_sql("select distinct run_id from stored.runs limit 2")) < 2:
        return {}
    runs = store.own_sql(
        "select run_id, arg_max(project, attempt) as project, "
        "arg_max(experiment, attempt) as experiment, arg_max(config, attempt) as config, "
        "strftime(min(started_at), '%m-%d %H:%M') as started from runs group by run_id"
    ).to_dicts()
    facts = {run["run_id"]: _facts(run) for run in runs}
    names = {run_id: " ".join(parts) for run_id, parts in _distinguishing(facts).items()}
    shared = {name for name, count in Counter(names.values()).items() if count > 1}
    return {
        run["run_id"]: f"{names[run['run_id']]} {run['started']}".strip()
        if names[run["run_id"]] in shared
        else names[run["run_id"]]
        for run in runs
    }


def with_run_ids(store: Store, params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of a query with the ids of the runs that some of them name.

    Raises:
        QueryError: several runs have the name, or ids that begin so.
    """
    return {
        name: run_id_of(store, str(value)) if isinstance(value, RunName) else value
        for name, value in params.items()
    }


def run_id_of(store: Store, text: str) -> str:
    """Return the id of the run that a text names; the text itself where it names none.

    Raises:
        QueryError: several runs have the name, or ids that begin so.
    """
    is_id = "select 1 from {} where run_id = $text limit 1"
    if not text or len(store.own_sql(is_id.format("stored.runs"), {"text": text})):
        return text
    listed = store.own_sql("select distinct run_id from stored.runs order by run_id").to_dicts()
    names = run_names(store)
    meant = [
        run["run_id"]
        for run in listed
        if run["run_id"].startswith(text) or names.get(run["run_id"]) == text
    ]
    if not meant or len(store.own_sql(is_id.format("stored.trajectories"), {"text": text})):
        return text
    if len(meant) > 1:
        more = ", …" if len(meant) > _SHOWN_MAX else ""
        raise QueryError(
            f"run={text} names several runs, write more of the id: "
            f"{', '.join(meant[:_SHOWN_MAX])}{more}"
        )
    return str(meant[0])


def _facts(run: Mapping[str, Any]) -> _Facts:
    flat = dict(_flat(fields_from_json(run["config"])))
    return {"project": run["project"], "experiment": run["experiment"]} | flat


def _flat(config: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{above}{name}.")
        elif isinstance(value, str | int | float) and len(str(value)) <= _VALUE_MAX:
            yield f"{above}{name}", str(value)


def _distinguishing(facts: dict[str, _Facts]) -> dict[str, list[str]]:
    """Return for each run a few facts that together tell as many runs apart as possible.

    The names are chosen greedily: each time the one that splits the runs into most kinds.
    """
    names = list(dict.fromkeys(name for known in facts.values() for name in known))
    seen: dict[str, tuple[str | None, ...]] = dict.fromkeys(facts, ())
    chosen: list[str] = []
    while len(chosen) < _PARTS_MAX and names:
        kinds = {
            name: len({(*seen[run], known.get(name)) for run, known in facts.items()})
            for name in names
        }
        best = max(names, key=kinds.__getitem__)  # the first of several
        if kinds[best] == len(set(seen.values())):
            break
        chosen.append(best)
        seen = {run: (*seen[run], known.get(best)) for run, known in facts.items()}
    short = {name: name.rpartition(".")[2] for name in chosen}
    return {
        run: [
            known[name]
            if name in ("project", "experiment")
            else f"{short[name] if list(short.values()).count(short[name]) == 1 else name}"
            f"={known[name]}"
            for name in chosen
            if name in known
        ]
        for run, known in facts.items()
    }
