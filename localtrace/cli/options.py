"""Options that several commands share: the store, the output format, the filters."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from localtrace.cli.completing import complete_filter
from localtrace.errors import BundleError, ConfigError, QueryError

if TYPE_CHECKING:
    from localtrace.read.filters import Filters

_PARAM = re.compile(r"(\w+)\s*(<=|>=|=|<|>)(.*)", re.DOTALL)


class _StorePath(click.Path):
    """A path whose variable may list several, separated as in PATH.

    A single folder whose name holds the separator is one path.
    """

    def split_envvar_value(self, rv: str) -> Sequence[str]:
        parts = [] if os.path.isdir(rv) else [part for part in rv.split(os.pathsep) if part]
        return parts or [rv]


def _read_apart(
    _context: click.Context, _parameter: click.Parameter, paths: tuple[Path, ...]
) -> tuple[Path, ...]:
    from localtrace import cli

    if cli.is_program:
        from localtrace.read.children import use_children

        use_children()
    return paths


def _store_option(about: str) -> Callable[[Any], Any]:
    return click.option(
        "-s",
        "--store",
        "store_paths",
        type=_StorePath(path_type=Path),
        envvar="LOCALTRACE_STORE",
        default=(Path("localtrace"),),
        multiple=True,
        show_envvar=True,
        show_default=True,
        help=about,
        callback=_read_apart,
        is_eager=True,  # before the filters
    )


_stores_option = _store_option(
    "Folder of a store or bundle, or a pattern such as '/shared/*/localtrace'. Repeat it to read "
    "several as one."
)
signers_option = click.option(
    "--signers",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Read only bundles that are intact and signed by a key in this file of allowed signers, "
    "see ssh-keygen(1).",
)


def store_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Pass `store_paths` to the command, after the check that `--signers` asks for."""

    @functools.wraps(command)
    def checked(*args: Any, signers: Path | None, **kwargs: Any) -> Any:
        if signers is not None:
            _require_signed(kwargs["store_paths"], signers)
        return command(*args, **kwargs)

    decorated: Callable[..., Any] = _stores_option(signers_option(checked))
    return decorated


def _require_signed(paths: Sequence[Path], signers: Path) -> None:
    from localtrace.store.sources import find_stores
    from localtrace.uploader.bundles.check import check_bundle

    for layout in find_stores(paths):
        if not layout.bags:
            raise BundleError(
                f"{layout.root} is a store, and only bundles are signed: name bundles, or leave "
                "out --signers"
            )
        check_bundle(layout.root, signers=signers).require()


one_store_option = _store_option("Folder of the store.")
"""The option of commands that work on a single store, which `one_store` returns."""
all_stores_option = _store_option(
    "Folder of a store, or a pattern such as '/shared/*/localtrace'. Repeat it for several."
)
"""The option of commands that work on one store after the other."""


def one_store(paths: Sequence[Path]) -> Path:
    """Return the only path.

    Raises:
        ConfigError: there are several paths, or the only one is a pattern.
    """
    from localtrace.store.sources import is_pattern

    if len(paths) > 1 or is_pattern(paths[0]):
        named = ", ".join(map(str, paths))
        raise ConfigError(f"{named}: this needs exactly one store; name its folder with --store")
    return paths[0]


format_option = click.option(
    "--format",
    "form",
    type=click.Choice(["table", "json", "csv", "parquet"]),
    default="table",
    show_default=True,
    help="Output format.",
)


def _parsed(context: click.Context, parameter: click.Parameter, texts: tuple[str, ...]) -> Filters:
    from localtrace.read.children import children
    from localtrace.read.filters import Filters

    filters = Filters.parse(texts)
    if filters.has_sql and (apart := children()):
        apart.start()  # while this process opens the store
    return filters


filters_argument = click.argument(
    "filters",
    nargs=-1,
    metavar="[FILTER]...",
    callback=_parsed,
    shell_complete=complete_filter,
)
"""The argument `filters`, passed as `Filters`; its commands have FILTERS_HELP as epilog."""


def parse_params(texts: Iterable[str]) -> dict[str, str]:
    """Read a named query's parameters from texts such as `run=RUN_ID`, `step=3..10` or `step<5`.

    Raises:
        QueryError: a text is not a parameter, or is a comparison of one that is no filter.
    """
    from localtrace.read.counted import FILTERS
    from localtrace.read.terms import refuse_second_sign

    params = {}
    for text in texts:
        match = _PARAM.fullmatch(text)
        if match is None or (match[2] != "=" and match[1] not in FILTERS):
            raise QueryError(f"{text!r} is not a parameter: write key=value, such as run=RUN_ID")
        if match[2] == "=" and match[1] in FILTERS:
            refuse_second_sign(match[1], match[3])
        params[match[1]] = match[3] if match[2] == "=" else match[2] + match[3]
    return params


FILTERS_HELP = """
\b
Filters are written key=value or key!=value. All of them must hold:
  run project experiment group agent data_source fate status op
  sample_index prompt_hash tag labelled_by
              an exact value: status=error; run= also takes a run's name,
              a beginning of its id, and latest for the newest run
  attempt step rollout_n reward tool_errors repetition rating
              a number, a range or a comparison: step=3..10 'reward<0.1';
              reward=not_finite is NaN or infinite, and matches no number
  validate truncated empty duplicate labelled
              true or false
  contains    text inside prompts, outputs, messages, arguments or results
  where       any SQL condition, such as 'where=turn_count > 2'
A comma means "any of" for numbers, status, fate, prompt_hash, tag and
sample_index: step=3,5 sample_index=1,2
"""
